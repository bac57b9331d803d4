"""Rows into aggregates and aggregates into state, in columns: one group_by a batch, one get and one put a key.

    rows -> partials (a row a key of the batch) -> combined (a row a key of many batches) -> folded into state

The names of the aggregates' fields are the same in partials and in state, so each step is an expression over columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from state_ops.arrow.casts import cast
from state_ops.errors import InputError, StageError
from state_ops.rows.aggregates import Agg, rank_of
from state_ops.schema.descriptors import GROUP

Aggregates = Sequence[tuple[str, Agg]]

PARTIAL_BYTES = 64 << 20  # of a subtask's partials, which wait in memory
_WAITING_BYTES = 16 << 20
_PART_BYTES = 32 << 20
_OLD, _NEW, _GUARD, _GIVEN = "__old_", "__new_", "__weir_guard_", "__weir_given_"
_MOST_DIGITS = 1e38 * (1 - 1e-12)  # unscaled; what a float cannot tell from 10**38 is refused too
_INT64 = (-(1 << 63), (1 << 63) - 1)


class Partials:
    """The partials of the batches so far, by some columns.

    Rows wait until they are many, since grouping a large batch costs less than grouping its parts and then their
    results. `full` says that so many partials are left that they should be taken.

    Args:
        limit: How many partials may gather before they are combined, if they are not large: text is kept by min, max,
            first and last.
    """

    def __init__(self, aggregates: Aggregates, by: Sequence[str], where: str, limit: int) -> None:
        self._aggregates, self._by, self._where, self._limit = aggregates, by, where, limit
        self._waiting: list[pl.DataFrame] = []
        self._waiting_bytes = 0
        self._parts: list[pl.DataFrame] = []
        self.full = False

    def __len__(self) -> int:
        """Return the number of gathered rows."""
        return sum(map(len, self._parts)) + sum(map(len, self._waiting))

    def add(self, rows: pl.DataFrame) -> None:
        """Take a batch of rows."""
        self._waiting.append(rows)
        self._waiting_bytes += int(rows.estimated_size())
        if self._waiting_bytes <= _WAITING_BYTES:
            return
        self._reduce()
        if have_gathered(self._parts, self._limit, 1):
            self._parts = [self.combined(self._parts)]
            self.full = have_gathered(self._parts, self._limit, 2)  # else combining would soon be all that is done

    def take(self) -> pl.DataFrame:
        """Return a row a key, in any order; then begin anew."""
        self._reduce()
        taken = self.combined(self._parts)
        self._parts, self.full = [], False
        return taken

    def _reduce(self) -> None:
        if self._waiting:
            rows = pl.concat(self._waiting)
            self._waiting, self._waiting_bytes = [], 0
            self._parts.append(self.partials(rows))

    def partials(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the partials of a batch's rows."""
        return partials(self._aggregates, rows, self._by, self._where)

    def combined(self, parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
        """Combine the partials of many batches into the partials of all their rows."""
        return combined(self._aggregates, parts, self._by, self._where)


def parts(gathered: pl.DataFrame, by: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
    """Yield partials in parts, which go to state one after the other.

    On their way there they take several times as much memory. With columns `by`, each part has higher ones than the
    part before.
    """
    number = gathered.estimated_size() // _PART_BYTES + 1
    size = max(1, math.ceil(len(gathered) / number))
    if number == 1 or not by:
        yield from gathered.iter_slices(size)
        return
    order = gathered.select(pl.arg_sort_by(by)).to_series()
    for at in range(0, len(gathered), size):
        yield gathered[order.slice(at, size)]


def have_gathered(parts: Sequence[pl.DataFrame], limit: int, share: int) -> bool:
    """Return whether partials are more than this share of what may gather: of `limit` rows, or of bytes.

    Bytes count because aggregates keep text.
    """
    rows, size = sum(map(len, parts)), sum(part.estimated_size() for part in parts)
    return rows > limit // share or size > PARTIAL_BYTES // share


def fitting(
    aggregates: Mapping[str, Agg], rows: pl.DataFrame, types: Mapping[str, Any], method: str, where: str
) -> tuple[list[tuple[str, Agg]], pl.DataFrame]:
    """Return the aggregates over columns in the types of their fields, and the rows with these columns: what a field
    cannot hold is refused row by row, so that slicing cannot change what is kept.

    Sums are made wider than their fields; see `fitted`. Raises StageError for a value that its field cannot hold.
    """
    wanted, columns = [], []
    for name, agg in aggregates.items():
        if agg.kind == "count" and not types[name].is_numeric():
            raise StageError(
                f"{method}: {name}=count(), but the field is {types[name]}.",
                where=where,
                next="Counts go into a field that is a number.",
            )
        if agg.column is not None:
            given = rows[agg.column]
            aggregate = f"{method}: {name}={agg.kind}({agg.column!r})"
            type = types[name] if agg.kind != "sum" else _summed(given.dtype, types[name], aggregate, where)
            if given.dtype != type:
                what = f"{aggregate}, but that column does not fit the field, which is {types[name]}"
                columns.append(cast(given, type, what, where).alias(_GIVEN + name))
                agg = replace(agg, column=_GIVEN + name)
        wanted.append((name, agg))
    return wanted, rows.with_columns(columns)


def _summed(column: pl.DataType, field: pl.DataType, what: str, where: str) -> pl.DataType:
    """Return the type in which a column's numbers are added for a field: the column's own, unless the sum would lose
    digits.
    """
    if column == pl.Null:
        return column
    if not field.is_numeric():
        raise StageError(
            f"{what}, but the field is {field}.", where=where, next="Sums go into a field that is a number."
        )
    if field.is_integer() and (column.is_float() or column.is_decimal()):
        return pl.Int64()
    if isinstance(field, pl.Decimal) and (column.is_float() or column.is_decimal()):
        return pl.Decimal(38, field.scale)
    return column


def partials(aggregates: Aggregates, rows: pl.DataFrame, by: Sequence[str], where: str) -> pl.DataFrame:
    """Return a row for each value of the columns `by`: these, and the fields of every aggregate over its rows."""
    exprs = [expr for name, agg in aggregates for expr in agg.partial(name, rows.schema)]
    sums = {name: agg.column for name, agg in aggregates if agg.kind == "sum" and agg.column is not None}
    rankings = {rank_of(name): agg.rank_columns(name)[0] for name, agg in aggregates}
    return _reduced(rows, by, exprs, sums, rankings, where)


def combined(aggregates: Aggregates, parts: Sequence[pl.DataFrame], by: Sequence[str], where: str) -> pl.DataFrame:
    """Return the partials of many batches as one of all their rows."""
    return parts[0] if len(parts) == 1 else recombined(aggregates, pl.concat(parts), by, where)


def recombined(aggregates: Aggregates, parts: pl.DataFrame, by: Sequence[str], where: str) -> pl.DataFrame:
    """Return partials by other columns, or several by the same, as one row for each value of `by`."""
    exprs = [expr for name, agg in aggregates for expr in agg.combine(name)]
    sums = {name: name for name, agg in aggregates if agg.kind == "sum"}
    rankings = {rank_of(name): agg.rank_columns(name)[1] for name, agg in aggregates}
    return _reduced(parts, by, exprs, sums, rankings, where)


def merged(aggregates: Aggregates, old: pl.DataFrame, fresh: pl.DataFrame, where: str) -> pl.DataFrame:
    """Return the fields of the aggregates after partials, row by row, came to stored rows. The types are the stored
    ones.

    Raises:
        InputError: For a sum that its field cannot hold.
    """
    names = [field for name, agg in aggregates for field in agg.fields(name)]
    both = pl.concat(
        [old.select(pl.col(names).name.prefix(_OLD)), fresh.select(pl.col(names).name.prefix(_NEW))], how="horizontal"
    )
    exprs: list[pl.Expr] = []
    for name, agg in aggregates:
        by = agg.rank_columns(name)[1]
        ranked = any(old.schema[field].is_nested() for field in by)
        if ranked:
            ranks = _ranks(pl.concat([old.select(by), fresh.select(by)], how="vertical_relaxed"), by)
            both = both.with_columns(
                ranks[: len(old)].alias(_OLD + rank_of(name)), ranks[len(old) :].alias(_NEW + rank_of(name))
            )
        exprs += agg.merge(name, _OLD, _NEW, ranked)
    try:
        rows = both.select(exprs)
    except pl.exceptions.ComputeError as error:
        if "overflow in decimal" not in str(error):
            raise
        raise _too_large([name for name, agg in aggregates if agg.kind == "sum"], "decimal128(38)", where) from error
    return fitted(aggregates, rows, old.schema, where)


def fitted(aggregates: Aggregates, rows: pl.DataFrame, types: Mapping[str, pl.DataType], where: str) -> pl.DataFrame:
    """Return the fields of the aggregates in the types in which they are stored. InputError for a sum that does not
    fit."""
    low, high = _INT64
    for name, agg in aggregates:
        if agg.kind == "sum" and rows[name].dtype == pl.Int128 and not rows[name].is_between(low, high).all():
            raise _too_large([name], "int64", where)
    fields = [(field, name, agg) for name, agg in aggregates for field in agg.fields(name)]
    try:
        stored = rows.select([pl.col(field).cast(types[field]) for field, _, _ in fields])
    except pl.exceptions.InvalidOperationError:
        for field, name, agg in fields:  # which one it was
            if (
                agg.kind in ("sum", "count")
                and rows[field].cast(types[field], strict=False).null_count() > rows[field].null_count()
            ):
                raise _too_large([name], str(types[field]), where, agg.kind) from None
        raise
    for name, agg in aggregates:
        if agg.kind != "sum" or types[name] not in (pl.Float32, pl.Float16):
            continue
        if (stored[name].is_infinite() & rows[name].cast(pl.Float64).is_finite()).any():
            raise _too_large([name], str(types[name]), where)
    return stored


def _reduced(
    rows: pl.DataFrame,
    by: Sequence[str],
    exprs: Sequence[pl.Expr],
    sums: dict[str, str],
    rankings: dict[str, list[str]],
    where: str,
) -> pl.DataFrame:
    """Return one row for each value of `by`.

    sums: By aggregate, the column that it adds. rankings: By column to add, the columns that rows are ranked by.
    """
    rows = rows.with_columns(_all_ranks(rows, {column: ranking for column, ranking in rankings.items() if ranking}))
    # Polars adds decimals modulo 2**128. A float sum beside it tells how large the true sum is.
    decimals = {name: column for name, column in sums.items() if isinstance(rows.schema[column], pl.Decimal)}
    guards = [pl.col(column).cast(pl.Float64).sum().alias(_GUARD + name) for name, column in decimals.items()]
    # A key group follows from the key: one column less to group by.
    keys = [name for name in by if name != GROUP]
    reduced = rows.group_by(keys).agg(*(pl.col(name).first() for name in by if name == GROUP), *exprs, *guards)
    for name in decimals:
        scale = reduced.schema[name].scale  # type: ignore[attr-defined]
        if (reduced[_GUARD + name].abs() * 10.0**scale >= _MOST_DIGITS).any():
            raise _too_large([name], f"decimal128(38, {scale})", where)
    return reduced.drop([_GUARD + name for name in decimals])


def _all_ranks(rows: pl.DataFrame, rankings: Mapping[str, Sequence[str]]) -> list[pl.Series]:
    """Return the ranks by each of several lists of columns, under their names. The aggregates of a stage have one
    order, and each its own value as the last column, which counts among equals: what comes before is sorted once."""
    orders: list[tuple[pl.DataFrame, pl.DataFrame, bool]] = []
    ranks = []
    for name, (*by, value) in rankings.items():
        order = rows.select(pl.col(column).alias(str(at)) for at, column in enumerate(by))
        known = next((of for of in orders if of[0].equals(order)), None)
        if known is None:
            known = (order, *_places(order))
            orders.append(known)
        _, places, are_unique = known
        of_value = places.with_columns(rows[value].alias("value"))
        if are_unique:
            ranks.append(of_value.select(pl.when(pl.col("value").is_not_null()).then("place")).to_series().alias(name))
        else:
            ranks.append(_ranks(of_value, ["place", "value"]).alias(name))
    return ranks


def _places(rows: pl.DataFrame) -> tuple[pl.DataFrame, bool]:
    """Return each row's place in the order of all columns, in a column `place`, and whether no rows are equal.

    A place is null if one of the columns is null. Equal rows share theirs.
    """
    order = rows.select(pl.arg_sort_by(rows.columns)).to_series()
    ascending = rows[order]
    differs = ascending.head(-1).select(
        pl.any_horizontal(pl.col(name).ne_missing(ascending[name].tail(-1)) for name in rows.columns)
    )
    steps = differs.to_series().to_numpy() if len(rows) > 1 else np.empty(0, np.bool_)
    places = np.zeros(len(rows), np.uint32)
    places[order.to_numpy()[1:]] = np.cumsum(steps, dtype=np.uint32)
    complete = rows.select(pl.all_horizontal(pl.all().is_not_null())).to_series()
    return pl.select(pl.when(complete).then(pl.Series(places)).alias("place")), bool(steps.all())


def _ranks(rows: pl.DataFrame, by: Sequence[str]) -> pl.Series:
    """Return each row's place in the order of some columns; null where one of them is null."""
    order = rows.select(pl.arg_sort_by(by)).to_series().to_numpy()
    ranks = np.empty(len(order), np.uint32)
    ranks[order] = np.arange(len(order), dtype=np.uint32)
    complete = rows.select(pl.all_horizontal(pl.col(list(by)).is_not_null())).to_series()
    return pl.select(pl.when(complete).then(pl.Series(ranks))).to_series()


def _too_large(names: Sequence[str], type: str, where: str, kind: str = "sum") -> InputError:
    return InputError(
        f"The {kind} {' or '.join(map(repr, names))} has become larger than {type} can hold.",
        where=where,
        next="Declare a wider field, or cast the column to double in transform=, or to a decimal where it is an "
        "integer; state, "
        "offsets and tables are as they were.",
    )
