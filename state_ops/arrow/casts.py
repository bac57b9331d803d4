"""Columns in the types of state, every value as it was.

A cast of Polars cuts 1.7 down to 1, 1.999 down or up to a decimal's digits and a datetime down to its day, without a
word; what it makes of a sum depends then on how the rows were sliced. Here a type that holds all values costs nothing,
and where a value may be lost the columns are compared. What changes a value is refused:

    numbers    whole floats fit integers, floats fit decimals as far as a float tells; large integers and decimals in
               floats, and float64 in float32, are rounded as ever, but nothing becomes infinite
    text       only text fits text; binary counts as text
    times      datetimes at midnight fit dates; nanoseconds are cut to microseconds, as in the files that Weir reads
    nulls      fit everything
"""

from __future__ import annotations

from typing import Any

import polars as pl

from state_ops.arrow.frames import python_values
from state_ops.errors import StageError

_NOISE = 2.0**-40  # of a float: what adding some thousands of them leaves in its last digits

FAILURES = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
"""The errors of Polars. The latter is no Exception: a time that it cannot print in one of its own errors is enough."""


def cast(column: pl.Series, type: Any, what: str, where: str) -> pl.Series:
    """Return the column in a Polars type. StageError, which begins with `what`, for a value that the type cannot
    hold."""
    if column.dtype == type:
        return column
    try:
        stored = column.cast(type)
    except FAILURES as error:
        raise StageError(f"{what}: {error}", where=where, next="Cast the column first.") from error
    if (change := _changed(column, stored)) is not None:
        raise StageError(f"{what}: {change}.", where=where, next="Cast the column first, as you mean it.")
    return stored


def _changed(before: pl.Series, after: pl.Series) -> str | None:
    """Describe the first value that the cast changed; None if it changed none."""
    old, new = before.dtype, after.dtype
    if old == new or before.null_count() == len(before):
        return None
    if _kind(old) != _kind(new):
        return f"{_shown(before.drop_nulls(), 0)} is {old}"
    if isinstance(old, pl.Struct) and isinstance(new, pl.Struct):
        parts = ((before.struct.field(field.name), after.struct.field(field.name)) for field in old.fields)
        return next((change for part, other in parts if (change := _changed(part, other)) is not None), None)
    if new.is_nested():
        return _changed(_elements(before), _elements(after))
    changed = _differs(before, after)
    if changed is None or not changed.any():
        return None
    at = changed.arg_true()[0]
    return f"{_shown(before, at)} would become {_shown(after, at)}"


def _shown(column: pl.Series, at: int) -> str:
    """Return a value for people; Polars itself panics at a time far from ours."""
    return repr(python_values(column.slice(at, 1).to_arrow(compat_level=pl.CompatLevel.oldest()))[0])


def _kind(type: pl.DataType) -> Any:
    if type.is_numeric() or type == pl.Boolean:
        return "number"
    if type in (pl.String, pl.Binary, pl.Categorical, pl.Enum):
        return "text"
    if type in (pl.Date, pl.Datetime):
        return "time"
    return "list" if type in (pl.List, pl.Array, pl.Map) else type.base_type()


def _elements(column: pl.Series) -> pl.Series:
    """Return the elements of a column's lists, or the entries of its maps."""
    return (column.map.entries() if isinstance(column.dtype, pl.Map) else column).explode()


def _differs(before: pl.Series, after: pl.Series) -> pl.Series | None:
    """Return a mask of the values that a cast within one kind has changed; None if it can have changed none."""
    old, new = before.dtype, after.dtype
    if new.is_float():
        return after.is_infinite() & before.cast(pl.Float64).is_finite() if new != pl.Float64 else None
    if isinstance(new, pl.Decimal) and old.is_float():
        return (after.cast(old) - before).abs() > before.abs() * _NOISE
    if isinstance(new, pl.Decimal):
        may_lose = isinstance(old, pl.Decimal) and old.scale > new.scale
    elif new.is_temporal():
        if isinstance(old, (pl.Datetime, pl.Duration)) and old.time_unit == "ns":
            before = before.dt.cast_time_unit("us")
        may_lose = new == pl.Date or _unit(new) == "ms"
    else:
        may_lose = new == pl.Boolean or (new.is_integer() and not old.is_integer() and old != pl.Boolean)
    return after.cast(before.dtype) != before if may_lose else None


def _unit(type: pl.DataType) -> str | None:
    return type.time_unit if isinstance(type, (pl.Datetime, pl.Duration)) else None
