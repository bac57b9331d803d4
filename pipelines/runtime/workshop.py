"""What the steps of an epoch hand to each other: the run's workshop, the cut, the epoch in work, the report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import pyarrow as pa

from configs.settings import Settings
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.executor import Executor
from pipelines.runtime.gates import Verdict
from pipelines.runtime.operators import Shapes
from pipelines.runtime.sources.files import FilesReader, Slice
from state_ops.checkpoint import Checkpoint, StateFile
from state_ops.coordinator import Coordinator
from state_ops.ids import CheckpointId, Generation
from state_ops.pending import PendingCheckpoint, Trigger
from state_ops.pins import Watcher
from state_ops.registry import Publication, Registry
from state_ops.storage import Storage


@dataclass(frozen=True, slots=True)
class Cut:
    """Why this barrier is cut. slices: by source; drain: close every window."""

    trigger: Trigger
    reason: str
    slices: Mapping[str, Slice]
    drain: bool = False


@dataclass(frozen=True, slots=True)
class EpochReport:
    """A completed checkpoint, and what was done after its commit. ms: milliseconds by phase."""

    checkpoint: Checkpoint
    verdicts: tuple[Verdict, ...]
    ms: dict[str, float]
    publications: tuple[Publication, ...] = ()
    pruned: tuple[CheckpointId, ...] = ()


@dataclass
class Workshop:
    """What all epochs of one run share. shapes: the stages' schemas, found once; expected: the sources' schemas.

    watcher: what this process knows of running restores.
    """

    pipeline: Pipeline
    settings: Settings
    storage: Storage
    registry: Registry
    generation: Generation
    executor: Executor
    readers: Mapping[str, FilesReader]
    run_id: str | None = None
    shapes: dict[str, Shapes] = field(default_factory=dict)
    inputs: dict[str, pa.Schema] = field(default_factory=dict)
    expected: dict[str, pa.Schema] = field(default_factory=dict)
    discarded: list[str] = field(default_factory=list)
    watcher: Watcher = field(default_factory=Watcher)


@dataclass
class Working:
    """One epoch while it is being worked on; gone when it ends, whichever way. losers: objects of attempts that do not count."""

    coordinator: Coordinator
    pending: PendingCheckpoint
    cut: Cut
    now: datetime
    deadline: float
    verdicts: list[Verdict] = field(default_factory=list)
    losers: list[StateFile] = field(default_factory=list)
    watermarks: dict[str, int] = field(default_factory=dict)
    handed_on: dict[str, int | None] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)

    @property
    def parent(self) -> Checkpoint | None:
        """What it continues. Epochs run one after the other here, so that is confirmed."""
        return self.pending.base


def lap(ms: dict[str, float], phase: str, since: float) -> float:
    now = time.perf_counter()
    ms[phase] = round((now - since) * 1000, 3)
    return now
