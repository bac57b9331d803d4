"""A table of rows by key, sorted by the 64-bit hash of the key: finding keys is a binary search over a column, merging
two tables is one gather, and nothing loops over rows.

The hash only sorts; the keys themselves are compared afterwards. Different keys with one hash cannot live in such a
table: whoever meets a CollisionError goes on without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl


class CollisionError(Exception):
    """Two keys have the same hash; never seen by a user."""


@dataclass(frozen=True, slots=True)
class HashedTable:
    """Rows that are looked up by the hashes of their keys.

    Attributes:
        hashes: uint64[n], ascending, distinct.
        rows: n rows in that order.
        keys: The columns that make a key.
    """

    hashes: np.ndarray
    rows: pl.DataFrame
    keys: tuple[str, ...]

    @classmethod
    def of(cls, hashes: np.ndarray, rows: pl.DataFrame, keys: Sequence[str]) -> HashedTable:
        """Make a table of rows with distinct keys, in any order. Raises CollisionError."""
        order = np.argsort(hashes)
        return cls.sorted(hashes[order], rows[order], keys)

    @classmethod
    def sorted(cls, hashes: np.ndarray, rows: pl.DataFrame, keys: Sequence[str]) -> HashedTable:
        """Make a table of rows with distinct keys, in the order of their hashes. Raises CollisionError."""
        if (hashes[1:] == hashes[:-1]).any():
            raise CollisionError
        return cls(hashes, rows, tuple(keys))

    @classmethod
    def empty(cls, like: pl.DataFrame, keys: Sequence[str]) -> HashedTable:
        return cls(np.zeros(0, np.uint64), like.clear(), tuple(keys))

    def __len__(self) -> int:
        return len(self.hashes)

    def find(self, hashes: np.ndarray, keys: pl.DataFrame) -> np.ndarray:
        """Return int64[m], the row of each of m keys; -1: there is none.

        It is fastest in order of the hashes. Raises CollisionError.
        """
        if not len(self):
            return np.full(len(hashes), -1, np.int64)
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self) - 1)
        hit = self.hashes[at] == hashes
        stored = self.rows.select(self.keys)[at[hit]]
        asked = keys.select(self.keys) if hit.all() else keys.select(self.keys).filter(hit)
        if not all(stored[name].equals(asked[name].cast(stored.schema[name])) for name in self.keys):
            raise CollisionError
        return np.where(hit, at, -1)

    def merged(
        self, newer: HashedTable, present: np.ndarray | None = None, newer_at: np.ndarray | None = None
    ) -> HashedTable:
        """Both tables' rows, the newer's where both have the key. Raises CollisionError.

        Args:
            present: bool[len(newer)]; false removes the key.
            newer_at: What `find` says of the newer's keys, if it is known.
        """
        if not len(newer):
            return self
        if not len(self) and (present is None or present.all()):
            return newer
        if newer_at is None:
            newer_at = self.find(newer.hashes, newer.rows)
        mine, new = newer_at >= 0, len(self) + np.arange(len(newer))
        at = np.arange(len(self))
        at[newer_at[mine]] = np.where(True if present is None else present[mine], new[mine], -1)
        added = ~mine if present is None else ~mine & present
        places = np.searchsorted(self.hashes, newer.hashes[added])
        at = np.insert(at, places, new[added])
        hashes = np.insert(self.hashes, places, newer.hashes[added])
        if present is not None and not present.all():
            hashes, at = hashes[at >= 0], at[at >= 0]
        return HashedTable(hashes, pl.concat([self.rows, newer.rows])[at], self.keys)
