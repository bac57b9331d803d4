"""One run of a pipeline's coordinator: take over, recover, then epochs until there is a reason to stop.

Here it is decided when a barrier is cut, and where; `scheduler` takes the epochs from there to their end. `run` is a
generator: it yields a report for each completed epoch, to whoever called it (CLI, Dagster, a test). Only the generation
gives rights; everything that a dead predecessor left is found and finished or removed here."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from configs.settings import Settings
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.epoch.model import EpochReport, SourceOffsets
from pipelines.runtime.epoch.scheduler import EpochScheduler
from pipelines.runtime.epoch.step_runner import StepRunner, Threads
from pipelines.runtime.execution.executor import Executor
from pipelines.runtime.operators.compatibility import advice, structure
from pipelines.runtime.ownership import savepoints
from pipelines.runtime.ownership.context import RunContext
from pipelines.runtime.ownership.epoch_plan import EpochPlan
from pipelines.runtime.ownership.ownership import Ownership
from pipelines.runtime.ownership.pipeline_storage import open_storage as open_storage
from pipelines.runtime.restore.recovery import owning
from pipelines.runtime.restore.start_from import start
from pipelines.runtime.run import maintenance
from state_ops.checkpoints.checkpoint import Checkpoint
from state_ops.checkpoints.coordinator import Coordinator, Policy, retry_pause
from state_ops.checkpoints.pending_checkpoint import Trigger
from state_ops.coordination import gate_hold, requests, suspension
from state_ops.coordination.lease import Heartbeat
from state_ops.coordination.requests import Request
from state_ops.coordination.suspension import Suspension
from state_ops.errors import (
    ConfigurationError,
    GateError,
    InputError,
    PipelineError,
    RunEndedError,
    StageError,
    TransientError,
    WeirError,
    plainly,
)
from state_ops.ids import CheckpointId

log = structlog.get_logger("weir.run")

# Replaying the same slice with the same code fails the same way, so these are not tolerated, whatever the setting; and
# after a RunEndedError only a successor can know more.
_FINAL = (ConfigurationError, GateError, InputError, PipelineError, RunEndedError, StageError)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How this run is triggered and when it ends.

    trigger, reason: what started it; recorded for epochs that no slice limit cut. interval: seconds between barriers
    that the run cuts by itself when data waits; None: only requests do.
    until_caught_up: end when there is no more input, after lingering `linger_seconds` for more. drain: then close every
    window and end. max_seconds: end at the first barrier after this time. start_from: PIPELINE:SAVEPOINT, for a
    pipeline that has no checkpoint yet (`start_from.start`). automatic: no person asked for this run; a sensor's is so
    whatever is said here."""

    trigger: Trigger = Trigger.MANUAL
    reason: str = "weir run"
    interval: float | None = None
    until_caught_up: bool = False
    linger_seconds: float = 0.0
    drain: bool = False
    max_seconds: float | None = None
    run_id: str | None = None
    start_from: str | None = None
    automatic: bool = False

    @property
    def by_a_person(self) -> bool:
        """Whether this run may begin again what a person has ended."""
        return not self.automatic and self.trigger is not Trigger.SENSOR


@dataclass
class Loop:
    """Where the run stands between two barriers."""

    coordinator: Coordinator
    scheduler: EpochScheduler
    catching_up: bool = True
    to_drain: set[tuple[str, str]] | None = None

    @property
    def head(self) -> Checkpoint | None:
        return self.coordinator.head


def run(
    pipeline: Pipeline,
    settings: Settings,
    options: RunOptions,
    executor: Executor | None = None,
    runner: StepRunner | None = None,
    began: Callable[[Ownership], None] | None = None,
) -> Iterator[EpochReport]:
    """Coordinate the pipeline until the options say to stop; yields a report for each completed epoch, in their order.

    executor: what runs the stages, by default Spark, which the first epoch starts. runner: what runs steps beside each
    other, by default threads. began: is told once the pipeline is owned, before anything else is done.
    A run that a person asked for begins again what a person had ended; any other ends then without an epoch (`halted`),
    since it may have waited in a queue meanwhile.
    Raises BusyError when a coordinator is alive, FencedError when a newer one took over, and the error of an epoch that
    failed for good. Everything that a failed epoch staged has been discarded by then.
    """
    if _is_halted(pipeline, settings, options):
        return
    with owning(pipeline, settings, executor, options.run_id, claimed_by=began) as owner:
        if options.by_a_person:
            suspension.clear(owner.context.storage)
        elif _is_halted(pipeline, settings, options):  # now that the lease is written: see `stopping.end`
            return
        head = owner.head if options.start_from is None else start(owner, settings, options.start_from)
        check_fits(pipeline, head)
        owner.context.held = gate_hold.is_there(owner.context.storage)
        coordinator = coordinator_of(owner.context, options, owner.last_id)
        threads = Threads()
        scheduler = EpochScheduler(
            owner.context, coordinator, owner.heartbeat, runner or threads, partial(_tolerated, coordinator)
        )
        try:
            yield from _epochs(owner.context, options, Loop(coordinator, scheduler), owner.heartbeat)
        finally:
            try:
                scheduler.close()
            finally:
                threads.close()


