"""The model: an epoch in flight, what its steps hand to each other, and all epochs in flight together.

Plain data. `readiness` says which step may begin, `transitions` and `failover` change the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

import pyarrow as pa

from state_ops.arrow.frames import schema_from_json, schema_to_json
from state_ops.checkpoints.pending_checkpoint import PendingCheckpoint
from state_ops.errors import DamageError
from state_ops.ids import AttemptId, CheckpointId
from state_ops.keyed.ttl import Forgotten, forgotten_in
from state_ops.moments import to_micros
from state_ops.records.acks import Ack, PendingUpload
from state_ops.records.checkpoint import Checkpoint, stats_of
from state_ops.records.publications import Publication
from state_ops.records.snapshot_files import LocalSnapshot, Snapshot, StagedFile, StateFile, snapshots_of
from state_ops.snapshots.stage_upload import read_by_next
from weir.connectors.lookups.lookup_table import Version
from weir.definition import Shapes, Stage, is_clocked
from weir.epoch.in_flight_data import InFlightData, Rows, Work
from weir.gates.evaluation import GateVerdict
from weir.operators import sides
from weir.operators.watermarks import SidesTime
from weir.settings.sections import CheckpointSettings
from weir.sources.reader import SourceReader
from weir.sources.slices import EpochPlan, Slice
from weir.timings import EpochTimes, StepTime, SubtaskTime


@dataclass(frozen=True, slots=True)
class SourceOffsets:
    """The positions up to which sources have been read, epochs in flight included.

    Attributes:
        offsets: By source, its position as a checkpoint records it.
        expected: By source, the columns of its files.
        now: The newest processing time.
    """

    offsets: Mapping[str, Any]
    expected: Mapping[str, pa.Schema]
    now: datetime | None

    @classmethod
    def at(cls, head: Checkpoint | None) -> SourceOffsets:
        if head is None:
            return cls({}, {}, None)
        expected = {name: schema_from_json(raw) for name, raw in head.inputs.items()}
        return cls(head.offsets, expected, head.epoch_now)

    def after(self, slices: Mapping[str, Slice], readers: Mapping[str, SourceReader], at: datetime) -> SourceOffsets:
        """Return the offsets of the epoch that reads these slices.

        Args:
            at: Its processing time, which never decreases.
        """
        offsets, expected = dict(self.offsets), dict(self.expected)
        for name, planned in slices.items():
            offsets[name] = readers[name].advance(offsets.get(name), planned)
            if planned.schema is not None:
                expected[name] = planned.schema
        return SourceOffsets(offsets, expected, self.no_earlier(at))

    def no_earlier(self, at: datetime) -> datetime:
        """Return the processing time at a moment: whatever the clock does, it never decreases."""
        return at if self.now is None else max(at, self.now)


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The state of a stage after its newest epoch, confirmed or not. Its next epoch builds on it.

    Attributes:
        watermark: Microseconds since 1970 UTC.
        swept: By subtask, where the sweep of expired state goes on.
        due: By subtask, the processing time in microseconds at which it has something to do without rows.
        bases: By subtask, its snapshot.
        settled: Whether every base is confirmed, or on the disk that workers share with the coordinator.
        waiting: The rows that the stage has not applied.
        pace: How many rows it applied last; None: not known.
        forgotten: What a TTL has let expire.
        sides: Where event time stands in its inputs, if it has several.
    """

    watermark: int | None = None
    swept: Mapping[int, str] = field(default_factory=dict)
    bases: Mapping[int, Snapshot | LocalSnapshot] = field(default_factory=dict)
    settled: bool = True
    waiting: tuple[InFlightData, ...] = ()
    pace: int | None = None
    forgotten: Forgotten | None = None
    sides: SidesTime = field(default_factory=SidesTime)
    due: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def at(
        cls, head: Checkpoint | None, stage: Stage, bases: Mapping[int, Snapshot], channels: Mapping[str, Rows]
    ) -> StageProgress:
        """Return a stage's progress as of a confirmed checkpoint.

        Args:
            bases: By subtask, its snapshot in the checkpoint.
            channels: By path, the checkpoint's files of rows.

        Raises:
            DamageError: A file of rows that wait for the stage is missing.
        """
        recorded = stats_of(head, stage.uid)
        swept = {int(subtask): position for subtask, position in recorded.swept.items()}
        if any(base.rescaled for base in bases.values()):
            swept = {}  # a hint, for other key groups than these

        def file_of(path: str) -> Rows:
            if path not in channels:
                raise DamageError(
                    f"Rows that {stage.uid} has not applied are not listed.",
                    where=f"checkpoint {head.id if head else '?'}, {path}",
                    next="Nothing was changed. `weir fsck` says what else is damaged.",
                )
            return channels[path]

        waiting = tuple(InFlightData.from_json(raw, file_of) for raw in recorded.waiting)
        forgotten = forgotten_in(recorded, to_micros(head.epoch_now)) if head else None
        watermark = head.watermarks.get(stage.uid) if head else None
        if is_clocked(stage):
            watermark = recorded.clock
        due = {int(subtask): moment for subtask, moment in recorded.due.items()}
        sides_time = SidesTime.from_json(recorded.sides).of(stage, sides.places_before(stage, recorded))
        return cls(watermark, swept, bases, waiting=waiting, forgotten=forgotten, sides=sides_time, due=due)

    def after(
        self,
        acks: list[Ack],
        watermark: int | None,
        waiting: tuple[InFlightData, ...],
        forgotten: Forgotten | None,
        sides: SidesTime,
    ) -> StageProgress:
        """Return the stage's progress after the epoch of these acks.

        Args:
            waiting: The rows that it leaves.
            forgotten: What a TTL has let expire by then.
            sides: Where its inputs stand.
        """
        bases, settled = dict(self.bases), True
        for ack in acks:
            if ack.pending_upload is not None:
                if ack.pending_upload.snapshot is not None:
                    bases[ack.subtask] = ack.pending_upload.snapshot
            elif ack.attempt:  # it has uploaded by itself
                settled = False
        swept = {ack.subtask: ack.swept for ack in acks if ack.swept is not None}
        due = {ack.subtask: ack.due for ack in acks if ack.due is not None}
        pace = sum(ack.rows_in for ack in acks)
        return StageProgress(watermark, swept, bases, settled, waiting, pace, forgotten, sides, due)

    @property
    def moments(self) -> list[int]:
        """Processing times in microseconds at which the stage has something to do without rows."""
        return [*self.due.values(), *([self.sides.due] if self.sides.due is not None else [])]

    @property
    def rescaled(self) -> bool:
        """True if subtasks still have to build their state for new key groups from their base."""
        return any(isinstance(base, Snapshot) and base.rescaled for base in self.bases.values())

    def confirmed(self, bases: Mapping[int, Snapshot]) -> StageProgress:
        """Return this progress with these snapshots, which the registry names by now."""
        return replace(self, bases=bases, settled=True)


