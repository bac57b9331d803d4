"""All state of one key in a stage: its row, windows, sessions, lists, maps, timers, and its places in indices.

Deleting entries is not enough to forget a key. RocksDB keeps what was deleted until the files are merged, a deletion
names the key by itself, and what divides a large state into shards are keys. So what is left is copied into an empty
state, entry by entry, and the old one is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from state_ops.backends.base import BEYOND, Backend
from state_ops.keyed.owners import GROUP_BYTES, KIND_BYTES, columns_begin
from state_ops.schema.key_codec import encode_keys, group_prefix
from state_ops.schema.key_groups import key_groups

_BATCH = 10_000


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
        """Return the key that these columns make.

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
        """Return whether an entry of the state belongs to this key.

        Raises:
            DamageError: The entry is of a kind that this release does not know.
        """
        if key[:GROUP_BYTES] != self.range[0][:GROUP_BYTES]:
            return False
        return key.startswith(self.encoded, columns_begin(key))

    def entries(self, backend: Backend) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries of this key."""
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
