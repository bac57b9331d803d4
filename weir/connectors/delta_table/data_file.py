"""The rows of one data file of a Delta table, in the columns that the table has at a version."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from weir.connectors.parquet.rows import DecodedRows, ParquetRows

_ROWS = 1 << 16
_IN_MEMORY = 64 << 20  # bytes, up to which a file is read as a whole, so that its pages are looked at before all else
_ZONE = re.compile(r".*(?:[zZ]|[+-][0-9]{2}:?[0-9]{2})")


def rows_of(path: Path, columns: pa.Schema, partition: Mapping[str, str | None]) -> Iterator[DecodedRows]:
    """Yield the rows, so many at a time or fewer, with those that cannot be handed on, and once without a row if there
    is none. A column that the file lacks is null.

    Args:
        partition: The columns that have one value, as the log has it; a column of the file does not count.

    Raises:
        TooMuchError: It stands for more than its size can be worth.
        ValueError, pa.ArrowException, OSError: It is no Parquet file, or a value of its partition is none of its
            column.
    """
    values = {name: value_of(text, columns.field(name).type) for name, text in partition.items()}
    with pa.OSFile(str(path)) as file:
        source = pa.BufferReader(file.read_buffer()) if file.size() <= _IN_MEMORY else file
        opened = ParquetRows.opened(source, file.size())
        with opened.parquet as parquet:
            there = parquet.schema_arrow.names
            stored = [name for name in columns.names if name not in values and name in there]
            if twice := [name for name in stored if there.count(name) > 1]:
                raise pa.ArrowInvalid(f"it has two columns {twice[0]!r}")

            def convert(table: pa.Table) -> pa.Table:
                return pa.table([_column(field, table, values) for field in columns], schema=columns)

            yield from opened.read(stored or there[:1], convert, _ROWS)


def _column(field: pa.Field, rows: pa.Table, values: Mapping[str, pa.Scalar]) -> pa.Array | pa.ChunkedArray:
    if field.name in values:
        return pa.repeat(values[field.name], rows.num_rows)
    if field.name not in rows.column_names:
        return pa.nulls(rows.num_rows, field.type)
    return rows.column(field.name).cast(field.type)


def value_of(text: str | None, type: pa.DataType) -> pa.Scalar:
    """Return a value of a partition from its text in the log, where an empty one is null, and a time without a zone is
    in UTC."""
    if text is None or text == "":
        return pa.scalar(None, type)
    if pa.types.is_binary(type):
        return pa.scalar(text.encode(), type)
    if pa.types.is_floating(type):
        return pa.scalar(float(text), type)
    if pa.types.is_timestamp(type) and type.tz is not None and not _ZONE.fullmatch(text):
        text += "Z"
    return pa.scalar(text).cast(type)
