"""The asynchronous snapshot of one attempt: its state is held at the barrier and written after it, while the next epoch
goes on with it."""

from __future__ import annotations

from state_ops.backends.base import Backend, Freezing, Frozen
from state_ops.ids import AttemptId
from state_ops.records.snapshot_files import LocalSnapshot, Snapshot
from weir.task import worker_cache

_KIND = "state"


class AsyncSnapshot:
    """The snapshot that an attempt of a subtask takes, at the barrier or after it.

    Args:
        asynchronous: Whether it may be written after the barrier.
        backend: Its name.
        most_bytes: What one subtask's state may take in memory for that, and what those of all subtasks may take in
            this process between epochs.
    """

    def __init__(self, asynchronous: bool, backend: str, operator: str, subtask: int, most_bytes: int) -> None:
        self._asynchronous, self._backend, self._most_bytes = asynchronous, backend, most_bytes
        self._operator, self._subtask = operator, subtask
        self._frozen: Frozen | None = None

    def claim(self, base: Snapshot | LocalSnapshot | None) -> Frozen | None:
        """Return what an earlier attempt in this process left behind, if that equals the base."""
        if not self._asynchronous or base is None or (isinstance(base, Snapshot) and base.rescaled):
            return None
        held = worker_cache.claim(self._operator, self._subtask, _KIND, base.attempt)
        return held[1] if held is not None and held[0] == self._backend else None

    def freeze(self, backend: Backend) -> Frozen | None:
        """Return the state of the barrier, if it may wait to be written: the backend can do that, and it takes no more
        memory than is allowed."""
        if self._asynchronous and isinstance(backend, Freezing):
            frozen = backend.freeze()
            if frozen.memory_bytes <= self._most_bytes:
                self._frozen = frozen
        return self._frozen

    def keep(self, attempt: AttemptId | None) -> None:
        """Leave the state to the epoch that builds on this attempt's snapshot; None: there is none."""
        if self._frozen is not None and attempt is not None:
            kept, size = (self._backend, self._frozen), self._frozen.memory_bytes
            worker_cache.keep(self._operator, self._subtask, _KIND, attempt, kept, size, self._most_bytes)
