"""Retention: which checkpoints and objects are deleted. The plan is a pure function; applying it removes rows first.

    plan    -> which checkpoints stay and why, and which objects only the others name
    apply   -> drop the rows; look for running restores; drop the listings; delete the objects

A checkpoint stays for any of these reasons:

- It is the head, or among the newest `keep` that have no name; positions alone do not count among those.
- A savepoint or a branch names it.
- A rewind left it behind, and can still be taken back.
- Something needs it: a sink lacks its rows, a restore reads it, an epoch in flight is built on it.

A crash in between leaves listings without rows (`Registry.orphan_listings`) and orphans, which the next prune and the
next take-over remove. The registry alone decides what a checkpoint references. An object of our own or a newer
generation is never an orphan here, because an ack of a live attempt may still name it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from state_ops.checkpoints.reader_holds import HeldCommits, HoldWatcher
from state_ops.checkpoints.registry import Registry
from state_ops.checkpoints.shared_state import reference_counts, unreferenced
from state_ops.ids import CheckpointId, Generation, parse_epoch_dir
from state_ops.records.checkpoint import POSITIONS, Checkpoint, abandoned
from state_ops.records.fates import Fate, ObjectFate
from state_ops.records.pins import Pin
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.paths import is_staged
from state_ops.storage.storage import Storage, StoredFile


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """The rows and objects that pruning would remove.

    Attributes:
        drop: The ids of the checkpoints whose rows are removed.
        delete: The objects that no checkpoint that stays references.
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
    """Return the reasons why each checkpoint stays; an empty tuple if it goes.

    Args:
        keep: How many checkpoints to retain besides those with a name. With 0 the head goes too, and a rewind with what
            it abandoned.
        needed: Who else needs a checkpoint, in words.
    """
    named = {pin.commit_id for pin in pins}
    ordered = sorted(checkpoints, key=lambda row: row.id)
    left = abandoned(ordered)
    # Positions alone are of use only until the epoch that they were committed for is: its checkpoint says all of it.
    counted = [row for row in ordered if row.commit_id not in named and row.id not in left and row.kind != POSITIONS]
    newest = [row.id for row in counted[-keep:]] if keep else []
    taken_back = {*newest, *(row.id for row in ordered[-1:])} if keep else set()
    kinds = {row.id: row.kind for row in ordered}
    stays: dict[CheckpointId, tuple[str, ...]] = {}
    for row in ordered:
        why = [f"{pin.kind} {pin.name!r}" for pin in pins if pin.commit_id == row.commit_id]
        if keep and row is ordered[-1]:
            why.append("the newest checkpoint")
        elif row.id in newest:
            why.append(f"among the newest {keep}")
        elif left.get(row.id) in taken_back:
            by = f"{kinds[left[row.id]]} {left[row.id]}"
            why.append(f"abandoned by {by}, which can be taken back while it is among the newest")
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
    """Decide by `reasons` which checkpoints go, and which objects go with them.

    Args:
        listings: The files of every checkpoint, by its id.
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
    """Return the plan, with the reasons for every checkpoint and every object. Published rows are left out: they are
    not Weir's to delete."""
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
    registry: Registry, storage: Storage, generation: Generation, decided: RetentionPlan, watcher: HoldWatcher
) -> tuple[StateFile, ...]:
    """Carry a plan out as the owner of `generation`, and finish what an earlier call had to leave.

    Args:
        watcher: What this process knows of running restores. What a restore still reads stays until a later call.

    Returns:
        What was deleted.
    """
    # The registry's own files are deleted together with the objects, in one request.
    unnamed = registry.drop_rows(generation, decided.drop)
    # Look only now, after the rows went: a later restore finds no row, and the hold of an earlier one is seen here.
    held = HeldCommits(watcher.live(storage))
    rows = registry.checkpoints(as_owner=True)
    newest = max([row.id for row in rows] + list(decided.drop), default=CheckpointId(0))
    orphan_listings = [orphan for orphan in registry.orphan_listings(as_owner=True) if orphan.checkpoint_id <= newest]
    gone = [orphan for orphan in orphan_listings if orphan.commit_id not in held]
    if not gone:
        storage.delete_files(unnamed)
        return ()
    kept = [registry.files(row) for row in rows] + [
        orphan.files for orphan in orphan_listings if orphan.commit_id in held
    ]
    delete = unreferenced([orphan.files for orphan in gone], kept)
    # Check again that we own the registry: else a successor may have dropped those listings, and must deal with them.
    unnamed += registry.drop_listings(generation, gone)
    storage.delete_files([*unnamed, *(file.path for file in delete)])
    return tuple(delete)


def orphans(storage: Storage, listings: Iterable[Collection[StateFile]], generation: Generation) -> list[StoredFile]:
    """State, channel, output and exchange objects of older generations that no listing names.

    Older generations are fenced, so nothing can come to reference these objects any more: no clock and no age is asked.
    Files whose names are not Weir's are left alone.

    Args:
        listings: The files of all checkpoints, and of orphan listings that are held.
    """
    named = reference_counts(listings)
    unnamed = []
    for top in ("state", "channels", "outputs", "exchange"):
        for file in storage.list(top, unfinished=True):
            parsed = parse_epoch_dir("/".join(file.path.split("/")[2:3]))
            if parsed is not None and parsed[0] < generation and file.path not in named and is_staged(file.path):
                unnamed.append(file)
    return unnamed
