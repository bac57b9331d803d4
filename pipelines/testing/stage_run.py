"""Stages and pipelines on their own, epoch by epoch, on the real keyed task and a real RocksDB: what
`pipelines.testing` offers."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.runtime.definition import ROW, FileSource, Pipeline, Stage, source_of
from pipelines.runtime.execution.in_process import filtered, routed
from pipelines.runtime.operators import LATE, MAIN, Progress, Shapes, event_time_of, open_windows, shapes, watermarks
from pipelines.runtime.task import run_task
from pipelines.runtime.task.run_task import KeyedTask
from pipelines.testing import instances as instances_of
from state_ops.arrow import frames
from state_ops.backends.base import Backend, BackendOptions
from state_ops.backends.rocksdb import ROCKSDB
from state_ops.checkpoints.checkpoint import STATE, Ack, Snapshot, from_micros, snapshots_of, to_micros
from state_ops.errors import InputError, PipelineError, from_report
from state_ops.ids import CheckpointId, Generation, new_attempt_id
from state_ops.keyed.timers import AT, DOMAIN, MOMENT, scan_timers
from state_ops.keyed.ttl import Forgotten, expiry_of, forgotten_after
from state_ops.schema.key_groups import check_parallelism, group_range, key_groups, subtask_of
from state_ops.schema.state_class import State
from state_ops.schema.state_schema import StateSchema
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.storage.storage import Storage

FIRST_NOW = datetime(2020, 1, 1, tzinfo=UTC)
_GENERATION = Generation(1)
_OPTIONS = BackendOptions(memory_mb=16)
_ROOMY = 1 << 30  # bytes

Rows = Any
"""A list of dicts, or a Polars, pandas or pyarrow frame."""


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One stage's part in an epoch that nothing declined."""

    now: datetime
    acks: tuple[Ack, ...]
    bases: Mapping[int, Snapshot]
    watermark: int | None
    dropped: int
    forgotten: Forgotten | None = None


