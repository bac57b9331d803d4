"""A stage's function over batches, with state at its side, and the function that its timers call."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.casts import cast
from state_ops.backends.memory import MemoryBackend
from state_ops.errors import PipelineError, StageError, WeirError
from state_ops.keyed import ttl
from state_ops.keyed.keyed_state import GROUP, KeyedState, check_names, sorts
from state_ops.keyed.timers import AT, DOMAIN, EVENT, MOMENT, PROCESSING, DueTimers, TimerState, are_set, waves
from state_ops.moments import from_micros, to_micros
from state_ops.rows import time_index
from state_ops.schema.descriptors import PROCESSING_TIMERS, collections_of
from state_ops.schema.state_schema import StateSchema
from weir.definition import MAIN, ROW, Epoch, Progress, Shapes, Stage, Subtask, is_timed
from weir.operators.base import check_storable, refuse_clash
from weir.operators.functions import Function
from weir.operators.functions.per_key import PerKey
from weir.operators.functions.returned import returned

_FIRE_ROWS = 50_000
_SWEEP_ENTRIES = 10_000
_NEVER = -(1 << 63)


def function_shapes(stage: Stage, function: Function, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """Return the schemas of a stage with a function, which is tried on an empty table, as its `on_timer` is."""
    where = f"stage {stage.uid}"
    assert function.state is not None, "its stage has a key"
    state = StateSchema.of(function.state)
    refuse_clash(stage, {field.name for field in state.fields}, "a field of its state")
    collections = collections_of(function.state)
    check_names(collections, keys.names, where)
    if function.on_timer is not None:
        refuse_clash(stage, {AT, DOMAIN}, "a column of the timers that fire")
    shapes = Shapes(keys, state, {}, collections)
    shapes = shapes if function.ttl is None else shapes.with_stamps
    trial = FunctionOperator(function, trial_of(stage, shapes))
    outputs: dict[str, pa.Schema] = {}
    with trying(stage):
        none = rows.empty_table().append_column(GROUP, pa.array([], pa.int32()))
        for name, table in trial.process(none):
            fitted(stage, table, outputs.setdefault(name, table.schema), of=name)
        if function.on_timer is not None:
            for name, table in trial.fire(frames.from_arrow(_no_timers(keys)), EVENT):
                fitted(stage, table, outputs.setdefault(name, table.schema), function.on_timer.__name__, name)
    return replace(shapes, outputs=known_outputs(stage, outputs))


_TRIAL = Epoch(id=0, now=from_micros(0), watermark=None, subtask=0, parallelism=1)  # type: ignore[arg-type]
"""The epoch in which a function is tried on no rows."""


def trial_of(stage: Stage, shapes: Shapes) -> Subtask:
    """Return the subtask on which a function is tried on no rows."""
    return Subtask(stage, shapes, _TRIAL, Progress(None, None, False), state=MemoryBackend())


@contextmanager
def trying(stage: Stage) -> Iterator[None]:
    """Say of what a function raises that it was called with no rows."""
    try:
        yield
    except StageError as error:
        error.where = f"stage {stage.uid}, called with no rows to learn its output's columns, before the first epoch"
        error.next = "Correct the function; it must take an empty frame too. Nothing was started."
        raise


def _no_timers(keys: pa.Schema) -> pa.Table:
    return pa.schema([*keys, (GROUP, pa.int32()), (AT, pa.int64())]).empty_table()


class FunctionOperator:
    """A stage's function over batches. Rows have the schema of the shapes' output, if that is known already."""

    def __init__(self, function: Function, subtask: Subtask) -> None:
        stage, shapes, backend, epoch = subtask.stage, subtask.shapes, subtask.backend, subtask.epoch
        self._stage, self._shapes, self._backend, self._epoch = stage, shapes, backend, epoch
        self._progress, self._groups = subtask.progress, subtask.groups
        self._keys = shapes.keys
        self._where = f"stage {stage.uid}"
        self._now = to_micros(epoch.now)
        self._expiry = ttl.expiry_of(shapes.state, function.ttl, self._now, subtask.forgotten)
        self._function, self._on_timer = function.function, function.on_timer
        if function.per_key:
            per_key = PerKey(function, subtask, self._expiry)
            self._function, self._on_timer = per_key.process, per_key.fire
        self._convert = frames.converter(self._function)
        self._timers = TimerState(
            backend,
            self._keys,
            self._where,
            self._now,
            epoch.id,
            allowed=function.on_timer is not None,
            event_time=is_timed(stage),
        )
        self._state = KeyedState(
            backend,
            shapes.state,
            self._keys,
            self._where,
            lambda table: self._convert(table),
            self._expiry,
            collections=shapes.collections,
            timers=self._timers,
            residence=subtask.resident,
        )
        self.rows_late = self.rows_deferred = 0
        self.closed_upto: int | None = None
        self.swept = subtask.swept
        self.has_timers: bool | None = None
        self.due: int | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        self._state.begin(frames.from_arrow(rows.select([*self._keys.names, GROUP])))
        yield from self._called(self._function, rows.drop_columns([GROUP]))

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        self._end()
        return iter(())

    def _end(self) -> None:
        self._state.barrier()
        self.has_timers = self._stage.on_timer is not None and are_set(self._backend, self._groups)
        if self.has_timers:
            self.due = time_index.earliest(self._backend, self._groups, PROCESSING_TIMERS, self._now)

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        if self._stage.on_timer is not None:
            if self._progress.drain or self._progress.now is not None:
                yield from self._fire_due(EVENT, self._progress.now, self._progress.drain)
            yield from self._fire_due(PROCESSING, self._now)
        self._end()
        if self._expiry is not None:
            kept_sorts = sorts(self._shapes.state, self._shapes.collections)
            position = bytes.fromhex(self.swept or "")
            after = ttl.sweep(self._backend, kept_sorts, self._groups, self._expiry, position, _SWEEP_ENTRIES)
            self.swept = None if after is None else after.hex()

    def _fire_due(self, domain: str, clock: int | None, drain: bool = False) -> Iterator[tuple[str, pa.Table]]:
        """Fire what a clock has reached; with `drain` all that was set before. See docs/adr/0014-timers.md for what
        fires when."""
        upto = None if drain else clock
        due = DueTimers(self._backend, self._keys, domain, self._groups, upto, self._epoch.id, _FIRE_ROWS)
        while len(piece := due.piece()):
            for wave in waves(piece, self._keys.names):
                due.fired(wave)
                yield from self.fire(wave, domain, _NEVER if clock is None else clock)
                if self._timers.disturbed:  # the author set or cleared what is due: look again
                    break

    def fire(self, timers: pl.DataFrame, domain: str, clock: int = _NEVER) -> Iterator[tuple[str, pa.Table]]:
        """Call `on_timer`.

        Args:
            timers: Key columns, key group and `at` (microseconds), a key at most once.
            clock: What is due.
        """
        assert self._on_timer is not None
        self._state.begin(timers.select([*self._keys.names, GROUP]))
        self._timers.firing(domain, timers[AT].to_numpy(), clock)
        if domain == EVENT and len(timers):
            newest: Any = timers[AT].max()
            self.closed_upto = newest if self.closed_upto is None else max(self.closed_upto, newest)
        moments = frames.arrow(timers.select(AT)).column(0).cast(MOMENT)
        rows = frames.arrow(timers.select(self._keys.names)).cast(self._keys)
        rows = rows.append_column(AT, moments).append_column(DOMAIN, pa.array([domain] * len(timers), pa.string()))
        yield from self._called(self._on_timer, rows)

    def _called(self, function: Callable[..., Any], rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """Call the author's function with rows, write the state that it changed, and yield its rows by output."""
        self._convert = frames.converter(function)
        parts = called(self._stage, self._epoch, function, self._convert, rows, self._state)
        self._state.flush()
        yield from handed_out(self._stage, parts, self._shapes)


