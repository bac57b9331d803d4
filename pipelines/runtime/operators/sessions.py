"""Event-time sessions: rows of a key that are closer than a gap, across batches and epochs and in any order.

A session is [first event, last event + gap). A row alone is the session [its event, + gap), and sessions that overlap
are one; so intervals are merged here, never rows.

State has one value row per key: the list of its open sessions, a struct of bounds and aggregates each. An index of keys
by the end of their first session says what a watermark closes, so that a barrier reads what the epoch touched and what
closes, and nothing that is merely open.

Lateness is judged at the barrier, since a row that would be a closed session by itself may yet be part of an open one,
whichever came first: rows whose own interval had ended before the epoch wait for it, and are late if the session that
they end up in, together with all other rows of the epoch, had ended too. (Flink judges row by row, by what came
before.)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.runtime.definition import SessionWindow, Stage
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
from pipelines.runtime.operators.filtered_rows import FilteredRows
from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.keyed.keyed_state import GROUP, VALUE_STATE, scan_values
from state_ops.rows import key_aggregation, time_index
from state_ops.rows.aggregates import Agg
from state_ops.rows.row_store import rows_of
from state_ops.schema.key_codec import encode_keys
from state_ops.schema.row_codec import encode_rows
from state_ops.schema.state_schema import StateSchema
from state_ops.snapshots.stage_upload import REST

SESSIONS = "sessions"
# Bounds of a row's own session; the input may have columns named like the output's. A session's number; a row's.
_FROM, _TO, _SESSION, _ROW = "__weir_from", "__weir_to", "__weir_session", "__weir_row"
_PARTIAL_ROWS = 500_000
_FIRE_KEYS = 50_000


class SessionOperator(EventTimeOperator):
    """State: per key the list of its open sessions, apart from each other, and an index of keys by their first end."""

    def __init__(
        self, stage: Stage, window: SessionWindow, shapes: Shapes, backend: Backend, progress: Progress, groups: range
    ) -> None:
        super().__init__("window", stage, shapes, backend, progress, groups)
        self._window = window
        self._by = [GROUP, *stage.key]
        self._filtered = FilteredRows(window.aggregates, self._by, self._where)
        self._aggregates = with_bounds(self._filtered.aggregates)
        self._types = dict(_opened(frames.from_arrow(shapes.state.arrow.empty_table())).schema)
        self._fresh: list[pl.DataFrame] = []  # sessions of this epoch's rows, not in state yet
        self._waiting: list[pa.Table] = []

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        times = event_times(rows, self._window.on, self._where)
        if self._progress.before is not None:
            over = times + self._window.gap <= self._progress.before
            if over.any():
                self._waiting.append(rows.filter(pa.array(over)))
                self.rows_deferred += int(over.sum())
                rows = rows.filter(pa.array(~over))
        if rows.num_rows:
            self._fresh.append(self._sessions_of(self._bounded(rows)))
            if key_aggregation.have_gathered(self._fresh, _PARTIAL_ROWS, 1):
                self._fresh = [self._joined(self._fresh)]
                if key_aggregation.have_gathered(
                    self._fresh, _PARTIAL_ROWS, 2
                ):  # else joining would soon be all that is done
                    self._fold()
        return iter(())

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        if self._fresh:
            self._fold()
        if self._waiting:  # which of them are late, the epoch's other rows may decide
            yield REST, pa.concat_tables(self._waiting)

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        if self._waiting:
            yield from self._judge(pa.concat_tables(self._waiting))
        if self._fresh:
            self._fold()
        now = self._progress.now
        if now is not None or self._progress.drain:
            upto = None if self._progress.drain else now
            for due in time_index.due(self._backend, self._groups, upto, _FIRE_KEYS):
                yield MAIN, self._close(due, upto)

    def _judge(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """Tell the rows that are late from those that are part of a session which had not ended."""
        alone = self._bounded(rows)
        keys = alone.select(self._by).unique()
        others = [self._stored(keys)[0], *(fresh.join(keys, on=self._by, how="semi") for fresh in self._fresh)]
        bounds_of_others = [
            other.select(*self._by, pl.col(START).alias(_FROM), pl.col(END).alias(_TO)) for other in others
        ]
        numbers = pl.int_range(len(alone), dtype=pl.Int64, eager=True).alias(_ROW)
        bounds = alone.select(*self._by, _FROM, _TO).with_columns(numbers)
        both = _numbered(pl.concat([bounds, *bounds_of_others], how="diagonal"), self._by, _FROM, _TO)
        ended = both.filter(pl.col(_TO).max().over(_SESSION) <= self._progress.before)[_ROW].drop_nulls()
        late = np.zeros(rows.num_rows, bool)
        late[ended.to_numpy()] = True
        if not late.all():
            self._fresh.append(self._sessions_of(alone.filter(pl.Series(~late))))
        yield from self._late(rows, late)

    def _bounded(self, rows: pa.Table) -> pl.DataFrame:
        """What is aggregated of rows, each with the bounds that it would have as a session of its own."""
        times = event_times(rows, self._window.on, self._where)
        frame = self._filtered.frame(rows)
        return frame.with_columns(pl.Series(_FROM, times), pl.Series(_TO, times + self._window.gap))

    def _sessions_of(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The sessions that rows make among themselves."""
        numbered = _numbered(rows, self._by, _FROM, _TO)
        return key_aggregation.partials(self._aggregates, numbered, [*self._by, _SESSION], self._where).drop(_SESSION)

    def _joined(self, sessions: Sequence[pl.DataFrame]) -> pl.DataFrame:
        """Sessions, of which those that overlap have become one."""
        numbered = _numbered(pl.concat(sessions), self._by, START, END)
        return key_aggregation.recombined(self._aggregates, numbered, [*self._by, _SESSION], self._where).drop(_SESSION)

    def _fold(self) -> None:
        """Merge what has gathered into state."""
        fresh = self._joined(self._fresh)
        self._fresh = []
        keys = fresh.select(self._by).unique().sort(self._by)
        old, encoded = self._stored(keys)
        fields = [field for name, agg in self._aggregates for field in agg.fields(name)]
        old = old.select([*self._by, *[pl.col(field).cast(fresh.schema[field]) for field in fields]])
        merged = self._joined([old, fresh.select(old.columns)])
        stored = key_aggregation.fitted(self._aggregates, merged, self._types, self._where)
        self._store(
            keys,
            encoded,
            pl.concat([merged.select(self._by), stored], how="horizontal"),
            _first_ends(old, keys, self._by),
        )

    def _close(self, due: list[bytes], upto: int | None) -> pa.Table:
        """Hand out the sessions of these keys that end by now, and keep the others."""
        groups, owners = time_index.owners(due, self._shapes.keys)
        keys = frames.from_arrow(owners).with_columns(pl.Series(GROUP, groups.astype(np.int32))).select(self._by)
        keys = keys.sort(self._by)
        sessions, encoded = self._stored(keys)
        over = pl.lit(True) if upto is None else pl.col(END) <= upto
        self._store(keys, encoded, sessions.filter(~over), _first_ends(sessions, keys, self._by))
        return self._closed(self._window, sessions.filter(over))

    # -- state

    def _stored(self, keys: pl.DataFrame) -> tuple[pl.DataFrame, list[bytes]]:
        """The open sessions of distinct keys, and the keys encoded."""
        columns = frames.arrow(keys.select(self._stage.key)).cast(self._shapes.keys).columns
        encoded = encode_keys(columns, _groups(keys), VALUE_STATE)
        rows, _ = rows_of(self._shapes.state, self._backend.multi_get(encoded))
        return _opened(pl.concat([keys, rows], how="horizontal")), encoded

    def _store(self, keys: pl.DataFrame, encoded: list[bytes], sessions: pl.DataFrame, before: np.ndarray) -> None:
        """Make `sessions` what is open of these keys, sorted. before: the first end of each, as the index has it; -1:
        none."""
        lists = sessions.sort([*self._by, START]).group_by(self._by, maintain_order=True)
        rows = lists.agg(pl.struct([pl.col(field) for field in self._types]).alias(SESSIONS))
        rows = keys.join(rows, on=self._by, how="left", maintain_order="left")
        kept = rows[SESSIONS].is_not_null().to_numpy()
        table = frames.arrow(rows.filter(kept).select(SESSIONS)).cast(self._shapes.state.arrow)
        puts = list(
            zip([encoded[row] for row in np.flatnonzero(kept)], encode_rows(self._shapes.state, table), strict=True)
        )
        now = _first_ends(sessions, keys, self._by)
        moved, gone = (now != before) & (now != _NONE), (now != before) & (before != _NONE)
        puts += [(entry, b"") for entry in self._entries(keys.filter(moved), now[moved])]
        deletes = [encoded[row] for row in np.flatnonzero(~kept)]
        self._backend.write(puts, deletes + self._entries(keys.filter(gone), before[gone]))

    def _entries(self, keys: pl.DataFrame, ends: np.ndarray) -> list[bytes]:
        columns = frames.arrow(keys.select(self._stage.key)).cast(self._shapes.keys).columns
        return time_index.entries(ends, columns, _groups(keys))


