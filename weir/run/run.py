"""One run of a pipeline's coordinator: take over, recover, then epochs until there is a reason to stop.

`next_action` decides what comes next, the loop here carries that out, and `scheduler` takes epochs to their end. `run`
is a generator: it yields a report for each completed epoch, to whoever called it (CLI, Dagster, a test). Only the
generation gives rights; everything that a dead predecessor left is found and finished or removed here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

from state_ops.checkpoints.coordinator import Coordinator, Policy, retry_pause
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
from state_ops.logs import Logger
from state_ops.moments import to_micros
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.triggers import Trigger
from weir.code_changes.structure import structure
from weir.definition import Pipeline
from weir.epoch.model import EpochReport, SourceOffsets
from weir.epoch.scheduler import EpochScheduler
from weir.epoch.step_runner import StepRunner, Threads
from weir.execution.executor import Executor
from weir.gates import evaluation
from weir.operators.compatibility import advice
from weir.ownership import savepoints
from weir.ownership.backlog import due_in_words
from weir.ownership.context import RunContext
from weir.ownership.leftovers import discard_slices
from weir.ownership.ownership import Ownership
from weir.ownership.pipeline_storage import open_storage as open_storage
from weir.restore.recovery import owning
from weir.restore.start_from import start
from weir.run import maintenance, telemetry
from weir.run.next_action import (
    Action,
    BeginAgain,
    BeginEpoch,
    CarryOut,
    End,
    LookAround,
    Observation,
    RunMemory,
    Situation,
    Sleep,
    Withdraw,
    next_action,
)
from weir.run.next_action import RunOptions as RunOptions
from weir.run.source_alignment import WaitingSources, waiting_sources
from weir.settings.configuration import Settings
from weir.sources.slices import EpochPlan, Slice

log = Logger("weir.run")

# Replaying the same slice with the same code fails the same way, so these are not tolerated, whatever the setting; and
# after a RunEndedError only a successor can know more.
_FINAL = (ConfigurationError, GateError, InputError, PipelineError, RunEndedError, StageError)


@dataclass
class Loop:
    """The state of a run between two barriers."""

    coordinator: Coordinator
    scheduler: EpochScheduler
    memory: RunMemory = field(default_factory=RunMemory)

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
    """Coordinate the pipeline until the options say to stop.

    A run that a person asked for begins again what a person had ended. Any other run ends then without an epoch
    (`suspended`), since it may have waited in a queue meanwhile.

    Args:
        executor: What runs the stages; by default Spark, which the first epoch starts.
        runner: What runs steps beside each other; by default threads.
        began: Is called once the pipeline is owned, before anything else is done.

    Yields:
        A report for each completed epoch, in their order.

    Raises:
        BusyError: A coordinator is alive.
        ConfigurationError: The pipeline has gates, or traces are asked for, and what is needed for it is not installed.
        FencedError: A newer coordinator took over.
        WeirError: An epoch failed for good. Everything that it staged has been discarded by then.
    """
    if _is_suspended(pipeline, settings, options):
        return
    evaluation.check_installed(pipeline)
    with (
        telemetry.tracing(pipeline, settings, options.run_id) as traced,
        owning(pipeline, settings, executor, options.run_id, claimed_by=began) as owner,
    ):
        owner.context.traced = traced
        if options.by_a_person:
            suspension.clear(owner.context.storage)
        elif _is_suspended(pipeline, settings, options):  # now that the lease is written: see `stopping.end`
            return
        head = owner.head if options.start_from is None else start(owner, settings, options.start_from)
        check_fits(pipeline, head)
        owner.context.held = gate_hold.is_there(owner.context.storage)
        coordinator = coordinator_of(owner.context, options, owner.last_id)
        threads = Threads()
        scheduler = EpochScheduler(
            owner.context, coordinator, owner.heartbeat, runner or threads, partial(_tolerated, coordinator, pipeline)
        )
        try:
            yield from _epochs(owner.context, options, Loop(coordinator, scheduler), owner.heartbeat)
        finally:
            try:
                scheduler.close()
            finally:
                threads.close()


def suspended(pipeline: Pipeline, settings: Settings, options: RunOptions) -> str | None:
    """Say why a run with these options does not begin: a person has ended the pipeline, and no person asked for this
    run."""
    if options.by_a_person:
        return None
    note = suspension.read(open_storage(pipeline, settings)[0])
    if note is None:
        return None
    return f"{note.how} by a person ({note.why}): Materialize, `weir run` or `weir resume` begin again"


def _is_suspended(pipeline: Pipeline, settings: Settings, options: RunOptions) -> bool:
    why = suspended(pipeline, settings, options)
    if why is not None:
        log.info("the run ends without an epoch", pipeline=pipeline.title, reason=why)
    return why is not None


def coordinator_of(context: RunContext, options: RunOptions, last_id: CheckpointId) -> Coordinator:
    """Make the run's coordinator, which knows the checkpoints that are retained."""
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
    stopping = [change for change in structure(pipeline, head) if change.verdict.stops]
    if stopping:
        what = " ".join(dict.fromkeys(change.what for change in stopping))
        raise PipelineError(what, where=f"checkpoint {head.id}", next=advice(stopping))