class StageRun:
    """One stage, its state and its event time between epochs. A declined epoch changes nothing."""

    def __init__(
        self,
        stage: Stage,
        state: Mapping[Any, State],
        parallelism: int,
        max_parallelism: int,
        batch_rows: int,
        schema: pa.Schema | Mapping[str, pa.DataType] | None,
    ) -> None:
        check_parallelism(parallelism, max_parallelism)
        if batch_rows < 1:
            raise ValueError(f"batch_rows is {batch_rows}, but a batch has at least one row")
        self.stage = stage
        self._initial = dict(state)
        self._parallelism, self._max_parallelism, self._batch_rows = parallelism, max_parallelism, batch_rows
        self._input = None if schema is None else canonical(pa.schema(schema))
        self._shapes: Shapes | None = None
        self._root = Path(tempfile.mkdtemp(prefix="weir-testing-", dir=_scratch()))
        self.close = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        self._storage = Storage(str(self._root / "storage"))
        self._begun = CheckpointId(0)
        self._last = _Epoch(FIRST_NOW, (), {}, None, 0)
        self._read: dict[Any, State] | None = None
        for instance in self._initial.values():
            if type(instance) is not stage.state:
                raise PipelineError(
                    f"The state of {stage.uid} cannot be {instance!r}.",
                    next=f"Give instances of {stage.state.__name__}."
                    if stage.state
                    else "Only a stage with a function can be started with state; run an epoch first.",
                )

    def epoch(
        self, rows: Rows = (), *, now: datetime | None = None, drain: bool = False, watermark: datetime | None = None
    ) -> pl.DataFrame:
        """Run one epoch over `rows`, possibly none, and return what the stage hands out.

        now: processing time, by default a minute after the previous epoch's. drain: close every window. watermark: the
        stage's watermark from this epoch on, by default the newest event time less the lateness. Raises the typed error
        of an epoch that is declined.
        """
        table = self._table(rows)
        given = self._last.watermark
        if watermark is not None:
            moment = to_micros(_utc(watermark))
            given = moment if given is None else max(given, moment)
            done = self._run(table, now, drain, given, given)
        else:
            known = watermarks.before_job(self.stage, given, self._newest(table))
            done = self._run(table, now, drain, known, None)
        self._commit(done)
        return self._rows(done.acks, MAIN)

    @property
    def state(self) -> Mapping[Any, Any]:
        """Each key's state after the last epoch, as instances of the stage's State class, or of one like its fields."""
        if self.stage.window is not None:
            raise PipelineError(f"{self.stage.uid} is a window.", next="Its partial aggregates are in `open_windows`.")
        return _States(self)

    @property
    def timers(self) -> pl.DataFrame:
        """The timers that are set: key columns, `at` and `domain` ("event" or "processing"), in order of time."""
        fixed = self._shapes
        if fixed is None:
            return pl.DataFrame()
        schema = pa.schema([*fixed.keys, (AT, MOMENT), (DOMAIN, pa.string())])
        found = [table for groups, backend in self._opened() for table in scan_timers(backend, fixed.keys, groups)]
        return _frame(found, schema).sort(AT, *fixed.keys.names)

    @property
    def open_windows(self) -> pl.DataFrame:
        """Windows that have not closed: key columns, window_start, window_end and the aggregates so far."""
        if self.stage.window is None:
            raise PipelineError(f"{self.stage.uid} is no window.", next="Its state is in `state`.")
        fixed = self._shapes
        if fixed is None:
            return pl.DataFrame()
        found = []
        for groups, backend in self._opened():
            found += list(open_windows(self.stage, fixed.keys, fixed.state, backend, groups))
        return _frame([table.cast(fixed.outputs[MAIN]) for table in found], fixed.outputs[MAIN])

    @property
    def late(self) -> pl.DataFrame:
        """The last epoch's rows that came after their window had closed, or too late to tell whether they are
        duplicates."""
        return self._rows(self.acks, LATE) if self.stage.on is not None else pl.DataFrame()

    @property
    def acks(self) -> tuple[Ack, ...]:
        """What each subtask reported of the last epoch."""
        return self._last.acks

    @property
    def watermark(self) -> datetime | None:
        """Event time after the last epoch, by which the next one's rows are late or not."""
        return None if self._last.watermark is None else from_micros(self._last.watermark)

    @property
    def dropped(self) -> int:
        """How many rows of the last epoch `where` dropped."""
        return self._last.dropped

    # -- one epoch

    def _run(
        self, table: pa.Table | None, now: datetime | None, drain: bool, known: int | None, fixed_after: int | None
    ) -> _Epoch:
        """known: the watermark before the job. fixed_after: the one after it, if the caller says so."""
        self._begun = CheckpointId(self._begun + 1)
        moment = _utc(now) if now is not None else self._last.now + timedelta(minutes=1)
        if moment < self._last.now:
            raise ValueError(f"processing time never decreases, but {moment} is before {self._last.now}")
        if (
            table is None and self._shapes is None
        ):  # nothing has ever arrived: no schema yet, hence no state and no rows
            return _Epoch(moment, (), self._last.bases, known, 0)
        assert self._input is not None
        rows = self._input.empty_table() if table is None else table
        if self.stage.quarantines and ROW not in rows.column_names:
            rows = rows.append_column(ROW, pa.array(range(rows.num_rows), pa.int64()))
        kept = filtered(self.stage, rows)
        task = self._task(self._fixed(kept.schema), moment, Progress(self._last.watermark, known, drain))
        acks = []
        parts = routed(self.stage, kept, self._parallelism, self._max_parallelism, self._batch_rows)
        for subtask, batches in enumerate(parts):
            ack = Ack.from_json(run_task.run(task, subtask, iter(batches)).to_json())
            if ack.error is not None:
                raise from_report(ack.error)
            acks.append(ack)
        after = watermarks.after_job(self.stage, known, acks, drain) if fixed_after is None else fixed_after
        bases = snapshots_of(tuple(file for ack in acks for file in ack.files), self.stage.uid)
        forgotten = forgotten_after(self._last.forgotten, self.stage.ttl, to_micros(moment))
        return _Epoch(moment, tuple(acks), bases, after, rows.num_rows - kept.num_rows, forgotten)

    def _commit(self, done: _Epoch) -> None:
        self._last, self._read = done, None

    def _task(self, fixed: Shapes, now: datetime, progress: Progress) -> KeyedTask:
        return KeyedTask(
            stage=self.stage,
            shapes=fixed,
            epoch=self._begun,
            generation=_GENERATION,
            now=now,
            progress=progress,
            parallelism=self._parallelism,
            max_parallelism=self._max_parallelism,
            storage=self._storage,
            work_dir=self._root / "work",
            bases=self._last.bases,
            tables={LATE: "late"},
            channel=True,
            event_time=source_of(self.stage).event_time,
            options=_OPTIONS,
            swept={ack.subtask: ack.swept for ack in self._last.acks if ack.swept is not None},
            forgotten=self._last.forgotten,
        )

    # -- rows in

    def _table(self, rows: Rows) -> pa.Table | None:
        """The rows as a table of the input's schema, which the first of them fix; None for none before that."""
        table = table_of(rows, self._input)
        if table is None:
            return None if self._input is None else self._input.empty_table()
        if self._input is None:
            for field in table.schema:
                if pa.types.is_null(field.type):
                    raise PipelineError(
                        f"The type of the column {field.name!r} cannot be told from rows that are null in it.",
                        where=f"stage {self.stage.uid}",
                        next="Give testing.run the input's schema=, e.g. {'arr_delay': pa.float64(), ...}.",
                    )
            self._input = table.schema
        return table

    def _newest(self, rows: pa.Table | None) -> int | None:
        """The newest event time of rows before `where`, as a file's statistics tell it."""
        if rows is None:
            return None
        column = source_of(self.stage).event_time
        if column not in rows.column_names and not isinstance(self.stage.input, FileSource):
            column = self.stage.on
        return event_time_of(rows, column) if column is not None and column in rows.column_names else None

    def _fixed(self, rows: pa.Schema) -> Shapes:
        if self._shapes is None:
            found = shapes(self.stage, rows)
            if self._initial:
                self._last = _Epoch(self._last.now, (), self._seeded(found), self._last.watermark, 0)
            self._shapes = found
        return self._shapes

    def _seeded(self, fixed: Shapes) -> dict[int, Snapshot]:
        """Snapshots of the state that the run was started with."""
        tuples = [key if isinstance(key, tuple) else (key,) for key in self._initial]
        columns = [pa.array([key[i] for key in tuples], field.type) for i, field in enumerate(fixed.keys)]
        instances = list(self._initial.values())
        groups = key_groups(columns, self._max_parallelism)
        owners = np.asarray(subtask_of(groups, self._parallelism, self._max_parallelism))
        bases = {}
        for subtask in np.unique(owners).tolist():
            home = self._root / "work" / self.stage.uid / str(subtask)
            attempt = Attempt(self.stage.uid, subtask, _GENERATION, CheckpointId(0), new_attempt_id(), home)
            forked = snapshot.working_copy(self._storage, attempt, None)
            backend = ROCKSDB.open(forked.db, _OPTIONS)
            try:
                mine = np.flatnonzero(owners == subtask)
                own = [column.take(pa.array(mine)) for column in columns]
                instances_of.write(backend, fixed, own, groups[mine], [instances[row] for row in mine])
                files = snapshot.take(attempt, backend)
            finally:
                backend.close()
            bases[subtask] = snapshot.upload(self._storage, attempt, snapshot.prepare(attempt, forked, files), None)
        return bases

    # -- results out

    def _rows(self, acks: Sequence[Ack], output: str) -> pl.DataFrame:
        if self._shapes is None:
            return pl.DataFrame()
        files = [file for ack in acks for file in ack.files if file.kind != STATE and file.name == output]
        return _frame(
            [pq.ParquetFile(self._storage.full(file.path)).read() for file in files], self._shapes.outputs[output]
        )

    def _opened(self) -> Iterator[tuple[range, Backend]]:
        """A copy of each subtask's newest snapshot, open, with its key groups."""
        for subtask, base in sorted(self._last.bases.items()):
            with tempfile.TemporaryDirectory(dir=self._root) as copy:
                snapshot.fetch(self._storage, base, Path(copy))
                backend = ROCKSDB.open(Path(copy), _OPTIONS)
                try:
                    yield group_range(subtask, self._parallelism, self._max_parallelism), backend
                finally:
                    backend.close()

    def _states(self) -> dict[Any, State]:
        fixed = self._shapes
        if fixed is None:
            return dict(self._initial)
        if self._read is None:
            made = self.stage.state or _class_of(self.stage.uid, fixed.state)
            found: dict[Any, State] = {}
            expiry = expiry_of(fixed.state, self.stage.ttl, to_micros(self._last.now), self._last.forgotten)
            for groups, backend in self._opened():
                found.update(instances_of.read(backend, fixed, groups, made, expiry))
            self._read = found
        return self._read


