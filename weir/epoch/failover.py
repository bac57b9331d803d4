"""The course of a run after a step of an epoch has failed, after its deadline, and when the run ends.

1. A failed epoch falls, and every later one with it, for they were built on it. Earlier epochs go on to their end.
2. Once nothing runs any more, what fell is discarded, newest first.
3. The next epoch builds on the newest confirmed checkpoint, and the run decides whether it goes on.

An epoch whose commit has begun is never discarded here unless the registry says that it was not committed: only the
registry knows. However many epochs fall, it is one failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from state_ops.checkpoints.coordinator import Coordinator
from state_ops.checkpoints.pending_checkpoint import FailureReason
from state_ops.coordination.lease import Heartbeat
from state_ops.errors import FencedError, GateError, HoldingError, RunEndedError, TransientError, WeirError, plainly
from state_ops.logs import Logger
from state_ops.records.snapshot_files import CHANNEL, INPUT, StateFile
from state_ops.snapshots import stage_upload
from weir.epoch import steps
from weir.epoch.model import (
    EpochsInFlight,
    Failure,
    InFlightEpoch,
    RunningStep,
    SourceOffsets,
    StageProgress,
)
from weir.epoch.stage_job import bases, late
from weir.epoch.step_runner import StepRunner
from weir.ownership import hold_causes
from weir.ownership.context import RunContext
from weir.ownership.fencing import discard, raise_if_fenced
from weir.ownership.leftovers import discard_slices
from weir.sources.slices import EpochPlan

log = Logger("weir.run")

_GOODBYE_SECONDS = 30.0
_GRACE_SECONDS = 60.0


class Failover:
    """Makes epochs fall, and puts the model back on the newest confirmed checkpoint.

    Args:
        tolerated: Is called with a failure once everything that fell is discarded; raises it if the run must not go on.
    """

    def __init__(
        self,
        context: RunContext,
        coordinator: Coordinator,
        heartbeat: Heartbeat,
        epochs: EpochsInFlight,
        tolerated: Callable[[int, WeirError], None],
    ) -> None:
        self._context, self._coordinator, self._heartbeat = context, coordinator, heartbeat
        self._epochs, self._tolerated = epochs, tolerated

    # -- an epoch falls

    def fail(self, epoch: InFlightEpoch, error: BaseException) -> None:
        """Handle the failure of a step before the commit."""
        if time.monotonic() >= epoch.deadline and isinstance(error, WeirError):
            cause, error = error, late(self._context, epoch)
            error.__cause__ = cause
        reason = FailureReason.GATE if isinstance(error, GateError) else FailureReason.JOB
        self._abort(epoch, reason, Failure(epoch.pending.id, error))

    def begin_again(self, epoch: InFlightEpoch, plan: EpochPlan) -> None:
        """Discard an epoch of which a gate has set rows aside, and all epochs that were built on it, without counting a
        failure."""
        failure = Failure(epoch.pending.id, RuntimeError("rows were set aside"), again=plan)
        self._abort(epoch, FailureReason.GATE, failure)

    def commit_failed(self, epoch: InFlightEpoch, error: BaseException) -> None:
        """Handle a commit that failed. If nobody knows whether it failed, nothing is discarded."""
        keep = isinstance(error, RunEndedError) or not isinstance(error, WeirError)
        failure = Failure(epoch.pending.id, error, keep=keep)
        if keep or isinstance(error, FencedError):
            self._note_failures()
            self._fall(epoch, failure)
        else:
            self._abort(epoch, FailureReason.COMMIT, failure)
            epoch.may_stand = False
        self.renew()

    def finish_failed(self, epoch: InFlightEpoch, error: BaseException) -> None:
        """Handle an epoch whose publishing or pruning has failed.

        The epoch stands. So does the next one, if its commit has landed or is about to; the next run publishes both.
        Others fall, except an earlier one, which goes on to its end.
        """
        epochs = self._epochs
        ending = [
            other for other in epochs.epochs if other.published is not None and other.pending.id < epoch.pending.id
        ]
        epochs.fallen += [other for other in epochs.epochs if other is not epoch and other not in ending]
        epochs.epochs = ending
        uncommitted = [pending for pending in self._coordinator.pending if not pending.committing]
        if uncommitted:
            self._coordinator.abort(time.monotonic(), uncommitted[0].id, FailureReason.PREDECESSOR)
        # Where nobody can tell what the registry holds, that ends the run.
        if epochs.failure is None or not epochs.failure.keep:
            epochs.failure = Failure(epoch.pending.id, error, final=True)
        self.trace(epoch, epoch.ms, error)

    def renew(self) -> None:
        """Go on under the generation that the commit may have claimed.

        Epochs in flight carry the old one, so they fall. That counts as nobody's failure."""
        if self._coordinator.generation == self._context.generation:
            return
        try:
            self._heartbeat.renew(self._context.generation)
        except OSError as error:  # a missed beat; the checkpoint stands
            log.warning("heartbeat failed", error=plainly(error))
        aborted = {fallen.pending.id for fallen in self._coordinator.renew(self._context.generation)}
        epochs = self._epochs
        epochs.fallen += [epoch for epoch in epochs.epochs if epoch.pending.id in aborted]
        epochs.epochs = [epoch for epoch in epochs.epochs if epoch.pending.id not in aborted]

    def _abort(self, epoch: InFlightEpoch, reason: FailureReason, failure: Failure) -> None:
        self._note_failures()
        self._coordinator.abort(time.monotonic(), epoch.pending.id, reason)
        self._fall(epoch, failure)

    def _note_failures(self) -> None:
        """However many epochs fall, and in whatever order, it is one failure."""
        if self._epochs.failure is None:
            self._epochs.failures_before = self._coordinator.failures

    def _fall(self, epoch: InFlightEpoch, failure: Failure) -> None:
        """Discard an epoch that failed, and all epochs that were built on it."""
        epochs = self._epochs
        index = epochs.epochs.index(epoch)
        epochs.fallen += epochs.epochs[index:]
        epochs.epochs = epochs.epochs[:index]
        # A later epoch's failure says less, for it was built on this one; but it may have ended this one's worker.
        if epochs.failure is not None:
            log.warning("later_epoch_failed", epoch=epochs.failure.epoch, error=str(epochs.failure.error))
        epochs.failure = failure

    # -- time

    def prolong(self, epoch: InFlightEpoch) -> None:
        """Extend the deadline of an epoch by the time that it has waited for something else."""
        epoch.deadline = max(epoch.deadline, time.monotonic() + self._coordinator.policy.timeout)
        self._coordinator.prolong(time.monotonic(), epoch.pending.id)

    def expire(self) -> None:
        """Discard the oldest epoch whose deadline has passed."""
        epochs = self._epochs
        for epoch in epochs.epochs[1:]:
            if all(step.epoch is not epoch for step in epochs.running.values()):  # it waits for an earlier one
                self.prolong(epoch)
        self._note_failures()
        aborted = self._coordinator.expire(time.monotonic())
        # It is not in flight if it has fallen already, behind a commit that ended the run.
        for epoch in [epoch for epoch in epochs.epochs if aborted and epoch.pending is aborted[0].pending]:
            running = [slot for slot, step in epochs.running.items() if step.epoch is epoch]
            log.warning("an epoch's time is up", epoch=epoch.pending.id, waits_for=running)
            self._fall(epoch, Failure(epoch.pending.id, late(self._context, epoch)))

    def raise_if_hung(self, looking_since: float | None, looks: str) -> None:
        """End the run where a step does not end, long after its time: of what has fallen, beside which no later epoch
        can begin, or of what is committed, which has no deadline, and behind which later epochs wait.

        Args:
            looking_since: When a look into storage began, if one runs.
            looks: The slot of looks.
        """
        until, timeout = time.monotonic() - _GRACE_SECONDS, self._coordinator.policy.timeout

        def ends_by(step: RunningStep) -> float:
            return step.begun + timeout if step.epoch.may_stand else step.epoch.deadline

        hung = [
            slot
            for slot, step in self._epochs.running.items()
            if (step.epoch.may_stand or step.epoch in self._epochs.fallen) and ends_by(step) < until
        ]
        if looking_since is not None and looking_since + timeout < until:
            hung.append(looks)
        if hung:
            raise RunEndedError(
                f"A step does not end, {_GRACE_SECONDS:g} s after its epoch's time was up: {', '.join(sorted(hung))}.",
                where=f"pipeline {self._context.pipeline.title}",
                next=(
                    "Run again. If it happens again, look at what the stage's function or the storage waits for: a call"
                    " without a timeout, mostly; looks: at a slice of fewer files (epoch.max_files), if planning it"
                    " takes that long."
                ),
            ) from (self._epochs.failure.error if self._epochs.failure else None)

    # -- what fell is cleared up

    def recover(self) -> None:
        """Discard what fell, once nothing runs any more, and build on the newest confirmed checkpoint from now on."""
        epochs = self._epochs
        failure, epochs.failure = epochs.failure, None
        fallen, epochs.fallen = epochs.fallen, []
        if failure is None and not fallen:
            return
        epochs.has_fallen = True
        if failure is not None:
            self._coordinator.count(time.monotonic(), epochs.failures_before + (failure.again is None))
            raise_if_fenced(self._context, failure.error)
        is_discarded = failure is None or not (failure.keep or isinstance(failure.error, FencedError))
        if is_discarded:
            self._discard(reversed(fallen))
        for epoch in fallen:
            self.trace(epoch, epoch.ms, _why_it_fell(epoch, failure))
        self.build_on_head()
        for epoch in (epoch for epoch in fallen if epoch.positioned):
            rows = {name: planned.rows for name, planned in epoch.plan.slices.items()}
            log.warning("rows are lost with an epoch", epoch=int(epoch.pending.id), rows=rows)
        try:
            if failure is not None:
                self._go_on_after(failure, fallen)
        finally:
            if is_discarded:
                self._discard_landed(fallen)

    def trace(self, epoch: InFlightEpoch, ms: Mapping[str, float], error: BaseException | None = None) -> None:
        """Say when everything of an epoch that has ended happened, where somebody wants to know; as `times` has it."""
        if self._context.traced is not None:
            self._context.traced(epoch.times(ms, error))

    def _discard_landed(self, fallen: Sequence[InFlightEpoch]) -> None:
        """Discard the rows that were landed for fallen epochs, except those that the epoch that begins again reads."""
        again = self._epochs.again.slices if self._epochs.again is not None else {}
        for epoch in fallen:
            if not epoch.may_stand:
                discard_slices(self._context, epoch.plan.slices, again)

    def _go_on_after(self, failure: Failure, fallen: Sequence[InFlightEpoch]) -> None:
        """Begin the epoch again in another way, or raise its error, unless that is tolerated."""
        again, error = failure.again, failure.error
        if again is None and isinstance(error, HoldingError):
            stopped = next((epoch for epoch in fallen if epoch.pending.id == failure.epoch), None)
            again = self._without_bad_input(error, stopped) if stopped is not None else None
            if again is not None:  # like rows that a gate has set aside: the slice comes again, without it
                self._coordinator.count(time.monotonic(), self._epochs.failures_before)
        if again is not None:
            self._epochs.again = again
            return
        typed = steps.typed(error, f"pipeline {self._context.pipeline.title}, epoch {failure.epoch}")
        if typed is not None:
            raise typed from error
        if failure.final or isinstance(error, FencedError) or not isinstance(error, WeirError):
            raise error
        self._tolerated(failure.epoch, error)

    def _without_bad_input(self, error: HoldingError, epoch: InFlightEpoch) -> EpochPlan | None:
        """Note on an error which epoch it ended; returns the plan to take instead, where input is set aside."""
        plan, again = replace(epoch.plan, at=epoch.triggered_at), None
        if not epoch.positioned:  # else nothing of it begins again
            context, expected = self._context, self._epochs.offsets.expected
            again = hold_causes.without_bad_input(context.readers, plan, error, expected, context.pipeline.stages)
        hold_causes.note_slice(error, epoch.pending.id, plan)
        return again

    def abandon(self, runner: StepRunner) -> None:
        """End the run: wait for running steps, for a while, and discard what is in flight."""
        epochs = self._epochs
        with suppress(Exception):  # a JVM that is gone must not hide why the run ends
            self._context.executor.cancel()
        until = time.monotonic() + _GOODBYE_SECONDS
        while epochs.running and time.monotonic() < until:
            ended = runner.next(max(0.0, until - time.monotonic()))
            if ended is not None:
                epochs.running.pop(ended.slot, None)
        with suppress(FencedError):
            raise_if_fenced(self._context, RuntimeError("the run ended"))
            self._discard([*epochs.fallen, *epochs.epochs])
            self._discard_landed([*epochs.fallen, *epochs.epochs])
            if epochs.again is not None:  # nobody begins it any more
                discard_slices(self._context, epochs.again.slices)

    def _discard(self, epochs: Iterable[InFlightEpoch]) -> None:
        """Delete what epochs have staged, except one whose commit may have landed."""
        for epoch in epochs:
            if not epoch.may_stand:
                self._context.early.pop(epoch.pending.id, None)
                discard(self._context, epoch.pending.generation, epoch.pending.id)
                stage_upload.clear(epoch.handed_over)

    def build_on_head(self) -> None:
        """Make the newest confirmed checkpoint, and nothing else, the base of the next epoch."""
        context, epochs, head = self._context, self._epochs, self._coordinator.head
        context.head = head
        epochs.offsets = SourceOffsets.at(head)
        files = context.registry.files(head) if head else ()
        recorded = set(head.stages_with_state) if head else set()
        # What rows that were discarded looked like binds nobody.
        for schemas in (context.shapes, context.inputs, context.reads):
            for uid in schemas.keys() - recorded:
                del schemas[uid]
        epochs.bases = {stage.uid: bases(context, head, files, stage.uid) for stage in epochs.stages}
        epochs.channels = channels_of(files)
        epochs.progress = {
            stage.uid: StageProgress.at(head, stage, epochs.bases[stage.uid], epochs.channels)
            for stage in epochs.stages
        }
        stage_upload.clear(epochs.kept)  # from now on they are read from storage
        epochs.kept = []


def _why_it_fell(epoch: InFlightEpoch, failure: Failure | None) -> BaseException:
    """Return the error of an epoch, or of the epoch that it was built on."""
    if failure is None:
        return RunEndedError("The claim on the pipeline was renewed, under which it would have been committed.")
    if epoch.pending.id == failure.epoch:
        return failure.error
    return TransientError(f"It was built on epoch {failure.epoch}, which fell: {plainly(failure.error)}")


def channels_of(files: Iterable[StateFile]) -> dict[str, StateFile]:
    """Return a checkpoint's files of rows by path: rows that wait for a stage, and archived input."""
    return {file.path: file for file in files if file.kind in (CHANNEL, INPUT)}
