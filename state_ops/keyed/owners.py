"""The key to which an entry of a stage's state belongs, and a view of a state with the entries of some keys."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa

from state_ops.backends.base import Backend
from state_ops.errors import DamageError
from state_ops.rows.entry_buffer import after_prefix
from state_ops.rows.time_index import MOMENTS
from state_ops.schema.descriptors import (
    EVENT_TIMERS,
    EVENT_TIMERS_OF_KEY,
    LIST_ENDS,
    LIST_STATE,
    MAP_STATE,
    PROCESSING_TIMERS,
    PROCESSING_TIMERS_OF_KEY,
    VALUE_STATE,
    WINDOW_STATE,
    WINDOW_VALUES,
)
from state_ops.schema.key_codec import columns_end, encode_keys
from state_ops.schema.key_groups import key_groups

GROUP_BYTES, KIND_BYTES = 2, 3
_TAG, _MOMENT = 4, 8  # bytes, as `KIND_BYTES`, which an entry's key begins with: its key group and kind

_AT = {
    **dict.fromkeys((VALUE_STATE, EVENT_TIMERS_OF_KEY, PROCESSING_TIMERS_OF_KEY), KIND_BYTES),
    **dict.fromkeys((LIST_STATE, LIST_ENDS, MAP_STATE), KIND_BYTES + _TAG),
    WINDOW_VALUES: KIND_BYTES + _MOMENT + _TAG,
    **dict.fromkeys((WINDOW_STATE, EVENT_TIMERS, PROCESSING_TIMERS, MOMENTS), KIND_BYTES + _MOMENT),
}
"""The position of the key columns in an entry's key, by the kind of state. The bytes after them are the entry's own."""


def columns_begin(key: bytes) -> int:
    """Return the position in an entry's key where the key columns begin.

    Raises:
        DamageError: The entry is of a kind that this release does not know.
    """
    if key[2] not in _AT:
        raise DamageError(
            f"The state has an entry of the kind {key[2]}, of which this release of Weir cannot tell the key.",
            next="Nothing was changed. Use the release that wrote it, or a later one.",
        )
    return _AT[key[2]]


def owner_of(key: bytes, types: Sequence[pa.DataType]) -> bytes:
    """Return the key that an entry belongs to: its key group, and its columns as bytes, of which none begins another
    key's.

    Args:
        key: The entry's.
        types: Of the key columns.
    """
    begin = columns_begin(key)
    return key[:GROUP_BYTES] + key[begin : columns_end(key, begin, types)]


def owners_of(columns: Sequence[pa.Array], max_parallelism: int) -> list[bytes]:
    """Return `owner_of` for keys that are given by their columns, an array for each column with one value a key."""
    keys = encode_keys(columns, key_groups(columns, max_parallelism), 0)
    return [key[:GROUP_BYTES] + key[KIND_BYTES:] for key in keys]


class OfKeys:
    """A view of a state that has the entries of some keys alone, for scans.

    Args:
        backend: Has all of the state.
        owners: The keys, as `owner_of` has them.
        types: Of the key columns.
    """

    def __init__(self, backend: Backend, owners: Collection[bytes], types: Sequence[pa.DataType]) -> None:
        self._backend, self._types = backend, types
        self._owners, self._ordered = frozenset(owners), sorted(owners)

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Scan as `Backend.scan` does. If the key columns follow the start of the range, other keys are not read."""
        follows = len(start) >= KIND_BYTES and end == after_prefix(start) and _AT.get(start[2]) == len(start)
        if not follows:
            for entry in self._backend.scan(start, end):
                if owner_of(entry[0], self._types) in self._owners:
                    yield entry
            return
        for owner in self._of_group(start[:GROUP_BYTES]):
            prefix = start + owner[GROUP_BYTES:]
            yield from self._backend.scan(prefix, after_prefix(prefix))

    def _of_group(self, group: bytes) -> list[bytes]:
        return self._ordered[bisect_left(self._ordered, group) : bisect_left(self._ordered, after_prefix(group))]

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Read as `Backend.multi_get` does."""
        return self._backend.multi_get(keys)
