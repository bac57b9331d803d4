"""Key groups: which bucket a key falls into, and which subtask owns a bucket.

The bucket is exactly Spark's pmod(xxhash64(columns...), max_parallelism), so that the engine may route in SQL what the
state engine checks in numpy. The ranges are those of Flink's KeyGroupRangeAssignment, so that changing the parallelism
moves the fewest groups and each subtask's groups stay one range of RocksDB keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import xxhash

from state_ops.arrow.columns import contiguous, fixed_values, is_variable, items, nulls_of, variable_values
from state_ops.errors import ConfigurationError
from state_ops.schema.key_codec import check_key_type

MAX_PARALLELISM = 32768  # Flink's bound; a group is 2 bytes in a key
SPARK_SEED = 42

_LONG_TEXT = 512  # bytes; above it one call per value into the xxhash package beats one numpy step per 32 bytes

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)

_Groups = TypeVar("_Groups", int, np.ndarray)


def key_groups(columns: Sequence[pa.Array | pa.ChunkedArray], max_parallelism: int) -> np.ndarray:
    """Return uint16[n]: pmod(xxhash64(c1, c2, ...), max_parallelism) of n rows, as Spark computes it.

    Args:
        columns: The key's columns in order, with the types of `check_key_type` (int and bigint hash differently, so
            cast to the declared type first). A null leaves the hash as it was, also as in Spark.

    Raises:
        PipelineError: For another type.
    """
    check_parallelism(1, max_parallelism)
    return np.mod(xxhash64(columns).view(np.int64), max_parallelism).astype(np.uint16)


def xxhash64(columns: Sequence[pa.Array | pa.ChunkedArray]) -> np.ndarray:
    """Return uint64[n]: Spark's xxhash64 of n rows.

    Each column is hashed with the hash of those before it as its seed.
    """
    if not columns:
        raise ValueError("a key has at least one column")
    hashes = np.full(len(columns[0]), SPARK_SEED, np.uint64)
    for position, column in enumerate(columns):
        array = contiguous(column)
        check_key_type(f"key column {position + 1}", array.type)
        nulls = nulls_of(array)
        if nulls is None:
            hashes = _hash(array, hashes)
        else:
            hashes[~nulls] = _hash(array.drop_null(), hashes[~nulls])
    return hashes


def group_range(subtask: int, parallelism: int, max_parallelism: int) -> range:
    """Return the key groups that a subtask owns: contiguous, and over all subtasks each group exactly once.

    Raises:
        ConfigurationError: Where the parallelism does not fit, or there is no such subtask.
    """
    check_parallelism(parallelism, max_parallelism)
    if not 0 <= subtask < parallelism:
        raise ConfigurationError(f"There is no subtask {subtask} at parallelism {parallelism}.")
    start = (subtask * max_parallelism + parallelism - 1) // parallelism
    end = ((subtask + 1) * max_parallelism - 1) // parallelism
    return range(start, end + 1)


def subtask_of(group: _Groups, parallelism: int, max_parallelism: int) -> _Groups:
    """Return the subtask that owns a key group, or of an array of groups the int64 array of theirs."""
    check_parallelism(parallelism, max_parallelism)
    if isinstance(group, np.ndarray):
        return group.astype(np.int64) * parallelism // max_parallelism  # uint16 would overflow
    return group * parallelism // max_parallelism


def check_parallelism(parallelism: int, max_parallelism: int) -> None:
    """Raise ConfigurationError unless 1 <= parallelism <= max_parallelism <= 32768."""
    if not 1 <= max_parallelism <= MAX_PARALLELISM:
        raise ConfigurationError(
            f"max_parallelism is {max_parallelism}, but must be 1 to {MAX_PARALLELISM}.",
            next="Choose it once: it stays for the pipeline's life. 128 suits most.",
        )
    if not 1 <= parallelism <= max_parallelism:
        raise ConfigurationError(
            f"The parallelism is {parallelism}, but must be 1 to max_parallelism, {max_parallelism}.",
            next="Lower the parallelism: a subtask without a key group would have nothing to do.",
        )


# xxHash64 (Yann Collet), one numpy step for all rows. uint64 arithmetic wraps, as the algorithm wants.


def _hash(array: pa.Array, seed: np.ndarray) -> np.ndarray:
    """Return uint64[n] from an array without nulls and one seed per row, by the rules of Spark's XxHash64Function."""
    if is_variable(array.type):
        return _hash_bytes(*variable_values(array), seed)
    values = fixed_values(array)
    if pa.types.is_decimal(array.type):
        if array.type.precision > 18:
            return _hash_bytes(*_big_integers(values), seed)
        values = values.view("<i8")[::2]  # the low half holds what fits a long
    if values.dtype.itemsize == 8:
        return _mix(_take_word(seed + _P5 + np.uint64(8), values.view(np.uint64)))
    return _mix(_take_int(seed + _P5 + np.uint64(4), values.astype(np.int32).view(np.uint32)))


