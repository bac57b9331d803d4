"""Choose a checkpoint sensor's action at a tick: ask the coordinator for a barrier, ask for a run or a restore, wait.

`observe` reads the pipeline's storage, without a JVM and in milliseconds; `decide` is a pure function of what was seen,
of what the sensor remembers from its earlier ticks, and of a monotonic clock. Whose sensor it is does not matter here.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum

from state_ops.coordination import lease, requests, suspension
from state_ops.coordination.gate_hold import GateHold
from state_ops.coordination.lease import DEAD_AFTER_HEARTBEATS, Lease
from state_ops.coordination.requests import Request
from state_ops.coordination.suspension import Suspension
from state_ops.counts import counted
from state_ops.ids import CheckpointId, Generation
from weir.definition import Pipeline
from weir.ownership import backlog, hold_causes
from weir.ownership.pipeline_storage import readers
from weir.run import run as runtime
from weir.settings.configuration import Settings
from weir.sources.positions import in_words

# A run that brought no checkpoint is asked for again after 2, 4, 8 ... ticks: input that fails every run must not fill
# the orchestrator with runs, and needs nobody once it is repaired.
_LONGEST_PAUSE = 32
_NOT_WELL = ("failed", "interrupted")


class Action(StrEnum):
    """The action of a tick."""

    WAIT = "wait"
    BARRIER = "barrier"
    RUN = "run"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Sight:
    """The findings of one tick.

    Attributes:
        alive: Whether the lease's holder lives, None if only watching its counter can tell.
        waiting: Files, or rows of a connector, that were not read.
        waits: The same in words, with its units.
        asked: A barrier request waits to be taken.
        unfinished: Runs of this pipeline that the orchestrator counts as queued or running.
        unapplied: A stage has rows of earlier epochs to apply.
        timers_due: Stages that have something to do without rows, as `backlog.timers_due` says.
        held: What holds the pipeline and what a person does about it, if a gate, bad input or damage does.
        held_since: That was noted by the lease's holder, or after it.
        starting: The lease's holder has not committed an epoch yet.
        missing: Landing directories that do not exist.
        suspended: A person has ended the pipeline.
    """

    holder: Lease | None
    alive: bool | None
    waiting: int
    head: CheckpointId | None
    asked: bool
    unfinished: tuple[str, ...] = ()
    unapplied: bool = False
    timers_due: tuple[str, ...] = ()
    held: str | None = None
    held_since: bool = False
    starting: bool = False
    missing: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()
    suspended: Suspension | None = None
    waits: str = ""

    @property
    def in_words(self) -> str:
        """The amount of input that waits, in words."""
        return self.waits or counted(self.waiting, "file")

    @property
    def failed_run(self) -> str | None:
        """The orchestrator's run that coordinated last, if it did not end well."""
        holder = self.holder
        return holder.run_id if holder is not None and (self.died or holder.outcome in _NOT_WELL) else None

    @property
    def died(self) -> bool:
        """True if there is a coordinator that did not end by itself, be it alive or dead."""
        return self.holder is not None and not self.holder.stopped


@dataclass(frozen=True, slots=True)
class SensorMemory:
    """The facts that a sensor remembers between its ticks, as its cursor.

    Attributes:
        tick: How many there were.
        generation, counter, since, observer: The heartbeat last seen, and when it was new, in seconds on that host's
            monotonic clock.
        resumed: The last generation whose death was answered with a restore.
        runs, run_tick, run_head: How many runs in a row were asked for on top of the same head, and at which tick the
            last.
        cancelled: The last run whose cancelling was noted.
    """

    tick: int = 0
    generation: Generation | None = None
    counter: int = -1
    since: float = 0.0
    observer: str = ""
    resumed: Generation | None = None
    runs: int = 0
    run_tick: int = 0
    run_head: CheckpointId | None = None
    cancelled: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> SensorMemory:
        return cls(**lease.known_fields(cls, json.loads(text))) if text else cls()


@dataclass(frozen=True, slots=True)
class Decision:
    """The action of a tick, the reason for people, and the memory to keep.

    Attributes:
        key: Of the run; the same key is never run twice.
        gone: A run that the orchestrator counts as running, though the process of its coordinator is gone: it blocks
            its successors until somebody ends it.
    """

    action: Action
    reason: str
    memory: SensorMemory
    key: str | None = None
    gone: str | None = None