def _epochs(context: RunContext, options: RunOptions, loop: Loop, heartbeat: Heartbeat) -> Iterator[EpochReport]:
    started, scheduler, poll = time.monotonic(), loop.scheduler, context.settings.run.poll_seconds
    look: Observation | None = None
    while True:
        if look is None:
            yield from scheduler.turn(poll)
        action = _decide(context, options, loop, look, started)
        seen, look = look, None
        if seen is not None and isinstance(action, CarryOut | Withdraw):
            look = seen.without(action.requests)
        match action:
            case LookAround():
                look = yield from _look_around(context, scheduler)
            case BeginAgain(plan):
                scheduler.begin(plan)
            case BeginEpoch():
                yield from _begin_epoch(context, options, loop, action, seen)
            case CarryOut(asked):
                for request in asked:
                    maintenance.carry_out(context, request)
                    left = {row.id for row in context.registry.checkpoints()}
                    loop.coordinator.pruned(loop.coordinator.confirmed - left)
            case Withdraw(asked):
                for request in asked:
                    requests.take(context.storage, request)
            case End(stop, drain):
                if drain is None or (yield from _drain(context, loop, drain)):
                    if stop is not None and seen is not None:
                        _stopped(context, loop, heartbeat, stop, seen.requests)
                    elif drain is not None:
                        heartbeat.outcome = "drained"
                    return
                time.sleep(poll)
            case Sleep():
                time.sleep(poll)


def _decide(context: RunContext, options: RunOptions, loop: Loop, look: Observation | None, started: float) -> Action:
    now, scheduler = time.monotonic(), loop.scheduler
    situation = Situation(
        options=options,
        now=now,
        expired=options.max_seconds is not None and now - started > options.max_seconds,
        failing=loop.coordinator.failures > 0,
        unaligned=context.settings.checkpoints.alignment_timeout_seconds is not None,
        due=partial(loop.coordinator.due, now),
        empty=scheduler.empty,
        has_room=scheduler.has_room,
        again=scheduler.again,
        behind=scheduler.behind,
        timers_due=scheduler.due,
        still=_held(context, loop).still,
        look=look,
    )
    memory = replace(loop.memory, catching_up=scheduler.fell() or loop.memory.catching_up)
    action, loop.memory = next_action(situation, memory)
    return action


def _held(context: RunContext, loop: Loop) -> WaitingSources:
    """Return the sources that wait for slower ones.

    Before a drain none does: all that has arrived is read.
    """
    scheduler = loop.scheduler
    if loop.memory.to_drain is not None:
        return WaitingSources()
    return waiting_sources(context.pipeline, scheduler.offsets.offsets, scheduler.quiet, to_micros(scheduler.now()))