def halted(pipeline: Pipeline, settings: Settings, options: RunOptions) -> str | None:
    """Why a run with these options does not begin, in words: a person has ended the pipeline, and no person asked for
    this run."""
    if options.by_a_person:
        return None
    found = suspension.read(open_storage(pipeline, settings)[0])
    if found is None:
        return None
    return f"{found.how} by a person ({found.why}): Materialize, `weir run` or `weir resume` begin again"


def _is_halted(pipeline: Pipeline, settings: Settings, options: RunOptions) -> bool:
    why = halted(pipeline, settings, options)
    if why is not None:
        log.info("the run ends without an epoch", pipeline=pipeline.title, reason=why)
    return why is not None


def coordinator_of(context: RunContext, options: RunOptions, last_id: CheckpointId) -> Coordinator:
    """Who decides in this run, knowing what is retained."""
    configured = context.settings.checkpoints
    policy = Policy(
        interval=options.interval,
        min_pause=configured.min_pause_seconds,
        timeout=configured.timeout_seconds,
        max_concurrent=configured.max_concurrent,
        tolerable_failures=configured.tolerable_failures,
        num_retained=configured.num_retained,
    )
    retained = context.registry.checkpoints()
    listings = {row.id: context.registry.files(row) for row in retained}
    return Coordinator(policy, context.generation, retained, listings, last_id, time.monotonic())


def check_fits(pipeline: Pipeline, head: Checkpoint | None) -> None:
    """Refuse a pipeline that lacks a stage whose state, or a source whose position, the newest checkpoint holds.

    Going on would drop the state with the next pruning, or read everything again into the state that there is.
    """
    if head is None:
        return
    stopping = [one for one in structure(pipeline, head) if one.verdict.stops]
    if stopping:
        what = " ".join(dict.fromkeys(one.what for one in stopping))
        raise PipelineError(what, where=f"checkpoint {head.id}", next=advice(stopping))