def observe(pipeline: Pipeline, settings: Settings, unfinished: Sequence[str] = ()) -> Sight:
    """Look at the pipeline; reads only."""
    storage, registry = runtime.open_storage(pipeline, settings)
    holder = lease.read(storage)
    # The lease is read before the head: a coordinator that ends in between is seen alive, which the next tick corrects.
    alive, head = lease.alive(holder), registry.head()
    sources = readers(pipeline, settings)
    noted = hold_causes.standing(storage, head, sources)
    arrived = backlog.arrivals(pipeline, settings, head)
    waiting = {name: arrivals.waiting for name, arrivals in arrived.items()}
    return Sight(
        holder=holder,
        alive=alive,
        waiting=sum(waiting.values()),
        head=head.id if head else None,
        asked=any(request.kind == "barrier" for request in requests.pending(storage)),
        unfinished=tuple(unfinished),
        unapplied=bool(backlog.unapplied(head)),
        timers_due=backlog.timers_due(pipeline, head, datetime.now(UTC)),
        held=None if noted is None else _why_held(noted),
        held_since=noted is not None and hold_causes.is_since(noted, holder),
        starting=holder is not None and (head is None or head.generation < holder.generation),
        missing=tuple(backlog.missing(sources, waiting).values()),
        unreachable=tuple(arrivals.problem for arrivals in arrived.values() if arrivals.problem is not None),
        suspended=suspension.read(storage),
        waits=in_words([arrivals for arrivals in arrived.values() if arrivals.waiting]),
    )


def _why_held(noted: GateHold) -> str:
    """Return what holds the pipeline, and what a person does about it."""
    message = noted.message.splitlines()
    if noted.by_gate:
        return f"{message[0]}. Repair the input or correct the gate, then Materialize"
    mended = {
        "InputError": "Once that is repaired or moved away it goes on by itself",
        "DamageError": (
            "Once that is put back it goes on by itself; or go back with `weir rewind`"
            " (docs/playbooks/corrupt-checkpoint.md)"
        ),
    }.get(noted.error, "A person has to look at it")
    return f"{noted.subject}: {message[0]} {mended}. Materialize or `weir run` tries again at once"


def watched(sight: Sight, memory: SensorMemory) -> tuple[SensorMemory, bool]:
    """Return the memory after a look at the lease, and whether its holder lives, as far as all looks so far tell."""
    now = time.monotonic()
    memory = _watched(memory, sight.holder, socket.gethostname(), now)
    return memory, _lives(sight, memory, now)


def silent_for(sight: Sight, memory: SensorMemory) -> float:
    """Return for how many seconds a coordinator whose process exists has sent no heartbeat, if for too long; else 0.

    Args:
        memory: As `watched` returned it: only looks that lie far enough apart can tell.
    """
    if sight.holder is None or not sight.alive:
        return 0.0
    silent = time.monotonic() - memory.since
    return silent if silent > DEAD_AFTER_HEARTBEATS * sight.holder.heartbeat_seconds else 0.0


def note_cancelled(
    pipeline: Pipeline, settings: Settings, memory: SensorMemory, run_id: str, *, alone: bool
) -> SensorMemory:
    """Note once that a person has cancelled the newest run of this pipeline: nobody but a person begins again.

    Args:
        alone: No other run is queued or running; else it was only one too many.
    """
    if memory.cancelled != run_id and alone:
        storage, _ = runtime.open_storage(pipeline, settings)
        suspension.write(storage, Suspension("cancelled", f"run {run_id[:8]}"))
    return replace(memory, cancelled=run_id)


def ask(pipeline: Pipeline, settings: Settings, decision: Decision) -> Request:
    """Leave the barrier request that was decided on."""
    storage, _ = runtime.open_storage(pipeline, settings)
    return requests.send(
        storage, Request("barrier", trigger="sensor", reason=decision.reason, tick=str(decision.memory.tick))
    )


