"""Sessions: rows of a key that are closer than a gap, across batches and epochs and in any order.

A session is [first event, last event + gap). A row alone is the session [its event, + gap), and sessions that overlap
are one; so intervals are merged here, never rows.

Batches are reduced to the sessions that their rows make among themselves. At the barrier these are merged with the open
sessions of their keys; what the watermark closes is handed out, and only what stays open goes to state
(`session_store`). An index of keys by the end of their first session says what else a watermark closes, so that a
barrier reads what the epoch touched and what closes, and nothing that is merely open; where all open sessions are
resident, these are asked instead.

Lateness is judged at the barrier, since a row that would be a closed session by itself may yet be part of an open one,
whichever came first: rows whose own interval had ended before the epoch wait for it, and are late if the session that
they end up in, together with all other rows of the epoch, had ended too. (Flink judges row by row, by what came
before.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.keyed.keyed_state import GROUP, scan_values
from state_ops.outputs import REST
from state_ops.rows import key_aggregation, time_index
from state_ops.rows.aggregates import Agg
from state_ops.rows.sketches import DISTINCT, QUANTILE, sketched
from state_ops.schema.key_groups import xxhash64
from state_ops.schema.state_schema import StateSchema
from weir.definition import MAIN, Shapes, Stage, Subtask
from weir.operators.base import check_event_time, refuse_clash, state_of
from weir.operators.filtered_rows import FilteredRows
from weir.operators.windows import END, START, SessionWindow
from weir.operators.windows.rows import WindowsOperator, shapes_of
from weir.operators.windows.session_store import (
    HASH,
    SESSIONS,
    OpenSessions,
    among,
    hashed,
    hashes,
    no_sessions,
    opened,
    repeats,
    sorted_by_key,
)

# Bounds of a row's own session; the input may have columns named like the output's. A session's number; a row's.
_FROM, _TO, _SESSION, _ROW = "__weir_from", "__weir_to", "__weir_session", "__weir_row"
_PARTIAL_ROWS = 500_000
_FIRE_KEYS = 50_000
_LAST = np.iinfo(np.int64).max  # later than every end


class SessionOperator(WindowsOperator):
    """State: per key the list of its open sessions, apart from each other, and an index of keys by their first end."""

    def __init__(self, window: SessionWindow, subtask: Subtask) -> None:
        super().__init__(window.kind, subtask)
        stage, shapes = subtask.stage, subtask.shapes
        self._window = window
        self._by = [GROUP, *stage.key]
        self._filtered = FilteredRows(window.aggregates, self._by, self._where)
        self._aggregates = self._filtered.aggregates
        self._open = OpenSessions(subtask.backend, shapes.state, shapes.keys, subtask.groups, subtask.resident)
        self._sessions = _Sessions(self._aggregates, self._by, self._where, _PARTIAL_ROWS)
        # State has sketches in place of the values that gather until then.
        self._sketches = [(name, agg.kind) for name, agg in self._aggregates if agg.kind in (DISTINCT, QUANTILE)]
        stored = [(name, agg.counted) for name, agg in self._aggregates]
        self._stored = _Sessions(stored, self._by, self._where, _PARTIAL_ROWS)
        self._waiting: list[pa.Table] = []

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        times = self._times_of(rows, self._window.on)
        if self._progress.before is not None:
            over = times + self._window.length <= self._progress.before
            if over.any():
                self._waiting.append(rows.filter(pa.array(over)))
                self.rows_deferred += int(over.sum())
                rows, times = rows.filter(pa.array(~over)), times[~over]
        if rows.num_rows:
            self._sessions.add(self._bounded(rows, times))
            if self._sessions.full:
                self._store(self._sessions.take())
        return iter(())

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        if len(self._sessions):
            self._store(self._sessions.take())
        self._end()
        if self._waiting:  # which of them are late, the epoch's other rows may decide
            yield REST, pa.concat_tables(self._waiting)

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        fresh = self._sessions.take() if len(self._sessions) else self._open.empty
        if self._waiting:
            rows, self._waiting = pa.concat_tables(self._waiting), []
            alone = self._bounded(rows, self._times_of(rows, self._window.on))
            late = self._ended(alone, fresh)
            if not late.all():
                sessions = self._sessions.partials(alone.filter(pl.Series(~late)))
                fresh = self._sessions.combined([fresh, sessions] if len(fresh) else [sessions])
            yield from self._late(rows, late)
        for closed in self._merged(fresh, _LAST if self._progress.drain else self._progress.now):
            if len(closed):
                yield MAIN, self._closed(self._window, closed)
        self._end()

    def _end(self) -> None:
        self._open.barrier()
        self._note_due(time_index.MOMENTS, self._open.ends)

    def _bounded(self, rows: pa.Table, times: np.ndarray) -> pl.DataFrame:
        """Return the columns to aggregate, with the hash of each row's key and the bounds of that row's own session."""
        frame = self._filtered.frame(rows)
        keys = [pl.col(name).cast(self._open.types[name]) for name in self._by]
        frame = frame.with_columns(*keys, pl.Series(_FROM, times), pl.Series(_TO, times + self._window.length))
        return hashed(frame, xxhash64([rows.column(name) for name in self._stage.key]))

    def _ended(self, alone: pl.DataFrame, fresh: pl.DataFrame) -> np.ndarray:
        """Return which rows are late.

        A row is late if the session that it ends up in, with all other rows of the epoch, had ended.

        Args:
            alone: The rows, each as a session of its own.
            fresh: The sessions of the epoch's other rows.

        Returns:
            bool[n], by row of `alone`.
        """
        keys = sorted_by_key(alone.select(HASH, *self._by), self._by)
        keys = keys.filter(~repeats(keys, self._by))
        table = self._open.table(keys)
        others = [
            sessions.filter(among(hashes(sessions), hashes(keys))).select(
                HASH, *self._by, pl.col(START).alias(_FROM), pl.col(END).alias(_TO)
            )
            for sessions in (self._open.of(keys) if table is None else table, fresh)
        ]
        rows = alone.select(HASH, *self._by, _FROM, _TO, pl.int_range(pl.len(), dtype=pl.Int64).alias(_ROW))
        rows, first = _spans(pl.concat([rows, *others], how="diagonal"), self._by, _FROM, _TO)
        ends = np.maximum.reduceat(rows[_TO].to_numpy(), first)
        ended = np.repeat(ends <= self._progress.before, np.diff(first, append=len(rows)))
        late = np.zeros(len(alone), bool)
        late[rows[_ROW].filter(pl.Series(ended)).drop_nulls().to_numpy()] = True
        return late

    # -- into state

    def _store(self, fresh: pl.DataFrame) -> None:
        """Merge sessions into those that are open; none of them closes."""
        for _ in self._merged(fresh, None):
            pass

    def _merged(self, fresh: pl.DataFrame, upto: int | None) -> Iterator[pl.DataFrame]:
        """Merge sessions into those that are open; yields those that end by then, which are open no more."""
        if not len(fresh) and upto is None:
            return
        if len(fresh):
            fresh = fresh.with_columns(sketched(kind, fresh[name]) for name, kind in self._sketches)
        table = self._open.table(fresh)
        if table is not None:
            yield from self._fold(table, fresh, upto).iter_slices(_FIRE_KEYS)
            return
        parts = list(key_aggregation.parts(fresh)) if len(fresh) else []
        for part in parts:
            keys = part.select(HASH, *self._by).filter(~repeats(part, self._by))
            # What a later part hangs together with must not be gone by then.
            yield self._fold(self._open.of(keys), part, upto if len(parts) == 1 else None)
        if upto is not None:
            for stored in self._open.due(None if upto == _LAST else upto, _FIRE_KEYS):
                yield self._fold(stored, self._open.empty, upto)

    def _fold(self, stored: pl.DataFrame, fresh: pl.DataFrame, upto: int | None) -> pl.DataFrame:
        """Merge sessions into those that are stored of their keys; returns those that end by then, which go.

        Args:
            stored: All open sessions of the keys of `fresh`, and of any others.
        """
        stored_too, touched = among(hashes(fresh), hashes(stored)), among(hashes(stored), hashes(fresh))
        parts = [fresh.filter(~stored_too)]
        if stored_too.any():
            fields = [field for name, agg in self._aggregates for field in agg.fields(name)]
            old = stored.filter(touched).with_columns([pl.col(field).cast(fresh.schema[field]) for field in fields])
            parts.append(self._stored.combined([old, fresh.filter(stored_too)]))
        merged = pl.concat(parts)
        values = key_aggregation.fitted(self._aggregates, merged, self._open.types, self._where)
        rest = np.flatnonzero(~touched)
        everything = pl.concat([stored, merged.select(HASH, *self._by, START, END).hstack(values)])
        rows = np.concatenate([rest, np.arange(len(stored), len(everything))])
        keys = hashes(everything)[rows]
        order = np.argsort(keys, kind="stable")  # which merges what is in order already
        rows, keys = rows[order], keys[order]
        over = everything[END].to_numpy()[rows] <= (-_LAST if upto is None else upto)
        changed = np.sort(np.concatenate([hashes(fresh), keys[over]]), kind="stable")
        changed = changed[np.append(True, changed[1:] != changed[:-1])[: len(changed)]]
        self._open.replace(stored, everything[rows[~over]], changed)
        closed: pl.DataFrame = everything[rows[over]]
        return closed


class _Sessions(key_aggregation.Partials):
    """The sessions that the rows of many batches make among themselves, sorted by key and start."""

    def partials(self, rows: pl.DataFrame) -> pl.DataFrame:
        return self._reduced(rows, _FROM, _TO, key_aggregation.partials)

    def combined(self, parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
        if len(parts) == 1:
            return parts[0]
        return self._reduced(pl.concat(parts), START, END, key_aggregation.recombined)

    def _reduced(self, rows: pl.DataFrame, start: str, end: str, reduce: Callable[..., pl.DataFrame]) -> pl.DataFrame:
        rows, first = _spans(rows, self._by, start, end)
        numbers = np.repeat(np.arange(len(first)), np.diff(first, append=len(rows)))
        numbered = rows.with_columns(pl.Series(_SESSION, numbers).set_sorted())
        fields = reduce(self._aggregates, numbered, [_SESSION], self._where).sort(_SESSION).drop(_SESSION)
        bounds = [
            pl.Series(START, rows[start].to_numpy()[first]),
            pl.Series(END, np.maximum.reduceat(rows[end].to_numpy(), first)),
        ]
        return rows.select(HASH, *self._by)[first].hstack([*bounds, *fields.get_columns()])


def _spans(rows: pl.DataFrame, key: Sequence[str], start: str, end: str) -> tuple[pl.DataFrame, np.ndarray]:
    """Return rows sorted by key and start, and int64[m], where each session of them begins.

    Rows that overlap are one session, as are rows that are connected by others.
    """
    rows = sorted_by_key(rows, key, start)
    alike = repeats(rows, key)
    starts, reached = rows[start].to_numpy(), rows[end].to_numpy()
    shorter = alike[1:] & (reached[1:] < reached[:-1])
    if shorter.any():  # of these keys, what counts is how far all so far reach
        number = np.cumsum(~alike)
        some = np.isin(number, number[1:][shorter])
        furthest = pl.DataFrame({end: reached[some], _SESSION: number[some]}).select(
            pl.col(end).cum_max().over(_SESSION)
        )
        reached = reached.copy()
        reached[some] = furthest[end].to_numpy()
    begins = ~alike
    begins[1:] |= starts[1:] >= reached[:-1]
    return rows, np.flatnonzero(begins)


def with_bounds(aggregates: tuple[tuple[str, Agg], ...]) -> tuple[tuple[str, Agg], ...]:
    """Return the aggregates with those of a session's bounds: they are aggregates of each row's own bounds."""
    return ((START, Agg("min", _FROM)), (END, Agg("max", _TO)), *aggregates)


def open_sessions(keys: pa.Schema, state: StateSchema, backend: Backend, groups: range) -> Iterator[pl.DataFrame]:
    """Yield the sessions that are still open in some key groups."""
    for table in scan_values(backend, state, keys, groups):
        yield opened(frames.from_arrow(table))


def session_shapes(stage: Stage, window: SessionWindow, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """Return the schemas of a stage with sessions."""
    where = f"window {stage.uid}"
    refuse_clash(stage, {START, END, SESSIONS}, "what a session window adds")
    if window.on is not None:
        check_event_time(rows, window.on, where)
    bounds = [pa.field(_FROM, pa.int64()), pa.field(_TO, pa.int64())]
    fields = state_of(with_bounds(window.aggregates), pa.schema([*rows, *bounds]), where).fields
    refuse_clash(stage, {field.name for field in fields}, "a field of its state")
    session = pa.struct([pa.field(field.name, field.type) for field in fields])
    state = StateSchema.build([(SESSIONS, pa.list_(session), True, None)])
    return shapes_of(stage, window, rows, keys, state, no_sessions(keys, state))