_NONE = np.iinfo(np.int64).min


def with_bounds(aggregates: tuple[tuple[str, Agg], ...]) -> tuple[tuple[str, Agg], ...]:
    """A session's bounds are aggregates too: of each row's own bounds."""
    return ((START, Agg("min", _FROM)), (END, Agg("max", _TO)), *aggregates)


def _groups(keys: pl.DataFrame) -> np.ndarray:
    return keys[GROUP].to_numpy().astype(np.uint16)


def _numbered(sessions: pl.DataFrame, by: Sequence[str], start: str, end: str) -> pl.DataFrame:
    """Sessions sorted by key and start, with a number that those share which overlap, or hang together by others."""
    ordered = sessions.sort([*by, start]).with_columns(pl.struct(by).rle_id().alias(_SESSION))
    reached = ordered.select(pl.col(end).cum_max().over(_SESSION).shift(1)).to_series()
    begins = ordered[_SESSION].diff().fill_null(1).cast(pl.Boolean) | (ordered[start] >= reached).fill_null(True)
    return ordered.with_columns(begins.cast(pl.UInt32).cum_sum().alias(_SESSION))


def _opened(rows: pl.DataFrame) -> pl.DataFrame:
    """One row for each session of the lists."""
    return rows.filter(pl.col(SESSIONS).is_not_null()).explode(SESSIONS).unnest(SESSIONS)


