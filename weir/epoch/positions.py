"""Positions before rows, where rows are delivered at most once (docs/adr/0066-at-most-once-commits-positions-first.md).

    1 2 3 4     4 is the newest checkpoint
    1 2 3 4 5   5 = 4 with the sources' positions behind what epoch 6 is about to apply
    1 2 3 4 5 6 6 has applied it

From the commit of 5 on nobody reads those rows again: if epoch 6 fails, they are lost, and the next epoch continues 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from state_ops.counts import counted
from state_ops.errors import FencedError, RunEndedError, plainly
from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import POSITIONS, ROWS_AHEAD, ROWS_LOST, Checkpoint, is_untold, rows_lost, told_times
from state_ops.records.snapshot_files import StateFile
from weir.epoch.model import InFlightEpoch
from weir.ownership import derived_checkpoint
from weir.ownership.context import RunContext


def commit(
    context: RunContext, epoch: InFlightEpoch, head: Checkpoint | None, id: CheckpointId
) -> tuple[Checkpoint, Sequence[StateFile]]:
    """Commit the newest checkpoint with the positions behind an epoch that is about to begin; returns it and its files.

    Args:
        head: The newest checkpoint.
        id: Of the new one.

    Raises:
        FencedError: A newer owner took over.
        RunEndedError: Nobody can tell whether it was committed.
    """
    base = head or derived_checkpoint.nothing_before(context.generation, id, epoch.now)
    rows = sum(planned.rows for planned in epoch.plan.slices.values())
    offsets = {
        name: told_times(position, [(base.offsets.get(name) or {}).get("newest"), position.get("newest")],
                         untold=is_untold(base.offsets.get(name)))
        for name, position in epoch.source_offsets.offsets.items()
    }  # fmt: skip
    base = replace(
        base,
        offsets=offsets,
        inputs=epoch.recorded_inputs(),
        totals={**base.totals, ROWS_AHEAD: rows, ROWS_LOST: rows_lost(head)},
    )
    files = derived_checkpoint.unchanged(context, head) if head is not None else []
    try:
        row = derived_checkpoint.commit(
            context, base, id, files, kind=POSITIONS, head=head, parent=head.id if head is not None else None,
            what=f"{counted(rows, 'row')} before epoch {epoch.pending.id}",
        )  # fmt: skip
    except FencedError:
        raise
    except Exception as error:
        raise RunEndedError(
            f"Nobody can tell whether the positions before epoch {epoch.pending.id} were committed: {plainly(error)}",
            where=context.storage.full("registry/checkpoints"),
            next="Look at the storage, then run again: the next run finds out. If they were, its rows are lost.",
        ) from error
    for name in epoch.plan.slices:
        context.readers[name].committed(row.offsets[name])
    return row, context.registry.files(row)
