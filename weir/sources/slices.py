"""The input of one epoch: for each source the planned files, and the rows that are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from state_ops.coordination.requests import Request
from state_ops.records.triggers import Trigger
from weir.connectors.formats.hive import Partition
from weir.connectors.lookups.lookup_table import Version
from weir.connectors.parquet.rows import NO_ROWS
from weir.definition.source import Lost, Part, Position


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file as the slice saw it.

    Attributes:
        name: Below its source's directory; with slashes, if the source has nested directories.
        size: In bytes.
        mtime_ns: Time of change, in nanoseconds since 1970.
        rows: By its footer.
        nanos: Timestamp columns that it stores in nanoseconds.
        by_arrow: It stores something that Spark cannot read, or reads as other values: unsigned numbers of 64 bits,
            nested nanoseconds, times of day and what Arrow alone has, as `footers.by_arrow` tells.
        lacks: Columns of the slice that it has not, which are null in its rows.
        landed: Where its rows were written as Parquet, below the pipeline's `landed/<source>/`. None: it is Parquet.
        landed_bytes: The size of that file.
        part: What a connector reads again for it. None: it is a file of a directory.
        partitions: Columns that stand in its directories, with their values as text.
    """

    name: str
    size: int
    mtime_ns: int
    rows: int = 0
    nanos: tuple[str, ...] = ()
    by_arrow: bool = False
    lacks: tuple[str, ...] = ()
    landed: str | None = None
    landed_bytes: int = 0
    part: Part | None = None
    partitions: tuple[Partition, ...] = ()

    @property
    def stored(self) -> str:
        """The name of the Parquet file that has its rows."""
        return self.landed or self.name

    @property
    def stored_bytes(self) -> int:
        """The size of that file."""
        return self.size if self.landed is None else self.landed_bytes