def called(
    stage: Stage,
    epoch: Epoch,
    function: Callable[..., Any],
    convert: Callable[[pa.Table], Any],
    rows: pa.Table,
    *state: KeyedState,
) -> Iterable[tuple[str, Any]]:
    """Call a stage's function with rows and return its rows by output.

    Raises StageError for any error of the function that is not Weir's own.

    Args:
        convert: Makes the frame of them that it wants.
        state: Of a stage with a key.
    """
    try:
        return returned(stage, function(convert(rows), *state, epoch))
    except WeirError:
        raise
    except Exception as error:
        raise authors_error(error, stage, epoch, rows) from error


def authors_error(error: Exception, stage: Stage, epoch: Epoch, rows: pa.Table) -> StageError:
    """Return the error to raise after a stage's function raised `error` for these rows."""
    # The author's own frames only: frames between Spark and the function are noise to the author.
    trace = error.__traceback__
    shown = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    while shown is not None and shown.tb_frame.f_code is returned.__code__:  # which lets a function that yields go on
        shown = shown.tb_next
    first = frames.python_rows(rows.select(stage.key).slice(0, 3)) if stage.key else None
    return StageError(
        f"The function of the stage {stage.uid} raised {type(error).__name__}: {error}",
        where=f"stage {stage.uid}, epoch {epoch.id}, subtask {epoch.subtask}"
        + (f", first keys of the batch: {first}" if first is not None else ""),
        next="Correct the function; the epoch was declined, and state, offsets and tables are as they were.",
        traceback="".join(traceback.format_exception(type(error), error, shown)),
    )


