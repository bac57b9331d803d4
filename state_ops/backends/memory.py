"""State in a dict: nothing is durable. For schema inference and for unit tests of stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class MemoryBackend:
    def __init__(self) -> None:
        self._entries: dict[bytes, bytes] = {}

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._entries.get(key) for key in keys]

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        self._entries.update(puts)
        for key in deletes:
            self._entries.pop(key, None)

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key in sorted(key for key in self._entries if start <= key < end):
            yield key, self._entries[key]
