"""Windows of one size: tumbling, and hopping where they overlap; and windows of the calendar, which tumble.

Batches are reduced as they come, to a row for each key and run of windows that a row falls into. At the barrier that is
handed out to the windows:

- Rows of windows that the watermark closes now never go to state. They are joined with what state has of these windows,
  and handed out: where all open windows are resident, state is not read at all; else one scan of each key group is.
- Rows of windows that stay open are merged into state once. Only windows that state has rows of are looked up there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.unfit_values import LAST_MICRO
from state_ops.backends.base import Backend
from state_ops.errors import InputError
from state_ops.keyed.keyed_state import GROUP, WINDOW_STATE
from state_ops.rows import key_aggregation
from state_ops.rows.distinct_values import DistinctValues
from state_ops.rows.row_store import RowStore
from state_ops.schema.key_codec import decode_int64, decode_keys, encode_int64, group_prefix
from state_ops.schema.row_codec import decode_rows
from state_ops.schema.state_schema import StateSchema
from weir.definition import MAIN, Shapes, Stage, Subtask
from weir.operators.base import check_event_time, refuse_clash, state_of, values_of
from weir.operators.filtered_rows import FilteredRows
from weir.operators.windows import END, START, CalendarWindow, Window
from weir.operators.windows.rows import WindowsOperator, shapes_of

# The first end and the number of a row's windows, then one row's end; the input may have columns named like the
# output's.
_FIRST, _NUMBER, _WINDOW = "__weir_first", "__weir_number", "__weir_window"
_PARTIAL_ROWS = 500_000
_FIRE_ROWS = 50_000
_LAST = np.iinfo(np.int64).max  # later than every end
_ROWS_PER_LOOK, _LOOKS = 16, 4  # a look for the next window of a key group costs as much as so many gets


class WindowOperator(WindowsOperator):
    """State: one row per (window_end, key), ordered by window_end inside a key group, so that the windows that a
    watermark closes are one range of the key group. So are the values of `count_distinct`."""

    def __init__(self, window: Window, subtask: Subtask) -> None:
        super().__init__(window.kind, subtask)
        stage, shapes, backend = subtask.stage, subtask.shapes, subtask.backend
        self._window = window
        self._filtered = FilteredRows(window.aggregates, [GROUP, *stage.key], self._where)
        self._aggregates = self._filtered.aggregates
        by = [GROUP, _FIRST, _NUMBER, *stage.key]
        by_window = pa.schema([(_WINDOW, pa.int64()), *shapes.keys])
        self._rows = RowStore(backend, shapes.state, by_window, WINDOW_STATE, subtask.resident)
        self._partials = key_aggregation.Partials(self._aggregates, by, self._where, _PARTIAL_ROWS)
        self._types = frames.from_arrow(_columns(shapes.keys, shapes.state).empty_table()).schema
        self._distinct = DistinctValues(self._aggregates, shapes.collections, backend, shapes.keys, _WINDOW)
        self._stored_ends: set[int] | None = None  # of the windows that state has rows of; None: not looked up
        self._closing: list[pl.DataFrame] = []  # rows of windows that this barrier closes

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        window = self._window
        times = self._times_of(rows, window.on)
        first, last = _ends(times, window, self._where)
        frame = self._filtered.frame(rows)
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
        self._write()
        return iter(())

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        progress = self._progress
        if progress.now is None and not progress.drain:
            yield from self.pause()
            return
        upto = _LAST if progress.drain else progress.now
        assert upto is not None
        self._distinct.flush()
        if not self._rows.all_resident(len(self._partials)):
            self._rows.flush()  # what was merged before the barrier may close too
        if len(self._partials):
            self._fold(upto)
        yield from self._close(upto)
        self._distinct.forget(self._groups, progress.before, None if progress.drain else upto)
        self._write()

    def _flush(self) -> None:
        self._rows.flush()
        self._distinct.flush()

    def _write(self) -> None:
        self._rows.barrier()
        self._distinct.barrier()
        self._note_due(WINDOW_STATE, lambda: self._rows.values(_WINDOW))

    def _close(self, upto: int) -> Iterator[tuple[str, pa.Table]]:
        """Hand out the windows that end by then: their rows in state, and those of this barrier."""
        fresh, self._closing = self._with_counts(self._sorted_by_group(self._closing)), []
        resident = self._rows.take(pl.col(_WINDOW) <= upto)
        if resident is not None:
            yield from self._close_resident([rows for rows in resident if len(rows)], fresh)
            return
        ends = np.searchsorted(fresh[GROUP].to_numpy(), np.asarray(self._groups), side="right").tolist()
        keys: list[bytes] = []
        values: list[bytes] = []
        taken = 0
        for group, upto_row in zip(self._groups, ends, strict=True):
            start = group_prefix(group, WINDOW_STATE)
            end = group_prefix(group, WINDOW_STATE + 1) if upto == _LAST else start + encode_int64(upto + 1)
            for key, value in self._backend.scan(start, end):
                keys.append(key)
                values.append(value)
            if len(keys) + upto_row - taken >= _FIRE_ROWS:
                yield MAIN, self._fire(keys, values, fresh[taken:upto_row])
                keys, values, taken = [], [], upto_row
        if keys or taken < len(fresh):
            yield MAIN, self._fire(keys, values, fresh[taken:])

    def _close_resident(self, taken: list[pl.DataFrame], fresh: pl.DataFrame) -> Iterator[tuple[str, pa.Table]]:
        """Hand out windows whose rows in state have been taken from it. fresh: their rows that state does not have."""
        if taken:
            rows = pl.concat(taken).rename({_WINDOW: END}).select(fresh.columns)
            fresh = pl.concat([rows, fresh], how="vertical_relaxed").sort(GROUP)
        groups = fresh[GROUP].to_numpy()
        at = 0
        while at < len(fresh):
            end = int(np.searchsorted(groups, groups[min(at + _FIRE_ROWS, len(fresh)) - 1], side="right"))
            yield MAIN, self._results(fresh[at:end].drop(GROUP), bool(taken))
            at = end

    def _sorted_by_group(self, closing: list[pl.DataFrame]) -> pl.DataFrame:
        types = {GROUP: pl.Int32(), **self._types}
        columns = [pl.col(GROUP).cast(pl.Int32), pl.col(_WINDOW).alias(END)]
        columns += [pl.col(name).cast(self._types[name]) for name in self._stage.key]
        columns += [pl.col(field) for name, agg in self._window.aggregates for field in agg.fields(name)]
        parts = [part.select(columns) for part in closing if len(part)]
        return pl.concat(parts or [pl.DataFrame(schema=types)]).sort(GROUP)

    def _fold(self, closing: int | None = None) -> None:
        """Merge what has gathered into the state of the windows that are open.

        Args:
            closing: Rows of windows that end by then wait in memory, as far as there is room, to be handed out.
        """
        most = max(1, _PARTIAL_ROWS * self._window.every // self._window.size)  # a row may fall into very many windows
        for part in key_aggregation.parts(self._partials.take()):
            for some in part.iter_slices(most):
                self._merge(_spread(some, self._window.every), closing)

    def _merge(self, fresh: pl.DataFrame, closing: int | None) -> None:
        by, aggregates = [GROUP, _WINDOW, *self._stage.key], self._aggregates
        if self._progress.before is not None:
            fresh = fresh.filter(pl.col(_WINDOW) > self._progress.before)
        if self._window.every < self._window.size:
            fresh = key_aggregation.recombined(aggregates, fresh, by, self._where)
        full = key_aggregation.have_gathered(self._closing, _PARTIAL_ROWS, 1)
        if closing is not None and not full:
            self._closing.append(fresh.filter(pl.col(_WINDOW) <= closing))
            fresh = fresh.filter(pl.col(_WINDOW) > closing)
        if not len(fresh):
            return
        stored = pl.col(_WINDOW).is_in(self._ends_in_state(len(fresh), fresh[_WINDOW].unique()))
        for part, looked_up in ((fresh.filter(stored), True), (fresh.filter(~stored), False)):
            part = self._distinct.counted(part, look=looked_up)
            if looked_up and len(part):
                old, _ = self._rows.get(part)
                self._rows.put(part, key_aggregation.merged(aggregates, old, part, self._where), _all(part))
            elif len(part):
                rows = key_aggregation.fitted(aggregates, part, self._types, self._where)
                self._rows.put(part, rows, _all(part))
        if full:  # they close by way of state
            self._flush()

    def _ends_in_state(self, rows: int, ends: pl.Series) -> list[int]:
        """Return the ends of windows of so many rows for which state may have rows.

        These rows are put next.
        """
        before = self._stored_ends
        if before is None:
            if rows < _ROWS_PER_LOOK * len(self._groups):
                return ends.to_list()
            before = self._looked_up()
            if before is None:
                return ends.to_list()
        self._stored_ends = before | set(ends.to_list())
        return [end for end in ends.to_list() if end in before]

    def _looked_up(self) -> set[int] | None:
        """Return the ends of all windows that are open and that state has rows of: one look a window and key group,
        instead of one a key. None if there are too many."""
        resident = self._rows.values(_WINDOW)
        if resident is not None:
            return set(resident.to_list())
        self._rows.flush()
        before = self._progress.before
        opened = b"" if before is None else encode_int64(before + 1)  # what has closed is slow to pass over
        ends: set[int] = set()
        looks = _LOOKS * len(self._groups)
        for group in self._groups:
            prefix = group_prefix(group, WINDOW_STATE)
            start: bytes | None = prefix + opened
            while start is not None:
                looks -= 1
                if looks < 0:
                    return None
                name = next((key for key, _ in self._backend.scan(start, group_prefix(group, WINDOW_STATE + 1))), None)
                start = None
                if name is not None:
                    end = decode_int64(name[len(prefix) :])
                    ends.add(end)
                    start = prefix + encode_int64(end + 1)
        return ends

    def _fire(self, keys: list[bytes], values: list[bytes], fresh: pl.DataFrame) -> pa.Table:
        """Return the output of some windows, whose rows in state are forgotten.

        Args:
            keys: Of their rows in state.
            values: In the same order.
            fresh: Their rows that state does not have.
        """
        rows = frames.from_arrow(_decoded(self._shapes.keys, self._shapes.state, keys, values))
        if keys:
            self._backend.write([], keys)
        if not len(fresh):
            return self._closed(self._window, _with_start(self._window, rows))
        rows = pl.concat([rows, fresh.drop(GROUP)], how="vertical_relaxed") if keys else fresh.drop(GROUP)
        return self._results(rows, bool(keys))

    def _results(self, rows: pl.DataFrame, from_state: bool) -> pa.Table:
        """Return the output of rows of windows, of which a window and key may have several. from_state: some were
        stored."""
        window, by = self._window, [END, *self._stage.key]
        if from_state or window.every < window.size:
            counted = [(name, agg.counted) for name, agg in self._aggregates]
            rows = key_aggregation.recombined(counted, rows, by, self._where)
        fields = key_aggregation.fitted(self._aggregates, rows, self._types, self._where)
        rows = pl.concat([rows.select(by), fields], how="horizontal")
        return self._closed(window, _with_start(window, rows))

    def _with_counts(self, fresh: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of closing windows, sorted by group, with the number of their values that state does not
        have.
        """
        if not (len(self._distinct) and len(fresh)):
            return fresh
        if self._window.every < self._window.size:
            by = [GROUP, END, *self._stage.key]
            fresh = key_aggregation.recombined(self._aggregates, fresh, by, self._where)
        fresh = fresh.rename({END: _WINDOW})
        stored = pl.col(_WINDOW).is_in(self._ends_in_state(len(fresh), fresh[_WINDOW].unique()))
        parts = ((fresh.filter(stored), True), (fresh.filter(~stored), False))
        counted = [self._distinct.counted(part, look=look, keep=False) for part, look in parts]
        return pl.concat(counted).rename({_WINDOW: END}).sort(GROUP)


