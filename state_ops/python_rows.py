"""Rows of state as Python tuples, and back into columns: for functions that see one key at a time."""

from __future__ import annotations

import builtins
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from itertools import pairwise
from types import NoneType
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

from state_ops import frames
from state_ops.columns import contiguous
from state_ops.errors import StageError
from state_ops.schema import Field
from state_ops.state_class import State
from state_ops.value_types import without_nullability

Row = tuple[Any, ...]
"""A row's values in the order of its fields."""


def tuples(table: pa.Table) -> list[Row]:
    """The rows of a table; a map as a dict."""
    if not table.num_columns:
        return [()] * table.num_rows
    return list(zip(*(_values(contiguous(column)) for column in table.columns), strict=True))


def _values(array: pa.Array) -> list[Any]:
    if pa.types.is_map(array.type) and not array.null_count and len(array):
        # Arrow's own way takes several times as long, entry by entry.
        bounds = array.offsets.to_pylist()
        first, last = bounds[0], bounds[-1]
        keys, items = _values(array.keys[first:last]), _values(array.items[first:last])
        return [
            dict(zip(keys[start - first : end - first], items[start - first : end - first], strict=True))
            for start, end in pairwise(bounds)
        ]
    return array.to_pylist(maps_as_pydicts="strict")


def columns(fields: Sequence[Field], rows: Sequence[Row], name_of: Callable[[int], str], where: str) -> pa.Table:
    """Rows as a table of exactly the fields' types.

    name_of: says of a row's number whose it is. Raises StageError, which names field, owner and value, for a value that its
    field cannot hold.
    """
    by_field = list(zip(*rows, strict=True)) if rows else [()] * len(fields)
    arrays = []
    for field, values in zip(fields, by_field, strict=True):
        try:
            arrays.append(_array(values, field))
        except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError) as error:
            raise _misfit(field, values, name_of, where) from error
    return pa.Table.from_arrays(arrays, schema=pa.schema([pa.field(f.name, f.type, f.nullable) for f in fields]))


def as_stored(table: pa.Table, fields: Sequence[Field], rows: Sequence[Row]) -> list[Row]:
    """What `tuples(table)` gives, where `table` was made of `rows` by `columns`.

    Where the values of a field are of the very types that Arrow would give back, which costs less to see than to do, they
    are taken as they are.
    """
    if not rows:
        return []
    taken = []
    for field, values, column in zip(fields, zip(*rows, strict=True), table.columns, strict=True):
        taken.append(values if all(_is_exact(value, field.type) for value in values) else _values(contiguous(column)))
    return list(zip(*taken, strict=True))


def as_read(fields: Sequence[Field], row: Row, name: Callable[[], str], where: str) -> Row:
    """A row as it is read back once it is stored: 1 for 1.0 in an integer, a datetime with its field's time zone, a date for its midnight.

    Args:
        fields: The row's fields.
        row: Its values, in their order.
        name: Says whose row it is, for an error.
        where: The stage, for the error.

    Raises:
        StageError: A value that its field cannot hold.
    """
    read = tuple([_settled(value, field) for value, field in zip(row, fields, strict=True)])
    if not any(value is _UNSETTLED for value in read):
        return read
    table = columns(fields, [row], lambda _: name(), where)
    try:
        return tuples(table)[0]
    except OverflowError as error:
        raise StageError(
            f"What {name()} was given cannot be read again: it has a time before the year 1 or after 9999, which no datetime of Python's can be.",
            where=where,
            next="Leave such values out, or work on whole batches.",
        ) from error


_UNSETTLED: Any = object()


def _settled(value: Any, field: Field) -> Any:
    """What Arrow makes of a value, where that can be told without asking it, which takes several times as long; else `_UNSETTLED`."""
    if value is None:
        return None if field.nullable else _UNSETTLED
    if value.__class__ is datetime and (zoned := _ZONED.get(field.type)) is not None:
        if zoned:
            return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        return value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
    return value if _is_exact(value, field.type) else _UNSETTLED


_ZONED = {pa.timestamp("us", "UTC"): True, pa.timestamp("us"): False}


