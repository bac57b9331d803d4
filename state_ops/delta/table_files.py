"""The Parquet files of a table of the registry, as rows.

They are read file by file with pyarrow, without its threads: a process that ends right after a threaded read is
sometimes aborted by Arrow (apache/arrow#34314), and a command that succeeded would exit with 134.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.delta.log_entries import DataFile
from state_ops.errors import DamageError, first_line
from state_ops.storage.storage import Storage


class TableFiles:
    """Writes and reads a table's files; which of them count is what its log says.

    Args:
        storage: The pipeline's storage.
        path: The table's directory in it.
        schema: The table's columns.
        partition_by: Columns that do not stand in files.
        optional: Columns that an older release did not write: rows without them have nulls there.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        schema: pa.Schema,
        partition_by: Sequence[str] = (),
        optional: Collection[str] = (),
    ) -> None:
        self.storage, self.path, self.schema = storage, path, schema
        self._partition_by, self._optional = tuple(partition_by), frozenset(optional)

    def write_table(
        self,
        table: pa.Table,
        path: str,
        partition: tuple[tuple[str, str], ...] = (),
        bounds: Sequence[tuple[str, int]] = (),
    ) -> DataFile:
        """Write a table of `file_schema` as one Parquet file inside the table's directory; it counts once committed."""
        data = pa.BufferOutputStream()
        pq.write_table(
            table, data, compression="zstd", compression_level=1, write_statistics=False, write_page_checksum=True
        )
        content = data.getvalue().to_pybytes()
        self.storage.put_bytes(f"{self.path}/{path}", content)
        return DataFile(path, len(content), table.num_rows, partition, tuple(bounds))

    @property
    def file_schema(self) -> pa.Schema:
        """The columns that stand in the table's files: all but those of the partition."""
        return pa.schema([field for field in self.schema if field.name not in self._partition_by])

    def read_rows(self, files: Sequence[DataFile]) -> list[dict[str, Any]]:
        """Return the rows of some of the table's files, partition values left out."""
        return _rows(self.read_table(files))

    def read_table(self, files: Sequence[DataFile]) -> pa.Table:
        """Return the rows of some of the table's files, in the columns of `file_schema`."""
        return pa.concat_tables(
            [pa.Table.from_batches([], self.file_schema), *(self._read_file(file) for file in files)]
        )

    def _read_file(self, file: DataFile) -> pa.Table:
        data = self.storage.read_bytes(f"{self.path}/{file.path}")
        if data is None:
            raise FileNotFoundError(self.storage.full(f"{self.path}/{file.path}"))
        try:
            # `read_table` would make a dataset of it first, which takes longer than the rest.
            with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as opened:
                table = opened.read(use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DamageError(
                f"A file of the registry is damaged: {first_line(error)}",
                where=self.storage.full(f"{self.path}/{file.path}"),
                next="Nothing was deleted. Bring the file back from a backup of the bucket.",
            ) from error
        for field in self.file_schema:
            if field.name not in table.column_names:
                if field.name not in self._optional:
                    raise DamageError(
                        f"A file of the registry has no column {field.name}.",
                        where=self.storage.full(f"{self.path}/{file.path}"),
                        next="Weir never writes such a file: bring the table back from a backup of the bucket.",
                    )
                table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        return table.select(self.file_schema.names).cast(self.file_schema)


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return a table's rows as Python values. Times get their zone, which is UTC, here: for a time with a zone pyarrow
    imports pandas, which takes a third of a second."""
    zoned = [field.name for field in table.schema if pa.types.is_timestamp(field.type) and field.type.tz]
    without_zones = [
        field.with_type(pa.timestamp(field.type.unit)) if field.name in zoned else field for field in table.schema
    ]
    rows: list[dict[str, Any]] = table.cast(pa.schema(without_zones)).to_pylist()
    for row in rows:
        row.update((name, row[name].replace(tzinfo=UTC)) for name in zoned if row[name] is not None)
    return rows
