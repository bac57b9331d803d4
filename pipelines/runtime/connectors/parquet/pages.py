"""The headers of a column chunk's pages: what a page takes once it is decompressed, whatever the footer says.

Each page begins with a header in Thrift's compact protocol, which has the sizes of what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_MOST_DEPTH = 8
_UNCOMPRESSED, _COMPRESSED = 2, 3
_OF_KINDS = (5, 7, 8)  # data page, dictionary page, data page of version 2
_COUNT, _ENCODING, _ENCODING_V2 = 1, 2, 4
DELTA_BYTE_ARRAY = 7


@dataclass(frozen=True, slots=True)
class Page:
    """One page.

    Attributes:
        bytes: Once it is decompressed.
        values: How many it has, nulls among them.
        encoding: As Parquet numbers it.
        is_dictionary: Its values are those that others refer to.
    """

    bytes: int
    values: int
    encoding: int
    is_dictionary: bool


def pages(data: memoryview) -> Iterator[Page]:
    """Yield the pages of a column chunk.

    Args:
        data: Its bytes.

    Raises:
        ValueError: They are none.
    """
    at = 0
    while at < len(data):
        header, at = _struct(data, at, 0)
        size, stored = header.get(_UNCOMPRESSED, -1), header.get(_COMPRESSED, -1)
        kind = next((kind for kind in _OF_KINDS if isinstance(header.get(kind), dict)), None)
        if not isinstance(size, int) or not isinstance(stored, int) or min(size, stored) < 0:
            raise ValueError("the header of a page has no size")
        at += stored
        if kind is not None:
            inside = header[kind]
            encoding = inside.get(_ENCODING_V2 if kind == _OF_KINDS[2] else _ENCODING, 0)
            yield Page(size, int(inside.get(_COUNT, 0)), int(encoding), kind == _OF_KINDS[1])
    if at != len(data):
        raise ValueError("a page reaches beyond its column chunk")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            break
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("the header of a page is cut off")


def _struct(data: memoryview, at: int, depth: int) -> tuple[dict[int, Any], int]:
    fields: dict[int, Any] = {}
    number = 0
    if depth > _MOST_DEPTH:
        raise ValueError("the header of a page is nested too deeply")
    while True:
        if at >= len(data):
            raise ValueError("the header of a page is cut off")
        head = data[at]
        at += 1
        if not head:
            return fields, at
        kind, step = head & 0x0F, head >> 4
        if step:
            number += step
        else:
            number, at = _varint(data, at)
            number = number >> 1 ^ -(number & 1)
        fields[number], at = _value(data, at, kind, depth)


def _value(data: memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind in _INTEGERS:
        value, at = _varint(data, at)
        return value >> 1 ^ -(value & 1), at
    if kind == _BINARY:
        size, at = _varint(data, at)
        return None, at + size
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    raise ValueError(f"the header of a page has a field of the type {kind}")
