"""The epochs in flight: which of them takes which step now, and what falls when one fails.

    lane of a stage    1 2 3 4        a stage takes epochs in order, each on the snapshot that the one before left
    next stage           1 2 3 4      ... and after the stage upstream; what it leaves comes first in its next epoch
    gates                1 2 3 4      of the stages' rows: before a stage that reads them, and beside the next epoch
    uploads                1 2 3      state is uploaded once that of the epoch before is: it refers to its objects, and counts once that is confirmed
    commits                 1 2 3     looked at as a whole and committed, one epoch after the other
    publishing                1 2 3   one after the other too, at most one epoch behind the newest commit
    pruning                     1 2 3   prune, answer: beside the publishing of the next one, and not for each of them
    upkeep                       2    now and then, of the registry's logs, beside all else
    ids                1 2 3 4        an epoch's id is written down before anything of it is begun
    looks              - - - -        for requests, for what waits in sources, and the planning of slices (`beside`)
    restores           -   -          where a stage takes long: whether it waits for state that is being fetched, which takes none of its time

Nothing of an epoch waits for a later one. If one fails, every later one falls with it; earlier ones go on to their end; then
what fell is discarded, and the next epoch builds on the newest confirmed checkpoint. Only this thread touches the coordinator,
and while epochs are in flight it waits for no storage, but for a lease that it has to renew: else what follows a step would wait with it.
"""

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
from pipelines.runtime.epoch.model import EpochReport, Flight, Frontier, StageResult, Tip, local_rows, pending_bytes
from pipelines.runtime.epoch.stage_job import bases, check_acks, judge, late, note_progress, plan, run_stage, to_judge
from pipelines.runtime.epoch.step_runner import Ended, Lanes
from pipelines.runtime.gates import evaluation
from pipelines.runtime.gates.evaluation import Verdict
from pipelines.runtime.ownership import hold_causes
from pipelines.runtime.ownership.context import Workshop
from pipelines.runtime.ownership.epoch_plan import Cut
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
    """Why epochs fall. epoch: the oldest that failed by itself. final: no replay by this run can help. keep: discard nothing. again: it did
    not fail, but is to be begun anew with this cut."""

    epoch: int
    error: BaseException
    final: bool = False
    keep: bool = False
    again: Cut | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """What a lane is at. then: what follows, in the coordinator's thread; failed: what follows an error. begun: on time.monotonic()."""

    flight: Flight
    begun: float
    then: Callable[[Flight, Any], None]
    failed: Callable[[Flight, BaseException], None]