def decide(
    sight: Sight, memory: SensorMemory, max_lag: int, *, observer: str | None = None, now: float | None = None
) -> Decision:
    """Return the decision of this tick.

    Args:
        max_lag: Files, or rows of a connector, that may wait.
        observer, now: Host and monotonic clock; default: this one's.
    """
    observer = socket.gethostname() if observer is None else observer
    now = time.monotonic() if now is None else now
    memory = _watched(replace(memory, tick=memory.tick + 1), sight.holder, observer, now)
    behind = sight.waiting > max_lag or bool(sight.timers_due)
    if _lives(sight, memory, now):
        return _with_coordinator(sight, memory, behind)
    holder, died = sight.holder, sight.died
    gone = holder.run_id if holder is not None and died and holder.run_id in sight.unfinished else None
    others = [run for run in sight.unfinished if run != gone]
    if others:
        return Decision(Action.WAIT, f"run {others[0][:8]} of this pipeline is queued or starting", memory, gone=gone)
    if sight.suspended is not None:
        reason = (
            f"{sight.suspended.how} by a person ({sight.suspended.why}), {sight.in_words} waiting: it begins"
            " again with Materialize, `weir run` or `weir resume`"
        )
        return Decision(Action.WAIT, reason, memory, gone=gone)
    if sight.held is not None and (sight.held_since or not died):
        return Decision(Action.WAIT, f"held: {sight.held}", memory, gone=gone)
    if not (behind or sight.unapplied or died):
        return Decision(Action.WAIT, f"nothing to do: {_idle(sight)}, no coordinator needed", memory, gone=gone)
    due = memory.run_tick + min(2**memory.runs, _LONGEST_PAUSE)
    if memory.runs and memory.run_head == sight.head and memory.tick < due:
        times = "once" if memory.runs == 1 else f"{memory.runs} times"
        return Decision(
            Action.WAIT,
            f"{sight.in_words} waiting, but a run was asked for {times} and brought no checkpoint; asking again"
            f" in {due - memory.tick} ticks. Look at the last run; Materialize runs at once",
            memory,
            gone=gone,
        )
    generation = holder.generation if holder else Generation(0)
    key = f"g{generation}-c{sight.head or 0}-f{sight.waiting}-t{memory.tick}"
    if holder is not None and died:
        reason = (
            f"the coordinator of generation {generation} (process {holder.pid} on {holder.host}) died: "
            f"restore and resume, {sight.in_words} waiting"
        )
        if memory.resumed != generation:
            memory, key = replace(memory, resumed=generation), restore_key(generation)
    else:
        reason = _new(sight) if behind else "a stage has rows of earlier epochs to apply"
    return _run(sight, memory, reason, key, gone)


def _with_coordinator(sight: Sight, memory: SensorMemory, behind: bool) -> Decision:
    holder = sight.holder
    assert holder is not None
    if not behind:
        who = f"the coordinator (process {holder.pid} on {holder.host}) is running"
        return Decision(Action.WAIT, f"nothing to do: {_idle(sight)}; {who}", memory)
    if sight.asked and sight.starting:
        reason = f"{sight.in_words} waiting; the running coordinator is starting, first epoch"
        return Decision(Action.WAIT, reason, memory)
    if sight.asked:
        reason = f"{sight.in_words} waiting; the running coordinator was asked already and has not come to its barrier"
        return Decision(Action.WAIT, reason, memory)
    return Decision(Action.BARRIER, _new(sight), memory)


def _run(sight: Sight, memory: SensorMemory, reason: str, key: str, gone: str | None) -> Decision:
    again = memory.runs + 1 if memory.runs and memory.run_head == sight.head else 1
    memory = replace(memory, runs=again, run_tick=memory.tick, run_head=sight.head)
    return Decision(Action.RESTORE if sight.died else Action.RUN, reason, memory, key, gone)


def restore_key(generation: int) -> str:
    """Return the key of the run that restores after a coordinator's death.

    There is one run a generation, whoever asks for it.
    """
    return f"restore-g{generation}"


def _watched(memory: SensorMemory, holder: Lease | None, observer: str, now: float) -> SensorMemory:
    """Note when the heartbeat was last seen to change. Clocks of two hosts, or of two boots, are never compared."""
    if holder is None:
        return memory
    seen = (memory.generation, memory.counter, memory.observer) == (holder.generation, holder.counter, observer)
    if seen and memory.since <= now:
        return memory
    return replace(memory, generation=holder.generation, counter=holder.counter, since=now, observer=observer)


def _lives(sight: Sight, memory: SensorMemory, now: float) -> bool:
    if sight.alive is not None or sight.holder is None:
        return bool(sight.alive)
    return now - memory.since < DEAD_AFTER_HEARTBEATS * sight.holder.heartbeat_seconds


def _new(sight: Sight) -> str:
    """Return the work that waits, in words."""
    if sight.timers_due and not sight.waiting:
        return backlog.due_in_words(sight.timers_due)
    return f"{sight.in_words} new"


def _idle(sight: Sight) -> str:
    if sight.waiting:
        return f"{sight.in_words} waiting, as many as may"
    if sight.unreachable:
        return f"nobody knows what waits: {'; '.join(sight.unreachable)}"
    return f"{' and '.join(sight.missing)} does not exist" if sight.missing else "no file is waiting"
