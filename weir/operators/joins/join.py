"""Join: rows of two inputs with one key, whose event times lie near each other, or of any time.

Each row looks for partners among the other side's rows in state, and is put there itself: so each pair is found once,
by the later of its two rows. State has, by key, how many rows either side has and which numbers they bear, and each row
as an entry of its own under its number:

    value                                    left_first, left_next, left_rows, right_first, right_next, right_rows
    map "left" or "right", by number         the row, and whether it has had a partner
    index by moment                          key, side, number: when a row cannot have another partner, it goes

A number that has gone leaves a hole; numbers are found by one multi-get for all keys of a batch, without a scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import SortedRun
from state_ops.errors import PipelineError
from state_ops.keyed.key_batch import KeyBatch
from state_ops.keyed.keyed_state import GROUP, VALUE_STATE
from state_ops.keyed.list_state import expanded, position_in_key
from state_ops.moments import to_micros
from state_ops.rows import time_index
from state_ops.rows.row_store import RowStore
from state_ops.schema.descriptors import MAP, MAP_STATE, Collection, collection
from state_ops.schema.row_codec import decode_rows, encode_rows
from state_ops.schema.state_schema import StateSchema
from weir.definition import LATE, MAIN, Shapes, Stage, Subtask
from weir.operators import sides
from weir.operators.base import check_event_time, check_storable, event_times
from weir.operators.event_time import EventTimeOperator
from weir.operators.joins import ANTI, FULL, LATE_SIDE, LATE_TIME, LEFT, RIGHT, SEMI, Join

_NAMES = ("left", "right")


def _count_names(names: tuple[str, str]) -> tuple[str, ...]:
    """Return the names in state of the counts of both sides' rows."""
    return tuple(f"{name}_{count}" for name in names for count in ("first", "next", "rows"))


_COUNTS = _count_names(_NAMES)
_ROW, _FLAGS = "row", {"__weir_matched": "matched", "__weir_until": "until"}  # the fields of an entry
_MATCHED, _UNTIL = _FLAGS  # beside a row's own columns
KEPT_UNTIL = _FLAGS[_UNTIL]
_FOR_EVER = 0  # as the moment until which a row is kept
NUMBER = "__weir_number"
READ_ROWS, EVICTED = 100_000, 50_000  # at a time
_PAIRS = 200_000


@dataclass(frozen=True, slots=True)
class KeptSide:
    """The rules for the rows of one side of a join.

    Attributes:
        kept: The columns of its rows that state has, as `sides.column` calls them.
        shift: How long after its time a row may find partners, in microseconds; None: times do not matter.
        outer: A row without a partner is handed out when it goes.
        ends: A row that has found a partner is done with.
    """

    number: int
    declared: Collection
    kept: tuple[str, ...]
    shift: int | None
    outer: bool
    ends: bool

    @property
    def name(self) -> str:
        return _NAMES[self.number]