@dataclass(frozen=True, slots=True)
class EpochReport:
    """A completed checkpoint, the verdicts of its gates, and what was done after its commit.

    Attributes:
        ms: Milliseconds by phase.
        backlog: As `EpochPlan` has it.
        columns: By stage and output, the columns of what it hands out, as far as they are known.
    """

    checkpoint: Checkpoint
    verdicts: tuple[GateVerdict, ...]
    ms: dict[str, float]
    publications: tuple[Publication, ...] = ()
    pruned: tuple[CheckpointId, ...] = ()
    backlog: Mapping[str, int] | None = None
    columns: Mapping[str, Mapping[str, pa.Schema]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of a stage's job, and of its gates where they may set rows aside.

    Attributes:
        acks: As they came, declines and acks of other epochs among them.
        shapes: None as long as no row has ever come.
        again: The plan to take instead of this epoch's, since a gate has set rows aside.
        joined: Of a lookup, the version of its table that rows were joined with; None: there were none.
    """

    acks: tuple[Ack, ...]
    verdicts: tuple[GateVerdict, ...] = ()
    ms: Mapping[str, float] = field(default_factory=dict)
    shapes: Shapes | None = None
    again: EpochPlan | None = None
    joined: Version | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """Which epoch a stage was at.

    Attributes:
        whole: It has applied all rows of it.
        watermark: What it hands on then.
        lookups: As that epoch's plan has them.
    """

    epoch: CheckpointId
    now: datetime
    whole: bool
    watermark: int | None
    lookups: Mapping[str, Version]


class Step(StrEnum):
    """A step of an epoch. Each slot runs one step at a time, in a thread of its own; a stage's job runs in the slot
    that is named after its stage."""

    NOTE_ID = "ids"
    POSITIONS = "positions"
    RUN_STAGE = "stage"
    DELIVER = "deliveries"
    JUDGE = "gates of rows"
    UPLOAD = "uploads"
    SEAL = "seal"
    COMMIT = "commits"
    PUBLISH = "publishing"
    FINISH = "pruning"

    def slot(self, stage: Stage | None = None) -> str:
        """Return the slot that runs this step; an epoch is sealed in the slot of the commits."""
        if self is Step.RUN_STAGE:
            assert stage is not None, "a job is the job of a stage"
            return stage.uid
        return Step.COMMIT.value if self is Step.SEAL else self.value


@dataclass
class InFlightEpoch:
    """One epoch between its trigger and its end.

    Attributes:
        source_offsets: How far sources are read once its slices are.
        started: On time.perf_counter().
        deadline: On time.monotonic().
        acks: By stage, the acks of its subtasks as they gave them, once all are in. An upload does not change them.
        uploaded: By stage, acks whose files are in storage, until the epoch before is confirmed.
        noted: Its id is written down.
        positions_first: Its positions are committed before it begins, so that nothing of it is read again.
        positioned: That is done.
        delivered: By stage, the files of the rows that sinks have got before the commit.
        judged: Uids of stages whose rows no gate refuses.
        begun: Its steps that have begun, each with the uid of its stage.
        elsewhere: Uids of stages that run again, once what they build on is in storage.
        sealed: The row and the listing, ready for the commit.
        may_stand: Its commit has begun, and the registry has not said that it failed.
        confirmed: The checkpoint, once the registry has it.
        published: What its sinks have of it.
        shapes: By stage, as this epoch knew them; a later one may know more.
        work: By stage, what it applies.
        waiting: By stage, what it has not applied after that.
        applied: By stage, which epoch it was at.
        forgotten: By stage, what a TTL has let expire by then.
        sides: By stage with several inputs, where their event time stands with this epoch's.
        made_times: By stage, which of its inputs come with another time in place of their source's event time.
        watermarks: By stage, where event time stands after it.
        clocks: The same of stages whose time is processing time.
        joined: By stage, the version of a table that its rows were joined with.
        losers: Objects of attempts that do not count.
        handed_over: Acks whose files lie on this disk.
        steps: When those of its steps ran that have ended.
    """

    pending: PendingCheckpoint
    plan: EpochPlan
    source_offsets: SourceOffsets
    triggered_at: datetime
    started: float
    deadline: float
    acks: dict[str, list[Ack]] = field(default_factory=dict)
    uploaded: dict[str, list[Ack]] = field(default_factory=dict)
    noted: bool = False
    positions_first: bool = False
    positioned: bool = False
    delivered: dict[str, list[StateFile]] = field(default_factory=dict)
    judged: set[str] = field(default_factory=set)
    begun: set[tuple[Step, str | None]] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    sealed: tuple[Checkpoint, tuple[StateFile, ...]] | None = None
    may_stand: bool = False
    confirmed: Checkpoint | None = None
    published: tuple[Publication, ...] | None = None
    shapes: dict[str, Shapes] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    waiting: dict[str, tuple[InFlightData, ...]] = field(default_factory=dict)
    applied: dict[str, Applied] = field(default_factory=dict)
    forgotten: dict[str, Forgotten | None] = field(default_factory=dict)
    sides: dict[str, SidesTime] = field(default_factory=dict)
    made_times: dict[str, frozenset[int]] = field(default_factory=dict)
    joined: dict[str, Version] = field(default_factory=dict)
    verdicts: list[GateVerdict] = field(default_factory=list)
    losers: list[StateFile] = field(default_factory=list)
    watermarks: dict[str, int] = field(default_factory=dict)
    clocks: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    handed_over: list[Ack] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)

    @property
    def to_upload(self) -> list[PendingUpload]:
        """The uploads that are still to be made."""
        acks = [ack for ack in self.pending.acks.values() if ack.operator not in self.uploaded]
        return [ack.pending_upload for ack in acks if ack.pending_upload is not None]

    def ahead_of(self, stage: Stage) -> list[Rows]:
        """Return the rows that the stages upstream have handed out and this one has not acked."""
        if stage.uid in self.acks:
            return []
        acks = [(ack, output) for before, output in stage.outputs_before for ack in self.acks.get(before.uid, ())]
        return [file for ack, output in acks for file in read_by_next(ack, output)]

    @property
    def waiting_paths(self) -> set[str]:
        """In storage, of all rows that its stages leave."""
        return {file.path for queue in self.waiting.values() for in_flight in queue for file in in_flight.files}

    def local_rows(self) -> set[str]:
        """Return the paths of the rows that the epoch's stages read from this disk."""
        return local_rows(file for work in self.work.values() for file in work.files)

    def recorded_inputs(self) -> dict[str, Any]:
        """Return the columns of each source's files, as a checkpoint records them."""
        return {name: schema_to_json(schema) for name, schema in self.source_offsets.expected.items()}

    def times(self, ms: Mapping[str, float], error: BaseException | None = None) -> EpochTimes:
        """Return the times of an epoch's steps, at its end.

        Args:
            ms: Its milliseconds by phase.
            error: What it failed with, or fell with.
        """
        now, since = time.monotonic(), time.time_ns()
        checkpoint = self.confirmed
        facts: dict[str, int | float | str | bool] = {
            "generation": int(self.pending.generation),
            "trigger": self.plan.trigger.value,
            "rows_in": sum(planned.rows for planned in self.plan.slices.values()),
            "rows_out": sum(publication.rows for publication in self.published or ()),
        }
        if checkpoint is not None:
            facts |= {
                "checkpoint": int(checkpoint.id),
                "state_bytes": checkpoint.bytes_total,
                "state_new_bytes": checkpoint.bytes_new,
            }
        subtasks = tuple(
            SubtaskTime(ack.operator, ack.subtask, ack.rows_in, ack.rows_out, ack.ms)
            for _, ack in sorted(self.pending.acks.items())
        )
        begun = now - (time.perf_counter() - self.started)
        return EpochTimes(int(self.pending.id), facts, begun, now, (now, since), tuple(self.steps), subtasks, ms, error)

    @property
    def now(self) -> datetime:
        assert self.source_offsets.now is not None, "it is set when an epoch is begun"
        return self.source_offsets.now


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The step that a slot runs.

    Attributes:
        begun: On time.monotonic().
        step: None: it is no step of the epoch.
        stage: The uid of the stage whose step it is.
    """

    epoch: InFlightEpoch
    begun: float
    step: Step | None = None
    stage: str | None = None

    def note(self, ended: float, error: BaseException | None) -> None:
        """Let the epoch know when its step ran, on time.monotonic()."""
        if self.step is not None:
            self.epoch.steps.append(StepTime(self.step.value, self.stage, self.begun, ended, error))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why epochs fall.

    Attributes:
        epoch: The oldest epoch that failed by itself.
        error: What it failed with.
        final: No replay by this run can help.
        keep: Nothing is discarded, since only the registry knows what was committed.
        again: Set if the epoch did not fail, but is to begin anew with this plan.
    """

    epoch: int
    error: BaseException
    final: bool = False
    keep: bool = False
    again: EpochPlan | None = None


@dataclass
class EpochsInFlight:
    """All epochs between their trigger and their end, and what the next one builds on.

    Attributes:
        stages: The pipeline's stages, upstream first.
        limits: How many epochs, and how many bytes, may be in flight.
        epochs: Oldest first; each builds on the one before it.
        fallen: Epochs that fell, until the steps that still run have ended and all of them can be discarded.
        failure: Why they fell.
        running: By slot, the step that it runs.
        offsets: How far the newest epoch reads the sources.
        progress: By stage, what its next epoch builds on.
        bases: By stage and subtask, its snapshot in the newest confirmed checkpoint.
        channels: By path, the files of rows in that checkpoint.
        kept: Acks of epochs that have ended, whose rows a stage still reads from this disk.
        again: What to begin next, before anything else is planned.
        pruning_deferred: Whether the newest epoch that was published leaves its pruning to the next one.
        has_confirmed: Whether this run has confirmed a checkpoint.
        has_fallen: Whether epochs have fallen since the run asked last.
        failures_before: Failures in a row before the one that makes epochs fall now.
        reports: Of epochs that have ended and that nobody has been given yet.
        early: Whether sinks get rows before their epoch is committed.
    """

    stages: tuple[Stage, ...]
    limits: CheckpointSettings
    epochs: list[InFlightEpoch] = field(default_factory=list)
    fallen: list[InFlightEpoch] = field(default_factory=list)
    failure: Failure | None = None
    running: dict[str, RunningStep] = field(default_factory=dict)
    offsets: SourceOffsets = field(default_factory=lambda: SourceOffsets.at(None))
    progress: dict[str, StageProgress] = field(default_factory=dict)
    bases: dict[str, dict[int, Snapshot]] = field(default_factory=dict)
    channels: dict[str, StateFile] = field(default_factory=dict)
    kept: list[Ack] = field(default_factory=list)
    again: EpochPlan | None = None
    pruning_deferred: bool = False
    has_confirmed: bool = False
    has_fallen: bool = False
    failures_before: int = 0
    reports: list[EpochReport] = field(default_factory=list)
    early: bool = False

    def before(self, epoch: InFlightEpoch) -> InFlightEpoch | None:
        """Return the epoch that this one builds on, if that is in flight too."""
        index = self.epochs.index(epoch)
        return self.epochs[index - 1] if index else None

    def after(self, epoch: InFlightEpoch) -> InFlightEpoch | None:
        """Return the epoch that builds on this one."""
        return next(iter(self.epochs[self.epochs.index(epoch) + 1 :]), None)

    def stored_base(self, epoch: InFlightEpoch, stage: Stage) -> Mapping[int, Snapshot]:
        """Return by subtask the snapshot that an epoch builds on, as the epoch before it names it in storage."""
        before = self.before(epoch)
        if before is None or before.confirmed is not None:
            return self.bases[stage.uid]
        return snapshots_of(before.pending.files(), stage.uid)

    def attempts_needed(self, stage: Stage) -> frozenset[AttemptId]:
        """Return the attempts of a stage whose local files are still needed: to upload, to build on, or to read
        rows."""
        needed = {
            AttemptId(name)
            for epoch in self.epochs
            for ack in epoch.handed_over
            if ack.operator == stage.uid and ack.pending_upload is not None
            for name in (ack.attempt, ack.pending_upload.base or "")
        }
        needed |= {snapshot.attempt for snapshot in self.bases[stage.uid].values()}
        return frozenset(needed | {ack.attempt for ack in self.kept if ack.operator == stage.uid})

    @property
    def may_leave_rows(self) -> bool:
        """True if stages may leave rows that they have not applied."""
        unaligned = self.limits.alignment_timeout_seconds is not None
        return unaligned or any(progress.waiting for progress in self.progress.values())

    @property
    def pending_bytes(self) -> int:
        """The bytes that this disk has to keep: the most that is still to be uploaded, and rows in front of a stage
        that has not applied them.
        """
        to_upload = [pending for epoch in self.epochs for pending in epoch.to_upload]
        rows: list[Rows] = [file for pending in to_upload for file in pending.staged]
        rows += [file for epoch in self.epochs for stage in self.stages for file in epoch.ahead_of(stage)]
        rows += self.rows_left()
        by_place = {file.local: file.bytes for file in rows if isinstance(file, StagedFile)}
        full = self.limits.mode == "full"  # then all files of a snapshot are uploaded, the base's too
        return sum(pending.state_bytes(full) for pending in to_upload) + sum(by_place.values())

    def rows_left(self) -> list[Rows]:
        """Return the files of rows that stages have not applied."""
        return [file for progress in self.progress.values() for data in progress.waiting for file in data.files]


def local_rows(files: Iterable[Rows]) -> set[str]:
    """Return the paths of the rows that lie on this disk."""
    return {file.local for file in files if isinstance(file, StagedFile)}
