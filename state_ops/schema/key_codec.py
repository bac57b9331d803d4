"""Keys in RocksDB: bytes whose order is the order of (key group, state, key columns), so that a range of key groups,
one state of a group, or all entries below one key are each one RocksDB range.

    key group  uint16, big endian
    state id   uint8
    columns    one after the other, each order-preserving and self-delimiting:
               int8..int64, date32 (int32 days), timestamp (int64 microseconds): big endian, sign bit flipped
               bool: 1 byte
               decimal128: 16 bytes of the unscaled value, big endian, sign bit flipped
               string, binary: each 0x00 as 0x00 0xFF, and 0x00 0x00 at the end, so that "a" sorts before "a\\0" and
               "ab", and a composite by its first column first

Nulls are no keys. Floats are none either: -0.0 and NaN have several encodings, and a key must have one. Where Weir
itself keeps floats by value, they are int64 in the same order (`encode_floats`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from state_ops.arrow.columns import (
    array_of_fixed,
    array_of_variable,
    contiguous,
    copy_ranges,
    fixed_values,
    gathered,
    is_variable,
    items,
    join,
    numpy_type,
    split,
    variable_values,
)
from state_ops.errors import DamageError, PipelineError

KEY_TYPES = "int8, int16, int32, int64, bool, string, binary, date32, timestamp[us] (no zone or UTC), decimal128"

_KEY_TYPES = frozenset(
    {
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.bool_(),
        pa.string(),
        pa.binary(),
        pa.date32(),
        pa.timestamp("us"),
        pa.timestamp("us", tz="UTC"),
    }
)
_HEADER = 3  # bytes: key group and state id
_END, _ESCAPE = b"\0", b"\xff"  # of texts: two of the first end one, and a 0x00 in it is followed by the second


def check_key_type(name: str, type: pa.DataType, where: str | None = None) -> None:
    """Raise PipelineError, naming the column, if it cannot be a key.

    where: The owner of the key.
    """
    if type not in _KEY_TYPES and not (pa.types.is_decimal128(type) and type.scale >= 0):
        raise PipelineError(
            f"The column {name!r} is {type}, which cannot be a key.",
            where=where,
            next=f"Cast it to one of: {KEY_TYPES}.",
        )


def group_prefix(group: int, state_id: int) -> bytes:
    """Return the 3 bytes that begin every key of this group and state. The range ends before group_prefix(group,
    state_id + 1)."""
    return ((group << 8) + state_id).to_bytes(_HEADER, "big")  # the carry of state 255 + 1 is the next group


def encode_int64(value: int) -> bytes:
    """Return the order-preserving 8 bytes of an int64, or of a timestamp's microseconds."""
    return (value + (1 << 63)).to_bytes(8, "big")


def decode_int64(encoded: bytes) -> int:
    """Return the int64 that the first 8 bytes stand for."""
    return int.from_bytes(encoded[:8], "big") - (1 << 63)


def stored_key(type: pa.DataType) -> pa.DataType:
    """Return the type as which a map's keys are stored."""
    return pa.int64() if pa.types.is_float64(type) else type


def encode_floats(values: np.ndarray) -> np.ndarray:
    """Return int64[n] in the order of float64[n]: -0.0 is 0.0, and all NaN are one above all else."""
    values = np.where(np.isnan(values), np.nan, values + 0.0)  # -0.0 + 0.0 is 0.0
    return _turned(values.view(np.int64))


def decode_floats(encoded: np.ndarray) -> np.ndarray:
    """Return the float64[n] that `encode_floats` has encoded."""
    return _turned(encoded.astype(np.int64)).view(np.float64)


def _turned(bits: np.ndarray) -> np.ndarray:
    """Return all bits but the sign turned over in what is negative, whose order is the other way round."""
    turned: np.ndarray = bits ^ ((bits >> 63) & np.int64((1 << 63) - 1))
    return turned


def last_int64(key: bytes) -> int:
    """Return the last column of a key, which is an int64."""
    return decode_int64(key[-8:])


