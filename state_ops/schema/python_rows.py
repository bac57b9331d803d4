"""Rows of state as Python tuples, and back into columns: for functions that see one key at a time."""

from __future__ import annotations

import builtins
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Context, Decimal
from functools import lru_cache
from itertools import pairwise
from types import NoneType
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.columns import contiguous
from state_ops.arrow.types import without_nullability
from state_ops.errors import StageError
from state_ops.schema.state_class import State
from state_ops.schema.state_schema import Field

Row = tuple[Any, ...]
"""A row's values in the order of its fields."""


def tuples(table: pa.Table) -> list[Row]:
    """Return the rows of a table; a map as a dict."""
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
    values: list[Any] = array.to_pylist(maps_as_pydicts="strict")
    return values


def columns(fields: Sequence[Field], rows: Sequence[Row], name_of: Callable[[int], str], where: str) -> pa.Table:
    """Return rows as a table of exactly the fields' types.

    Raises StageError, which names field, owner and value, for a value that its field cannot hold.

    Args:
        name_of: Says of a row's number whose it is.
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
    """Return what `tuples(table)` gives; `columns` made `table` of `rows`.

    Arrow is asked only for fields whose values cannot be told without it, because it costs more.

    What can be told of a field's values without Arrow, which costs less, is not asked of it.
    """
    if not rows:
        return []
    taken = []
    for field, values, column in zip(fields, zip(*rows, strict=True), table.columns, strict=True):
        settled = list(map(_settler(field.type), values))
        taken.append(_values(contiguous(column)) if any(value is _UNSETTLED for value in settled) else settled)
    return list(zip(*taken, strict=True))


class RowReader:
    """Gives rows as they are read back once they are stored: 1 for 1.0 in an integer, a datetime with its field's time
    zone, a date for its midnight.

    Args:
        fields: The rows' fields.
        where: The stage, for errors.
    """

    def __init__(self, fields: Sequence[Field], where: str) -> None:
        self._fields, self._where = fields, where
        self._settlers = [_settler(field.type) for field in fields]
        self._required = [not field.nullable for field in fields]

    def read(self, row: Row, name: Callable[[], str]) -> Row:
        """Return a row as it is read back.

        Args:
            row: Its values, in the order of the fields.
            name: Says whose row it is, for an error.

        Raises:
            StageError: A value that its field cannot hold.
        """
        read = tuple([settle(value) for settle, value in zip(self._settlers, row, strict=True)])
        for value, required in zip(read, self._required, strict=True):
            if value is _UNSETTLED or (value is None and required):
                return self._by_arrow(row, name)
        return read

    def read_value(self, value: Any, name: Callable[[], str]) -> Any:
        """Return the value of one field as it is read back."""
        read = self._settlers[0](value)
        if read is _UNSETTLED or (read is None and self._required[0]):
            return self._by_arrow((value,), name)[0]
        return read

    def _by_arrow(self, row: Row, name: Callable[[], str]) -> Row:
        table = columns(self._fields, [row], lambda _: name(), self._where)
        try:
            return tuples(table)[0]
        except OverflowError as error:
            raise StageError(
                f"What {name()} was given cannot be read again: it has a time before the year 1 or after 9999, which "
                "no datetime of Python's can be.",
                where=self._where,
                next="Leave such values out, or work on whole batches.",
            ) from error


def copied(value: Any) -> Any:
    """Return a copy of lists and dicts, also nested ones, so that no change in place reaches what somebody else
    holds."""
    if value.__class__ in _ATOMS:
        return value
    if isinstance(value, State):
        value = value.as_dict()
    if isinstance(value, dict):
        return {key: part if part.__class__ in _ATOMS else copied(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [part if part.__class__ in _ATOMS else copied(part) for part in value]
    return value


def beside(frame: pl.DataFrame, indices: Sequence[int], table: pa.Table) -> pa.Table:
    """Return the key columns of some keys of the batch, and a row of the table beside each."""
    return widened(frames.arrow(frame[list(indices)]), table)


def widened(left: pa.Table, right: pa.Table) -> pa.Table:
    return pa.Table.from_arrays([*left.columns, *right.columns], schema=pa.schema([*left.schema, *right.schema]))


def typed(table: pa.Table, fields: Sequence[Field]) -> pa.Table:
    """Return columns in their fields' types: on the way through frames a map becomes a list."""
    types = pa.schema([(field.name, without_nullability(field.type)) for field in fields])
    return table.select(types.names).cast(types)


