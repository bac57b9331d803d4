"""What a state backend can do. Two implementations: `rocksdb` (durable) and `memory` (schema inference, tests)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Backend(Protocol):
    """One subtask's ordered key-value store, raw bytes in and out. Keys are ordered bytewise."""

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys` in their order; None where there is none."""
        ...

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        """Apply one batch, all or nothing."""
        ...

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Entries with start <= key < end, in key order."""
        ...