def _hash_bytes(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, seed: np.ndarray) -> np.ndarray:
    """Return uint64[n] of the byte strings data[starts[i] : starts[i] + lengths[i]]."""
    hashes = seed + _P5
    rows = _rows((lengths >= 32) & (lengths <= _LONG_TEXT))
    if rows is not None:
        hashes[rows] = _take_stripes(data, starts[rows], lengths[rows], seed[rows])
    hashes += lengths.astype(np.uint64)
    at, end = starts + (lengths & ~31), starts + lengths
    words, ints = items(data, 8), items(data, 4)
    for _ in range(3):
        rows = _rows(at + 8 <= end)
        if rows is None:
            break
        hashes[rows] = _take_word(hashes[rows], words[at[rows]].view("<u8"))
        at[rows] += 8
    rows = _rows(at + 4 <= end)
    if rows is not None:
        hashes[rows] = _take_int(hashes[rows], ints[at[rows]].view("<u4"))
        at[rows] += 4
    for _ in range(3):
        rows = _rows(at < end)
        if rows is None:
            break
        hashes[rows] = _rotated(hashes[rows] ^ data[at[rows]].astype(np.uint64) * _P5, 11) * _P1
        at[rows] += 1
    hashes = _mix(hashes)
    for row in np.flatnonzero(lengths > _LONG_TEXT):
        text = data[starts[row] : starts[row] + lengths[row]]
        hashes[row] = xxhash.xxh64_intdigest(text.tobytes(), seed=int(seed[row]))
    return hashes


def _rows(which: np.ndarray) -> Any:
    """Return an index of the rows: a slice if it is all of them, which is quicker; None if it is none."""
    if which.all():
        return slice(None) if len(which) else None
    return np.flatnonzero(which) if which.any() else None


def _take_stripes(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, seed: np.ndarray) -> np.ndarray:
    """Return the hash after the whole 32-byte stripes of texts that have at least one."""
    words = items(data, 8)
    runner = [seed + _P1 + _P2, seed + _P2, seed.copy(), seed - _P1]
    for stripe in range(int(lengths.max(initial=0)) // 32):
        rows = np.flatnonzero(lengths >= 32 * (stripe + 1))
        for i, accumulator in enumerate(runner):
            word = words[starts[rows] + 32 * stripe + 8 * i].view("<u8")
            accumulator[rows] = _rotated(accumulator[rows] + word * _P2, 31) * _P1
    hashes: np.ndarray = (
        _rotated(runner[0], 1) + _rotated(runner[1], 7) + _rotated(runner[2], 12) + _rotated(runner[3], 18)
    )
    for accumulator in runner:
        hashes = (hashes ^ _rotated(accumulator * _P2, 31) * _P1) * _P1 + _P4
    return hashes


def _take_word(hashes: np.ndarray, words: np.ndarray) -> np.ndarray:
    return _rotated(hashes ^ _rotated(words * _P2, 31) * _P1, 27) * _P1 + _P4


def _take_int(hashes: np.ndarray, ints: np.ndarray) -> np.ndarray:
    return _rotated(hashes ^ ints.astype(np.uint64) * _P1, 23) * _P2 + _P3


def _mix(hashes: np.ndarray) -> np.ndarray:
    hashes = (hashes ^ (hashes >> np.uint64(33))) * _P2
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _P3
    return np.asarray(hashes ^ (hashes >> np.uint64(32)))


def _rotated(values: np.ndarray, bits: int) -> np.ndarray:
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))


def _big_integers(decimals: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unscaled values as Java's BigInteger.toByteArray has them: big endian, two's complement, no byte too many."""
    raw = np.ascontiguousarray(decimals.view(np.uint8).reshape(-1, 16)[:, ::-1])
    sign = np.where(raw[:, :1] >= 0x80, 0xFF, 0).astype(np.uint8)
    # A leading byte may go if it only repeats the sign bit of the next.
    spare = (raw[:, :-1] == sign) & ((raw[:, 1:] ^ sign) < 0x80)
    dropped = np.logical_and.accumulate(spare, axis=1).sum(axis=1)
    return raw.ravel(), np.arange(len(raw)) * 16 + dropped, 16 - dropped