def _misfit(field: Field, values: Sequence[Any], name_of: Callable[[int], str], where: str) -> StageError:
    """Return the error about the first value that is why a column cannot be made."""
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
        values = [_converted(value, plain) for value in values]
    array = pa.array(values, field.type)
    if array.null_count and not field.nullable:
        raise ValueError("the field is not `| None`")
    return array


_Plain = Callable[[Any], Any]


@lru_cache(maxsize=256)
def _plainer(type: pa.DataType) -> _Plain | None:
    """Return a function that turns a value of a type into one that Arrow takes; None if Arrow takes every value.

    A State becomes a dict, a map becomes pairs, 1.0 in an integer becomes 1. The function refuses a value that Arrow
    would alter without a word.
    """
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
    """Return the classes whose values need not be looked at, for speed: all that they can be fits the type, or Arrow
    refuses it."""
    if pa.types.is_integer(type):
        return frozenset({int, NoneType})
    if pa.types.is_date(type):
        return frozenset({date, NoneType})
    if type in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        return frozenset({datetime, NoneType})
    return frozenset({NoneType})


# Microseconds of a unit; values of Python's have no smaller parts.
_MICROS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 1}


def _converted(value: Any, plain: _Plain | None) -> Any:
    return value if plain is None or value is None else plain(value)


def _struct(value: Any, parts: dict[str, _Plain | None]) -> dict[str, Any]:
    given = value.as_dict() if isinstance(value, State) else value
    if extra := given.keys() - parts.keys():
        raise ValueError(f"it has no field {min(extra)!r}")
    return {name: _converted(given.get(name), plain) for name, plain in parts.items()}


def _pairs(value: Any, key: _Plain | None, item: _Plain | None) -> list[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, Mapping) else list(value)
    if not all(isinstance(entry, (tuple, list)) for entry in entries):
        raise ValueError("it is no dict")
    pairs = [(_converted(name, key), _converted(value_of_key, item)) for name, value_of_key in entries]
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key of it stands there twice")
    return pairs


def _elements(value: Any, element: _Plain | None) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)):
        raise ValueError("it is no list")
    return [_converted(part, element) for part in value]


def _whole(value: Any) -> int:
    """Return a whole number as an int: Arrow would cut 1.5 down to 1 without a word."""
    if value.__class__ is int:
        return value
    if isinstance(value, (bool, np.bool_, str, np.datetime64, np.timedelta64)) or value != int(value):
        raise ValueError("it is no whole number")
    return int(value)


def _day(value: Any) -> date | None:
    """Return a date, also as a datetime at its midnight in UTC: Arrow would cut off the hours, and take a number for
    days."""
    day: date | None = value if value.__class__ is date else _of_numpy(value)
    if not isinstance(day, date | None):
        raise ValueError("it is no date")
    if not isinstance(day, datetime):
        return day
    if day.tzinfo is not None:
        day = day.astimezone(UTC)
    if day.time() != time.min or getattr(day, "nanosecond", False):
        raise ValueError("it is no midnight in UTC")
    return day.date()


def _moment(value: Any, unit: int) -> Any:
    """Return a datetime of whole units, each of so many microseconds. The nanoseconds of one of pandas' are cut to
    microseconds like those of columns."""
    value = _of_numpy(value)
    if not isinstance(value, datetime | np.datetime64 | None):
        raise ValueError("it is no datetime")
    if unit > 1 and isinstance(value, datetime) and (value.microsecond % unit or getattr(value, "nanosecond", 0)):
        raise ValueError("its type has larger units")
    return value


def _is_nat(value: Any) -> bool:
    """Return whether a value is pandas' NaT.

    The class name tells, so that a process without a use for pandas does not import it.
    """
    return bool(value.__class__.__name__ == "NaTType")


def _of_numpy(value: Any) -> Any:
    """NumPy's moments and dates as datetimes, which Arrow takes for every type, and NaT, pandas' too, as None; those
    beyond Python's years as they are."""
    if _is_nat(value):
        return None
    if not isinstance(value, np.datetime64):
        return value
    moment = value.astype("M8[us]").item()
    return value if isinstance(moment, int) else moment