def own(value: Any) -> Any:
    """A copy of lists and dicts, also nested ones, so that no change in place reaches what somebody else holds."""
    if isinstance(value, State):
        value = value.as_dict()
    if isinstance(value, dict):
        return {key: part if part.__class__ in _ATOMS else own(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [part if part.__class__ in _ATOMS else own(part) for part in value]
    return value


def beside(frame: pl.DataFrame, indices: Sequence[int], table: pa.Table) -> pa.Table:
    """The key columns of some keys of the batch, and a row of the table beside each."""
    return widened(frames.arrow(frame[list(indices)]), table)


def widened(left: pa.Table, right: pa.Table) -> pa.Table:
    return pa.Table.from_arrays([*left.columns, *right.columns], schema=pa.schema([*left.schema, *right.schema]))


def typed(table: pa.Table, fields: Sequence[Field]) -> pa.Table:
    """Some columns in their fields' types: on the way through frames a map becomes a list."""
    types = pa.schema([(field.name, without_nullability(field.type)) for field in fields])
    return table.select(types.names).cast(types)


def _misfit(field: Field, values: Sequence[Any], name_of: Callable[[int], str], where: str) -> StageError:
    """The error about the first value that is why a column cannot be made."""
    for number, value in enumerate(values):
        try:
            _array([value], field)
        except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError) as error:
            return StageError(
                f"{field.name!r} of {name_of(number)} cannot be {value!r:.200}: {error}.",
                where=where,
                next=f"Store a {field.type}{' or None' if field.nullable else ''} in it.",
            )
    raise AssertionError(f"every value of {field.name} fits, but all of them together do not")


def _array(values: Sequence[Any], field: Field) -> pa.Array:
    plain = _plainer(field.type)
    if plain is not None and not set(map(builtins.type, values)) <= _as_they_are(field.type):
        values = [_made(value, plain) for value in values]
    array = pa.array(values, field.type)
    if array.null_count and not field.nullable:
        raise ValueError("the field is not `| None`")
    return array


_Plain = Callable[[Any], Any]


@lru_cache(maxsize=256)
def _plainer(type: pa.DataType) -> _Plain | None:
    """What makes a value of a type one that Arrow takes: a State a dict, a map pairs, 1.0 in an integer 1; and refuses one that
    Arrow would alter without a word. None: there is none."""
    if pa.types.is_struct(type):
        parts = {part.name: _plainer(part.type) for part in type}
        return lambda value: _struct(value, parts)
    if pa.types.is_map(type):
        key, item = _plainer(type.key_type), _plainer(type.item_type)
        return lambda value: _pairs(value, key, item)
    if pa.types.is_nested(type):
        element = _plainer(type.value_type)
        return lambda value: _elements(value, element)
    if pa.types.is_integer(type):
        return _whole
    if pa.types.is_date(type):
        return _day
    if pa.types.is_timestamp(type):
        return lambda value: _moment(value, _MICROS[type.unit])
    if pa.types.is_duration(type):
        return lambda value: _span(value, _MICROS[type.unit])
    if pa.types.is_time(type):
        return lambda value: _clock(value, _MICROS[type.unit])
    if pa.types.is_float32(type) or pa.types.is_float16(type):
        return lambda value: _narrow(value, "<f" if pa.types.is_float32(type) else "<e")
    return None


@lru_cache(maxsize=256)
def _as_they_are(type: pa.DataType) -> frozenset[Any]:
    """The classes whose values need not be looked at, for speed: all that they can be fits the type, or Arrow refuses it."""
    if pa.types.is_integer(type):
        return frozenset({int, NoneType})
    if pa.types.is_date(type):
        return frozenset({date, NoneType})
    if type in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        return frozenset({datetime, NoneType})
    return frozenset({NoneType})


# Microseconds of a unit; values of Python's have no smaller parts.
_MICROS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 1}


def _made(value: Any, plain: _Plain | None) -> Any:
    return value if plain is None or value is None else plain(value)


def _struct(value: Any, parts: dict[str, _Plain | None]) -> dict[str, Any]:
    given = value.as_dict() if isinstance(value, State) else value
    if extra := given.keys() - parts.keys():
        raise ValueError(f"it has no field {min(extra)!r}")
    return {name: _made(given.get(name), plain) for name, plain in parts.items()}


def _pairs(value: Any, key: _Plain | None, item: _Plain | None) -> list[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, Mapping) else list(value)
    if not all(isinstance(entry, (tuple, list)) for entry in entries):
        raise ValueError("it is no dict")
    pairs = [(_made(name, key), _made(one, item)) for name, one in entries]
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key of it stands there twice")
    return pairs


