"""Parquet files as they lie in a directory or bucket: footers, rows, and what is wrong with a file, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipelines.runtime.connectors.formats.hive import with_columns
from pipelines.runtime.connectors.formats.old_calendar import shifted, shifts_of
from pipelines.runtime.sources.parquet.footers import enums, unknown
from pipelines.runtime.sources.slices import WHOLE, Share, SourceFile
from state_ops.arrow import frames
from state_ops.errors import InputError, TransientError, VanishedError, first_line

_TAIL = 1 << 16  # bytes; as much as Arrow itself reads at first, and most footers fit


class ParquetFiles:
    """Reads the Parquet files of a directory.

    Everywhere InputError names a file that is gone, damaged or not what was planned, and TransientError one whose
    storage fails.

    Args:
        path: Of the directory, as the file system knows it.
        directory: As people read it.
    """

    def __init__(self, fs: pafs.FileSystem, path: str, directory: str) -> None:
        self._fs, self._path, self._directory = fs, path, directory

    def uri(self, file: SourceFile) -> str:
        return f"{self._directory}/{file.stored}"

    def footer(self, file: SourceFile) -> tuple[pq.FileMetaData, pa.Schema]:
        """A file's footer, and its columns as Arrow stores them; `enums` says which of them are text nevertheless."""
        with self.reading(file):
            end = self._end(file)
        with self._parsing(file):
            try:
                footer = pq.read_metadata(pa.BufferReader(end))
                return footer, footer.schema.to_arrow_schema()
            except pa.ArrowNotImplementedError as error:
                columns = ", ".join(map(repr, unknown(end)))
                raise InputError(
                    f"The input file {file.name} has types that cannot be read: {columns or first_line(error)}.",
                    where=f"{self.uri(file)} ({first_line(error)})",
                    next=f"Cast or drop them in what writes the files, or move the file out of {self._directory}; "
                    "nothing of this epoch was applied.",
                ) from error

    def tables(
        self, file: SourceFile, columns: Sequence[str] | None, rows: int, share: Share = WHOLE
    ) -> Iterator[pa.Table]:
        """A file's columns, or all of them, in canonical types, so many rows at a time. Columns of its directories are
        text.

        Args:
            share: Which of its rows. The bytes of a whole file are in memory at once, of a share those of a row group.
        """
        stored = columns
        if columns is not None and file.partitions:
            stored = [name for name in columns if name not in dict(file.partitions)]
        for table in self._whole(file, stored, rows) if share == WHOLE else self._some(file, stored, rows, share):
            yield with_columns(table, file.partitions, columns) if file.partitions else table

    def _whole(self, file: SourceFile, columns: Sequence[str] | None, rows: int) -> Iterator[pa.Table]:
        # Read first and parse then: Arrow raises OSError for a damaged page as well as for broken storage.
        with self.reading(file), self._open(file) as stream:
            data = stream.read_buffer()
        if data.size != file.stored_bytes:
            raise self.changed(file)
        with self._parsing(file):
            yield from self._canonical(file, pa.BufferReader(data), columns, rows)

    def first_row(self, file: SourceFile, share: Share) -> int:
        """The number that the first row of a share has in its file."""
        footer, _ = self.footer(file)
        before = share.groups(footer.num_row_groups).start
        return sum(footer.row_group(group).num_rows for group in range(before))

    def column(self, file: SourceFile, name: str, rows: int) -> Iterator[pa.ChunkedArray]:
        """One column in its canonical type, so many rows at a time; of the file, no more than that column is read."""
        for table in self._some(file, [name], rows):
            yield table.column(0)

    def _some(
        self, file: SourceFile, columns: Sequence[str] | None, rows: int, share: Share = WHOLE
    ) -> Iterator[pa.Table]:
        """What is asked for and not much more is read of the file, while it is parsed."""
        with self.reading(file), self._open(file) as opened:
            if opened.size() != file.stored_bytes:
                raise self.changed(file)
            stream = _Stream(opened)
            try:
                with self._parsing(file):
                    yield from self._canonical(file, pa.PythonFile(stream, "r"), columns, rows, share)
            except InputError:
                if stream.failed is not None:  # it is the storage's fault
                    raise stream.failed from None
                raise

    def _open(self, file: SourceFile) -> Any:
        return self._fs.open_input_file(f"{self._path}/{file.stored}")

    def _canonical(
        self, file: SourceFile, source: Any, columns: Sequence[str] | None, rows: int, share: Share = WHOLE
    ) -> Iterator[pa.Table]:
        with pq.ParquetFile(source, page_checksum_verification=True, coerce_int96_timestamp_unit="us") as parquet:
            names = parquet.schema_arrow.names if columns is None else list(columns)
            if any(name not in parquet.schema_arrow.names for name in names):
                raise self.changed(file)
            texts = enums(parquet.metadata, parquet.schema_arrow)
            if not parquet.metadata.num_rows:
                yield self._converted(file, parquet.schema_arrow.empty_table().select(names), texts)
            shifts = shifts_of(parquet)
            groups = list(share.groups(parquet.metadata.num_row_groups))
            for batch in parquet.iter_batches(rows, groups, names, use_threads=False):
                table = pa.Table.from_batches([batch]).select(names)
                for at, name in enumerate(names):
                    if name in shifts:
                        table = table.set_column(at, name, shifted(table.column(at), shifts[name]))
                yield self._converted(file, table, texts)

    def _converted(self, file: SourceFile, table: pa.Table, texts: Mapping[str, pa.DataType]) -> pa.Table:
        try:
            return frames.canonical(table.cast(retyped(table.schema, texts)) if texts else table)
        except pa.ArrowInvalid:
            for name in table.column_names:
                column = table.select([name])
                try:
                    frames.canonical(column.cast(retyped(column.schema, texts)) if texts else column)
                except pa.ArrowInvalid as error:
                    raise self.unreadable(
                        file, name, f"holds a value that cannot be read: {first_line(error)}"
                    ) from error
            raise

    def unreadable(self, file: SourceFile, column: str, problem: str) -> InputError:
        """What to raise for a column of which not all can be read."""
        return InputError(
            f"The column {column!r} of the input file {file.name} {problem}.",
            where=self.uri(file),
            next=f"Cast or drop it in what writes the files, or move the file out of {self._directory}; nothing of "
            f"this epoch was applied.",
        )

    def changed(self, file: SourceFile) -> InputError:
        """What to raise if a file is not the one that was planned."""
        return InputError(
            "A file changed while an epoch was reading it.",
            where=self.uri(file),
            next="Files must not change after they arrive: deliver corrections under a new name. The epoch was "
            "declined.",
        )

    @contextmanager
    def reading(self, file: SourceFile) -> Iterator[None]:
        """What a file system raises here is about this file."""
        try:
            yield
        except FileNotFoundError as error:
            raise VanishedError(
                f"The input file {file.name} vanished before it was read.",
                where=self.uri(file),
                next="Put it back, or run again, which plans without it; nothing of this epoch was applied.",
            ) from error
        except OSError as error:
            raise TransientError(
                f"The input file {file.name} cannot be read now: {first_line(error)}",
                where=self.uri(file),
                next="Look at the storage and at who may read the file, and run again; nothing of this epoch was "
                "applied.",
            ) from error

    @contextmanager
    def _parsing(self, file: SourceFile) -> Iterator[None]:
        try:
            yield
        except pa.ArrowMemoryError as error:
            raise TransientError(
                f"There was no memory to read the input file {file.name}: {first_line(error)}",
                where=self.uri(file),
                next="Cut smaller slices (epoch.max_rows, epoch.max_bytes), or let Spark read them "
                "(spark.direct_read_mb: 0).",
            ) from error
        except (pa.ArrowException, OSError) as error:
            problem = "is empty" if file.stored_bytes == 0 else "is not a readable Parquet file"
            raise InputError(
                f"The input file {file.name} {problem}.",
                where=f"{self.uri(file)} ({first_line(error)})",
                next=f"Repair it, or move it out of {self._directory}; nothing of this epoch was applied.",
            ) from error

    def _end(self, file: SourceFile) -> bytes:
        """The file's last bytes, of which a footer is all that Parquet asks for: data, footer, its length (4 bytes),
        magic (4)."""
        with self._open(file) as stream:
            size = stream.size()
            end: bytes = stream.read_at(min(size, _TAIL), max(size - _TAIL, 0))
            needed = int.from_bytes(end[-8:-4], "little") + 8
            if end[-4:] == b"PAR1" and len(end) < needed <= size:
                end = stream.read_at(needed, size - needed)
        return end


def retyped(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """The schema with other types of some columns, of which it need not have all."""
    return pa.schema([field.with_type(types.get(field.name, field.type)) for field in schema])


class _Stream:
    """A file for Arrow to read from, which knows whether its storage failed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.failed: OSError | None = None
        self.seek, self.tell, self.close = stream.seek, stream.tell, stream.close

    def read(self, size: int = -1) -> bytes:
        try:
            data: bytes = self._stream.read(None if size < 0 else size)
        except OSError as error:
            self.failed = error
            raise
        return data

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)