def _look_around(context: RunContext, scheduler: EpochScheduler) -> Generator[EpochReport, None, Observation | None]:
    """Look for requests and files; None if the look says nothing any more, or has failed beside epochs in flight."""
    offsets, answered, alone = scheduler.offsets, scheduler.answers, scheduler.empty
    seen = yield from scheduler.beside(partial(_look, context, offsets.offsets), context.settings.run.poll_seconds)
    try:
        pending, waiting, backlog = seen()
    except Exception:
        if alone:
            raise
        yield from _finish_all(context, scheduler)  # what was in flight is not to blame, and comes first
        return None
    if scheduler.offsets is not offsets:  # epochs have fallen meanwhile
        return None
    open_requests = tuple(request for request in pending if request.name not in answered)
    return Observation(open_requests, frozenset(waiting), frozenset(scheduler.reading), backlog)


def _begin_epoch(
    context: RunContext, options: RunOptions, loop: Loop, action: BeginEpoch, seen: Observation | None
) -> Generator[EpochReport, None, None]:
    """Plan the next epoch beside those in flight, and begin it unless they have fallen meanwhile."""
    scheduler = loop.scheduler
    offsets, alone = scheduler.offsets, scheduler.empty
    catching_up = loop.memory.catching_up
    planning = partial(
        _plan, context, offsets, scheduler.now(), scheduler.behind, scheduler.due, _held(context, loop).sources,
        catching_up, options, action,
    )  # fmt: skip
    planned = yield from scheduler.beside(planning, context.settings.run.poll_seconds)
    try:
        plan = _with_backlog(planned(), seen)
    except Exception as error:
        if alone:
            _not_planned(loop, error)
        yield from _finish_all(context, scheduler)  # then it is planned anew, from where they have come to
    else:
        if not (scheduler.offsets is offsets and scheduler.has_room and scheduler.begin(plan)):
            discard_slices(context, plan.slices)


def _look(
    context: RunContext, offsets: Mapping[str, dict[str, Any]]
) -> tuple[list[Request], set[tuple[str, str]], dict[str, int]]:
    """Return the open requests, source and name of each new file, and the backlog by source.

    A file is new if it has arrived and no epoch reads it.
    """
    open_requests = requests.pending(context.storage)
    arrived = {name: reader.check(offsets.get(name)) for name, reader in context.readers.items()}
    for name, reader in context.readers.items():
        reader.say_again(arrived[name])
    fresh = {(name, file.name) for name, arrivals in arrived.items() for file in arrivals.fresh}
    return open_requests, fresh, {name: arrivals.waiting for name, arrivals in arrived.items()}


def _with_backlog(plan: EpochPlan, seen: Observation | None) -> EpochPlan:
    """Return a plan that knows what waits behind its slices, by the look that it follows."""
    if seen is None:
        return plan
    waiting = dict(seen.backlog)
    for name, planned in plan.slices.items():
        files = len(planned.files) + len(planned.set_aside)
        taken = files if planned.position is None else max(planned.rows, files)
        waiting[name] = max(0, waiting.get(name, 0) - taken)
    return replace(plan, backlog=waiting)


def _stopped(
    context: RunContext, loop: Loop, heartbeat: Heartbeat, stop: Request, open_requests: Sequence[Request]
) -> None:
    """Carry out the end that a stop asks for, and that of all other stops that this end also answers."""
    stops = [request for request in open_requests if request.kind == requests.STOP]
    ended = [request for request in stops if stop.drain or not request.drain]
    for request in ended:
        if request.savepoint and loop.head is not None:
            savepoints.save(context, loop.head, request.savepoint, request.reason)
    if any(request.delete for request in ended):
        maintenance.end(context)
    heartbeat.outcome = "drained" if stop.drain else "stopped"
    by_a_person = [request for request in ended if request.trigger == Trigger.MANUAL]
    if by_a_person:
        suspension.write(context.storage, Suspension(heartbeat.outcome, by_a_person[0].reason))
    for request in stops:
        requests.take(context.storage, request)


def _finish_all(context: RunContext, scheduler: EpochScheduler) -> Iterator[EpochReport]:
    """Begin nothing more until nothing is in flight."""
    while not scheduler.empty:
        yield from scheduler.turn(context.settings.run.poll_seconds)


