"""Thrift's compact protocol, in which Parquet writes its footers and the headers of its pages.

A caller says by a shape which fields of a struct it wants: by number INT32, INT64, BYTES, a shape for a struct, or a
list of one of these for a list. All other fields are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

INT32, INT64, BYTES = 5, 6, 8
Shape = Mapping[int, Any]

_TRUE, _FALSE, _BYTE, _DOUBLE, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 9, 10, 12
_INTEGERS = (4, INT32, INT64)
_MOST_DEPTH = 12
_MOST_ITEMS = 1_000_000  # of one list, as Arrow takes
_LAST_FIELD = 0x7FFF


def struct(data: Sequence[int], at: int, shape: Shape, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Read a struct.

    Args:
        data: What it stands in, as bytes or a view of them.
        at: Where it begins.
        depth: How many structs and lists it is in.

    Returns:
        The fields of the shape that it has, by number, and where it ends.

    Raises:
        ValueError: It is cut off, has a field twice, or a field of another type than the shape has.
    """
    fields: dict[int, Any] = {}
    number = 0
    if depth > _MOST_DEPTH:
        raise ValueError("structs are nested too deeply")
    try:
        while head := data[at]:
            at += 1
            kind, step = head & 0x0F, head >> 4
            if step:
                number += step
            else:
                number, at = _varint(data, at)
                number = number >> 1 ^ -(number & 1)
            if number > _LAST_FIELD:
                raise ValueError("a field has no number")
            wanted = shape.get(number)
            if wanted is None:
                if kind in _INTEGERS:  # most fields are
                    while data[at] >= 0x80:
                        at += 1
                    at += 1
                else:
                    at = _after(data, at, kind, depth)
            elif number in fields:
                raise ValueError(f"the field {number} is there twice")
            else:
                fields[number], at = _value(data, at, kind, wanted, depth)
    except IndexError:
        raise ValueError("a struct is cut off") from None
    return fields, at + 1


def _items(data: Sequence[int], at: int) -> tuple[int, int, int]:
    """Return of a list how many items it has, their type, and where they begin. Raises ValueError."""
    head = data[at]
    count, kind, at = head >> 4, head & 0x0F, at + 1
    if count == 0x0F:
        count, at = _varint(data, at)
    if count > min(_MOST_ITEMS, len(data) - at):
        raise ValueError(f"a list claims {count:,} items")
    return count, kind, at


def _varint(data: Sequence[int], at: int) -> tuple[int, int]:
    """Read a number without sign, and where it ends. Raises ValueError, and IndexError where it is cut off."""
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    for shift in range(7, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has too many bytes")


def _value(data: Sequence[int], at: int, kind: int, wanted: Any, depth: int) -> tuple[Any, int]:
    if kind == wanted and kind in _INTEGERS:
        value, at = _varint(data, at)
        return value >> 1 ^ -(value & 1), at
    if kind == wanted == BYTES:
        size, at = _varint(data, at)
        if at + size > len(data):
            raise ValueError("bytes are cut off")
        return bytes(data[at : at + size]), at + size
    if isinstance(wanted, Mapping) and kind == _STRUCT:
        return struct(data, at, wanted, depth + 1)
    if isinstance(wanted, list) and kind == _LIST:
        count, kind, at = _items(data, at)
        values = []
        for _ in range(count):
            value, at = _value(data, at, kind, wanted[0], depth + 1)
            values.append(value)
        return values, at
    raise ValueError(f"a field has the type {kind}")


def _after(data: Sequence[int], at: int, kind: int, depth: int) -> int:
    """Return where a field ends."""
    if kind in (_TRUE, _FALSE):
        return at
    if kind in _INTEGERS:
        return _varint(data, at)[1]
    if kind == BYTES:
        size, at = _varint(data, at)
        return at + size
    if kind == _STRUCT:
        return struct(data, at, {}, depth + 1)[1]
    if kind in (_LIST, _SET):
        count, kind, at = _items(data, at)
        for _ in range(count):
            at = at + 1 if kind in (_TRUE, _FALSE) else _after(data, at, kind, depth + 1)
        return at
    if kind in (_BYTE, _DOUBLE):
        return at + (1 if kind == _BYTE else 8)
    raise ValueError(f"a field has the type {kind}")
