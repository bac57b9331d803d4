"""Data that stays in a worker process from one epoch to the next: an optimisation that must not matter.

Python workers of Spark are reused, but which one gets a subtask is luck. So a thing (a cache's entries, say) is kept
under the id of the attempt whose snapshot it equals, and claimed by the attempt that builds on that very snapshot.
Attempt ids
are uuids: a replay, the loser of two speculative attempts or a rewind builds on another snapshot and finds nothing, or
on the same one and finds what equals it. Keep only after the attempt has succeeded; what a declined one held is
garbage.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from state_ops.ids import AttemptId


@dataclass(frozen=True, slots=True)
class _Kept:
    attempt: AttemptId
    thing: Any
    bytes: int


class Warm:
    """Things of all subtasks that this process has run. Of a kind, what was kept first is dropped first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, str], _Kept] = OrderedDict()

    def keep(
        self, operator: str, subtask: int, kind: str, attempt: AttemptId, thing: Any, bytes: int, most_bytes: int
    ) -> None:
        """Keep a thing that equals the snapshot of `attempt`, in place of an older one of the same subtask and kind.

        Args:
            bytes: About what it takes in memory.
            most_bytes: What all things of the kind may take; one above that is not kept.
        """
        with self._lock:
            self._drop((operator, subtask, kind))
            if bytes > most_bytes:
                return
            self._kept[operator, subtask, kind] = _Kept(attempt, thing, bytes)
            while self._of(kind) > most_bytes:
                self._drop(next(owner for owner in self._kept if owner[2] == kind))

    def claim(self, operator: str, subtask: int, kind: str, attempt: AttemptId) -> Any:
        """Return the thing of a kind that equals the snapshot of `attempt`, now the caller's alone; None if there is
        none.

        A thing of another attempt goes as well: the subtask has moved on without it.
        """
        with self._lock:
            kept = self._drop((operator, subtask, kind))
            return kept.thing if kept is not None and kept.attempt == attempt else None

    @property
    def bytes(self) -> int:
        return sum(kept.bytes for kept in self._kept.values())

    def _of(self, kind: str) -> int:
        return sum(kept.bytes for owner, kept in self._kept.items() if owner[2] == kind)

    def _drop(self, owner: tuple[str, int, str]) -> _Kept | None:
        return self._kept.pop(owner, None)


_process = Warm()
keep, claim = _process.keep, _process.claim