def _span(value: Any, unit: int) -> Any:
    """Return a timedelta of whole units; see `_moment`."""
    if _is_nat(value):
        return None
    if not isinstance(value, timedelta | np.timedelta64):
        raise ValueError("it is no timedelta")
    if unit > 1 and isinstance(value, timedelta) and (value.microseconds % unit or getattr(value, "nanoseconds", 0)):
        raise ValueError("its type has larger units")
    return value


def _clock(value: Any, unit: int) -> time:
    """Return a time of day of whole units, without a zone, which Arrow would leave away."""
    if not isinstance(value, time) or value.tzinfo is not None:
        raise ValueError("it is no time without a zone")
    if value.microsecond % unit:
        raise ValueError("its type has larger units")
    return value


def _narrow(value: Any, format: str) -> Any:
    """Return a number that stays finite in a narrow float: Arrow would make it infinite. format: of `struct`, in its
    standard size, without which it does not look."""
    try:
        struct.pack(format, value)
    except OverflowError:
        raise ValueError("it would become infinite") from None
    except struct.error:
        pass  # no number, as Arrow will say
    return value


_ATOMS = frozenset({int, float, str, bytes, bool, type(None)})

_UNSETTLED: Any = object()
_Settle = Callable[[Any], Any]
_WHOLE_FLOATS = 2**53  # Arrow takes no larger integer for a float
_LONGEST = timedelta(microseconds=2**63 - 1)
_DIGITS = Context(prec=200, traps=[])


@lru_cache(maxsize=256)
def _settler(type: pa.DataType) -> _Settle:
    """Return a function that says how a value of a type is read back, without Arrow, which takes many times as long.

    It returns `_UNSETTLED` if only Arrow can tell.

    It goes by the value's exact class, since a subclass may do anything. What Arrow would refuse is unsettled too.
    """
    if pa.types.is_map(type):
        return _settler_of_dicts(_settler(type.key_type), _settler(type.item_type))
    if pa.types.is_list(type):
        return _settler_of_lists(_settler(type.value_type), _are_exact(type.value_type))
    if pa.types.is_struct(type):
        return _settler_of_structs({part.name: _settler(part.type) for part in type})
    by_class = {NoneType: _as_it_is, **_settlers(type)}
    return lambda value: by_class[kind](value) if (kind := value.__class__) in by_class else _UNSETTLED


def _settlers(type: pa.DataType) -> dict[Any, _Settle]:
    """Return the functions by exact class of Python's or NumPy's."""
    if pa.types.is_integer(type):
        return _settlers_of_integers(type)
    if type == pa.float64():
        exact: _Settle = lambda value: float(value) if -_WHOLE_FLOATS <= value <= _WHOLE_FLOATS else _UNSETTLED  # noqa: E731
        return {float: _as_it_is, np.float64: float, np.float32: float, int: exact}
    if pa.types.is_float32(type):
        return dict.fromkeys((float, np.float64, np.float32), _single)
    if type == pa.string():
        return {str: _text}  # what NumPy has of texts loses a NUL at its end when it becomes a str
    if type == pa.binary():
        return {bytes: _as_it_is}
    if pa.types.is_boolean(type):
        return {bool: _as_it_is, np.bool_: bool}
    if pa.types.is_date32(type):
        return {date: _as_it_is}
    if pa.types.is_decimal(type) and type.scale >= 0:
        decimal = _settler_of_decimals(type.precision, type.scale)
        return {Decimal: decimal, int: lambda value: decimal(Decimal(value))}
    if pa.types.is_timestamp(type) and type.unit == "us":
        moment = _settler_of_moments(pa.scalar(0, type).as_py().tzinfo)
        return {datetime: moment, np.datetime64: lambda value: _moment_of_numpy(value, moment)}
    if type == pa.duration("us"):
        return {timedelta: lambda value: value if -_LONGEST <= value <= _LONGEST else _UNSETTLED}
    return {}


def _as_it_is(value: Any) -> Any:
    return value


