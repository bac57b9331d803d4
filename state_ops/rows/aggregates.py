"""Aggregates that can be kept as state: each has a partial over a batch, a merge of two partials, and a result.

`count` counts rows. `count_distinct` counts values, which `state_ops.rows.distinct_values` keeps. All aggregates but
`count` ignore nulls. Without rows, counts and sums are 0 and the others are null.

- Sums of integers and booleans are int64, sums of decimals decimal128(38, scale). A sum that does not fit is refused.
- Means are float64.
- A NaN counts in `min` and `max` only if there are no other values.

`where="price < 10000"` restricts an aggregate to the rows of which that is true, as SQL's FILTER does. The caller
evaluates the condition, row by row: `Agg.filtered` is the aggregate of the resulting column.

`first` and `last` have two meanings:

- In `aggregate` and `window` they have an order (`ordered`), so that slicing cannot change them. They take the row
  where the order columns are smallest or largest, of all rows that ever came. Rows with a null in the value or in an
  order column are left out. Of rows that tie, the smallest value is first and the largest last; lists, maps and structs
  are compared by their first parts that differ.
- In `state.fold` they have no order. Rows count as they come, and `last` takes the last row's value even if it is null.

Example:
    >>> from weir import agg, aggregate, files, testing
    >>> prices = aggregate(
    ...     "prices",
    ...     files("{landing}/*.parquet"),
    ...     key="item",
    ...     order_by="day",
    ...     orders=agg.count(),
    ...     buyers=agg.count_distinct("buyer"),
    ...     about=agg.approx_distinct("buyer"),
    ...     median=agg.approx_quantile("price", 0.5),
    ...     cheap=agg.count(where="price < 10"),
    ...     paid=agg.sum("price"),
    ...     mean=agg.mean("price"),
    ...     low=agg.min("price"),
    ...     high=agg.max("price"),
    ...     opening=agg.first("price"),
    ...     closing=agg.last("price"),
    ... )
    >>> paid = enumerate([8.0, 12.0, 7.0])
    >>> rows = [{"item": "tea", "day": day, "buyer": "ann", "price": price} for day, price in paid]
    >>> for name, value in testing.run(prices).epoch(rows).row(0, named=True).items():
    ...     print(name, value)
    item tea
    orders 3
    buyers 1
    about 1
    median 8.0
    cheap 2
    paid 27.0
    mean 9.0
    low 7.0
    high 12.0
    opening 8.0
    closing 7.0
    epoch 1
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from state_ops.errors import PipelineError
from state_ops.lazily import Lazily
from state_ops.rows.sketches import DISTINCT, QUANTILE, estimates, gathered, united

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa
else:
    pl, pa = Lazily("polars"), Lazily("pyarrow")

_NAMES = re.compile(r"`((?:[^`]|``)+)`|(\w+)")
_SKETCHES = (DISTINCT, QUANTILE)
_OF_VALUES = ("count_distinct", *_SKETCHES)
_TAKEN = "__weir_taken_"


@dataclass(frozen=True, slots=True)
class Agg:
    """One aggregate over the rows of a key.

    Attributes:
        kind: "count", "count_distinct", "approx_distinct", "approx_quantile", "sum", "mean", "min", "max", "first" or
            "last".
        column: The column that is aggregated; None: rows are counted. Of a count, it is null in rows that do not count.
        order_by: The columns that decide which row is first or last; empty where rows come in order.
        where: Which rows count, in Spark SQL; None: all.
        share: Of a quantile.
        summed: Partials have the number or the sketch of their values in place of these.
        listed: Of a count of distinct values, state has the values themselves as one list, since what is counted may
            yet grow together.
    """

    kind: str
    column: str | None = None
    order_by: tuple[str, ...] = ()
    where: str | None = None
    share: float | None = None
    summed: bool = False
    listed: bool = False

    def __post_init__(self) -> None:
        if self.share is not None and not 0 <= self.share <= 1:
            raise PipelineError(f"approx_quantile({self.column!r}, {self.share!r}) is no share.", next="Say e.g. 0.95.")
        if self.where is not None and not (isinstance(self.where, str) and self.where.strip()):
            raise PipelineError(
                f"{self.kind}(where={self.where!r}) has no condition.", next='Say e.g. where="price < 10000".'
            )

    def __str__(self) -> str:
        """Return the aggregate as its author wrote it."""
        column = [repr(part) for part in (self.column, self.share) if part is not None]
        return f"{self.kind}({', '.join([*column, *([] if self.where is None else [f'where={self.where!r}'])])})"

    def ordered(self, order_by: tuple[str, ...]) -> Agg:
        """Return this aggregate with these columns as its order if it needs an order, else unchanged."""
        return replace(self, order_by=order_by) if self.kind in ("first", "last") else self

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns that it reads."""
        return (*(() if self.column is None else (self.column,)), *self.order_by)

    @property
    def names(self) -> frozenset[str]:
        """The input columns that it and its condition read, and the other words of the condition: which of them are
        columns, the schema tells."""
        words = _NAMES.findall(self.where or "")
        return frozenset([*self.columns, *(quoted.replace("``", "`") or word for quoted, word in words)])

    def filtered(self, name: str) -> Agg:
        """Return this aggregate over a column that is null in rows that do not count (for a count, true in others)."""
        return self if self.where is None else replace(self, column=_TAKEN + name, where=None)

    @property
    def counted(self) -> Agg:
        """This aggregate over partials whose values have become a number or a sketch."""
        return replace(self, summed=True) if self.kind in _OF_VALUES and not self.listed else self

    @property
    def mergeable(self) -> Agg:
        """This aggregate for partials that may grow together with others of their key: sessions."""
        return replace(self, listed=True) if self.kind == "count_distinct" else self

    def irrevocable(self, name: str) -> str | None:
        """Return the reason why a row cannot be taken back from the aggregate; None if it can, as far as its kind
        tells.
        """
        if self.kind in ("count", "sum", "mean", "count_distinct", "min", "max"):
            return None
        if self.kind in _SKETCHES:
            return f"{name} = {self} keeps a sketch, out of which no value can be taken"
        return f"{name} = {self} does not keep what would be left without a row"

    def check(self, name: str, schema: pa.Schema, where: str) -> None:
        """Raise PipelineError unless the columns exist and can be aggregated so."""
        from state_ops.arrow.types import unknown_to_polars

        for column in self.columns:
            if column not in schema.names:
                by = f" by {', '.join(self.order_by)}" if self.order_by else ""
                raise PipelineError(
                    f"{name} = {self.kind}({self.column!r}){by}, but the input has no column {column!r}.",
                    where=where,
                    next=f"Its columns are: {', '.join(schema.names)}.",
                )
            type = schema.field(column).type
            if (strange := unknown_to_polars(type)) is not None:
                raise PipelineError(
                    f"{name} = {self.kind}({self.column!r}), but the column {column!r} is {type}, and no aggregate"
                    f" takes {strange}.",
                    where=where,
                    next="Cast it in transform=: a decimal to one of at most 38 digits with a scale of 0 or more, any"
                    " other to text or a number.",
                )
        if self.column is None:
            return
        kind = schema.field(self.column).type
        if self.kind in ("min", "max") and pa.types.is_nested(kind):
            raise PipelineError(
                f"{name} = {self.kind}({self.column!r}), but that column is {kind}, which has no order.",
                where=where,
                next="Take first or last of it, or what is in it as a column of its own, in transform=.",
            )
        if self.kind in ("count_distinct", DISTINCT):
            self._check_values(name, kind, where)
        if self.kind not in ("sum", "mean", QUANTILE):
            return
        numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal128)
        if not any(is_number(kind) for is_number in numbers):
            raise PipelineError(
                f"{name} = {self.kind}({self.column!r}), but that column is {kind}.",
                where=where,
                next="Take it of numbers or booleans; cast the column in a select before, or in transform=.",
            )

    def _check_values(self, name: str, kind: pa.DataType, where: str) -> None:
        try:
            from state_ops.schema.key_codec import check_key_type

            check_key_type(self.column or "", _kept_type(kind))
        except PipelineError as error:
            raise PipelineError(
                f"{name} = {self}, but that column is {kind}, whose values cannot be told apart by Weir.",
                where=where,
                next="Count what is in it, as a column of its own that transform= makes.",
            ) from error

    def value_type(self, schema: pa.Schema) -> pa.DataType:
        """Return the type in which the values of the column are kept.

        Whole numbers of every width are kept as the widest, floats as text, in which -0.0 is 0.0 and all NaN are one.
        """
        assert self.column is not None
        return _kept_type(schema.field(self.column).type)

    def parts(self, name: str, schema: pa.Schema) -> list[tuple[str, pa.DataType, bool, object]]:
        """Return the state fields that hold this aggregate: (field, type, nullable, value before the first row)."""
        if self.listed:
            return [(name, pa.list_(self.value_type(schema)), True, None)]
        if self.kind in ("count", "count_distinct"):
            return [(name, pa.int64(), False, 0)]
        if self.kind in _SKETCHES:
            return [(name, pa.binary(), False, b"")]
        assert self.column is not None
        kind = schema.field(self.column).type
        if self.kind == "sum":
            if pa.types.is_decimal(kind):
                return [(name, pa.decimal128(38, kind.scale), False, 0)]
            return [(name, pa.float64(), False, 0.0) if pa.types.is_floating(kind) else (name, pa.int64(), False, 0)]
        if self.kind == "mean":
            return [(f"{name}__sum", pa.float64(), False, 0.0), (f"{name}__count", pa.int64(), False, 0)]
        by = zip(self._by(name), self.order_by, strict=True)
        return [(name, kind, True, None), *((field, schema.field(column).type, True, None) for field, column in by)]

    def fields(self, name: str) -> list[str]:
        """Return the names of `parts`."""
        return [f"{name}__sum", f"{name}__count"] if self.kind == "mean" else [name, *self._by(name)]

    # -- partials: expressions over one key's rows of a batch, one for each of `parts`

    def partial(self, name: str, rows: Mapping[str, pl.DataType]) -> list[pl.Expr]:
        """Return the partials over rows, whose schema is given.

        Sums of integers are 128 bits wide: a sum that does not fit into state is seen when it is stored, instead of
        wrapping around in silence.
        """
        if self.kind == "count":
            number = pl.len() if self.column is None else pl.col(self.column).count()
            return [number.cast(pl.Int64).alias(name)]
        assert self.column is not None
        column = pl.col(self.column)
        if self.kind == QUANTILE:
            values = column.cast(pl.Float64)
            return [values.filter(values.is_finite()).alias(name)]
        if self.kind in _OF_VALUES:
            values = _kept(column, rows[self.column]).drop_nulls().unique()
            return [(values.sort() if self.listed else values).alias(name)]
        if self.kind == "sum":
            return [column.cast(_wider(rows[self.column])).sum().alias(name)]
        if self.kind == "mean":
            return [
                column.cast(pl.Float64).sum().alias(f"{name}__sum"),
                column.count().cast(pl.Int64).alias(f"{name}__count"),
            ]
        if self.order_by:
            taken = zip(self.fields(name), self.columns, strict=True)
            return [pl.col(source).get(self._row(name)).alias(field) for field, source in taken]
        if self.kind == "first":
            return [column.drop_nulls().first().alias(name)]
        return [getattr(column, self.kind)().alias(name)]

    def combine(self, name: str) -> list[pl.Expr]:
        """Return the partials over earlier partials. First and last need their order."""
        if self.kind in _OF_VALUES and not self.summed:
            values = pl.col(name).explode().drop_nulls()
            values = values if self.kind == QUANTILE else values.unique()
            return [values.sort() if self.listed else values]  # state is the same again when an epoch is replayed
        if self.kind in _SKETCHES:
            united = gathered(self.kind)
            return [pl.map_groups([pl.col(name)], united, return_dtype=pl.Binary, returns_scalar=True).alias(name)]
        if self.kind in ("count", "count_distinct", "sum", "mean"):
            return [pl.col(field).sum() for field in self.fields(name)]
        if self.kind in ("min", "max"):
            return [getattr(pl.col(name), self.kind)()]
        return [pl.col(field).get(self._row(name)) for field in self.fields(name)]

    def rank_columns(self, name: str) -> tuple[list[str], list[str]]:
        """Return the columns that rank rows for `partial`, and those that rank partials for `combine`.

        The rank is in a column `rank_of(name)`. Without columns there is no rank.
        """
        if not self.order_by:
            return [], []
        assert self.column is not None
        return [*self.order_by, self.column], [*self._by(name), name]

    def merge(self, name: str, old: str, new: str, ranked: bool = False) -> list[pl.Expr]:
        """Expressions that merge the fields `<old>name` with the partials `<new>name`. Null means: nothing yet.

        Args:
            ranked: Of first and last, to go by the column `rank_of(name)` of both sides. Fields that are lists, maps
                and structs can be sorted, but an expression cannot compare two of them.
        """
        if self.kind in ("count", "count_distinct", "sum", "mean"):
            return [
                (pl.col(old + field).fill_null(0) + pl.col(new + field)).alias(field) for field in self.fields(name)
            ]
        if self.kind in _SKETCHES:
            both = [pl.col(old + name), pl.col(new + name)]
            return [pl.map_batches(both, united(self.kind), return_dtype=pl.Binary).alias(name)]
        if self.kind in ("min", "max"):
            pick = pl.min_horizontal if self.kind == "min" else pl.max_horizontal
            return [pick(pl.col(old + name), pl.col(new + name)).alias(name)]
        if self.order_by:
            better = self._better(name, old, new, ranked)
            return [
                pl.when(better).then(pl.col(new + field)).otherwise(pl.col(old + field)).alias(field)
                for field in self.fields(name)
            ]
        if self.kind == "first":
            return [pl.coalesce(pl.col(old + name), pl.col(new + name)).alias(name)]
        return [pl.col(new + name).alias(name)]

    def result(self, name: str) -> pl.Expr:
        """Return the aggregate's value from its fields."""
        if self.listed:
            return pl.col(name).list.len().cast(pl.Int64)
        if self.kind == "mean":
            total, number = pl.col(f"{name}__sum"), pl.col(f"{name}__count")
            return pl.when(number > 0).then(total.cast(pl.Float64) / number).alias(name)
        if self.kind in _SKETCHES:
            type = pl.Int64 if self.kind == DISTINCT else pl.Float64
            return pl.col(name).map_batches(estimates(self.kind, self.share), return_dtype=type).alias(name)
        return pl.col(name)

    # -- how

    def _by(self, name: str) -> list[str]:
        return [f"{name}__by{number}" for number in range(1, len(self.order_by) + 1)]

    def _row(self, name: str) -> pl.Expr:
        rank = pl.col(rank_of(name))
        return rank.arg_min() if self.kind == "first" else rank.arg_max()

    def _better(self, name: str, old: str, new: str, ranked: bool) -> pl.Expr:
        """Return an expression that says whether the new row comes before the old one (first), or after it (last)."""
        better: pl.Expr = pl.lit(False)
        for field in [rank_of(name)] if ranked else reversed([*self._by(name), name]):
            mine, other = pl.col(new + field), pl.col(old + field)
            ahead = mine < other if self.kind == "first" else mine > other
            better = ahead | ((mine == other) & better)
        return pl.col(new + name).is_not_null() & (pl.col(old + name).is_null() | better)


