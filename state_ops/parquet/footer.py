"""Footers of Parquet files, checked before Arrow makes anything of them.

Arrow checks most of a footer when it opens a file, and the rest when it is asked for a column chunk. There an exception
of its C++ ends the whole process, since Python's side does not expect one. So whoever opens a file of somebody else
calls `check` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from state_ops.parquet.thrift import BYTES, INT32, INT64, Shape, struct

_MAGIC, _TRAILER = b"PAR1", 8  # the footer's length in 4 bytes, and the magic
_AT_FIRST = 1 << 16  # bytes; as much as Arrow itself reads at first, and most footers fit
_TYPES, _CODECS, _REPETITION_TYPES = range(8), range(8), range(3)
_BYTE_ARRAY, _FIXED = 6, 7
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
_WIDEST_NUMBER = 16  # bytes; statistics of longer values may be cut off
_OPTIONAL, _REPEATED = 1, 2

_SCHEMA, _ROW_GROUPS = 2, 4
_TYPE, _LENGTH, _REPETITION, _NAME, _CHILDREN = 1, 2, 3, 4, 5
_ELEMENT: Shape = {
    _TYPE: INT32, _LENGTH: INT32, _REPETITION: INT32, _NAME: BYTES, _CHILDREN: INT32
}  # fmt: skip
_COLUMNS = 1
_CHUNK, _CRYPTO = 3, 8
_PATH, _CODEC, _STATISTICS, _SIZES = 3, 4, 12, 16
_BOUNDS = (1, 2, 5, 6)
_UNENCODED, _REPETITIONS, _DEFINITIONS = 1, 2, 3
_ROW_GROUP: Shape = {
    _COLUMNS: [
        {
            _CHUNK: {
                _TYPE: INT32,
                _PATH: [BYTES],
                _CODEC: INT32,
                _STATISTICS: dict.fromkeys(_BOUNDS, BYTES),
                _SIZES: {_UNENCODED: INT64, _REPETITIONS: [INT64], _DEFINITIONS: [INT64]},
            },
            _CRYPTO: {},
        }
    ]
}
_FOOTER: Shape = {_SCHEMA: [_ELEMENT], _ROW_GROUPS: [_ROW_GROUP]}


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column of the file.

    Attributes:
        path: The names on the way to it.
        width: Of a value's statistics in bytes; None: any.
        repetitions: How many levels of repetition there are.
        definitions: The same of definition.
    """

    type: int
    path: list[bytes]
    width: int | None
    repetitions: int
    definitions: int


def end_of(source: Any) -> bytes:
    """Return the last bytes of a file, the whole footer among them. Raises OSError.

    Args:
        source: A file of pyarrow, which stands at its begin afterwards.
    """
    size = source.size()
    source.seek(max(size - _AT_FIRST, 0))
    end: bytes = source.read(min(size, _AT_FIRST))
    needed = int.from_bytes(end[-_TRAILER:-4], "little") + _TRAILER
    if end[-4:] == _MAGIC and len(end) < needed <= size:
        source.seek(size - needed)
        end = source.read(needed)
    source.seek(0)
    return end


def check(end: bytes) -> None:
    """Check the footer of a file. What is no Parquet at all, or encrypted as a whole, is left to Arrow, which says so.

    Args:
        end: The file's last bytes, the whole footer among them.

    Raises:
        pa.ArrowInvalid: The footer is damaged; the text says how.
    """
    size = int.from_bytes(end[-_TRAILER:-4], "little")
    if end[-4:] != _MAGIC or size + _TRAILER > len(end):
        return
    footer = bytes(end[len(end) - _TRAILER - size : len(end) - _TRAILER])
    try:
        fields, _ = struct(footer, 0, _FOOTER)
        leaves = list(_leaves(fields.get(_SCHEMA, [])))
        for group in fields.get(_ROW_GROUPS, []):
            _check_group(group.get(_COLUMNS, []), leaves)
    except ValueError as error:
        raise pa.ArrowInvalid(f"its footer is damaged: {error}") from None


def _leaves(elements: list[dict[int, Any]]) -> Iterator[_Leaf]:
    """Yield the columns of a schema, which is a tree in the order of depth first. Raises ValueError."""
    above: list[tuple[int, list[bytes], int, int]] = []  # how many more children, path, and levels of each struct
    for number, element in enumerate(elements):
        name, type, children = element.get(_NAME, b""), element.get(_TYPE), element.get(_CHILDREN, 0)
        name.decode()
        repetition = element.get(_REPETITION, 0)
        if children < 0 or type not in (None, *_TYPES) or repetition not in _REPETITION_TYPES:
            raise ValueError("its schema has a type, or a number of fields, that there is not")
        path, repetitions, definitions = list[bytes](), 0, 0
        if number:
            if not above:
                raise ValueError("its schema has fields that are no part of it")
            more, before, repetitions, definitions = above.pop()
            if more > 1:
                above.append((more - 1, before, repetitions, definitions))
            path, repetitions = [*before, name], repetitions + (repetition == _REPEATED)
            definitions += repetition in (_OPTIONAL, _REPEATED)
        if children:
            above.append((children, path, repetitions, definitions))
        elif number and type is not None:
            yield _Leaf(type, path, _width(type, element.get(_LENGTH, 0)), repetitions, definitions)
    if above:
        raise ValueError("its schema lacks fields")


def _width(type: int, length: int) -> int | None:
    if type == _FIXED and length > _WIDEST_NUMBER:
        return None
    return length if type == _FIXED else _WIDTHS.get(type)


def _check_group(chunks: list[dict[int, Any]], leaves: list[_Leaf]) -> None:
    if len(chunks) != len(leaves):
        raise ValueError(f"a row group has {len(chunks)} columns of {len(leaves)}")
    for chunk, leaf in zip(chunks, leaves, strict=True):
        if _CRYPTO in chunk:
            raise ValueError("a column is encrypted")
        column = chunk.get(_CHUNK, {})
        if column.get(_TYPE) != leaf.type or column.get(_PATH) != leaf.path:
            raise ValueError(f"a row group has another column in the place of {_text(leaf)}")
        if column.get(_CODEC) not in _CODECS:
            raise ValueError(f"the column {_text(leaf)} has the codec {column.get(_CODEC)}, which nobody knows")
        sizes, statistics = column.get(_SIZES), column.get(_STATISTICS)
        if sizes is not None and not _fits(sizes, leaf):
            raise ValueError(f"the sizes of the column {_text(leaf)} are none")
        # Some writers have a length of 0 where there is no value.
        lengths = {len(bound) for bound in statistics.values()} if statistics else set()
        if leaf.width is not None and not lengths <= {0, leaf.width}:
            raise ValueError(f"the statistics of the column {_text(leaf)} are none")


def _fits(sizes: dict[int, Any], leaf: _Leaf) -> bool:
    """Return whether there is one number for each level, or none, and bytes are counted only for a column of bytes."""
    return (
        len(sizes.get(_REPETITIONS, ())) in (0, leaf.repetitions + 1)
        and len(sizes.get(_DEFINITIONS, ())) in (0, leaf.definitions + 1)
        and (_UNENCODED not in sizes or leaf.type == _BYTE_ARRAY)
    )


def _text(leaf: _Leaf) -> str:
    return repr(b".".join(leaf.path).decode())
