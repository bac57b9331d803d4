"""What one epoch reads from one source: its files, as they were planned, and the rows that are left out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file as the slice saw it.

    Attributes:
        size: In bytes.
        mtime_ns: Time of change, in nanoseconds since 1970.
        rows: By its footer.
        nanos: Timestamp columns that it stores in nanoseconds.
        by_arrow: It stores something that Spark cannot read, or reads as other values: unsigned numbers of 64 bits,
            nested nanoseconds, times of day and what Arrow alone has, as `footers.by_arrow` tells.
    """

    name: str
    size: int
    mtime_ns: int
    rows: int = 0
    nanos: tuple[str, ...] = ()
    by_arrow: bool = False


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
class SetAside:
    """A file that cannot be read and is left out as a whole, since its source wants that (`on_bad`). reason: on one
    line."""

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
    """Of a row in a slice, from its file's number in the slice and its own in the file."""
    return file << _ROW_BITS | row


@dataclass(frozen=True, slots=True)
class Slice:
    """What one epoch reads from one source.

    Attributes:
        files: In the order in which they are read.
        limited: A limit of slices ended it, so there may be more.
        newest: The newest event time in microseconds; None if there is none.
        schema: The columns that every file has, in canonical types.
        left_out: Rows of the files that nobody gets to see.
        unread: Columns that some of the files have beside those, which nobody reads.
        set_aside: Files that are not among `files`, because they cannot be read.
    """

    files: tuple[SourceFile, ...]
    limited: bool
    newest: int | None
    schema: pa.Schema | None
    left_out: tuple[LeftOut, ...] = ()
    unread: tuple[str, ...] = ()
    set_aside: tuple[SetAside, ...] = ()

    @property
    def rows(self) -> int:
        """In its files, those that it leaves out among them."""
        return sum(file.rows for file in self.files)

    def place(self, position: int) -> tuple[str, int]:
        """A row's file and its number there."""
        return self.files[position >> _ROW_BITS].name, position & ((1 << _ROW_BITS) - 1)

    def positions_left_out(self) -> list[int]:
        number = {file.name: index for index, file in enumerate(self.files)}
        return sorted(position(number[row.file], row.row) for row in self.left_out)

    def to_dict(self) -> dict[str, Any]:
        files = [
            {
                name: list(value) if name == "nanos" else value
                for name, value in asdict(file).items()
                if name != "by_arrow"
            }
            for file in self.files
        ]  # as JSON gives it back
        raw: dict[str, Any] = {"files": files, "rows": self.rows, "limited": self.limited}
        if self.left_out:
            raw["excluded"] = {
                name: sorted(entry.row for entry in self.left_out if entry.file == name)
                for name in sorted({entry.file for entry in self.left_out})
            }
        if self.set_aside:
            raw["set_aside"] = [entry.to_dict() for entry in self.set_aside]
        return raw


def nothing_read() -> dict[str, Any]:
    """`Slice.to_dict` of a checkpoint that reads nothing."""
    return {"files": [], "rows": 0, "limited": False}