class JoinOperator(EventTimeOperator):
    """State: the rows of either side that may still find a partner."""

    def __init__(self, join: Join, subtask: Subtask) -> None:
        super().__init__(join.kind, subtask)
        shapes = subtask.shapes
        self._join, self._now = join, to_micros(subtask.epoch.now)
        self._counts = RowStore(subtask.backend, shapes.state, shapes.keys, VALUE_STATE, subtask.residence)
        outer = {LEFT: (0,), RIGHT: (1,), FULL: (0, 1), ANTI: (0,)}.get(join.how, ())
        shifts = (None, None) if join.lower is None or join.upper is None else (join.upper, -join.lower)
        self._sides = tuple(
            KeptSide(
                number,
                declared,
                tuple(sides.column(number, column) for column in row_columns(declared)),
                shifts[number],
                number in outer,
                number == 0 and join.how in (SEMI, ANTI),
            )
            for number, declared in enumerate(shapes.collections)
        )
        self._begun = False

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        self._begin()
        for side in self._sides:
            arrived = sides.narrowed(self._stage, side.number, rows)
            if arrived.num_rows:
                yield from self._arrived(side, arrived)

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        self._counts.flush()
        return iter(())

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        self._begin()
        if self._join.times is not None and (self._progress.drain or self._progress.now is not None):
            now = self._progress.now
            yield from self._gone(None if self._progress.drain or now is None else now - 1)
        self._counts.barrier()

    def _begin(self) -> None:
        """Remove the rows that have expired by the epoch's clock, so that they find no partner in the epoch."""
        if not self._begun and self._join.times is None:
            for _ in self._gone(self._now):
                pass
        self._begun = True

    # -- rows that arrive

    def _arrived(self, side: KeptSide, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        join, other, times = self._join, self._sides[1 - side.number], None
        if join.times is not None:
            times = self._times(side, rows)
            if self._progress.before is not None and (late := times < self._progress.before).any():
                self.rows_late += int(late.sum())
                if LATE in self._shapes.outputs:
                    yield self._late_of(side, rows.filter(pa.array(late)), times[late])
                rows, times = rows.filter(pa.array(~late)), times[~late]
        if not rows.num_rows:
            return
        batch = KeyBatch(frames.from_arrow(rows.select([*self._stage.key, GROUP])), self._shapes.keys, self._where)
        codes = batch.codes(frames.from_arrow(rows.select(self._stage.key)), "join")
        counts = self._counted(batch)
        matched = np.zeros(len(codes), bool)
        for owners, numbers, partners in self._stored(batch, other, counts):
            pairs = self._paired(side, codes, times, owners, partners)
            matched |= pairs.counts > 0
            if join.how not in (SEMI, ANTI):
                for first, second in pairs.indices():
                    yield self._handed_out(side, rows.take(first), partners.take(second))
            fresh = np.zeros(len(owners), bool)
            if other.outer or other.ends:
                fresh[pairs.partners()] = True
                fresh &= ~partners.column(_MATCHED).to_numpy()
            if other.ends and fresh.any():
                if join.how == SEMI:
                    keys = pa.Table.from_arrays(
                        [column.take(pa.array(owners[fresh])) for column in batch.columns], schema=self._shapes.keys
                    )
                    yield self._handed_out(other, beside(keys, partners.filter(pa.array(fresh))), None)
                self._remove(batch, other, owners[fresh], numbers[fresh], partners.filter(pa.array(fresh)))
                counts[f"{other.name}_rows"] -= np.bincount(owners[fresh], minlength=len(batch))
            elif fresh.any():
                self._write(batch, other, owners[fresh], numbers[fresh], _marked(partners.filter(pa.array(fresh))))
        if side.ends:
            if join.how == SEMI and matched.any():
                yield self._handed_out(side, rows.filter(pa.array(matched)), None)
            rows, codes = rows.filter(pa.array(~matched)), codes[~matched]
            times, matched = None if times is None else times[~matched], matched[~matched]
        self._insert(batch, side, codes, rows, times, matched, counts)
        self._count(batch, counts)

    def _counted(self, batch: KeyBatch) -> dict[str, np.ndarray]:
        """Return the counts of a batch's keys by `_COUNTS`, to be changed and put back by `_count`."""
        stored, _ = self._counts.get(batch.grouped)
        fields = zip(_COUNTS, self._shapes.state.arrow.names, strict=True)
        return {count: stored[field].to_numpy().copy() for count, field in fields}

    def _count(self, batch: KeyBatch, counts: dict[str, np.ndarray]) -> None:
        present = counts["left_rows"] + counts["right_rows"] > 0
        rows = pl.DataFrame([counts[name] for name in _COUNTS], self._shapes.state.arrow.names)
        self._counts.put(batch.grouped, rows, present)

    def _stored(
        self, batch: KeyBatch, side: KeptSide, counts: dict[str, np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, pa.Table]]:
        """Yield the rows of a side that state has for a batch's keys, some at a time: the codes of their keys, their
        numbers, and they themselves. Ahead of what is left, holes are forgotten."""
        first, after = counts[f"{side.name}_first"], counts[f"{side.name}_next"]
        having = np.flatnonzero(counts[f"{side.name}_rows"] > 0)
        owners, numbers = expanded(having, first[having], after[having])
        oldest = after.copy()
        for start in range(0, len(owners), READ_ROWS):
            some = slice(start, start + READ_ROWS)
            values = self._backend.multi_get(self._names(batch, side, owners[some], numbers[some]))
            here = np.fromiter((value is not None for value in values), bool, len(values))
            rows = decoded(side, values)
            np.minimum.at(oldest, owners[some][here], numbers[some][here])
            yield owners[some][here], numbers[some][here], rows
        first[having] = oldest[having]

    def _paired(
        self, side: KeptSide, codes: np.ndarray, times: np.ndarray | None, owners: np.ndarray, partners: pa.Table
    ) -> _Pairs:
        join = self._join
        if join.times is None or join.lower is None or join.upper is None or times is None:
            return _Pairs.of(codes, None, owners, None)
        moments = self._times(self._sides[1 - side.number], partners)
        near = (join.lower, join.upper) if side.number == 0 else (-join.upper, -join.lower)
        return _Pairs.of(codes, (times + near[0], times + near[1]), owners, moments)

    def _insert(
        self,
        batch: KeyBatch,
        side: KeptSide,
        codes: np.ndarray,
        rows: pa.Table,
        times: np.ndarray | None,
        matched: np.ndarray,
        counts: dict[str, np.ndarray],
    ) -> None:
        """Put rows into state. counts: of the batch's keys, which are told of it."""
        if not len(codes):
            return
        numbers = counts[f"{side.name}_next"][codes] + position_in_key(codes)
        kept = rows.select(side.kept).append_column(_MATCHED, pa.array(matched))
        moments = self._moments(side, times, len(codes))
        if self._join.times is None:
            until = np.full(len(codes), _FOR_EVER) if moments is None else moments
            kept = kept.append_column(_UNTIL, pa.array(until))
        self._write(batch, side, codes, numbers, kept)
        if moments is not None:
            self._backend.write([(entry, b"") for entry in self._index(batch, side, codes, numbers, moments)])
        more = np.bincount(codes, minlength=len(batch))
        counts[f"{side.name}_next"] += more
        counts[f"{side.name}_rows"] += more

    def _write(self, batch: KeyBatch, side: KeptSide, codes: np.ndarray, numbers: np.ndarray, rows: pa.Table) -> None:
        values = _encoded(side, rows)
        names = self._names(batch, side, codes, numbers)
        order = sorted(range(len(names)), key=names.__getitem__)
        self._backend.write(SortedRun([names[row] for row in order], [values[row] for row in order]))

    def _remove(self, batch: KeyBatch, side: KeptSide, codes: np.ndarray, numbers: np.ndarray, rows: pa.Table) -> None:
        names = self._names(batch, side, codes, numbers)
        moments = self._moments(side, self._times(side, rows), len(codes)) if self._join.times is not None else None
        if moments is None:
            moments = rows.column(_UNTIL).to_numpy()
            indexed = moments != _FOR_EVER
            codes, numbers, moments = codes[indexed], numbers[indexed], moments[indexed]
        self._backend.write([], names + self._index(batch, side, codes, numbers, moments))

    def _times(self, side: KeptSide, rows: pa.Table) -> np.ndarray:
        """Return int64[n], the event times of rows of a side in microseconds."""
        assert self._join.times is not None, "the join goes by them"
        name = self._join.times[side.number]
        return event_times(pa.table({name: rows.column(sides.column(side.number, name))}), name, self._where)

    def _moments(self, side: KeptSide, times: np.ndarray | None, count: int) -> np.ndarray | None:
        """Return the times at which rows go, in microseconds; None: never."""
        if times is not None and side.shift is not None:
            return times + side.shift
        return None if self._join.ttl is None else np.full(count, self._now + self._join.ttl)

    def _names(self, batch: KeyBatch, side: KeptSide, codes: np.ndarray, numbers: np.ndarray) -> list[bytes]:
        """Return the keys of rows in state."""
        return batch.encoded(MAP_STATE, codes, [side.declared.tag], [pa.array(numbers)])

    def _index(
        self, batch: KeyBatch, side: KeptSide, codes: np.ndarray, numbers: np.ndarray, moments: np.ndarray
    ) -> list[bytes]:
        keys = [column.take(pa.array(codes)) for column in batch.columns]
        number = pa.array(np.full(len(codes), side.number, np.int8))
        return time_index.entries(moments, [*keys, number, pa.array(numbers)], batch.groups[codes])

    # -- rows that go

    def _gone(self, upto: int | None) -> Iterator[tuple[str, pa.Table]]:
        """Forget the rows that find no partner any more; yields those whose side is outer and that have had none.

        Args:
            upto: The moment up to which; None: all.
        """
        columns = pa.schema([*self._shapes.keys, (sides.SIDE, pa.int8()), (NUMBER, pa.int64())])
        for piece in time_index.due(self._backend, self._groups, upto, EVICTED):
            groups, entries = time_index.owners(piece, columns)
            if self._progress.drain and self._join.times is not None:
                newest = max(time_index.moment_of(entry) for entry in piece) + 1
                self.closed_upto = newest if self.closed_upto is None else max(self.closed_upto, newest)
            of_side = entries.column(sides.SIDE).to_numpy()
            deletes = list(piece)
            keyed = frames.from_arrow(entries.select(self._stage.key)).with_columns(
                pl.Series(GROUP, groups.astype(np.int32))
            )
            batch = KeyBatch(keyed, self._shapes.keys, self._where)
            codes = batch.codes(keyed, "join")
            counts = self._counted(batch)
            for side in self._sides:
                mine = np.flatnonzero(of_side == side.number)
                names = self._names(batch, side, codes[mine], entries.column(NUMBER).to_numpy()[mine])
                if side.outer and names:
                    alone = self._alone(side, entries.select(self._stage.key).take(pa.array(mine)), names)
                    if alone.num_rows:
                        yield self._handed_out(side, alone, None)
                deletes += names
                # An entry of the index is there exactly as long as its row is.
                counts[f"{side.name}_rows"] -= np.bincount(codes[mine], minlength=len(batch))
                emptied = counts[f"{side.name}_rows"] == 0  # nobody need ever look for what has gone
                counts[f"{side.name}_first"][emptied] = counts[f"{side.name}_next"][emptied]
            self._backend.write([], deletes)
            self._count(batch, counts)

    def _alone(self, side: KeptSide, keys: pa.Table, names: Sequence[bytes]) -> pa.Table:
        """Return the rows in state that have had no partner, with their keys."""
        rows = decoded(side, self._backend.multi_get(names))
        return beside(keys, rows).filter(pa.array(~rows.column(_MATCHED).to_numpy()))

    # -- what comes out

    def _late_of(self, side: KeptSide, rows: pa.Table, times: np.ndarray) -> tuple[str, pa.Table]:
        """Late rows of a side, with its name, their times and nulls for the other side's columns."""
        shape, count = self._shapes.outputs[LATE], rows.num_rows
        given = [*(rows.column(name) for name in self._stage.key), pa.array([side.name] * count), pa.array(times)]
        names = sides.values_of(self._stage, side.number, rows.schema).names
        values = [rows.column(sides.column(side.number, name)) for name in names]
        missing = len(shape) - len(given) - len(values)
        others = list(shape)[len(given) + (len(values) if side.number == 0 else 0) :][:missing]
        nulls = [pa.nulls(count, field.type) for field in others]
        arrays = given + (values + nulls if side.number == 0 else nulls + values)
        return LATE, pa.table(arrays, names=shape.names).cast(shape)

    def _handed_out(self, side: KeptSide, rows: pa.Table, partners: pa.Table | None) -> tuple[str, pa.Table]:
        """Return the rows of one side, with their partners or with nulls for them."""
        shape = self._shapes.outputs[MAIN]
        of_side = [rows, partners] if side.number == 0 else [partners, rows]
        arrays = [rows.column(name) for name in self._stage.key]
        for table, names in zip(of_side, _value_names(self._join, self._shapes), strict=True):
            for name in names:
                field = shape.field(len(arrays))
                arrays.append(pa.nulls(rows.num_rows, field.type) if table is None else table.column(name))
        return MAIN, pa.table(arrays, names=shape.names).cast(shape)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Which rows are partners: of row i those at first[i] to first[i] + counts[i] in `order`."""

    first: np.ndarray
    counts: np.ndarray
    order: np.ndarray

    @classmethod
    def of(
        cls,
        codes: np.ndarray,
        between: tuple[np.ndarray, np.ndarray] | None,
        owners: np.ndarray,
        moments: np.ndarray | None,
    ) -> _Pairs:
        """Return the pairs of rows with partners of the same key.

        Args:
            codes: int64[n], the rows' keys.
            between: int64[n] twice, from when to when a row's partners are; None: at any time.
            owners: int64[m], the keys of what may be partners.
            moments: int64[m], their times.
        """
        if between is None or moments is None:
            order = np.argsort(owners, kind="stable")
            ranks = owners[order]
            first, after = np.searchsorted(ranks, codes, "left"), np.searchsorted(ranks, codes, "right")
            return cls(first, after - first, order)
        order = np.lexsort((moments, owners))
        distinct = np.unique(moments)
        span = len(distinct) + 1
        ranks = owners[order] * span + np.searchsorted(distinct, moments[order])
        first = np.searchsorted(ranks, codes * span + np.searchsorted(distinct, between[0], "left"))
        after = np.searchsorted(ranks, codes * span + np.searchsorted(distinct, between[1], "right"))
        return cls(first, np.maximum(after - first, 0), order)

    def indices(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Yield the pairs, some at a time: indices of the rows, and of their partners."""
        ends = np.cumsum(self.counts)
        total = int(ends[-1]) if len(ends) else 0
        for start in range(0, total, _PAIRS):
            pair = np.arange(start, min(start + _PAIRS, total))
            row = np.searchsorted(ends, pair, "right")
            yield pa.array(row), pa.array(self.order[self.first[row] + pair - (ends[row] - self.counts[row])])

    def partners(self) -> np.ndarray:
        """Return which rows are partners of any row."""
        steps = np.zeros(len(self.order) + 1, np.int64)
        paired = self.counts > 0
        np.add.at(steps, self.first[paired], 1)
        np.add.at(steps, (self.first + self.counts)[paired], -1)
        return self.order[np.cumsum(steps)[:-1] > 0]


def row_columns(declared: Collection) -> tuple[str, ...]:
    """Return the columns of the rows that a side keeps."""
    return tuple(part.name for field in declared.schema.arrow if field.name == _ROW for part in field.type)


def _encoded(side: KeptSide, rows: pa.Table) -> list[bytes]:
    """Entries of rows: the row as one field, so that its columns may have any names."""
    columns = {field: rows.column(flag) for flag, field in _FLAGS.items() if flag in rows.column_names}
    if side.kept:
        values = rows.select(side.kept).rename_columns(list(row_columns(side.declared)))
        columns[_ROW] = pa.chunked_array(values.to_struct_array())
    schema = side.declared.schema
    return encode_rows(schema, pa.table(columns).select(schema.arrow.names).cast(schema.arrow))


def decoded(side: KeptSide, values: Sequence[bytes | None]) -> pa.Table:
    """Return the rows of those entries that are there."""
    fields = decode_rows(side.declared.schema, [value for value in values if value is not None])
    columns = {flag: fields.column(field) for flag, field in _FLAGS.items() if field in fields.column_names}
    if side.kept:
        row = fields.column(_ROW).combine_chunks()
        columns = {**{name: row.field(number) for number, name in enumerate(side.kept)}, **columns}
    return pa.table(columns)


def _marked(rows: pa.Table) -> pa.Table:
    """Return the rows marked as having had a partner."""
    at = rows.column_names.index(_MATCHED)
    return rows.set_column(at, rows.schema.field(at), pa.array(np.ones(rows.num_rows, bool)))


def beside(keys: pa.Table, rows: pa.Table) -> pa.Table:
    """Return the rows of a side behind their key columns."""
    return pa.table([*keys.columns, *rows.columns], names=[*keys.column_names, *rows.column_names])


def _value_names(join: Join, shapes: Shapes) -> tuple[list[str], list[str]]:
    """Return the columns of either side that are handed out, as `sides.column` calls them."""
    left, right = (
        [sides.column(side, name) for name in row_columns(declared)] for side, declared in enumerate(shapes.collections)
    )
    return left, [] if join.how in (SEMI, ANTI) else right


def join_shapes(stage: Stage, join: Join, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """Return the output: key columns, then the left side's columns, then the right side's; of `semi` and `anti` the
    left side's alone. rows: the columns of both, as `sides.wide` has them."""
    where = f"{join.kind} {stage.uid}"
    columns = [sides.values_of(stage, side, rows) for side in (0, 1)]
    for side, own in enumerate(columns) if join.times is not None else ():
        assert join.times is not None
        name = join.times[side]
        if name not in own.names:
            raise PipelineError(
                f"T{sides.name_of(stage, side)[1:]}, the {_NAMES[side]} side of {stage.uid}, has no column"
                f" {name!r} beside its key.",
                where=where,
                next=f"Say which has its event time: side(..., time=...). Its columns are: {', '.join(own.names)}.",
            )
        check_event_time(own, name, where)
    left, right = columns
    taken = {*keys.names, *left.names}
    named = [
        field.with_name(field.name + join.suffix if field.name in taken else field.name)
        for field in (() if join.how in (SEMI, ANTI) else right)
    ]
    twice = [field.name for field in named if field.name in taken]
    if twice or len({field.name for field in named}) < len(named):
        raise PipelineError(
            f"{stage.uid} would hand out {(twice or [field.name for field in named])[0]!r} twice.",
            where=where,
            next="Say another suffix=, or rename the column in the select of its side.",
        )
    output = pa.schema([*keys, *left, *named])
    check_storable(output, where, "Cast or drop it in the select of its side")
    outputs = {MAIN: output}
    if (late := _late_shape(stage, join, keys, left, right)) is not None:
        outputs[LATE] = late
    if join.how in (SEMI, ANTI):  # of what is only looked for, no more than when it was
        right = pa.schema([right.field(join.times[1])] if join.times is not None else [])
    names, kept = names_in_state(keys.names), []
    for name, own in zip(names, (left, right), strict=True):
        fields: list[tuple[str, pa.DataType, bool, Any]] = [(_FLAGS[_MATCHED], pa.bool_(), False, False)]
        fields += [(KEPT_UNTIL, pa.int64(), False, _FOR_EVER)] if join.times is None else []
        fields += [(_ROW, pa.struct(list(own)), True, None)] if len(own) else []
        try:
            schema = StateSchema.build(fields)
            kept.append(collection(name, MAP, pa.int64(), schema, None))
        except PipelineError as error:
            advice = "Leave it out, or cast its column, in the select of its side."
            raise PipelineError(error.what, where=where, next=advice) from error
    counts = StateSchema.build([(name, pa.int64(), False, 0) for name in _count_names(names)])
    return Shapes(keys, counts, outputs, tuple(kept))


def names_in_state(keys: Sequence[str]) -> tuple[str, str]:
    """Return the names of the two sides in state: left and right, with underscores where a key column has such a name.

    The names of their counts differ from key columns too.
    """
    names = _NAMES
    while {*names, *_count_names(names)} & {*keys}:
        names = f"{names[0]}_", f"{names[1]}_"
    return names


def _late_shape(stage: Stage, join: Join, keys: pa.Schema, left: pa.Schema, right: pa.Schema) -> pa.Schema | None:
    """Return the columns of late rows: the key, which side a row is of and its time, the left side's columns, then the
    right side's. None: no row is late, or they could not have these, and nobody has asked for them."""
    if join.times is None:
        return None
    where = f"{join.kind} {stage.uid}, late"
    added = [(LATE_SIDE, pa.string()), (LATE_TIME, pa.timestamp("us", "UTC"))]
    columns = [*keys, *(pa.field(name, kind) for name, kind in added), *left]
    taken = {field.name for field in [*keys, *left]}
    columns += [field.with_name(field.name + join.suffix) if field.name in taken else field for field in right]
    names = [field.name for field in columns]
    twice = [name for name in names if names.count(name) > 1]
    if twice and join.late is None:
        return None
    if twice:
        raise PipelineError(
            f"The table of late rows of {stage.uid} would have two columns {twice[0]!r}.",
            where=where,
            next=f"Rename the column in the select of its side: {LATE_SIDE!r} says which side a row is of, and"
            f" {LATE_TIME!r} its time.",
        )
    late = pa.schema(columns)
    if join.late is not None:
        check_storable(late, where, "Cast or drop it in the select of its side")
    return late
