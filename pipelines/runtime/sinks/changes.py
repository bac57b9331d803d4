"""An epoch's rows for a table with keys, netted to what becomes of each key: its newest row, or nothing.

Rows lie in a file that is mapped, so that only those that are asked for come into memory. Their keys are netted range
by range of the first key column, as many at a time as fit:

    rows      key   b    x    a    b(delete)    y         in the order in which they came
    ranges    a..b: a -> row 2, b goes    x..y: x -> row 1, y -> row 4

An old image (`update_preimage`) takes its key's row away, unless the same change gives the key another one: the new
image may have another key, or be left out by a condition.
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

from pipelines.runtime.connectors.delta_sink import (
    CHANGE_TYPE,
    CHANGES,
    EPOCH,
    TAKEN_BACK,
    UPDATE,
    UPDATE_BEFORE,
    VERSION,
    UpsertSink,
)
from state_ops.arrow import frames
from state_ops.errors import PipelineError

ROW, _GROUP = "__weir_row", "__weir_group"
_RANGE_ROWS = 1_000_000  # whose keys are netted at a time
_SAMPLES = 64  # values for each range, by which ranges are cut


@dataclass(frozen=True)
class Changes:
    """What becomes of keys.

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
        """How many rows there are before they are netted."""
        return int(self.all.num_rows)

    @property
    def schema(self) -> pa.Schema:
        return columns_of(self.all.schema)

    def rows(self, numbers: np.ndarray[Any, Any]) -> pa.Table:
        """Rows by their numbers, in that order. Arrow's own `take` would first copy all rows into one piece."""
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
        """By batch, the number of its first row."""
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
        """The keys of all rows, and what says which one is the newest."""
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
        keys = pl.concat(parts)
        if CHANGE_TYPE in keys.columns and self._version is not None:
            comes = ~pl.col(CHANGE_TYPE).is_in(TAKEN_BACK).fill_null(False)
            keys = keys.filter(comes | ~comes.any().over(*self.key, _GROUP, self._version))
        if self.order_by:
            keys = keys.sort([_GROUP, *self.order_by], maintain_order=True, nulls_last=False)
        newest = keys.unique(list(self.key), keep="last", maintain_order=True)
        if CHANGE_TYPE in newest.columns:
            goes = pl.col(CHANGE_TYPE).is_in(TAKEN_BACK)
            newest = newest.with_columns(pl.when(goes).then(None).otherwise(pl.col(ROW)).alias(ROW))
        return newest.select(*self.key, ROW).sort(self.key)

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


def spill(sink: UpsertSink, schema: pa.Schema, epochs: Iterable[Iterator[pa.RecordBatch]], target: Path) -> Changes:
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
                if CHANGE_TYPE in rows.column_names:
                    rows = rows.filter((~_replaced(rows, sink.key)).to_arrow())
                writer.write_table(rows if rows.schema == schema else frames.aligned(rows, schema))
                at += rows.num_rows
    return Changes(sink.key, sink.order_by, pa.ipc.open_file(pa.memory_map(str(target))).read_all(), tuple(begins))


def _replaced(rows: pa.Table, key: Sequence[str]) -> pl.Series:
    """Which rows are old images whose key's new one is the next row, as operators hand them out."""
    pair = (pl.col(CHANGE_TYPE) == UPDATE_BEFORE) & (pl.col(CHANGE_TYPE).shift(-1) == UPDATE)
    same = pl.all_horizontal(pl.col(name) == pl.col(name).shift(-1) for name in key)
    return _frame(rows.select([*key, CHANGE_TYPE])).select((pair & same).fill_null(False)).to_series()


def no_changes(sink: UpsertSink) -> Changes:
    """Those of no rows."""
    return Changes(sink.key, sink.order_by, pa.schema([]).empty_table())


def columns_of(schema: pa.Schema) -> pa.Schema:
    """The table's columns, by those of the rows that are handed out."""
    return pa.schema([field for field in schema if field.name != CHANGE_TYPE])


def check_columns(sink: UpsertSink, schema: pa.Schema) -> None:
    """Whether rows of these columns can be netted. Raises PipelineError."""
    where = f"table {sink.name}"
    for name, what in (*((name, "key") for name in sink.key), *((name, "order_by") for name in sink.order_by)):
        if name not in columns_of(schema).names:
            raise PipelineError(
                f"The table {sink.name} has the {what} {name}, and its rows have no such column.",
                where=where,
                next=f"They have: {', '.join(columns_of(schema).names)}.",
            )
    for name in sink.key:
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
