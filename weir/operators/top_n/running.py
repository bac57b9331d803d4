"""The first rows of each key by some columns: handed out as changes, or once, when they are final.

Batches wait in memory, reduced to the first rows of each key whenever they take too much room, and on the local disk
beyond that (`state_ops.rows.spill`). State is read and written once an epoch and key, at the barrier: of each key one
row, with a list of its first rows in their order.

    without `until`    key               ->  rows, and when the key is forgotten
    with `until`       (until, key)      ->  rows, ordered by `until` inside a key group: what is final is one range

Rows that are final at the barrier of their own epoch are never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.errors import PipelineError
from state_ops.keyed.keyed_state import GROUP, VALUE_STATE, WINDOW_STATE
from state_ops.moments import to_micros
from state_ops.rows.expiring_rows import ExpiringRows
from state_ops.rows.row_store import RowStore
from state_ops.rows.spill import Spill
from state_ops.schema.key_codec import decode_keys, encode_int64, group_prefix
from state_ops.schema.row_codec import decode_rows
from state_ops.schema.state_schema import StateSchema
from weir.definition import LATE, MAIN, Shapes, Stage, Subtask
from weir.definition.change_feed import CHANGE_TYPE, DELETE, INSERT, UPDATE, UPDATE_BEFORE
from weir.operators.base import check_event_time, check_storable, event_times, refuse_clash
from weir.operators.event_time import EventTimeOperator
from weir.operators.forgotten import EXPIRES
from weir.operators.top_n import ROWS, TopN

_UNTIL, _RANK, _AT = "__weir_until", "__weir_rank", "__weir_at"
_MOMENT = pa.timestamp("us", tz="UTC")
_GATHERED_BYTES = 64 << 20  # of rows that wait in memory before they are reduced
_PART_KEYS = 100_000  # of which state is read at a time
_FIRE_KEYS = 50_000
_SWEPT = 100_000
_LAST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Ranking:
    """Which rows come first.

    Attributes:
        keys: The columns of which each has a ranking of its own. Rows have their key group too.
        by: Columns, and whether the largest value comes first. Nulls are smaller than all else.
        others: All other columns: rows that are equal in `by` are in their order.
    """

    keys: tuple[str, ...]
    by: tuple[tuple[str, bool], ...]
    others: tuple[str, ...]
    n: int
    ties: bool

    def best(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the first rows of each key, in the order of key groups, keys and ranks, with their ranks. Of wholly
        equal rows one that has a smaller `_AT` comes first, if there is such a column."""
        rows = self._near(rows)
        names = [*self.keys, *(name for name, _ in self.by)]
        largest_first = [*[False] * len(self.keys), *(largest for _, largest in self.by)]
        sorting = pl.arg_sort_by(names, descending=largest_first, nulls_last=largest_first)
        order = rows.select(sorting).to_series().to_numpy()
        order = order[np.argsort(rows[GROUP].to_numpy()[order], kind="stable")]  # two bytes are sorted by radix
        position, rank, tied = self._placed(rows.select(names)[order])
        near = rank < self.n
        kept = rows[order[near]]
        position, rank = position[near], rank[near]
        if tied[near].any():
            rest = [*self.others, *([_AT] if _AT in rows.columns else [])]
            kept = kept.sort(
                [GROUP, *names, *rest],
                descending=[False, *largest_first, *[False] * len(rest)],
                nulls_last=[False, *largest_first, *[name == _AT for name in rest]],
            )
        if not self.ties:
            first = position < self.n
            kept, rank = kept.filter(first), position[first]
        return kept.with_columns(pl.Series(_RANK, rank + 1))

    def _near(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Less rows, where one column tells that the others cannot be the first of their key: nothing is sorted for
        it. Minima and maxima leave out nulls and NaN, which have their place here."""
        name, largest = self.by[0]
        if self.n > 1 or rows[name].dtype.is_float() or rows[name].null_count():
            return rows
        column = pl.col(name)
        return rows.filter(column == (column.max() if largest else column.min()).over(self.keys))

    def ranks(self, rows: pl.DataFrame) -> np.ndarray:
        """Return int64[n], the ranks of rows that are in the order of `best`."""
        position, rank, _ = self._placed(rows)
        return (rank if self.ties else position) + 1

    def _placed(self, rows: pl.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for sorted rows their places among the rows of their key.

        These are: the number of rows before each, the number of rows before all that are equal in `by`, and whether the
        row before it is one of these.
        """
        new_key = _differs(rows, self.keys)
        new_value = new_key | _differs(rows, [name for name, _ in self.by])
        at = np.arange(len(rows))
        position = at - at[new_key][np.cumsum(new_key) - 1]
        return position, position[new_value][np.cumsum(new_value) - 1], ~new_value


def _differs(rows: pl.DataFrame, names: Sequence[str]) -> np.ndarray:
    """Return bool[n], whether a row differs from the one before it in any of these columns."""
    differing = [pl.col(name).ne_missing(pl.col(name).shift()) for name in names]
    flags = rows.select(pl.any_horizontal(differing)).to_series().to_numpy().copy()
    flags[:1] = True
    return flags


class TopNOperator(EventTimeOperator):
    """State: the first rows of each key; with `until`, of each key whose ranks are not final."""

    def __init__(self, rule: TopN, subtask: Subtask) -> None:
        super().__init__(rule.kind, subtask)
        stage, shapes, backend, residence = subtask.stage, subtask.shapes, subtask.backend, subtask.residence
        self._rule, self._now = rule, to_micros(subtask.epoch.now)
        self._values = value_columns(shapes.state)
        names = [name for name, _ in rule.by]
        others = tuple(name for name in self._values if name not in names)
        self._key = (GROUP, *([_UNTIL] if rule.until else []), *stage.key)
        self._ranking = Ranking(self._key[1:], rule.by, others, rule.n, rule.ties)
        self._expiring: ExpiringRows | None = None
        self._rows: RowStore
        if rule.until is None:
            self._expiring = ExpiringRows(backend, shapes.state, shapes.keys, VALUE_STATE, residence, EXPIRES)
            self._rows = self._expiring
        else:
            self._rows = RowStore(backend, shapes.state, _by_until(shapes.keys), WINDOW_STATE, residence)
        stored = frames.from_arrow(_by_until(shapes.keys).empty_table()).schema
        self._types = {GROUP: pl.UInt16(), **{name: stored[name] for name in self._key[1:]}}
        self._types |= frames.from_arrow(_rows_schema(shapes.state).empty_table()).schema
        self._gathered: list[pl.DataFrame] = []
        self._spill = Spill(residence.target, residence.groups, stage.key)
        self._added = 0

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        times: np.ndarray | None = None
        if self._rule.until is not None:
            times = event_times(rows, self._rule.until, self._where)
            if self._progress.before is not None:
                late = times <= self._progress.before
                yield from self._late(rows, late)
                rows, times = rows.filter(pa.array(~late)), times[~late]
        if not rows.num_rows:
            return
        frame = frames.from_arrow(rows.select([GROUP, *self._stage.key, *self._values]))
        if times is not None:
            frame = frame.with_columns(pl.Series(_UNTIL, times))
        self._gathered.append(frame.select([pl.col(name).cast(kind) for name, kind in self._types.items()]))
        if self._bytes() > _GATHERED_BYTES:
            self._gathered = [self._reduced(self._gathered)]
            if self._bytes() > _GATHERED_BYTES // 2:
                self._spill.add(self._gathered.pop())

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        for fresh in self._fresh():
            yield from self._fold(fresh)
        self._rows.barrier()

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        progress = self._progress
        if self._expiring is not None:
            yield from self._current()
        elif progress.now is None and not progress.drain:
            yield from self.pause()
        else:
            yield from self._final(_LAST if progress.drain or progress.now is None else progress.now)

    # -- rows of the epoch

    def _bytes(self) -> int:
        return sum(int(frame.estimated_size()) for frame in self._gathered)

    def _reduced(self, gathered: Sequence[pl.DataFrame]) -> pl.DataFrame:
        return self._ranking.best(pl.concat(gathered)).drop(_RANK)

    def _fresh(self) -> Iterator[pl.DataFrame]:
        """Yield the first rows of each key among the epoch's, in the order of keys: all rows of a key are in one
        table."""
        gathered, self._gathered = self._gathered, []
        if not len(self._spill):
            if gathered:
                yield self._reduced(gathered)
            return
        if gathered:
            self._spill.add(self._reduced(gathered))
        for pieces in self._spill.take():
            whole = pieces.pop()
            while pieces:
                whole = self._reduced([whole, pieces.pop()])
            yield whole if whole.is_empty() else self._reduced([whole])

    # -- state

    def _fold(self, fresh: pl.DataFrame) -> Iterator[tuple[str, pa.Table]]:
        """Merge rows into state. Yields what that changes, if it is handed out.

        Args:
            fresh: At most the first rows of each key, in the order of keys.
        """
        starts = np.append(np.flatnonzero(_differs(fresh, self._key)), len(fresh))
        for at in range(0, len(starts) - 1, _PART_KEYS):
            some = starts[at : at + _PART_KEYS + 1]
            rows = fresh[int(some[0]) : int(some[-1])]
            keys = fresh.select(self._key)[some[:-1]]
            stored, seen = self._rows.get(keys)
            there = seen if self._expiring is None else seen & ~self._expired(stored)
            before = self._exploded(keys.filter(there), stored.filter(there))
            before = before.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias(_AT))
            rows = rows.with_columns(pl.lit(None, pl.Int64).alias(_AT))
            best = self._ranking.best(pl.concat([before, rows]))
            self._put(keys, stored, seen, best)
            if self._rule.until is None:
                yield from self._changes(before, best)

    def _put(self, keys: pl.DataFrame, stored: pl.DataFrame, seen: np.ndarray, best: pl.DataFrame) -> None:
        """Store the rows of these keys, of those that have new ones at least.

        Args:
            stored: Their rows in state, where `seen` says that there are some.
            best: Their first rows, in the order of keys.
        """
        starts = np.flatnonzero(_differs(best, self._key))
        lists = self._listed(best, starts)
        changed = np.logical_or.reduceat(best[_AT].is_null().to_numpy(), starts)
        had_end = np.zeros(len(keys), bool)
        if self._expiring is not None:  # a row that is not among the first keeps its key from being forgotten too
            had_end = stored[EXPIRES].is_not_null().to_numpy()
            changed |= had_end if self._rule.ttl is None else True
        if not changed.any():
            return
        put = pl.DataFrame({ROWS: lists}).filter(changed)
        ends = None if self._rule.ttl is None else self._now + self._rule.ttl
        if self._expiring is not None:
            put = put.with_columns(pl.lit(ends, pl.Int64).cast(pl.Datetime("us", "UTC")).alias(EXPIRES))
        if self._expiring is None or (ends is None and not had_end.any()):  # the index by moments stays as it is
            self._rows.put(keys.filter(changed), put, np.ones(len(put), bool), ascending=True)
            return
        self._added += int((changed & ~seen).sum())
        self._expiring.replace(
            keys.filter(changed), put, pl.concat([keys, stored], how="horizontal").filter(seen & changed)
        )

    def _listed(self, rows: pl.DataFrame, starts: np.ndarray) -> pl.Series:
        """Return the rows of each key as one value. starts: of the keys, whose rows lie side by side."""
        values = frames.stored(rows.select(self._values), _rows_schema(self._shapes.state))
        offsets = pa.array(np.append(starts, len(rows)).astype(np.int32))
        lists = pa.ListArray.from_arrays(offsets, values.combine_chunks().to_struct_array().combine_chunks())
        return frames.from_arrow(pa.table([lists], [ROWS]))[ROWS]

    def _exploded(self, keys: pl.DataFrame, stored: pl.DataFrame) -> pl.DataFrame:
        """Return the rows in state of these keys, in the order of keys and ranks."""
        listed = keys.with_columns(stored[ROWS])
        rows = listed.explode(ROWS, empty_as_null=False).unnest(ROWS)
        return rows.select([pl.col(name).cast(kind) for name, kind in self._types.items()])

    def _expired(self, stored: pl.DataFrame) -> np.ndarray:
        over = pl.col(EXPIRES).dt.epoch("us") <= self._now
        return stored.select(over.fill_null(False)).to_series().to_numpy()

    # -- without until

    def _current(self) -> Iterator[tuple[str, pa.Table]]:
        assert self._expiring is not None
        for fresh in self._fresh():
            yield from self._fold(fresh)
        number = max(_SWEPT, 2 * self._added)  # more than come, else state would grow as long as rows do
        self._expiring.forget(self._now, max(1, number // len(self._groups)))
        self._rows.barrier()

    def _changes(self, before: pl.DataFrame, best: pl.DataFrame) -> Iterator[tuple[str, pa.Table]]:
        """Yield the changes of the ranks of some keys: rows that go, then rows that get another rank, then new ones.

        Args:
            before: Their first rows until now, numbered in `_AT`.
            best: Their first rows from now on.
        """
        ranks = self._ranking.ranks(before)
        was = before.with_columns(pl.Series(_RANK, ranks))
        at = best[_AT]
        stays = at.drop_nulls().to_numpy()
        goes = np.ones(len(was), bool)
        goes[stays] = False
        old = best.filter(at.is_not_null())
        moved = old[_RANK].to_numpy() != ranks[stays]
        if self._rule.rank is None:
            moved[:] = False
        yield from self._change(was.filter(goes), DELETE)
        yield from self._change(was[stays[moved]], UPDATE_BEFORE)
        yield from self._change(old.filter(moved), UPDATE)
        yield from self._change(best.filter(at.is_null()), INSERT)

    def _change(self, rows: pl.DataFrame, kind: str) -> Iterator[tuple[str, pa.Table]]:
        if len(rows):
            yield MAIN, self._handed_out(rows.with_columns(pl.lit(kind).alias(CHANGE_TYPE)))

    # -- with until

    def _final(self, upto: int) -> Iterator[tuple[str, pa.Table]]:
        """Hand out the ranks that are final by then, and store the others."""
        final = pl.col(_UNTIL) <= upto
        closing = []
        for fresh in self._fresh():
            closing.append(fresh.filter(final))
            for _ in self._fold(fresh.filter(~final)):
                pass
        rows = pl.concat([*closing, pl.DataFrame(schema=self._types)]).sort(GROUP, maintain_order=True)
        taken = self._rows.take(final)
        if taken is not None:
            stored = [self._exploded(part.select(self._key), part) for part in taken]
            yield from self._closed_ranks(pl.concat([*stored, rows]))
        else:
            yield from self._close_from_backend(upto, rows)
        self._rows.barrier()

    def _close_from_backend(self, upto: int, rows: pl.DataFrame) -> Iterator[tuple[str, pa.Table]]:
        """Close ranks as `_close` does, but read them from the backend, key group by key group.

        `rows` are the rows of the epoch, which the backend does not have.
        """
        ends = np.searchsorted(rows[GROUP].to_numpy(), np.asarray(self._groups), side="right").tolist()
        entries: list[tuple[bytes, bytes]] = []
        taken = 0
        for group, end in zip(self._groups, ends, strict=True):
            entries += _stored(self._backend, group, upto)
            if len(entries) + end - taken >= _FIRE_KEYS or group == self._groups[-1]:
                stored = frames.from_arrow(_decoded(self._shapes.keys, self._shapes.state, entries))
                some = pl.concat([self._exploded(stored.select(self._key), stored), rows[taken:end]])
                self._backend.write([], [key for key, _ in entries])
                yield from self._closed_ranks(some)
                entries, taken = [], end

    def _closed_ranks(self, rows: pl.DataFrame) -> Iterator[tuple[str, pa.Table]]:
        if not len(rows):
            return
        newest: int = rows[_UNTIL].max()  # type: ignore[assignment]
        self.closed_upto = newest if self.closed_upto is None else max(self.closed_upto, newest)
        moment = pl.col(_UNTIL).cast(pl.Datetime("us", "UTC"))
        until = str(self._rule.until)
        yield MAIN, self._handed_out(self._ranking.best(rows).with_columns(moment.alias(until)))

    def _handed_out(self, rows: pl.DataFrame) -> pa.Table:
        shape = self._shapes.outputs[MAIN]
        if self._rule.rank is not None:
            rows = rows.with_columns(pl.col(_RANK).alias(self._rule.rank))
        return frames.stored(rows.select(shape.names), shape)


# -- what is stored


def value_columns(state: StateSchema) -> tuple[str, ...]:
    """Return the columns of the rows that are kept, without those by which they are kept."""
    return tuple(_rows_schema(state).names)


def _rows_schema(state: StateSchema) -> pa.Schema:
    return pa.schema(list(state.arrow.field(ROWS).type.value_type))


def _by_until(keys: pa.Schema) -> pa.Schema:
    return pa.schema([(_UNTIL, pa.int64()), *keys])


def _stored(backend: Backend, group: int, upto: int) -> list[tuple[bytes, bytes]]:
    """Return the entries of a key group that are final by then."""
    start = group_prefix(group, WINDOW_STATE)
    end = group_prefix(group, WINDOW_STATE + 1) if upto == _LAST else start + encode_int64(upto + 1)
    return list(backend.scan(start, end))


def _decoded(keys: pa.Schema, state: StateSchema, entries: Sequence[tuple[bytes, bytes]]) -> pa.Table:
    """Return the rows of some entries of state: key group, until, key columns, fields."""
    groups, columns = decode_keys([key for key, _ in entries], [pa.int64(), *keys.types])
    rows = decode_rows(state, [value for _, value in entries])
    names = [GROUP, _UNTIL, *keys.names, *state.arrow.names]
    return pa.table([groups, *columns, *rows.columns], names=names)


def open_ranks(rule: TopN, keys: pa.Schema, state: StateSchema, backend: Backend, groups: range) -> Iterator[pa.Table]:
    """Yield the ranks in some key groups that are not final: key columns, until, rows."""
    for group in groups:
        entries = _stored(backend, group, _LAST)
        if entries:
            yield _shown(rule, _decoded(keys, state, entries))


def open_ranks_schema(rule: TopN, keys: pa.Schema, state: StateSchema) -> pa.Schema:
    """Return the columns of `open_ranks`."""
    return _shown(rule, _decoded(keys, state, [])).schema


def _shown(rule: TopN, stored: pa.Table) -> pa.Table:
    names = [name for name in stored.column_names if name not in (GROUP, _UNTIL, *_FIELDS)]
    until = stored.column(_UNTIL).cast(_MOMENT)
    columns = [*(stored.column(name) for name in names), until, stored.column(ROWS)]
    return pa.table(columns, names=[*names, str(rule.until), ROWS])


_FIELDS = (ROWS, EXPIRES)


def top_n_shapes(stage: Stage, rule: TopN, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """Return the output: the input's columns, the rank, and without `until` what kind of a change each row is."""
    where = f"top_n {stage.uid}"
    _check_columns(stage, rule, rows, where)
    check_storable(rows, where, "Cast or drop it in select= or transform=")
    kept = [field.with_nullable(True) for field in rows if field.name not in (*stage.key, rule.until)]
    fields = [(ROWS, pa.list_(pa.field("item", pa.struct(kept), nullable=False)), False, None)]
    if rule.until is None:
        fields.append((EXPIRES, _MOMENT, True, None))
    try:
        state = StateSchema.build(fields)
    except PipelineError as error:
        advice = "Leave it out, or cast its column, in select= or transform=."
        raise PipelineError(error.what, where=where, next=advice) from error
    added = [] if rule.rank is None else [pa.field(rule.rank, pa.int64())]
    added += [pa.field(CHANGE_TYPE, pa.string())] if rule.until is None else []
    return Shapes(keys, state, {MAIN: pa.schema([*rows, *added]), LATE: rows})


def _check_columns(stage: Stage, rule: TopN, rows: pa.Schema, where: str) -> None:
    refuse_clash(stage, {*_FIELDS}, "a field of its state")
    for name, _ in rule.by:
        if name not in rows.names:
            raise PipelineError(
                f"The input of {stage.uid} has no column {name!r}, by which its rows are to be ranked.",
                where=where,
                next=f"Its columns are: {', '.join(rows.names)}.",
            )
        if pa.types.is_nested(rows.field(name).type):
            raise PipelineError(
                f"{name} is {rows.field(name).type}, which has no order.",
                where=where,
                next="Rank by numbers, texts, times or booleans; make a column of it in select= or transform=.",
            )
    if rule.until is not None:
        check_event_time(rows, rule.until, where)
    if rule.rank in rows.names:
        raise PipelineError(
            f"The input of {stage.uid} has a column {rule.rank!r} already.",
            where=where,
            next='Say rank="another name", or rank=None to hand out none.',
        )
