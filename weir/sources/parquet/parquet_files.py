"""Parquet files as they lie in a directory or bucket: footers, rows, and what is wrong with a file, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from state_ops.arrow import frames
from state_ops.errors import InputError, TransientError, VanishedError, WeirError, first_line
from weir.connectors.formats import looks
from weir.connectors.formats.hive import with_columns
from weir.connectors.parquet.bounds import TooMuchError, most
from weir.connectors.parquet.footers import enums, unknown
from weir.connectors.parquet.rows import NO_ROWS, BadValue, DecodedRows, ParquetRows
from weir.definition.source import PARQUET
from weir.sources.slices import WHOLE, Share, SourceFile

_ENCRYPTED, _IS_ENCRYPTED = b"PARE", "is encrypted, and Weir has no keys for Parquet"
_DECRYPTION = re.compile(r"decrypt|encrypted", re.IGNORECASE)
_ASKED = re.compile(r"size (\d+)")
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
        """Return a file's footer, and its columns as Arrow stores them; `enums` says which of them are text
        nevertheless."""
        with self.reading(file):
            end = self._end(file)
        with self._parsing(file):
            if end[-4:] == _ENCRYPTED:
                raise self._bad(file, _IS_ENCRYPTED)
            try:
                parquet = ParquetRows.opened(pa.BufferReader(end), file.stored_bytes).parquet
            except pa.ArrowNotImplementedError as error:
                columns = ", ".join(map(repr, unknown(end)))
                raise InputError(
                    f"The input file {file.name} has types that cannot be read: {columns or first_line(error)}.",
                    where=f"{self.uri(file)} ({first_line(error)})",
                    next=f"Cast or drop them in what writes the files, or move the file out of {self._directory}; "
                    "nothing of this epoch was applied.",
                ) from error
            return parquet.metadata, parquet.schema_arrow

    def rows(
        self,
        file: SourceFile,
        columns: Sequence[str] | None,
        rows: int,
        share: Share = WHOLE,
        without: np.ndarray = NO_ROWS,
    ) -> Iterator[DecodedRows]:
        """Yield a file's columns, or all of them, in canonical types, so many rows at a time or fewer, with the rows
        that cannot be handed on. Columns of its directories are text.

        Args:
            share: Which of its rows. The bytes of a whole file are in memory at once, of a share those of a row group.
            without: Numbers of rows that are left out before anything looks at their values.
        """
        stored = columns
        if columns is not None and file.partitions:
            stored = [name for name in columns if name not in dict(file.partitions)]
        read = self._whole(file, stored, rows, without)
        if share != WHOLE:
            read = self._some(file, stored, rows, share, without)
        for part in read:
            if file.partitions:
                table, aside = (with_columns(of, file.partitions, columns) for of in (part.table, part.aside))
                part = replace(part, table=table, aside=aside)
            yield part

    def fit(
        self,
        file: SourceFile,
        columns: Sequence[str] | None,
        rows: int,
        share: Share = WHOLE,
        without: np.ndarray = NO_ROWS,
    ) -> Iterator[DecodedRows]:
        """Yield what `rows` yields. Raises InputError for the first row that cannot be handed on."""
        yield from self._checked(file, self.rows(file, columns, rows, share, without))

    def column(
        self, file: SourceFile, name: str, rows: int, without: np.ndarray = NO_ROWS
    ) -> Iterator[pa.ChunkedArray]:
        """Yield one column in its canonical type, so many rows at a time.

        Of the file, no more than that column is read. Raises as `fit`.
        """
        for part in self._checked(file, self._some(file, [name], rows, WHOLE, without)):
            yield part.table.column(0)

    def _checked(self, file: SourceFile, parts: Iterator[DecodedRows]) -> Iterator[DecodedRows]:
        for part in parts:
            if part.bad:
                raise self.unfit(file, part.bad[0])
            yield part

    def _whole(
        self, file: SourceFile, columns: Sequence[str] | None, rows: int, without: np.ndarray
    ) -> Iterator[DecodedRows]:
        # Read first and parse then: Arrow raises OSError for a damaged page as well as for broken storage.
        with self.reading(file), self._open(file) as stream:
            data = stream.read_buffer()
        if data.size != file.stored_bytes:
            raise self.changed(file)
        with self._parsing(file):
            yield from self._decoded(file, pa.BufferReader(data), columns, rows, WHOLE, without)

    def _some(
        self, file: SourceFile, columns: Sequence[str] | None, rows: int, share: Share, without: np.ndarray
    ) -> Iterator[DecodedRows]:
        """Yield the rows asked for, while little more of the file is read and parsed."""
        with self.reading(file), self._open(file) as opened:
            if opened.size() != file.stored_bytes:
                raise self.changed(file)
            stream = _Stream(opened)
            try:
                with self._parsing(file):
                    yield from self._decoded(file, pa.PythonFile(stream, "r"), columns, rows, share, without)
            except InputError:
                if stream.failed is not None:  # it is the storage's fault
                    raise stream.failed from None
                raise

    def refuse_link(self, file: SourceFile, name: str) -> None:
        """Raise InputError for a file that is a link out of the directory, or lies behind one.

        Otherwise anybody who may write there could have any file of this host read.

        Args:
            name: The file's path below the directory.
        """
        if not isinstance(self._fs, pafs.LocalFileSystem):
            return
        directory = Path(self._path).resolve()
        if (directory / name).is_fifo():  # to open it would wait for whoever writes into it
            raise self.changed(file)
        if not (directory / name).resolve().is_relative_to(directory):
            raise InputError(
                f"The input file {file.name} is a link out of its directory, which is not followed.",
                where=self.uri(file),
                next=f"Put the file itself there, name the directory that the link leads to as the source's, or move "
                f"the link out of {self._directory}; nothing of this epoch was applied.",
            )

    def _open(self, file: SourceFile) -> Any:
        self.refuse_link(file, file.stored)
        return self._fs.open_input_file(f"{self._path}/{file.stored}")

    def _decoded(
        self, file: SourceFile, source: Any, columns: Sequence[str] | None, rows: int, share: Share, without: np.ndarray
    ) -> Iterator[DecodedRows]:
        opened = ParquetRows.opened(source, file.stored_bytes)
        with opened.parquet as parquet:
            there = parquet.schema_arrow.names
            names = there if columns is None else list(columns)
            if not set(names).issubset(there):
                raise self.changed(file)
            texts = enums(parquet.metadata, parquet.schema_arrow)

            def convert(table: pa.Table) -> pa.Table:
                return frames.canonical(table.cast(retyped(table.schema, texts)) if texts else table)

            yield from opened.read(names, convert, rows, share.groups(parquet.metadata.num_row_groups), without)

    def unfit(self, file: SourceFile, bad: BadValue) -> InputError:
        """Return the error to raise for a row that cannot be handed on."""
        return InputError(
            f"The column {bad.column!r} of the input file {file.name} has a value in row {bad.row} that cannot be "
            f"handed on: it {bad.problem}.",
            where=f"{self.uri(file)}, row {bad.row}",
            next=f"Correct it in what writes the files, move the file out of {self._directory}, or set such rows aside "
            'with on_bad="quarantine"; nothing of this epoch was applied.',
        )

    def unreadable(self, file: SourceFile, column: str, problem: str) -> InputError:
        """Return the error to raise for a column that cannot be read as a whole."""
        return InputError(
            f"The column {column!r} of the input file {file.name} {problem}.",
            where=self.uri(file),
            next=f"Cast or drop it in what writes the files, or move the file out of {self._directory}; nothing of "
            f"this epoch was applied.",
        )

    def changed(self, file: SourceFile) -> InputError:
        """Return the error to raise for a file that is not the one that was planned."""
        return InputError(
            "A file changed while an epoch was reading it.",
            where=self.uri(file),
            next="Files must not change after they arrive: deliver corrections under a new name. The epoch was "
            "declined.",
        )

    @contextmanager
    def reading(self, file: SourceFile) -> Iterator[None]:
        """Raise an error of the file system as an error about this file."""
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
            asked = _ASKED.search(str(error))
            if asked is not None and int(asked[1]) > most(file.stored_bytes):
                raise self._bad(file, f"asks for {int(asked[1]):,} bytes of memory at once") from error
            raise TransientError(
                f"There was no memory to read the input file {file.name}: {first_line(error)}",
                where=self.uri(file),
                next="Give the process more memory, or let it do less at once (spark.parallelism, epoch.max_files).",
            ) from error
        except WeirError:
            raise
        except TooMuchError as error:
            raise self._bad(file, str(error)) from error
        except Exception as error:  # each library has its own for bytes that are no Parquet
            problem = f"is not a readable Parquet file: {first_line(error).rstrip('.')}"
            if file.stored_bytes == 0:
                problem = "is empty"
            elif _DECRYPTION.search(str(error)):
                problem = _IS_ENCRYPTED
            elif isinstance(error, pa.ArrowNotImplementedError):
                problem = f"has what cannot be read: {first_line(error).rstrip('.')}"
            if seems := self.other_format(file, PARQUET):
                raise self.of_other_format(file, "Parquet", seems) from error
            raise self._bad(file, problem) from error

    def _bad(self, file: SourceFile, problem: str) -> InputError:
        return InputError(
            f"The input file {file.name} {problem}.",
            where=self.uri(file),
            next=f"Repair it, or move it out of {self._directory}; nothing of this epoch was applied.",
        )

    def other_format(self, file: SourceFile, format: str) -> tuple[str, str] | None:
        """Return what an unreadable file looks like, as `looks.other` says it; None if it cannot be opened."""
        try:
            with self.reading(file), self._open(file) as stream:
                head: bytes = stream.read_at(min(looks.HEAD, stream.size()), 0)
        except InputError:
            return None
        return looks.other(format, file.stored, head)

    def of_other_format(self, file: SourceFile, format: str, seems: tuple[str, str]) -> InputError:
        """Return the error to raise for a file that cannot be read as the source's format and looks like another."""
        looks_like, step = seems
        return InputError(
            f"The input file {file.name} cannot be read as {format}: it looks like {looks_like}.",
            where=self.uri(file),
            next=f"{step}; else move it out of {self._directory}. Nothing of this epoch was applied.",
        )

    def _end(self, file: SourceFile) -> bytes:
        """Return the file's last bytes, of which a footer is all that Parquet asks for: data, footer, its length (4
        bytes), magic (4)."""
        with self._open(file) as stream:
            size = stream.size()
            end: bytes = stream.read_at(min(size, _TAIL), max(size - _TAIL, 0))
            needed = int.from_bytes(end[-8:-4], "little") + 8
            if end[-4:] == b"PAR1" and len(end) < needed <= size:
                end = stream.read_at(needed, size - needed)
        return end


def retyped(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the schema with other types of some columns, of which it need not have all."""
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
