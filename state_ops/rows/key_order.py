"""The order in which a backend keeps keys: by key group, then column by column, as `key_codec` encodes them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from state_ops.arrow.columns import fixed_values, is_variable, items, variable_values
from state_ops.backends.base import SortedRun
from state_ops.schema.key_codec import encode_keys


def encoded(columns: Sequence[pa.Array], groups: np.ndarray, state_id: int) -> tuple[np.ndarray, list[bytes]]:
    """Keys in their order, or close to it if there is a text.

    Args:
        columns: The key columns of n rows, without chunks.
        groups: uint16[n], their key groups.

    Returns:
        order: int64[n], the rows in that order.
        keys: The encoded keys in that order.
    """
    words = [word for array in columns for word in _words(array)]
    if any(is_variable(array.type) for array in columns):
        words = words[:2]
    order = np.argsort(words.pop())
    for word in [*reversed(words), groups]:  # two bytes are sorted stably by radix
        order = order[np.argsort(word[order], kind="stable")]
    return order, encode_keys([column.take(pa.array(order)) for column in columns], groups[order], state_id)


def ascending(columns: Sequence[pa.Array], groups: np.ndarray, state_id: int) -> tuple[np.ndarray, list[bytes]]:
    """Return what `encoded` returns, in exactly the keys' order."""
    order, keys = encoded(columns, groups, state_id)
    if any(is_variable(column.type) for column in columns):  # in order but for what begins alike: that is fast to sort
        exactly = sorted(range(len(keys)), key=keys.__getitem__)
        order, keys = order[exactly], [keys[index] for index in exactly]
    return order, keys


def merged(first: SortedRun, second: SortedRun) -> SortedRun:
    """Two runs that have no key in common as one. It is fast where long parts of one lie between keys of the other."""
    if not len(second):
        return first
    keys: list[bytes] = []
    values: list[bytes] = []
    at, other = 0, 0
    while at < len(first) or other < len(second):
        end = bisect_left(first.ascending, second.ascending[other], at) if other < len(second) else len(first)
        keys += first.ascending[at:end]
        values += first.values[at:end]
        at, other, first, second = other, end, second, first
    return SortedRun(keys, values)


def _words(array: pa.Array) -> list[np.ndarray]:
    """Numbers whose order is the order of the values, as far as their first 16 bytes tell."""
    if not is_variable(array.type):
        values = fixed_values(array)
        return [values.view("<i8")[1::2], values.view("<u8")[::2]] if values.dtype.itemsize == 16 else [values]
    data, starts, lengths = variable_values(array)
    padded = np.concatenate([data, np.zeros(16, np.uint8)])
    words = []
    for offset in (0, 8):
        word = items(padded, 8)[np.minimum(starts + offset, len(data))].view(">u8").astype(np.uint64)
        # What follows a shorter text in the buffer is not its own.
        bytes_left = np.clip(lengths - offset, 0, 8).astype(np.uint64)
        mask = np.where(
            bytes_left == 0, np.uint64(0), ~np.uint64(0) << (np.uint64(8) * (np.uint64(8) - np.maximum(bytes_left, 1)))
        )
        words.append(word & mask)
    return words
