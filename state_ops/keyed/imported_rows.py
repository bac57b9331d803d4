"""Rows from outside that are to become state: whether they are what the state's keys and fields can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow import frames
from state_ops.arrow.columns import contiguous, is_list
from state_ops.arrow.nested import elements
from state_ops.arrow.types import parts, type_name
from state_ops.arrow.unfit_values import unfit
from state_ops.counts import counted
from state_ops.errors import InputError, first_line
from state_ops.keyed.ttl import visible
from state_ops.schema.state_schema import StateSchema

_SHOWN = 3


def fitting(rows: pa.Table, keys: pa.Schema, schema: StateSchema, where: str) -> pa.Table:
    """Return the rows in the state's own types: key columns, then fields, as `scan_state` gives them.

    Numbers may be narrower or wider where every value fits; a text is no number, and a moment with a time zone none
    without.

    Raises InputError with everything that is wrong: missing and strange columns, types, values that do not fit, nulls,
    several rows of one key, with a sample of each.

    Args:
        where: For the error.
    """
    fields = [(field.name, field.type, False) for field in keys]
    fields += [(field.name, field.type, field.nullable) for field in visible(schema)]
    names = [name for name, _, _ in fields]
    problems = [
        f"there is a column {name!r}, which the state has not" for name in rows.column_names if name not in names
    ]
    problems += [f"there are several columns {name!r}" for name in names if rows.column_names.count(name) > 1]
    columns: dict[str, pa.ChunkedArray] = {}
    for name, type, nullable in fields:
        if rows.column_names.count(name) != 1:
            if name not in rows.column_names:
                problems.append(f"the column {name!r} ({type_name(type)}) is missing")
            continue
        column = rows.column(name)
        problem, cast = _cast(name, column, type, rows)
        problems += [problem] if problem else []
        if not nullable and column.null_count:
            what = "is part of the key" if name in keys.names else "cannot be null"
            nulls = pc.indices_nonzero(pc.is_null(column))
            problems.append(
                f"{counted(column.null_count, 'row', 'has', 'have')} no {name!r}, which {what}: {_shown(rows, nulls)}"
            )
        if cast is not None:
            columns[name] = cast
            far = next(unfit(pa.table({name: cast})), None)
            problems += [f"row {far.row + 1}: the column {far.column!r} {far.problem}"] if far is not None else []
            problems += [
                f"the column {name!r} has a null in {part}, which cannot be null" for part in _holes(name, cast)
            ]
    if all(name in columns for name in keys.names):
        problems += _twice(pa.table({name: columns[name] for name in keys.names}))
    if problems:
        raise InputError(
            f"The rows do not fit the state: {'; '.join(problems)}.",
            where=where,
            next="Nothing was changed. Correct them all, then import again; `weir state scan` shows rows as they have "
            "to be.",
        )
    return pa.table([columns[name] for name in names], schema=pa.schema([(name, type) for name, type, _ in fields]))


def _cast(
    name: str, column: pa.ChunkedArray, type: pa.DataType, rows: pa.Table
) -> tuple[str | None, pa.ChunkedArray | None]:
    """Return a column's values in the state's type, or the reason why they cannot be cast."""
    if column.type == type:
        return None, column
    if not _alike(column.type, type):
        sample = _shown(rows, pa.array(range(min(1, rows.num_rows))))
        return f"the column {name!r} is {column.type}, and the state has {type_name(type)} there: {sample}", None
    try:
        return None, column.cast(type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        row = _first(column.length(), lambda number: _casts(column.slice(0, number), type))
        shown = _shown(rows, pa.array([row]))
        reason = first_line(error)
        return f"the column {name!r} holds what {type_name(type)} cannot: {reason}: {shown}", None


def _holes(path: str, column: pa.Array | pa.ChunkedArray) -> Iterator[str]:
    """Yield the parts of nested values that are null although they must not be: Arrow's cast lets them pass."""
    array = contiguous(column).drop_null()
    if not parts(array.type):
        return
    if pa.types.is_struct(array.type):
        children = array.flatten()
    else:
        inner, _ = elements(array)
        children = inner.flatten() if pa.types.is_map(array.type) else [inner]
    for part, child in zip(parts(array.type), children, strict=True):
        if child.null_count and not part.nullable:
            yield f"{path}.{part.name}"
        yield from _holes(f"{path}.{part.name}", child)


def _casts(column: pa.ChunkedArray, type: pa.DataType) -> bool:
    try:
        column.cast(type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def _first(length: int, fits: Callable[[int], bool]) -> int:
    """Return the row by which so many first rows do not fit any more, by halving."""
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _alike(given: pa.DataType, type: pa.DataType) -> bool:
    """Return whether values of one type may be meant for the other.

    The cast then tells for each value whether it fits.
    """
    if pa.types.is_null(given):
        return True
    if pa.types.is_timestamp(given) and pa.types.is_timestamp(type):
        return (given.tz is None) == (type.tz is None)
    if pa.types.is_integer(given) and (pa.types.is_floating(type) or pa.types.is_decimal(type)):
        return True
    kinds: tuple[Callable[[pa.DataType], bool], ...] = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        lambda type: pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type),
        lambda type: pa.types.is_binary(type) or pa.types.is_large_binary(type) or pa.types.is_fixed_size_binary(type),
        pa.types.is_duration,
        pa.types.is_time,
        pa.types.is_map,
        pa.types.is_struct,
        is_list,
    )
    return any(kind(given) and kind(type) for kind in kinds)


def _twice(keys: pa.Table) -> Iterator[str]:
    """Yield a message about keys that several rows have; none if each key has one row."""
    by_key = frames.from_arrow(keys).group_by(keys.column_names, maintain_order=True).len()
    many = by_key.filter(by_key["len"] > 1)
    if len(many):
        examples = "; ".join(
            f"{dict(zip(keys.column_names, row[:-1], strict=True))} in {row[-1]} rows" for row in many.rows()[:_SHOWN]
        )
        yield f"{counted(len(many), 'key', 'has', 'have')} several rows: {examples}"


def _shown(rows: pa.Table, numbers: pa.Array) -> str:
    """Return the first of some rows, with their numbers."""
    few = np.asarray(numbers)[:_SHOWN]
    return ", ".join(f"row {number}: {frames.python_rows(rows.slice(int(number), 1))[0]}" for number in few)
