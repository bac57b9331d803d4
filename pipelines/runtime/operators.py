"""What happens to the rows of one subtask between two barriers: a stage's function, or windows.

An operator gets the subtask's batches one by one, then the barrier, and returns tables by output name. It runs on an
executor, and with nothing changed in `pipelines.testing`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.runtime.definition import Epoch, Stage, Window
from state_ops import frames
from state_ops.backends.base import Backend
from state_ops.backends.memory import MemoryBackend
from state_ops.checkpoint import from_micros
from state_ops.codec import decode_rows, encode_rows
from state_ops.errors import InputError, PipelineError, StageError, WeirError
from state_ops.key_groups import group_range
from state_ops.keys import check_key_type, decode_keys, encode_int64, encode_keys, group_prefix
from state_ops.schema import StateSchema
from state_ops.state import GROUP, WINDOW_STATE, ValueState, rows_of

MAIN, LATE = "main", "late"
_END, _START = "window_end", "window_start"
_WINDOW = "__weir_window"  # a row's window_end; the input may have a column of that name, from windows upstream
_OLD, _NEW = "__old_", "__new_"
_FIRE_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class Progress:
    """Where event time stands for a stage in this epoch, in microseconds since 1970 UTC.

    before: watermark after the previous epoch, which judges lateness. now: the one known for this epoch, which closes
    windows. drain: close every window.
    """

    before: int | None
    now: int | None
    drain: bool


class Operator(Protocol):
    """One subtask's operator for one epoch."""

    rows_late: int
    closed_upto: int | None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """Apply one batch: canonical columns plus the key group; yields (output name, rows)."""
        ...

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        """The epoch's rows have all been applied; yields what that makes due."""
        ...


@dataclass(frozen=True, slots=True)
class Shapes:
    """The schemas of a stage, fixed before its first row. keys: key columns; outputs: by output name."""

    keys: pa.Schema
    state: StateSchema
    outputs: dict[str, pa.Schema]


def shapes(stage: Stage, rows: pa.Schema) -> Shapes:
    """A stage's schemas from its input's; the function is tried on an empty table. PipelineError if they do not fit."""
    where = f"stage {stage.uid}"
    names = [*stage.key, *stage.order_by, *([stage.window.on] if stage.window else [])]
    for name in names:
        if name not in rows.names:
            raise PipelineError(
                f"The input of {stage.uid} has no column {name!r}.",
                where=where,
                next=f"Its columns are: {', '.join(rows.names)}.",
            )
    keys = pa.schema([rows.field(name) for name in stage.key])
    for field in keys:
        check_key_type(field.name, field.type)
    if stage.window is not None:
        return _window_shapes(stage, stage.window, rows, keys)
    assert stage.state is not None
    state = StateSchema.of(stage.state)
    _refuse_clash(stage, {field.name for field in state.fields}, "a field of its state")
    epoch = Epoch(id=0, now=from_micros(0), watermark=None, subtask=0, parallelism=1)  # type: ignore[arg-type]
    empty = rows.empty_table().append_column(GROUP, pa.array([], pa.int32()))
    trial = FunctionOperator(stage, keys, state, MemoryBackend(), epoch, None)
    try:
        produced = [table for _, table in trial.process(empty)]
    except StageError as error:
        error.where = f"{where}, called with no rows to learn its output's columns, before the first epoch"
        error.next = "Correct the function; it must take an empty frame too. Nothing was started."
        raise
    output = produced[0].schema if produced else pa.schema([])
    _check_storable(output, where, "Cast it in the function")
    return Shapes(keys, state, {MAIN: output})


