"""Counts how often each value is there, for aggregates over changes that go by values: an entry for each key and value.

    group | MAP_STATE | tag | key | value  ->  in how many of the key's rows    the map `<name>__values` of each key

Aggregates of one column and one condition share a map, which is named after the first of them. What an epoch does to
values is summed up as it comes; at its end each value that it touched is read and written once. A value that is in no
row has no entry. Floats are there as whole numbers in the same order, so that the neighbour of a value, among those of
its key, is the next entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.columns import contiguous
from state_ops.backends.base import Backend
from state_ops.backends.composite import scan_back
from state_ops.errors import InputError, PipelineError
from state_ops.rows.aggregates import Agg
from state_ops.rows.entry_buffer import after_prefix
from state_ops.rows.epoch_fold import EpochFold
from state_ops.rows.key_aggregation import merged
from state_ops.rows.row_store import RowStore, rows_of
from state_ops.schema.descriptors import GROUP, MAP, MAP_STATE, Collection, checked
from state_ops.schema.key_codec import (
    check_key_type,
    decode_floats,
    decode_keys,
    encode_floats,
    encode_keys,
    stored_key,
)
from state_ops.schema.state_schema import Field, StateSchema

OF_VALUES = ("count_distinct", "min", "max")

NUMBER, CAME, GONE = "__weir_number_", "__weir_came_", "__weir_gone_"
"""Before a set's name: by how many its values have become more, which has come to be there, and which is no more."""

NEXT = (
    "Read changes from their beginning, and leave out none that a later one takes back. What takes a row back has the"
    " values that the row had; columns that say when a change was (epoch, _commit_version) have other ones. State,"
    " offsets and tables are as they were."
)

_TAG, _VALUE, _SIGN = "__weir_tag", "__weir_value", "__weir_sign"

NewFold = Callable[[Sequence[tuple[str, Agg]], Sequence[str], RowStore, Sequence[pl.Expr]], EpochFold]


@dataclass(frozen=True, slots=True)
class ValueSet:
    """The values of a column, in rows that a condition lets count.

    Attributes:
        members: The aggregates that are made of them.
    """

    members: tuple[tuple[str, Agg], ...]

    @property
    def name(self) -> str:
        """The name of the set's first aggregate."""
        return self.members[0][0]

    @property
    def column(self) -> str:
        """The column in which rows have the values, once conditions have been evaluated."""
        name, agg = self.members[0]
        return agg.filtered(name).columns[0]

    @property
    def field(self) -> str:
        """The field of an entry, and the name of the map."""
        return f"{self.name}__values"


def value_sets(aggregates: Sequence[tuple[str, Agg]]) -> list[ValueSet]:
    """Return the sets of values that aggregates, with their conditions, are made of."""
    members: dict[tuple[str | None, str | None], list[tuple[str, Agg]]] = {}
    for name, agg in aggregates:
        if agg.kind in OF_VALUES:
            members.setdefault((agg.column, agg.where), []).append((name, agg))
    return [ValueSet(tuple(each)) for each in members.values()]


def collections(
    aggregates: Sequence[tuple[str, Agg]], rows: pa.Schema, fields: Sequence[str]
) -> tuple[Collection, ...]:
    """Return the sets as maps of a key, from each value to the number of rows that have it; as
    `distinct_values.collections`, for rows that are changes."""
    maps = []
    for values in value_sets(aggregates):
        _, agg = values.members[0]
        schema = StateSchema((Field(values.field, pa.int64(), False, 0),))
        maps.append(Collection(values.field, MAP, _value_type(agg, rows), schema, None))
    return checked(tuple(maps), tuple(fields))


def check_values(name: str, agg: Agg, rows: pa.Schema, where: str) -> None:
    """Raise PipelineError unless the values of an aggregate can be kept."""
    try:
        check_key_type(agg.column or "", stored_key(_value_type(agg, rows)))
    except PipelineError as error:
        raise PipelineError(
            f"The rows are changes, and {name} = {agg} keeps values, which those of {agg.column} cannot be: they are "
            f"{rows.field(agg.column).type}.",
            where=where,
            next="Cast the column in transform=: to a number, a text, or a timestamp of microseconds.",
        ) from error