def _all(rows: pl.DataFrame) -> np.ndarray:
    return np.ones(len(rows), bool)


def _ends(times: np.ndarray, window: Window, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return int64[n] twice: the ends of the first and of the last window of each time."""
    if not isinstance(window, CalendarWindow):
        first = _floor(times - window.size, window) + window.every + window.size
        return first, _floor(times, window) + window.size
    try:
        _, ends = window.calendar.bounds(times)
    except OverflowError as error:
        raise InputError(
            f"A row has a time in {window.on!r} outside of the years 1 to 9999: {error}.",
            where=where,
            next="Correct it in the file, or leave it out by the stage's where=, which counts it.",
        ) from error
    return ends, ends


def _floor(times: np.ndarray, window: Window) -> np.ndarray:
    """Return the start of the newest window that has begun."""
    return (times - window.offset) // window.every * window.every + window.offset


def _spread(partials: pl.DataFrame, every: int) -> pl.DataFrame:
    """Return each row once for every one of its windows."""
    number = partials[_NUMBER].to_numpy()
    rows = np.repeat(np.arange(len(number)), number)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(number) - number, number)
    spread = partials[rows] if len(rows) != len(number) else partials
    return spread.with_columns((pl.col(_FIRST) + pl.Series(nth) * every).alias(_WINDOW)).drop(_FIRST, _NUMBER)


def _decoded(keys: pa.Schema, state: StateSchema, names: list[bytes], values: list[bytes]) -> pa.Table:
    """Return the rows of some entries of state: window_end, key columns, fields."""
    _, columns = decode_keys(names, [pa.int64(), *keys.types])
    return pa.table([*columns, *decode_rows(state, values).columns], schema=_columns(keys, state))


def _columns(keys: pa.Schema, state: StateSchema) -> pa.Schema:
    return pa.schema([(END, pa.int64()), *[(field.name, field.type) for field in [*keys, *state.arrow]]])


def opened(window: Window, rows: pa.Table) -> pl.DataFrame:
    """Return the windows in rows of state."""
    return _with_start(window, frames.from_arrow(rows))


def _with_start(window: Window, rows: pl.DataFrame) -> pl.DataFrame:
    if not isinstance(window, CalendarWindow):
        return rows.with_columns((pl.col(END) - window.size).alias(START))
    within = np.minimum(rows[END].to_numpy() - 1, LAST_MICRO)  # the last window may end after the year 9999
    starts, _ = window.calendar.bounds(within)
    return rows.with_columns(pl.Series(START, starts))


def no_windows(window: Window, keys: pa.Schema, state: StateSchema) -> pl.DataFrame:
    """Return the columns of `opened`."""
    return opened(window, _columns(keys, state).empty_table())


def open_windows(
    window: Window, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range
) -> Iterator[pl.DataFrame]:
    """Yield the windows that are still open in some key groups."""
    for group in groups:
        entries = list(backend.scan(group_prefix(group, WINDOW_STATE), group_prefix(group, WINDOW_STATE + 1)))
        if entries:
            yield opened(window, _decoded(keys, state, *map(list, zip(*entries, strict=True))))


def window_shapes(stage: Stage, window: Window, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """Return the schemas of a stage with windows of one size."""
    where = f"window {stage.uid}"
    refuse_clash(stage, {START, END}, "what a window adds")
    if window.on is not None:
        check_event_time(rows, window.on, where)
    state = state_of(window.aggregates, rows, where)
    values = values_of(stage, window.aggregates, rows, state)
    shapes = shapes_of(stage, window, rows, keys, state, no_windows(window, keys, state))
    return replace(shapes, collections=values)
