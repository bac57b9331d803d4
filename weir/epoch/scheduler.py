"""The epochs in flight, as a run sees them: begin one, let all of them go on, take reports of those that have ended.

`model` holds the epochs, `readiness` says which step may begin, `transitions` begins it and enters its result, and
`failover` makes epochs fall. Only the thread that calls `EpochScheduler` touches any of that. While epochs are in
flight it waits for no storage, except for a lease that it has to renew: else what follows a step would wait with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import TypeVar, cast

from state_ops.checkpoints.coordinator import Coordinator
from state_ops.checkpoints.pending_checkpoint import Refusal
from state_ops.coordination.lease import Heartbeat
from state_ops.errors import WeirError
from state_ops.logs import Logger
from state_ops.moments import to_micros
from state_ops.snapshots import stage_upload
from weir.epoch import readiness
from weir.epoch.failover import Failover
from weir.epoch.model import EpochReport, EpochsInFlight, InFlightEpoch, SourceOffsets
from weir.epoch.step_runner import Ended, StepRunner
from weir.epoch.transitions import Transitions
from weir.ownership.context import RunContext
from weir.sources.slices import EpochPlan

log = Logger("weir.run")

_LOOKS = "looks"

Seen = TypeVar("Seen")


class EpochScheduler:
    """Epochs between their trigger and their end, oldest first.

    Args:
        tolerated: Is called with a failure once everything that fell is discarded; raises it if the run must not go on.
    """

    def __init__(
        self,
        context: RunContext,
        coordinator: Coordinator,
        heartbeat: Heartbeat,
        runner: StepRunner,
        tolerated: Callable[[int, WeirError], None],
    ) -> None:
        self._context, self._coordinator, self._runner = context, coordinator, runner
        limits = context.settings.checkpoints
        if context.pipeline.at_most_once:  # positions are committed behind an epoch that is confirmed
            limits = limits.model_copy(update={"max_concurrent": 1})
        self._epochs = EpochsInFlight(context.pipeline.stages, limits, early=context.pipeline.early)
        self._failover = Failover(context, coordinator, heartbeat, self._epochs, tolerated)
        self._transitions = Transitions(context, coordinator, heartbeat, runner, self._epochs, self._failover)
        self._looking_since: float | None = None
        self._seen: Ended | None = None
        self._failover.build_on_head()

    # -- what the run asks

    @property
    def empty(self) -> bool:
        """True if nothing is in flight, and nothing of a fallen epoch is left to be cleared up."""
        epochs = self._epochs
        return not (epochs.epochs or epochs.fallen or epochs.running or epochs.failure)

    @property
    def has_room(self) -> bool:
        """True if one more epoch may begin."""
        return readiness.can_start_epoch(self._epochs)

    @property
    def offsets(self) -> SourceOffsets:
        """The positions up to which the newest epoch reads the sources.

        They are another object once epochs have fallen.
        """
        return self._epochs.offsets

    def now(self) -> datetime:
        """Return the processing time of an epoch that begins now: whatever the clock does, it never decreases."""
        return self.offsets.no_earlier(datetime.now(UTC))

    @property
    def again(self) -> EpochPlan | None:
        """The plan to begin next, before anything else is planned."""
        return self._epochs.again

    @property
    def behind(self) -> dict[str, int]:
        """Stages that epochs wait in front of, each with the number of those that have rows."""
        queues = {uid: progress.waiting for uid, progress in self._epochs.progress.items() if progress.waiting}
        return {uid: sum(bool(data.layers) for data in queue) for uid, queue in queues.items()}

    @property
    def due(self) -> tuple[str, ...]:
        """Stages that have something to do without rows, which no epoch in flight will come to: windows or timers by
        processing time are due, or an input has become idle."""
        now = to_micros(self.now())
        newest = to_micros(self._epochs.epochs[-1].now) if self._epochs.epochs else None
        return tuple(
            uid
            for uid, progress in self._epochs.progress.items()
            if any(moment <= now and (newest is None or newest < moment) for moment in progress.moments)
        )

    @property
    def quiet(self) -> dict[str, int]:
        """The times since when sources of a stage with several inputs have been quiet, as `SidesTime` has them."""
        return {name: since for stands in self._epochs.progress.values() for name, since in stands.sides.quiet.items()}

    @property
    def reading(self) -> set[tuple[str, str]]:
        """Source and name of every file that an epoch in flight reads."""
        plans = [epoch.plan.slices for epoch in [*self._epochs.fallen, *self._epochs.epochs]]
        return {(name, file.name) for slices in plans for name, planned in slices.items() for file in planned.files}

    @property
    def answers(self) -> set[str]:
        """Names of the requests that epochs in flight will answer."""
        return {request.name for epoch in self._epochs.epochs for request in epoch.plan.requests}

    def fell(self) -> bool:
        """Return whether epochs have fallen since the last call.

        Their slices are to be read again, however long ago they came.
        """
        fell, self._epochs.has_fallen = self._epochs.has_fallen, False
        return fell

    # -- what the run does

    def begin(self, plan: EpochPlan) -> bool:
        """Trigger an epoch. False if the coordinator refuses."""
        context, coordinator, epochs = self._context, self._coordinator, self._epochs
        expected = {stage.uid: context.settings.spark.parallelism for stage in epochs.stages}
        # It was due before its slice was planned, or nobody was to wait for it: no pause is kept twice.
        first = context.pipeline.at_most_once and any(planned.files for planned in plan.slices.values())
        pending = coordinator.trigger(time.monotonic(), plan.trigger, expected, catching_up=True, positions_first=first)
        if isinstance(pending, Refusal):
            log.warning("no epoch was begun", reason=pending.reason)
            return False
        triggered_at = plan.at or datetime.now(UTC)
        now = max(triggered_at, plan.now or triggered_at)
        epochs.offsets = epochs.offsets.after(plan.slices, context.readers, now)
        deadline = time.monotonic() + coordinator.policy.timeout
        epoch = InFlightEpoch(pending, plan, epochs.offsets, triggered_at, time.perf_counter(), deadline)
        epoch.positions_first = first
        epochs.epochs.append(epoch)
        epochs.again = None if plan is epochs.again else epochs.again
        self._transitions.begin_steps()
        return True

    def turn(self, seconds: float) -> list[EpochReport]:
        """Go on as steps end, for so long at most, until there is room, a report, or nothing left; returns epochs that
        ended.

        While something is looked for (`beside`): until that is found, or a report. Raises what `tolerated` raises.
        """
        until, epochs = time.perf_counter() + seconds, self._epochs
        while True:
            left = until - time.perf_counter()
            ended = self._runner.next(max(0.0, left) if epochs.running or self._looking_since is not None else 0.0)
            if ended is not None and ended.slot == _LOOKS:
                self._looking_since, self._seen = None, ended
            elif ended is not None:
                self._transitions.take(ended)
            self._failover.expire()
            if not epochs.reports:  # what has ended well is reported first
                self._failover.raise_if_hung(self._looking_since, _LOOKS)
            self._transitions.begin_steps()
            if not (epochs.running or epochs.epochs or epochs.reports):
                self._failover.recover()
            if epochs.reports or ended is None or self._seen is not None:
                break
            if self._looking_since is None and (self.empty or self.has_room):
                break
        reports, epochs.reports = epochs.reports, []
        return reports

    def beside(self, look: Callable[[], Seen], seconds: float) -> Generator[EpochReport, None, Callable[[], Seen]]:
        """Look at something in storage while epochs go on; yields reports of those that end meanwhile.

        Args:
            look: Touches nothing that steps change. What it sees was so when it began: a request may have been answered
                since, a slice belong to epochs that have fallen.
            seconds: As for `turn`.

        Returns:
            A call that gives what was seen, or raises what the look has raised.

        Raises:
            RunEndedError: The look has taken longer than an epoch may and a minute; besides whatever `turn` raises.
        """
        self._looking_since = time.monotonic()
        self._runner.start(_LOOKS, look)
        while self._seen is None:
            yield from self.turn(seconds)
        ended, self._seen = self._seen, None

        def seen() -> Seen:
            if ended.error is not None:
                raise ended.error
            return cast(Seen, ended.result)

        return seen

    def close(self) -> None:
        """End the run with epochs in flight, for which nobody waits."""
        try:
            if not self.empty:
                self._failover.abandon(self._runner)
            if not self._epochs.running:
                stage_upload.clear(self._epochs.kept)
        finally:
            self._transitions.close()
