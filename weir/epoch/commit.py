"""Commit a checkpoint, find out what became of a commit without an answer, and discard an epoch that has failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from state_ops import errors
from state_ops.errors import RunEndedError, TransientError, plainly
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import StateFile
from weir.epoch.model import InFlightEpoch
from weir.ownership.context import RunContext
from weir.ownership.leftovers import remove
from weir.timings import record_ms


def commit(context: RunContext, epoch: InFlightEpoch, checkpoint: Checkpoint, files: Sequence[StateFile]) -> Checkpoint:
    """Return the one commit point. An error leaves the outcome unknown, so the registry is asked under a fresh
    claim."""
    record_ms(epoch.ms, "to_commit", epoch.started)
    checkpoint = replace(checkpoint, completed_at=datetime.now(UTC), ms=dict(epoch.ms))
    clock = time.perf_counter()
    try:
        context.registry.commit(checkpoint, files)
    except errors.FencedError:
        raise
    except Exception as error:
        with context.claiming:
            _settle(context, checkpoint, error)
    record_ms(epoch.ms, "commit", clock)
    remove(context, epoch.losers)
    return checkpoint


def _settle(context: RunContext, checkpoint: Checkpoint, error: Exception) -> None:
    """Settle a commit of unknown outcome: return if it landed, raise if it cannot land any more."""
    try:
        claimed = context.registry.take_over(after=context.generation)
        landed = context.registry.holds(checkpoint)
    except errors.FencedError:
        raise
    except Exception as second:
        raise RunEndedError(
            f"Nobody can tell whether checkpoint {checkpoint.id} was committed: {plainly(error)}; then:"
            f" {plainly(second)}",
            where=context.storage.full("registry/checkpoints"),
            next="Look at the storage, then run again: the next run finds out. Nothing was deleted.",
        ) from error
    context.generation = claimed
    if not landed:
        raise TransientError(
            f"The registry could not be committed: {plainly(error)}",
            where=context.storage.full("registry/checkpoints"),
            next="The epoch was declined and will be replayed. Look at the storage.",
        ) from error