class FunctionOperator:
    """A stage's function over batches. output: the schema its rows must have; None while that is being found out."""

    def __init__(
        self,
        stage: Stage,
        keys: pa.Schema,
        state: StateSchema,
        backend: Backend,
        epoch: Epoch,
        output: pa.Schema | None,
    ) -> None:
        assert stage.function is not None
        self._stage, self._keys, self._epoch, self._output = stage, keys, epoch, output
        self._convert = frames.converter(stage.function)
        self._where = f"stage {stage.uid}"
        self._state = ValueState(backend, state, keys, self._where, self._convert)
        self.rows_late = 0
        self.closed_upto: int | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        self._state.begin(frames.from_arrow(rows.select([*self._keys.names, GROUP])))
        assert self._stage.function is not None
        try:
            result = self._stage.function(self._convert(rows.drop_columns([GROUP])), self._state, self._epoch)
        except WeirError:
            raise
        except Exception as error:
            raise self._authors(error, rows) from error
        self._state.flush()
        if result is not None:
            yield MAIN, self._fitted(frames.arrow(result, self._where))

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        return iter(())

    def _authors(self, error: Exception, rows: pa.Table) -> StageError:
        # The author's own frames only: what lies between Spark and the function is noise to who wrote it.
        trace = sys.exc_info()[2]
        shown = trace.tb_next if trace is not None and trace.tb_next is not None else trace
        sample = rows.select(self._keys.names).slice(0, 3).to_pylist()
        return StageError(
            f"The function of the stage {self._stage.uid} raised {type(error).__name__}: {error}",
            where=f"{self._where}, epoch {self._epoch.id}, subtask {self._epoch.subtask}, first keys of the batch: {sample}",
            next="Correct the function; the epoch was declined, and state, offsets and tables are as they were.",
            traceback="".join(traceback.format_exception(type(error), error, shown)),
        )

    def _fitted(self, rows: pa.Table) -> pa.Table:
        if self._output is None or rows.schema.equals(self._output):
            return rows
        problems = [f"{field.name} is missing" for field in self._output if field.name not in rows.column_names]
        problems += [f"{name} is new" for name in rows.column_names if name not in self._output.names]
        if not problems:
            try:
                return rows.select(self._output.names).cast(self._output)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                problems = [str(error)]
        raise StageError(
            f"The stage {self._stage.uid} returned other columns than for an empty input: {'; '.join(problems)}.",
            where=self._where,
            next="Return the same columns and types whatever the rows are.",
        )


