"""An index of keys by a moment: of all that is kept for keys, what is due is one range of each key group.

    group | MOMENTS | moment (int64, microseconds since 1970) | key  ->  nothing

It is for operators that keep one moment a key, and know it: they delete the old entry when they put another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import pyarrow as pa

from state_ops.backends.base import Backend
from state_ops.schema.key_codec import decode_int64, decode_keys, encode_int64, encode_keys, group_prefix

MOMENTS = 16
_PREFIX = 3  # bytes of key group and state id


def entries(moments: np.ndarray, keys: Sequence[pa.Array | pa.ChunkedArray], groups: np.ndarray) -> list[bytes]:
    """Return the index's keys for int64[n] moments of n keys, whose groups are uint16[n]."""
    return encode_keys([pa.array(moments, pa.int64()), *keys], groups, MOMENTS)


def due(backend: Backend, groups: range, upto: int | None, most: int) -> Iterator[list[bytes]]:
    """Yield the entries up to a moment, or all of them, in pieces of at most `most`. Those of a piece must be deleted
    before the next is asked for."""
    piece: list[bytes] = []
    for group in groups:
        while True:
            piece += first(backend, group, upto, most - len(piece))
            if len(piece) < most:
                break  # nothing more of this group; what there is waits for the next one's
            yield piece
            piece = []
    if piece:
        yield piece


def first(backend: Backend, group: int, upto: int | None, most: int) -> list[bytes]:
    """Return at most so many entries of a group up to a moment, or of all of them, the earliest first."""
    start = group_prefix(group, MOMENTS)
    end = group_prefix(group, MOMENTS + 1) if upto is None else start + encode_int64(upto + 1)
    return [key for key, _ in islice(backend.scan(start, end), most)]


def pieces(backend: Backend, group: int, most: int) -> Iterator[list[bytes]]:
    """Yield all entries of a group, the earliest first, in pieces of at most `most`; none may be deleted meanwhile."""
    scanned = backend.scan(group_prefix(group, MOMENTS), group_prefix(group, MOMENTS + 1))
    while piece := [key for key, _ in islice(scanned, most)]:
        yield piece


def earliest(backend: Backend, groups: range, sort: int, after: int) -> int | None:
    """Return the first moment later than `after` among the entries of one sort, whose keys begin with a moment.

    Args:
        sort: The id of their state, of `MOMENTS` or of another such index.
    """
    moments = []
    for group in groups:
        start = group_prefix(group, sort) + encode_int64(after + 1)
        entry = next((key for key, _ in backend.scan(start, group_prefix(group, sort + 1))), None)
        if entry is not None:
            moments.append(moment_of(entry))
    return min(moments, default=None)


def owners(entries: Sequence[bytes], keys: pa.Schema) -> tuple[np.ndarray, pa.Table]:
    """Return the groups, uint16[n], and the key columns of entries."""
    groups, columns = decode_keys(entries, [pa.int64(), *keys.types])
    return groups, pa.table(columns[1:], schema=keys)


def moment_of(entry: bytes) -> int:
    """Return the moment of an entry."""
    return decode_int64(entry[_PREFIX:])
