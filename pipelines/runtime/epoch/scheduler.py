"""The epochs in flight: which of them takes which step now, and what falls when one fails.

    lane of a stage    1 2 3 4        a stage takes epochs in order, each on the snapshot that the one before left
    next stage           1 2 3 4      ... and after the stage upstream; what it leaves comes first in its next epoch
    gates                1 2 3 4      of the stages' rows: before a stage that reads them, and beside the next epoch
    uploads                1 2 3      state is uploaded once that of the epoch before is: it refers to its objects, and
                           counts once that is confirmed
    commits                 1 2 3     looked at as a whole and committed, one epoch after the other
    publishing                1 2 3   one after the other too, at most one epoch behind the newest commit
    pruning                     1 2 3   prune, answer: beside the publishing of the next one, and not for each of them
    upkeep                       2    now and then, of the registry's logs, beside all else
    ids                1 2 3 4        an epoch's id is written down before anything of it is begun
    looks              - - - -        for requests, for what waits in sources, and the planning of slices (`beside`)
    restores           -   -          where a stage takes long: whether it waits for state that is being fetched, which
                       takes none of its time

Nothing of an epoch waits for a later one. If one fails, every later one falls with it; earlier ones go on to their end;
then what fell is discarded, and the next epoch builds on the newest confirmed checkpoint. Only this thread touches the
coordinator,
and while epochs are in flight it waits for no storage, but for a lease that it has to renew: else what follows a step
would wait with it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import structlog

from pipelines.runtime.definition import Stage
from pipelines.runtime.epoch import steps
from pipelines.runtime.epoch.commit import commit
from pipelines.runtime.epoch.model import (
    EpochReport,
    InFlightEpoch,
    SourceOffsets,
    StageProgress,
    StageResult,
    local_rows,
    pending_bytes,
)
from pipelines.runtime.epoch.stage_job import bases, check_acks, judge, late, note_progress, plan, run_stage, to_judge
from pipelines.runtime.epoch.step_runner import Ended, StepRunner
from pipelines.runtime.gates import evaluation
from pipelines.runtime.gates.evaluation import Verdict
from pipelines.runtime.ownership import hold_causes
from pipelines.runtime.ownership.context import RunContext
from pipelines.runtime.ownership.epoch_plan import EpochPlan
from pipelines.runtime.ownership.fencing import discard, raise_if_fenced
from pipelines.runtime.ownership.local_paths import work_dir
from state_ops.checkpoints.checkpoint import CHANNEL, Ack, Checkpoint, Snapshot, StateFile, snapshots_of
from state_ops.checkpoints.coordinator import Coordinator
from state_ops.checkpoints.pending_checkpoint import FailureReason, Refusal, owns
from state_ops.checkpoints.registry import Publication
from state_ops.coordination import restore_progress
from state_ops.coordination.lease import Heartbeat
from state_ops.coordination.restore_progress import Restoring, described
from state_ops.errors import (
    FencedError,
    GateError,
    HoldingError,
    LocalBaseError,
    RunEndedError,
    WeirError,
    from_report,
    plainly,
)
from state_ops.ids import AttemptId
from state_ops.snapshots import stage_upload

log = structlog.get_logger("weir.run")

# Lanes, besides the stages'.
_GATES, _UPLOADS, _COMMITS, _PUBLISHING, _PRUNING = "gates of rows", "uploads", "commits", "publishing", "pruning"
_UPKEEP, _IDS, _LOOKS, _RESTORES = "upkeep", "ids", "looks", "restores"
_NOTE, _JOB, _SEAL, _COMMIT, _PUBLISH, _FINISH, _LOGS = "note", "job", "seal", "commit", "publish", "finish", "logs"
_LOOK = "look"
_MARK = "coordinator-"
_MIB = 1 << 20
_GOODBYE_SECONDS = 30.0
_GRACE_SECONDS = 60.0
_RESTORES_SECONDS, _SAID_SECONDS = 5.0, 10.0

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why epochs fall. epoch: the oldest that failed by itself. final: no replay by this run can help. keep: discard
    nothing. again: it did not fail, but is to be begun anew with this cut."""

    epoch: int
    error: BaseException
    final: bool = False
    keep: bool = False
    again: EpochPlan | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """What a lane is at. then: what follows, in the coordinator's thread; failed: what follows an error. begun: on
    time.monotonic()."""

    in_flight: InFlightEpoch
    begun: float
    then: Callable[[InFlightEpoch, Any], None]
    failed: Callable[[InFlightEpoch, BaseException], None]