def _wider(type: pl.DataType) -> pl.DataType:
    """Return the type in which values are added: Polars adds 32-bit numbers in 32 bits, and wraps around."""
    if isinstance(type, pl.Decimal):
        return pl.Decimal(38, type.scale)
    return pl.Float64() if type.is_float() else pl.Int128()


def _kept_type(type: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(type):
        return pa.int64()
    return pa.string() if pa.types.is_floating(type) or pa.types.is_large_string(type) else type


def _kept(values: pl.Expr, type: pl.DataType) -> pl.Expr:
    """Values of a column of this type as `_kept_type`."""
    if type.is_integer():
        return values.cast(pl.Int64)
    if type.is_float():
        return pl.when(values == 0).then(pl.lit(0.0)).otherwise(values.cast(pl.Float64)).cast(pl.String)
    return values


def rank_of(name: str) -> str:
    """Return the column with each row's place in the order of the aggregate `name`; null where it does not take
    part."""
    return f"__weir_rank_{name}"


def count(*, where: str | None = None) -> Agg:
    return Agg("count", where=where)


def count_distinct(column: str, *, where: str | None = None) -> Agg:
    return Agg("count_distinct", column, where=where)


def approx_distinct(column: str, *, where: str | None = None) -> Agg:
    return Agg(DISTINCT, column, where=where)


def approx_quantile(column: str, share: float, *, where: str | None = None) -> Agg:
    return Agg(QUANTILE, column, where=where, share=share)


def sum(column: str, *, where: str | None = None) -> Agg:
    return Agg("sum", column, where=where)


def mean(column: str, *, where: str | None = None) -> Agg:
    return Agg("mean", column, where=where)


def min(column: str, *, where: str | None = None) -> Agg:
    return Agg("min", column, where=where)


def max(column: str, *, where: str | None = None) -> Agg:
    return Agg("max", column, where=where)


def first(column: str, *, where: str | None = None) -> Agg:
    return Agg("first", column, where=where)


def last(column: str, *, where: str | None = None) -> Agg:
    return Agg("last", column, where=where)
