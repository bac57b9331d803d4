"""The engine's view of a source: slices of rows that lie in Parquet files.

`files` reads a directory, `parts` a connector. Everything that epochs, gates, branches and commands ask is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.counts import counted
from state_ops.errors import ConfigurationError, InputError, PipelineError
from state_ops.logs import Logger
from weir.connectors.parquet.rows import NO_ROWS
from weir.definition.source import Lag, Position, Source, changed_kind
from weir.sources.file_check import greatest
from weir.sources.landed_files import LandedFiles
from weir.sources.positions import Arrivals
from weir.sources.slices import WHOLE, BadRow, LeftOut, PartitionTime, Share, Slice, SourceFile
from weir.sources.source_directory import LandingDirectory

if TYPE_CHECKING:
    from weir.settings.configuration import EpochSettings

log = Logger("weir.source")

_PICKED_FROM = 1 << 16  # rows at a time


class SourceReader(ABC):
    """One source, opened.

    Args:
        landed: Where its rows are written that are no Parquet files of their own.

    Attributes:
        unit: What is counted of it, as `Arrivals` says.
        piece: What its slices consist of.
    """

    unit = piece = "file"

    def __init__(self, source: Source, landed: LandedFiles | None) -> None:
        self.source, self.landed = source, landed
        self._warned: set[tuple[Any, ...]] = set()

    # -- how far it is read

    def _checked(self, position: Position | None) -> Position | None:
        """Return a position that this source has recorded. Raises PipelineError for one of another kind of source."""
        changed = changed_kind(self.source, position)
        if changed is not None:
            raise PipelineError(changed[0], where=f"source {self.source.name}", next=changed[1])
        return position

    @property
    @abstractmethod
    def location(self) -> str:
        """The location of the source, as people know it."""

    @abstractmethod
    def exists(self) -> bool:
        """Return whether there is anything at the source's location."""

    @abstractmethod
    def look(self, position: Position | None) -> Arrivals:
        """Return the arrivals behind a position. Nothing is read, and no problem raised."""

    @abstractmethod
    def check(self, position: Position | None) -> Arrivals:
        """Return the arrivals as `look` does. Raise InputError unless reading may go on from the position."""

    @abstractmethod
    def lag(self, position: Position | None) -> Lag:
        """Return the amount that waits behind a position."""

    def say_again(self, arrived: Arrivals) -> None:  # noqa: B027 - most sources deliver nothing again
        """Warn of what was delivered again and is not read, once for each delivery."""

    @abstractmethod
    def plan(
        self, position: Position | None, limits: EpochSettings, expected: pa.Schema | None, now: int | None = None
    ) -> Slice:
        """Return the next slice behind a position, whose rows are Parquet files from then on.

        Args:
            limits: How much it may hold.
            expected: The columns of what was read before; without them the first file sets them.
            now: The processing time in microseconds, by which partitions are idle and event times too far ahead; None:
                by the clock.

        Raises:
            InputError: What is wrong, by the file's name.
            TransientError: The source or the storage fails in a way that may pass.
        """

    @abstractmethod
    def preview(self, position: Position | None, limits: EpochSettings, expected: pa.Schema | None) -> Slice:
        """Plan a slice as `plan` does, to look at its columns only. Nothing of it is kept."""

    @abstractmethod
    def plan_again(
        self, recorded: Mapping[str, Any], expected: pa.Schema | None, position: Position | None = None
    ) -> Slice:
        """Return the slice of an epoch that was, as `Slice.to_dict` recorded it.

        Args:
            position: Where the source stood before that, by which an archive has it.

        Raises:
            InputError: It cannot be read as it was.
        """

    @abstractmethod
    def advance(self, position: Position | None, planned: Slice) -> dict[str, Any]:
        """Return the position behind a slice that was planned behind `position`."""

    @abstractmethod
    def verify(self, planned: Slice) -> None:
        """Raise InputError, before a commit, if something of the slice is gone or is not what was read."""

    @abstractmethod
    def again(self, then: Position | None, now: Position | None) -> tuple[list[SourceFile], list[str]]:
        """Return the files between two positions that can be read again as they were, and in words the others."""

    def beginning(self, position: Position | None) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the position before everything that was read up to another one; None: nothing has been read.

        Raises:
            WeirError: It is not known.
        """
        return None

    @abstractmethod
    def changed(self, then: Position | None, now: Position | None) -> dict[str, SourceFile | None]:
        """Return by name the files between two positions that are not what was read; None: the file is gone."""

    @abstractmethod
    def beyond(self, position: Position | None, other: Position | None) -> str | None:
        """Return the name of something that `other` has read and `position` has not; None: there is nothing."""

    def as_read_by(
        self,
        position: dict[str, Any],
        other: Position | None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Return a position that remembers what is there as `other` has seen it, in a branch that read corrected
        input."""
        return position

    @abstractmethod
    def described(self, position: Position) -> dict[str, Any]:
        """Return a position for people, by title."""

    def sought(self, position: Position | None, to: str | datetime | Position) -> dict[str, Any]:  # noqa: ARG002
        """Return the position from which a seek lets the source be read on. Raises ConfigurationError."""
        raise ConfigurationError(
            f"The source {self.source.name} is a directory, whose files are read by their names, each once.",
            where=self.location,
            next="Deliver files again under new names; or rewind, or replay a range: docs/how-to/backfills.md.",
        )

    def release(self, planned: Slice) -> None:
        """Release what was written for this slice alone: its epoch is committed."""
        self.discard(planned)

    def discard(self, planned: Slice, again: Slice | None = None) -> None:
        """Delete what was written for this slice: no checkpoint names it.

        Args:
            again: A slice that is read instead. What it names stays.
        """
        if self.landed is not None:
            kept = self._written(again) if again is not None else set()
            for path in sorted(self._written(planned) - kept):
                self.landed.storage.delete(path)

    def _written(self, planned: Slice) -> set[str]:
        """Paths of the files that were written for a slice."""
        assert self.landed is not None, "else nothing is written"
        return {self.landed.path(file.landed) for file in planned.files if file.landed is not None}

    def committed(self, position: Position) -> None:  # noqa: B027 - most sources need not be told
        """Take note that a checkpoint with this position is committed."""

    def close(self) -> None:  # noqa: B027 - files need no connection
        """Give back connections. Who asks for something later opens them anew."""

    # -- bad input

    def sets_aside(self, file: SourceFile) -> bool:  # noqa: ARG002
        """Return whether a file that cannot be read is left out as a whole."""
        return False

    def without_bad(
        self,
        planned: Slice,
        file: SourceFile,
        error: InputError,
        expected: pa.Schema | None,
        read: Collection[str] | None,
    ) -> Slice:
        """Return the slice without its bad rows, or its bad file, which the source sets aside.

        Bad rows have values that cannot be handed on; a bad file cannot be read.

        Args:
            file: The file that was found to be bad.
            expected: As in `plan`.
            read: The columns that stages look at. None: all.
        """
        raise NotImplementedError(f"{type(self).__name__} sets nothing aside")

    def are_as_read(self, files: Mapping[str, Sequence[int]]) -> bool:  # noqa: ARG002
        """Return whether files that an epoch could not read are as the epoch saw them.

        Args:
            files: By name, size in bytes and time of change in ns since 1970.
        """
        return True

    def blamed(self, file: SourceFile) -> dict[str, dict[str, tuple[int, int]]]:
        """Return the `files` of an error whose cause is this file alone."""
        return {self.source.name: {file.name: (file.size, file.mtime_ns)}}

    @contextmanager
    def _about(self, file: SourceFile) -> Iterator[None]:
        """Whatever is raised for input is about this file, as it was when it was listed."""
        try:
            yield
        except InputError as error:
            error.files = self.blamed(file)
            raise

    def _first_time(self, *what: Any) -> bool:
        new = what not in self._warned
        self._warned.add(what)
        return new

    # -- rows

    def directory_of(self, file: SourceFile) -> LandingDirectory:
        """Return the directory of the Parquet file with the rows."""
        assert self.landed is not None and file.landed is not None, "it was landed"
        return self.landed.directory

    @abstractmethod
    def uri(self, file: SourceFile) -> str:
        """Return the file's place as people know it."""

    def title(self, file: SourceFile) -> str:
        """Return the file's name as people know it, beside its source."""
        return file.name

    def places(self, file: SourceFile) -> Sequence[str | None]:  # noqa: ARG002  of files, name and number say it
        """Return the place of each row at the source. Empty: the file's name and the rows' numbers say it."""
        return ()

    def open_in_workers(self, files: Sequence[SourceFile]) -> bool:
        """Return whether files can be opened in other processes as in this one."""
        return all(self.directory_of(file).opens_in_workers(len(files)) for file in files[:1])

    def batches(
        self, file: SourceFile, columns: pa.Schema, rows: int, share: Share = WHOLE, without: np.ndarray = NO_ROWS
    ) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """Yield one file's columns, so many rows at a time or fewer, each with its number in the file (int64, from 0).

        Args:
            columns: As the slice was planned.
            share: Which of its rows. The bytes of a whole file are in memory at once, of a share those of a row group.
            without: Numbers of rows that are left out, whatever is wrong with them.

        Raises:
            InputError: It is gone, damaged or not what was planned, or a value of a row cannot be handed on.
            TransientError: The storage fails.
        """
        there = [name for name in columns.names if name not in file.lacks]
        with self._about(file):
            for part in self.directory_of(file).parquet.fit(file, there, rows, share, without):
                yield part.numbers, frames.aligned(part.table, columns)

    def without(self, planned: Slice, more: Sequence[LeftOut]) -> Slice:
        """Read event times, and return the slice without some more rows, whose event times must close nothing."""
        planned, column = replace(planned, left_out=(*planned.left_out, *more)), self.source.event_time
        if (planned.newest is None and not planned.seen) or column is None:
            return planned
        of_slice = planned.without
        by_partition: dict[str, int] = {}
        for file in planned.files:
            moments = self.directory_of(file).parquet.column(
                file, column, _PICKED_FROM, of_slice.get(file.name, NO_ROWS)
            )
            with self._about(file):
                last = max((newest for part in moments if (newest := greatest(part)) is not None), default=None)
            if last is not None:
                partition = file.part.partition if file.part is not None else ""
                by_partition[partition] = max(last, by_partition.get(partition, last))
        return self._with_times(planned, by_partition)

    def _with_times(self, planned: Slice, newest: Mapping[str, int]) -> Slice:
        """Return the slice with its newest event time, from that of its rows by partition."""
        return replace(planned, newest=max(newest.values(), default=None))


