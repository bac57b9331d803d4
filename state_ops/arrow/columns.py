"""Arrow columns as numpy arrays and back, and byte strings gathered and scattered by whole columns.

No Python loop runs over values: byte strings of unequal length are moved by numpy, as unaligned overlapping views of
one-element items (`items`), which moves whole ones with memcpy and needs no index per byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def is_variable(type: pa.DataType) -> bool:
    """Return whether values of this type are byte strings of a length of their own: string and binary, also large."""
    return bool(
        pa.types.is_string(type)
        or pa.types.is_binary(type)
        or pa.types.is_large_string(type)
        or pa.types.is_large_binary(type)
    )


def is_list(type: pa.DataType) -> bool:
    """Return whether values of this type are sequences of a length of their own: list, large list and map."""
    return bool(pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_map(type))


def is_large(type: pa.DataType) -> bool:
    """Return whether Arrow holds the offsets of this type as int64, not int32."""
    return bool(pa.types.is_large_string(type) or pa.types.is_large_binary(type) or pa.types.is_large_list(type))


def numpy_type(type: pa.DataType) -> np.dtype:
    """Return the dtype of `fixed_values`: little-endian; bool as uint8, dates, times and durations as their integers,
    decimals of 128 and 256 bits, fixed-size binary and intervals as V<bytes>."""
    if pa.types.is_boolean(type):
        return np.dtype("u1")
    if pa.types.is_fixed_size_binary(type) or pa.types.is_interval(type) or type.bit_width > 64:
        return np.dtype(f"V{type.bit_width // 8}")
    kind = "f" if pa.types.is_floating(type) else "u" if pa.types.is_unsigned_integer(type) else "i"
    return np.dtype(f"<{kind}{type.bit_width // 8}")


def contiguous(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def plain(array: pa.Array) -> pa.Array:
    """Return the array without dictionary, run ends or view of bytes; what its elements hold may still have them."""
    type = array.type
    if pa.types.is_dictionary(type):
        return plain(array.dictionary_decode())
    if pa.types.is_run_end_encoded(type):
        return plain(pc.run_end_decode(array))
    if pa.types.is_string_view(type):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(type):
        return array.cast(pa.large_binary())
    return array


def nulls_of(array: pa.Array) -> np.ndarray | None:
    """Return bool[n], true where a value is null; None if no value is."""
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def fixed_values(array: pa.Array) -> np.ndarray:
    """Return the raw values of a fixed-width array, slices respected; undefined where null. A view where Arrow has
    whole bytes."""
    dtype, buffer = numpy_type(array.type), array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array), dtype)
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(buffer, np.uint8)[array.offset // 8 : (array.offset + len(array) + 7) // 8]
        first = array.offset % 8
        return np.unpackbits(bits, bitorder="little")[first : first + len(array)]
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def variable_values(array: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bytes of a string or binary array, and each value's int64 start in them and length; length 0 where
    null.
    """
    _, offsets, data = array.buffers()
    if offsets is None or not len(array):
        return np.zeros(0, np.uint8), np.zeros(len(array), np.int64), np.zeros(len(array), np.int64)
    kind = np.dtype("<i8" if is_large(array.type) else "<i4")
    ends = np.frombuffer(offsets, kind, len(array) + 1, array.offset * kind.itemsize).astype(np.int64)
    lengths = np.diff(ends)
    if (nulls := nulls_of(array)) is not None:
        lengths[nulls] = 0  # Arrow allows any bytes behind a null
    return np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8), ends[:-1], lengths


def array_of_fixed(type: pa.DataType, values: np.ndarray, nulls: np.ndarray | None = None) -> pa.Array:
    """Return the inverse of `fixed_values` and `nulls_of`."""
    n = len(values)
    if pa.types.is_boolean(type):
        values = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(type, n, [validity(nulls), buffer_of(values)])


def array_of_variable(
    type: pa.DataType, data: np.ndarray, lengths: np.ndarray, nulls: np.ndarray | None = None
) -> pa.Array:
    """Return a string or binary array from its values' bytes, one after the other, and their lengths."""
    return pa.Array.from_buffers(
        type, len(lengths), [validity(nulls), buffer_of(offsets_of(type, lengths)), buffer_of(data)]
    )


