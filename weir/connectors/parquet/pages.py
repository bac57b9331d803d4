"""The headers of a column chunk's pages: what a page takes once it is decompressed, whatever the footer says.

Each page begins with a header in Thrift's compact protocol, which has the sizes of what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from state_ops.parquet.thrift import INT32, Shape, struct

_UNCOMPRESSED, _COMPRESSED = 2, 3
_OF_KINDS = (5, 7, 8)  # data page, dictionary page, data page of version 2
_COUNT, _ENCODING, _ENCODING_V2 = 1, 2, 4
DELTA_BYTE_ARRAY = 7
_HEADER: Shape = {
    _UNCOMPRESSED: INT32,
    _COMPRESSED: INT32,
    _OF_KINDS[0]: {_COUNT: INT32, _ENCODING: INT32},
    _OF_KINDS[1]: {_COUNT: INT32, _ENCODING: INT32},
    _OF_KINDS[2]: {_COUNT: INT32, _ENCODING_V2: INT32},
}


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
        header, at = struct(data, at, _HEADER)
        size, stored = header.get(_UNCOMPRESSED, -1), header.get(_COMPRESSED, -1)
        kind = next((kind for kind in _OF_KINDS if kind in header), None)
        if min(size, stored) < 0:
            raise ValueError("the header of a page has no size")
        at += stored
        if kind is not None:
            inside = header[kind]
            encoding = inside.get(_ENCODING_V2 if kind == _OF_KINDS[2] else _ENCODING, 0)
            yield Page(size, inside.get(_COUNT, 0), encoding, kind == _OF_KINDS[1])
    if at != len(data):
        raise ValueError("a page reaches beyond its column chunk")
