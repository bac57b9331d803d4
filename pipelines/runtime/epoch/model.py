"""What the steps of an epoch hand to each other: the run's context, the plan of an epoch, the epoch in flight, the
report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from pipelines.runtime.definition import Stage
from pipelines.runtime.epoch.in_flight_data import InFlightData, Rows, Work
from pipelines.runtime.gates.evaluation import Verdict
from pipelines.runtime.operators import Shapes
from pipelines.runtime.ownership.epoch_plan import EpochPlan
from pipelines.runtime.sources.files import FilesReader
from pipelines.runtime.sources.slices import Slice
from state_ops.arrow.frames import schema_from_json
from state_ops.checkpoints.checkpoint import (
    Ack,
    Checkpoint,
    LocalSnapshot,
    PendingUpload,
    Snapshot,
    StagedFile,
    StateFile,
    to_micros,
)
from state_ops.checkpoints.pending_checkpoint import PendingCheckpoint
from state_ops.checkpoints.registry import Publication
from state_ops.errors import DamageError
from state_ops.ids import CheckpointId
from state_ops.keyed.ttl import Forgotten, forgotten_in
from state_ops.snapshots.stage_upload import read_by_next


@dataclass(frozen=True, slots=True)
class SourceOffsets:
    """How far sources have been read, by epochs in flight too. expected: the columns of each one's files; now: the
    newest processing time."""

    offsets: Mapping[str, Any]
    expected: Mapping[str, pa.Schema]
    now: datetime | None

    @classmethod
    def at(cls, head: Checkpoint | None) -> SourceOffsets:
        if head is None:
            return cls({}, {}, None)
        expected = {name: schema_from_json(raw) for name, raw in head.inputs.items()}
        return cls(head.offsets, expected, head.epoch_now)

    def after(self, slices: Mapping[str, Slice], readers: Mapping[str, FilesReader], at: datetime) -> SourceOffsets:
        """The frontier of the epoch that reads these slices. at: the time of its trigger."""
        offsets, expected = dict(self.offsets), dict(self.expected)
        for name, planned in slices.items():
            offsets[name] = readers[name].advance(offsets.get(name), planned.files, planned.newest, planned.set_aside)
            if planned.schema is not None:
                expected[name] = planned.schema
        return SourceOffsets(offsets, expected, at if self.now is None else max(at, self.now))


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Where a stage stands after its newest epoch, confirmed or not: what its next one builds on.

    watermark: microseconds since 1970 UTC. swept: by subtask, where the sweep of expired state goes on. bases:
    snapshots by subtask.
    settled: every base is confirmed, or on the disk that workers share with the coordinator; else the next epoch waits.
    waiting: what it has not applied. pace: rows that it applied last; None: not known. forgotten: what a TTL has let
    expire."""

    watermark: int | None = None
    swept: Mapping[int, str] = field(default_factory=dict)
    bases: Mapping[int, Snapshot | LocalSnapshot] = field(default_factory=dict)
    settled: bool = True
    waiting: tuple[InFlightData, ...] = ()
    pace: int | None = None
    forgotten: Forgotten | None = None

    @classmethod
    def at(
        cls, head: Checkpoint | None, stage: str, bases: Mapping[int, Snapshot], channels: Mapping[str, Rows]
    ) -> StageProgress:
        """The tip of a stage in a confirmed checkpoint, whose snapshots of it these are. channels: its files of rows,
        by path.

        Raises DamageError where one of them is missing.
        """
        recorded = (head.operators.get(stage) or {}) if head else {}
        swept = {int(subtask): position for subtask, position in (recorded.get("swept") or {}).items()}
        if any(base.rescaled for base in bases.values()):
            swept = {}  # a hint, for other key groups than these

        def found(path: str) -> Rows:
            if path not in channels:
                raise DamageError(
                    f"Rows that {stage} has not applied are not listed.",
                    where=f"checkpoint {head.id if head else '?'}, {path}",
                    next="Nothing was changed. `weir fsck` says what else is damaged.",
                )
            return channels[path]

        waiting = tuple(InFlightData.from_json(raw, found) for raw in recorded.get("waiting") or ())
        forgotten = forgotten_in(recorded, to_micros(head.epoch_now)) if head else None
        return cls(head.watermarks.get(stage) if head else None, swept, bases, waiting=waiting, forgotten=forgotten)

    def after(
        self, acks: list[Ack], watermark: int | None, waiting: tuple[InFlightData, ...], forgotten: Forgotten | None
    ) -> StageProgress:
        """The tip after an epoch whose acks these are. waiting: what it leaves; forgotten: what a TTL has let expire by
        then."""
        bases, settled = dict(self.bases), True
        for ack in acks:
            if ack.handover is not None:
                if ack.handover.snapshot is not None:
                    bases[ack.subtask] = ack.handover.snapshot
            elif ack.attempt:  # it has uploaded by itself
                settled = False
        swept = {ack.subtask: ack.swept for ack in acks if ack.swept is not None}
        return StageProgress(watermark, swept, bases, settled, waiting, sum(ack.rows_in for ack in acks), forgotten)

    @property
    def rescaled(self) -> bool:
        """Whether subtasks are still to make what they build on their own."""
        return any(isinstance(base, Snapshot) and base.rescaled for base in self.bases.values())

    def confirmed(self, bases: Mapping[int, Snapshot]) -> StageProgress:
        """The same, once the registry names these snapshots."""
        return replace(self, bases=bases, settled=True)


