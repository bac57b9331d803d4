"""The base of a subtask after its parallelism changed: the snapshots of the subtasks that had its key groups, together.

    2 -> 3, of 128 key groups      subtask 0 of 2: 0..63            subtask 1 of 2: 64..127
                                   0 of 3: 0..42    1 of 3: 43..85                    2 of 3: 86..127
                                   0's files        0's and 1's files                 1's files

With one parent the subtask takes its files, clipped to the key groups. With several it takes the files of all, under
names that say which range each database has (`backends.composite`). Either way the new subtask's first checkpoint names
the objects that exist already, and only what it writes is uploaded. Key groups are assigned as by Flink's
KeyGroupRangeAssignment, so the fewest of them move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from state_ops.backends import composite
from state_ops.backends.base import Backend
from state_ops.ids import AttemptId
from state_ops.records.snapshot_files import Snapshot, StateFile, is_reference, snapshots_of
from state_ops.schema.key_groups import group_range


def first_key(group: int) -> bytes:
    """Return the lower bound of a key group's keys, which is the upper bound of the group before."""
    return group.to_bytes(2, "big")


def bases(
    files: Sequence[StateFile], operator: str, was: int, now: int, max_parallelism: int, commit_id: str
) -> dict[int, Snapshot]:
    """Return by subtask at parallelism `now` the snapshot that it builds on.

    The files are the listing of a checkpoint that was taken at parallelism `was`.

    Args:
        commit_id: The checkpoint's. The attempt id of a snapshot that is put together is derived from it, so it is the
            same however often this is asked.
    """
    taken = snapshots_of(tuple(files), operator)
    if was == now:
        return taken
    by_subtask = {}
    for subtask in range(now):
        groups = group_range(subtask, now, max_parallelism)
        parts = _parts(taken, was, groups, max_parallelism)
        if parts:
            attempt = hashlib.sha256(f"{commit_id}/{operator}/{subtask}/{now}".encode()).hexdigest()[:32]
            by_subtask[subtask] = Snapshot(subtask, AttemptId(attempt), _side_by_side(parts, subtask), rescaled=True)
    return by_subtask


def _parts(
    taken: Mapping[int, Snapshot], was: int, groups: range, max_parallelism: int
) -> list[tuple[bytes, list[StateFile]]]:
    """Return the databases that hold some of the key groups: where each begins, in key order, and its files under its
    backend's names."""
    low, high = first_key(groups.start), first_key(groups.stop)
    parts = []
    for parent in sorted(taken):
        of_parent = group_range(parent, was, max_parallelism)
        if of_parent.stop <= groups.start or groups.stop <= of_parent.start:
            continue
        databases: dict[bytes, list[StateFile]] = {}
        for file in taken[parent].files:
            start, name = composite.parted(file.name)
            databases.setdefault(start or b"", []).append(replace(file, name=name))
        starts = sorted(databases)
        lower = [first_key(of_parent.start), *starts[1:]]  # the first database also has the keys before its lower bound
        for start, begin, end in zip(starts, lower, [*starts[1:], first_key(of_parent.stop)], strict=True):
            begins = max(begin, low)
            if begins < min(end, high):
                parts.append((begins, databases[start]))
    return parts


def _side_by_side(parts: Sequence[tuple[bytes, list[StateFile]]], subtask: int) -> tuple[StateFile, ...]:
    alone = len(parts) == 1
    return tuple(
        replace(file, subtask=subtask, name=file.name if alone else composite.named(start, file.name), new=False)
        for start, files in parts
        for file in files
    )


def settle(backend: Backend, base: Snapshot, groups: range) -> None:
    """Make state that was opened from such a base the subtask's own: only its key groups, and no more databases than
    are worth it.
    """
    composite.clip(backend, first_key(groups.start), first_key(groups.stop))
    if isinstance(backend, composite.Joined):
        sizes: dict[bytes, int] = {}
        for file in base.files:
            start, _ = composite.parted(file.name)
            # Of a snapshot that its backend keeps, nobody knows the size, and copying it may cost more than it saves.
            size = composite.SMALL_BYTES if is_reference(file.name) else file.bytes
            sizes[start or b""] = sizes.get(start or b"", 0) + size
        backend.fold([sizes[start] for start in sorted(sizes)])