def known_outputs(stage: Stage, tried: Mapping[str, pa.Schema]) -> dict[str, pa.Schema]:
    """Return the columns of all outputs of a stage with a function. Raises PipelineError where they cannot be, or be
    told.

    Args:
        tried: As its functions returned them for no rows.
    """
    where = f"stage {stage.uid}"
    for name in stage.returned[1:]:
        if name not in tried:
            raise PipelineError(
                f"The columns of the output {name!r} of {stage.uid} cannot be told: its function returned none for it"
                " when it was called with no rows.",
                where=where,
                next=f"Return an empty frame for it then, {{{name!r}: frame}}, whatever the rows are.",
            )
    outputs = {name: tried.get(name, pa.schema([])) for name in stage.returned}
    for name, columns in outputs.items():
        check_storable(columns, where if name == MAIN else f"{where}, output {name}", "Cast it in the function")
    return outputs


def handed_out(stage: Stage, parts: Iterable[tuple[str, Any]], shapes: Shapes) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows that a stage's function returned, in the columns and types of its outputs.

    Args:
        parts: By output, as `returned` has them.
    """
    for output, part in parts:
        rows = frames.arrow(part, f"stage {stage.uid}")
        if shapes.tracked and output != MAIN and ROW in rows.column_names:  # gates look at the main output alone
            rows = rows.drop_columns([ROW])
        yield output, fitted(stage, rows, shapes.outputs.get(output), of=output)


def fitted(stage: Stage, rows: pa.Table, output: pa.Schema | None, by: str | None = None, of: str = MAIN) -> pa.Table:
    """Return a function's rows in the columns and types of `output`, or as they are while `output` is unknown.

    Args:
        by: The function's name, where it is not the stage's main one.
        of: The output's name.
    """
    if output is None or rows.schema.equals(output):
        return rows
    where = f"stage {stage.uid}"
    columns_of = "other columns" if of == MAIN else f"other columns of its output {of}"
    complaint = (
        f"{by}() of the stage {stage.uid} returned {columns_of} than its main function"
        if by
        else f"The stage {stage.uid} returned {columns_of} than for an empty input"
    )
    problems = [f"{field.name} is missing" for field in output if field.name not in rows.column_names]
    problems += [f"{name} is new" for name in rows.column_names if name not in output.names]
    if problems:
        raise StageError(
            f"{complaint}: {'; '.join(problems)}.",
            where=where,
            next="Return the same columns and types whatever the rows are.",
        )
    columns = [_in_type(rows.column(field.name), field, complaint, where) for field in output]
    return pa.Table.from_arrays(columns, schema=output)


def _in_type(column: pa.ChunkedArray, field: pa.Field, complaint: str, where: str) -> pa.ChunkedArray:
    """Return a column in the type of its field. Arrow refuses integers that a float rounds, and `cast` what Arrow would
    cut."""
    if column.type == field.type:
        return column
    what = f"{complaint}: {field.name!r} does not fit {field.type}"
    try:
        if column.null_count < len(column):
            wanted = frames.polars_type(_in_order_of(column.type, field.type))
            cast(pl.Series(pl.from_arrow(column)), wanted, what, where)
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise StageError(
            f"{what}: {error}.", where=where, next="Return the same columns and types whatever the rows are."
        ) from error


def _in_order_of(given: pa.DataType, type: pa.DataType) -> pa.DataType:
    """Return a type whose structs have their fields in the order of the given one's: Arrow goes by their names, Polars
    does not."""
    if pa.types.is_list(given) and pa.types.is_list(type):
        return pa.list_(_in_order_of(given.value_type, type.value_type))
    if not (pa.types.is_struct(given) and pa.types.is_struct(type)):
        return type
    if {field.name for field in given} != {field.name for field in type}:
        return type
    return pa.struct([(field.name, _in_order_of(field.type, type.field(field.name).type)) for field in given])
