"""One run of a pipeline's coordinator: take over, recover, then epochs until there is a reason to stop.

`run` is a generator: it yields a report for each completed epoch, to whoever called it (CLI, Dagster, a test). Only
the generation gives rights; everything that a dead predecessor left is found and finished or removed here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import structlog

from configs.settings import Settings
from pipelines.runtime.commit import prune, publish_missing
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.epoch import complete, finish
from pipelines.runtime.executor import Executor
from pipelines.runtime.sources.files import FilesReader
from pipelines.runtime.spark_executor import SparkExecutor
from pipelines.runtime.workshop import Cut, EpochReport, Workshop
from state_ops import lease, retention
from state_ops.checkpoint import Checkpoint
from state_ops.coordinator import Trigger, TriggerPolicy, next_id
from state_ops.errors import (
    BusyError,
    FencedError,
    GateError,
    InputError,
    PipelineError,
    RunEndedError,
    StageError,
    TransientError,
    WeirError,
)
from state_ops.frames import schema_from_json
from state_ops.ids import CheckpointId, parse_epoch_dir
from state_ops.lease import Heartbeat, Request
from state_ops.registry import Registry
from state_ops.storage import Storage

log = structlog.get_logger("weir.run")

# Replaying the same slice with the same code fails the same way, so these are not tolerated, whatever the setting; and
# after a RunEndedError only a successor can know more.
_FINAL = (GateError, InputError, PipelineError, RunEndedError, StageError)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How this run is triggered and when it ends.

    trigger, reason: what started it; recorded for epochs that no slice limit cut. interval: seconds between barriers
    that the run cuts by itself when data waits; None: only requests do (in Dagster the sensor is the trigger).
    until_caught_up: end when there is no more input, after lingering `linger_seconds` for more. drain: then close every
    window and end. max_seconds: end at the first barrier after this time.
    """

    trigger: Trigger = Trigger.MANUAL
    reason: str = "weir run"
    interval: float | None = None
    until_caught_up: bool = False
    linger_seconds: float = 0.0
    drain: bool = False
    max_seconds: float | None = None
    run_id: str | None = None


@dataclass
class Loop:
    """Where the run stands between two epochs."""

    head: Checkpoint | None
    failures: int = 0
    last_end: float = field(default_factory=time.monotonic)
    catching_up: bool = True
    to_drain: set[tuple[str, str]] | None = None
    begun: list[CheckpointId] = field(default_factory=list)


def open_storage(pipeline: Pipeline, settings: Settings) -> tuple[Storage, Registry]:
    """The pipeline's storage and registry; reading them needs no right and starts nothing."""
    storage = Storage(settings.storage_uri(pipeline.name))
    return storage, Registry(storage, pipeline.app_id)


def readers(pipeline: Pipeline, settings: Settings) -> dict[str, FilesReader]:
    """A reader for each source, its placeholders filled from the configuration."""
    return {
        source.name: FilesReader(source, settings.resolve(pipeline.name, source.pattern)) for source in pipeline.sources
    }


def run(
    pipeline: Pipeline, settings: Settings, options: RunOptions, executor: Executor | None = None
) -> Iterator[EpochReport]:
    """Coordinate the pipeline until the options say to stop; yields a report for each completed epoch.

    executor: what runs the stages, by default Spark, which the first epoch starts.
    Raises BusyError when a coordinator is alive, FencedError when a newer one took over, and the error of an epoch that
    failed for good. Everything that a failed epoch staged has been discarded by then.
    """
    storage, registry = open_storage(pipeline, settings)
    sources = readers(pipeline, settings)
    predecessor = lease.read(storage)
    if lease.watch(storage):
        raise _busy(pipeline, predecessor)
    _drop_stale_stops(storage)
    generation = registry.take_over()
    head = registry.head()
    last_id = max([head.id if head else 0, predecessor.last_id if predecessor else 0])
    loop = Loop(head, begun=[CheckpointId(last_id)])
    heartbeat = Heartbeat(storage, generation, CheckpointId(last_id), settings.lease.heartbeat_seconds, options.run_id)
    with heartbeat:
        runs = executor or SparkExecutor(settings, app=f"weir {pipeline.name}")
        shop = Workshop(pipeline, settings, storage, registry, generation, runs, sources, options.run_id)
        shop.expected.update({name: schema_from_json(raw) for name, raw in (head.inputs if head else {}).items()})
        try:
            recover(shop)
            check_fits(pipeline, head)
            yield from _epochs(shop, options, loop, heartbeat)
        except OSError as error:
            raise TransientError(
                f"{type(error).__name__}: {error}",
                where=storage.uri,
                next=f"Look at the storage and the disk, then `weir run {pipeline.name}`: it resumes from the last checkpoint.",
            ) from error