def _utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@functools.cache
def _class_of(name: str, schema: StateSchema) -> type[State]:
    """A State class with the fields of an operator's own state."""
    made: Any = type(name, (State,), {})
    made.__weir_schema__ = schema
    for field in schema.fields:
        setattr(made, field.name, field.default)
    return made


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
    """A pipeline between two epochs. stages: its stages' runs by uid, with state, late rows and acks."""

    def __init__(
        self,
        pipeline: Pipeline,
        parallelism: int,
        batch_rows: int,
        schema: pa.Schema | Mapping[str, pa.DataType] | None,
    ) -> None:
        for stage in pipeline.stages:
            if stage.transform is not None:
                raise PipelineError(
                    f"The transform of {stage.uid} needs Spark.",
                    next="Test the pipeline's stages one by one with testing.run, whose rows are those after the transform.",
                )
        self.pipeline = pipeline
        self.stages = {
            stage.uid: StageRun(
                stage,
                {},
                parallelism,
                pipeline.max_parallelism,
                batch_rows,
                schema if isinstance(stage.input, FileSource) else None,
            )
            for stage in pipeline.stages
        }
        self._tables: dict[str, list[pl.DataFrame]] = {sink.table: [] for sink in pipeline.sinks}

    def epoch(
        self, rows: Rows | Mapping[str, Rows] = (), *, now: datetime | None = None, drain: bool = False
    ) -> dict[str, pl.DataFrame]:
        """Run one epoch through all stages and return each table's new rows. If a stage declines it, no stage moves on.

        rows: the source's, or by source name where the pipeline has several.
        """
        done: dict[str, _Epoch] = {}
        handed: dict[str, pl.DataFrame] = {}
        tables: dict[str, pl.DataFrame] = {}
        by_source = self._by_source(rows)
        for stage in self.pipeline.stages:
            one = self.stages[stage.uid]
            if isinstance(stage.input, FileSource):
                table = one._table(by_source.get(stage.input.name, ()))
                arriving = one._newest(table)
            else:
                upstream = stage.input.uid
                table = one._table(handed[upstream]) if self.stages[upstream]._shapes else None
                arriving = done[upstream].watermark
            known = watermarks.before_job(stage, one._last.watermark, arriving)
            done[stage.uid] = one._run(table, now, drain, known, None)
            handed[stage.uid] = one._rows(done[stage.uid].acks, MAIN)
            if stage.sink is not None:
                tables[stage.sink.table] = handed[stage.uid]
            if stage.late is not None:
                tables[stage.late.table] = one._rows(done[stage.uid].acks, LATE)
        for uid, epoch in done.items():
            self.stages[uid]._commit(epoch)
        for name, frame in tables.items():
            self._tables[name].append(frame)
        return tables

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        """Every sink's table with the rows of all epochs so far."""
        return {name: stacked(parts) for name, parts in self._tables.items()}

    @property
    def states(self) -> dict[str, Mapping[Any, Any]]:
        """State by key of each stage that is not a window, by uid."""
        return {uid: one.state for uid, one in self.stages.items() if one.stage.window is None}

    def _by_source(self, rows: Rows | Mapping[str, Rows]) -> Mapping[str, Rows]:
        names = [source.name for source in self.pipeline.sources]
        if not isinstance(rows, Mapping):
            if len(names) > 1:
                raise ValueError(
                    f"{self.pipeline.name} has several sources; give rows by source name: {', '.join(names)}"
                )
            return {names[0]: rows}
        strange = sorted(rows.keys() - set(names))
        if strange:
            raise ValueError(f"{self.pipeline.name} has no source {strange[0]!r}; its sources are: {', '.join(names)}")
        return rows