def offsets_of(type: pa.DataType, lengths: np.ndarray) -> np.ndarray:
    """Return the offsets of an array of this type whose values have these lengths."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends if is_large(type) else ends.astype(np.int32)


def items(buffer: np.ndarray, width: int) -> np.ndarray:
    """Return all runs of `width` bytes in a uint8 array, one at every offset, as V<width>: index it to gather or
    scatter."""
    return np.ndarray((max(len(buffer) - width + 1, 0),), f"V{width}", buffer, strides=(1,))


def copy_ranges(
    source: np.ndarray, starts: np.ndarray, target: np.ndarray, to: np.ndarray, lengths: np.ndarray
) -> None:
    """Copy source[starts[i] : starts[i] + lengths[i]] to target[to[i] :], for all i; uint8 arrays, int64 positions.

    One numpy call per distinct length. Long values have many lengths but few rows, so that the calls never outnumber
    the
    bytes: rows of k distinct lengths hold at least k * k / 2 of them.
    """
    if not len(lengths):
        return
    longest = int(lengths.max())
    if longest == int(lengths.min()):
        if longest:
            items(target, longest)[to] = items(source, longest)[starts]
        return
    order = np.argsort(lengths.astype(np.uint16) if longest < 1 << 16 else lengths, kind="stable")
    ordered = lengths[order]
    edges = np.flatnonzero(np.diff(ordered)) + 1
    for rows in np.split(order, edges):
        width = int(lengths[rows[0]])
        if width:
            items(target, width)[to[rows]] = items(source, width)[starts[rows]]


def join(values: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the values' bytes as one uint8 array, with each value's int64 start and length."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    return np.frombuffer(b"".join(values), np.uint8), np.cumsum(lengths) - lengths, lengths


def split(buffer: np.ndarray, ends: np.ndarray) -> list[bytes]:
    """Return the inverse of `join`: one bytes object up to each of the ascending ends."""
    values: list[bytes] = _binary(buffer, np.concatenate(([0], ends))).to_pylist()
    return values


def gathered(source: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the bytes source[starts[i] : starts[i] + lengths[i]], for all i, one after the other."""
    total = int(lengths.sum())
    array = _slices(source, starts, lengths) if total else None
    if array is None:
        out = np.empty(total, np.uint8)
        copy_ranges(source, starts, out, np.cumsum(lengths) - lengths, lengths)
        return out
    # Arrow moves bytes itself, where numpy takes a call for every distinct length.
    compact = array if len(array) == len(starts) else array.take(pa.array(np.arange(0, len(array), 2)))
    _, offsets, data = compact.buffers()
    first = int(np.frombuffer(offsets, np.int64, 1, compact.offset * 8)[0])
    return np.frombuffer(data, np.uint8, total, first)


def beside(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> list[bytes]:
    """Return one bytes object for each row: its bytes of the first part, then its bytes of the second, and so on.

    Args:
        parts: As `variable_values` returns them: bytes, and the start and length of each row's bytes.
    """
    columns = []
    for data, starts, lengths in parts:
        array = _slices(data, starts, lengths)
        if array is None or len(array) != len(starts):
            array = _binary(gathered(data, starts, lengths), np.concatenate(([0], np.cumsum(lengths))))
        columns.append(array)
    rows: list[bytes] = pc.binary_join_element_wise(*columns, pa.scalar(b"", pa.large_binary())).to_pylist()
    return rows


def _slices(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> pa.Array | None:
    """Return the values as an array without a copy, with all that is between two of them as a value of its own if there
    is something; None unless they ascend."""
    ends = starts + lengths
    if (starts[1:] == ends[:-1]).all():
        return _binary(data, np.append(starts, ends[-1:]))
    if (starts[1:] < ends[:-1]).any():
        return None
    return _binary(data, np.column_stack((starts, ends)).ravel())


def _binary(data: np.ndarray, offsets: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, buffer_of(offsets), buffer_of(data)])


def validity(nulls: np.ndarray | None) -> pa.Buffer | None:
    """Arrow's validity bitmap; None where nothing is null."""
    return None if nulls is None or not nulls.any() else buffer_of(np.packbits(~nulls, bitorder="little"))


def buffer_of(values: np.ndarray) -> pa.Buffer:
    """Return a numpy array's bytes as an Arrow buffer."""
    return pa.py_buffer(np.ascontiguousarray(values).view(np.uint8))
