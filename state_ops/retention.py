"""Retention: which checkpoints and objects go. Planned purely, applied rows first.

    plan    -> which checkpoints are beyond `keep`, and which objects only they name
    apply   -> drop the rows (checkpoints, then their listings), then delete the objects

A crash in between leaves orphans, which the next take-over removes (`orphans`). What a checkpoint references is
decided by the registry alone; an object of our own or a newer generation is never an orphan here, because a live
attempt may still be named by an ack.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from state_ops.checkpoint import Checkpoint, StateFile
from state_ops.ids import CheckpointId, Generation, parse_epoch_dir
from state_ops.registry import Registry
from state_ops.shared_state import reference_counts, unreferenced
from state_ops.storage import Storage, StoredFile


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What pruning would do. drop: checkpoint ids; delete: objects that reach a reference count of 0."""

    drop: tuple[CheckpointId, ...]
    delete: tuple[StateFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.delete)


def plan(
    checkpoints: Sequence[Checkpoint],
    listings: Mapping[CheckpointId, Sequence[StateFile]],
    keep: int,
    pinned: Collection[CheckpointId] = (),
) -> RetentionPlan:
    """Keep the newest `keep` checkpoints and every pinned one (unpublished, or the base of an epoch in flight)."""
    newest = {checkpoint.id for checkpoint in sorted(checkpoints, key=lambda row: row.id)[-keep:]}
    stays = newest | set(pinned)
    dropped = {row.id: listings[row.id] for row in checkpoints if row.id not in stays}
    kept = {row.id: listings[row.id] for row in checkpoints if row.id in stays}
    return RetentionPlan(tuple(sorted(dropped)), tuple(unreferenced(dropped, kept)))


def apply(registry: Registry, storage: Storage, generation: Generation, decided: RetentionPlan) -> None:
    """Carry a plan out as the owner of `generation`: rows first, then objects."""
    registry.drop(generation, decided.drop)
    for file in decided.delete:
        storage.delete(file.path)


def orphans(
    storage: Storage, listings: Mapping[CheckpointId, Sequence[StateFile]], generation: Generation
) -> list[StoredFile]:
    """State and channel objects of older generations that no retained checkpoint names.

    Older generations are fenced, so nothing can come to reference these any more: no clock and no age is asked.
    """
    named = reference_counts(listings.values())
    found = []
    for top in ("state", "channels"):
        for file in storage.list(top, unfinished=True):
            parsed = parse_epoch_dir("/".join(file.path.split("/")[2:3]))
            if parsed is not None and parsed[0] < generation and file.path not in named:
                found.append(file)
    return found