def _epochs(context: RunContext, options: RunOptions, loop: Loop, heartbeat: Heartbeat) -> Iterator[EpochReport]:
    started, scheduler, poll = time.monotonic(), loop.scheduler, context.settings.run.poll_seconds
    waiting_since: float | None = None
    while True:
        yield from scheduler.turn(poll)
        if (
            scheduler.again is not None
        ):  # the slice of an epoch that a gate has declined comes before what has arrived since
            if loop.coordinator.due(time.monotonic(), backlog=True, requested=True, catching_up=True):
                scheduler.begin(scheduler.again)
            else:
                time.sleep(poll)
            continue
        if not (scheduler.has_room or scheduler.empty):  # whatever there is to do waits for an epoch
            continue
        frontier, answered, alone = scheduler.frontier, scheduler.answers, scheduler.empty
        seen = yield from scheduler.beside(partial(_look, context, frontier.offsets), poll)
        try:
            pending, waiting = seen()
        except Exception:
            if alone:
                raise
            yield from _landed(context, scheduler)  # what was in flight is not to blame, and comes first
            continue
        if scheduler.frontier is not frontier:  # epochs have fallen meanwhile
            continue
        open_requests = [request for request in pending if request.name not in answered]
        stop = _stop(open_requests, failing=loop.coordinator.failures > 0)
        expired = options.max_seconds is not None and time.monotonic() - started > options.max_seconds
        if stop is not None and stop.drain and loop.to_drain is None:
            loop.to_drain = waiting | scheduler.reading  # what lands from now on is for the next run
        draining = loop.to_drain is not None and bool(waiting & loop.to_drain or scheduler.behind)
        # What gets a name has no rows in front of a stage, so that another version of the code can start from it.
        stops = [request for request in open_requests if request.kind == requests.STOP]
        naming = any(request.savepoint for request in stops) and not loop.coordinator.failures
        draining |= naming and bool(scheduler.behind)
        ending = draining and not (waiting & (loop.to_drain or set()))  # no slice is read any more
        if expired if stop is None else not draining:
            if not scheduler.empty:  # what is in flight ends first; if it fails, there is more to do
                continue
            if stop is None:
                return
            reason = stop.reason or "weir stop --drain"
            if stop.drain and not (yield from _drain(context, loop, reason)):
                time.sleep(poll)
                continue
            _stopped(context, loop, heartbeat, stop, open_requests)
            for request in open_requests:
                if request.kind == requests.STOP:
                    requests.take(context.storage, request)
            return
        barriers = [request for request in open_requests if request.kind in (requests.BARRIER, requests.NAME)]
        others = [request for request in open_requests if request not in barriers and request.kind != requests.STOP]
        if others:
            if not scheduler.empty:  # they may delete, so nothing is in flight then
                continue
            for request in others:
                maintenance.carry_out(context, request)
                left = {row.id for row in context.registry.checkpoints()}
                loop.coordinator.pruned(loop.coordinator.confirmed - left)
        backlog = bool(waiting) or bool(scheduler.behind)
        if not backlog:
            # A sensor asks because files wait. An epoch has read them meanwhile: there is nothing left to cut.
            done = [request for request in barriers if request.trigger == Trigger.SENSOR]
            barriers = [request for request in barriers if request not in done]
            for request in done if scheduler.empty else ():  # else it can wait, and the epochs need not
                requests.take(context.storage, request)
        loop.catching_up |= scheduler.fell()
        catching_up, now = loop.catching_up or draining, time.monotonic()
        named = any(request.kind == requests.NAME for request in barriers)
        if named and not scheduler.empty and context.settings.checkpoints.alignment_timeout_seconds is not None:
            continue  # what is in flight may leave rows
        due = loop.coordinator.due(now, backlog=backlog, requested=bool(barriers), catching_up=catching_up)
        goes_on = bool(scheduler.behind) and loop.coordinator.due(now, backlog=True, requested=False, catching_up=True)
        if scheduler.has_room and (due or goes_on):
            waiting_since = None
            alone = scheduler.empty
            cutting = partial(
                _cut, context, frontier, scheduler.behind, loop.catching_up, options, barriers, ending or not due
            )
            planned = yield from scheduler.beside(cutting, poll)
            try:
                cut = planned()
            except Exception as error:
                if alone:
                    _not_planned(loop, error)
                yield from _landed(context, scheduler)  # then it is planned anew, from where they have come to
            else:
                if scheduler.frontier is frontier and scheduler.has_room:
                    scheduler.begin(cut)
            continue
        if not scheduler.empty:
            continue
        if not backlog:
            loop.catching_up = False
        if options.drain and not backlog and (yield from _drain(context, loop, options.reason)):
            heartbeat.outcome = "drained"
            return
        waiting_since = waiting_since if waiting_since is not None else time.monotonic()
        if (
            options.until_caught_up
            and not (backlog or options.drain)
            and time.monotonic() - waiting_since >= options.linger_seconds
        ):
            return
        time.sleep(poll)


def _look(context: RunContext, offsets: Mapping[str, dict[str, Any]]) -> tuple[list[Request], set[tuple[str, str]]]:
    """What is asked for, and source and name of every file that has arrived and that no epoch reads."""
    open_requests = requests.pending(context.storage)
    arrived = {name: reader.check(offsets.get(name)) for name, reader in context.readers.items()}
    for name, reader in context.readers.items():
        reader.say_again(arrived[name])
    return open_requests, {(name, file.name) for name, found in arrived.items() for file in found.fresh}


def _stop(open_requests: list[Request], failing: bool) -> Request | None:
    """The stop to follow: the oldest; but while epochs fail, one that does not ask for a drain, which needs one
    more."""
    stops = [request for request in open_requests if request.kind == requests.STOP]
    at_once = [request for request in stops if not request.drain]
    return next(iter(at_once if failing and at_once else stops), None)


