"""The archive of a source: what was read is kept, to be read again when the source has lost it.

Each slice of a source with `archive=True` leaves its landed files and a note about it, under the position at which it
began. The epoch's checkpoint names them like files of state. So does every later one, as long as a retained checkpoint
lies before them. A rewind, a fork or a backfill that goes on from there finds the slice under its position, and takes
it as it was instead of asking the source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from state_ops.errors import DamageError
from state_ops.ids import AttemptId, CheckpointId
from state_ops.records.snapshot_files import INPUT, StateFile
from state_ops.storage.storage import Storage
from weir.definition.source import Lost, Part, Planned, Position
from weir.sources.slices import ArchivedFile, BadRow, SourceFile

Archives = Callable[[], list[tuple[Storage, list[StateFile]]]]
"""Where archived files lie, and what the newest checkpoint there lists: the pipeline's own first, then, for a branch,
that of its pipeline."""


def key(position: Position) -> str:
    """Return the digest by which a position is known in names."""
    return hashlib.sha256(json.dumps(position, sort_keys=True).encode()).hexdigest()[:32]


def note(planned: Planned, files: Iterable[SourceFile], bad_rows: Iterable[BadRow]) -> bytes:
    """Return a slice as JSON, from which `noted` makes it again."""
    raw = {
        "position": dict(planned.position),
        "limited": planned.limited,
        "ends": dict(planned.ends),
        "lost": [asdict(lost) for lost in planned.lost],
        "files": [_file(file) for file in files],
        "bad_rows": [asdict(row) for row in bad_rows],
    }
    return json.dumps(raw).encode()


def _file(file: SourceFile) -> dict[str, Any]:
    assert file.part is not None, "a connector has planned it"
    return {"landed": file.landed, "size": file.size, "part": {**asdict(file.part), "place": dict(file.part.place)}}


def noted(raw: bytes) -> tuple[Planned, list[tuple[SourceFile, list[BadRow]]]]:
    """Return a slice that was: the plan, and its landed files with their bad rows."""
    slice = json.loads(raw)
    parts = [Part(**file["part"]) for file in slice["files"]]
    lost = tuple(Lost(**entry) for entry in slice["lost"])
    planned = Planned(tuple(parts), slice["position"], slice["limited"], slice["ends"], lost)
    bad_rows = [BadRow(**row) for row in slice["bad_rows"]]
    files = [
        (
            SourceFile(part.name, file["size"], 0, landed=file["landed"], landed_bytes=file["size"], part=part),
            [row for row in bad_rows if row.file == part.name],
        )
        for part, file in zip(parts, slice["files"], strict=True)
    ]
    return planned, files


def named(files: Iterable[ArchivedFile], source: str, begin: Position, epoch: CheckpointId) -> tuple[StateFile, ...]:
    """Return the files of a slice as a checkpoint's listing has them.

    Args:
        begin: Where the slice begins.
        epoch: The checkpoint that has read it.
    """
    name = f"{int(epoch)}/{key(begin)}"
    return tuple(
        StateFile(
            source,
            0,
            INPUT,
            f"{name}/{number}",
            file.path,
            file.bytes,
            file.digest,
            file.new,
            AttemptId(""),
            rows=file.rows,
        )
        for number, file in enumerate(files)
    )


def needed(
    listing: Iterable[StateFile], oldest: CheckpointId, offsets: Mapping[str, Mapping[str, Any]]
) -> list[StateFile]:
    """Return the archived files that somebody may read again.

    Args:
        oldest: The id of the oldest checkpoint that is retained.
        offsets: By source, how far it is read. What was archived from there on is about to be read again after a
            rewind, even where no retained checkpoint lies before it any more.
    """
    archived = [file for file in listing if file.kind == INPUT]
    ahead = {
        source: _epoch(files[0]) - 1
        for source, position in offsets.items()
        if "at" in position and (files := slice_files(archived, source, position["at"]))
    }
    return [file for file in archived if _epoch(file) > min(oldest, ahead.get(file.operator, oldest))]


def _epoch(file: StateFile) -> int:
    """Return the id of the checkpoint that has read it."""
    return int(file.name.split("/")[0])


def slice_files(listing: Iterable[StateFile], source: str, begin: Position) -> tuple[StateFile, ...]:
    """Return the files of the slice that begins at a position, its note first; none if it is not archived."""
    at = key(begin)
    slices: dict[str, list[StateFile]] = {}
    for file in listing:
        if file.kind == INPUT and file.operator == source and file.name.split("/")[1] == at:
            slices.setdefault(file.name.rpartition("/")[0], []).append(file)
    if not slices:
        return ()
    newest = max(slices, key=lambda name: int(name.split("/")[0]))
    return tuple(sorted(slices[newest], key=lambda file: int(file.name.rpartition("/")[2])))


def read(storage: Storage, file: StateFile) -> bytes:
    """Return an archived file's bytes. Raises DamageError if it is not what was archived."""
    data = storage.read_bytes(file.path)
    if data is None or hashlib.sha256(data).hexdigest() != file.digest:
        raise DamageError(
            f"Archived input {'is gone' if data is None else 'has changed'}.",
            where=storage.full(file.path),
            next="Nothing was applied. `weir fsck` says what else is damaged; put the object back.",
        )
    return data


@dataclass(frozen=True, slots=True)
class ArchivedSlice:
    """A slice that was read before and is kept.

    Attributes:
        planned: What it was.
        landed: Its files with their bad rows.
        storage: Where it is.
        files: As a checkpoint there lists it, the note first.
        is_here: In this pipeline's own storage, not in that of the pipeline that a branch was forked from.
    """

    planned: Planned
    landed: list[tuple[SourceFile, list[BadRow]]]
    storage: Storage
    files: tuple[StateFile, ...]
    is_here: bool


class ArchivedSlices:
    """The archived slices of one source, by the position at which each begins.

    Args:
        source: The source's name.
        archives: Asked once for what is archived, and again where the pipeline may have read on; None: nothing is.
        home: This pipeline's own storage.
    """

    def __init__(self, source: str, archives: Archives | None, home: Storage | None) -> None:
        self._source, self._archives, self._home = source, archives, home
        self._listed: list[tuple[Storage, list[StateFile]]] | None = None
        self._behind: dict[str, Position] = {}

    def at(self, begin: Position) -> ArchivedSlice | None:
        """Return the archived slice that begins at a position; None: there is none."""
        if self._archives is None:
            return None
        if self._listed is None:
            self._listed = self._archives()
        for storage, listing in self._listed:
            files = slice_files(listing, self._source, begin)
            if not files:
                continue
            planned, landed = noted(read(storage, files[0]))
            if planned.position != begin:  # earlier releases kept slices without a row too, which lead nowhere
                is_here = self._home is not None and storage.uri == self._home.uri
                return ArchivedSlice(planned, landed, storage, files, is_here)
        return None

    def lead(self, begin: Position, end: Position) -> bool:
        """Return whether slices follow each other from one position to another, as far as is known, or now."""
        if self._archives is None:
            return False
        for _ in range(2):
            at: Position | None = begin
            while at is not None and at != end:
                at = self._after(at)
            if at is not None:
                return True
            self._listed = None  # the pipeline may have read on
        return False

    def _after(self, at: Position) -> Position | None:
        """Return the position behind the slice that begins at one."""
        name = key(at)
        if name not in self._behind:
            archived = self.at(at)
            if archived is None:
                return None
            self._behind[name] = archived.planned.position
        return self._behind[name]
