"""From a pending checkpoint to a visible one: commit, settle what is unknown, discard, publish, prune."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import structlog

from configs.settings import Settings
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.sinks import delta, overwriting, rewinding
from pipelines.runtime.workshop import Flight, Workshop, lap
from state_ops import errors, retention
from state_ops.checkpoint import (
    OUTPUT,
    TAKES_BACK,
    Checkpoint,
    StateFile,
    abandoned,
    before,
    event_time,
    from_micros,
    to_begin_from,
)
from state_ops.errors import RunEndedError, TransientError, plainly
from state_ops.ids import CheckpointId, Generation, epoch_dir
from state_ops.pins import Held
from state_ops.registry import Publication, Registry
from state_ops.transfers import at_once

log = structlog.get_logger("weir.epoch")

Done = TypeVar("Done")

HOUR = 3_600_000_000  # microseconds
DAY = 24 * HOUR


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


def as_owner(shop: Workshop, act: Callable[[], Done]) -> Done:
    """What `act` does under the run's generation; anew where the run itself has renewed its claim meanwhile, in another thread."""
    while True:
        generation = shop.generation
        try:
            return act()
        except errors.FencedError:
            with shop.claiming:
                if shop.generation == generation:
                    raise


def discard(shop: Workshop, generation: Generation, epoch: CheckpointId) -> None:
    """Delete what a declined epoch staged. Its id is never used again and was not committed, so nothing can name this.

    A failure is logged, not raised: it must not replace the error that declined the epoch, and the next take-over cleans up.
    """
    name = epoch_dir(generation, epoch)
    try:
        delete_staged(shop, name)
    except OSError as error:
        log.warning("what a declined epoch staged could not be deleted", epoch=epoch, error=plainly(error))
    shop.discarded.append(name)


def raise_if_fenced(shop: Workshop, error: BaseException) -> None:
    """FencedError if we are. What a zombie stumbles over, e.g. that its successor removed what it had staged, is no news then.

    A RunEndedError stays: the generation may be one that this very coordinator has claimed in part, and nobody runs the pipeline.
    """
    if isinstance(error, errors.FencedError | RunEndedError):
        return
    try:
        shop.registry.prove(shop.generation)
    except errors.FencedError as fenced:
        raise fenced from error
    except Exception as unknown:  # the storage is away: then the error at hand is what there is to say
        log.warning("nobody can tell who owns the pipeline", error=plainly(unknown))


def remove(shop: Workshop, files: Sequence[StateFile]) -> None:
    """Delete what an attempt that does not count has uploaded; what stays for now is swept like everything unnamed.

    Raises nothing: the epoch whose attempt it was may be committed by now.
    """
    for file in files:
        try:
            shop.storage.delete(file.path)
        except Exception as error:
            log.warning("an object of an attempt that lost could not be deleted", path=file.path, error=plainly(error))


def delete_staged(shop: Workshop, name: str) -> None:
    for stage in shop.pipeline.stages:
        shop.storage.delete_tree(f"state/{stage.uid}/{name}")
        shop.storage.delete_tree(f"channels/{stage.uid}/{name}")
    for sink in shop.pipeline.sinks:
        shop.storage.delete_tree(f"tables/{sink.table}/data/{name}")


def publish_missing(shop: Workshop, checkpoints: Sequence[Checkpoint]) -> list[Publication]:
    """Publish what some sink lacks, oldest checkpoint first; what is there already is a no-op."""
    published: list[Publication] = []
    for checkpoint in sorted(checkpoints, key=lambda row: row.id):
        own = [sink for sink, ids in checkpoint.sinks.items() if ids["id"] == checkpoint.id]
        staged: dict[str, list[StateFile]] = {sink: [] for sink in own if checkpoint.kind in TAKES_BACK}
        for file in shop.registry.files(checkpoint):
            if file.kind == OUTPUT and file.sink:
                staged.setdefault(file.sink, []).append(file)
        publishing = [partial(_publish, shop, checkpoint, sink, files) for sink, files in sorted(staged.items())]
        published += at_once(publishing)
    shop.registry.record_publications(shop.generation, published)
    return published