@dataclass(frozen=True, slots=True)
class EpochReport:
    """A completed checkpoint, what its gates said, and what was done after its commit. ms: milliseconds by phase."""

    checkpoint: Checkpoint
    verdicts: tuple[Verdict, ...]
    ms: dict[str, float]
    publications: tuple[Publication, ...] = ()
    pruned: tuple[CheckpointId, ...] = ()


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage's job gave, and its gates where they may set rows aside. acks: as they came, declines and strays
    among them. shapes: None as long as no row has ever come. again: the cut to take instead of this epoch's, since a
    gate has set rows aside."""

    acks: tuple[Ack, ...]
    verdicts: tuple[Verdict, ...] = ()
    ms: Mapping[str, float] = field(default_factory=dict)
    shapes: Shapes | None = None
    again: EpochPlan | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """Which epoch a stage was at. whole: it has applied all of it; watermark: the one that it hands on then."""

    epoch: CheckpointId
    now: datetime
    whole: bool
    watermark: int | None


@dataclass
class InFlightEpoch:
    """One epoch between its trigger and its end. frontier: after its slices. acks: by stage, as its subtasks gave them,
    once all are in; what is uploaded meanwhile does not change them. shapes: by stage, as this epoch knew them; a later
    one may know more.

    uploaded: acks whose files are in storage, by stage, until the epoch before is confirmed. noted: its id is written
    down. judged: uids of stages whose rows no gate refuses. begun: steps, by lane and kind. elsewhere: uids of stages
    that run again, once what they build on is in storage. sealed: the row and the listing, ready for the commit;
    confirmed: the checkpoint, once the registry has it; published: what its sinks have of it.
    work: by stage, what it applies; waiting: what it has not applied after that. applied: which epoch it was at.
    forgotten: by stage, what a TTL has let expire by then.
    may_stand: its commit has begun, and the registry has not said that it failed. losers: objects of attempts that do
    not count. started: on time.perf_counter(); deadline: on time.monotonic()."""

    pending: PendingCheckpoint
    cut: EpochPlan
    frontier: SourceOffsets
    triggered_at: datetime
    started: float
    deadline: float
    acks: dict[str, list[Ack]] = field(default_factory=dict)
    uploaded: dict[str, list[Ack]] = field(default_factory=dict)
    noted: bool = False
    judged: set[str] = field(default_factory=set)
    begun: set[tuple[str, str]] = field(default_factory=set)
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
    verdicts: list[Verdict] = field(default_factory=list)
    losers: list[StateFile] = field(default_factory=list)
    watermarks: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    handed_over: list[Ack] = field(default_factory=list)

    @property
    def to_upload(self) -> list[PendingUpload]:
        """What is still to be uploaded."""
        acks = [ack for ack in self.pending.acks.values() if ack.operator not in self.uploaded]
        return [ack.handover for ack in acks if ack.handover is not None]

    def ahead_of(self, stage: Stage) -> list[Rows]:
        """Rows that the stage upstream has handed out, until this one has acked."""
        if not isinstance(stage.input, Stage) or stage.uid in self.acks:
            return []
        return [file for ack in self.acks.get(stage.input.uid, ()) for file in read_by_next(ack)]

    @property
    def waiting_paths(self) -> set[str]:
        """In storage, of all rows that its stages leave."""
        return {file.path for queue in self.waiting.values() for unapplied in queue for file in unapplied.files}

    def local_rows(self) -> set[str]:
        """Where rows lie that its stages read from this disk."""
        return local_rows(file for work in self.work.values() for file in work.files)

    @property
    def now(self) -> datetime:
        assert self.frontier.now is not None, "it is set when an epoch is begun"
        return self.frontier.now


def pending_bytes(
    in_flight_epochs: Sequence[InFlightEpoch],
    progress_by_stage: Mapping[str, StageProgress],
    stages: Sequence[Stage],
    full: bool,
) -> int:
    """Of what this disk has to keep: what is still to be uploaded, at most, and rows in front of a stage, until it has
    applied them.

    tips: by stage. full: all files of a snapshot are uploaded, the base's too.
    """
    to_upload = [handed for in_flight in in_flight_epochs for handed in in_flight.to_upload]
    rows: list[Rows] = [file for handed in to_upload for file in handed.staged]
    rows += [file for in_flight in in_flight_epochs for stage in stages for file in in_flight.ahead_of(stage)]
    rows += [
        file for progress in progress_by_stage.values() for unapplied in progress.waiting for file in unapplied.files
    ]
    by_place = {file.local: file.bytes for file in rows if isinstance(file, StagedFile)}
    return sum(handed.state_bytes(full) for handed in to_upload) + sum(by_place.values())


def local_rows(files: Iterable[Rows]) -> set[str]:
    return {file.local for file in files if isinstance(file, StagedFile)}
