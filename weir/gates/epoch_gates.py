"""The gates that look at an epoch as a whole: its figures, and its state as it would be committed.

They are asked when everything has been uploaded and nothing is committed: what they see is what the checkpoint will
have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyarrow as pa

from state_ops.backends import composite
from state_ops.backends.base import Backend
from state_ops.backends.loader import named
from state_ops.errors import DamageError
from state_ops.records import snapshot_files
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.snapshot_files import Snapshot, StateFile, snapshots_of
from state_ops.snapshots import snapshot
from state_ops.storage.temp_dirs import scratch
from weir.definition import FIGURES, STATE, Stage
from weir.gates import evaluation
from weir.gates.evaluation import GateVerdict
from weir.gates.restore_gates import SAMPLE_ROWS
from weir.inspection.view import View, view_of
from weir.ownership.context import RunContext
from weir.ownership.local_paths import objects, work_dir


def verdicts(
    context: RunContext, deadline: float, checkpoint: Checkpoint, files: Sequence[StateFile]
) -> list[GateVerdict]:
    """Return what the gates on figures and state say of an epoch.

    Figures are looked at where rows came for the stage, state where some of it is new. Raises PipelineError for a gate
    that cannot be evaluated.

    Args:
        deadline: Of the epoch, on time.monotonic().
        checkpoint, files: As they would be committed.
    """
    verdicts: list[GateVerdict] = []
    for stage in context.pipeline.stages:
        stats, uid = checkpoint.operators[stage.uid], stage.uid
        asked = [gate for gate in stage.gates if gate.of == FIGURES]
        if asked and has_rows(stats):
            verdicts += evaluation.evaluated(f"figures of {uid}", uid, asked, figures_row(stats))
        asked = [gate for gate in stage.gates if gate.of == STATE]
        new = any(file.new and file.operator == uid and file.kind == snapshot_files.STATE for file in files)
        if asked and new and stats.has_state:
            rows = _sample(context, deadline, checkpoint, stage, snapshots_of(tuple(files), uid))
            judged = evaluation.evaluated(f"state of {uid}", uid, asked, rows)
            verdicts += evaluation.with_keys(judged, stage.key, rows.combine_chunks)
    return verdicts


def has_rows(stats: OperatorStats) -> bool:
    """Return whether rows came for a stage, by what a checkpoint records of it."""
    return any((stats.rows_in, stats.rows_null_key, stats.rows_dropped, stats.rows_quarantined))


def figures_row(stats: OperatorStats) -> pa.Table:
    """Return what a checkpoint records of a stage, as one row with a column for each number."""
    numbers = {name: [value] for name, value in stats.to_json().items() if type(value) is int}
    return pa.table(numbers, schema=pa.schema([(name, pa.int64()) for name in numbers]))


def _sample(
    context: RunContext, deadline: float, checkpoint: Checkpoint, stage: Stage, snapshots: Mapping[int, Snapshot]
) -> pa.Table:
    """Return a sample of a stage's state: of each subtask its share, from other key groups each epoch."""
    view = view_of(context.pipeline, context.settings, context.storage, checkpoint, stage.uid, snapshots)
    share, parts = math.ceil(SAMPLE_ROWS / max(1, len(snapshots))), [view.schema.empty_table()]
    for subtask, taken in snapshots.items():
        with _opened(context, deadline, view, taken) as backend:
            left = share
            for table in _turned(view, backend, subtask, int(checkpoint.id)):
                parts.append(table.slice(0, left))
                left -= parts[-1].num_rows
                if left <= 0:
                    break
    return pa.concat_tables(parts).slice(0, SAMPLE_ROWS)


def _turned(view: View, backend: Backend, subtask: int, epoch: int) -> Iterator[pa.Table]:
    """Yield a subtask's rows, from the key group on whose turn it is in this epoch."""
    groups = view.groups(subtask)
    first = groups[epoch % len(groups)]
    for turn in (range(first, groups.stop), range(groups.start, first)):
        yield from view.rows(backend, turn)


@contextmanager
def _opened(context: RunContext, deadline: float, view: View, taken: Snapshot) -> Iterator[Backend]:
    """Open a snapshot that has just been uploaded.

    Its files are linked if this host has them, else fetched.
    """
    factory, home = named(view.backend), work_dir(context)
    with scratch(home, ".gates-") as directory:
        immutable, kept = composite.is_immutable(factory), objects(context.settings)
        snapshot.fetch(context.storage, taken, directory, deadline, immutable, kept, home / view.uid)
        try:
            backend = composite.opened(factory, directory, view.options)
            try:
                yield backend
            finally:
                backend.close()
        except DamageError as error:
            snapshot.raise_if_rotten(error, taken, kept, home / view.uid)
            raise
