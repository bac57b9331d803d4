"""The epochs of a run in this process: each takes the steps that an epoch of `weir run` takes, up to its commit.

    rows -> slice -> for each stage: plan, job (filter, route, sort, keyed tasks), acks, progress -> the next epoch

Storage and the workers' files are a temporary directory, in memory where the machine has enough of it. An epoch whose
stages have all acked is taken for committed: nobody else reads this storage, so there is no registry and no lease, and
tables are what the stages have staged for them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from deltalake import write_deltalake

from state_ops.checkpoints.pending_checkpoint import PendingCheckpoint
from state_ops.errors import PipelineError, WeirError
from state_ops.ids import CheckpointId, Generation
from state_ops.moments import to_micros
from state_ops.records.acks import Ack
from state_ops.records.snapshot_files import Snapshot, snapshots_of
from state_ops.records.triggers import Trigger
from state_ops.schema.key_groups import check_parallelism
from state_ops.schema.state_class import State
from state_ops.snapshots import stage_upload
from weir.connectors.lookups.lookup_table import Version
from weir.definition import AT_LEAST_ONCE, EXACTLY_ONCE, LATE, MAIN, Pipeline, Source, Stage, sources_of
from weir.definition.sink import Sink, ValueRules
from weir.epoch.model import InFlightEpoch, SourceOffsets, StageProgress
from weir.epoch.stage_input import known_watermark
from weir.epoch.stage_job import applied_alone
from weir.execution.executor import Deadline, InputRows
from weir.execution.in_process import InMemoryExecutor
from weir.ownership.context import RunContext
from weir.ownership.pipeline_storage import open_storage
from weir.settings.configuration import Settings
from weir.sinks.open_sinks import Sinks
from weir.sources.reader import SourceReader
from weir.sources.slices import EpochPlan
from weir.task.run_task import KeyedTask
from weir.testing import instances
from weir.testing.rows import GivenSource, Rows, Schema, canonical, table_of

FIRST_NOW = datetime(2020, 1, 1, tzinfo=UTC)
_SECONDS = 3600.0
_ROOMY = 1 << 30  # bytes


class Epochs:
    """A pipeline between two epochs. A declined epoch changes nothing.

    Args:
        state: What the keys of the only stage have before the first epoch.
        schema: The columns of all sources, or of each by its name, where the first rows do not tell them.

    Attributes:
        context: What the steps of all epochs share.
        progress: By stage, what its next epoch builds on.
        newest: The newest epoch that no stage has declined.
    """

    def __init__(
        self,
        target: Pipeline | Stage,
        parallelism: int,
        max_parallelism: int,
        batch_rows: int,
        schema: Schema,
        state: Mapping[Any, State],
    ) -> None:
        check_parallelism(parallelism, max_parallelism)
        if batch_rows < 1:
            raise ValueError(f"batch_rows is {batch_rows}, but a batch has at least one row")
        pipeline = target if isinstance(target, Pipeline) else _alone(target, max_parallelism)
        for stage in pipeline.stages:
            if any(input.transform is not None for input in stage.inputs):
                raise PipelineError(
                    f"The transform of {stage.uid} needs Spark.",
                    next="Test the pipeline's stages one by one with testing.run, whose rows are those after the "
                    "transform.",
                )
        root = Path(tempfile.mkdtemp(prefix="weir-testing-", dir=_scratch()))
        self.close = weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        settings = Settings.model_validate(
            {
                "storage": {"root": str(root / "storage")},
                "local": {"work_dir": str(root / "work"), "objects_mb": 0},
                "spark": {"parallelism": parallelism},
                "state": {"memory_mb": 16},
            }
        )
        stages = pipeline.stages if isinstance(target, Pipeline) else (target,)
        self._sources = {
            source.name: GivenSource(columns_of(source, schema), source, _reader(source, stages))
            for source in pipeline.sources
        }
        self.context = RunContext(
            pipeline,
            settings,
            *open_storage(pipeline, settings),
            Generation(1),
            _Executor(batch_rows, state),
            cast(Mapping[str, SourceReader], self._sources),
        )
        self.context.sinks = _NoSystems(pipeline, settings, self.context.storage)
        self.progress = {stage.uid: StageProgress() for stage in pipeline.stages}
        self.newest: InFlightEpoch | None = None
        self._offsets = SourceOffsets({}, {}, FIRST_NOW)
        self._begun, self._given = 0, set[str]()

    def put(self, tables: Mapping[str, Rows]) -> None:
        """Write the tables of lookups anew, by stage, each as a new version."""
        for uid, rows in tables.items():
            lookups = [stage.uid for stage in self.context.pipeline.stages if stage.operator.beside is not None]
            if uid not in lookups:
                raise ValueError(f"{uid!r} is no lookup of {self.context.pipeline.name}; {lookups} are")
            place = f"{self.context.settings.storage.root}/lookups/{uid}"
            table = table_of(rows, None)
            if table is None:
                raise ValueError(f"the table of {uid} has no columns: give a frame, which has them without rows too")
            write_deltalake(place, table, mode="overwrite", schema_mode="overwrite")
            self.context.lookups.place(uid, place)
            self._given.add(uid)

    def run(
        self, rows: Mapping[str, Rows], now: datetime | None, drain: bool, watermark: datetime | None = None
    ) -> None:
        """Run one epoch through all stages. Raises the typed error of an epoch that is declined.

        Args:
            rows: By source.
            now: Processing time, by default a minute after the previous epoch's.
            drain: Close every window.
            watermark: That of the only stage from this epoch on, by default as its rows say.
        """
        before = self._offsets.now
        assert before is not None, "the first one is given"
        self._begun += 1
        moment = utc(now) if now is not None else before + timedelta(minutes=1)
        if moment < before:
            raise ValueError(f"processing time never decreases, but {moment} is before {before}")
        pipeline, parallelism = self.context.pipeline, self.context.settings.spark.parallelism
        arriving = None if watermark is None else to_micros(utc(watermark)) + pipeline.lateness
        slices = {name: source.plan(rows.get(name, ()), arriving) for name, source in self._sources.items()}
        expected = {stage.uid: parallelism for stage in pipeline.stages}
        deadline = time.monotonic() + _SECONDS
        trigger = Trigger.DRAIN if drain else Trigger.MANUAL
        id, generation = CheckpointId(self._begun), self.context.generation
        pending = PendingCheckpoint(id, None, None, generation, trigger, expected, deadline)
        in_flight = InFlightEpoch(
            pending,
            EpochPlan(trigger, "a test", slices, drain, lookups=self._lookups()),
            self._offsets.after(slices, self.context.readers, moment),
            moment,
            time.perf_counter(),
            deadline,
        )
        if watermark is not None:  # which counts, whatever SQL makes of the event time
            in_flight.made_times |= {stage.uid: frozenset() for stage in pipeline.stages}
        progress = {stage.uid: self._applied(in_flight, stage) for stage in pipeline.stages}
        if watermark is not None:
            (stage,) = pipeline.stages
            fixed = known_watermark(in_flight, stage, self.progress[stage.uid])
            progress = {stage.uid: replace(progress[stage.uid], watermark=fixed)}
        self._offsets, self.progress, self.newest = in_flight.source_offsets, progress, in_flight

    def _lookups(self) -> dict[str, Version]:
        """Return the version of each lookup's table."""
        try:
            return self.context.lookups.plan(None)
        except WeirError as error:
            lookups = {stage.uid for stage in self.context.pipeline.stages if stage.operator.beside is not None}
            if lookups - self._given:  # they were looked for where production has them
                error.next = "Give the test its rows: testing.run(..., table=[...]), of a pipeline tables={uid: [...]}."
            raise

    def _applied(self, in_flight: InFlightEpoch, stage: Stage) -> StageProgress:
        """Let one stage apply its part of the epoch; returns what its next epoch builds on."""
        before, uid = self.progress[stage.uid], stage.uid
        after = applied_alone(self.context, in_flight, stage, before)
        bases = {subtask: base for subtask, base in before.bases.items() if isinstance(base, Snapshot)}
        acks = in_flight.acks[uid]  # of a stage that no job was run of, nobody has said yet that its files are the same
        for ack in stage_upload.upload(self.context.storage, acks, bases, full=False, channels=bool, deadline=None):
            in_flight.pending.record(ack)
        in_flight.acks[uid] = in_flight.pending.acks_of(uid)
        return after.confirmed(snapshots_of(in_flight.pending.files(), uid))