def _first_ends(sessions: pl.DataFrame, keys: pl.DataFrame, by: Sequence[str]) -> np.ndarray:
    """int64[n], the end of the first session of each key; `_NONE` without one."""
    ends = sessions.group_by(by).agg(pl.col(END).min())
    return keys.join(ends, on=list(by), how="left", maintain_order="left")[END].fill_null(_NONE).to_numpy()


def open_sessions(keys: pa.Schema, state: StateSchema, backend: Backend, groups: range) -> Iterator[pl.DataFrame]:
    """The sessions that are still open in some key groups."""
    for table in scan_values(backend, state, keys, groups):
        yield _opened(frames.from_arrow(table))


def no_sessions(keys: pa.Schema, state: StateSchema) -> pl.DataFrame:
    """The columns of sessions."""
    columns = pa.schema([(field.name, field.type) for field in [*keys, *state.arrow]])
    return _opened(frames.from_arrow(columns.empty_table()))


def session_shapes(stage: Stage, window: SessionWindow, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """The schemas of a stage with sessions."""
    where = f"window {stage.uid}"
    refuse_clash(stage, {START, END, SESSIONS}, "what a session window adds")
    check_event_time(rows, window.on, where)
    bounds = [pa.field(_FROM, pa.int64()), pa.field(_TO, pa.int64())]
    fields = state_of(with_bounds(window.aggregates), pa.schema([*rows, *bounds]), where).fields
    refuse_clash(stage, {field.name for field in fields}, "a field of its state")
    session = pa.struct([pa.field(field.name, field.type) for field in fields])
    state = StateSchema.build([(SESSIONS, pa.list_(session), True, None)])
    return event_time.window_shapes(stage, window, rows, keys, state, no_sessions(keys, state))