def _settlers_of_integers(type: pa.DataType) -> dict[Any, _Settle]:
    lowest, highest = _range_of(type)

    def whole(value: Any) -> Any:
        return value if lowest <= value <= highest else _UNSETTLED

    def of_float(value: Any) -> Any:
        return whole(int(value)) if value.is_integer() else _UNSETTLED

    of_numpy = {np.dtype(code).type: lambda value: whole(int(value)) for code in "bhilqBHILQ"}
    return {**of_numpy, int: whole, float: of_float, np.float64: of_float}


def _range_of(type: pa.DataType) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer type."""
    signed = pa.types.is_signed_integer(type)
    highest = 2 ** (type.bit_width - signed) - 1
    return (-highest - 1 if signed else 0), highest


def _single(value: Any) -> Any:
    """Return a float as one of 32 bits."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return _UNSETTLED


def _text(value: str) -> Any:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return _UNSETTLED
    return value


def _settler_of_decimals(precision: int, scale: int) -> _Settle:
    unit = Decimal((0, (1,), -scale))
    zero = Decimal((0, (0,), -scale))  # Arrow has no zero below zero

    def settle(value: Decimal) -> Any:
        if not value:
            return zero if value.is_finite() and -scale <= value.adjusted() <= 0 else _UNSETTLED
        if not value.is_finite() or value.adjusted() >= precision - scale:
            return _UNSETTLED
        scaled = value.quantize(unit, context=_DIGITS)
        return scaled if scaled == value else _UNSETTLED

    return settle


def _settler_of_moments(zone: tzinfo | None) -> _Settle:
    """Return the function for datetimes in a zone, or in none. A datetime without a zone is in UTC."""

    def settle(value: datetime) -> Any:
        try:
            if value.tzinfo is not None:
                value = value.astimezone(UTC)
            value = value.replace(tzinfo=None if zone is None else UTC, fold=0)
            return value if zone is None else value.astimezone(zone)
        except OverflowError:
            return _UNSETTLED

    return settle


def _moment_of_numpy(value: np.datetime64, settle: _Settle) -> Any:
    moment = _of_numpy(value)
    return settle(moment) if moment.__class__ is datetime else _UNSETTLED if moment is not None else None


def _settler_of_lists(settle: _Settle, are_exact: Callable[[list[Any]], bool]) -> _Settle:
    def settle_list(value: Any) -> Any:
        if value is None:
            return None
        if value.__class__ is not list:
            return _UNSETTLED
        if are_exact(value):
            return value
        settled = list(map(settle, value))
        return _UNSETTLED if any(part is _UNSETTLED for part in settled) else settled

    return settle_list


def _settler_of_dicts(settle_key: _Settle, settle_item: _Settle) -> _Settle:
    def settle(value: Any) -> Any:
        if value is None:
            return None
        if value.__class__ is not dict:
            return _UNSETTLED
        settled = {settle_key(key): settle_item(item) for key, item in value.items()}
        whole = len(settled) == len(value) and None not in settled and _UNSETTLED not in settled
        return settled if whole and not any(item is _UNSETTLED for item in settled.values()) else _UNSETTLED

    return settle


def _settler_of_structs(parts: dict[str, _Settle]) -> _Settle:
    def settle(value: Any) -> Any:
        if value is None:
            return None
        given = value.as_dict() if isinstance(value, State) else value
        if given.__class__ is not dict or given.keys() - parts.keys():
            return _UNSETTLED
        settled = {name: settle_part(given.get(name)) for name, settle_part in parts.items()}
        return _UNSETTLED if any(part is _UNSETTLED for part in settled.values()) else settled

    return settle


def _are_exact(type: pa.DataType) -> Callable[[list[Any]], bool]:
    """Return a function that tells at once whether all values of a list are read back as they are.

    False: each value is to be looked at.
    """
    if pa.types.is_integer(type):
        lowest, highest = _range_of(type)
        return lambda values: (
            bool(values)
            and set(map(builtins.type, values)) == {int}
            and lowest <= min(values)
            and max(values) <= highest
        )
    if type == pa.string():
        return lambda values: set(map(builtins.type, values)) <= {str} and "".join(values).isascii()
    exact = {pa.float64(): float, pa.binary(): bytes, pa.bool_(): bool, pa.date32(): date}.get(type)
    return lambda values: set(map(builtins.type, values)) <= {exact, NoneType}