class _NoSystems(Sinks):
    """Tables in memory, and no other system: a test of a stage needs none."""

    def check(self, sink: Sink, schema: pa.Schema) -> None:
        if self._pipeline.capabilities(sink).has_versions:
            super().check(sink, schema)

    def rules(self, sink: Sink, schema: pa.Schema) -> ValueRules | None:
        return super().rules(sink, schema) if self._pipeline.capabilities(sink).has_versions else None


class _Executor(InMemoryExecutor):
    """Lets a stage begin with the state that a test gives, and stage all rows that it hands out, late ones too."""

    def __init__(self, batch_rows: int, state: Mapping[Any, State]) -> None:
        super().__init__(batch_rows, narrows=False)  # late rows are shown whole
        self._state = state

    def run(self, task: KeyedTask, rows: InputRows | None, columns: pa.Schema, deadline: Deadline) -> list[Ack]:
        bases = task.bases or (instances.snapshots(task, self._state) if self._state else {})
        task = replace(task, bases=bases, tables={}, channels=frozenset((*task.stage.returned, LATE)))
        return super().run(task, rows, columns, deadline)


def _alone(stage: Stage, max_parallelism: int) -> Pipeline:
    """Return a pipeline of one stage. Its rows are given as its transform returns them, or the stage upstream."""
    if stage.is_of_several:
        raise PipelineError(
            f"{stage.uid} has several inputs, and testing.run gives rows of one.",
            next="Test a pipeline of it with testing.run_pipeline, whose epochs take rows by source.",
        )
    (input,), source = stage.inputs, next(iter(sources_of(stage)))
    once = all(sink.exactly_once for sink in stage.sinks)
    return Pipeline(
        stage.uid,
        (replace(stage, inputs=(replace(input, origin=source, output=MAIN, transform=None),)),),
        max_parallelism,
        delivery=EXACTLY_ONCE if once else AT_LEAST_ONCE,
    )


def _reader(source: Source, stages: Sequence[Stage]) -> Stage:
    """Return a stage that reads a source, or one before it."""
    readers = [stage for stage in stages if source in (input.origin for input in stage.inputs)]
    return readers[0] if readers else next(stage for stage in stages if source in sources_of(stage))


def columns_of(source: Source, schema: Schema) -> pa.Schema | None:
    """Return the columns of a source by a test's `schema`: of all sources, or by their names."""
    if isinstance(schema, Mapping) and any(isinstance(of, pa.Schema | Mapping) for of in schema.values()):
        return canonical(cast(Mapping[str, pa.Schema], schema).get(source.name))
    return canonical(cast("pa.Schema | Mapping[str, pa.DataType] | None", schema))


def utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _scratch() -> str | None:
    """Memory where there is plenty: RocksDB syncs files when it opens, which takes a disk twenty times as long."""
    memory = Path("/dev/shm")
    if "TMPDIR" not in os.environ and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOMY:
        return str(memory)
    return None
