"""Find values that an Arrow array can hold and a table, a reader or Python cannot.

Arrow does not look at the values that it is given: a file can bring a text that is not UTF-8, a date of the year
5881580, or a decimal with more digits than its type. Readers ask here before they hand rows out, and so does the task
that stages rows: after the commit nothing may fail because of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow.frames import python_values
from state_ops.arrow.nested import elements
from state_ops.value_text import literal

FIRST_DAY, LAST_DAY = -719_162, 2_932_896
"""0001-01-01 and 9999-12-31, the range of Python's `date` and of SQL's DATE, in days since 1970."""
_DAY = 86_400_000_000  # microseconds
FIRST_MICRO, LAST_MICRO = FIRST_DAY * _DAY, (LAST_DAY + 1) * _DAY - 1
_SHOWN = 40  # bytes of a text that is not UTF-8


@dataclass(frozen=True, slots=True)
class UnfitValue:
    """A value that cannot be handed on.

    Attributes:
        row: Its row's number within the table.
        column: The column's name; of a value inside a struct, list or map with the path to it: `items.price`.
        problem: What is wrong with it, as a clause: "is 5881580-07-11, outside of the years 1 to 9999".

    Example:
        >>> from weir import UnfitValue
        >>> class Positive:  # the rules of a sink, as its publisher returns them
        ...     def refused(self, rows):
        ...         amounts = enumerate(rows.column("amount").to_pylist())
        ...         yield from (UnfitValue(row, "amount", f"is {amount}") for row, amount in amounts if amount < 0)
        >>> import pyarrow as pa
        >>> list(Positive().refused(pa.table({"amount": [3, -1]})))
        [UnfitValue(row=1, column='amount', problem='is -1')]
    """

    row: int
    column: str
    problem: str


def unfit(table: pa.Table | pa.RecordBatch) -> Iterator[UnfitValue]:
    """Yield the values of a table that cannot be handed on, column by column, each column's in the order of its rows.

    Refused are dates and timestamps outside of the years 1 to 9999, texts that are not UTF-8, decimals with more digits
    than their type, times of day outside of a day, and maps that have a key twice, whose tables DuckDB refuses to read
    and of which other readers take one value or the other. Values below a null are not looked at, nor are keys with
    parts.

    Args:
        table: Rows of canonical types (`frames.canonical`).

    Example:
        >>> import pyarrow as pa
        >>> from state_ops.arrow.unfit_values import unfit
        >>> [value.problem for value in unfit(pa.table({"day": pa.array([0, 2_932_897], pa.date32())}))]
        ['is 10000-01-01, outside of the years 1 to 9999']
    """
    for name, column in zip(table.schema.names, table.columns, strict=True):
        before = 0
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            for path, leaf, rows in _leaves(name, chunk, None):
                for at in _unfit_at(leaf, 0):
                    yield UnfitValue(before + (at if rows is None else int(rows[at])), path, _problem(leaf, at))
            before += len(chunk)


def storable(table: pa.Table) -> pa.Table:
    """Return a table with null in place of each value that cannot be handed on, or that has such a part."""
    for at, name in enumerate(table.schema.names):
        if rows := {value.row for value in unfit(table.select([at]))}:
            keeps = pa.array([row not in rows for row in range(table.num_rows)])
            column = pc.if_else(keeps, table.column(at), pa.scalar(None, table.column(at).type))
            table = table.set_column(at, name, column)
    return table


def _leaves(path: str, array: pa.Array, rows: np.ndarray | None) -> Iterator[tuple[str, pa.Array, np.ndarray | None]]:
    """Yield the arrays without parts that an array consists of, and its maps, each with the row of each value; None:
    its index."""
    type = array.type
    if pa.types.is_struct(type):
        for field, part in zip(type, array.flatten(), strict=True):
            yield from _leaves(f"{path}.{field.name}", part, rows)
    elif pa.types.is_nested(type):
        if pa.types.is_map(type):
            yield path, array, rows
        values, counts = elements(array)
        yield from _leaves(path, values, np.repeat(np.arange(len(array)) if rows is None else rows, counts))
    else:
        yield path, array, rows


def _unfit_at(leaf: pa.Array, offset: int) -> Iterator[int]:
    """Yield the places of a leaf's unfit values, in order, each `offset` further. Halves that are whole cost one
    look."""
    if not len(leaf) or _is_fit(leaf):
        return
    if len(leaf) == 1:
        yield offset
        return
    half = len(leaf) // 2
    yield from _unfit_at(leaf.slice(0, half), offset)
    yield from _unfit_at(leaf.slice(half), offset + half)


def _is_fit(leaf: pa.Array) -> bool:
    if (bounds := _bounds(leaf.type)) is not None:
        ends = pc.min_max(leaf.view(pa.int32() if pa.types.is_date32(leaf.type) else pa.int64()))
        low, high = ends["min"].as_py(), ends["max"].as_py()
        return low is None or bool(bounds[0] <= low and high <= bounds[1])
    if pa.types.is_map(leaf.type):
        return _key_twice(leaf) is None
    if not _is_looked_at(leaf.type) or _is_ascii(leaf):
        return True
    try:
        leaf.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _key_twice(maps: pa.MapArray) -> pa.Array | None:
    """Return the first key that a map has already; None where there is none, or where keys have parts."""
    values, counts = elements(maps)
    keys = values.flatten()[0]
    if pa.types.is_nested(keys.type) or counts.max(initial=0) < 2:
        return None
    codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    of_maps = np.repeat(np.arange(len(maps)), counts) * len(codes) + codes
    again = np.delete(np.arange(len(codes)), np.unique(of_maps, return_index=True)[1])
    return keys.slice(int(again[0]), 1) if len(again) else None


def _is_ascii(leaf: pa.Array) -> bool:
    """Return whether a column of texts has nothing but ASCII, at a fifth of the cost of a look at each text."""
    if not pa.types.is_string(leaf.type) or not len(leaf):
        return False
    _, offsets, data = leaf.buffers()
    if data is None:
        return True
    ends = np.frombuffer(offsets, np.int32)
    texts = np.frombuffer(data, np.uint8)[ends[leaf.offset] : ends[leaf.offset + len(leaf)]]
    whole = len(texts) // 8 * 8
    words = np.frombuffer(texts[:whole].tobytes() if texts.ctypes.data % 8 else texts[:whole], np.uint64)
    return not (np.bitwise_or.reduce(words, initial=0) & 0x8080808080808080 or (texts[whole:] & 0x80).any())


def _bounds(type: pa.DataType) -> tuple[int, int] | None:
    if pa.types.is_date32(type):
        return FIRST_DAY, LAST_DAY
    if pa.types.is_timestamp(type) and type.unit == "us":
        return FIRST_MICRO, LAST_MICRO
    return None


def _is_looked_at(type: pa.DataType) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_decimal(type) or pa.types.is_time(type))


def _problem(leaf: pa.Array, at: int) -> str:
    type = leaf.type
    if pa.types.is_date32(type):
        day = np.datetime64(leaf.view(pa.int32())[at].as_py(), "D")
        return f"is {day}, outside of the years 1 to 9999"
    if pa.types.is_timestamp(type):
        moment = np.datetime64(leaf.view(pa.int64())[at].as_py(), "us")
        return f"is {moment}, outside of the years 1 to 9999"
    if pa.types.is_string(type):
        text = leaf.view(pa.binary())[at].as_py()
        return f"is not UTF-8: {text[:_SHOWN]!r}{'...' if len(text) > _SHOWN else ''}"
    if pa.types.is_map(type):
        return f"is a map that has the key {literal(python_values(_key_twice(leaf.slice(at, 1)))[0])} twice"
    if pa.types.is_decimal(type):
        return f"has more digits than {type}: {leaf[at].as_py()}"
    return f"is no time of day: {leaf.view(pa.int64())[at].as_py()}"
