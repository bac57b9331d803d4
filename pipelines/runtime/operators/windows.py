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
from pipelines.runtime.operators import event_time
from pipelines.runtime.operators.base import (
    MAIN,
    Progress,
    Shapes,
    check_event_time,
    event_times,
    refuse_clash,
    state_of,
)
from pipelines.runtime.operators.event_time import END, START, EventTimeOperator
from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.keyed.keyed_state import GROUP, WINDOW_STATE
from state_ops.rows import key_aggregation
from state_ops.rows.row_store import Rows
from state_ops.schema.key_codec import decode_keys, encode_int64, group_prefix
from state_ops.schema.row_codec import decode_rows
from state_ops.schema.state_schema import StateSchema

# The first end and the number of a row's windows, then one row's end; the input may have columns named like the
# output's.
_FIRST, _NUMBER, _WINDOW = "__weir_first", "__weir_number", "__weir_window"
_PARTIAL_ROWS = 500_000
_FIRE_ROWS = 50_000


class WindowOperator(EventTimeOperator):
    """State: one row per (window_end, key), ordered by window_end inside a key group, so that the windows that a
    watermark closes are one range of the key group."""

    def __init__(
        self, stage: Stage, window: Window, shapes: Shapes, backend: Backend, progress: Progress, groups: range
    ) -> None:
        super().__init__("window", stage, shapes, backend, progress, groups)
        self._window = window
        columns = [GROUP, *stage.key, *(column for _, agg in window.aggregates for column in agg.columns)]
        self._columns = list(dict.fromkeys(columns))
        by = [GROUP, _FIRST, _NUMBER, *stage.key]
        self._rows = Rows(backend, shapes.state, pa.schema([(_WINDOW, pa.int64()), *shapes.keys]), WINDOW_STATE)
        self._partials = key_aggregation.Partials(window.aggregates, by, self._where, _PARTIAL_ROWS)

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
            yield from self._late(rows, late)
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
        self._backend.write([], keys)
        rows = _decoded(self._shapes.keys, self._shapes.state, keys, values)
        return self._closed(self._window, opened(self._window, rows))


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


def _decoded(keys: pa.Schema, state: StateSchema, names: list[bytes], values: list[bytes]) -> pa.Table:
    """The rows of some entries of state: window_end, key columns, fields."""
    _, columns = decode_keys(names, [pa.int64(), *keys.types])
    return pa.table([*columns, *decode_rows(state, values).columns], schema=_columns(keys, state))


def _columns(keys: pa.Schema, state: StateSchema) -> pa.Schema:
    return pa.schema([(END, pa.int64()), *[(field.name, field.type) for field in [*keys, *state.arrow]]])


def opened(window: Window, rows: pa.Table) -> pl.DataFrame:
    """The windows in rows of state."""
    return frames.from_arrow(rows).with_columns((pl.col(END) - window.size).alias(START))


def no_windows(window: Window, keys: pa.Schema, state: StateSchema) -> pl.DataFrame:
    """The columns of `opened`."""
    return opened(window, _columns(keys, state).empty_table())


def open_windows(
    window: Window, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range
) -> Iterator[pl.DataFrame]:
    """The windows that are still open in some key groups."""
    for group in groups:
        entries = list(backend.scan(group_prefix(group, WINDOW_STATE), group_prefix(group, WINDOW_STATE + 1)))
        if entries:
            yield opened(window, _decoded(keys, state, *map(list, zip(*entries, strict=True))))


def window_shapes(stage: Stage, window: Window, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """The schemas of a stage with windows of one size."""
    where = f"window {stage.uid}"
    refuse_clash(stage, {START, END}, "what a window adds")
    check_event_time(rows, window.on, where)
    state = state_of(window.aggregates, rows, where)
    refuse_clash(stage, {field.name for field in state.fields}, "a field of its state")
    return event_time.window_shapes(stage, window, rows, keys, state, no_windows(window, keys, state))