def times_to_dict(partitions: Mapping[str, PartitionTime]) -> dict[str, Any]:
    """Return the times as JSON has them."""
    return {name: [time.newest, time.quiet_since] for name, time in partitions.items()}


def times_from_dict(raw: Mapping[str, Sequence[int | None]]) -> dict[str, PartitionTime]:
    """Return the inverse of `times_to_dict`."""
    return {name: PartitionTime(*times) for name, times in raw.items()}


def accepted(reader: SourceReader, bad_rows: Sequence[BadRow], file: SourceFile) -> tuple[BadRow, ...]:
    """Return the rows that cannot be decoded, if the source sets them aside. Raises InputError."""
    if bad_rows and reader.source.on_bad != "quarantine":
        first = bad_rows[0]
        raise InputError(
            f"{counted(len(bad_rows), 'row')} of {reader.title(file)} cannot be decoded, the "
            f"first at {first.row}: {first.reason}",
            where=reader.uri(file),
            next='Repair it, or let the source set such rows aside with on_bad="quarantine"; nothing of this '
            "epoch was applied.",
        )
    return tuple(bad_rows)


def picked(reader: SourceReader, file: SourceFile, columns: pa.Schema, numbers: np.ndarray) -> pa.Table:
    """Return some rows of a file, by ascending numbers.

    A value that cannot be handed on is null. Raises as `batches`.
    """
    there = [name for name in columns.names if name not in file.lacks]
    found, tables = [NO_ROWS], [columns.empty_table()]
    with reader._about(file):
        for part in reader.directory_of(file).parquet.rows(file, there, _PICKED_FROM):
            bad = np.array([value.row for value in part.bad], np.int64)
            for table, own in ((part.table, part.numbers), (part.aside, bad)):
                is_wanted = np.isin(own, numbers)
                if is_wanted.any():
                    found.append(own[is_wanted])
                    tables.append(frames.aligned(table.filter(pa.array(is_wanted)), columns))
    order = np.argsort(np.concatenate(found), kind="stable")
    return pa.concat_tables(tables).take(pa.array(order))
