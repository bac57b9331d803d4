"""A stage or a pipeline in a test: epochs in, rows, state, timers and windows out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import polars as pl
import pyarrow as pa

from state_ops.backends.base import Backend
from state_ops.counts import agrees, counted
from state_ops.errors import PipelineError
from state_ops.keyed.timers import AT, DOMAIN, MOMENT, scan_timers
from state_ops.keyed.ttl import expiry_of
from state_ops.moments import from_micros, to_micros
from state_ops.records.acks import Ack
from state_ops.records.snapshot_files import STATE, Snapshot
from state_ops.schema.descriptors import Collection
from state_ops.schema.key_groups import group_range
from state_ops.schema.state_class import State
from state_ops.schema.state_schema import StateSchema
from weir.definition import LATE, MAIN, Pipeline, Shapes, Stage
from weir.execution.executor import staged_table
from weir.inspection.snapshot_files import opened
from weir.ownership.pipeline_storage import backend_options
from weir.testing import instances
from weir.testing.epochs import Epochs
from weir.testing.rows import Rows, Schema


class StageRun:
    """One stage, its state and its event time between epochs. A declined epoch changes nothing.

    Attributes:
        stage: The stage.
        close: Removes its files. They go with the run, too.

    Example:
        >>> from datetime import datetime
        >>> from weir import agg, files, testing, window
        >>> readings = files("{landing}/*.parquet", event_time="at")
        >>> run = testing.run(window("hourly", readings, key="device", on="at", every="1h", readings=agg.count()))
        >>> len(run.epoch([{"device": "a", "at": datetime(2026, 1, 1, 9, 5)}]))
        0
        >>> run.watermark.hour, run.open_windows["readings"].to_list()
        (9, [1])
        >>> run.epoch(drain=True)["readings"].to_list()
        [1]
    """

    def __init__(self, epochs: Epochs, stage: Stage, state: Mapping[Any, State], alone: bool = True) -> None:
        for instance in state.values():
            if type(instance) is not stage.state:
                raise PipelineError(
                    f"The state of {stage.uid} cannot be {instance!r}.",
                    next=f"Give instances of {stage.state.__name__}."
                    if stage.state
                    else "Only a stage with a function can be started with state; run an epoch first.",
                )
        self.stage, self.close = stage, epochs.close
        self.epochs, self._initial, self._alone = epochs, dict(state), alone
        self._read: tuple[tuple[Ack, ...], dict[Any, State]] = (), self._initial

    def epoch(
        self,
        rows: Rows = (),
        *,
        now: datetime | None = None,
        drain: bool = False,
        watermark: datetime | None = None,
        table: Rows | None = None,
    ) -> pl.DataFrame:
        """Run one epoch and return the rows that the stage hands out.

        Args:
            rows: The input's rows, possibly none.
            now: Processing time; by default a minute after the previous epoch's.
            drain: Close every window.
            watermark: The stage's watermark from this epoch on; by default the newest event time less the lateness.
            table: For a lookup, all rows of its table from this epoch on.

        Raises:
            WeirError: The epoch is declined. The error's class says why.
        """
        if not self._alone:
            raise PipelineError(
                f"{self.stage.uid} runs in a pipeline.", next="Give the rows to the run of the pipeline."
            )
        (source,) = self.epochs.context.pipeline.sources
        self.epochs.put({} if table is None else {self.stage.uid: table})
        self.epochs.run({source.name: rows}, now, drain, watermark)
        return self.rows(MAIN)

    @property
    def state(self) -> Mapping[Any, Any]:
        """The state by key after the last epoch: instances of the State class, or of a class like its fields."""
        if self.stage.closes:
            raise PipelineError(
                f"{self.stage.uid} has windows, or ranks that become final.", next="They are in `open_windows`."
            )
        return _States(self)

    @property
    def timers(self) -> pl.DataFrame:
        """The timers that are set: key columns, `at` and `domain` ("event" or "processing"), in order of time."""
        shapes = self._shapes
        if shapes is None:
            return pl.DataFrame()
        schema = pa.schema([*shapes.keys, (AT, MOMENT), (DOMAIN, pa.string())])
        tables = [table for groups, backend in self.backends() for table in scan_timers(backend, shapes.keys, groups)]
        return _frame(tables, schema).sort(AT, *shapes.keys.names)

    @property
    def open_windows(self) -> pl.DataFrame:
        """The windows that have not closed: key columns, window_start, window_end and the aggregates so far.

        For ranks that are not final: key columns, `until`, and the rows.
        """
        if not self.stage.closes:
            raise PipelineError(f"{self.stage.uid} has no windows.", next="Its state is in `state`.")
        shapes = self._shapes
        if shapes is None:
            return pl.DataFrame()
        tables: list[pa.Table] = []
        for groups, backend in self.backends():
            tables += self.stage.operator.opened(self.stage, shapes.keys, shapes.state, backend, groups)
        if self.stage.operator.is_opened_as_output:
            return _frame([table.cast(shapes.outputs[MAIN]) for table in tables], shapes.outputs[MAIN])
        return _frame(tables, self.stage.operator.opened_schema(self.stage, shapes.keys, shapes.state))

    @property
    def late(self) -> pl.DataFrame:
        """The late rows of the last epoch, also if the stage has no `late=`.

        Raises:
            PipelineError: Rows were late, and there are no columns in which they could be shown.
        """
        shapes, were_late = self._shapes, sum(ack.rows_late for ack in self.acks)
        late = self.rows(LATE) if shapes is not None and LATE in shapes.outputs else pl.DataFrame()
        if len(late) != were_late:
            raise PipelineError(
                f"{counted(were_late, 'row')} of {self.stage.uid} {agrees(were_late, 'was', 'were')} late, and cannot"
                " be shown.",
                where=f"stage {self.stage.uid}",
                next="Say late=... at the stage, which tells why; `rows_late` of its acks counts them.",
            )
        return late

    @property
    def acks(self) -> tuple[Ack, ...]:
        """The subtasks' reports of the last epoch."""
        newest = self.epochs.newest
        return () if newest is None else tuple(ack for ack in newest.acks[self.stage.uid] if ack.attempt)

    @property
    def watermark(self) -> datetime | None:
        """The event time after the last epoch, which decides whether rows of the next one are late."""
        watermark = self.epochs.progress[self.stage.uid].watermark
        return None if watermark is None else from_micros(watermark)

    @property
    def dropped(self) -> int:
        """The number of rows that `where` dropped in the last epoch."""
        newest = self.epochs.newest
        return 0 if newest is None else newest.dropped.get(self.stage.uid, 0)

    def rows(self, output: str) -> pl.DataFrame:
        """Return the rows that the last epoch has handed out.

        Args:
            output: "main", "late", or the name of an output that the stage declares.

        Raises:
            PipelineError: The stage has no such output.
        """
        if output not in (*self.stage.returned, LATE):
            raise PipelineError(
                f"{self.stage.uid} has no output {output!r}.", next=f"It has: {', '.join(self.stage.returned)}."
            )
        if self._shapes is None or output not in self._shapes.outputs:  # nothing has come, or no row can be late
            return pl.DataFrame()
        files = [file for ack in self.acks for file in ack.files if file.kind != STATE and file.name == output]
        storage = self.epochs.context.storage
        return _frame([staged_table(storage, file) for file in files], self._shapes.outputs[output])

    def backends(self) -> Iterator[tuple[range, Backend]]:
        """Yield a copy of each subtask's newest snapshot, open, with its key groups."""
        context = self.epochs.context
        settings, work_dir = context.settings, context.settings.work_dir
        for subtask, base in sorted(self.epochs.progress[self.stage.uid].bases.items()):
            assert isinstance(base, Snapshot), "it is in storage"
            groups = group_range(subtask, settings.spark.parallelism, context.pipeline.max_parallelism)
            with opened(context.storage, backend_options(settings), base, settings.state.backend, work_dir) as backend:
                yield groups, backend

    @property
    def _shapes(self) -> Shapes | None:
        return self.epochs.context.shapes.get(self.stage.uid)

    def _states(self) -> dict[Any, State]:
        shapes, acks = self._shapes, self.acks
        if shapes is not None and self._read[0] != acks:
            assert self.epochs.newest is not None, "it has acks"
            cls = self.stage.state or _class_of(self.stage.uid, shapes.state, shapes.collections)
            forgotten = self.epochs.progress[self.stage.uid].forgotten
            expiry = expiry_of(shapes.state, self.stage.lifetime, to_micros(self.epochs.newest.now), forgotten)
            states: dict[Any, State] = {}
            for groups, backend in self.backends():
                states.update(instances.read(backend, shapes, groups, cls, expiry))
            self._read = acks, states
        return self._read[1]