def _value_type(agg: Agg, rows: pa.Schema) -> pa.DataType:
    """Return the type in which values are kept: numbers of every width as the widest."""
    assert agg.column is not None
    type = rows.field(agg.column).type
    if pa.types.is_integer(type):
        return pa.int64()
    if pa.types.is_floating(type):
        return pa.float64()
    return pa.string() if pa.types.is_large_string(type) else type


class ValueCounts:
    """One set of values in one subtask and epoch.

    Args:
        kept: Its map.
        keys: The key columns.
        new_fold: Makes the fold of an epoch's rows into the map.
        where: For errors.
    """

    def __init__(
        self, values: ValueSet, kept: Collection, backend: Backend, keys: pa.Schema, new_fold: NewFold, where: str
    ) -> None:
        assert kept.key is not None
        self.values = values
        self._backend, self._kept, self._where, self._keys = backend, kept, where, keys
        self._columns = pa.schema([(_TAG, pa.int32()), *keys, (_VALUE, stored_key(kept.key))])
        self._rows = RowStore(backend, kept.schema, self._columns, MAP_STATE)
        self._sums = ((kept.name, Agg("sum", _SIGN)),)
        self._by = [GROUP, *keys.names, _VALUE]
        self._fixed = [pl.lit(kept.tag, pl.Int32).alias(_TAG)]
        self._fold = new_fold(self._sums, self._by, self._rows, self._fixed)
        self._floats = pa.types.is_floating(kept.key)
        self._type = frames.polars_type(kept.key)

    @property
    def name(self) -> str:
        return self.values.name

    @property
    def nothing(self) -> list[pl.Expr]:
        """The columns of `turned`, for rows that tell nothing of values."""
        types = ((NUMBER, pl.Int64()), (CAME, self._type), (GONE, self._type))
        return [pl.lit(None, type).alias(prefix + self.name) for prefix, type in types]

    def add(self, rows: pl.DataFrame, gone: pl.Expr) -> None:
        """Take a batch of rows.

        Args:
            gone: Of which rows take others back.
        """
        value = pl.col(self.values.column)
        sign = pl.when(gone).then(pl.lit(-1, pl.Int64)).otherwise(pl.lit(1, pl.Int64)).alias(_SIGN)
        values = rows.filter(value.is_not_null()).select(*self._by[:-1], value.cast(self._type).alias(_VALUE), sign)
        self._fold.add(values.with_columns(self._stored(values[_VALUE])))

    def turned(self, judge: bool) -> Iterator[pl.DataFrame]:
        """Bring the values of all batches to state, and tell of those that have come to be there, or are no more: a row
        each, with its key.

        Args:
            judge: All rows of the epoch have come.

        Raises:
            InputError: A value was taken back more often than it was there.
        """
        for before, new in self._fold.folded(self._merge, _counts):
            if judge and (below := new[self._kept.name] < 0).any():
                broken = before.filter(below)
                value = f"{self.values.members[0][1].column}={self._natural(broken[_VALUE])[0]!r}"
                raise taken_back_too_often(broken.select(self._keys.names), self._where, value)
            was, now = before[self._kept.name] > 0, new[self._kept.name] > 0
            if (turns := was != now).any():
                came, values = now.filter(turns), self._natural(before[_VALUE].filter(turns))
                yield before.filter(turns).select(
                    *self._by[:-1],
                    (came.cast(pl.Int64) * 2 - 1).alias(NUMBER + self.name),
                    pl.select(pl.when(came).then(values)).to_series().alias(CAME + self.name),
                    pl.select(pl.when(~came).then(values)).to_series().alias(GONE + self.name),
                )
        self._rows.barrier()

    def following(self, keys: pl.DataFrame, values: pl.Series, *, down: bool) -> pl.Series:
        """Return the next value of each key that is in one of its rows; null where none follows. NaN is no number, so
        it follows last, whichever way.

        Args:
            values: One of each key, which is in none.
            down: The next lower one, else the next higher.
        """
        at = keys.select(*self._by[:-1], *self._fixed, self._stored(values.alias(_VALUE)))
        found = self._neighbours(at, down)
        present = np.array([key is not None for key in found], bool)
        _, columns = decode_keys([key for key in found if key is not None], self._columns.types)
        follows: pl.Series = pl.from_arrow(columns[-1])  # type: ignore[assignment]
        places = np.where(present, np.cumsum(present) - 1, present.sum())
        following = self._natural(pl.concat([follows, pl.Series([None], dtype=follows.dtype)])[places])
        if down and self._floats:  # NaN lies above all numbers
            nan = at.with_columns(pl.Series(_VALUE, encode_floats(np.full(len(at), np.nan))))
            rows, _ = self._rows.get(nan)
            is_nan = following.is_null() & (rows[self._kept.name] > 0) & ~values.is_nan()
            following = pl.select(pl.when(is_nan).then(float("nan")).otherwise(following)).to_series()
        return following

    def _neighbours(self, at: pl.DataFrame, down: bool) -> list[bytes | None]:
        """Return the next entry that counts, in the same map, of each of these: its key."""
        arrays = [
            contiguous(column) for column in frames.arrow(at.select(self._columns.names)).cast(self._columns).columns
        ]
        groups = at[GROUP].to_numpy().astype(np.uint16)
        edges = encode_keys(arrays, groups, MAP_STATE)
        prefixes = encode_keys(arrays[:-1], groups, MAP_STATE)
        found: list[bytes | None] = [None] * len(at)
        searching = list(range(len(at)))
        while searching:
            hits = [
                (index, hit) for index in searching if (hit := self._neighbour(prefixes[index], edges[index], down))
            ]
            rows, _ = rows_of(self._kept.schema, [value for _, (_, value) in hits])
            searching = []
            for (index, (key, _)), count in zip(hits, rows[self._kept.name].to_list(), strict=True):
                if count > 0:
                    found[index] = key
                else:  # while not all of an epoch's rows have come
                    edges[index] = key
                    searching.append(index)
        return found

    def _neighbour(self, prefix: bytes, edge: bytes, down: bool) -> tuple[bytes, bytes] | None:
        if down:
            return next(scan_back(self._backend, prefix, edge), None)
        return next(self._backend.scan(edge + b"\0", after_prefix(prefix)), None)

    def _merge(self, _: pl.DataFrame, old: pl.DataFrame, fresh: pl.DataFrame) -> pl.DataFrame:
        return merged(self._sums, old, fresh, self._where)

    def _stored(self, values: pl.Series) -> pl.Series:
        """Values as they are in the keys of entries."""
        if not self._floats:
            return values
        return pl.Series(values.name, encode_floats(values.cast(pl.Float64).to_numpy()))

    def _natural(self, stored: pl.Series) -> pl.Series:
        """Back from `_stored`."""
        if not self._floats:
            return stored
        known = stored.fill_null(0).to_numpy()
        natural = pl.Series(stored.name, decode_floats(known))
        return pl.select(pl.when(stored.is_not_null()).then(natural)).to_series().alias(stored.name)


def _counts(_: pl.DataFrame, rows: pl.DataFrame) -> np.ndarray:
    return (rows.to_series() != 0).to_numpy()


def taken_back_too_often(keys: pl.DataFrame, where: str, value: str | None = None) -> InputError:
    """Return the error of rows that are taken back more often than they came.

    Args:
        keys: Their columns, the first row of which is shown.
        value: What else these rows have.
    """
    which = shown(keys) if value is None else f"{shown(keys)} and {value}"
    return InputError(f"More rows with {which} are taken back than came.", where=where, next=NEXT)


def shown(keys: pl.DataFrame) -> str:
    """Return the columns of the first of some rows, for an error."""
    key = next(keys.drop(GROUP, strict=False).iter_rows(named=True))
    return ", ".join(f"{name}={value!r}" for name, value in key.items())
