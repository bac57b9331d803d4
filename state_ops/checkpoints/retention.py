"""Retention: which checkpoints and objects go. Planned purely, applied rows first.

    plan    -> which checkpoints stay and why, and which objects only the others name
    apply   -> drop the rows; look for running restores; drop the listings; delete the objects

A checkpoint stays if it is among the newest `keep` that have no name, if a rewind left it behind that can still be
taken back, if it is the head, if a savepoint or a branch names it, or if something still needs it (a sink lacks its
rows, a restore reads it, an epoch in flight is built on it).

A crash in between leaves listings without rows (`Registry.strays`) and orphans, which the next prune and the next
take-over remove. What a checkpoint references is decided by the registry alone; an object of our own or a newer
generation is never an orphan here, because a live attempt may still be named by an ack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from state_ops.checkpoints.checkpoint import Checkpoint, StateFile, abandoned
from state_ops.checkpoints.reader_holds import HeldCommits, Watcher
from state_ops.checkpoints.registry import Pin, Registry
from state_ops.checkpoints.shared_state import reference_counts, unreferenced
from state_ops.ids import CheckpointId, Generation, parse_epoch_dir
from state_ops.storage.paths import is_staged
from state_ops.storage.storage import Storage, StoredFile


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to one checkpoint, and why.

    Attributes:
        reasons: In words, each true by itself; none: it goes.
        bytes: Of its state and channel objects.
        frees: Of those that go with it, because no checkpoint that stays names them.
    """

    id: CheckpointId
    stays: bool
    reasons: tuple[str, ...]
    bytes: int
    frees: int


