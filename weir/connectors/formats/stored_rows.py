"""Rows of a table's Parquet files as their writers have meant them, however these store times.

Tables have files of other writers too. Spark may store times in 96 bits, which pyarrow takes for nanoseconds and lets
wrap around at the year 2262, and dates by a calendar that is not today's. Whoever reads a table's file, and above all
whoever writes its rows anew, opens it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.arrow.frames import canonical_type
from state_ops.parquet.footer import check, end_of
from weir.connectors.formats.old_calendar import Shift, leaf_count, shifted, shifts_of

_ROWS = 1 << 16
_OURS = b"weir."  # with which all begins that Weir notes in a file's metadata


@dataclass(frozen=True)
class StoredRows:
    """An open file.

    Attributes:
        footer: Its footer.
        schema: Its columns as `batches` hands them out. The metadata are Weir's alone: what other writers say there of
            their calendar is not true of rows that have been read.
    """

    footer: pq.FileMetaData
    schema: pa.Schema
    _parquet: pq.ParquetFile

    @cached_property
    def _shifts(self) -> dict[str, list[Shift | None]]:
        return shifts_of(self._parquet)

    def batches(self, rows: int = _ROWS, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows, so many at a time.

        Args:
            columns: Those of them that are there; None: all.
        """
        names = [name for name in self.schema.names if columns is None or name in columns]
        schema = pa.schema([self.schema.field(name) for name in names])
        for batch in self._parquet.iter_batches(rows, columns=names, use_threads=False):
            table = pa.Table.from_batches([batch]).select(names).replace_schema_metadata(None)
            for at, name in enumerate(names):
                if name in self._shifts:
                    table = table.set_column(at, name, shifted(table.column(at), self._shifts[name]))
            yield table if table.schema.equals(schema) else table.cast(schema)

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all rows. The arguments are those of `batches`."""
        names = [name for name in self.schema.names if columns is None or name in columns]
        empty = pa.schema([self.schema.field(name) for name in names]).empty_table()
        return pa.concat_tables([empty, *self.batches(_ROWS, names)])


@contextmanager
def stored_rows(source: Any) -> Iterator[StoredRows]:
    """Open a file.

    Args:
        source: A path, or what pyarrow reads from.

    Raises:
        pa.ArrowException, OSError: It is none, or damaged.
    """
    with pa.OSFile(str(source)) if isinstance(source, str | Path) else source as file:
        check(end_of(file))
        parquet = pq.ParquetFile(file, coerce_int96_timestamp_unit="us")
        metadata = parquet.metadata.metadata or {}
        ours = {name: value for name, value in metadata.items() if name.startswith(_OURS)}
        yield StoredRows(parquet.metadata, pa.schema(_columns(parquet), ours or None), parquet)


def _columns(parquet: pq.ParquetFile) -> Iterator[pa.Field]:
    """Yield a file's columns, those of times in 96 bits as moments: these are in UTC, which only Spark knows."""
    at = 0
    for field in parquet.schema_arrow:
        is_moment = pa.types.is_timestamp(field.type) and parquet.schema.column(at).physical_type == "INT96"
        if is_moment:
            field = field.with_type(pa.timestamp("us", "UTC"))
        elif "_view" in str(field.type):  # as delta-rs leaves them, and Arrow filters none
            field = field.with_type(canonical_type(field.type))
        yield field
        at += leaf_count(field.type)
