"""From a pending checkpoint to a visible one: commit, settle what is unknown, discard, publish, prune."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from pipelines.runtime.epoch.model import Flight
from pipelines.runtime.ownership.context import Workshop
from pipelines.runtime.ownership.leftovers import remove
from pipelines.runtime.timings import lap
from state_ops import errors
from state_ops.checkpoints.checkpoint import (
    Checkpoint,
    StateFile,
)
from state_ops.errors import RunEndedError, TransientError, plainly


def commit(shop: Workshop, flight: Flight, checkpoint: Checkpoint, files: Sequence[StateFile]) -> Checkpoint:
    """The one commit point. An error leaves the outcome unknown, so the registry is asked under a fresh claim."""
    lap(flight.ms, "to_commit", flight.started)
    checkpoint = replace(checkpoint, completed_at=datetime.now(UTC), ms=dict(flight.ms))
    clock = time.perf_counter()
    try:
        shop.registry.commit(checkpoint, files)
    except errors.FencedError:
        raise
    except Exception as error:
        with shop.claiming:
            _settle(shop, checkpoint, error)
    lap(flight.ms, "commit", clock)
    remove(shop, flight.losers)
    return checkpoint


def _settle(shop: Workshop, checkpoint: Checkpoint, error: Exception) -> None:
    """After a commit of unknown outcome: return if it landed, raise if it cannot land any more."""
    try:
        claimed = shop.registry.take_over(after=shop.generation)
        landed = shop.registry.holds(checkpoint)
    except errors.FencedError:
        raise
    except Exception as second:
        raise RunEndedError(
            f"Nobody can tell whether checkpoint {checkpoint.id} was committed: {plainly(error)}; then: {plainly(second)}",
            where=shop.storage.full("registry/checkpoints"),
            next="Look at the storage, then run again: the next run finds out. Nothing was deleted.",
        ) from error
    shop.generation = claimed
    if not landed:
        raise TransientError(
            f"The registry could not be committed: {plainly(error)}",
            where=shop.storage.full("registry/checkpoints"),
            next="The epoch was declined and will be replayed. Look at the storage.",
        ) from error