@functools.cache
def _class_of(name: str, schema: StateSchema, collections: tuple[Collection, ...]) -> type[State]:
    """Return a State class with the fields and maps of an operator's own state."""
    cls: type[State] = type(name, (State,), {})
    cls.__weir_schema__, cls.__weir_collections__ = schema, collections
    for field in schema.fields:
        setattr(cls, field.name, field.default)
    return cls


class _States(Mapping[Any, State]):
    """A stage's state by key, always that of its last epoch."""

    def __init__(self, run: StageRun) -> None:
        self._run = run

    def __getitem__(self, key: Any) -> State:
        return self._run._states()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._run._states())

    def __len__(self) -> int:
        return len(self._run._states())

    def __repr__(self) -> str:
        return repr(self._run._states())


class PipelineRun:
    """A pipeline between two epochs.

    Attributes:
        pipeline: The pipeline.
        stages: Its stages by uid, with state, late rows and acks.
        close: Removes its files. They go with the run, too.

    Example:
        >>> from weir import Pipeline, agg, aggregate, delta, files, testing
        >>> source = files("{landing}/*.parquet")
        >>> totals = aggregate("totals", source, key="carrier", delay=agg.sum("delay"), sink=delta.append("totals"))
        >>> run = testing.run_pipeline(Pipeline("delays", (totals,)))
        >>> run.epoch([{"carrier": "AA", "delay": 5}])["totals"].to_dicts()
        [{'carrier': 'AA', 'delay': 5, 'epoch': 1}]
        >>> run.states["totals"]["AA"].delay
        5
    """

    def __init__(
        self,
        pipeline: Pipeline,
        parallelism: int,
        batch_rows: int,
        schema: Schema,
        tables: Mapping[str, Rows],
    ) -> None:
        self.pipeline = pipeline
        self._epochs = Epochs(pipeline, parallelism, pipeline.max_parallelism, batch_rows, schema, {})
        self.close = self._epochs.close
        self._epochs.put(tables)
        self.stages = {stage.uid: StageRun(self._epochs, stage, {}, alone=False) for stage in pipeline.stages}
        self._tables: dict[str, list[pl.DataFrame]] = {sink.name: [] for sink in pipeline.sinks}

    def epoch(
        self,
        rows: Rows | Mapping[str, Rows] = (),
        *,
        now: datetime | None = None,
        drain: bool = False,
        tables: Mapping[str, Rows] = MappingProxyType({}),
    ) -> dict[str, pl.DataFrame]:
        """Run one epoch through all stages and return each table's new rows.

        If a stage declines the epoch, no stage moves on.

        Args:
            rows: The source's rows, or by source name if the pipeline has several.
            now: Processing time; by default a minute after the previous epoch's.
            drain: Close every window.
            tables: By a lookup's uid, all rows of its table from this epoch on.

        Raises:
            WeirError: The epoch is declined. The error's class says why.
            ValueError: The pipeline has no such source.
        """
        self._epochs.put(tables)
        self._epochs.run(self._by_source(rows), now, drain)
        tables = {
            sink.name: run.rows(output)
            for run in self.stages.values()
            for output, sink in run.stage.sinks_by_output
            if sink is not None
        }
        for name, frame in tables.items():
            self._tables[name].append(frame)
        return tables

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        """Every sink's table with the rows of all epochs so far."""
        return {name: stacked(parts) for name, parts in self._tables.items()}

    @property
    def states(self) -> dict[str, Mapping[Any, Any]]:
        """State by key of each stage that has no windows, nor ranks that become final, by uid."""
        return {uid: run.state for uid, run in self.stages.items() if not run.stage.closes}

    def _by_source(self, rows: Rows | Mapping[str, Rows]) -> Mapping[str, Rows]:
        names = [source.name for source in self.pipeline.sources]
        if not isinstance(rows, Mapping):
            if len(names) > 1 and len(rows):
                raise ValueError(
                    f"{self.pipeline.name} has several sources; give rows by source name: {', '.join(names)}"
                )
            return {names[0]: rows}
        strange = sorted(rows.keys() - set(names))
        if strange:
            raise ValueError(f"{self.pipeline.name} has no source {strange[0]!r}; its sources are: {', '.join(names)}")
        return rows


def _frame(tables: Sequence[pa.Table], schema: pa.Schema) -> pl.DataFrame:
    return pl.from_arrow(pa.concat_tables([schema.empty_table(), *tables]))  # type: ignore[return-value]


def stacked(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return the rows of all frames that have columns."""
    frames = [part for part in parts if part.width]
    return pl.concat(frames) if frames else pl.DataFrame()
