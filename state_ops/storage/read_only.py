"""Open a pipeline's storage for reading only."""

from __future__ import annotations

from typing import Any

from state_ops.errors import PipelineError
from state_ops.storage.instrumented_store import InstrumentedStore
from state_ops.storage.storage import Storage


class ReadOnlyStorage(Storage):
    """Storage that is only read: an operation that would write or delete a file raises PipelineError."""

    @classmethod
    def of(cls, storage: Storage) -> ReadOnlyStorage:
        """Return a read-only object for the same storage."""
        _, arguments = storage.__reduce__()
        return cls(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ReadOnlyStorage, *super().__reduce__()[1:])

    def _writable(self, path: str) -> tuple[InstrumentedStore, str]:
        raise PipelineError(
            f"{path!r} would have been written, in storage that is only read.",
            where=self.uri,
            next="Nothing was written. Report it: it must not.",
        )