class InFlight:
    """Epochs between their trigger and their end, oldest first.

    tolerated: called with a failure once everything that fell is discarded; raises it if the run must not go on. again: the cut to begin
    next, before anything else is planned.
    """

    def __init__(
        self,
        shop: Workshop,
        coordinator: Coordinator,
        heartbeat: Heartbeat,
        lanes: Lanes,
        tolerated: Callable[[int, WeirError], None],
    ) -> None:
        self._shop, self._coordinator, self._heartbeat, self._lanes = shop, coordinator, heartbeat, lanes
        self._tolerated = tolerated
        self._flights: list[Flight] = []
        self._fallen: list[Flight] = []
        self._failure: _Failure | None = None
        self._steps: dict[str, _Step] = {}
        self._looks_since: float | None = None
        self._seen: Ended | None = None
        self._reports: list[EpochReport] = []
        self._has_fallen = False
        self._failures_before = 0
        self._has_confirmed = False
        self._commit_ms, self._publishing_ms, self._pruning_ms = 0.0, 0.0, 0.0
        self._here = _mark(work_dir(shop))
        self.frontier = Frontier.at(None)
        self._bases: dict[str, dict[int, Snapshot]] = {}
        self._channels: dict[str, StateFile] = {}
        self.again: Cut | None = None
        self._kept: list[Ack] = []
        self._pruning_waits = False
        self._tips: dict[str, Tip] = {}
        self._beats: dict[str, int] = {}
        self._restores_seen, self._restores_said = 0.0, 0.0
        self._stand_on_head()

    # -- what the run asks

    @property
    def empty(self) -> bool:
        """Whether nothing is in flight, and nothing that fell is still to be cleared up."""
        return not (self._flights or self._fallen or self._steps or self._failure)

    @property
    def has_room(self) -> bool:
        """Whether one more epoch may begin: so many in flight, so many bytes that wait to be uploaded or applied, unless it is the oldest.

        One that is confirmed and still publishes or prunes takes no place, unless nothing is to overlap: while that takes longest, stages
        would wait for what needs no processor. There are three of them at most (`_may_commit`).
        """
        if self._fallen or self._failure is not None:
            return False
        most = self._shop.settings.checkpoints.max_concurrent
        pending = sum(flight.confirmed is None for flight in self._flights)
        return pending < most and (most > 1 or not self._flights) and not (pending and self._is_full)

    @property
    def _is_full(self) -> bool:
        """Whether so much waits to be uploaded, or applied, that only the oldest epoch may go on."""
        configured, stages = self._shop.settings.checkpoints, self._shop.pipeline.stages
        waiting = pending_bytes(self._flights, self._tips, stages, configured.mode == "full")
        return waiting > configured.max_pending_mb * _MIB

    @property
    def behind(self) -> dict[str, int]:
        """Stages that epochs wait in front of, each with the number of those that have rows."""
        queues = {uid: tip.waiting for uid, tip in self._tips.items() if tip.waiting}
        return {uid: sum(bool(one.layers) for one in queue) for uid, queue in queues.items()}

    @property
    def reading(self) -> set[tuple[str, str]]:
        """Source and name of every file that an epoch in flight reads."""
        cuts = [flight.cut.slices for flight in [*self._fallen, *self._flights]]
        return {(name, file.name) for slices in cuts for name, planned in slices.items() for file in planned.files}

    def fell(self) -> bool:
        """Whether epochs have fallen since this was asked last: their slices are to be read again, however long ago they came."""
        fell, self._has_fallen = self._has_fallen, False
        return fell

    @property
    def answers(self) -> set[str]:
        """Names of the requests that epochs in flight will answer."""
        return {known.name for flight in self._flights for known in flight.cut.requests}

    # -- what the run does

    def begin(self, cut: Cut) -> bool:
        """Trigger an epoch. False if the coordinator refuses."""
        shop, coordinator = self._shop, self._coordinator
        expected = {stage.uid: shop.settings.spark.parallelism for stage in shop.pipeline.stages}
        # It was due before its slice was planned, or nobody was to wait for it: no pause is kept twice.
        pending = coordinator.trigger(time.monotonic(), cut.trigger, expected, catching_up=True)
        if isinstance(pending, Refusal):
            log.warning("no epoch was begun", reason=pending.reason)
            return False
        triggered_at = cut.at or datetime.now(UTC)
        self.frontier = self.frontier.after(cut.slices, shop.readers, triggered_at)
        deadline = time.monotonic() + coordinator.policy.timeout
        self._flights.append(Flight(pending, cut, self.frontier, triggered_at, time.perf_counter(), deadline))
        self.again = None if cut is self.again else self.again
        self._start()
        return True

    def turn(self, seconds: float) -> list[EpochReport]:
        """Go on as steps end, for so long at most, until there is room, a report, or nothing left; returns epochs that ended.

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
            if not (self._steps or self._flights or self._reports):
                self._land()
            if self._reports or ended is None or self._seen is not None:
                break
            if self._looks_since is None and (self.empty or self.has_room):
                break
        reports, self._reports = self._reports, []
        return reports

    def beside(self, look: Callable[[], Found], seconds: float) -> Generator[EpochReport, None, Callable[[], Found]]:
        """Look at something in storage while epochs go on; yields reports of those that end meanwhile.

        look: touches nothing that steps change. What it finds was so when it began: a request may have been answered since, a slice
        belong to epochs that have fallen. seconds: as for `turn`. Returns a call that gives what was found, or raises what the look has
        raised. Raises what `turn` raises, and RunEndedError once the look has taken longer than an epoch may and a minute.
        """
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
            self._shop.executor.cancel()
        until = time.monotonic() + _GOODBYE_SECONDS
        while self._steps and time.monotonic() < until:
            ended = self._lanes.next(max(0.0, until - time.monotonic()))
            if ended is not None:
                self._steps.pop(ended.lane, None)
        with suppress(FencedError):
            raise_if_fenced(self._shop, RuntimeError("the run ended"))
            for flight in [*self._fallen, *self._flights]:
                if not flight.may_stand:
                    self._discard(flight)

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
                partial(restore_progress.read, self._shop.storage),
                self._fetching,
                _no_matter,
            )
        for flight in list(self._flights):
            if self._free(_IDS, flight, _NOTE):
                self._begin(_IDS, flight, _NOTE, partial(self._heartbeat.begin, flight.pending.id), self._noted)
            for stage in self._shop.pipeline.stages:
                if self._may_work(flight, stage):
                    self._begin_stage(flight, stage)
                elif self._may_upload(flight, stage):
                    self._begin_upload(flight, stage)
                if self._may_judge(flight, stage):
                    judging = partial(judge, self._shop, stage, to_judge(flight, stage))
                    self._begin(_GATES, flight, stage.uid, judging, partial(self._judged, stage))
            if self._may_seal(flight):
                sealing = partial(steps.completed, self._shop, flight, self._coordinator.head, self._channels)
                self._begin(_COMMITS, flight, _SEAL, sealing, self._seal)
            if flight.sealed is not None and self._may_commit(flight):
                self._commit(flight, *flight.sealed)
            if flight.confirmed is not None and self._free(_PUBLISHING, flight, _PUBLISH):
                step = partial(steps.publish, self._shop, flight, flight.confirmed)
                self._begin(_PUBLISHING, flight, _PUBLISH, step, self._published, self._not_finished)
            if flight.published is not None and self._free(_PRUNING, flight, _FINISH):
                self._finish(flight, flight.published)

    def _begin(
        self,
        lane: str,
        flight: Flight,
        what: str,
        step: Callable[[], object],
        then: Callable[[Flight, Any], None],
        failed: Callable[[Flight, BaseException], None] | None = None,
    ) -> None:
        flight.begun.add((lane, what))
        self._steps[lane] = _Step(flight, time.monotonic(), then, failed or self._fail)
        self._lanes.start(lane, step)

    def _free(self, lane: str, flight: Flight, what: str) -> bool:
        return lane not in self._steps and (lane, what) not in flight.begun

    def _may_work(self, flight: Flight, stage: Stage) -> bool:
        before = self._before(flight)
        if (
            not flight.noted
            or not self._free(stage.uid, flight, _JOB)
            or (before is not None and stage.uid not in before.acks)
        ):
            return False
        # No stage gets to see rows that a gate refuses.
        if isinstance(stage.input, Stage) and stage.input.uid not in flight.judged:
            return False
        if self._follows_confirmed(flight):
            return True
        return self._tips[stage.uid].settled and stage.uid not in flight.elsewhere and not self._is_full

    def _may_wait_for_state(self) -> Flight | None:
        """The epoch of a stage that is at work for so long that one should look whether it waits for its state, and how far that is."""
        if _RESTORES in self._steps:
            return None
        now, stages = time.monotonic(), {stage.uid for stage in self._shop.pipeline.stages}
        for step in [step for lane, step in self._steps.items() if lane in stages and step.flight in self._flights]:
            since = max(step.begun, self._restores_seen)
            if now >= since + min(_RESTORES_SECONDS, (step.flight.deadline - since) / 4):
                return step.flight
        return None

    def _fetching(self, _: Flight, found: list[Restoring]) -> None:
        """The time in which state is fetched is no epoch's own."""
        generation = int(self._shop.generation)
        own = [one for one in found if one.generation == generation and self._beats.get(one.path) != one.beat]
        self._beats = {one.path: one.beat for one in found}
        for flight in self._flights:
            fetched = [one for one in own if one.epoch == int(flight.pending.id)]
            if not fetched:
                continue
            self._prolong(flight)
            if time.monotonic() - self._restores_said >= _SAID_SECONDS:
                self._restores_said = time.monotonic()
                stages = sorted({str(one.stage) for one in fetched})
                log.info("state is being fetched", epoch=int(flight.pending.id), stages=stages, here=described(fetched))

    def _may_judge(self, flight: Flight, stage: Stage) -> bool:
        return stage.uid in flight.acks and stage.uid not in flight.judged and self._free(_GATES, flight, stage.uid)

    def _may_upload(self, flight: Flight, stage: Stage) -> bool:
        """One after the other, and not before what the epoch builds on is in storage."""
        return (
            any(ack.handover is not None for ack in flight.acks.get(stage.uid, ()))
            and self._free(_UPLOADS, flight, stage.uid)
            and self._follows_stored(flight)
            # What the stages downstream leave of its rows is uploaded with it.
            and (not self._may_wait or all(other.uid in flight.acks for other in self._shop.pipeline.stages))
        )

    @property
    def _may_wait(self) -> bool:
        """Whether stages may leave rows that they have not applied."""
        configured = self._shop.settings.checkpoints.alignment_timeout_seconds
        return configured is not None or any(tip.waiting for tip in self._tips.values())

    def _may_seal(self, flight: Flight) -> bool:
        return (
            flight.pending.complete
            and all(stage.uid in flight.judged for stage in self._shop.pipeline.stages)
            and self._free(_COMMITS, flight, _SEAL)
            and self._follows_confirmed(flight)
        )

    def _may_commit(self, flight: Flight) -> bool:
        """Beside the publishing of the epoch before, and no further ahead: what sinks lack stays little. And beside the pruning of one more."""
        before = self._flights[: self._flights.index(flight)]
        lacking = sum(other.published is None for other in before)
        return self._free(_COMMITS, flight, _COMMIT) and lacking <= 1 and len(before) <= 2

    def _follows_confirmed(self, flight: Flight) -> bool:
        before = self._before(flight)
        return before is None or before.confirmed is not None

    def _follows_stored(self, flight: Flight) -> bool:
        """Whether all of the epoch before is in storage, and it is the next to be confirmed."""
        before = self._before(flight)
        return before is None or (before.pending.complete and self._follows_confirmed(before))

    def _stored_base(self, flight: Flight, stage: Stage) -> dict[int, Snapshot]:
        """What the epoch builds on, by subtask, as the epoch before names it."""
        before = self._before(flight)
        if before is None or before.confirmed is not None:
            return self._bases[stage.uid]
        return snapshots_of(before.pending.files(), stage.uid)

    def _before(self, flight: Flight) -> Flight | None:
        index = self._flights.index(flight)
        return self._flights[index - 1] if index else None

    def _after(self, flight: Flight) -> Flight | None:
        return next(iter(self._flights[self._flights.index(flight) + 1 :]), None)

    def _begin_stage(self, flight: Flight, stage: Stage) -> None:
        keep = {
            AttemptId(name)
            for other in self._flights
            for ack in other.handed_over
            if ack.operator == stage.uid and ack.handover is not None
            for name in (ack.attempt, ack.handover.base or "")
        }
        keep |= {known.attempt for known in self._bases[stage.uid].values()}
        keep |= {ack.attempt for ack in self._kept if ack.operator == stage.uid}
        if self._before(flight) is not None:  # it has waited for its turn
            self._prolong(flight)
        # On a cluster a scan of rows that one host alone has may run on another.
        leaves = isinstance(stage.input, Stage) and self._may_wait
        apart = self._shop.pipeline.feeds_others(stage) or leaves
        shared = self._shop.settings.spark.master.startswith("local") or not apart
        here = self._here if shared else None
        tip = self._tips[stage.uid]
        flight.work[stage.uid] = plan(self._shop, flight, stage, tip)
        # A later epoch that ends its worker again and again must not take this one's snapshot along, in this run or in the next.
        proven = self._has_confirmed and not self._coordinator.failures
        asynchronous = self._shop.settings.state.asynchronous_snapshots and proven
        step = partial(run_stage, self._shop, flight, stage, tip, frozenset(keep), here, self._may_wait, asynchronous)
        self._begin(stage.uid, flight, _JOB, step, partial(self._worked, stage))

    def _begin_upload(self, flight: Flight, stage: Stage) -> None:
        first = all(lane != _UPLOADS for lane, _ in flight.begun)
        if first and self._before(flight) is not None:  # it has waited for that one's uploads
            self._prolong(flight)
        uploading = partial(steps.upload, self._shop, flight, stage, self._stored_base(flight, stage))
        self._begin(_UPLOADS, flight, stage.uid, uploading, partial(self._uploaded, stage))

    # -- what follows a step

    def _take(self, ended: Ended) -> None:
        step = self._steps.pop(ended.lane)
        for ack in ended.result.acks if isinstance(ended.result, StageResult) else ():
            self._shop.storage.traffic.add(ack.traffic or {})
        if step.flight in self._fallen:
            if isinstance(ended.result, StageResult):
                step.flight.handed_over += [ack for ack in ended.result.acks if ack.handover is not None]
            if isinstance(ended.error, RunEndedError) and step.flight.may_stand:  # says more than why it fell
                self._failure = _Failure(step.flight.pending.id, ended.error, keep=True)
            return
        if ended.error is not None:
            step.failed(step.flight, ended.error)
            return
        try:
            step.then(step.flight, ended.result)
        except Exception as error:
            step.failed(step.flight, error)

    def _noted(self, flight: Flight, _: None) -> None:
        flight.noted = True

    def _worked(self, stage: Stage, flight: Flight, result: StageResult) -> None:
        flight.handed_over += [ack for ack in result.acks if ack.handover is not None]
        if self._runs_again(stage, flight, result.acks):
            return
        for ack in result.acks:
            self._receive(flight, ack)
        check_acks(flight, stage)
        if result.again is not None:
            self._set_aside(flight, result.again)
            return
        flight.ms |= result.ms
        columns = self._shop.inputs.get(stage.uid)
        self._tips[stage.uid] = note_progress(flight, stage, self._tips[stage.uid], columns)
        flight.acks[stage.uid] = flight.pending.acks_of(stage.uid)
        if result.shapes is not None:
            flight.shapes[stage.uid] = result.shapes
        if not to_judge(flight, stage):
            self._judged(stage, flight, (list(result.verdicts), {}))

    def _judged(self, stage: Stage, flight: Flight, said: tuple[list[Verdict], dict[str, float]]) -> None:
        verdicts, ms = said
        evaluation.refuse(stage.uid, verdicts)
        flight.verdicts += verdicts
        flight.ms |= ms
        flight.judged.add(stage.uid)

    def _runs_again(self, stage: Stage, flight: Flight, acks: Sequence[Ack]) -> bool:
        """Whether a subtask has landed where its base is not. Then the stage runs once more, as soon as that is in storage."""
        kinds = {ack.error["kind"] for ack in acks if ack.error is not None}
        if LocalBaseError.__name__ not in kinds or stage.uid in flight.elsewhere:
            return False
        log.info("a subtask runs where its base is not", stage=stage.uid, epoch=flight.pending.id)
        flight.losers += [file for ack in acks for file in ack.files if owns(ack, file)]
        flight.elsewhere.add(stage.uid)
        flight.begun.discard((stage.uid, _JOB))
        return True

    def _receive(self, flight: Flight, ack: Ack) -> None:
        received = self._coordinator.receive(ack)
        flight.losers += received.discard
        if received.error is not None:
            raise from_report(received.error)

    def _uploaded(self, stage: Stage, flight: Flight, acks: list[Ack]) -> None:
        flight.uploaded[stage.uid] = acks
        flight.ms[f"upload:{stage.uid}"] = max(ack.ms.get("upload", 0.0) for ack in acks)
        if self._follows_confirmed(flight):
            self._count_uploads(flight)

    def _count_uploads(self, flight: Flight) -> None:
        """What is uploaded counts once that is confirmed which it refers to."""
        for ack in [ack for acks in flight.uploaded.values() for ack in acks]:
            self._receive(flight, ack)
        flight.uploaded.clear()

    def _seal(self, flight: Flight, sealed: tuple[Checkpoint, tuple[StateFile, ...]]) -> None:
        flight.sealed = sealed

    def _commit(self, flight: Flight, checkpoint: Checkpoint, files: tuple[StateFile, ...]) -> None:
        flight.ms |= {"commits_before": self._commit_ms, "publishing_before": self._publishing_ms}
        flight.ms |= {"pruning_before": self._pruning_ms}
        committing = self._coordinator.begin_commit()
        assert committing is flight.pending, "its predecessor is confirmed, and every ack is in"
        flight.may_stand = True
        step = partial(commit, self._shop, flight, checkpoint, files)
        self._begin(_COMMITS, flight, _COMMIT, step, self._committed, self._not_committed)

    def _committed(self, flight: Flight, checkpoint: Checkpoint) -> None:
        assert flight.sealed is not None, "it is what was committed"
        _, files = flight.sealed
        own = {file.path for file in flight.pending.files()}
        self._coordinator.completed(time.monotonic(), checkpoint, [file for file in files if file.path not in own])
        self._channels = _channels(files)
        self._failures_before, self._has_confirmed = 0, True
        self._commit_ms = flight.ms["commit"]
        self._shop.head = checkpoint
        flight.confirmed = checkpoint
        self._bases = {stage.uid: snapshots_of(files, stage.uid) for stage in self._shop.pipeline.stages}
        follower = self._after(flight)
        if follower is not None:  # it has waited for this one: from now on the time is its own
            self._prolong(follower)
        for uid, tip in self._tips.items():
            if follower is None or uid not in follower.acks:  # the tip is this epoch's
                self._tips[uid] = tip.confirmed(self._bases[uid])
        self._renew()
        if follower is not None and follower in self._flights:
            try:
                self._count_uploads(follower)
            except Exception as error:  # this epoch stands
                self._fail(follower, error)

    def _not_committed(self, flight: Flight, error: BaseException) -> None:
        self._note_failures()
        # Only the registry knows its outcome then.
        keep = isinstance(error, RunEndedError) or not isinstance(error, WeirError)
        if not keep and not isinstance(error, FencedError):
            self._coordinator.abort(time.monotonic(), flight.pending.id, FailureReason.COMMIT)
            flight.may_stand = False
        self._fall(flight, _Failure(flight.pending.id, error, keep=keep))
        self._renew()

    def _published(self, flight: Flight, publications: tuple[Publication, ...]) -> None:
        flight.published = publications
        self._publishing_ms = flight.ms["publish"]

    def _finish(self, flight: Flight, publications: tuple[Publication, ...]) -> None:
        others = [other.local_rows() for other in self._flights if other is not flight]
        read = local_rows(file for tip in self._tips.values() for one in tip.waiting for file in one.files).union(
            *others
        )
        ended = [*self._kept, *flight.handed_over]
        self._kept = [ack for ack in ended if not read.isdisjoint(stage_upload.locals_of(ack))]
        done_with = [ack for ack in ended if ack not in self._kept]
        self._pruning_waits = self._may_wait_with_pruning(flight)
        also = None if self._pruning_waits else self._coordinator.needed()
        if also is not None:  # others may be committed by then, of which only one is the newest
            if flight.cut.requests:
                also.setdefault(flight.pending.id, []).append("requests for it are being answered")
            for later in self._flights[1:]:
                also.setdefault(later.pending.id, []).append("it is newer than the epoch that prunes")
        assert flight.confirmed is not None, "it is what was published"
        step = partial(steps.finish, self._shop, flight, flight.confirmed, publications, done_with, also)
        self._begin(_PRUNING, flight, _FINISH, step, self._finished, self._not_finished)

    def _may_wait_with_pruning(self, flight: Flight) -> bool:
        """Whether the next epoch would soon wait for it: that one then prunes for both. Never twice in a row."""
        follower = self._after(flight)
        asked = bool(flight.cut.requests)  # whoever asked for it waits
        could_begin = follower is not None and follower.pending.complete
        return could_begin and not asked and not self._pruning_waits

    def _finished(self, flight: Flight, report: EpochReport) -> None:
        self._coordinator.pruned(report.pruned)
        self._pruning_ms = report.ms["prune"]
        self._flights.remove(flight)
        self._reports.append(report)
        if self._shop.registry.upkeep_due and _UPKEEP not in self._steps:
            step = partial(steps.keep_up, self._shop)
            self._begin(_UPKEEP, flight, _LOGS, step, lambda *_: None, self._not_kept_up)

    def _not_kept_up(self, flight: Flight, error: BaseException) -> None:
        """The next upkeep does it, unless somebody else owns the pipeline now."""
        if isinstance(error, FencedError):
            self._not_finished(flight, error)
        else:
            log.warning("the registry's logs were not shortened", error=plainly(error))

    def _not_finished(self, flight: Flight, error: BaseException) -> None:
        """It stands, as the next one does if its commit has landed or is about to: the next run publishes both. The others fall, but for one
        before it, which ends well."""
        ending = [
            other for other in self._flights if other.published is not None and other.pending.id < flight.pending.id
        ]
        self._flights = [other for other in self._flights if other is not flight and other not in ending]
        open_still = [pending for pending in self._coordinator.pending if not pending.committing]
        if open_still:
            self._coordinator.abort(time.monotonic(), open_still[0].id, FailureReason.PREDECESSOR)
        self._fallen += self._flights
        self._flights = ending
        # Where nobody can tell what the registry holds, that ends the run.
        if self._failure is None or not self._failure.keep:
            self._failure = _Failure(flight.pending.id, error, final=True)

    def _prolong(self, flight: Flight) -> None:
        """The time that an epoch has waited for an earlier one is not its own."""
        flight.deadline = max(flight.deadline, time.monotonic() + self._coordinator.policy.timeout)
        self._coordinator.prolong(time.monotonic(), flight.pending.id)

    def _renew(self) -> None:
        """The commit may have claimed a new generation: what is in flight carries the old one and falls, through no fault."""
        if self._coordinator.generation == self._shop.generation:
            return
        try:
            self._heartbeat.renew(self._shop.generation)
        except OSError as error:  # a missed beat; the checkpoint stands
            log.warning("heartbeat failed", error=plainly(error))
        fallen = {aborted.pending.id for aborted in self._coordinator.renew(self._shop.generation)}
        self._fallen += [flight for flight in self._flights if flight.pending.id in fallen]
        self._flights = [flight for flight in self._flights if flight.pending.id not in fallen]

    # -- failures

    def _expire(self) -> None:
        for flight in self._flights[1:]:
            if all(step.flight is not flight for step in self._steps.values()):  # it waits for an earlier one
                self._prolong(flight)
        self._note_failures()
        aborted = self._coordinator.expire(time.monotonic())
        fallen = [flight for flight in self._flights if aborted and flight.pending is aborted[0].pending]
        for flight in fallen:  # none where it has fallen already, behind a commit that ended the run
            running = [lane for lane, step in self._steps.items() if step.flight is flight]
            log.warning("an epoch's time is up", epoch=flight.pending.id, waits_for=running)
            self._fall(flight, _Failure(flight.pending.id, late(self._shop, flight)))

    def _give_up(self) -> None:
        """End the run where a step does not end, long after its time: of what has fallen, beside which no later epoch can begin, or of what
        is committed, which has no deadline, and behind which later epochs wait."""
        until = time.monotonic() - _GRACE_SECONDS

        def ends_by(step: _Step) -> float:
            own = step.begun + self._coordinator.policy.timeout
            return own if step.flight.may_stand else step.flight.deadline

        hung = [
            lane
            for lane, step in self._steps.items()
            if (step.flight.may_stand or step.flight in self._fallen) and ends_by(step) < until
        ]
        if self._looks_since is not None and self._looks_since + self._coordinator.policy.timeout < until:
            hung.append(_LOOKS)
        if hung:
            raise RunEndedError(
                f"A step does not end, {_GRACE_SECONDS:g} s after its epoch's time was up: {', '.join(sorted(hung))}.",
                where=f"pipeline {self._shop.pipeline.title}",
                next="Run again. If it happens again, look at what the stage's function or the storage waits for: a call without a timeout, mostly; "
                "looks: at a slice of fewer files (epoch.max_files), if planning it takes that long.",
            ) from (self._failure.error if self._failure else None)

    def _note_failures(self) -> None:
        """However many epochs fall, and in whatever order, it is one failure."""
        if self._failure is None:
            self._failures_before = self._coordinator.failures

    def _fail(self, flight: Flight, error: BaseException) -> None:
        if time.monotonic() >= flight.deadline and isinstance(error, WeirError):
            cause, error = error, late(self._shop, flight)
            error.__cause__ = cause
        reason = FailureReason.GATE if isinstance(error, GateError) else FailureReason.JOB
        self._note_failures()
        self._coordinator.abort(time.monotonic(), flight.pending.id, reason)
        self._fall(flight, _Failure(flight.pending.id, error))

    def _set_aside(self, flight: Flight, again: Cut) -> None:
        """A gate has set rows aside: the epoch falls, and all that were built on it, through no fault of theirs."""
        self._note_failures()
        self._coordinator.abort(time.monotonic(), flight.pending.id, FailureReason.GATE)
        self._fall(flight, _Failure(flight.pending.id, RuntimeError("rows were set aside"), again=again))

    def _fall(self, flight: Flight, failure: _Failure) -> None:
        """An epoch failed: it falls, and all that were built on it."""
        index = self._flights.index(flight)
        self._fallen += self._flights[index:]
        self._flights = self._flights[:index]
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
            raise_if_fenced(self._shop, failure.error)
        if failure is None or not (failure.keep or isinstance(failure.error, FencedError)):
            for flight in reversed(fallen):
                if not flight.may_stand:
                    self._discard(flight)
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
        typed = steps.typed(failure.error, f"pipeline {self._shop.pipeline.title}, epoch {failure.epoch}")
        if typed is not None:
            raise typed from failure.error
        if failure.final or isinstance(failure.error, FencedError) or not isinstance(failure.error, WeirError):
            raise failure.error
        self._tolerated(failure.epoch, failure.error)

    def _noted_on(self, error: HoldingError, flight: Flight) -> Cut | None:
        """Note on an error which epoch it ended; returns the cut to take instead, where a file is set aside."""
        cut = replace(flight.cut, at=flight.triggered_at)
        again = hold_causes.without_bad_file(self._shop.readers, cut, error, self.frontier.expected)
        hold_causes.note_slice(error, flight.pending.id, cut)
        return again

    def _discard(self, flight: Flight) -> None:
        discard(self._shop, flight.pending.generation, flight.pending.id)
        stage_upload.clear(flight.handed_over)

    def _stand_on_head(self) -> None:
        """What the next epoch builds on: the newest confirmed checkpoint, and nothing else."""
        head = self._coordinator.head
        self._shop.head = head
        self.frontier = Frontier.at(head)
        files = self._shop.registry.files(head) if head else ()
        stages = [stage.uid for stage in self._shop.pipeline.stages]
        known = {uid for uid, figures in head.operators.items() if figures["schema"]} if head else set()
        for found in (
            self._shop.shapes,
            self._shop.inputs,
            self._shop.reads,
        ):  # what rows that were discarded looked like binds nobody
            for uid in found.keys() - known:
                del found[uid]
        self._bases = {uid: bases(self._shop, head, files, uid) for uid in stages}
        self._channels = _channels(files)
        self._tips = {uid: Tip.at(head, uid, self._bases[uid], self._channels) for uid in stages}
        stage_upload.clear(self._kept)  # from now on they are read from storage
        self._kept = []


def _no_matter(flight: Flight, error: BaseException) -> None:
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
