"""The state cache of one attempt: opened by its operator, flushed at the barrier, kept for the next epoch if all went
well."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from state_ops.ids import AttemptId
from state_ops.keyed.per_key.state_cache import CacheSizes, StateCache, ValueStore
from state_ops.records.snapshot_files import LocalSnapshot, Snapshot
from state_ops.schema.state_schema import StateSchema
from weir.task import worker_cache

_KIND = "cache"


class Caching:
    """The state caches of one attempt of a subtask.

    Args:
        sizes: None for no cache.
        base: The snapshot that the attempt builds on.
        most_bytes: What entries of all subtasks may take in this process between epochs.
    """

    def __init__(
        self,
        sizes: CacheSizes | None,
        operator: str,
        subtask: int,
        base: Snapshot | LocalSnapshot | None,
        most_bytes: int,
    ) -> None:
        self._sizes, self._operator, self._subtask, self._base = sizes, operator, subtask, base
        self._most_bytes = most_bytes
        self._cache: StateCache[Any] | None = None
        self._shape = b""
        self.figures: dict[str, int] | None = None

    def open(self, store: ValueStore[Any], schema: StateSchema) -> StateCache[Any] | None:
        """Return a cache above the store, with what an earlier attempt in this process left behind if that equals the
        base.

        Args:
            schema: Of the rows; entries of another one are not taken over, since they would not be what the store
                gives.
        """
        if self._sizes is None:
            return None
        self._shape = schema.schema_id
        held = worker_cache.claim(self._operator, self._subtask, _KIND, self._base.attempt) if self._base else None
        contents = held[1] if held is not None and held[0] == self._shape else None
        self._cache = StateCache(store, self._sizes, contents)
        return self._cache

    def barrier(self) -> None:
        """Write what is dirty. A failure is fatal to the attempt."""
        if self._cache is not None:
            self.figures = asdict(self._cache.barrier())

    def keep(self, attempt: AttemptId | None) -> None:
        """Leave the entries to the epoch that builds on this attempt's snapshot, which is complete; None: there is
        none."""
        if self._cache is not None and attempt is not None:
            kept = (self._shape, self._cache.contents())
            size = self._cache.size_bytes()
            worker_cache.keep(self._operator, self._subtask, _KIND, attempt, kept, size, self._most_bytes)
