"""Move epochs on: begin each step as soon as it may (`readiness`), and enter its result into the model.

A step gets values and gives one back. Only the thread that calls this touches the model and the coordinator.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from state_ops.checkpoints.coordinator import Coordinator
from state_ops.checkpoints.pending_checkpoint import owns
from state_ops.coordination import restore_progress
from state_ops.coordination.lease import Heartbeat
from state_ops.coordination.restore_progress import Restoring, described
from state_ops.errors import FencedError, LocalBaseError, RunEndedError, from_report, plainly
from state_ops.logs import Logger
from state_ops.records.acks import Ack
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.publications import Publication
from state_ops.records.snapshot_files import StateFile, snapshots_of
from state_ops.snapshots import stage_upload
from state_ops.storage import disks
from weir.definition import Stage
from weir.epoch import positions, readiness, steps
from weir.epoch.commit import commit
from weir.epoch.failover import Failover, channels_of
from weir.epoch.model import (
    EpochReport,
    EpochsInFlight,
    Failure,
    InFlightEpoch,
    RunningStep,
    StageResult,
    Step,
    local_rows,
)
from weir.epoch.stage_input import plan_stage
from weir.epoch.stage_job import check_acks, judge, note_progress, run_job, run_stage, to_judge
from weir.epoch.step_runner import Ended, StepRunner
from weir.gates import evaluation
from weir.gates.evaluation import GateVerdict
from weir.ownership.context import RunContext
from weir.ownership.local_paths import work_dir

log = Logger("weir.run")

_LOG_CLEANUP, _RESTORES = "upkeep", "restores"  # slots of what is no step of an epoch
_MARK = "coordinator-"
_RESTORES_LOG_SECONDS = 10.0

Failed = Callable[[InFlightEpoch, BaseException], None]
Done = Callable[[InFlightEpoch, Any], None]


class Transitions:
    """Begins steps and takes their results."""

    def __init__(
        self,
        context: RunContext,
        coordinator: Coordinator,
        heartbeat: Heartbeat,
        runner: StepRunner,
        epochs: EpochsInFlight,
        failover: Failover,
    ) -> None:
        self._context, self._coordinator, self._heartbeat, self._runner = context, coordinator, heartbeat, runner
        self._epochs, self._failover = epochs, failover
        self._follow: dict[str, tuple[Done, Failed]] = {}
        # Of epochs before, which this one has waited for: it is recorded with the next epoch that is committed.
        self._ms = {"commits_before": 0.0, "publishing_before": 0.0, "pruning_before": 0.0}
        self._restores = _Restores()
        self._marker = _place_marker(work_dir(context))

    def close(self) -> None:
        """End the run."""
        _remove(self._marker)

    def begin_steps(self) -> None:
        """Begin every step whose time has come."""
        self._watch_restores()
        for_stage = {
            Step.RUN_STAGE: self._run_stage,
            Step.DELIVER: self._deliver,
            Step.UPLOAD: self._upload,
            Step.JUDGE: self._judge,
        }
        committing = {Step.POSITIONS: self._commit_positions, Step.SEAL: self._seal, Step.COMMIT: self._commit}
        afterwards = {Step.PUBLISH: self._publish, Step.FINISH: self._finish}
        for epoch in list(self._epochs.epochs):
            if readiness.may_begin(self._epochs, epoch, Step.NOTE_ID):
                self._begin(
                    epoch,
                    Step.NOTE_ID,
                    partial(self._heartbeat.begin, epoch.pending.id, early=self._context.pipeline.early),
                    _noted,
                )
            for stage in self._epochs.stages:
                for step, begin_stage in for_stage.items():
                    if readiness.may_begin(self._epochs, epoch, step, stage):
                        begin_stage(epoch, stage)
            for step, begin in (committing | afterwards).items():
                if readiness.may_begin(self._epochs, epoch, step):
                    begin(epoch)

    def take(self, ended: Ended) -> None:
        """Enter the result of a step that has ended into the model."""
        running, (done, failed) = self._epochs.running.pop(ended.slot), self._follow[ended.slot]
        running.note(time.monotonic(), ended.error)
        epoch, acks = running.epoch, ended.result.acks if isinstance(ended.result, StageResult) else ()
        for ack in acks:
            self._context.storage.request_counts.add(ack.request_counts or {})
        if epoch in self._epochs.fallen:
            epoch.handed_over += [ack for ack in acks if ack.pending_upload is not None]
            if isinstance(ended.error, RunEndedError) and epoch.may_stand:  # says more than why it fell
                self._epochs.failure = Failure(epoch.pending.id, ended.error, keep=True)
            return
        if ended.error is not None:
            failed(epoch, ended.error)
            return
        try:
            done(epoch, ended.result)
        except Exception as error:
            failed(epoch, error)

    def _begin(
        self,
        epoch: InFlightEpoch,
        step: Step,
        call: Callable[[], object],
        done: Done,
        failed: Failed | None = None,
        stage: Stage | None = None,
    ) -> None:
        uid = stage.uid if stage else None
        epoch.begun.add((step, uid))
        running = RunningStep(epoch, time.monotonic(), step, uid)
        self._start(step.slot(stage), running, call, done, failed or self._failover.fail)

    def _start(self, slot: str, running: RunningStep, call: Callable[[], object], done: Done, failed: Failed) -> None:
        self._epochs.running[slot], self._follow[slot] = running, (done, failed)
        self._runner.start(slot, call)

    # -- its positions, where they are committed before its rows are applied

    def _commit_positions(self, epoch: InFlightEpoch) -> None:
        epoch.may_stand = True
        call = partial(
            positions.commit, self._context, epoch, self._coordinator.head, self._coordinator.begin_positions()
        )
        self._begin(epoch, Step.POSITIONS, call, self._positioned, self._failover.commit_failed)

    def _positioned(self, epoch: InFlightEpoch, committed: tuple[Checkpoint, Sequence[StateFile]]) -> None:
        self._coordinator.positioned(*committed)
        self._context.head, epoch.positioned, epoch.may_stand = self._coordinator.head, True, False
        self._failover.prolong(epoch)

    # -- a stage's job

    def _run_stage(self, epoch: InFlightEpoch, stage: Stage) -> None:
        epochs = self._epochs
        if epochs.before(epoch) is not None:  # it has waited for its turn
            self._failover.prolong(epoch)
        # On a cluster a scan of rows that one host alone has may run on another.
        leaves = epochs.may_leave_rows and not self._context.pipeline.must_finish(stage)
        apart = bool(self._context.pipeline.outputs_read(stage)) or leaves
        shared = self._context.settings.spark.master.startswith("local") or not apart
        progress = epochs.progress[stage.uid]
        epoch.work[stage.uid] = plan_stage(self._context, epoch, stage, progress)
        # A later epoch that ends its worker again and again must not take this one's snapshot along, in this run or in
        # the next.
        proven = epochs.has_confirmed and not self._coordinator.failures
        job = partial(
            run_job,
            self._context,
            epoch,
            stage,
            progress,
            keep=epochs.attempts_needed(stage),
            here=self._marker if shared else None,
            reread=epochs.may_leave_rows,
            asynchronous=self._context.settings.state.asynchronous_snapshots and proven,
        )
        call = partial(run_stage, self._context, epoch, stage, job)
        self._begin(epoch, Step.RUN_STAGE, call, partial(self._worked, stage), stage=stage)

    def _worked(self, stage: Stage, epoch: InFlightEpoch, result: StageResult) -> None:
        epoch.handed_over += [ack for ack in result.acks if ack.pending_upload is not None]
        if _runs_again(stage, epoch, result.acks):
            return
        for ack in result.acks:
            self._receive(epoch, ack)
        if result.again is not None:
            self._failover.begin_again(epoch, result.again)
            return
        check_acks(epoch, stage)
        epoch.ms |= result.ms
        progress = self._epochs.progress[stage.uid]
        self._epochs.progress[stage.uid] = note_progress(self._context, epoch, stage, progress)
        epoch.acks[stage.uid] = epoch.pending.acks_of(stage.uid)
        if result.shapes is not None:
            epoch.shapes[stage.uid] = result.shapes
        if result.joined is not None:
            epoch.joined[stage.uid] = result.joined
        if not to_judge(epoch, stage):
            _judged(stage, epoch, (list(result.verdicts), {}))

    def _receive(self, epoch: InFlightEpoch, ack: Ack) -> None:
        received = self._coordinator.receive(ack)
        epoch.losers += received.discard
        if received.error is not None:
            raise from_report(received.error)

    # -- rows that sinks get before the commit

    def _deliver(self, epoch: InFlightEpoch, stage: Stage) -> None:
        call = partial(steps.deliver_stage, self._context, epoch, stage)
        self._begin(epoch, Step.DELIVER, call, partial(_delivered, stage), stage=stage)

    # -- gates of rows

    def _judge(self, epoch: InFlightEpoch, stage: Stage) -> None:
        call = partial(judge, self._context, stage, to_judge(epoch, stage))
        self._begin(epoch, Step.JUDGE, call, partial(_judged, stage), stage=stage)

    # -- uploads

    def _upload(self, epoch: InFlightEpoch, stage: Stage) -> None:
        first = all(step is not Step.UPLOAD for step, _ in epoch.begun)
        if first and self._epochs.before(epoch) is not None:  # it has waited for that one's uploads
            self._failover.prolong(epoch)
        call = partial(steps.upload, self._context, epoch, stage, self._epochs.stored_base(epoch, stage))
        self._begin(epoch, Step.UPLOAD, call, partial(self._uploaded, stage), stage=stage)

    def _uploaded(self, stage: Stage, epoch: InFlightEpoch, acks: list[Ack]) -> None:
        epoch.uploaded[stage.uid] = acks
        epoch.ms[f"upload:{stage.uid}"] = max(ack.ms.get("upload", 0.0) for ack in acks)
        if readiness.epoch_before_is_confirmed(self._epochs, epoch):
            self._count_uploads(epoch)

    def _count_uploads(self, epoch: InFlightEpoch) -> None:
        """Count an upload once the checkpoint is confirmed whose objects it refers to."""
        for ack in [ack for acks in epoch.uploaded.values() for ack in acks]:
            self._receive(epoch, ack)
        epoch.uploaded.clear()

    # -- the commit

    def _seal(self, epoch: InFlightEpoch) -> None:
        call = partial(steps.completed, self._context, epoch, self._coordinator.head, self._epochs.channels)
        self._begin(epoch, Step.SEAL, call, _sealed)

    def _commit(self, epoch: InFlightEpoch) -> None:
        assert epoch.sealed is not None, "it is what is committed"
        epoch.ms |= self._ms
        committing = self._coordinator.begin_commit()
        assert committing is epoch.pending, "its predecessor is confirmed, and every ack is in"
        epoch.may_stand = True
        call = partial(commit, self._context, epoch, *epoch.sealed)
        self._begin(epoch, Step.COMMIT, call, self._committed, self._failover.commit_failed)

    def _committed(self, epoch: InFlightEpoch, checkpoint: Checkpoint) -> None:
        assert epoch.sealed is not None, "it is what was committed"
        _, files = epoch.sealed
        epochs, acked = self._epochs, {file.path for file in epoch.pending.files()}
        self._coordinator.completed(time.monotonic(), checkpoint, [file for file in files if file.path not in acked])
        epochs.channels = channels_of(files)
        epochs.failures_before, epochs.has_confirmed = 0, True
        self._ms["commits_before"] = epoch.ms["commit"]
        self._context.head = checkpoint
        epoch.confirmed = checkpoint
        epochs.bases = {stage.uid: snapshots_of(files, stage.uid) for stage in epochs.stages}
        follower = epochs.after(epoch)
        if follower is not None:  # it has waited for this one: from now on the time is its own
            self._failover.prolong(follower)
        for uid, progress in epochs.progress.items():
            if follower is None or uid not in follower.acks:  # the stage's newest epoch is this one
                epochs.progress[uid] = progress.confirmed(epochs.bases[uid])
        self._failover.renew()
        if follower is not None and follower in epochs.epochs:
            try:
                self._count_uploads(follower)
            except Exception as error:  # this epoch stands
                self._failover.fail(follower, error)

    # -- what follows the commit

    def _publish(self, epoch: InFlightEpoch) -> None:
        assert epoch.confirmed is not None, "it is what is published"
        call = partial(steps.publish, self._context, epoch, epoch.confirmed)
        self._begin(epoch, Step.PUBLISH, call, self._published, self._failover.finish_failed)

    def _published(self, epoch: InFlightEpoch, publications: tuple[Publication, ...]) -> None:
        epoch.published = publications
        self._ms["publishing_before"] = epoch.ms["publish"]

    def _finish(self, epoch: InFlightEpoch) -> None:
        assert epoch.confirmed is not None and epoch.published is not None, "it was published"
        epochs = self._epochs
        others = [other.local_rows() for other in epochs.epochs if other is not epoch]
        read = local_rows(epochs.rows_left()).union(*others)
        ended = [*epochs.kept, *epoch.handed_over]
        epochs.kept = [ack for ack in ended if not read.isdisjoint(stage_upload.locals_of(ack))]
        unneeded = [ack for ack in ended if ack not in epochs.kept]
        epochs.pruning_deferred = readiness.can_defer_pruning(epochs, epoch)
        needed = None if epochs.pruning_deferred else self._coordinator.needed()
        if needed is not None:  # others may be committed by then, of which only one is the newest
            if epoch.plan.requests:
                needed.setdefault(epoch.pending.id, []).append("requests for it are being answered")
            for later in epochs.epochs[1:]:
                needed.setdefault(later.pending.id, []).append("it is newer than the epoch that prunes")
        call = partial(steps.finish, self._context, epoch, epoch.confirmed, epoch.published, unneeded, needed)
        self._begin(epoch, Step.FINISH, call, self._finished, self._failover.finish_failed)

    def _finished(self, epoch: InFlightEpoch, report: EpochReport) -> None:
        epochs = self._epochs
        self._coordinator.pruned(report.pruned)
        self._ms["pruning_before"] = report.ms["prune"]
        epochs.epochs.remove(epoch)
        epochs.reports.append(report)
        self._failover.trace(epoch, report.ms)
        if self._context.registry.cleanup_due and _LOG_CLEANUP not in epochs.running:
            call = partial(steps.keep_up, self._context)
            self._start(
                _LOG_CLEANUP, RunningStep(epoch, time.monotonic()), call, lambda *_: None, self._log_cleanup_failed
            )

    def _log_cleanup_failed(self, epoch: InFlightEpoch, error: BaseException) -> None:
        """Log the failure: the next cleanup does the work, unless somebody else owns the pipeline now."""
        if isinstance(error, FencedError):
            self._failover.finish_failed(epoch, error)
        else:
            log.warning("the registry's logs were not shortened", error=plainly(error))

    # -- state that is being fetched

    def _watch_restores(self) -> None:
        """See whether a stage that takes long waits for state that is being fetched."""
        now = time.monotonic()
        epoch = readiness.epoch_to_watch(self._epochs, now, self._restores.read_at)
        if epoch is not None and _RESTORES not in self._epochs.running:
            self._restores.read_at = now
            call = partial(restore_progress.read, self._context.storage)
            # What cannot be looked at now is looked at again.
            self._start(_RESTORES, RunningStep(epoch, now), call, self._prolong_restoring, lambda *_: None)

    def _prolong_restoring(self, _: InFlightEpoch, restores: list[Restoring]) -> None:
        """Extend the deadlines of epochs by the time in which state is fetched."""
        alive = self._restores.that_go_on(restores, int(self._context.generation))
        for epoch in self._epochs.epochs:
            fetched = [restore for restore in alive if restore.epoch == int(epoch.pending.id)]
            if fetched:
                self._failover.prolong(epoch)
                self._restores.log(epoch, fetched)


class _Restores:
    """The reports of subtasks on the state that they fetch.

    Attributes:
        read_at: When it was looked at last, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.read_at = self._logged_at = 0.0
        self._beats: dict[str, int] = {}

    def that_go_on(self, restores: Sequence[Restoring], generation: int) -> list[Restoring]:
        """Return the restores of a generation that have made progress since the last call."""
        ours = [restore for restore in restores if restore.generation == generation]
        alive = [restore for restore in ours if self._beats.get(restore.path) != restore.beat]
        self._beats = {restore.path: restore.beat for restore in restores}
        return alive

    def log(self, epoch: InFlightEpoch, fetched: Sequence[Restoring]) -> None:
        if time.monotonic() - self._logged_at >= _RESTORES_LOG_SECONDS:
            self._logged_at = time.monotonic()
            stages = sorted({str(restore.stage) for restore in fetched})
            log.info("state is being fetched", epoch=int(epoch.pending.id), stages=stages, here=described(fetched))


