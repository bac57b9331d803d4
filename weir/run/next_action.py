"""Choose a run's next action by a pure function of what the run sees and remembers. `run` carries the action out.

first             begin again the slice of an epoch that a gate has declined; else look around, once there is room
a stop            with a drain once all that waits has been read and applied; nothing is in flight then
other requests    whatever may delete, while nothing is in flight
an epoch          when rows wait, windows or timers by processing time are due, an input has become idle, or
                  somebody asks for one, and the coordinator says that it is due
nothing to do     end, if this run ends once it has caught up, or wait
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from state_ops.coordination import requests
from state_ops.coordination.requests import Request
from state_ops.records.triggers import Trigger
from weir.sources.slices import EpochPlan


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The trigger of a run, and the conditions at which it ends.

    Attributes:
        trigger: What started it; recorded for epochs that no slice limit cut.
        reason: The same in words.
        interval: Seconds between barriers that the run cuts by itself when data waits; None: only requests do.
        until_caught_up: End when there is no more input, after lingering `linger_seconds` for more.
        drain: Then close every window and end.
        max_seconds: End at the first barrier after this time.
        start_from: PIPELINE:SAVEPOINT, for a pipeline that has no checkpoint yet (`start_from.start`).
        automatic: No person asked for this run. A sensor's run is so whatever this says.
    """

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
        """True if this run may begin again a pipeline that a person has ended."""
        return not self.automatic and self.trigger is not Trigger.SENSOR


@dataclass(frozen=True, slots=True)
class Observation:
    """The findings of a look into storage.

    Attributes:
        requests: Open requests that no epoch in flight will answer, oldest first.
        waiting: Source and name of every file that has arrived and that no epoch reads.
        reading: Source and name of every file that an epoch in flight reads.
        backlog: By source, how many files, or rows of a connector, have arrived and no epoch reads.
    """

    requests: tuple[Request, ...] = ()
    waiting: frozenset[tuple[str, str]] = frozenset()
    reading: frozenset[tuple[str, str]] = frozenset()
    backlog: Mapping[str, int] = field(default_factory=dict)

    def without(self, done: Collection[Request]) -> Observation:
        """Return the look once these requests are removed."""
        return replace(self, requests=tuple(request for request in self.requests if request not in done))


class Due(Protocol):
    """`Coordinator.due` at this moment."""

    def __call__(self, *, backlog: bool, requested: bool, catching_up: bool) -> bool: ...


@dataclass(frozen=True, slots=True)
class Situation:
    """The situation of a run, from which its next action follows.

    Attributes:
        now: On time.monotonic().
        expired: Whether `max_seconds` are over.
        failing: Whether the newest epoch has failed.
        unaligned: Whether stages may leave rows that they have not applied.
        due: Whether the coordinator lets an epoch begin now.
        empty: Whether nothing is in flight.
        has_room: Whether one more epoch may be in flight.
        again: What is to begin before anything else is planned.
        behind: As `EpochScheduler.behind`.
        timers_due: As `EpochScheduler.due`.
        still: Sources whose rows wait for slower sources, and make no epoch begin (`held_sources`).
        look: None before the run has looked.
    """

    options: RunOptions
    now: float
    expired: bool
    failing: bool
    unaligned: bool
    due: Due
    empty: bool
    has_room: bool
    again: EpochPlan | None = None
    behind: Mapping[str, int] = field(default_factory=dict)
    timers_due: tuple[str, ...] = ()
    still: frozenset[str] = frozenset()
    look: Observation | None = None


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The facts that a run remembers from one action to the next.

    Attributes:
        catching_up: Whether input has waited since the run began, or since epochs fell.
        to_drain: The files to read before a drain; None if nobody has asked for a drain.
        idle_since: Since when there has been nothing to do, on time.monotonic().
    """

    catching_up: bool = True
    to_drain: frozenset[tuple[str, str]] | None = None
    idle_since: float | None = None


@dataclass(frozen=True, slots=True)
class GoOn:
    """Let the epochs in flight go on."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait until something may have changed; nothing is in flight."""


@dataclass(frozen=True, slots=True)
class LookAround:
    """Look for requests and for files that have arrived."""