def _not_planned(loop: Loop, error: Exception) -> None:
    """Raise the error of a slice that could not be planned, unless it may pass and is tolerated."""
    if isinstance(error, _FINAL) or not isinstance(error, TransientError | OSError):
        raise error
    loop.coordinator.failed(time.monotonic())
    _counted(loop.coordinator, "the next slice could not be planned, will be tried again", error)


def _plan(
    context: RunContext,
    offsets: SourceOffsets,
    now: datetime,
    behind: Mapping[str, int],
    timers_due: Sequence[str],
    held_back: Collection[str],
    catching_up: bool,
    options: RunOptions,
    action: BeginEpoch,
) -> EpochPlan:
    """Fix the slices of the next epoch, and say why its barrier is cut. now, behind, timers_due: as `EpochScheduler`
    says; held_back: sources of which nothing is read."""
    barriers = action.barriers
    named = next((request for request in barriers if request.kind == requests.NAME), None)
    most, limit = max(behind.values(), default=0), context.settings.checkpoints.max_waiting_epochs
    if behind and (action.only_waiting or named is not None or most >= limit):
        why = f"{max(behind, key=lambda uid: behind[uid])} has not applied all rows yet"
        unnamed = tuple(request for request in barriers if request.kind != requests.NAME)
        return EpochPlan(options.trigger, why, {}, requests=unnamed, lookups=context.lookups.plan(context.head))
    slices: dict[str, Slice] = {}
    lookups = context.lookups.plan(context.head)
    try:
        for name, reader in context.readers.items():
            if name in held_back:
                continue
            position, expected = offsets.offsets.get(name), offsets.expected.get(name)
            slices[name] = reader.plan(position, context.settings.epoch, expected, to_micros(now))
    except Exception:  # one source is away: what the others have landed is landed anew with the next plan
        discard_slices(context, slices)
        raise
    full = [name for name, planned in slices.items() if planned.limited]
    if named is not None:
        trigger, why = Trigger.SAVEPOINT, f"savepoint {named.savepoint!r}: {named.reason}"
    elif full:
        trigger, why = Trigger.SLICE_LIMIT, f"slice limit reached in {', '.join(full)}"
    elif barriers:
        first = barriers[0]
        why = first.reason + (f" (tick {first.tick})" if first.tick else "")
        trigger = Trigger(first.trigger) if first.trigger in set(Trigger) else Trigger.MANUAL
    elif timers_due and not any(planned.rows for planned in slices.values()):
        why = due_in_words(timers_due)
        trigger = options.trigger if options.interval is None else Trigger.INTERVAL
    elif catching_up or options.interval is None:
        trigger, why = options.trigger, options.reason
    else:
        trigger, why = Trigger.INTERVAL, f"every {options.interval:g} s"
    return EpochPlan(trigger, why, slices, requests=barriers, now=now, lookups=lookups)


def _drain(context: RunContext, loop: Loop, reason: str) -> Generator[EpochReport, None, bool]:
    """Close every window, unless a failure is too recent; returns whether that was done. A run that says it has drained
    has.

    Nothing is in flight."""
    before, scheduler = loop.head, loop.scheduler
    if loop.coordinator.due(time.monotonic(), backlog=True, requested=True, catching_up=True):
        scheduler.begin(EpochPlan(Trigger.DRAIN, reason, {}, drain=True, lookups=context.lookups.plan(loop.head)))
        yield from _finish_all(context, scheduler)
    return loop.head is not before


def _tolerated(coordinator: Coordinator, pipeline: Pipeline, epoch: int, error: WeirError) -> None:
    """Raise the error of a failed epoch if a replay is of no use, or was one too many. All that it staged is
    discarded."""
    if isinstance(error, _FINAL):
        raise error
    what = "declined, with its rows" if pipeline.at_most_once else "declined, will be replayed"
    _counted(coordinator, f"epoch {epoch} {what}", error)


def _counted(coordinator: Coordinator, event: str, error: Exception) -> None:
    """Raise a failure if it was one too many."""
    failures = coordinator.failures
    if coordinator.failed_for_good:
        raise error
    log.warning(event, failure=failures, retry_seconds=retry_pause(failures), error=plainly(error))