def _elements(value: Any, element: _Plain | None) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)):
        raise ValueError("it is no list")
    return [_made(one, element) for one in value]


def _whole(value: Any) -> int:
    """A whole number as an int: Arrow would cut 1.5 down to 1 without a word."""
    if value.__class__ is int:
        return value
    if isinstance(value, (bool, np.bool_, str, np.datetime64, np.timedelta64)) or value != int(value):
        raise ValueError("it is no whole number")
    return int(value)


def _day(value: Any) -> date | None:
    """A date, also as a datetime at its midnight in UTC: Arrow would cut off the hours, and take a number for days."""
    if value.__class__ is date:
        return value
    if value is pd.NaT:
        return None
    if (value := _of_numpy(value)) is None:
        return None
    if not isinstance(value, date):
        raise ValueError("it is no date")
    if not isinstance(value, datetime):
        return value
    if value.tzinfo is not None:
        value = value.astimezone(UTC)
    if value.time() != time.min or getattr(value, "nanosecond", 0):
        raise ValueError("it is no midnight in UTC")
    return value.date()


def _moment(value: Any, unit: int) -> Any:
    """A datetime of whole units, each of so many microseconds. The nanoseconds of one of pandas' are cut to microseconds like
    those of columns."""
    if value is pd.NaT:
        return None
    if (value := _of_numpy(value)) is None:
        return None
    if not isinstance(value, datetime | np.datetime64):
        raise ValueError("it is no datetime")
    if unit > 1 and isinstance(value, datetime) and (value.microsecond % unit or getattr(value, "nanosecond", 0)):
        raise ValueError("its type has larger units")
    return value


def _of_numpy(value: Any) -> Any:
    """NumPy's moments and dates as datetimes, which Arrow takes for every type, and NaT as None; those beyond Python's years as they are."""
    if not isinstance(value, np.datetime64):
        return value
    found = value.astype("M8[us]").item()
    return value if isinstance(found, int) else found


def _span(value: Any, unit: int) -> Any:
    """A timedelta of whole units; see `_moment`."""
    if value is pd.NaT:
        return None
    if not isinstance(value, timedelta | np.timedelta64):
        raise ValueError("it is no timedelta")
    if unit > 1 and isinstance(value, timedelta) and (value.microseconds % unit or getattr(value, "nanoseconds", 0)):
        raise ValueError("its type has larger units")
    return value


def _clock(value: Any, unit: int) -> time:
    """A time of day of whole units, without a zone, which Arrow would leave away."""
    if not isinstance(value, time) or value.tzinfo is not None:
        raise ValueError("it is no time without a zone")
    if value.microsecond % unit:
        raise ValueError("its type has larger units")
    return value


def _narrow(value: Any, format: str) -> Any:
    """A number that stays finite in a narrow float: Arrow would make it infinite. format: of `struct`, in
    its standard size, without which it does not look."""
    try:
        struct.pack(format, value)
    except OverflowError:
        raise ValueError("it would become infinite") from None
    except struct.error:
        pass  # no number, as Arrow will say
    return value


_ATOMS = frozenset({int, float, str, bytes, bool, type(None)})


def _is_exact(value: Any, type: pa.DataType) -> bool:
    """Whether a value is what Arrow makes of it: 1 but not 1.0 in an integer, lists and dicts by their parts."""
    if value is None:
        return True
    if pa.types.is_map(type):
        return (
            value.__class__ is dict
            and _are_exact(value.keys(), type.key_type)
            and _are_exact(value.values(), type.item_type)
        )
    if pa.types.is_list(type):
        return value.__class__ is list and _are_exact(value, type.value_type)
    return value.__class__ is _class_of(type)


def _are_exact(values: Collection[Any], type: pa.DataType) -> bool:
    if (one := _class_of(type)) is not None:
        return set(map(builtins.type, values)) <= {one, NoneType}
    return all(_is_exact(value, type) for value in values)


@lru_cache(maxsize=256)
def _class_of(type: pa.DataType) -> Any:
    """The class of Python's values of a type where nothing but the class can differ; else None."""
    if pa.types.is_integer(type):
        return int
    return {pa.float64(): float, pa.string(): str, pa.binary(): bytes, pa.bool_(): bool, pa.date32(): date}.get(type)