def check_fits(pipeline: Pipeline, head: Checkpoint | None) -> None:
    """Refuse a pipeline that lacks a stage whose state, or a source whose position, the newest checkpoint holds.

    Going on would drop the state with the next pruning, or read everything again into the state that there is.
    """
    if head is None:
        return
    stages = {uid for uid, figures in head.operators.items() if figures["schema"]} - {
        stage.uid for stage in pipeline.stages
    }
    sources = set(head.offsets) - {source.name for source in pipeline.sources}
    for kind, gone in (("stage", stages), ("source", sources)):
        left = sorted(gone - set(pipeline.retired))
        if left:
            raise PipelineError(
                f"The newest checkpoint has a {kind} {left[0]!r}, which the pipeline {pipeline.name} has no more.",
                where=f"checkpoint {head.id}",
                next=f"Give the {kind} its name back, or say that it is gone for good: Pipeline(..., retired=({left[0]!r},)).",
            )


def recover(shop: Workshop) -> None:
    """Finish what a dead predecessor began: publish what a sink lacks, prune, remove what nothing names any more."""
    completed = shop.registry.checkpoints()
    known = {(row.checkpoint_id, row.sink) for row in shop.registry.publications()}
    unpublished = [
        row
        for row in completed
        if any((row.id, sink) not in known for sink, ids in row.sinks.items() if ids["id"] == row.id)
    ]
    if unpublished:
        log.info("publishing what the last run left", checkpoints=[row.id for row in unpublished])
        publish_missing(shop, unpublished)
    prune(shop)
    shop.registry.drop_stray_listings(shop.generation)
    shop.registry.remove_unnamed()
    completed = shop.registry.checkpoints()
    listings = {row.id: shop.registry.files(row) for row in completed}
    for orphan in retention.orphans(shop.storage, listings, shop.generation):
        shop.storage.delete(orphan.path)
    _remove_unpublishable(shop, completed[-1].id if completed else CheckpointId(0))


def _remove_unpublishable(shop: Workshop, head: CheckpointId) -> None:
    """Staged rows of epochs that never completed: of an older, hence fenced, generation and above the head."""
    for sink in shop.pipeline.sinks:
        base = f"tables/{sink.table}/data"
        for name in shop.storage.list_dirs(base):
            parsed = parse_epoch_dir(name)
            if parsed is not None and parsed[0] < shop.generation and parsed[1] > head:
                shop.storage.delete_tree(f"{base}/{name}")


def _epochs(shop: Workshop, options: RunOptions, loop: Loop, heartbeat: Heartbeat) -> Iterator[EpochReport]:
    policy = TriggerPolicy(options.interval, shop.settings.checkpoints.min_pause_seconds)
    started = time.monotonic()
    waiting_since: float | None = None
    while True:
        requests = lease.pending(shop.storage)
        stop = next((request for request in requests if request.kind == "stop"), None)
        expired = options.max_seconds is not None and time.monotonic() - started > options.max_seconds
        for name, reader in shop.readers.items():
            reader.check(_position(loop.head, name))
        waiting = _waiting(shop, loop.head)
        if stop is not None and stop.drain and loop.to_drain is None:
            loop.to_drain = waiting  # what lands from now on is for the next run
        draining = loop.to_drain is not None and bool(waiting & loop.to_drain)
        if stop is not None and not draining:
            if stop.drain:
                yield from _drain(shop, loop, heartbeat, stop.reason or "weir stop --drain")
            heartbeat.outcome = "drained" if stop.drain else "stopped"
            for request in requests:
                if request.kind == "stop":
                    lease.take(shop.storage, request)
            return
        if expired and stop is None:
            return
        barriers = [request for request in requests if request.kind == "barrier"]
        backlog = bool(waiting)
        if not backlog:
            # A sensor asks because files wait. An epoch has read them meanwhile: there is nothing left to cut.
            for request in [request for request in barriers if request.trigger == Trigger.SENSOR]:
                barriers.remove(request)
                lease.take(shop.storage, request)
        due = policy.due(
            since_last=time.monotonic() - loop.last_end,
            backlog=backlog,
            requested=bool(barriers),
            catching_up=loop.catching_up or draining,
        )
        if due and (backlog or barriers):
            waiting_since = None
            yield from _one(shop, loop, heartbeat, _cut(shop, loop, options, barriers))
            for request in barriers:
                lease.take(shop.storage, request)
            continue
        if not backlog:
            loop.catching_up = False
        if options.drain and not backlog:
            yield from _drain(shop, loop, heartbeat, options.reason)
            heartbeat.outcome = "drained"
            return
        waiting_since = waiting_since if waiting_since is not None else time.monotonic()
        if options.until_caught_up and not backlog and time.monotonic() - waiting_since >= options.linger_seconds:
            return
        time.sleep(shop.settings.run.poll_seconds)


