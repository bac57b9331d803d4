"""Event-time windows of one size: tumbling, and hopping where they overlap.

Batches are reduced as they come, to a row for each key and run of windows that a row falls into; at the barrier that is
handed out to the windows, merged into state once, and what the watermark has closed is read out again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.runtime.definition import Stage, Window
from pipelines.runtime.operators.base import (
    LATE,
    MAIN,
    Progress,
    Shapes,
    check_event_time,
    check_storable,
    event_times,
    refuse_clash,
    state_of,
)
from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.keyed.keyed_state import GROUP, WINDOW_STATE
from state_ops.rows import key_aggregation
from state_ops.rows.row_store import Rows
from state_ops.schema.key_codec import decode_keys, encode_int64, group_prefix
from state_ops.schema.row_codec import decode_rows
from state_ops.schema.state_schema import StateSchema

END, START = "window_end", "window_start"
BOUND = pa.timestamp("us", tz="UTC")
# The first end and the number of a row's windows, then one row's end; the input may have columns named like the
# output's.
_FIRST, _NUMBER, _WINDOW = "__weir_first", "__weir_number", "__weir_window"
_PARTIAL_ROWS = 500_000
_FIRE_ROWS = 50_000


class WindowOperator:
    """State: one row per (window_end, key), ordered by window_end inside a key group, so that the windows that a
    watermark closes are one range of the key group."""

    def __init__(
        self, stage: Stage, window: Window, shapes: Shapes, backend: Backend, progress: Progress, groups: range
    ) -> None:
        self._stage, self._window, self._shapes, self._backend = stage, window, shapes, backend
        self._progress, self._groups, self._where = progress, groups, f"window {stage.uid}"
        columns = [GROUP, *stage.key, *(column for _, agg in window.aggregates for column in agg.columns)]
        self._columns = list(dict.fromkeys(columns))
        by = [GROUP, _FIRST, _NUMBER, *stage.key]
        self._rows = Rows(backend, shapes.state, pa.schema([(_WINDOW, pa.int64()), *shapes.keys]), WINDOW_STATE)
        self._partials = key_aggregation.Partials(window.aggregates, by, self._where, _PARTIAL_ROWS)
        self.rows_late = self.rows_deferred = 0
        self.closed_upto: int | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        window = self._window
        times = event_times(rows, window.on, self._where)
        last = _floor(times, window) + window.size
        first = _floor(times - window.size, window) + window.every + window.size
        frame = frames.from_arrow(rows.select(self._columns))
        frame = frame.with_columns(
            pl.Series(_FIRST, first), pl.Series(_NUMBER, ((last - first) // window.every + 1).astype(np.int32))
        )
        if self._progress.before is not None:
            late = last <= self._progress.before  # of overlapping windows, the last one to close counts
            if late.any():
                self.rows_late += int(late.sum())
                # In Arrow, as they came: Polars gives maps, times and others back with another type.
                shape = self._shapes.outputs[LATE]
                yield LATE, rows.filter(pa.array(late)).select(shape.names).cast(shape)
                frame = frame.filter(pl.Series(~late))
        if len(frame):
            self._partials.add(frame)
            if self._partials.full:
                self._fold()

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        if len(self._partials):
            self._fold()
        self._rows.barrier()
        return iter(())

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        yield from self.pause()
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

    def _fold(self) -> None:
        """Merge what has gathered into the state of the windows that are open."""
        most = max(1, _PARTIAL_ROWS * self._window.every // self._window.size)  # a row may fall into very many windows
        for part in key_aggregation.parts(self._partials.take()):
            for some in part.iter_slices(most):
                self._merge(_spread(some, self._window.every))

    def _merge(self, fresh: pl.DataFrame) -> None:
        by, aggregates = [GROUP, _WINDOW, *self._stage.key], self._window.aggregates
        if self._progress.before is not None:
            fresh = fresh.filter(pl.col(_WINDOW) > self._progress.before)
        if self._window.every < self._window.size:
            fresh = key_aggregation.recombined(aggregates, fresh, by, self._where)
        old, _ = self._rows.get(fresh)
        self._rows.put(fresh, key_aggregation.merged(aggregates, old, fresh, self._where), np.ones(len(fresh), bool))

    def _fire(self, keys: list[bytes], values: list[bytes]) -> pa.Table:
        _, columns = decode_keys(keys, [pa.int64(), *self._shapes.keys.types])
        state = decode_rows(self._shapes.state, values)
        frame = frames.from_arrow(
            pa.table([*columns, *state.columns], names=[END, *self._shapes.keys.names, *state.column_names])
        )
        self._backend.write([], keys)
        newest = frame[END].max()
        self.closed_upto = newest if self.closed_upto is None else max(self.closed_upto, newest)  # type: ignore[assignment,type-var]
        return frames.arrow(_results(self._stage, self._window, frame)).cast(self._shapes.outputs[MAIN])


def _floor(times: np.ndarray, window: Window) -> np.ndarray:
    """The start of the newest window that has begun."""
    return (times - window.offset) // window.every * window.every + window.offset


def _spread(partials: pl.DataFrame, every: int) -> pl.DataFrame:
    """Each row once for every one of its windows."""
    number = partials[_NUMBER].to_numpy()
    rows = np.repeat(np.arange(len(number)), number)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(number) - number, number)
    spread = partials[rows] if len(rows) != len(number) else partials
    return spread.with_columns((pl.col(_FIRST) + pl.Series(nth) * every).alias(_WINDOW)).drop(_FIRST, _NUMBER)


def open_windows(
    stage: Stage, window: Window, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range
) -> Iterator[pa.Table]:
    """The windows that are still open in some key groups: key columns, window_start, window_end, aggregates so far."""
    for group in groups:
        entries = list(backend.scan(group_prefix(group, WINDOW_STATE), group_prefix(group, WINDOW_STATE + 1)))
        if entries:
            _, columns = decode_keys([key for key, _ in entries], [pa.int64(), *keys.types])
            rows = decode_rows(state, [value for _, value in entries])
            table = pa.table([*columns, *rows.columns], names=[END, *keys.names, *rows.column_names])
            yield _shown(stage, window, frames.from_arrow(table))


def open_windows_schema(stage: Stage, window: Window, keys: pa.Schema, state: StateSchema) -> pa.Schema:
    """The columns of `open_windows`."""
    fields = [pa.field(END, pa.int64()), *keys, *state.arrow]
    empty = pa.table([pa.array([], field.type) for field in fields], names=[field.name for field in fields])
    return _shown(stage, window, frames.from_arrow(empty)).schema


def _shown(stage: Stage, window: Window, frame: pl.DataFrame) -> pa.Table:
    shown = _results(stage, window, frame)
    return frames.arrow(shown.with_columns(pl.col(START, END).cast(pl.Datetime("us", "UTC"))))


def window_shapes(stage: Stage, window: Window, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """The output: key columns, window_start, window_end, the aggregates; late rows keep their columns."""
    where = f"window {stage.uid}"
    refuse_clash(stage, {START, END}, "what a window adds")
    check_event_time(rows, window.on, where)
    state = state_of(window.aggregates, rows, where)
    refuse_clash(stage, {field.name for field in state.fields}, "a field of its state")
    empty = frames.from_arrow(
        pa.table([pa.array([], field.type) for field in keys] + [pa.array([], pa.int64())], names=[*keys.names, END])
    )
    empty = pl.concat([empty, frames.from_arrow(state.arrow.empty_table())], how="horizontal")
    inferred = frames.arrow(_results(stage, window, empty)).schema
    output = pa.schema([(field.name, BOUND if field.name in (START, END) else field.type) for field in inferred])
    check_storable(output, where, "Cast the column that it is made from in transform=")
    if window.late is not None:
        check_storable(rows, f"{where}, late={window.late.table}", "Cast or drop it in transform=")
    return Shapes(keys, state, {MAIN: output, LATE: rows})


def _results(stage: Stage, window: Window, frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort([END, *stage.key]).select(
        *stage.key,
        (pl.col(END) - window.size).alias(START),
        pl.col(END),
        *[agg.result(name) for name, agg in window.aggregates],
    )