def _noted(epoch: InFlightEpoch, _: None) -> None:
    epoch.noted = True


def _runs_again(stage: Stage, epoch: InFlightEpoch, acks: Sequence[Ack]) -> bool:
    """Return whether a subtask has landed on a host without its base.

    If so, the stage runs once more as soon as that base is in storage.
    """
    kinds = {ack.error["kind"] for ack in acks if ack.error is not None}
    if LocalBaseError.__name__ not in kinds or stage.uid in epoch.elsewhere:
        return False
    log.info("a subtask runs where its base is not", stage=stage.uid, epoch=epoch.pending.id)
    epoch.losers += [file for ack in acks for file in ack.files if owns(ack, file)]
    epoch.elsewhere.add(stage.uid)
    epoch.begun.discard((Step.RUN_STAGE, stage.uid))
    return True


def _delivered(stage: Stage, epoch: InFlightEpoch, result: tuple[list[StateFile], dict[str, float]]) -> None:
    files, ms = result
    epoch.delivered[stage.uid] = files
    epoch.ms |= ms


def _judged(stage: Stage, epoch: InFlightEpoch, result: tuple[list[GateVerdict], dict[str, float]]) -> None:
    verdicts, ms = result
    evaluation.refuse(stage.uid, verdicts)
    epoch.verdicts += verdicts
    epoch.ms |= ms
    epoch.judged.add(stage.uid)


def _sealed(epoch: InFlightEpoch, sealed: tuple[Checkpoint, tuple[StateFile, ...]]) -> None:
    epoch.sealed = sealed


def _remove(marker: Path) -> None:
    with suppress(OSError):  # the next run removes it
        marker.unlink(missing_ok=True)


def _place_marker(directory: Path) -> Path:
    """Return a file that tells a subtask whether it sees the coordinator's disk."""
    directory.mkdir(parents=True, exist_ok=True)
    for earlier in directory.glob(f"{_MARK}*"):
        # Of a run that was killed; a zombie's subtasks upload by themselves from now on.
        earlier.unlink(missing_ok=True)
    marker = directory / f"{_MARK}{uuid.uuid4().hex}"
    marker.touch()
    if not disks.has_links(directory):
        log.warning(
            "local.work_dir has no hard links, so each epoch copies its state there",
            directory=str(directory),
        )
    return marker