@dataclass(frozen=True, slots=True)
class BeginAgain:
    """Begin an epoch with a plan that was made before."""

    plan: EpochPlan


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Plan an epoch and begin it.

    Attributes:
        barriers: The requests that it answers.
        only_waiting: It reads no slice; stages go on with the rows that they have left.
    """

    barriers: tuple[Request, ...]
    only_waiting: bool


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Do what requests ask for that ask for no barrier; nothing is in flight."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Remove requests for a barrier of which an earlier epoch has read what they wait for."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class End:
    """End the run; nothing is in flight.

    Attributes:
        stop: The request that it follows; None if the run ends by itself.
        drain: Why every window is closed first, in words; None if none is.
    """

    stop: Request | None = None
    drain: str | None = None


Action = GoOn | Sleep | LookAround | BeginAgain | BeginEpoch | CarryOut | Withdraw | End


def next_action(at: Situation, memory: RunMemory) -> tuple[Action, RunMemory]:
    """Return the next action, and the memory to keep."""
    if at.look is None:
        return _before_look(at), memory
    open_requests, waiting = at.look.requests, at.look.waiting
    stop = _stop(open_requests, at.failing)
    if stop is not None and stop.drain and memory.to_drain is None:
        memory = replace(memory, to_drain=waiting | at.look.reading)  # what lands from now on is for the next run
    to_read = waiting & (memory.to_drain or frozenset())
    draining = memory.to_drain is not None and bool(to_read or at.behind)
    # What gets a name has no rows in front of a stage, so that another version of the code can start from it.
    naming = any(request.savepoint for request in open_requests if request.kind == requests.STOP) and not at.failing
    draining |= naming and bool(at.behind)
    if at.expired if stop is None else not draining:
        if not at.empty:  # what is in flight ends first; if it fails, there is more to do
            return GoOn(), memory
        drain = (stop.reason or "weir stop --drain") if stop is not None and stop.drain else None
        return End(stop, drain), memory
    others = tuple(request for request in open_requests if request.kind not in (*_BARRIERS, requests.STOP))
    if others:
        return CarryOut(others) if at.empty else GoOn(), memory  # they may delete, so nothing is in flight then
    return _epoch_or_idle(at, memory, draining, only_waiting=draining and not to_read)


_BARRIERS = (requests.BARRIER, requests.NAME)


def _before_look(at: Situation) -> Action:
    if at.again is not None:  # the slice of an epoch that a gate has declined comes before what has arrived since
        due = at.due(backlog=True, requested=True, catching_up=True)
        return BeginAgain(at.again) if due else Sleep()
    return LookAround() if at.has_room or at.empty else GoOn()  # whatever there is to do waits for an epoch


def _epoch_or_idle(at: Situation, memory: RunMemory, draining: bool, only_waiting: bool) -> tuple[Action, RunMemory]:
    """Cut a barrier if one is due; else let epochs go on, or wait, or end for want of input."""
    assert at.look is not None
    barriers = tuple(request for request in at.look.requests if request.kind in _BARRIERS)
    waits = any(name not in at.still for name, _ in at.look.waiting)
    backlog = waits or bool(at.behind) or bool(at.timers_due)
    if not backlog:
        # A sensor asks because files wait. An epoch has read them meanwhile: there is nothing left to cut.
        needless = tuple(request for request in barriers if request.trigger == Trigger.SENSOR)
        if needless and at.empty:  # else it can wait, and the epochs need not
            return Withdraw(needless), memory
        barriers = tuple(request for request in barriers if request not in needless)
    if at.unaligned and not at.empty and any(request.kind == requests.NAME for request in barriers):
        return GoOn(), memory  # what is in flight may leave rows
    due = at.due(backlog=backlog, requested=bool(barriers), catching_up=memory.catching_up or draining)
    goes_on = bool(at.behind) and at.due(backlog=True, requested=False, catching_up=True)
    if at.has_room and (due or goes_on):
        return BeginEpoch(barriers, only_waiting or not due), replace(memory, idle_since=None)
    if not at.empty:
        return GoOn(), memory
    idle_since = at.now if memory.idle_since is None else memory.idle_since
    done = not backlog and not at.look.waiting  # what waits for slower sources is still to be read
    memory = replace(memory, catching_up=memory.catching_up and not done, idle_since=idle_since)
    if at.options.drain and done:
        return End(drain=at.options.reason), memory
    lingered = at.now - idle_since >= at.options.linger_seconds
    return End() if at.options.until_caught_up and done and lingered else Sleep(), memory


def _stop(open_requests: tuple[Request, ...], failing: bool) -> Request | None:
    """Return the stop to follow: the oldest; but while epochs fail, one that does not ask for a drain, which needs one
    more."""
    stops = [request for request in open_requests if request.kind == requests.STOP]
    at_once = [request for request in stops if not request.drain]
    return next(iter(at_once if failing and at_once else stops), None)
