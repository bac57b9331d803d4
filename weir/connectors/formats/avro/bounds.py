"""Bounds of reading Avro: the memory that a block takes once it is decoded.

The size of a block tells little of it. An empty list has one byte there and some fifty in memory; a record that is null
has one byte there, and in memory a place for each of its fields. So a block is weighed before it is decoded:

    rows    are counted in its header, and each has the same columns
    items   of lists and maps are at most as many as it has bytes; where that is too many, they are counted one by one
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyarrow as pa

from weir.connectors.formats.avro.avro_schema import AvroColumn

MOST = 512 << 20  # bytes of one block in memory
TOGETHER = 128 << 20  # bytes in memory of blocks that are decoded at once
_ROW, _NUMBER, _TEXT, _LIST = 16, 12, 40, 56  # bytes in memory of a value beside its own
_LONGEST_NUMBER = 63  # bits
_WIDE = {"float": 4, "double": 8, "boolean": 1}

_Skip = Callable[[bytes, int], int]
"""Return where the value that begins at a place of some bytes ends."""


class TooMuchError(Exception):
    """A block takes more memory than it may; the message says so, as a clause."""


class Weights:
    """The memory that the rows of a file take.

    Args:
        columns: Those of its schema.
        read: The names of those that are read; the others are skipped.
    """

    def __init__(self, columns: Mapping[str, AvroColumn], read: Collection[str]) -> None:
        written = {name: column for name, column in columns.items() if column.read_as is not None}
        self._columns = [(column, name in read) for name, column in written.items()]
        taken = [column for column, is_read in self._columns if is_read]
        self._row = _ROW + sum(map(_bytes, taken))
        self._symbols = sum(map(_symbols, taken))
        self._dense = max(map(_dense, taken), default=0)

    def of(self, rows: int, data: bytes) -> int:
        """Return about how many bytes a block takes in memory, or more. Raises TooMuchError for more than `MOST`.

        Args:
            rows: As its header says.
            data: The block, unpacked.
        """
        told = rows * self._row + 2 * len(data)
        at_most = told + rows * self._symbols + len(data) * self._dense
        if at_most > MOST and told <= MOST and self._dense:
            told += Items(self._columns, MOST - told).of(rows, data)
        if at_most > MOST and told > MOST:
            raise TooMuchError(f"a block of {rows:,} rows takes more than {MOST >> 20} MiB in memory")
        return at_most


def _bytes(column: AvroColumn) -> int:
    """Return the bytes that a value takes, null or not, without the items of lists and maps."""
    if column.parts and not _is_list(column):
        return sum(_bytes(part) for part in column.parts if part.read_as is not None)
    if column.parts:
        return _LIST
    kind = _kind(column)
    if isinstance(kind, dict):
        return _TEXT + int(kind["size"])
    return _TEXT if kind in ("bytes", "string") else _NUMBER


def _symbols(column: AvroColumn) -> int:
    """Return the most bytes that the symbols of enums have in a value, without the items of lists and maps."""
    if _is_list(column):
        return 0
    return max(map(len, column.symbols or ()), default=0) + sum(map(_symbols, column.parts))


def _dense(column: AvroColumn) -> int:
    """Return the most bytes that items of lists and maps take for a byte of the file."""
    within = max(map(_dense, column.parts), default=0)
    return max(within, _item(column) + _symbols(column.parts[0])) if _is_list(column) else within


def _item(column: AvroColumn) -> int:
    """Return the bytes that one item of a list or map takes."""
    return _bytes(column.parts[0]) + (_TEXT if _is_map(column) else 0)


def _kind(column: AvroColumn) -> Any:
    """Return the type as which Polars reads a value that is not null."""
    read_as = column.read_as
    return next(kind for kind in read_as if kind != "null") if isinstance(read_as, list) else read_as


def _is_list(column: AvroColumn) -> bool:
    kind = _kind(column)
    return isinstance(kind, dict) and kind["type"] == "array"


def _is_map(column: AvroColumn) -> bool:
    return bool(pa.types.is_map(column.type))


class Items:
    """Counts what the items of lists and maps take. left: bytes that they may."""

    def __init__(self, columns: list[tuple[AvroColumn, bool]], left: int) -> None:
        self._left, self._may = left, left
        self._skips = [self._skip(column, is_read) for column, is_read in columns]

    def of(self, rows: int, data: bytes) -> int:
        """Return the bytes, or those that some of them take where that is too many. Damage ends the count: whoever
        decodes the rows tells it."""
        at = 0
        try:
            for _ in range(rows):
                for skip in self._skips:
                    at = skip(data, at)
        except (IndexError, TooMuchError):
            pass
        return self._may - self._left

    def _skip(self, column: AvroColumn, is_read: bool) -> _Skip:
        skip = self._skip_value(column, is_read)
        if not isinstance(column.read_as, list):
            return skip
        null = 2 * column.read_as.index("null")
        return lambda data, at: at + 1 if data[at] == null else skip(data, at + 1)

    def _skip_value(self, column: AvroColumn, is_read: bool) -> _Skip:
        kind = _kind(column)
        if _is_list(column):
            return self._skip_items(column, is_read)
        if column.parts:
            return _all([self._skip(part, is_read) for part in column.parts if part.read_as is not None])
        wide = int(kind["size"]) if isinstance(kind, dict) else _WIDE.get(kind)
        if wide is not None:
            return lambda _, at: at + wide
        return _skip_bytes if kind in ("bytes", "string") else _skip_number

    def _skip_items(self, column: AvroColumn, is_read: bool) -> _Skip:
        part, item = self._skip(column.parts[0], is_read), _item(column) if is_read else 0
        skip = _all([_skip_bytes, part]) if _is_map(column) else part

        def skip_all(data: bytes, at: int) -> int:
            while True:
                count, at = _number(data, at)
                if count < 0:
                    count, at = -count, _skip_number(data, at)
                if not count:
                    return at
                self._left -= count * item
                if self._left < 0:
                    raise TooMuchError
                for _ in range(count):
                    at = skip(data, at)

        return skip_all


def _all(skips: list[_Skip]) -> _Skip:
    def skip(data: bytes, at: int) -> int:
        for one in skips:
            at = one(data, at)
        return at

    return skip


def _skip_number(data: bytes, at: int) -> int:
    while data[at] > 0x7F:
        at += 1
    return at + 1


def _skip_bytes(data: bytes, at: int) -> int:
    size, at = _number(data, at)
    return at + max(size, 0)


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return a whole number, and where it ends. Raises IndexError for one that is too long, or ends nowhere."""
    byte = data[at]
    if byte <= 0x7F:
        return (byte >> 1) ^ -(byte & 1), at + 1
    number, shift = 0, 0
    while True:
        byte = data[at]
        number, at = number | (byte & 0x7F) << shift, at + 1
        if byte <= 0x7F:
            return (number >> 1) ^ -(number & 1), at
        shift += 7
        if shift > _LONGEST_NUMBER:  # its time would grow by the square of its length
            raise IndexError