def _publish(shop: Workshop, checkpoint: Checkpoint, sink: str, files: Sequence[StateFile]) -> Publication:
    before = checkpoint.sinks[sink]["before"]
    if checkpoint.kind in TAKES_BACK:
        shop.tables.pop(sink, None)
        if "column" in checkpoint.sinks[sink]:
            scratch = shop.settings.work_dir
            return overwriting.overwrite(shop.storage, shop.pipeline.app_id, sink, checkpoint, files, scratch)
        return rewinding.rewind(shop.storage, shop.pipeline.app_id, sink, checkpoint, files)
    return delta.publish(shop.storage, shop.pipeline.app_id, sink, checkpoint, before, files, shop.tables)


def unpublished(registry: Registry, *, own: bool = False) -> list[Checkpoint]:
    """Retained checkpoints whose rows some sink lacks, as far as the registry knows: publishing may have been cut off.

    own: as the registry's reads.
    """
    known = {(row.checkpoint_id, row.sink) for row in registry.publications(own=own)}
    return [
        row
        for row in registry.checkpoints(own=own)
        if any((row.id, sink) not in known for sink, ids in row.sinks.items() if ids["id"] == row.id)
    ]


def needed(registry: Registry, holds: Mapping[str, Held], *, own: bool = False) -> dict[CheckpointId, list[str]]:
    """What else keeps checkpoints, in words: sinks that lack their rows, restores that read them. own: as the registry's reads."""
    found: dict[CheckpointId, list[str]] = {}
    for row in unpublished(registry, own=own):
        found.setdefault(row.id, []).append("a sink lacks its rows")
    for path, hold in holds.items():
        if hold.commit_id:
            found.setdefault(hold.checkpoint_id, []).append(f"{hold.purpose} (process {hold.pid} on {hold.host})")
            continue
        for row in registry.checkpoints(own=own):  # any of them may be what it holds
            found.setdefault(row.id, []).append(f"{hold.purpose} ({path})")
    return found


def kept_for_backfills(
    pipeline: Pipeline, settings: Settings, completed: Sequence[Checkpoint]
) -> dict[CheckpointId, str]:
    """The checkpoints from which the newest days, or hours, may be backfilled, in words. completed: oldest first."""
    known = settings.pipelines.get(pipeline.name)
    if known is None or known.backfill is None or pipeline.branch is not None:
        return {}
    left = abandoned(completed)
    line = [row for row in completed if row.id not in left]
    reached = event_time(line[-1], pipeline.lateness) if line else None
    found: dict[CheckpointId, str] = {}
    for back in range(known.backfill.keep if reached is not None else 0):
        assert reached is not None
        step = DAY if known.backfill.every == "day" else HOUR
        begins = (reached // step - back) * step
        earlier = before(line, begins, pipeline.lateness)
        for row in to_begin_from(earlier, pipeline.timed) if earlier else ():
            found.setdefault(row.id, f"the newest before {from_micros(begins):%Y-%m-%d %H:%M}, to backfill from")
    return found


def prune(
    shop: Workshop, keep: int | None = None, also: Mapping[CheckpointId, Sequence[str]] | None = None
) -> tuple[CheckpointId, ...]:
    """Drop the checkpoints beyond the retained number, rows first, then the objects that only they named.

    keep: how many without a name stay, by default as the settings say. also: what epochs in flight need, in words.
    """
    keep = shop.settings.checkpoints.num_retained if keep is None else keep
    # The owner plans from what it knows: rows go by a commit right after the very version that it knows, objects after `prove`.
    completed = shop.registry.checkpoints(own=True)
    listings = {row.id: shop.registry.files(row) for row in completed}
    live, dead = shop.watcher.sorted_out(shop.storage)
    why = needed(shop.registry, live, own=True)
    for id, said in kept_for_backfills(shop.pipeline, shop.settings, completed).items() if keep else ():
        why.setdefault(id, []).append(said)
    for id, reasons in (also or {}).items():
        why.setdefault(id, []).extend(reasons)
    decided = retention.plan(completed, listings, keep, shop.registry.pins(own=True), why)
    retention.apply(shop.registry, shop.storage, shop.generation, decided, shop.watcher)
    shop.storage.delete_files(dead)
    return decided.drop