def encode_keys(columns: Sequence[pa.Array | pa.ChunkedArray], groups: np.ndarray, state_id: int) -> list[bytes]:
    """Return one key a row.

    Args:
        columns: The key's columns in order, n rows each.
        groups: uint16[n], from `key_groups`.

    Raises:
        PipelineError: For a null in a key column or a type that cannot be a key.
    """
    n = len(groups)
    arrays = [contiguous(column) for column in columns]
    for position, array in enumerate(arrays):
        check_key_type(f"key column {position + 1}", array.type)
        if len(array) != n:
            raise ValueError(f"key column {position + 1} has {len(array)} rows, the key groups have {n}")
        if array.null_count:
            raise PipelineError(
                f"Key column {position + 1} of {len(arrays)} holds {array.null_count} null(s); a null is no key.",
                next="Filter the rows out (the stage's `where`), or fill the column.",
            )
    if not n:
        return []

    # Fixed-width columns in a row form one record; a string or binary column ends it.
    run: list[np.ndarray] = [np.asarray(groups).astype(">u2"), np.full(n, state_id, np.uint8)]
    parts: list[np.ndarray | tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for array in arrays:
        if is_variable(array.type):
            if run:
                parts.append(_record(run))
            parts.append(_escaped(*variable_values(array)))
            run = []
        else:
            run.append(_ordered(array))
    if run:
        parts.append(_record(run))
    if isinstance(parts[0], np.ndarray) and len(parts) == 1:
        whole: list[bytes] = parts[0].tolist()
        return whole

    lengths = np.zeros(n, np.int64)
    for part in parts:
        lengths += part[2] + 2 if isinstance(part, tuple) else part.itemsize
    ends = np.cumsum(lengths)
    out = np.zeros(ends[-1], np.uint8)  # the zeros are the terminators
    at = ends - lengths
    for part in parts:
        if isinstance(part, tuple):
            data, starts, sizes = part
            copy_ranges(data, starts, out, at, sizes)
            at += sizes + 2
        else:
            items(out, part.itemsize)[at] = part
            at += part.itemsize
    return split(out, ends)


def decode_keys(keys: Sequence[bytes], types: Sequence[pa.DataType]) -> tuple[np.ndarray, list[pa.Array]]:
    """Return the key groups, uint16[n], and one array per key column of `keys`, whose columns have exactly these types.

    Raises:
        DamageError: For a key that `encode_keys` cannot have written.
        PipelineError: For a type that cannot be a key.
    """
    for position, type in enumerate(types):
        check_key_type(f"key column {position + 1}", type)
    joined, starts, lengths = join(keys)
    at, ends = starts + _HEADER, starts + lengths
    _sound(at <= ends, "is cut short")
    groups = items(joined, 2)[starts].view(">u2").astype(np.uint16) if len(keys) else np.zeros(0, np.uint16)
    columns, terminators = [], None
    for type in types:
        if not len(keys):
            columns.append(pa.array([], type))
            continue
        if not is_variable(type):
            width = numpy_type(type).itemsize
            _sound(at + width <= ends, "is cut short")
            columns.append(_unordered(type, items(joined, width)[at]))
            at = at + width
            continue
        if terminators is None:
            # A 0x00 that no 0xFF follows ends a text; that other columns hold such bytes does no harm, since each
            # look-up begins where the text does.
            zeros = np.flatnonzero(joined == 0)
            follow = joined[np.minimum(zeros + 1, len(joined) - 1)]
            terminators = np.append(zeros[(follow != 0xFF) | (zeros + 1 == len(joined))], len(joined))
        stop = terminators[np.searchsorted(terminators, at)]
        _sound(stop + 2 <= ends, "is cut short")
        _sound(joined[stop + 1] == 0, "has a damaged text")
        columns.append(_unescaped(type, joined, at, stop - at))
        at = stop + 2
    _sound(at == ends, "has bytes after its last column")
    return groups, columns


def columns_end(key: bytes, at: int, types: Sequence[pa.DataType]) -> int:
    """Return the position at which the columns of one key end.

    Args:
        at: The position at which they begin.
        types: Of the columns.
    """
    for type in types:
        if not is_variable(type):
            at += numpy_type(type).itemsize
            continue
        at = key.index(_END, at)
        while key[at + 1 : at + 2] == _ESCAPE:
            at = key.index(_END, at + 2)
        at += 2
    return at


def _record(run: list[np.ndarray]) -> np.ndarray:
    """Columns of n values side by side, as n items of bytes."""
    record = np.empty(len(run[0]), np.dtype([(str(i), column.dtype) for i, column in enumerate(run)]))
    for i, column in enumerate(run):
        record[str(i)] = column
    return record.view(f"V{record.itemsize}")


def _ordered(array: pa.Array) -> np.ndarray:
    """Return a fixed-width column's values with bytes in the order of the values."""
    values = fixed_values(array)
    if pa.types.is_boolean(array.type):
        return values
    if pa.types.is_decimal(array.type):
        raw = values.view(np.uint8).reshape(-1, 16)[:, ::-1].copy()
        raw[:, 0] ^= 0x80
        return raw.view("V16").ravel()
    width = values.itemsize
    flipped: np.ndarray = values.view(f"<u{width}") ^ np.array(1 << (8 * width - 1), f"<u{width}")
    return flipped.astype(f">u{width}")


def _unordered(type: pa.DataType, raw: np.ndarray) -> pa.Array:
    if pa.types.is_boolean(type):
        values = raw.view(np.uint8)
        _sound(values <= 1, "holds neither true nor false")
        return array_of_fixed(type, values)
    if pa.types.is_decimal(type):
        bytes_ = raw.view(np.uint8).reshape(-1, 16).copy()
        bytes_[:, 0] ^= 0x80
        return _validated(array_of_fixed(type, bytes_[:, ::-1].copy().view("V16").ravel()))
    width = raw.itemsize
    flipped = raw.view(f">u{width}").astype(f"<u{width}") ^ np.array(1 << (8 * width - 1), f"<u{width}")
    return array_of_fixed(type, flipped.view(f"<i{width}"))


def _escaped(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, starts and lengths with every 0x00 as 0x00 0xFF; the very arrays where there is none, as in almost all
    text."""
    low, high = (int(starts[0]), int(starts[-1] + lengths[-1])) if len(starts) else (0, 0)
    zero = data[low:high] == 0
    if not zero.any():
        return data, starts, lengths
    before = np.concatenate(([0], np.cumsum(zero)))  # zeros before each byte of data[low:high]
    out = np.repeat(data[low:high], 1 + zero)
    out[np.flatnonzero(zero) + before[1:][zero]] = 0xFF
    begin, end = starts - low, starts - low + lengths
    begin, end = begin + before[begin], end + before[end]
    return out, begin, end - begin


def _unescaped(type: pa.DataType, source: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> pa.Array:
    data = gathered(source, starts, lengths)
    if (zero := data == 0).any():
        # No text ends in 0x00 here (its terminator would have begun there), so the byte after a zero is its own 0xFF.
        keep = np.ones(len(data), bool)
        keep[1:] = ~zero[:-1]
        kept = np.concatenate(([0], np.cumsum(keep)))
        ends = np.cumsum(lengths)
        data, lengths = data[keep], kept[ends] - kept[ends - lengths]
    array = array_of_variable(type, data, lengths)
    return _validated(array) if pa.types.is_string(type) else array


def _validated(array: pa.Array) -> pa.Array:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise _damage(f"holds what is no {array.type}: {error}") from error
    return array


def _sound(ok: np.ndarray, problem: str) -> None:
    if not ok.all():
        raise _damage(f"{problem} ({int((~ok).sum())} of {len(ok)}, first: number {int(np.argmin(ok))})")


def _damage(problem: str) -> DamageError:
    return DamageError(
        f"A state key {problem}.", next="Restore from the last checkpoint; weir fsck finds what else is damaged."
    )
