"""All that a stage's state has of one key: its row, windows, sessions, lists, maps, timers, and its places in indices.

Deleting entries is not enough to forget a key. RocksDB keeps what was deleted until the files are merged, a deletion
names the key by itself, and what divides a large state into shards are keys. So what is left is copied into an empty
state, entry by entry, and the old one is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from state_ops.backends.base import BEYOND, Backend
from state_ops.errors import DamageError
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
from state_ops.schema.key_codec import encode_keys, group_prefix
from state_ops.schema.key_groups import key_groups

_BATCH = 10_000
KIND_BYTES = 3
_TAG, _MOMENT = 4, 8  # bytes, as `KIND_BYTES`, which an entry's key begins with: its key group and kind

_AT = {
    **dict.fromkeys((VALUE_STATE, EVENT_TIMERS_OF_KEY, PROCESSING_TIMERS_OF_KEY), KIND_BYTES),
    **dict.fromkeys((LIST_STATE, LIST_ENDS, MAP_STATE), KIND_BYTES + _TAG),
    WINDOW_VALUES: KIND_BYTES + _MOMENT + _TAG,
    **dict.fromkeys((WINDOW_STATE, EVENT_TIMERS, PROCESSING_TIMERS, MOMENTS), KIND_BYTES + _MOMENT),
}
"""Where the key columns begin in an entry's key, by the kind of state. What follows them is a part of the entry."""


@dataclass(frozen=True, slots=True)
class ForgottenKey:
    """One key of a stage, as its state has it.

    Attributes:
        group: Its key group.
        encoded: Its columns as bytes, of which none begins another key's.
    """

    group: int
    encoded: bytes

    @classmethod
    def of(cls, columns: Sequence[pa.Array], max_parallelism: int) -> ForgottenKey:
        """The key that these columns make.

        Args:
            columns: An array of one value for each key column, of its type.
        """
        groups = key_groups(columns, max_parallelism)
        return cls(int(groups[0]), encode_keys(columns, groups, 0)[0][KIND_BYTES:])

    @property
    def range(self) -> tuple[bytes, bytes]:
        """The keys of its key group: the first one, and the one behind the last."""
        return group_prefix(self.group, 0), group_prefix(self.group + 1, 0)

    def owns(self, key: bytes) -> bool:
        """Whether an entry of the state is of this key.

        Raises:
            DamageError: The entry is of a kind that this release does not know.
        """
        if key[:2] != self.range[0][:2]:
            return False
        if key[2] not in _AT:
            raise DamageError(
                f"The state has an entry of the kind {key[2]}, of which this release of Weir cannot tell the key.",
                next="Nothing was changed. Use the release that wrote it, or a later one.",
            )
        return key.startswith(self.encoded, _AT[key[2]])

    def entries(self, backend: Backend) -> Iterator[tuple[bytes, bytes]]:
        """What the state has of this key."""
        return (entry for entry in backend.scan(*self.range) if self.owns(entry[0]))


def copy_without(source: Backend, target: Backend, key: ForgottenKey) -> int:
    """Copy a state into an empty one, but for a key's entries; returns how many these were."""
    forgotten = 0
    kept: list[tuple[bytes, bytes]] = []
    for entry in source.scan(b"", BEYOND):
        if key.owns(entry[0]):
            forgotten += 1
            continue
        kept.append(entry)
        if len(kept) == _BATCH:
            target.write(kept)
            kept = []
    if kept:
        target.write(kept)
    return forgotten