class WindowOperator:
    """Tumbling windows. State: one row per (window_end, key), ordered by window_end inside a key group, so that the
    windows that a watermark closes are one range of the key group."""

    def __init__(self, stage: Stage, shapes: Shapes, backend: Backend, progress: Progress, groups: range) -> None:
        assert stage.window is not None
        self._stage, self._window, self._shapes, self._backend = stage, stage.window, shapes, backend
        self._progress, self._groups = progress, groups
        self.rows_late = 0
        self.closed_upto: int | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        window = self._window
        if rows.column(window.on).null_count:
            raise InputError(
                f"{rows.column(window.on).null_count} rows have no event time in {window.on!r}.",
                where=f"window {self._stage.uid}",
                next=f'Leave them out and count them: where="{window.on} IS NOT NULL".',
            )
        columns = [GROUP, *self._stage.key, window.on, *(agg.column for _, agg in window.aggregates if agg.column)]
        frame = frames.from_arrow(rows.select(list(dict.fromkeys(columns))))
        ends = (_micros(frame[window.on]) // window.size + 1) * window.size
        frame = frame.with_columns(ends.alias(_WINDOW))
        if self._progress.before is not None:
            late = frame[_WINDOW] <= self._progress.before
            if late.any():
                self.rows_late += int(late.sum())
                # In Arrow, as they came: Polars gives maps, times and others back with another type.
                shape = self._shapes.outputs[LATE]
                yield LATE, rows.filter(late.to_arrow()).select(shape.names).cast(shape)
                frame = frame.filter(~late)
        if len(frame):
            self._merge(frame)

    def _merge(self, frame: pl.DataFrame) -> None:
        aggregates = self._window.aggregates
        partials = [expr for name, agg in aggregates for expr in agg.partial(name, frame.schema)]
        fresh = frame.group_by([GROUP, _WINDOW, *self._stage.key], maintain_order=True).agg(partials)
        encoded = self._encoded(fresh)
        old, _ = rows_of(self._backend, self._shapes.state, encoded)
        names = self._shapes.state.arrow.names
        both = pl.concat(
            [old.select(pl.all().name.prefix(_OLD)), fresh.select(pl.col(names).name.prefix(_NEW))], how="horizontal"
        )
        merged = both.select([expr for name, agg in aggregates for expr in agg.merge(name, _OLD, _NEW)])
        table = frames.arrow(merged.select(names)).cast(self._shapes.state.arrow)
        self._backend.write(list(zip(encoded, encode_rows(self._shapes.state, table), strict=True)))

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        now = self._progress.now
        if now is None and not self._progress.drain:
            return
        keys: list[bytes] = []
        values: list[bytes] = []
        for group in self._groups:
            start = group_prefix(group, WINDOW_STATE)
            end = group_prefix(group, WINDOW_STATE + 1) if self._progress.drain else start + encode_int64(now + 1)  # type: ignore[operator]
            for key, value in self._backend.scan(start, end):
                keys.append(key)
                values.append(value)
            if len(keys) >= _FIRE_ROWS:
                yield MAIN, self._fire(keys, values)
                keys, values = [], []
        if keys:
            yield MAIN, self._fire(keys, values)

    def _fire(self, keys: list[bytes], values: list[bytes]) -> pa.Table:
        _, columns = decode_keys(keys, [pa.int64(), *self._shapes.keys.types])
        state = decode_rows(self._shapes.state, values)
        frame = frames.from_arrow(
            pa.table([*columns, *state.columns], names=[_END, *self._shapes.keys.names, *state.column_names])
        )
        self._backend.write([], keys)
        newest = frame[_END].max()
        self.closed_upto = newest if self.closed_upto is None else max(self.closed_upto, newest)  # type: ignore[assignment,type-var]
        return _windows_out(self._stage, self._window, frame, self._shapes.outputs[MAIN])

    def _encoded(self, frame: pl.DataFrame) -> list[bytes]:
        keys = frames.arrow(frame.select(self._stage.key)).cast(self._shapes.keys)
        ends = frames.arrow(frame.select(_WINDOW)).column(0)
        return encode_keys([ends, *keys.columns], frame[GROUP].to_numpy().astype(np.uint16), WINDOW_STATE)


def build(
    stage: Stage, fixed: Shapes, backend: Backend, epoch: Epoch, progress: Progress, max_parallelism: int
) -> Operator:
    """The operator of one subtask for one epoch."""
    if stage.window is not None:
        groups = group_range(epoch.subtask, epoch.parallelism, max_parallelism)
        return WindowOperator(stage, fixed, backend, progress, groups)
    return FunctionOperator(stage, fixed.keys, fixed.state, backend, epoch, fixed.outputs[MAIN])


def open_windows(
    stage: Stage, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range
) -> Iterator[pa.Table]:
    """The windows that are still open in some key groups: key columns, window_start, window_end, aggregates so far."""
    assert stage.window is not None
    for group in groups:
        entries = list(backend.scan(group_prefix(group, WINDOW_STATE), group_prefix(group, WINDOW_STATE + 1)))
        if entries:
            _, columns = decode_keys([key for key, _ in entries], [pa.int64(), *keys.types])
            rows = decode_rows(state, [value for _, value in entries])
            table = pa.table([*columns, *rows.columns], names=[_END, *keys.names, *rows.column_names])
            frame = _results(stage, stage.window, frames.from_arrow(table))
            yield frames.arrow(frame.with_columns(pl.col(_START, _END).cast(pl.Datetime("us", "UTC"))))


def _window_shapes(stage: Stage, window: Window, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    _refuse_clash(stage, {_START, _END}, "what a window adds")
    on = rows.field(window.on).type
    if not pa.types.is_timestamp(on):
        raise PipelineError(
            f"The column {window.on!r} is {on}, not a timestamp.",
            where=f"window {stage.uid}",
            next="Name a timestamp column.",
        )
    fields = []
    for name, agg in window.aggregates:
        agg.check(name, rows, f"window {stage.uid}")
        fields += agg.parts(name, rows)
    where = f"window {stage.uid}"
    try:
        state = StateSchema.build(fields)
    except PipelineError as error:
        raise PipelineError(error.what, where=where, next="Leave it out, or cast its column in transform=.") from error
    empty = frames.from_arrow(
        pa.table([pa.array([], field.type) for field in keys] + [pa.array([], pa.int64())], names=[*keys.names, _END])
    )
    empty = pl.concat([empty, frames.from_arrow(state.arrow.empty_table())], how="horizontal")
    inferred = frames.arrow(_results(stage, window, empty)).schema
    bounds = pa.timestamp("us", tz="UTC")
    output = pa.schema([(field.name, bounds if field.name in (_START, _END) else field.type) for field in inferred])
    _check_storable(output, where, "Cast the column that it is made from in transform=")
    if window.late is not None:
        _check_storable(rows, f"{where}, late={window.late.table}", "Cast or drop it in transform=")
    return Shapes(keys, state, {MAIN: output, LATE: rows})


def _check_storable(schema: pa.Schema, where: str, remedy: str) -> None:
    """Refuse columns that no Delta table can have. remedy: where the author can do something about one."""
    for field in schema:
        kind = frames.unstorable(field.type)
        if kind is None:
            continue
        if pa.types.is_null(kind):
            raise PipelineError(
                f"The type of the output column {field.name!r} cannot be told from an empty input.",
                where=where,
                next=f"{remedy}, e.g. pl.lit(None, pl.String).",
            )
        raise PipelineError(
            f"The output column {field.name!r} is {field.type}; a Delta table cannot have that{_part(kind, field.type)}.",
            where=where,
            next=f"{remedy}: {_instead(kind)}.",
        )


def _part(kind: pa.DataType, whole: pa.DataType) -> str:
    return "" if kind == whole else f", for the {kind} in it"


def _instead(kind: pa.DataType) -> str:
    if pa.types.is_float16(kind):
        return "as Float32"
    if pa.types.is_duration(kind):
        return "as a number of microseconds, e.g. pl.col(...).dt.total_microseconds()"
    if pa.types.is_time(kind):
        return "as text, or as a number of microseconds since midnight"
    if pa.types.is_timestamp(kind):
        return "with the time zone UTC, since it stands in a map"
    if pa.types.is_decimal(kind):
        return "as a decimal of at most 38 digits, with a scale from 0 to its precision"
    return "as a number, a text, a timestamp, or lists, maps and structs of such"


def _refuse_clash(stage: Stage, taken: set[str], by: str) -> None:
    clash = [name for name in stage.key if name in taken]
    if clash:
        raise PipelineError(
            f"{clash[0]!r} is a key column of {stage.uid} and the name of {by}.",
            where=f"stage {stage.uid}",
            next="Rename one of the two: rows of keys and values have both.",
        )


def _results(stage: Stage, window: Window, frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort([_END, *stage.key]).select(
        *stage.key,
        (pl.col(_END) - window.size).alias(_START),
        pl.col(_END),
        *[agg.result(name) for name, agg in window.aggregates],
    )


def _windows_out(stage: Stage, window: Window, frame: pl.DataFrame, output: pa.Schema) -> pa.Table:
    return frames.arrow(_results(stage, window, frame)).cast(output)


def _micros(column: pl.Series) -> pl.Series:
    return column.dt.epoch("us")


def event_time_of(rows: pa.Table, column: str) -> int | None:
    """The newest event time in microseconds since 1970 UTC; None if there is none."""
    newest: Any = pl.Series(pl.from_arrow(rows.column(column))).dt.epoch("us").max()
    return newest
