"""The position of a source of files: how far it has been read, in bounded space.

A position is a dict, as the checkpoint's row has it: the newest `_REMEMBERED` names with their times of change and
sizes, and of the older ones (at or below `floor`) their number, the sum of their hashes and the newest of their times
of change. So a file that appears below the floor is reported, and one that was delivered again after it was read;
docs/adr/0004-file-positions.md says when it cannot be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from state_ops.counts import agrees, counted
from weir.sources.slices import SetAside, SourceFile

_REMEMBERED = 10_000
_HASH_BITS = 64

Position = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Remembered:
    """A file as a position remembers it. None: an older Weir read it, and did not note that figure."""

    mtime_ns: int | None
    size: int | None

    def is_still(self, file: SourceFile) -> bool:
        return self.mtime_ns in (None, file.mtime_ns) and self.size in (None, file.size)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """One listing of a source compared with a position.

    Attributes:
        fresh: The files that have not been read.
        below: The files that sort at or below the floor.
        again: The files that were delivered again after they were read, so that what they have now is not read.
        unit: What is counted: "file", or "row" of a connector.
        problem: Why nobody could look, in words; None: somebody has.
    """

    shown_as: ClassVar = "waiting"

    fresh: tuple[SourceFile, ...] = ()
    below: tuple[SourceFile, ...] = ()
    again: tuple[SourceFile, ...] = ()
    unit: str = "file"
    problem: str | None = None

    @property
    def waiting(self) -> int:
        """The number of units that wait. If rows were not counted, it is the number of parts."""
        rows = sum(file.rows for file in self.fresh) if self.unit == "row" else 0
        return rows or len(self.fresh)

    def __str__(self) -> str:
        return counted(self.waiting, self.unit)


def in_words(arrived: Collection[Arrivals]) -> str:
    """Return the amount that waits at several sources: "3 files and 1,200 rows"."""
    units = sorted({of.unit for of in arrived}) or ["file"]
    return " and ".join(counted(sum(of.waiting for of in arrived if of.unit == unit), unit) for unit in units)


@dataclass(frozen=True, slots=True)
class Compared:
    """The files that were read between two positions, compared with one listing.

    Attributes:
        read: By name, what the later position remembers.
        same: The files of it that are as they were.
        others: By name, what is there now of those that are gone (None) or not what they were.
    """

    read: Mapping[str, Remembered]
    same: list[SourceFile]
    others: dict[str, SourceFile | None]


def remembered(position: Position | None) -> dict[str, Remembered]:
    """Return the files that a position remembers, by name."""
    if position is None:
        return {}
    none = [None] * len(position["seen"])
    times, sizes = position.get("seen_ns") or none, position.get("seen_bytes") or none
    return {name: Remembered(ns, size) for name, ns, size in zip(position["seen"], times, sizes, strict=True)}


def are_there(position: Position, files: Iterable[SourceFile]) -> bool:
    """Return whether some files are there, all as a position remembers them.

    Only files that it remembers with their times of change count.
    """
    read = {name: was for name, was in remembered(position).items() if was.mtime_ns is not None}
    here = [file for file in files if file.name in read]
    return bool(here) and all(read[file.name].is_still(file) for file in here)


def has_read(position: Position | None) -> Callable[[str], bool]:
    """Return which files, by name, have been read at a position; all at or below its floor count as read."""
    seen, floor = (set(position["seen"]), position["floor"]) if position else (set(), None)
    return lambda name: name in seen or (floor is not None and name <= floor)


def arrivals(position: Position | None, files: Iterable[SourceFile], allowed: Callable[[str], bool] | None) -> Arrivals:
    """Return the arrivals since a position.

    Args:
        files: That are there.
        allowed: Which names may be read; None: all.
    """
    read = remembered(position)
    floor, newest = (position["floor"], position.get("below_newest_ns")) if position else (None, None)
    fresh, below, again = [], [], []
    for file in sorted(files, key=lambda file: file.name):
        if floor is not None and file.name <= floor:
            below.append(file)
            if newest is not None and file.mtime_ns > newest:
                again.append(file)
        elif file.name in read:
            if not read[file.name].is_still(file):
                again.append(file)
        elif allowed is None or allowed(file.name):
            fresh.append(file)
    return Arrivals(tuple(fresh), tuple(below), tuple(again))


def compared(then: Position | None, now: Position | None, files: Iterable[SourceFile]) -> Compared:
    """Return the files that were read between two positions, compared with the files that are there."""
    before = set(then["seen"]) if then else set()
    read = {name: was for name, was in remembered(now).items() if name not in before}
    here = {file.name: file for file in files if file.name in read}
    same = [here[name] for name, was in read.items() if name in here and was.is_still(here[name])]
    others = sorted(read.keys() - {file.name for file in same})
    return Compared(read, same, {name: here.get(name) for name in others})


def arrived_below(position: Position, below: Sequence[SourceFile], directory: str) -> str | None:
    """Return the message about files that arrived at or below the floor after it had passed them, or None."""
    floor, read, newest = position["floor"], position["below"], position.get("below_newest_ns")
    total = sum(_hash(file.name) for file in below) % (1 << _HASH_BITS)
    late = sorted((file for file in below if newest is not None and file.mtime_ns > newest), key=lambda file: file.name)
    if late:
        names = ", ".join(file.name for file in late[:3]) + (", ..." if len(late) > 3 else "")
        return (
            f"{counted(len(late), 'file')} of {directory} {agrees(len(late), 'sorts', 'sort')} at or "
            f"below {floor!r} and "
            f"{agrees(len(late), 'is', 'are')} newer than all that were read "
            f"there, so they arrived too late or changed after they were read: {names}."
        )
    if len(below) >= read and (len(below), total) != (read, position["below_sum"]):
        last = max(below, key=lambda file: file.mtime_ns)
        return (
            f"{counted(len(below), 'file')} of {directory} {agrees(len(below), 'sorts', 'sort')} at or "
            f"below {floor!r}, of which {read} were read: some arrived "
            f"too late to be told apart. The last to change is {last.name}."
        )
    return None  # all were read; or fewer are left, since old files may be cleaned away


def advanced(
    position: Position | None,
    place: str,
    files: Sequence[SourceFile],
    newest: int | None,
    set_aside: Sequence[SetAside],
) -> dict[str, Any]:
    """Return the position after reading files.

    Args:
        place: The directory that they are in.
        newest: Their newest event time, as in `Slice`.
        set_aside: Files that count as read, though they are not: one that is repaired comes under another name.
    """
    files = (*files, *(bad.file for bad in set_aside))
    old = position or {"files": 0, "floor": None, "below": 0, "below_sum": 0, "seen": [], "last": None}
    read = remembered(old) | {file.name: Remembered(file.mtime_ns, file.size) for file in files}
    names = sorted(read)
    kept, sunk = names[-_REMEMBERED:], names[:-_REMEMBERED]
    changed: list[Any] = [read[name].mtime_ns for name in sunk]
    if old["below"]:
        changed.append(old.get("below_newest_ns"))
    return {
        "directory": place,
        "newest": max([moment for moment in (old.get("newest"), newest) if moment is not None], default=None),
        "files": old["files"] + len(files),
        "last": max([file.name for file in files] + ([old["last"]] if old["last"] else []), default=None),
        "floor": sunk[-1] if sunk else old["floor"],
        "below": old["below"] + len(sunk),
        "below_sum": (old["below_sum"] + sum(map(_hash, sunk))) % (1 << _HASH_BITS),
        # None: nothing is there, or an older Weir read some of it and did not note the time
        "below_newest_ns": None if None in changed else max(changed, default=None),
        "seen": kept,
        "seen_ns": [read[name].mtime_ns for name in kept],
        "seen_bytes": [read[name].size for name in kept],
        **_all_set_aside(old.get("set_aside"), set_aside),
    }


def as_read_by(position: dict[str, Any], by_branch: Position | None) -> dict[str, Any]:
    """Return a position with the times of change that the branch has seen: of files that were corrected these are not
    what they were."""
    if by_branch is None or "seen_ns" not in position:
        return position
    newest_times = [
        time for time in (position.get("below_newest_ns"), by_branch.get("below_newest_ns")) if time is not None
    ]
    changed: dict[str, Any] = {
        "below_newest_ns": max(newest_times) if position.get("below_newest_ns") is not None else None
    }
    for of in ("seen_ns", "seen_bytes"):
        if of in position:
            branch = dict(zip(by_branch["seen"], by_branch.get(of) or (), strict=False))
            changed[of] = [branch.get(name) or was for name, was in zip(position["seen"], position[of], strict=True)]
    return {**position, **changed}


def _all_set_aside(before: Mapping[str, Any] | None, more: Sequence[SetAside]) -> dict[str, Any]:
    """Return the count of files set aside so far and the last of them. It is empty if there was none."""
    if more:
        return {"set_aside": {"files": (before or {}).get("files", 0) + len(more), "last": more[-1].to_dict()}}
    return {"set_aside": before} if before else {}


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_HASH_BITS // 8).digest(), "big")
