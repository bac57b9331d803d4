"""The values of an Avro file as its own schema has them, of what Polars has read by another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow.nested import elements
from weir.connectors.formats.avro.avro_schema import AvroColumn

_MOST_SYMBOLS = 256 << 20  # bytes that the symbols of enums may have in a block, in which each is a number


def whole(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks)


class Symbols:
    """The symbols that numbers of enums stand for, in one block: no more bytes of them than memory is meant for."""

    def __init__(self) -> None:
        self._left = _MOST_SYMBOLS

    def of(self, numbers: pa.Array, symbols: Sequence[str]) -> pa.Array:
        """Return each number's symbol. Raises ArrowCapacityError where they have too many bytes."""
        texts = pa.array(symbols, pa.string())
        self._left -= pc.sum(pc.binary_length(texts).cast(pa.int64()).take(numbers)).as_py() or 0
        if self._left < 0:
            raise pa.ArrowCapacityError(f"the symbols of its enums have more than {_MOST_SYMBOLS >> 20} MiB")
        return texts.take(numbers)


def restored(array: pa.Array, column: AvroColumn, symbols: Symbols) -> pa.Array:
    """Return the values that Polars has read, as the file's own schema has them. Raises ArrowInvalid for an int with
    more than 32 bits."""
    mask = array.is_null() if array.null_count else None
    if column.symbols is not None:
        return symbols.of(array, column.symbols)
    if column.is_decimal:
        return _decimals(array.cast(pa.binary()), column.type)
    if pa.types.is_null(column.type):
        return pa.nulls(len(array))
    if pa.types.is_struct(column.type):
        stored = dict(zip(array.type.names, array.flatten(), strict=True))
        values = [
            restored(stored[field.name], part, symbols) if part.read_as is not None else pa.nulls(len(array))
            for field, part in zip(column.type, column.parts, strict=True)
        ]
        return pa.StructArray.from_arrays(values, fields=list(column.type), mask=mask)
    if column.parts:
        values, counts = elements(array)
        offsets = offsets_of(counts)
        if pa.types.is_map(column.type):
            keys, items = values.flatten()
            return pa.MapArray.from_arrays(
                offsets, keys.cast(pa.string()), restored(items, column.parts[0], symbols), mask=mask
            )
        return pa.ListArray.from_arrays(offsets, restored(values, column.parts[0], symbols), mask=mask)
    if pa.types.is_int64(array.type) and column.type.bit_width == 32:
        array = array.cast(pa.int32())  # no other type is made of an int: a date, a time of day
    return array.cast(column.type) if array.type != column.type else array


def offsets_of(counts: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())


def _decimals(array: pa.Array, type: pa.DataType) -> pa.Array:
    """Decimals of their digits as a whole number in bytes, the highest first. What is none, or too large for Arrow, is
    a number with more digits than the type has: `unfit` and casts find it."""
    width = type.bit_width // 8
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    data = np.frombuffer(array.buffers()[2] or b"", np.uint8)
    starts, ends = offsets[:-1], offsets[1:]
    is_number = ends > starts
    fill = np.zeros(len(array), np.uint8)
    fill[is_number] = np.where(data[starts[is_number]] >= 128, 255, 0)
    digits = np.repeat(fill[:, None], width, axis=1)
    for at in range(min(width, int((ends - starts).max(initial=0)))):
        has = ends - starts > at
        digits[has, at] = data[ends[has] - 1 - at]
    is_lost = ~is_number
    for row in np.flatnonzero(ends - starts > width):
        above = data[starts[row] : ends[row] - width]
        is_lost[row] = (above != fill[row]).any() or (digits[row, -1] >= 128) != (fill[row] == 255)
    digits[is_lost] = [*[255] * (width - 1), 127]
    buffers = [pa.array(array.is_valid()).buffers()[1], pa.py_buffer(digits.tobytes())]
    return pa.Array.from_buffers(type, len(array), buffers)
