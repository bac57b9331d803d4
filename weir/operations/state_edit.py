"""An edit of one stage's state: snapshots of its subtasks that have other rows, and the checkpoint that names them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends import composite
from state_ops.backends.loader import named
from state_ops.counts import agrees, counted
from state_ops.errors import WeirError
from state_ops.ids import CheckpointId, epoch_dir, new_attempt_id
from state_ops.logs import Logger
from state_ops.moments import to_micros
from state_ops.records.checkpoint import EDIT, EDITED, Checkpoint, stats_of
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.snapshot_files import STATE, Snapshot, StateFile, snapshots_of
from state_ops.rows.row_store import RowStore
from state_ops.schema.descriptors import GROUP, VALUE_STATE
from state_ops.schema.state_schema import TOUCHED, StateSchema
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from weir.operators import kinds
from weir.operators.expiring_keys import index_changes
from weir.ownership.derived_checkpoint import commit, nothing_before, unchanged
from weir.ownership.local_paths import local_directory, objects
from weir.ownership.ownership import Ownership
from weir.ownership.pipeline_storage import backend_options

log = Logger("weir.import")

_BATCH_ROWS = 100_000
IDLE = dict.fromkeys(
    ("rows_in", "rows_out", "rows_late", "rows_duplicate", "rows_null_key", "rows_dropped", "rows_quarantined"), 0
)


@dataclass(frozen=True, slots=True)
class EditedState:
    """The stage's state that is edited.

    Attributes:
        stats: What a checkpoint's row records of the stage.
        inputs: The columns of the sources, for the first checkpoint of a pipeline.
    """

    uid: str
    keys: pa.Schema
    state: StateSchema
    stats: OperatorStats
    inputs: dict[str, Any]
    head: Checkpoint | None

    @property
    def is_there(self) -> bool:
        """True if the newest checkpoint has state of the stage."""
        return stats_of(self.head, self.uid).has_state


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows with their key groups, and which subtask has which."""

    rows: pa.Table
    groups: np.ndarray
    owners: np.ndarray

    def by_subtask(self) -> dict[int, int]:
        numbers, counts = np.unique(self.owners, return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def carry_out(owner: Ownership, target: EditedState, routed: Routed, replaces: bool, reason: str) -> Checkpoint:
    """Write, upload and commit an edit, after the newest checkpoint was proven whole.

    Args:
        replaces: Whether subtasks start empty instead of from what they have.

    Returns:
        The edit's own checkpoint.

    Raises:
        FencedError: A newer owner took over.
    """
    context, head = owner.context, target.head
    id = owner.begin(head)
    before = head or nothing_before(context.generation, id, datetime.now(UTC))
    listing = unchanged(context, head) if head else []
    bases = {} if replaces else snapshots_of(tuple(listing), target.uid)
    place = f"state/{target.uid}/{epoch_dir(context.generation, id)}"
    state: list[StateFile] = []
    try:
        for subtask in range(target.stats.parallelism):
            chosen = np.flatnonzero(routed.owners == subtask)
            if len(chosen):
                now = to_micros(before.epoch_now)
                state += _written(owner, target, routed, chosen, id, subtask, bases.get(subtask), now)
            else:
                state += snapshot.unchanged(bases.get(subtask))
    except BaseException:
        with suppress(OSError, WeirError):  # what cannot be deleted now is removed by the next owner
            context.storage.delete_tree(place)
        raise
    others = [file for file in listing if file.kind != STATE or file.operator != target.uid]
    stats = target.stats.updated(swept={} if replaces else target.stats.swept)
    number = routed.rows.num_rows
    row = commit(
        context,
        edited(before, target.uid, stats, others, state, id, target.inputs),
        id,
        others + state,
        kind=EDIT,
        what=f"{counted(number, 'row')} of {target.uid} {agrees(number, 'replaces', 'replace')} its state"
        if replaces
        else f"{counted(number, 'row')} of {target.uid} merged",
        reason=reason,
        head=head,
        parent=head.id if head else None,
    )
    log.info(
        "state imported",
        pipeline=context.pipeline.title,
        stage=target.uid,
        checkpoint=int(id),
        rows=routed.rows.num_rows,
        mode="replace" if replaces else "merge",
    )
    return row


def _written(
    owner: Ownership,
    target: EditedState,
    routed: Routed,
    chosen: np.ndarray,
    id: CheckpointId,
    subtask: int,
    base: Snapshot | None,
    now: int,
) -> tuple[StateFile, ...]:
    """Upload one subtask's snapshot with the chosen rows in it, and return it.

    Args:
        now: The processing time, for a time to live.
    """
    context = owner.context
    home = local_directory(context.settings, context.pipeline, context.storage) / target.uid / str(subtask)
    attempt = Attempt(target.uid, subtask, context.generation, id, new_attempt_id(), home)
    kind = named(target.stats.backend)
    is_immutable = composite.is_immutable(kind)
    where = f"stage {target.uid}, import {id}, subtask {subtask}"
    try:
        forked = snapshot.working_copy(context.storage, attempt, base, None, is_immutable, objects(context.settings))
        with snapshot.healing(forked):
            key = context.storage.full(attempt.reference)
            options = replace(backend_options(context.settings), where=where, key=key)
            backend = composite.opened(kind, forked.db, options)
            try:
                rows = RowStore(backend, target.state, target.keys, VALUE_STATE)
                for start in range(0, len(chosen), _BATCH_ROWS):
                    some = chosen[start : start + _BATCH_ROWS]
                    keys, fields, there = _frames(target, routed.rows.take(pa.array(some)), routed.groups[some], now)
                    # The entry that says when a key expires stands beside its row.
                    if kinds.indexes_keys(target.stats.window):
                        backend.write(*index_changes(keys, target.keys, rows.get(keys)[0], fields))
                    rows.put(keys, fields, there)
                rows.barrier()
                taken = snapshot.take(attempt, backend)
            finally:
                backend.close()
        prepared = snapshot.prepare(attempt, forked, taken, is_immutable)
        return snapshot.upload(context.storage, attempt, prepared, base).files
    except BaseException:
        shutil.rmtree(attempt.directory, ignore_errors=True)
        raise


def _frames(
    target: EditedState, rows: pa.Table, groups: np.ndarray, now: int
) -> tuple[pl.DataFrame, pl.DataFrame, Any]:
    """Return the arguments of `RowStore.put`: keys with their groups, fields, and that all of these are present."""
    frame = frames.from_arrow(rows)
    keys = frame.select(target.keys.names).with_columns(pl.Series(GROUP, groups.astype(np.int32)))
    fields = frame.select(pl.exclude(target.keys.names))
    if TOUCHED in target.state.arrow.names:
        fields = fields.with_columns(pl.lit(now, pl.Int64).alias(TOUCHED))
    return keys, fields, np.ones(len(keys), bool)


def edited(
    before: Checkpoint,
    uid: str,
    stats: OperatorStats,
    others: Sequence[StateFile],
    state: Sequence[StateFile],
    id: CheckpointId,
    inputs: dict[str, Any],
) -> Checkpoint:
    """Return the parts of the edit's checkpoint: those of the newest one, with the edited stage's state and all other
    stages idle.

    Args:
        before: The newest checkpoint.
        uid: Of the edited stage.
        stats: What is recorded of it.
        others: The files of other stages, and of rows that wait.
        state: All files of the edited stage.
        inputs: The columns of sources that the newest checkpoint does not know.
    """
    new = [file for file in state if file.new]
    added = {"files_new": len(new), "bytes_new": sum(file.bytes for file in new)}
    bytes_total = sum(file.bytes for file in state)
    operators = {other: _idle(recorded) for other, recorded in before.operators.items()}
    operators[uid] = _idle(stats).updated(files_total=len(state), bytes_total=bytes_total, **added)
    sums = {name: before.totals.get(name, 0) + count for name, count in added.items()}
    return replace(
        before,
        operators=operators,
        inputs={**inputs, **before.inputs},
        totals={**before.totals, **sums, EDITED: int(id)},
        bytes_total=bytes_total + sum(file.bytes for file in others if file.kind == STATE),
    )


def _idle(stats: OperatorStats) -> OperatorStats:
    """Return the record of a stage in a checkpoint in which it has done nothing."""
    return stats.updated(**IDLE, outputs=dict.fromkeys(stats.outputs, 0), files_new=0, bytes_new=0, ms={}, cache=None)
