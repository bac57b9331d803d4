"""Rows of state as Python tuples, and back into columns: for functions that see one key at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from state_ops import frames
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
    return list(zip(*(column.to_pylist(maps_as_pydicts="strict") for column in table.columns), strict=True))


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


def own(value: Any) -> Any:
    """A copy of lists and dicts, also nested ones, so that no change in place reaches what somebody else holds."""
    if isinstance(value, State):
        return {name: own(part) for name, part in value.as_dict().items()}
    if isinstance(value, dict):
        return {key: own(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [own(part) for part in value]
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
    type = field.type
    if pa.types.is_nested(type):
        values = [_plain(value, type) for value in values]
    elif pa.types.is_integer(type) and not all(value.__class__ is int or value is None for value in values):
        values = [None if value is None else _whole(value) for value in values]
    array = pa.array(values, type)
    if array.null_count and not field.nullable:
        raise ValueError("the field is not `| None`")
    return array


def _plain(value: Any, type: pa.DataType) -> Any:
    """A nested value as Arrow takes it: a State as its fields, a map as pairs."""
    if value is None:
        return None
    if pa.types.is_struct(type):
        parts = value.as_dict() if isinstance(value, State) else value
        if extra := parts.keys() - set(type.names):
            raise ValueError(f"it has no field {min(extra)!r}")
        return {part.name: _plain(parts.get(part.name), part.type) for part in type}
    if pa.types.is_map(type):
        return [(key, _plain(item, type.item_type)) for key, item in dict(value).items()]
    if pa.types.is_nested(type):
        return [_plain(element, type.value_type) for element in value]
    return _whole(value) if pa.types.is_integer(type) else value


def _whole(value: Any) -> int:
    """A whole number as an int: Arrow would cut 1.5 down to 1 without a word."""
    if isinstance(value, (bool, str)) or value != int(value):
        raise ValueError("it is no whole number")
    return int(value)
