"""A table that facts are looked up in: a Delta table, or one Parquet file, as of a version that stays.

    newest()                 what is there now: a version to record in the plan of an epoch
    missing(version)         why that version cannot be read any more
    rows(version, columns)   its rows, so many at a time

A version of a Delta table is its id with a number; that of a file is its stamp, an etag or size and time of change, so
a file has no version but its newest.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from deltalake.exceptions import DeltaError

from state_ops.arrow import frames
from state_ops.counts import agrees, counted
from state_ops.delta.log_entries import entry_path
from state_ops.errors import InputError, LostError, MissingError, PipelineError, VanishedError, WeirError, first_line
from state_ops.storage.s3 import refuse_secrets
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together
from weir.connectors.delta_table.data_file import rows_of
from weir.connectors.delta_table.table_log import LoggedFile, TableLog, asking

if TYPE_CHECKING:
    from weir.settings.configuration import S3Settings

FAIL, NEWEST = "fail", "newest"
_PARQUET = ".parquet"
_REQUESTS = 8  # at a time


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a table, as an epoch's plan records it.

    Attributes:
        table: The Delta table's id; None: a Parquet file.
        number: Of the Delta table's version.
        digest: Of its entry in the log, by which another history of the table is told; None: it has none.
        stamp: Of a Parquet file.
        columns: Those that the table has; once a plan has chosen, those that are joined.
    """

    table: str | None
    number: int | None
    stamp: str | None
    columns: pa.Schema
    digest: str | None = None

    @property
    def same(self) -> tuple[str | int | None, ...]:
        """The values that tell it from other versions."""
        return self.table, self.number, self.stamp, self.digest

    def __str__(self) -> str:
        return f"version {self.number}" if self.stamp is None else f"the file with the stamp {self.stamp}"

    def to_json(self) -> dict[str, Any]:
        """Return the lookup as a checkpoint records it."""
        place: dict[str, Any] = {"stamp": self.stamp}
        if self.stamp is None:
            place = {"table": self.table, "version": self.number, "digest": self.digest}
        return {**place, "columns": frames.schema_to_json(self.columns)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Version:
        columns = frames.schema_from_json(raw["columns"])
        return cls(raw.get("table"), raw.get("version"), raw.get("stamp"), columns, raw.get("digest"))


class LookupTable:
    """One table, from any thread and in any process.

    Args:
        uri: A Delta table's directory or URI, or one of a file that ends with .parquet.
        where: The stage, for errors.
        s3: How s3:// is reached.
    """

    def __init__(self, uri: str, where: str, s3: S3Settings | None) -> None:
        self.uri, self.where, self._s3 = refuse_secrets(uri, where).rstrip("/"), where, s3
        self._newest: tuple[str | None, Version] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return LookupTable, (self.uri, self.where, self._s3)

    @property
    def is_file(self) -> bool:
        return self.uri.endswith(_PARQUET)

    @cached_property
    def _log(self) -> TableLog:
        return TableLog(self.uri, self.where, self._s3, "weir seek")

    @cached_property
    def _file(self) -> tuple[Storage, str]:
        directory, _, name = self.uri.rpartition("/")
        return Storage(directory or ".", self._s3), name

    def newest(self) -> Version:
        """Return the version that is the newest now.

        Raises:
            InputError: There is no such table, or none that can be read.
            TransientError: Storage does not answer.
        """
        with self._lock, self._asking():
            return self._newest_file() if self.is_file else self._newest_version()

    def _newest_file(self) -> Version:
        storage, name = self._file
        stamp = storage.stamp(name)
        if stamp is None:
            raise InputError("There is no such file.", where=self._place(), next="Correct its path, or write it.")
        if self._newest is None or self._newest[0] != stamp:
            with self._reading():
                columns = storage.parquet_footer(name).schema.to_arrow_schema()
            self._newest = stamp, Version(None, None, stamp, frames.canonical_schema(columns))
        return self._newest[1]

    def _newest_version(self) -> Version:
        log = self._log
        if self._newest is not None:
            stamp, version = self._newest
            assert version.number is not None, "it is a Delta table's"
            if not log.has(version.number + 1) and stamp == self._entry_stamp(version.number):
                return version
        _, number, metadata = log.opened()
        columns = frames.canonical_schema(metadata.columns)
        stamp, digest = self._entry_stamp(number), log.digest(number)
        self._newest = stamp, Version(metadata.id, number, None, columns, digest)
        return self._newest[1]

    def _entry_stamp(self, number: int) -> str | None:
        return self._log.storage.stamp(entry_path(self._log.name, number))

    def missing(self, version: Version) -> str | None:
        """Why a version cannot be read any more, in words; None: it can."""
        with self._lock, self._asking():
            if version.stamp is None:
                return "a file is in the place of the table" if self.is_file else self._missing_files(version)
            storage, name = self._file
            return None if self.is_file and storage.stamp(name) == version.stamp else "the file was replaced"

    def _missing_files(self, version: Version) -> str | None:
        log = self._log

        def is_gone(file: LoggedFile, _: object) -> bool:
            return log.storage.size(f"{log.name}/{file.path}") is None

        try:
            files, *_ = self._opened(version)
        except LostError as error:
            return error.what.rstrip(".")
        gone = sum(together(is_gone, files, at_once=_REQUESTS))
        return (
            f"{gone} of its {counted(len(files), 'file')} {agrees(gone, 'is', 'are')} gone, by a vacuum"
            if gone
            else None
        )

    def rows(self, version: Version, columns: pa.Schema, *, fresh: bool = False) -> Iterator[pa.Table]:
        """Yield the rows of a version, in canonical types, so many at a time.

        Args:
            columns: The columns that are wanted.
            fresh: The version was the newest when this epoch was planned.

        Raises:
            LostError: The version is gone.
            VanishedError: It is gone although it was there when the epoch was planned.
            InputError: A file cannot be read.
        """
        try:
            with self._asking():
                if version.stamp is not None:
                    yield from self._rows_of_file(version, columns)
                    return
                files, kept, partitions = self._opened(version)
                for file in files:
                    values = {name: file.partition.get(name) for name in partitions if name in columns.names}
                    rows = self._rows_in(self._log.storage, f"{self._log.name}/{file.path}", columns, values)
                    yield from without_deleted(rows, kept[file.path]) if file.path in kept else rows
        except LostError as error:
            if not fresh:
                raise
            raise VanishedError(error.what, where=error.where, next="Run again, which takes the newest.") from error

    def _rows_of_file(self, version: Version, columns: pa.Schema) -> Iterator[pa.Table]:
        storage, name = self._file
        if storage.stamp(name) != version.stamp:
            raise self._lost("The file was replaced.")
        yield from self._rows_in(storage, name, columns, {})
        if storage.stamp(name) != version.stamp:
            raise self._lost("The file was replaced while it was read.")

    def _opened(self, version: Version) -> tuple[Sequence[LoggedFile], Mapping[str, pa.BooleanArray], tuple[str, ...]]:
        """Return the files of a version of a Delta table, which rows count of those that have deletion vectors, and the
        columns whose values stand in its log."""
        assert version.number is not None, "it is a Delta table's"
        try:
            metadata = self._log.at(version.number)
            files, kept = self._log.whole(version.number)
        except DeltaError as error:
            first, newest = self._log.versions()
            if first <= version.number <= newest:
                raise  # something else is amiss, which `asking` says
            raise self._lost(f"The log has versions {first} to {newest} alone.", version) from error
        if metadata.id != version.table:
            raise self._lost(f"Another table, {metadata.id}, is in its place.", version)
        if version.digest is not None and self._log.digest(version.number) not in (None, version.digest):
            raise self._lost("The table was brought back from a copy, and has another version of that number.", version)
        return files, kept, metadata.partition_by

    def _rows_in(
        self, storage: Storage, path: str, columns: pa.Schema, partition: Mapping[str, str | None]
    ) -> Iterator[pa.Table]:
        try:
            with self._fetched(storage, path) as local, self._reading(path):
                for rows in rows_of(local, columns, partition):
                    if rows.bad:
                        raise self._unreadable(path, f"row {rows.bad[0].row}: {rows.bad[0].reason}")
                    yield frames.canonical(rows.table)
        except (FileNotFoundError, MissingError):
            raise self._lost(f"The file {path} is gone: it was vacuumed.") from None

    @contextmanager
    def _fetched(self, storage: Storage, path: str) -> Iterator[Path]:
        local = storage.on_disk(path) if self.is_file else self._log.on_disk(path.removeprefix(f"{self._log.name}/"))
        if local is not None:
            yield local
            return
        with storage.fetched(path, Path(tempfile.gettempdir())) as local:
            yield local

    @contextmanager
    def _reading(self, path: str = "") -> Iterator[None]:
        try:
            yield
        except (WeirError, OSError):
            raise
        except Exception as error:  # each library has its own for bytes that are no Parquet
            raise self._unreadable(path, first_line(error)) from error

    def _unreadable(self, path: str, why: str) -> InputError:
        return InputError(
            f"A file of the table cannot be read: {why}.",
            where=f"{self._place()} {path}".rstrip(),
            next="Repair it with what writes the table; nothing of this epoch was applied.",
        )

    def _lost(self, what: str, version: Version | None = None) -> LostError:
        at = f", {version}" if version is not None else ""
        return LostError(
            what,
            where=f"{self._place()}{at}",
            next='Bring it back, or say on_lost="newest", which joins what is there.',
        )

    def _asking(self) -> AbstractContextManager[None]:
        """Raise errors of storage or delta-rs as errors about this table."""
        return asking(self._place())

    def _place(self) -> str:
        return f"{self.where}, {self.uri}"

    def chosen(
        self, version: Version, on: tuple[str, ...], names: tuple[str, ...] | None, before: Version | None
    ) -> Version:
        """Return a version with those of its columns that are joined: the keys first.

        Args:
            on: The keys.
            names: Those that the stage names; None: all that the table had when it was first looked at.
            before: What was joined before.

        Raises:
            InputError: The table lacks one that was joined before.
            PipelineError: The table lacks one that the stage names.
        """
        there = version.columns.names
        if names is None:
            names = tuple(before.columns.names if before is not None else there)
        wanted = [*on, *(name for name in names if name not in on)]
        lacking = [name for name in wanted if name not in there]
        if lacking:
            recorded = before is not None and lacking[0] in before.columns.names
            kind = InputError if recorded else PipelineError
            raise kind(
                f"The table has no column {lacking[0]!r}{', which it had before' if recorded else ''}.",
                where=f"{self._place()}, {version}",
                next=f"Its columns are: {', '.join(there)}. Name those that are wanted: columns=[...].",
            )
        return replace(version, columns=pa.schema([version.columns.field(name) for name in wanted]))


def without_deleted(parts: Iterator[pa.Table], kept: pa.BooleanArray) -> Iterator[pa.Table]:
    """Yield the rows of a file that count. kept: which do, as far as one does not."""
    begin = 0
    for rows in parts:
        flags = kept.slice(begin, rows.num_rows)
        behind = pa.array(np.ones(rows.num_rows - len(flags), bool))
        begin += rows.num_rows
        yield rows.filter(pa.concat_arrays([flags, behind]))


@dataclass(frozen=True, slots=True)
class Pinned:
    """A table as of the version that the rows of an epoch are joined with.

    Attributes:
        fresh: The version was the newest when the running epoch was planned.
        most_bytes: What tables for lookups may take in the memory of a process.
    """

    table: LookupTable
    version: Version
    fresh: bool
    most_bytes: int
