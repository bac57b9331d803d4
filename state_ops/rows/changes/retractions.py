"""Aggregates over rows of which some take others back: sums of columns that are negative in these, and what is left of
the values of others.

    count()              1, and -1 in a row that takes one back
    sum(c)               c, and -c
    mean(c)              both, the first one as a decimal, so that nothing of a row is left when it is gone
    count_distinct(c)    1 of a value of `value_counts` that comes to be there, and -1 of one that is there no more
    min(c), max(c)       the least or greatest value that is there; where it goes, the next one is looked up

State has in `ROWS` how many rows a key is made of: without one, the key is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.errors import InputError, PipelineError
from state_ops.rows.aggregates import Agg, count
from state_ops.rows.changes.value_counts import (
    CAME,
    GONE,
    NEXT,
    NUMBER,
    OF_VALUES,
    ValueCounts,
    check_values,
    shown,
    taken_back_too_often,
)
from state_ops.schema.state_schema import StateSchema

ROWS = "key__rows"
_SIGNED, _LOST = "__weir_signed_", "__weir_lost_"


@dataclass(frozen=True, slots=True)
class _Signed:
    """One field of state.

    Attributes:
        column: Of its rows; None: all count.
        counts: It has the number of rows in which the column is not null, and not the sum of what they have there.
        type: In state.
    """

    field: str
    column: str | None
    counts: bool
    type: pa.DataType

    @property
    def name(self) -> str:
        """The name of the column that is added up."""
        return _SIGNED + self.field

    def of(self, gone: pl.Expr, types: Mapping[str, pl.DataType]) -> pl.Expr:
        """Return the column, negative in the rows that are gone.

        types: The types of the rows' columns.
        """
        sign = pl.when(gone).then(pl.lit(-1, pl.Int64)).otherwise(pl.lit(1, pl.Int64))
        if self.column is None:
            return sign.alias(self.name)
        if self.counts:
            return pl.when(pl.col(self.column).is_not_null()).then(sign).alias(self.name)
        if not pa.types.is_decimal(self.type):
            return (pl.col(self.column).cast(pl.Int128) * sign).alias(self.name)
        column = pl.col(self.column)
        if types[self.column] == pl.Boolean:  # which Polars makes no decimal of
            column = column.cast(pl.Int8)
        exact = column.cast(pl.Decimal(38, self.type.scale))
        return pl.when(gone).then(-exact).otherwise(exact).alias(self.name)


class Retractions:
    """Aggregates of a key from which rows can be taken back.

    Attributes:
        aggregates: By field of state, over the columns of `frame`.
        partials: These, and what there is of an epoch's rows beside them until they have come to state.

    Args:
        aggregates: Without conditions.
        state: As `state_of` says.
        by: The key group and the key.
        counts: Of the values of which some of them are.
    """

    def __init__(
        self,
        aggregates: Sequence[tuple[str, Agg]],
        state: StateSchema,
        by: Sequence[str],
        counts: Sequence[ValueCounts],
    ) -> None:
        fields = [*aggregates, (ROWS, count())]
        types = {field.name: field.type for field in state.fields}
        self._by, self._counts = list(by), counts
        self._signed = [
            _Signed(field, agg.column, counted, types[field])
            for name, agg in fields
            if agg.kind not in OF_VALUES
            for field, counted in _parts(name, agg)
        ]
        sums = [(each.field, Agg("sum", each.name)) for each in self._signed]
        members = [(name, agg.kind, each) for each in counts for name, agg in each.values.members]
        self._extremes = [member for member in members if member[1] != "count_distinct"]
        distinct = [(name, Agg("sum", NUMBER + each.name)) for name, kind, each in members if kind == "count_distinct"]
        extremes = [(name, Agg(kind, CAME + each.name)) for name, kind, each in self._extremes]
        lost = [(_LOST + name, Agg(kind, GONE + each.name)) for name, kind, each in self._extremes]
        self._are_left = [pl.col(name) != 0 for name, _ in distinct] + [
            pl.col(name).is_not_null() for name, _ in extremes
        ]
        self.aggregates = (*sums, *distinct, *extremes)
        self.partials = (*self.aggregates, *lost)
        self._nothing = [column for each in counts for column in each.nothing]
        self._empty: pl.DataFrame | None = None

    def frame(self, rows: pl.DataFrame, gone: pl.Expr) -> pl.DataFrame:
        """Count a batch's values, and give the columns that are added up, beside those that rows are grouped by.

        Args:
            gone: Of which rows take others back.
        """
        for each in self._counts:
            each.add(rows, gone)
        frame = rows.select(*self._by, *[each.of(gone, rows.schema) for each in self._signed], *self._nothing)
        self._empty = frame.clear()
        return frame

    def turned(self, judge: bool) -> Iterator[pl.DataFrame]:
        """Bring the values of all batches to state; of those that have come to be there or are there no more, rows like
        those of `frame`.

        Args:
            judge: All rows of the epoch have come.
        """
        for each in self._counts:
            for turned in each.turned(judge):
                yield turned if self._empty is None else pl.concat([self._empty, turned], how="diagonal")

    def settled(self, keys: pl.DataFrame, fresh: pl.DataFrame, new: pl.DataFrame) -> pl.DataFrame:
        """Return the new state of keys, in which the next value stands where the least or greatest one is there no
        more.

        Args:
            fresh: Their partials.
            new: As these leave it.
        """
        for name, kind, each in self._extremes:
            lost = fresh[_LOST + name]
            is_lost = lost.is_not_null() & pl.select(lost.eq_missing(new[name])).to_series()
            at = np.flatnonzero(is_lost.to_numpy())
            if len(at):
                following = each.following(keys[at], lost[at], down=kind == "max")
                places = np.arange(len(new))
                places[at] = len(new) + np.arange(len(at))
                new = new.with_columns(pl.concat([new[name], following.cast(new[name].dtype)])[places])
        return new

    def unbalanced(self, rows: pl.DataFrame) -> np.ndarray:
        """Return bool[n], the keys whose state has something left.

        While not all of an epoch's rows have come, that may be a row taken back that is still to come.
        """
        return _any(rows, [pl.col(each.field) != 0 for each in self._signed] + self._are_left)

    def left(self, keys: pl.DataFrame, rows: pl.DataFrame, where: str) -> np.ndarray:
        """Return bool[n], the keys that have a row.

        Args:
            rows: Their state.

        Raises:
            InputError: More rows of a key were taken back than there were, or others.
        """
        if (below := rows[ROWS] < 0).any():
            raise taken_back_too_often(keys.filter(below), where)
        there = has_rows(rows)
        if self._counts and (others := ~there & _any(rows, self._are_left)).any():
            raise InputError(
                f"All rows with {shown(keys.filter(others))} are taken back, but not with the values that they had.",
                where=where,
                next=NEXT,
            )
        return there


def _any(rows: pl.DataFrame, conditions: Sequence[pl.Expr]) -> np.ndarray:
    return rows.select(pl.any_horizontal(*conditions)).to_series().to_numpy()


def state_of(aggregates: Sequence[tuple[str, Agg]], rows: pa.Schema, where: str) -> StateSchema:
    """Return the fields that hold aggregates of such rows.

    Raises:
        PipelineError: One of them cannot take rows back.
    """
    fields: list[tuple[str, pa.DataType, bool, object]] = []
    for name, agg in aggregates:
        _check(name, agg, rows, where)
        if agg.kind in OF_VALUES:
            fields += agg.parts(name, rows)
        else:
            fields += [(field, _type(agg, counts, rows), False, 0) for field, counts in _parts(name, agg)]
    return StateSchema.build([*fields, (ROWS, pa.int64(), False, 0)])


def _parts(name: str, agg: Agg) -> list[tuple[str, bool]]:
    """Return the fields of an aggregate, and which of them count rows."""
    return [(field, agg.kind == "count" or field == f"{name}__count") for field in agg.fields(name)]


def _type(agg: Agg, counts: bool, rows: pa.Schema) -> pa.DataType:
    if counts or agg.column is None:
        return pa.int64()
    type = rows.field(agg.column).type
    if pa.types.is_decimal(type):
        return pa.decimal128(38, type.scale)
    return pa.decimal128(38, 0) if agg.kind == "mean" else pa.int64()


def has_rows(rows: pl.DataFrame) -> np.ndarray:
    """Return bool[n], the keys that have a row, by their state."""
    return (rows[ROWS] > 0).to_numpy()


def _check(name: str, agg: Agg, rows: pa.Schema, where: str) -> None:
    why = agg.irrevocable(name)
    if why is not None:
        raise PipelineError(
            f"The rows are changes, and {why}.",
            where=where,
            next="Take count, count_distinct, min or max, or sum or mean of integers or decimals.",
        )
    if agg.kind in OF_VALUES:
        check_values(name, agg, rows, where)
    elif agg.column is not None and agg.kind != "count" and pa.types.is_floating(rows.field(agg.column).type):
        raise PipelineError(
            f"The rows are changes, and {name} = {agg} adds floats, from which no number can be taken back exactly.",
            where=where,
            next=f"Cast {agg.column} to a decimal in transform=.",
        )
