"""The context that all epochs of one run share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock

import pyarrow as pa

from state_ops.checkpoints.reader_holds import HoldWatcher
from state_ops.checkpoints.registry import Registry
from state_ops.ids import CheckpointId, Generation
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.publications import Publication
from state_ops.storage.storage import Storage
from weir.definition import Pipeline, Shapes, Stage
from weir.definition.fingerprint import fingerprint_of_stage
from weir.execution.executor import Executor
from weir.ownership.lookups import Lookups
from weir.settings.configuration import Settings
from weir.sinks.open_sinks import Sinks
from weir.sources.reader import SourceReader
from weir.timings import EpochTimes


@dataclass
class RunContext:
    """The context that all epochs of one run share.

    Attributes:
        shapes: The stages' schemas, found once.
        inputs: The columns that they see.
        reads: Those before their transform.
        made_times: By number, those of their inputs in which another time is in place of their source's event time.
        head: The newest confirmed checkpoint, as the coordinator knows it.
        watcher: What this process knows of running restores.
        sinks: As this process reaches them.
        lookups: The tables that rows are looked up in.
        early: What they got of epochs before their commits.
        early_id: The highest id of an epoch that any run of the pipeline has begun whose rows go to sinks before its
            commit, as it was when this one began; 0: none.
        held: There may be a note that a gate holds the pipeline (`state_ops.coordination.gate_hold`).
        requested_before: `RequestCounts` of the coordinators before, up to the newest checkpoint.
        claiming: Held while the run renews its claim, which changes `generation`.
        codes: By stage, the fingerprint of its code, found once.
        tells_sources: Sources are told of what is committed, for people's own tools. Who plays epochs again does not:
            their systems have come further since.
        traced: Is called with the times of each epoch that has ended, well or not; None: nobody wants to know.
    """

    pipeline: Pipeline
    settings: Settings
    storage: Storage
    registry: Registry
    generation: Generation
    executor: Executor
    readers: Mapping[str, SourceReader]
    run_id: str | None = None
    head: Checkpoint | None = None
    shapes: dict[str, Shapes] = field(default_factory=dict)
    inputs: dict[str, pa.Schema] = field(default_factory=dict)
    reads: dict[str, tuple[pa.Schema | None, ...]] = field(default_factory=dict)
    made_times: dict[str, frozenset[int]] = field(default_factory=dict)
    discarded: list[str] = field(default_factory=list)
    watcher: HoldWatcher = field(default_factory=HoldWatcher)
    held: bool = False
    requested_before: Mapping[str, int] = field(default_factory=dict)
    early: dict[CheckpointId, list[Publication]] = field(default_factory=dict)
    early_id: int = 0
    claiming: Lock = field(default_factory=Lock)
    codes: dict[str, str] = field(default_factory=dict)
    tells_sources: bool = True
    traced: Callable[[EpochTimes], None] | None = None
    sinks: Sinks = field(init=False)
    lookups: Lookups = field(init=False)

    def __post_init__(self) -> None:
        self.lookups = Lookups(self.pipeline, self.settings)
        self.sinks = Sinks(self.pipeline, self.settings, self.storage, lambda: self.registry.prove(self.generation))

    def resolve(self, text: str) -> str:
        """Return a text with its {placeholders} filled from the pipeline's configuration."""
        return self.settings.filled(self.pipeline.name, text)

    def code_of(self, stage: Stage) -> str:
        """Return the fingerprint of what a stage does, as its checkpoints record it."""
        if stage.uid not in self.codes:
            self.codes[stage.uid] = fingerprint_of_stage(stage)
        return self.codes[stage.uid]

    def requested(self) -> dict[str, int]:
        """Return the requests of the pipeline's coordinators to storage so far, for the totals of a checkpoint's row.

        A process takes with it what it requested after its last row.
        """
        return {
            name: self.requested_before.get(name, 0) + count
            for name, count in self.storage.request_counts.counts().items()
        }