def _stopped(
    context: RunContext, loop: Loop, heartbeat: Heartbeat, stop: Request, open_requests: list[Request]
) -> None:
    """What stops ask for at the end: the one that is followed, and all others that this end is one for."""
    ended = [
        request for request in open_requests if request.kind == requests.STOP and (stop.drain or not request.drain)
    ]
    for request in ended:
        if request.savepoint and loop.head is not None:
            savepoints.save(context, loop.head, request.savepoint, request.reason)
    if any(request.delete for request in ended):
        maintenance.end(context)
    heartbeat.outcome = "drained" if stop.drain else "stopped"
    by_a_person = [request for request in ended if request.trigger == Trigger.MANUAL]
    if by_a_person:
        suspension.write(context.storage, Suspension(heartbeat.outcome, by_a_person[0].reason))


def _landed(context: RunContext, scheduler: EpochScheduler) -> Iterator[EpochReport]:
    """Begin nothing more until nothing is in flight."""
    while not scheduler.empty:
        yield from scheduler.turn(context.settings.run.poll_seconds)


def _not_planned(loop: Loop, error: Exception) -> None:
    """A slice could not be planned: raise that, unless it may pass and is tolerated."""
    if isinstance(error, _FINAL) or not isinstance(error, TransientError | OSError):
        raise error
    loop.coordinator.failed(time.monotonic())
    _counted(loop.coordinator, "the next slice could not be planned, will be tried again", error)


def _cut(
    context: RunContext,
    frontier: SourceOffsets,
    behind: Mapping[str, int],
    catching_up: bool,
    options: RunOptions,
    barriers: Sequence[Request],
    only_waiting: bool,
) -> EpochPlan:
    """Fix the slices of the next epoch, and say what cut it there. behind: as `EpochScheduler.behind`. only_waiting:
    none is read, stages go on with what they have left."""
    asked = tuple(barriers)
    named = next((request for request in barriers if request.kind == requests.NAME), None)
    others = tuple(one for one in asked if one.kind != requests.NAME)
    if behind and (
        only_waiting or named is not None or max(behind.values()) >= context.settings.checkpoints.max_waiting_epochs
    ):
        return EpochPlan(
            options.trigger,
            f"{max(behind, key=lambda uid: behind[uid])} has not applied all rows yet",
            {},
            requests=others,
        )
    slices = {
        name: reader.plan(frontier.offsets.get(name), context.settings.epoch, frontier.expected.get(name))
        for name, reader in context.readers.items()
    }
    if named is not None:
        why = f"savepoint {named.savepoint!r}: {named.reason}"
        return EpochPlan(Trigger.SAVEPOINT, why, slices, requests=asked)
    full = [name for name, planned in slices.items() if planned.limited]
    if full:
        return EpochPlan(Trigger.SLICE_LIMIT, f"slice limit reached in {', '.join(full)}", slices, requests=asked)
    if barriers:
        first = barriers[0]
        tick = f" (tick {first.tick})" if first.tick else ""
        known = Trigger(first.trigger) if first.trigger in set(Trigger) else Trigger.MANUAL
        return EpochPlan(known, f"{first.reason}{tick}", slices, requests=asked)
    if catching_up or options.interval is None:
        return EpochPlan(options.trigger, options.reason, slices)
    return EpochPlan(Trigger.INTERVAL, f"every {options.interval:g} s", slices)


def _drain(context: RunContext, loop: Loop, reason: str) -> Generator[EpochReport, None, bool]:
    """Close every window, unless a failure is too recent; returns whether that was done. A run that says it has drained
    has.

    Nothing is in flight."""
    before, scheduler = loop.head, loop.scheduler
    if loop.coordinator.due(time.monotonic(), backlog=True, requested=True, catching_up=True):
        scheduler.begin(EpochPlan(Trigger.DRAIN, reason, {}, drain=True))
        yield from _landed(context, scheduler)
    return loop.head is not before


def _tolerated(coordinator: Coordinator, epoch: int, error: WeirError) -> None:
    """An epoch failed, everything that it staged is discarded: raise its error if a replay is of no use, or was one too
    many."""
    if isinstance(error, _FINAL):
        raise error
    _counted(coordinator, f"epoch {epoch} declined, will be replayed", error)


def _counted(coordinator: Coordinator, event: str, error: Exception) -> None:
    """A failure was counted: raise it if it was one too many."""
    failures = coordinator.failures
    if coordinator.failed_for_good:
        raise error
    log.warning(event, failure=failures, retry_seconds=retry_pause(failures), error=plainly(error))
