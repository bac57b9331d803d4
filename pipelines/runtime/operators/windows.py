"""Event-time windows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.runtime.definition import Stage, Window
from pipelines.runtime.operators.base import LATE, MAIN, Progress, Shapes, check_storable, refuse_clash, state_of
from state_ops import folding, frames
from state_ops.backends.base import Backend
from state_ops.codec import decode_rows
from state_ops.errors import InputError, PipelineError
from state_ops.keys import decode_keys, encode_int64, encode_keys, group_prefix
from state_ops.schema import StateSchema
from state_ops.state import GROUP, WINDOW_STATE

_END, _START = "window_end", "window_start"
_WINDOW = "__weir_window"  # a row's window_end; the input may have a column of that name, from windows upstream
_FIRE_ROWS = 50_000


class WindowOperator:
    """Tumbling windows. State: one row per (window_end, key), ordered by window_end inside a key group, so that the
    windows that a watermark closes are one range of the key group."""

    def __init__(self, stage: Stage, shapes: Shapes, backend: Backend, progress: Progress, groups: range) -> None:
        assert stage.window is not None
        self._stage, self._window, self._shapes, self._backend = stage, stage.window, shapes, backend
        self._progress, self._groups, self._where = progress, groups, f"window {stage.uid}"
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
        by = [GROUP, _WINDOW, *self._stage.key]
        fresh = folding.partials(self._window.aggregates, frame, by, self._where).sort(by)
        folding.folded(
            self._backend, self._shapes.state, self._window.aggregates, self._encoded(fresh), fresh, self._where
        )

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


def window_shapes(stage: Stage, window: Window, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    refuse_clash(stage, {_START, _END}, "what a window adds")
    on = rows.field(window.on).type
    if not pa.types.is_timestamp(on):
        raise PipelineError(
            f"The column {window.on!r} is {on}, not a timestamp.",
            where=f"window {stage.uid}",
            next="Name a timestamp column.",
        )
    where = f"window {stage.uid}"
    state = state_of(window.aggregates, rows, where)
    empty = frames.from_arrow(
        pa.table([pa.array([], field.type) for field in keys] + [pa.array([], pa.int64())], names=[*keys.names, _END])
    )
    empty = pl.concat([empty, frames.from_arrow(state.arrow.empty_table())], how="horizontal")
    inferred = frames.arrow(_results(stage, window, empty)).schema
    bounds = pa.timestamp("us", tz="UTC")
    output = pa.schema([(field.name, bounds if field.name in (_START, _END) else field.type) for field in inferred])
    check_storable(output, where, "Cast the column that it is made from in transform=")
    if window.late is not None:
        check_storable(rows, f"{where}, late={window.late.table}", "Cast or drop it in transform=")
    return Shapes(keys, state, {MAIN: output, LATE: rows})


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
