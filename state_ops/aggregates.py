"""Aggregates that can be kept as state: each has a partial over a batch, a merge of two partials, and a result.

    from state_ops import aggregates as agg
    agg.count(), agg.sum("dep_delay"), agg.mean("dep_delay"), agg.min(...), agg.max(...), agg.first(...), agg.last(...)

`count` counts rows. Nulls are left out of sum, mean, min, max and first (a sum over nothing is 0, the others are null);
`last` takes the key's last row as it comes, null or not. First and last need rows in order: `order_by` on the stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from state_ops.errors import PipelineError

_WIDER: dict[pl.DataType, pl.DataType] = {pl.Int32(): pl.Int64(), pl.Float32(): pl.Float64()}


@dataclass(frozen=True, slots=True)
class Agg:
    """One aggregate over the rows of a key. kind: count, sum, mean, min, max, first or last; column: what of."""

    kind: str
    column: str | None = None

    def check(self, name: str, schema: pa.Schema, where: str) -> None:
        """PipelineError unless the column exists and can be aggregated so."""
        if self.column is None:
            return
        if self.column not in schema.names:
            raise PipelineError(
                f"{name} = {self.kind}({self.column!r}), but the input has no column {self.column!r}.",
                where=where,
                next=f"Its columns are: {', '.join(schema.names)}.",
            )
        kind = schema.field(self.column).type
        numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if self.kind in ("sum", "mean") and not numeric:
            raise PipelineError(f"{name} = {self.kind}({self.column!r}), but that column is {kind}.", where=where)

    def parts(self, name: str, schema: pa.Schema) -> list[tuple[str, pa.DataType, bool, object]]:
        """The state fields that hold this aggregate: (field, type, nullable, value before the first row)."""
        if self.kind == "count":
            return [(name, pa.int64(), False, 0)]
        assert self.column is not None
        kind = schema.field(self.column).type
        if self.kind == "sum":
            return [(name, pa.float64(), False, 0.0) if pa.types.is_floating(kind) else (name, pa.int64(), False, 0)]
        if self.kind == "mean":
            return [(f"{name}__sum", pa.float64(), False, 0.0), (f"{name}__count", pa.int64(), False, 0)]
        return [(name, kind, True, None)]

    def partial(self, name: str, rows: Mapping[str, pl.DataType]) -> list[pl.Expr]:
        """Expressions over one key's rows of a batch, one for each of `parts`. rows: the batch's schema."""
        if self.kind == "count":
            return [pl.len().cast(pl.Int64).alias(name)]
        assert self.column is not None
        column = pl.col(self.column)
        if self.kind == "sum":
            # Polars adds 32-bit numbers in 32 bits, and wraps around in silence.
            wider = _WIDER.get(rows[self.column])
            return [(column.cast(wider) if wider else column).sum().alias(name)]
        if self.kind == "mean":
            return [
                column.cast(pl.Float64).sum().alias(f"{name}__sum"),
                column.count().cast(pl.Int64).alias(f"{name}__count"),
            ]
        if self.kind == "first":
            return [column.drop_nulls().first().alias(name)]
        return [getattr(column, self.kind)().alias(name)]

    def merge(self, name: str, old: str, new: str) -> list[pl.Expr]:
        """Expressions that merge the fields `<old>name` with the partials `<new>name`. Null means: nothing yet."""
        if self.kind in ("count", "sum", "mean"):
            names = [f"{name}__sum", f"{name}__count"] if self.kind == "mean" else [name]
            return [(pl.col(old + field).fill_null(0) + pl.col(new + field)).alias(field) for field in names]
        if self.kind in ("min", "max"):
            pick = pl.min_horizontal if self.kind == "min" else pl.max_horizontal
            return [pick(pl.col(old + name), pl.col(new + name)).alias(name)]
        if self.kind == "first":
            return [pl.coalesce(pl.col(old + name), pl.col(new + name)).alias(name)]
        return [pl.col(new + name).alias(name)]

    def result(self, name: str) -> pl.Expr:
        """The aggregate's value from its fields."""
        if self.kind == "mean":
            total, number = pl.col(f"{name}__sum"), pl.col(f"{name}__count")
            return pl.when(number > 0).then(total / number).alias(name)
        return pl.col(name)


def count() -> Agg:
    return Agg("count")


def sum(column: str) -> Agg:
    return Agg("sum", column)


def mean(column: str) -> Agg:
    return Agg("mean", column)


def min(column: str) -> Agg:
    return Agg("min", column)


def max(column: str) -> Agg:
    return Agg("max", column)


def first(column: str) -> Agg:
    return Agg("first", column)


def last(column: str) -> Agg:
    return Agg("last", column)