@dataclass(frozen=True, slots=True)
class Share:
    """Some of a file's row groups, neighbours, which one task reads.

    Attributes:
        part: Its number, from 0.
        parts: How many the file has.
    """

    part: int = 0
    parts: int = 1

    def groups(self, count: int) -> range:
        """Return the row groups of this part. Over all parts, each group is there once."""
        return range(self.part * count // self.parts, (self.part + 1) * count // self.parts)


WHOLE = Share()


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that a slice leaves out.

    Attributes:
        stage: Whose gate has set it aside.
        gate: The gate's title.
        file: The file that has the row.
        row: Its number in the file.
        reason: Why it failed.
    """

    stage: str
    gate: str
    file: str
    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be decoded and that the source sets aside (`on_bad`), as `definition.source.Rejected`.

    Attributes:
        file: The file or part that has the row.
        row: The line in the file, or the offset in the partition; of a Parquet file its number in it, from 0.
    """

    file: str
    row: int
    reason: str
    raw: str | None


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """A file of a slice that its checkpoint names.

    Attributes:
        path: Below the pipeline's storage.
        digest: sha256.
        rows: None for the note of what the slice was.
        new: This slice has put it there, and no earlier checkpoint.
    """

    path: str
    bytes: int
    digest: str
    rows: int | None
    new: bool = True


@dataclass(frozen=True, slots=True)
class PartitionTime:
    """The event time of one partition of a source.

    Attributes:
        newest: The newest event time in microseconds; None: it has had no rows.
        quiet_since: The processing time in microseconds since which its end has been reached; None: there is more.
    """

    newest: int | None = None
    quiet_since: int | None = None


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file that cannot be read and is left out as a whole, since its source wants that (`on_bad`).

    Attributes:
        reason: On one line.
    """

    file: SourceFile
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.file.name,
            "size": self.file.size,
            "mtime_ns": self.file.mtime_ns,
            "reason": self.reason,
        }


_ROW_BITS = 40


def position(file: int, row: int) -> int:
    """Return the position of a row in a slice, from its file's number in the slice and its own in the file."""
    return file << _ROW_BITS | row


@dataclass(frozen=True, slots=True)
class Slice:
    """The input of one epoch from one source.

    Attributes:
        files: In the order in which they are read.
        limited: A limit of slices ended it, so there may be more.
        newest: The newest event time in microseconds; None if there is none.
        schema: The columns that every file has, in canonical types.
        left_out: Rows of the files that nobody gets to see.
        unread: Columns that some of the files have beside those, which nobody reads.
        set_aside: Files that are not among `files`, because they cannot be read.
        bad_rows: Rows that could not be decoded, or that have a value which cannot be handed on. A file that is read
            where it lies still has them; a landed one does not.
        position: Of a connector, behind the slice; None: the source is a directory of files.
        partitions: By name, where each partition's event time stands before the rows of the slice.
        seen: By partition, the newest event time of its rows here.
        now: The processing time by which it was planned, in microseconds.
        lost: What was left out because it is gone.
        begin: Of a connector, where the slice begins.
        archived: The files that the epoch's checkpoint is to name, since the source is archived.
    """

    files: tuple[SourceFile, ...]
    limited: bool
    newest: int | None
    schema: pa.Schema | None
    left_out: tuple[LeftOut, ...] = ()
    unread: tuple[str, ...] = ()
    set_aside: tuple[SetAside, ...] = ()
    bad_rows: tuple[BadRow, ...] = ()
    position: Position | None = None
    partitions: Mapping[str, PartitionTime] = field(default_factory=dict)
    seen: Mapping[str, int] = field(default_factory=dict)
    now: int | None = None
    lost: tuple[Lost, ...] = ()
    begin: Position | None = None
    archived: tuple[ArchivedFile, ...] = ()

    @property
    def rows(self) -> int:
        """In its files, those that it leaves out among them."""
        return sum(file.rows for file in self.files)

    @property
    def rows_quarantined(self) -> int:
        """The number of rows that are set aside: by gates, or because they could not be decoded."""
        return len(self.left_out) + len(self.bad_rows)

    @property
    def rows_offered(self) -> int:
        """The number of rows that stages get to see."""
        return self.rows - sum(map(len, self.without.values()))

    @property
    def without(self) -> dict[str, np.ndarray]:
        """The numbers of rows that no stage gets to see, by file, ascending."""
        there = {file.name for file in self.files if file.landed is None}
        numbers: dict[str, set[int]] = {}
        gone: list[LeftOut | BadRow] = [*self.left_out, *(bad for bad in self.bad_rows if bad.file in there)]
        for row in gone:
            numbers.setdefault(row.file, set()).add(row.row)
        return {name: np.array(sorted(of), np.int64) for name, of in numbers.items()}

    def place(self, position: int) -> tuple[str, int]:
        """Return a row's file and its number there."""
        return self.files[position >> _ROW_BITS].name, position & ((1 << _ROW_BITS) - 1)

    def positions_left_out(self) -> list[int]:
        without = self.without
        return [
            position(number, row)
            for number, file in enumerate(self.files)
            for row in without.get(file.name, NO_ROWS).tolist()
        ]

    def to_dict(self) -> dict[str, Any]:
        raw: dict[str, Any] = {
            "files": [_file_to_dict(file) for file in self.files],
            "rows": self.rows,
            "limited": self.limited,
        }
        if self.position is not None:
            raw["newest"] = self.newest
        if self.now is not None:
            raw["now"] = self.now
        if self.bad_rows:
            raw["bad_rows"] = len(self.bad_rows)
            there = {file.name for file in self.files if file.landed is None}
            if unfit := _numbers(bad for bad in self.bad_rows if bad.file in there):
                raw["unfit"] = unfit
        if self.lost:
            raw["lost"] = [asdict(lost) for lost in self.lost]
        if self.left_out:
            raw["excluded"] = _numbers(self.left_out)
        if self.set_aside:
            raw["set_aside"] = [entry.to_dict() for entry in self.set_aside]
        return raw


def _numbers(rows: Iterable[LeftOut | BadRow]) -> dict[str, list[int]]:
    """Return by file the numbers of its rows."""
    by_file: dict[str, list[int]] = {}
    for row in rows:
        by_file.setdefault(row.file, []).append(row.row)
    return {name: sorted(numbers) for name, numbers in sorted(by_file.items())}


def left_out_again(recorded: Mapping[str, Any]) -> tuple[LeftOut, ...]:
    """Return the rows that gates had set aside of a slice, as `Slice.to_dict` recorded it: which, and no more why."""
    excluded = recorded.get("excluded", {})
    return tuple(LeftOut("", "", name, row, "") for name, rows in excluded.items() for row in rows)


def _file_to_dict(file: SourceFile) -> dict[str, Any]:
    """Return a file as JSON gives it back."""
    raw = {"name": file.name, "size": file.size, "mtime_ns": file.mtime_ns, "rows": file.rows}
    raw["nanos"] = list(file.nanos)
    if file.part is not None:
        raw["part"] = {"partition": file.part.partition, "place": dict(file.part.place)}
    return raw


def nothing_read() -> dict[str, Any]:
    """Return `Slice.to_dict` of a checkpoint that reads nothing."""
    return {"files": [], "rows": 0, "limited": False}


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The input of an epoch, and the reason for its barrier.

    Attributes:
        trigger: What cut the barrier; `reason` says it in words.
        slices: By source, what the epoch reads.
        drain: Close every window.
        requests: The requests that the epoch answers.
        at: When the barrier was cut, for an epoch that is replayed; None: now.
        now: The processing time by which its slices were planned. That of the epoch is no earlier.
        rounds: By stage, how often the slices were replayed because it had rows set aside.
        backlog: By source, how many files, or rows of a connector, wait behind its slices; None: nobody has looked.
        lookups: By stage, the version of the table that its rows are looked up in.
    """

    trigger: Trigger
    reason: str
    slices: Mapping[str, Slice]
    drain: bool = False
    requests: tuple[Request, ...] = ()
    at: datetime | None = None
    now: datetime | None = None
    rounds: Mapping[str, int] = field(default_factory=dict)
    lookups: Mapping[str, Version] = field(default_factory=dict)
    backlog: Mapping[str, int] | None = None

    def without(self, stage: str, slices: Mapping[str, Slice]) -> EpochPlan:
        """Return the plan of the replay for which a stage has rows set aside.

        Args:
            slices: By source, those that have fewer rows now.
        """
        rounds = {**self.rounds, stage: self.rounds.get(stage, 0) + 1}
        return replace(self, slices={**self.slices, **slices}, rounds=rounds)