class EpochScheduler:
    """Epochs between their trigger and their end, oldest first.

    tolerated: called with a failure once everything that fell is discarded; raises it if the run must not go on. again:
    the cut to begin next, before anything else is planned.
    """

    def __init__(
        self,
        context: RunContext,
        coordinator: Coordinator,
        heartbeat: Heartbeat,
        runner: StepRunner,
        tolerated: Callable[[int, WeirError], None],
    ) -> None:
        self._context, self._coordinator, self._heartbeat, self._lanes = context, coordinator, heartbeat, runner
        self._tolerated = tolerated
        self._in_flight_epochs: list[InFlightEpoch] = []
        self._fallen: list[InFlightEpoch] = []
        self._failure: _Failure | None = None
        self._steps: dict[str, _Step] = {}
        self._looks_since: float | None = None
        self._seen: Ended | None = None
        self._reports: list[EpochReport] = []
        self._has_fallen = False
        self._failures_before = 0
        self._has_confirmed = False
        self._commit_ms, self._publishing_ms, self._pruning_ms = 0.0, 0.0, 0.0
        self._here = _mark(work_dir(context))
        self.frontier = SourceOffsets.at(None)
        self._bases: dict[str, dict[int, Snapshot]] = {}
        self._channels: dict[str, StateFile] = {}
        self.again: EpochPlan | None = None
        self._kept: list[Ack] = []
        self._pruning_waits = False
        self._progress_by_stage: dict[str, StageProgress] = {}
        self._beats: dict[str, int] = {}
        self._restores_seen, self._restores_said = 0.0, 0.0
        self._stand_on_head()

    # -- what the run asks

    @property
    def empty(self) -> bool:
        """Whether nothing is in flight, and nothing that fell is still to be cleared up."""
        return not (self._in_flight_epochs or self._fallen or self._steps or self._failure)

    @property
    def has_room(self) -> bool:
        """Whether one more epoch may begin: so many in flight, so many bytes that wait to be uploaded or applied,
        unless it is the oldest.

        One that is confirmed and still publishes or prunes takes no place, unless nothing is to overlap: while that
        takes longest, stages would wait for what needs no processor. There are three of them at most (`_may_commit`).
        """
        if self._fallen or self._failure is not None:
            return False
        most = self._context.settings.checkpoints.max_concurrent
        pending = sum(in_flight.confirmed is None for in_flight in self._in_flight_epochs)
        return pending < most and (most > 1 or not self._in_flight_epochs) and not (pending and self._is_full)

    @property
    def _is_full(self) -> bool:
        """Whether so much waits to be uploaded, or applied, that only the oldest epoch may go on."""
        configured, stages = self._context.settings.checkpoints, self._context.pipeline.stages
        waiting = pending_bytes(self._in_flight_epochs, self._progress_by_stage, stages, configured.mode == "full")
        return waiting > configured.max_pending_mb * _MIB

    @property
    def behind(self) -> dict[str, int]:
        """Stages that epochs wait in front of, each with the number of those that have rows."""
        queues = {uid: progress.waiting for uid, progress in self._progress_by_stage.items() if progress.waiting}
        return {uid: sum(bool(one.layers) for one in queue) for uid, queue in queues.items()}

    @property
    def reading(self) -> set[tuple[str, str]]:
        """Source and name of every file that an epoch in flight reads."""
        cuts = [in_flight.cut.slices for in_flight in [*self._fallen, *self._in_flight_epochs]]
        return {(name, file.name) for slices in cuts for name, planned in slices.items() for file in planned.files}

    def fell(self) -> bool:
        """Whether epochs have fallen since this was asked last: their slices are to be read again, however long ago
        they came."""
        fell, self._has_fallen = self._has_fallen, False
        return fell

    @property
    def answers(self) -> set[str]:
        """Names of the requests that epochs in flight will answer."""
        return {known.name for in_flight in self._in_flight_epochs for known in in_flight.cut.requests}

    # -- what the run does

    def begin(self, cut: EpochPlan) -> bool:
        """Trigger an epoch. False if the coordinator refuses."""
        context, coordinator = self._context, self._coordinator
        expected = {stage.uid: context.settings.spark.parallelism for stage in context.pipeline.stages}
        # It was due before its slice was planned, or nobody was to wait for it: no pause is kept twice.
        pending = coordinator.trigger(time.monotonic(), cut.trigger, expected, catching_up=True)
        if isinstance(pending, Refusal):
            log.warning("no epoch was begun", reason=pending.reason)
            return False
        triggered_at = cut.at or datetime.now(UTC)
        self.frontier = self.frontier.after(cut.slices, context.readers, triggered_at)
        deadline = time.monotonic() + coordinator.policy.timeout
        self._in_flight_epochs.append(
            InFlightEpoch(pending, cut, self.frontier, triggered_at, time.perf_counter(), deadline)
        )
        self.again = None if cut is self.again else self.again
        self._start()
        return True

    def turn(self, seconds: float) -> list[EpochReport]:
        """Go on as steps end, for so long at most, until there is room, a report, or nothing left; returns epochs that
        ended.

        While something is looked for (`beside`): until that is found, or a report. Raises what `tolerated` raises.
        """
        until = time.perf_counter() + seconds
        while True:
            left = until - time.perf_counter()
            ended = self._lanes.next(max(0.0, left) if self._steps or self._looks_since is not None else 0.0)
            if ended is not None and ended.lane == _LOOKS:
                self._looks_since, self._seen = None, ended
            elif ended is not None:
                self._take(ended)
            self._expire()
            if not self._reports:  # what has ended well is told first
                self._give_up()
            self._start()
            if not (self._steps or self._in_flight_epochs or self._reports):
                self._land()
            if self._reports or ended is None or self._seen is not None:
                break
            if self._looks_since is None and (self.empty or self.has_room):
                break
        reports, self._reports = self._reports, []
        return reports

    def beside(self, look: Callable[[], Found], seconds: float) -> Generator[EpochReport, None, Callable[[], Found]]:
        """Look at something in storage while epochs go on; yields reports of those that end meanwhile.

        look: touches nothing that steps change. What it finds was so when it began: a request may have been answered
        since, a slice belong to epochs that have fallen. seconds: as for `turn`. Returns a call that gives what was
        found, or raises what the look has raised. Raises what `turn` raises, and RunEndedError once the look has taken
        longer than an epoch may and a minute."""
        self._looks_since = time.monotonic()
        self._lanes.start(_LOOKS, look)
        while self._seen is None:
            yield from self.turn(seconds)
        seen, self._seen = self._seen, None

        def found() -> Found:
            if seen.error is not None:
                raise seen.error
            return cast(Found, seen.result)

        return found

    def close(self) -> None:
        """The run ends with epochs in flight: nobody waits for them."""
        try:
            if not self.empty:
                self._abandon()
            if not self._steps:
                stage_upload.clear(self._kept)
        finally:
            self._here.unlink(missing_ok=True)

    def _abandon(self) -> None:
        """Wait for steps that run, for a while, and discard what is in flight, unless its commit may have landed."""
        with suppress(Exception):  # a JVM that is gone must not hide why the run ends
            self._context.executor.cancel()
        until = time.monotonic() + _GOODBYE_SECONDS
        while self._steps and time.monotonic() < until:
            ended = self._lanes.next(max(0.0, until - time.monotonic()))
            if ended is not None:
                self._steps.pop(ended.lane, None)
        with suppress(FencedError):
            raise_if_fenced(self._context, RuntimeError("the run ended"))
            for in_flight in [*self._fallen, *self._in_flight_epochs]:
                if not in_flight.may_stand:
                    self._discard(in_flight)

    # -- steps

    def _start(self) -> None:
        """Start every step whose time has come."""
        waiting = self._may_wait_for_state()
        if waiting is not None:
            self._restores_seen = time.monotonic()
            self._begin(
                _RESTORES,
                waiting,
                _LOOK,
                partial(restore_progress.read, self._context.storage),
                self._fetching,
                _no_matter,
            )
        for in_flight in list(self._in_flight_epochs):
            if self._free(_IDS, in_flight, _NOTE):
                self._begin(_IDS, in_flight, _NOTE, partial(self._heartbeat.begin, in_flight.pending.id), self._noted)
            for stage in self._context.pipeline.stages:
                if self._may_work(in_flight, stage):
                    self._begin_stage(in_flight, stage)
                elif self._may_upload(in_flight, stage):
                    self._begin_upload(in_flight, stage)
                if self._may_judge(in_flight, stage):
                    judging = partial(judge, self._context, stage, to_judge(in_flight, stage))
                    self._begin(_GATES, in_flight, stage.uid, judging, partial(self._judged, stage))
            if self._may_seal(in_flight):
                sealing = partial(steps.completed, self._context, in_flight, self._coordinator.head, self._channels)
                self._begin(_COMMITS, in_flight, _SEAL, sealing, self._seal)
            if in_flight.sealed is not None and self._may_commit(in_flight):
                self._commit(in_flight, *in_flight.sealed)
            if in_flight.confirmed is not None and self._free(_PUBLISHING, in_flight, _PUBLISH):
                step = partial(steps.publish, self._context, in_flight, in_flight.confirmed)
                self._begin(_PUBLISHING, in_flight, _PUBLISH, step, self._published, self._not_finished)
            if in_flight.published is not None and self._free(_PRUNING, in_flight, _FINISH):
                self._finish(in_flight, in_flight.published)

    def _begin(
        self,
        lane: str,
        in_flight: InFlightEpoch,
        what: str,
        step: Callable[[], object],
        then: Callable[[InFlightEpoch, Any], None],
        failed: Callable[[InFlightEpoch, BaseException], None] | None = None,
    ) -> None:
        in_flight.begun.add((lane, what))
        self._steps[lane] = _Step(in_flight, time.monotonic(), then, failed or self._fail)
        self._lanes.start(lane, step)

    def _free(self, lane: str, in_flight: InFlightEpoch, what: str) -> bool:
        return lane not in self._steps and (lane, what) not in in_flight.begun

    def _may_work(self, in_flight: InFlightEpoch, stage: Stage) -> bool:
        before = self._before(in_flight)
        if (
            not in_flight.noted
            or not self._free(stage.uid, in_flight, _JOB)
            or (before is not None and stage.uid not in before.acks)
        ):
            return False
        # No stage gets to see rows that a gate refuses.
        if isinstance(stage.input, Stage) and stage.input.uid not in in_flight.judged:
            return False
        if self._follows_confirmed(in_flight):
            return True
        return self._progress_by_stage[stage.uid].settled and stage.uid not in in_flight.elsewhere and not self._is_full

    def _may_wait_for_state(self) -> InFlightEpoch | None:
        """The epoch of a stage that is at work for so long that one should look whether it waits for its state, and how
        far that is."""
        if _RESTORES in self._steps:
            return None
        now, stages = time.monotonic(), {stage.uid for stage in self._context.pipeline.stages}
        for step in [
            step for lane, step in self._steps.items() if lane in stages and step.in_flight in self._in_flight_epochs
        ]:
            since = max(step.begun, self._restores_seen)
            if now >= since + min(_RESTORES_SECONDS, (step.in_flight.deadline - since) / 4):
                return step.in_flight
        return None

    def _fetching(self, _: InFlightEpoch, found: list[Restoring]) -> None:
        """The time in which state is fetched is no epoch's own."""
        generation = int(self._context.generation)
        own = [one for one in found if one.generation == generation and self._beats.get(one.path) != one.beat]
        self._beats = {one.path: one.beat for one in found}
        for in_flight in self._in_flight_epochs:
            fetched = [one for one in own if one.epoch == int(in_flight.pending.id)]
            if not fetched:
                continue
            self._prolong(in_flight)
            if time.monotonic() - self._restores_said >= _SAID_SECONDS:
                self._restores_said = time.monotonic()
                stages = sorted({str(one.stage) for one in fetched})
                log.info(
                    "state is being fetched", epoch=int(in_flight.pending.id), stages=stages, here=described(fetched)
                )

    def _may_judge(self, in_flight: InFlightEpoch, stage: Stage) -> bool:
        return (
            stage.uid in in_flight.acks
            and stage.uid not in in_flight.judged
            and self._free(_GATES, in_flight, stage.uid)
        )

    def _may_upload(self, in_flight: InFlightEpoch, stage: Stage) -> bool:
        """One after the other, and not before what the epoch builds on is in storage."""
        return (
            any(ack.handover is not None for ack in in_flight.acks.get(stage.uid, ()))
            and self._free(_UPLOADS, in_flight, stage.uid)
            and self._follows_stored(in_flight)
            # What the stages downstream leave of its rows is uploaded with it.
            and (not self._may_wait or all(other.uid in in_flight.acks for other in self._context.pipeline.stages))
        )

    @property
    def _may_wait(self) -> bool:
        """Whether stages may leave rows that they have not applied."""
        configured = self._context.settings.checkpoints.alignment_timeout_seconds
        return configured is not None or any(progress.waiting for progress in self._progress_by_stage.values())

    def _may_seal(self, in_flight: InFlightEpoch) -> bool:
        return (
            in_flight.pending.complete
            and all(stage.uid in in_flight.judged for stage in self._context.pipeline.stages)
            and self._free(_COMMITS, in_flight, _SEAL)
            and self._follows_confirmed(in_flight)
        )

    def _may_commit(self, in_flight: InFlightEpoch) -> bool:
        """Beside the publishing of the epoch before, and no further ahead: what sinks lack stays little. And beside the
        pruning of one more."""
        before = self._in_flight_epochs[: self._in_flight_epochs.index(in_flight)]
        lacking = sum(other.published is None for other in before)
        return self._free(_COMMITS, in_flight, _COMMIT) and lacking <= 1 and len(before) <= 2

    def _follows_confirmed(self, in_flight: InFlightEpoch) -> bool:
        before = self._before(in_flight)
        return before is None or before.confirmed is not None

    def _follows_stored(self, in_flight: InFlightEpoch) -> bool:
        """Whether all of the epoch before is in storage, and it is the next to be confirmed."""
        before = self._before(in_flight)
        return before is None or (before.pending.complete and self._follows_confirmed(before))

    def _stored_base(self, in_flight: InFlightEpoch, stage: Stage) -> dict[int, Snapshot]:
        """What the epoch builds on, by subtask, as the epoch before names it."""
        before = self._before(in_flight)
        if before is None or before.confirmed is not None:
            return self._bases[stage.uid]
        return snapshots_of(before.pending.files(), stage.uid)

    def _before(self, in_flight: InFlightEpoch) -> InFlightEpoch | None:
        index = self._in_flight_epochs.index(in_flight)
        return self._in_flight_epochs[index - 1] if index else None

    def _after(self, in_flight: InFlightEpoch) -> InFlightEpoch | None:
        return next(iter(self._in_flight_epochs[self._in_flight_epochs.index(in_flight) + 1 :]), None)

    def _begin_stage(self, in_flight: InFlightEpoch, stage: Stage) -> None:
        keep = {
            AttemptId(name)
            for other in self._in_flight_epochs
            for ack in other.handed_over
            if ack.operator == stage.uid and ack.handover is not None
            for name in (ack.attempt, ack.handover.base or "")
        }
        keep |= {known.attempt for known in self._bases[stage.uid].values()}
        keep |= {ack.attempt for ack in self._kept if ack.operator == stage.uid}
        if self._before(in_flight) is not None:  # it has waited for its turn
            self._prolong(in_flight)
        # On a cluster a scan of rows that one host alone has may run on another.
        leaves = isinstance(stage.input, Stage) and self._may_wait
        apart = self._context.pipeline.feeds_others(stage) or leaves
        shared = self._context.settings.spark.master.startswith("local") or not apart
        here = self._here if shared else None
        progress = self._progress_by_stage[stage.uid]
        in_flight.work[stage.uid] = plan(self._context, in_flight, stage, progress)
        # A later epoch that ends its worker again and again must not take this one's snapshot along, in this run or in
        # the next.
        proven = self._has_confirmed and not self._coordinator.failures
        asynchronous = self._context.settings.state.asynchronous_snapshots and proven
        step = partial(
            run_stage, self._context, in_flight, stage, progress, frozenset(keep), here, self._may_wait, asynchronous
        )
        self._begin(stage.uid, in_flight, _JOB, step, partial(self._worked, stage))

    def _begin_upload(self, in_flight: InFlightEpoch, stage: Stage) -> None:
        first = all(lane != _UPLOADS for lane, _ in in_flight.begun)
        if first and self._before(in_flight) is not None:  # it has waited for that one's uploads
            self._prolong(in_flight)
        uploading = partial(steps.upload, self._context, in_flight, stage, self._stored_base(in_flight, stage))
        self._begin(_UPLOADS, in_flight, stage.uid, uploading, partial(self._uploaded, stage))

    # -- what follows a step

    def _take(self, ended: Ended) -> None:
        step = self._steps.pop(ended.lane)
        for ack in ended.result.acks if isinstance(ended.result, StageResult) else ():
            self._context.storage.traffic.add(ack.traffic or {})
        if step.in_flight in self._fallen:
            if isinstance(ended.result, StageResult):
                step.in_flight.handed_over += [ack for ack in ended.result.acks if ack.handover is not None]
            if isinstance(ended.error, RunEndedError) and step.in_flight.may_stand:  # says more than why it fell
                self._failure = _Failure(step.in_flight.pending.id, ended.error, keep=True)
            return
        if ended.error is not None:
            step.failed(step.in_flight, ended.error)
            return
        try:
            step.then(step.in_flight, ended.result)
        except Exception as error:
            step.failed(step.in_flight, error)

    def _noted(self, in_flight: InFlightEpoch, _: None) -> None:
        in_flight.noted = True

    def _worked(self, stage: Stage, in_flight: InFlightEpoch, result: StageResult) -> None:
        in_flight.handed_over += [ack for ack in result.acks if ack.handover is not None]
        if self._runs_again(stage, in_flight, result.acks):
            return
        for ack in result.acks:
            self._receive(in_flight, ack)
        check_acks(in_flight, stage)
        if result.again is not None:
            self._set_aside(in_flight, result.again)
            return
        in_flight.ms |= result.ms
        columns = self._context.inputs.get(stage.uid)
        self._progress_by_stage[stage.uid] = note_progress(
            in_flight, stage, self._progress_by_stage[stage.uid], columns
        )
        in_flight.acks[stage.uid] = in_flight.pending.acks_of(stage.uid)
        if result.shapes is not None:
            in_flight.shapes[stage.uid] = result.shapes
        if not to_judge(in_flight, stage):
            self._judged(stage, in_flight, (list(result.verdicts), {}))

    def _judged(self, stage: Stage, in_flight: InFlightEpoch, said: tuple[list[Verdict], dict[str, float]]) -> None:
        verdicts, ms = said
        evaluation.refuse(stage.uid, verdicts)
        in_flight.verdicts += verdicts
        in_flight.ms |= ms
        in_flight.judged.add(stage.uid)

    def _runs_again(self, stage: Stage, in_flight: InFlightEpoch, acks: Sequence[Ack]) -> bool:
        """Whether a subtask has landed where its base is not. Then the stage runs once more, as soon as that is in
        storage."""
        kinds = {ack.error["kind"] for ack in acks if ack.error is not None}
        if LocalBaseError.__name__ not in kinds or stage.uid in in_flight.elsewhere:
            return False
        log.info("a subtask runs where its base is not", stage=stage.uid, epoch=in_flight.pending.id)
        in_flight.losers += [file for ack in acks for file in ack.files if owns(ack, file)]
        in_flight.elsewhere.add(stage.uid)
        in_flight.begun.discard((stage.uid, _JOB))
        return True

    def _receive(self, in_flight: InFlightEpoch, ack: Ack) -> None:
        received = self._coordinator.receive(ack)
        in_flight.losers += received.discard
        if received.error is not None:
            raise from_report(received.error)

    def _uploaded(self, stage: Stage, in_flight: InFlightEpoch, acks: list[Ack]) -> None:
        in_flight.uploaded[stage.uid] = acks
        in_flight.ms[f"upload:{stage.uid}"] = max(ack.ms.get("upload", 0.0) for ack in acks)
        if self._follows_confirmed(in_flight):
            self._count_uploads(in_flight)

    def _count_uploads(self, in_flight: InFlightEpoch) -> None:
        """What is uploaded counts once that is confirmed which it refers to."""
        for ack in [ack for acks in in_flight.uploaded.values() for ack in acks]:
            self._receive(in_flight, ack)
        in_flight.uploaded.clear()

    def _seal(self, in_flight: InFlightEpoch, sealed: tuple[Checkpoint, tuple[StateFile, ...]]) -> None:
        in_flight.sealed = sealed

    def _commit(self, in_flight: InFlightEpoch, checkpoint: Checkpoint, files: tuple[StateFile, ...]) -> None:
        in_flight.ms |= {"commits_before": self._commit_ms, "publishing_before": self._publishing_ms}
        in_flight.ms |= {"pruning_before": self._pruning_ms}
        committing = self._coordinator.begin_commit()
        assert committing is in_flight.pending, "its predecessor is confirmed, and every ack is in"
        in_flight.may_stand = True
        step = partial(commit, self._context, in_flight, checkpoint, files)
        self._begin(_COMMITS, in_flight, _COMMIT, step, self._committed, self._not_committed)

    def _committed(self, in_flight: InFlightEpoch, checkpoint: Checkpoint) -> None:
        assert in_flight.sealed is not None, "it is what was committed"
        _, files = in_flight.sealed
        own = {file.path for file in in_flight.pending.files()}
        self._coordinator.completed(time.monotonic(), checkpoint, [file for file in files if file.path not in own])
        self._channels = _channels(files)
        self._failures_before, self._has_confirmed = 0, True
        self._commit_ms = in_flight.ms["commit"]
        self._context.head = checkpoint
        in_flight.confirmed = checkpoint
        self._bases = {stage.uid: snapshots_of(files, stage.uid) for stage in self._context.pipeline.stages}
        follower = self._after(in_flight)
        if follower is not None:  # it has waited for this one: from now on the time is its own
            self._prolong(follower)
        for uid, progress in self._progress_by_stage.items():
            if follower is None or uid not in follower.acks:  # the tip is this epoch's
                self._progress_by_stage[uid] = progress.confirmed(self._bases[uid])
        self._renew()
        if follower is not None and follower in self._in_flight_epochs:
            try:
                self._count_uploads(follower)
            except Exception as error:  # this epoch stands
                self._fail(follower, error)

    def _not_committed(self, in_flight: InFlightEpoch, error: BaseException) -> None:
        self._note_failures()
        # Only the registry knows its outcome then.
        keep = isinstance(error, RunEndedError) or not isinstance(error, WeirError)
        if not keep and not isinstance(error, FencedError):
            self._coordinator.abort(time.monotonic(), in_flight.pending.id, FailureReason.COMMIT)
            in_flight.may_stand = False
        self._fall(in_flight, _Failure(in_flight.pending.id, error, keep=keep))
        self._renew()

    def _published(self, in_flight: InFlightEpoch, publications: tuple[Publication, ...]) -> None:
        in_flight.published = publications
        self._publishing_ms = in_flight.ms["publish"]

    def _finish(self, in_flight: InFlightEpoch, publications: tuple[Publication, ...]) -> None:
        others = [other.local_rows() for other in self._in_flight_epochs if other is not in_flight]
        read = local_rows(
            file for progress in self._progress_by_stage.values() for one in progress.waiting for file in one.files
        ).union(*others)
        ended = [*self._kept, *in_flight.handed_over]
        self._kept = [ack for ack in ended if not read.isdisjoint(stage_upload.locals_of(ack))]
        done_with = [ack for ack in ended if ack not in self._kept]
        self._pruning_waits = self._may_wait_with_pruning(in_flight)
        also = None if self._pruning_waits else self._coordinator.needed()
        if also is not None:  # others may be committed by then, of which only one is the newest
            if in_flight.cut.requests:
                also.setdefault(in_flight.pending.id, []).append("requests for it are being answered")
            for later in self._in_flight_epochs[1:]:
                also.setdefault(later.pending.id, []).append("it is newer than the epoch that prunes")
        assert in_flight.confirmed is not None, "it is what was published"
        step = partial(steps.finish, self._context, in_flight, in_flight.confirmed, publications, done_with, also)
        self._begin(_PRUNING, in_flight, _FINISH, step, self._finished, self._not_finished)

    def _may_wait_with_pruning(self, in_flight: InFlightEpoch) -> bool:
        """Whether the next epoch would soon wait for it: that one then prunes for both. Never twice in a row."""
        follower = self._after(in_flight)
        asked = bool(in_flight.cut.requests)  # whoever asked for it waits
        could_begin = follower is not None and follower.pending.complete
        return could_begin and not asked and not self._pruning_waits

    def _finished(self, in_flight: InFlightEpoch, report: EpochReport) -> None:
        self._coordinator.pruned(report.pruned)
        self._pruning_ms = report.ms["prune"]
        self._in_flight_epochs.remove(in_flight)
        self._reports.append(report)
        if self._context.registry.upkeep_due and _UPKEEP not in self._steps:
            step = partial(steps.keep_up, self._context)
            self._begin(_UPKEEP, in_flight, _LOGS, step, lambda *_: None, self._not_kept_up)

    def _not_kept_up(self, in_flight: InFlightEpoch, error: BaseException) -> None:
        """The next upkeep does it, unless somebody else owns the pipeline now."""
        if isinstance(error, FencedError):
            self._not_finished(in_flight, error)
        else:
            log.warning("the registry's logs were not shortened", error=plainly(error))

    def _not_finished(self, in_flight: InFlightEpoch, error: BaseException) -> None:
        """It stands, as the next one does if its commit has landed or is about to: the next run publishes both. The
        others fall, but for one before it, which ends well."""
        ending = [
            other
            for other in self._in_flight_epochs
            if other.published is not None and other.pending.id < in_flight.pending.id
        ]
        self._in_flight_epochs = [
            other for other in self._in_flight_epochs if other is not in_flight and other not in ending
        ]
        open_still = [pending for pending in self._coordinator.pending if not pending.committing]
        if open_still:
            self._coordinator.abort(time.monotonic(), open_still[0].id, FailureReason.PREDECESSOR)
        self._fallen += self._in_flight_epochs
        self._in_flight_epochs = ending
        # Where nobody can tell what the registry holds, that ends the run.
        if self._failure is None or not self._failure.keep:
            self._failure = _Failure(in_flight.pending.id, error, final=True)

    def _prolong(self, in_flight: InFlightEpoch) -> None:
        """The time that an epoch has waited for an earlier one is not its own."""
        in_flight.deadline = max(in_flight.deadline, time.monotonic() + self._coordinator.policy.timeout)
        self._coordinator.prolong(time.monotonic(), in_flight.pending.id)

    def _renew(self) -> None:
        """The commit may have claimed a new generation: what is in flight carries the old one and falls, through no
        fault."""
        if self._coordinator.generation == self._context.generation:
            return
        try:
            self._heartbeat.renew(self._context.generation)
        except OSError as error:  # a missed beat; the checkpoint stands
            log.warning("heartbeat failed", error=plainly(error))
        fallen = {aborted.pending.id for aborted in self._coordinator.renew(self._context.generation)}
        self._fallen += [in_flight for in_flight in self._in_flight_epochs if in_flight.pending.id in fallen]
        self._in_flight_epochs = [
            in_flight for in_flight in self._in_flight_epochs if in_flight.pending.id not in fallen
        ]

    # -- failures

    def _expire(self) -> None:
        for in_flight in self._in_flight_epochs[1:]:
            if all(step.in_flight is not in_flight for step in self._steps.values()):  # it waits for an earlier one
                self._prolong(in_flight)
        self._note_failures()
        aborted = self._coordinator.expire(time.monotonic())
        fallen = [
            in_flight for in_flight in self._in_flight_epochs if aborted and in_flight.pending is aborted[0].pending
        ]
        for in_flight in fallen:  # none where it has fallen already, behind a commit that ended the run
            running = [lane for lane, step in self._steps.items() if step.in_flight is in_flight]
            log.warning("an epoch's time is up", epoch=in_flight.pending.id, waits_for=running)
            self._fall(in_flight, _Failure(in_flight.pending.id, late(self._context, in_flight)))

    def _give_up(self) -> None:
        """End the run where a step does not end, long after its time: of what has fallen, beside which no later epoch
        can begin, or of what is committed, which has no deadline, and behind which later epochs wait."""
        until = time.monotonic() - _GRACE_SECONDS

        def ends_by(step: _Step) -> float:
            own = step.begun + self._coordinator.policy.timeout
            return own if step.in_flight.may_stand else step.in_flight.deadline

        hung = [
            lane
            for lane, step in self._steps.items()
            if (step.in_flight.may_stand or step.in_flight in self._fallen) and ends_by(step) < until
        ]
        if self._looks_since is not None and self._looks_since + self._coordinator.policy.timeout < until:
            hung.append(_LOOKS)
        if hung:
            raise RunEndedError(
                f"A step does not end, {_GRACE_SECONDS:g} s after its epoch's time was up: {', '.join(sorted(hung))}.",
                where=f"pipeline {self._context.pipeline.title}",
                next="Run again. If it happens again, look at what the stage's function or the storage waits for: a call without a timeout, mostly; "
                "looks: at a slice of fewer files (epoch.max_files), if planning it takes that long.",
            ) from (self._failure.error if self._failure else None)

    def _note_failures(self) -> None:
        """However many epochs fall, and in whatever order, it is one failure."""
        if self._failure is None:
            self._failures_before = self._coordinator.failures

    def _fail(self, in_flight: InFlightEpoch, error: BaseException) -> None:
        if time.monotonic() >= in_flight.deadline and isinstance(error, WeirError):
            cause, error = error, late(self._context, in_flight)
            error.__cause__ = cause
        reason = FailureReason.GATE if isinstance(error, GateError) else FailureReason.JOB
        self._note_failures()
        self._coordinator.abort(time.monotonic(), in_flight.pending.id, reason)
        self._fall(in_flight, _Failure(in_flight.pending.id, error))

    def _set_aside(self, in_flight: InFlightEpoch, again: EpochPlan) -> None:
        """A gate has set rows aside: the epoch falls, and all that were built on it, through no fault of theirs."""
        self._note_failures()
        self._coordinator.abort(time.monotonic(), in_flight.pending.id, FailureReason.GATE)
        self._fall(in_flight, _Failure(in_flight.pending.id, RuntimeError("rows were set aside"), again=again))

    def _fall(self, in_flight: InFlightEpoch, failure: _Failure) -> None:
        """An epoch failed: it falls, and all that were built on it."""
        index = self._in_flight_epochs.index(in_flight)
        self._fallen += self._in_flight_epochs[index:]
        self._in_flight_epochs = self._in_flight_epochs[:index]
        if (
            self._failure is not None
        ):  # a later epoch's says less, for it was built on this one; but it may have ended this one's worker
            log.warning("later_epoch_failed", epoch=self._failure.epoch, error=str(self._failure.error))
        self._failure = failure

    def _land(self) -> None:
        """Everything has come down: discard what fell, and stand on the newest confirmed checkpoint."""
        failure, self._failure = self._failure, None
        fallen, self._fallen = self._fallen, []
        if failure is None and not fallen:
            return
        self._has_fallen = True
        if failure is not None:
            self._coordinator.count(time.monotonic(), self._failures_before + (failure.again is None))
            raise_if_fenced(self._context, failure.error)
        if failure is None or not (failure.keep or isinstance(failure.error, FencedError)):
            for in_flight in reversed(fallen):
                if not in_flight.may_stand:
                    self._discard(in_flight)
        self._stand_on_head()
        if failure is None:
            return
        if failure.again is not None:
            self.again = failure.again
            return
        if isinstance(failure.error, HoldingError):
            stopped = next((one for one in fallen if one.pending.id == failure.epoch), None)
            again = self._noted_on(failure.error, stopped) if stopped is not None else None
            if again is not None:  # like rows that a gate has set aside: the slice comes again, without it
                self._coordinator.count(time.monotonic(), self._failures_before)
                self.again = again
                return
        typed = steps.typed(failure.error, f"pipeline {self._context.pipeline.title}, epoch {failure.epoch}")
        if typed is not None:
            raise typed from failure.error
        if failure.final or isinstance(failure.error, FencedError) or not isinstance(failure.error, WeirError):
            raise failure.error
        self._tolerated(failure.epoch, failure.error)

    def _noted_on(self, error: HoldingError, in_flight: InFlightEpoch) -> EpochPlan | None:
        """Note on an error which epoch it ended; returns the cut to take instead, where a file is set aside."""
        cut = replace(in_flight.cut, at=in_flight.triggered_at)
        again = hold_causes.without_bad_file(self._context.readers, cut, error, self.frontier.expected)
        hold_causes.note_slice(error, in_flight.pending.id, cut)
        return again

    def _discard(self, in_flight: InFlightEpoch) -> None:
        discard(self._context, in_flight.pending.generation, in_flight.pending.id)
        stage_upload.clear(in_flight.handed_over)

    def _stand_on_head(self) -> None:
        """What the next epoch builds on: the newest confirmed checkpoint, and nothing else."""
        head = self._coordinator.head
        self._context.head = head
        self.frontier = SourceOffsets.at(head)
        files = self._context.registry.files(head) if head else ()
        stages = [stage.uid for stage in self._context.pipeline.stages]
        known = {uid for uid, figures in head.operators.items() if figures["schema"]} if head else set()
        for found in (
            self._context.shapes,
            self._context.inputs,
            self._context.reads,
        ):  # what rows that were discarded looked like binds nobody
            for uid in found.keys() - known:
                del found[uid]
        self._bases = {uid: bases(self._context, head, files, uid) for uid in stages}
        self._channels = _channels(files)
        self._progress_by_stage = {uid: StageProgress.at(head, uid, self._bases[uid], self._channels) for uid in stages}
        stage_upload.clear(self._kept)  # from now on they are read from storage
        self._kept = []


def _no_matter(in_flight: InFlightEpoch, error: BaseException) -> None:
    """What cannot be looked at now is looked at again."""


def _channels(files: Sequence[StateFile]) -> dict[str, StateFile]:
    """The files of rows in a checkpoint's listing, by path."""
    return {file.path: file for file in files if file.kind == CHANNEL}


def _mark(directory: Path) -> Path:
    """A file that tells a subtask whether it sees the coordinator's disk."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f"{_MARK}*"):
        left.unlink(missing_ok=True)  # of one that was killed; a zombie's subtasks upload by themselves from now on
    mark = directory / f"{_MARK}{uuid.uuid4().hex}"
    mark.touch()
    return mark
