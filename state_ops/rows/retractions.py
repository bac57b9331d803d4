"""Aggregates over rows of which some take others back: sums of columns that are negative in these.

    count()    1, and -1 in a row that takes one back
    sum(c)     c, and -c
    mean(c)    both, the first one as a decimal, so that nothing of a row is left when it is gone

State has in `ROWS` how many rows a key is made of: without one, the key is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.errors import InputError, PipelineError
from state_ops.rows.aggregates import Agg, count
from state_ops.schema.state_schema import StateSchema

ROWS = "key__rows"
_SIGNED = "__weir_signed_"


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

    def of(self, gone: pl.Expr) -> pl.Expr:
        """Its column, negative in the rows that are gone."""
        name = _SIGNED + self.field
        sign = pl.when(gone).then(pl.lit(-1, pl.Int64)).otherwise(pl.lit(1, pl.Int64))
        if self.column is None:
            return sign.alias(name)
        if self.counts:
            return pl.when(pl.col(self.column).is_not_null()).then(sign).alias(name)
        if not pa.types.is_decimal(self.type):
            return (pl.col(self.column).cast(pl.Int128) * sign).alias(name)
        exact = pl.col(self.column).cast(pl.Decimal(38, self.type.scale))
        return pl.when(gone).then(-exact).otherwise(exact).alias(name)


class Retractions:
    """Aggregates of a key from which rows can be taken back.

    Attributes:
        aggregates: By field of state, over the columns of `frame`.

    Args:
        aggregates: Without conditions.
        state: As `state_of` says.
    """

    def __init__(self, aggregates: Sequence[tuple[str, Agg]], state: StateSchema) -> None:
        fields = [*aggregates, (ROWS, count())]
        types = {field.name: field.type for field in state.fields}
        self._signed = [
            _Signed(field, agg.column, counts, types[field])
            for name, agg in fields
            for field, counts in _parts(name, agg)
        ]
        self.aggregates = tuple((each.field, Agg("sum", _SIGNED + each.field)) for each in self._signed)

    def frame(self, rows: pl.DataFrame, by: Sequence[str], gone: pl.Expr) -> pl.DataFrame:
        """Rows with the columns that are added up, beside those that they are grouped by.

        Args:
            gone: Of which rows take others back.
        """
        return rows.select(*by, *[each.of(gone) for each in self._signed])


def state_of(aggregates: Sequence[tuple[str, Agg]], rows: pa.Schema, where: str) -> StateSchema:
    """The fields that hold aggregates of such rows.

    Raises:
        PipelineError: One of them cannot take rows back.
    """
    fields = []
    for name, agg in aggregates:
        _check(name, agg, rows, where)
        fields += [(field, _type(agg, counts, rows)) for field, counts in _parts(name, agg)]
    return StateSchema.build((field, type, False, 0) for field, type in [*fields, (ROWS, pa.int64())])


def _parts(name: str, agg: Agg) -> list[tuple[str, bool]]:
    """The fields of an aggregate, and which of them count rows."""
    return [(field, agg.kind == "count" or field == f"{name}__count") for field in agg.fields(name)]


def _type(agg: Agg, counts: bool, rows: pa.Schema) -> pa.DataType:
    if counts or agg.column is None:
        return pa.int64()
    type = rows.field(agg.column).type
    if pa.types.is_decimal(type):
        return pa.decimal128(38, type.scale)
    return pa.decimal128(38, 0) if agg.kind == "mean" else pa.int64()


def has_rows(rows: pl.DataFrame) -> np.ndarray:
    """bool[n], the keys that have a row, by their state."""
    return (rows[ROWS] > 0).to_numpy()


def unbalanced(rows: pl.DataFrame) -> np.ndarray:
    """bool[n], the keys of which something is left, by their state. While not all of an epoch's rows have come, that
    may be a row taken back that is still to come."""
    return rows.select(pl.any_horizontal(pl.all() != 0)).to_series().to_numpy()


def left(keys: pl.DataFrame, rows: pl.DataFrame, where: str) -> np.ndarray:
    """bool[n], the keys that have a row.

    Args:
        rows: Their state.

    Raises:
        InputError: More rows of a key were taken back than there were.
    """
    below = rows[ROWS] < 0
    if below.any():
        key = next(keys.filter(below).iter_rows(named=True))
        shown = ", ".join(f"{name}={value!r}" for name, value in key.items())
        raise InputError(
            f"More rows with {shown} are taken back than came.",
            where=where,
            next="Read changes from their beginning, and leave out none that a later one takes back; state, offsets and"
            " tables are as they were.",
        )
    return has_rows(rows)


def _check(name: str, agg: Agg, rows: pa.Schema, where: str) -> None:
    why = agg.irrevocable(name)
    if why is not None:
        raise PipelineError(
            f"The rows are changes, and {why}.", where=where, next="Take count, or sum or mean of integers or decimals."
        )
    if agg.column is not None and agg.kind != "count" and pa.types.is_floating(rows.field(agg.column).type):
        raise PipelineError(
            f"The rows are changes, and {name} = {agg} adds floats, from which no number can be taken back exactly.",
            where=where,
            next=f"Cast {agg.column} to a decimal in transform=.",
        )