def _waiting(shop: Workshop, head: Checkpoint | None) -> set[tuple[str, str]]:
    """Source and name of every file that has arrived and was not read."""
    return {
        (name, file.name) for name, reader in shop.readers.items() for file in reader.backlog(_position(head, name))
    }


def _position(head: Checkpoint | None, source: str) -> dict | None:
    return head.offsets.get(source) if head else None


def _cut(shop: Workshop, loop: Loop, options: RunOptions, barriers: list[Request]) -> Cut:
    """Fix the slices of the next epoch, and say what cut it there."""
    slices = {
        name: reader.plan(_position(loop.head, name), shop.settings.epoch, shop.expected.get(name))
        for name, reader in shop.readers.items()
    }
    full = [name for name, planned in slices.items() if planned.limited]
    if full:
        return Cut(Trigger.SLICE_LIMIT, f"slice limit reached in {', '.join(full)}", slices)
    if barriers:
        asked = barriers[0]
        tick = f" (tick {asked.tick})" if asked.tick else ""
        return Cut(Trigger(asked.trigger), f"{asked.reason}{tick}", slices)
    if loop.catching_up or options.interval is None:
        return Cut(options.trigger, options.reason, slices)
    return Cut(Trigger.INTERVAL, f"every {options.interval:g} s", slices)


def _drain(shop: Workshop, loop: Loop, heartbeat: Heartbeat, reason: str) -> Iterator[EpochReport]:
    """Close every window. A tolerated failure is no end: a run that says it has drained has."""
    before = loop.head
    while loop.head is before:
        yield from _one(shop, loop, heartbeat, Cut(Trigger.DRAIN, reason, {}, drain=True))


def _one(shop: Workshop, loop: Loop, heartbeat: Heartbeat, cut: Cut) -> Iterator[EpochReport]:
    """Run one epoch; a failure is tolerated as often in a row as the settings say, then raised."""
    epoch = next_id(loop.head, loop.begun)
    loop.begun = [epoch]
    heartbeat.begin(epoch)
    try:
        report = complete(shop, epoch, loop.head, cut)
    except FencedError:
        raise
    except WeirError as error:
        loop.failures += 1
        loop.last_end = time.monotonic()
        heartbeat.renew(shop.generation)
        if isinstance(error, _FINAL) or loop.failures > shop.settings.checkpoints.tolerable_failures:
            raise
        log.warning("epoch declined, will be replayed", epoch=epoch, failure=loop.failures, error=str(error))
        return
    heartbeat.renew(shop.generation)
    loop.failures, loop.head = 0, report.checkpoint
    report = finish(shop, report)
    loop.last_end = time.monotonic()
    yield report


def _drop_stale_stops(storage: Storage) -> None:
    """A stop that nobody was there to take must not stop the next run at once."""
    for request in lease.pending(storage):
        if request.kind == "stop":
            lease.take(storage, request)


def _busy(pipeline: Pipeline, holder: lease.Lease | None) -> BusyError:
    who = f"process {holder.pid} on {holder.host}, generation {holder.generation}" if holder else "unknown"
    return BusyError(
        f"A coordinator of {pipeline.name} is running.",
        where=who,
        next=f"`weir stop {pipeline.name}` ends it at its next barrier; `weir status {pipeline.name}` shows what it does.",
    )


def lag(pipeline: Pipeline, settings: Settings, head: Checkpoint | None) -> Mapping[str, int]:
    """Files that wait, by source."""
    return {name: len(reader.backlog(_position(head, name))) for name, reader in readers(pipeline, settings).items()}