# -- rows


def _scratch() -> str | None:
    """Memory where there is plenty: RocksDB syncs files when it opens, which takes a disk twenty times as long."""
    memory = Path("/dev/shm")
    if "TMPDIR" not in os.environ and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOMY:
        return str(memory)
    return None


def table_of(rows: Rows, schema: pa.Schema | None) -> pa.Table | None:
    """Rows as a canonical table, of `schema` if there is one; None if there are neither rows nor columns."""
    if isinstance(rows, list | tuple):
        if not rows:
            return None
        names = list(dict.fromkeys(name for row in rows for name in row))
        _refuse_strange(names, schema)
        fields = list(schema) if schema is not None else [pa.field(name, pa.null()) for name in names]
        columns = {}
        for field in fields:
            values = [row.get(field.name) for row in rows]
            try:
                columns[field.name] = pa.array(values, None if schema is None else field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise _misfit(field.name, str(error)) from error
        return frames.canonical(pa.table(columns))
    table = frames.arrow(rows)
    if schema is None or not table.num_columns:
        return table if table.num_columns else None
    _refuse_strange(table.column_names, schema)
    for field in schema:
        if field.name not in table.column_names:
            raise _misfit(field.name, "it is missing")
        if table.schema.field(field.name).type != field.type:
            try:
                table.column(field.name).cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise _misfit(field.name, str(error)) from error
    return table.select(schema.names).cast(schema)


def _refuse_strange(names: Sequence[str], schema: pa.Schema | None) -> None:
    strange = [name for name in names if schema is not None and name not in schema.names]
    if strange:
        assert schema is not None
        raise InputError(
            f"The rows have a column {strange[0]!r}, which the input has not.",
            next=f"Its columns are: {', '.join(schema.names)}.",
        )


def _misfit(column: str, how: str) -> InputError:
    return InputError(
        f"The column {column!r} of the rows does not fit: {how}",
        next="Give rows of one shape, or say which it is with schema=; without that, the first rows of a run do.",
    )


def canonical(schema: pa.Schema) -> pa.Schema:
    return frames.canonical(schema.empty_table()).schema


def _frame(tables: Sequence[pa.Table], schema: pa.Schema) -> pl.DataFrame:
    return pl.from_arrow(pa.concat_tables([schema.empty_table(), *tables]))  # type: ignore[return-value]


def stacked(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    known = [part for part in parts if part.width]
    return pl.concat(known) if known else pl.DataFrame()
