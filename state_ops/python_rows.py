"""Rows of state as Python tuples, and back into columns: for functions that see one key at a time."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import pairwise
from types import NoneType
from typing import Any

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
    if (plain := _plainer(field.type)) is not None:
        values = [None if value is None else plain(value) for value in values]
    array = pa.array(values, field.type)
    if array.null_count and not field.nullable:
        raise ValueError("the field is not `| None`")
    return array


@lru_cache(maxsize=256)
def _plainer(type: pa.DataType) -> Callable[[Any], Any] | None:
    """What makes a value of a type one that Arrow takes: a State a dict, a map pairs, 1.0 in an integer 1; None: nothing need
    be done."""
    if pa.types.is_struct(type):
        parts = {part.name: _plainer(part.type) for part in type}
        return lambda value: _struct(value, parts)
    if pa.types.is_map(type):
        item = _plainer(type.item_type)
        return lambda value: [(key, _made(one, item)) for key, one in dict(value).items()]
    if pa.types.is_nested(type):
        element = _plainer(type.value_type)
        return lambda value: [_made(one, element) for one in value]
    return _whole if pa.types.is_integer(type) else None


def _made(value: Any, plain: Callable[[Any], Any] | None) -> Any:
    return value if plain is None or value is None or value.__class__ is int else plain(value)


def _struct(value: Any, parts: dict[str, Callable[[Any], Any] | None]) -> dict[str, Any]:
    given = value.as_dict() if isinstance(value, State) else value
    if extra := given.keys() - parts.keys():
        raise ValueError(f"it has no field {min(extra)!r}")
    return {name: _made(given.get(name), plain) for name, plain in parts.items()}


def _whole(value: Any) -> int:
    """A whole number as an int: Arrow would cut 1.5 down to 1 without a word."""
    if value.__class__ is int:
        return value
    if isinstance(value, (bool, str)) or value != int(value):
        raise ValueError("it is no whole number")
    return int(value)


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
    return {pa.float64(): float, pa.string(): str, pa.binary(): bytes, pa.bool_(): bool}.get(type)