@dataclass(frozen=True, slots=True)
class ObjectFate:
    """What happens to one object.

    Attributes:
        named_by: The checkpoints that stay and name it; none: it is deleted.
    """

    path: str
    bytes: int
    named_by: tuple[CheckpointId, ...]

    @property
    def stays(self) -> bool:
        return bool(self.named_by)


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What pruning would do.

    Attributes:
        drop: Checkpoint ids.
        delete: Objects that reach a reference count of 0.
    """

    drop: tuple[CheckpointId, ...]
    delete: tuple[StateFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.delete)


def reasons(
    checkpoints: Sequence[Checkpoint],
    keep: int,
    pins: Sequence[Pin] = (),
    needed: Mapping[CheckpointId, Sequence[str]] | None = None,
) -> dict[CheckpointId, tuple[str, ...]]:
    """Why each checkpoint stays; an empty tuple: it goes.

    Args:
        keep: How many to retain besides those with a name; 0 drops the head too, and a rewind with what it abandoned.
        needed: Who else needs a checkpoint, in words.
    """
    named = {pin.commit_id for pin in pins}
    ordered = sorted(checkpoints, key=lambda row: row.id)
    left = abandoned(ordered)
    newest = [row.id for row in ordered if row.commit_id not in named and row.id not in left][-keep:] if keep else []
    taken_back = {*newest, *(row.id for row in ordered[-1:])} if keep else set()
    stays: dict[CheckpointId, tuple[str, ...]] = {}
    for row in ordered:
        why = [f"{pin.kind} {pin.name!r}" for pin in pins if pin.commit_id == row.commit_id]
        if keep and row is ordered[-1]:
            why.append("the newest checkpoint")
        elif row.id in newest:
            why.append(f"among the newest {keep}")
        elif left.get(row.id) in taken_back:
            why.append(f"abandoned by rewind {left[row.id]}, which can be taken back while it is among the newest")
        stays[row.id] = (*why, *(needed or {}).get(row.id, ()))
    for id, rewind in left.items() if keep else ():
        if stays[id] and not stays[rewind]:
            stays[rewind] = (f"it says that {id} is abandoned",)
    return stays


def plan(
    checkpoints: Sequence[Checkpoint],
    listings: Mapping[CheckpointId, Sequence[StateFile]],
    keep: int,
    pins: Sequence[Pin] = (),
    needed: Mapping[CheckpointId, Sequence[str]] | None = None,
) -> RetentionPlan:
    """Decide by `reasons`.

    Args:
        listings: Of every checkpoint.
    """
    why = reasons(checkpoints, keep, pins, needed)
    drop = tuple(id for id, stays in why.items() if not stays)
    if not drop:
        return RetentionPlan((), ())
    kept = [listings[id] for id, stays in why.items() if stays]
    return RetentionPlan(drop, tuple(unreferenced([listings[id] for id in drop], kept)))


def explain(
    checkpoints: Sequence[Checkpoint],
    listings: Mapping[CheckpointId, Sequence[StateFile]],
    keep: int,
    pins: Sequence[Pin] = (),
    needed: Mapping[CheckpointId, Sequence[str]] | None = None,
) -> tuple[list[Fate], list[ObjectFate]]:
    """The plan with the reason for every checkpoint and every object. Published rows are not Weir's to delete: left
    out."""
    why = reasons(checkpoints, keep, pins, needed)
    named: dict[str, list[CheckpointId]] = {}
    sizes: dict[str, int] = {}
    owned: dict[CheckpointId, set[str]] = {}
    for id in sorted(why):
        owned[id] = {file.path for file in listings[id] if not file.in_table}
        for file in listings[id]:
            if not file.in_table:
                sizes[file.path] = file.bytes
                if why[id] and id not in named.setdefault(file.path, []):
                    named[file.path].append(id)
    objects = [ObjectFate(path, sizes[path], tuple(named.get(path, ()))) for path in sorted(sizes)]
    fates = []
    for id in sorted(why):
        frees = 0 if why[id] else sum(sizes[path] for path in owned[id] if not named.get(path))
        fates.append(Fate(id, bool(why[id]), why[id], sum(sizes[path] for path in owned[id]), frees))
    return fates, objects


def apply(
    registry: Registry, storage: Storage, generation: Generation, decided: RetentionPlan, watcher: Watcher
) -> tuple[StateFile, ...]:
    """Carry a plan out as the owner of `generation`, and finish what an earlier one had to leave; returns what was
    deleted.

    Args:
        watcher: What this process knows of running restores. What one of them still reads stays, until a later call.
    """
    unnamed = registry.drop_rows(generation, decided.drop)  # files of its own: deleted with the objects, in one request
    # Only now, after the rows: a restore that comes later finds no row, one that came before is seen here.
    held = HeldCommits(watcher.live(storage))
    rows = registry.checkpoints(as_owner=True)
    newest = max([row.id for row in rows] + list(decided.drop), default=CheckpointId(0))
    strays = [stray for stray in registry.strays(as_owner=True) if stray.checkpoint_id <= newest]
    gone = [stray for stray in strays if stray.commit_id not in held]
    if not gone:
        storage.delete_files(unnamed)
        return ()
    kept = [registry.files(row) for row in rows] + [stray.files for stray in strays if stray.commit_id in held]
    delete = unreferenced([stray.files for stray in gone], kept)
    # Owned still, after the rows went: else a successor may have dropped those listings, and they are its to deal with.
    unnamed += registry.drop_listings(generation, gone)
    storage.delete_files([*unnamed, *(file.path for file in delete)])
    return tuple(delete)


def orphans(storage: Storage, listings: Iterable[Collection[StateFile]], generation: Generation) -> list[StoredFile]:
    """State, channel and output objects of older generations that no listing names. listings: of all checkpoints, and
    of strays that are held.

    Older generations are fenced, so nothing can come to reference these any more: no clock and no age is asked. Files
    that have no name of Weir's are not its to delete.

    Args:
        listings: Of all checkpoints, and of strays that are held.
    """
    named = reference_counts(listings)
    unnamed = []
    for top in ("state", "channels", "outputs"):
        for file in storage.list(top, unfinished=True):
            parsed = parse_epoch_dir("/".join(file.path.split("/")[2:3]))
            if parsed is not None and parsed[0] < generation and file.path not in named and is_staged(file.path):
                unnamed.append(file)
    return unnamed
