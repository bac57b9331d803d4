"""An epoch's rows for a table with keys, netted to what becomes of each key: its newest row, or nothing.

Rows lie in a file that is mapped, so that only those that are asked for come into memory. Their keys are netted range
by range of the first key column, as many at a time as fit:

    rows      key   b    x    a    b(delete)    y         in the order in which they came
    ranges    a..b: a -> row 2, b goes    x..y: x -> row 1, y -> row 4

An old image (`update_preimage`) takes its key's row away, unless the same change gives the key another one: the new
image may have another key, or be left out by a condition. Two images of a key that follow each other are of one change,
wherever a batch or a file ends between them. An old image that comes second may also be of the next change, which takes
the row before it away again. Then the two are the same row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import PipelineError
from weir.definition.change_feed import (
    CHANGE_TYPE,
    CHANGES,
    COMMIT_TIME,
    EPOCH,
    TAKEN_BACK,
    UPDATE,
    UPDATE_BEFORE,
    VERSION,
)
from weir.definition.sink import Sink

ROW, _GROUP, _IS_NEW = "__weir_row", "__weir_group", "__weir_is_new"
_RANGE_ROWS = 1_000_000  # whose keys are netted at a time
_SAMPLES = 64  # values for each range, by which ranges are cut
_PAIRS = 1 << 16  # that are compared at a time
_OF_CHANGE = (EPOCH, VERSION, COMMIT_TIME)  # columns that say when a row changed, and so may differ in the same row


@dataclass(frozen=True)
class Changes:
    """Changes of keys, netted from the rows of epochs.

    Attributes:
        key: The table's key columns.
        order_by: By which the newest row of a key is found among those of an epoch; none: it is the last.
        all: The rows of one or several epochs, one epoch after the other, each row with its number by its place.
        epochs: The numbers of the rows with which epochs begin.
    """

    key: tuple[str, ...]
    order_by: tuple[str, ...]
    all: pa.Table
    epochs: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        """The number of rows before they are netted."""
        return int(self.all.num_rows)

    @property
    def schema(self) -> pa.Schema:
        return columns_of(self.all.schema)

    def rows(self, numbers: np.ndarray[Any, Any]) -> pa.Table:
        """Return rows by their numbers, in that order.

        Arrow's own `take` would first copy all rows into one piece.
        """
        order = np.argsort(numbers, kind="stable")
        ascending, parts = numbers[order], []
        for batch, begin in zip(self._batches, self._starts, strict=True):
            first, end = np.searchsorted(ascending, (begin, begin + batch.num_rows))
            if first < end:
                parts.append(batch.take(pa.array(ascending[first:end] - begin)))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return pa.Table.from_batches(parts, self.schema).combine_chunks().take(pa.array(back))

    @cached_property
    def _batches(self) -> list[pa.RecordBatch]:
        return list(self.all.select(self.schema.names).to_batches())

    @cached_property
    def _starts(self) -> list[int]:
        """The number of the first row of each batch."""
        return [0, *np.cumsum([batch.num_rows for batch in self._batches])][:-1]

    def ranges(self) -> Iterator[pl.DataFrame]:
        """Keys, each once, as plain columns in ascending order; `ROW` is the number of the row that a key has from now
        on, null for none."""
        if not self.count:
            return
        cuts = self._cuts
        for at in range(len(cuts) + 1):
            least, end = cuts[at - 1] if at else None, cuts[at] if at < len(cuts) else None
            netted = self._netted([self._within(frame, least, end) for frame in self._keys()])
            if len(netted):
                yield netted

    def _keys(self) -> Iterator[pl.DataFrame]:
        """Yield the keys of all rows, and what says which one is the newest."""
        changes = CHANGE_TYPE in self.all.column_names
        markers = [CHANGE_TYPE, *([self._version] if self._version is not None else [])] if changes else []
        names = dict.fromkeys([*self.key, *self.order_by, *markers])
        at = 0
        for batch in self.all.select(names).to_batches():
            group = int(np.searchsorted(self.epochs, at, side="right"))
            numbered = _frame(pa.Table.from_batches([batch])).with_row_index(ROW, at)
            yield numbered.with_columns(pl.col(ROW).cast(pl.Int64), pl.lit(group).alias(_GROUP))
            at += batch.num_rows

    @cached_property
    def _version(self) -> str | None:
        """The column that a key's old and new row of one change have alike, if there is one for certain."""
        known = [name for name in (VERSION, *self.order_by) if name in (VERSION, EPOCH)]
        return next((name for name in known if name in self.all.column_names), None)

    def _within(self, keys: pl.DataFrame, least: Any, end: Any) -> pl.DataFrame:
        column, conditions = pl.col(self.key[0]), []
        if least is not None:
            conditions.append(column >= pl.lit(least, keys.schema[self.key[0]]))
        if end is not None:
            conditions.append(column < pl.lit(end, keys.schema[self.key[0]]))
        return keys.filter(conditions) if conditions else keys

    def _netted(self, parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
        keys, order = pl.concat(parts), [_GROUP, *self.order_by]
        if CHANGE_TYPE in keys.columns:
            keys = self._without_replaced(keys)
            if self.order_by:
                keys, order = keys.with_columns(self._is_new(keys).alias(_IS_NEW)), [*order, _IS_NEW]
        if self.order_by:
            keys = keys.sort(order, maintain_order=True, nulls_last=False)
        newest = keys.unique(list(self.key), keep="last", maintain_order=True)
        if CHANGE_TYPE in newest.columns:
            goes = pl.col(CHANGE_TYPE).is_in(TAKEN_BACK)
            newest = newest.with_columns(pl.when(goes).then(None).otherwise(pl.col(ROW)).alias(ROW))
        return newest.select(*self.key, ROW).sort(self.key)

    def _without_replaced(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Leave out old images whose change gives the key a new row."""
        in_front = self._neighbours(-1)
        if self._version is not None:
            comes = ~pl.col(CHANGE_TYPE).is_in(TAKEN_BACK).fill_null(False)
            return keys.filter(~in_front & (comes | ~comes.any().over(*self.key, _GROUP, self._version)))
        behind = keys.filter(self._neighbours(1))[ROW]
        return keys.filter(~in_front & ~pl.col(ROW).is_in(behind.filter(~self._same(behind - 1, behind)).implode()))

    def _is_new(self, keys: pl.DataFrame) -> pl.Series:
        """Return which rows are not older than others of their key that `order_by` does not tell apart.

        An old image is, unless it takes back the row before it."""
        old, one_order = pl.col(CHANGE_TYPE).eq_missing(UPDATE_BEFORE), [*self.key, _GROUP, *self.order_by]
        before = pl.all_horizontal(pl.col(name).eq_missing(pl.col(name).shift(1)) for name in one_order)
        comes = ~pl.col(CHANGE_TYPE).shift(1).is_in(TAKEN_BACK).fill_null(False) & pl.col(ROW).shift(1).is_not_null()
        side_by_side = keys.sort(one_order, maintain_order=True)
        asked = side_by_side.select(ROW, pl.col(ROW).shift(1).alias("before"), (old & before & comes).alias("asked"))
        asked = asked.filter("asked")
        takes_back = asked[ROW].filter(self._same(asked["before"], asked[ROW]))
        return keys.select(~old | pl.col(ROW).is_in(takes_back.implode())).to_series()

    def _neighbours(self, by: int) -> pl.Expr:
        """Return which rows are old images that have the new image of their key `by` rows before them."""
        same = [pl.col(name) == pl.col(name).shift(by) for name in (*self.key, _GROUP)]
        images = (pl.col(CHANGE_TYPE) == UPDATE_BEFORE) & (pl.col(CHANGE_TYPE).shift(by) == UPDATE)
        return (images & (pl.col(ROW).shift(by) == pl.col(ROW) - by) & pl.all_horizontal(same)).fill_null(False)

    def _same(self, ones: pl.Series, others: pl.Series) -> pl.Series:
        """Return which of some rows, by their numbers, are equal to the others, whenever they changed."""
        same = [pl.Series([], dtype=pl.Boolean)]
        for at in range(0, len(ones), _PAIRS):
            one, other = (_frame(self.rows(numbers[at : at + _PAIRS].to_numpy())) for numbers in (ones, others))
            columns = [name for name in one.columns if name not in _OF_CHANGE]
            equal = pl.DataFrame([one[name].eq_missing(other[name]).alias(name) for name in columns])
            same.append(equal.select(pl.all_horizontal(pl.all())).to_series())
        return pl.concat(same)

    @cached_property
    def _cuts(self) -> list[Any]:
        """Values of the first key column with which ranges begin, except for the first one."""
        ranges = -(-self.count // _RANGE_ROWS)
        if ranges < 2:
            return []
        each = max(self.count // (ranges * _SAMPLES), 1)
        parts = [keys[self.key[0]].gather_every(each) for keys in self._keys()]
        sample = pl.concat(parts).sort()
        cuts = sample.gather([len(sample) * at // ranges for at in range(1, ranges)])
        return cuts.unique(maintain_order=True).to_list()


def spill(sink: Sink, schema: pa.Schema, epochs: Iterable[Iterator[pa.RecordBatch]], target: Path) -> Changes:
    """Write the rows of epochs to a file, which the changes need as long as they are used.

    Args:
        schema: Of the rows. Columns that they lack are null.
        epochs: One after the other; a later one's rows are newer than all of an earlier one's.
    """
    begins, at = [], 0
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batches in epochs:
            begins.append(at)
            for batch in batches:
                rows = pa.Table.from_batches([batch])
                writer.write_table(rows if rows.schema == schema else frames.aligned(rows, schema))
                at += rows.num_rows
    rows = pa.ipc.open_file(pa.memory_map(str(target))).read_all()
    return Changes(sink.capabilities.newest_of, sink.capabilities.newest_by, rows, tuple(begins))


def no_changes(sink: Sink) -> Changes:
    """Return the changes of no rows."""
    return Changes(sink.capabilities.newest_of, sink.capabilities.newest_by, pa.schema([]).empty_table())


def columns_of(schema: pa.Schema) -> pa.Schema:
    """Return the table's columns, by those of the rows that are handed out."""
    return pa.schema([field for field in schema if field.name != CHANGE_TYPE])


def check_columns(sink: Sink, schema: pa.Schema) -> None:
    """Raise PipelineError unless rows of these columns can be netted."""
    where = f"table {sink.name}"
    key, order_by = sink.capabilities.newest_of, sink.capabilities.newest_by
    for name, what in (*((name, "key") for name in key), *((name, "order_by") for name in order_by)):
        if name not in columns_of(schema).names:
            raise PipelineError(
                f"The table {sink.name} has the {what} {name}, and its rows have no such column.",
                where=where,
                next=f"They have: {', '.join(columns_of(schema).names)}.",
            )
    for name in key:
        type = schema.field(name).type
        if not (pa.types.is_string(type) or pa.types.is_integer(type) or _is_plain(type)):
            raise PipelineError(
                f"{name} is {type}, which is no key of the table {sink.name}.",
                where=where,
                next="Use texts, integers, booleans, bytes, decimals, dates or timestamps: floats and nested values do "
                "not tell what is equal.",
            )
    if CHANGE_TYPE in schema.names and not pa.types.is_string(schema.field(CHANGE_TYPE).type):
        raise PipelineError(
            f"{CHANGE_TYPE} is {schema.field(CHANGE_TYPE).type}.", where=where, next=f"Say {', '.join(CHANGES)}."
        )


def _is_plain(type: pa.DataType) -> bool:
    tests = (pa.types.is_boolean, pa.types.is_binary, pa.types.is_decimal, pa.types.is_date, pa.types.is_timestamp)
    return any(test(type) for test in tests)


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame
