"""The rows of one data file of a Delta table, in the columns that the table has at a version."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.runtime.connectors.formats.old_calendar import shifted, shifts_of

_ROWS = 1 << 16
_ZONE = re.compile(r".*(?:[zZ]|[+-][0-9]{2}:?[0-9]{2})")


def tables(path: Path, columns: pa.Schema, partition: Mapping[str, str | None]) -> Iterator[pa.Table]:
    """The rows, so many at a time, and no row if there is none. A column that the file lacks is null.

    Args:
        partition: The columns that have one value, as the log has it; a column of the file does not count.

    Raises:
        pa.ArrowException: It is no Parquet file, or a value does not fit its column.
    """
    values = {name: value_of(text, columns.field(name).type) for name, text in partition.items()}
    with pa.OSFile(str(path)) as opened, pq.ParquetFile(opened, coerce_int96_timestamp_unit="us") as parquet:
        stored = [name for name in columns.names if name not in values and name in parquet.schema_arrow.names]
        if not parquet.metadata.num_rows:
            yield columns.empty_table()
        shifts = shifts_of(parquet)
        for batch in parquet.iter_batches(_ROWS, columns=stored, use_threads=False):
            rows = pa.Table.from_batches([batch])
            for at, name in enumerate(rows.column_names):
                if name in shifts:
                    rows = rows.set_column(at, name, shifted(rows.column(at), shifts[name]))
            yield pa.table([_column(field, rows, values) for field in columns], schema=columns)


def _column(field: pa.Field, rows: pa.Table, values: Mapping[str, pa.Scalar]) -> pa.Array | pa.ChunkedArray:
    if field.name in values:
        return pa.repeat(values[field.name], rows.num_rows)
    if field.name not in rows.column_names:
        return pa.nulls(rows.num_rows, field.type)
    return rows.column(field.name).cast(field.type)


def value_of(text: str | None, type: pa.DataType) -> pa.Scalar:
    """A value of a partition from its text in the log, where an empty one is null, and a time without a zone is in
    UTC."""
    if text is None or text == "":
        return pa.scalar(None, type)
    if pa.types.is_binary(type):
        return pa.scalar(text.encode(), type)
    if pa.types.is_floating(type):
        return pa.scalar(float(text), type)
    if pa.types.is_timestamp(type) and type.tz is not None and not _ZONE.fullmatch(text):
        text += "Z"
    return pa.scalar(text).cast(type)
