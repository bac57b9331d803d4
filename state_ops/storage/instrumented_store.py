"""Counts a pipeline's requests to its storage by kind, and bytes in both directions.

Every try counts, also one that fails. On object stores it is what S3 sends a bill for: an object sent in parts is a
request for each part and two more, a listing one for each page, deletions one for each batch. What delta-rs, Arrow and
Spark request by themselves is not seen here: the opening of Delta tables at the start of a run, and the reading of
input and of rows, also of those that were landed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from state_ops.storage.store import PART, Store, StoredFile

GET, HEAD, LIST, PUT, CREATE, DELETE = KINDS = ("get", "head", "list", "put", "create", "delete")
UP, DOWN = "bytes_up", "bytes_down"
NAMES = (*(f"requests_{kind}" for kind in KINDS), UP, DOWN)  # in a checkpoint's totals

_PAGE = 1000  # objects of a page of a listing, and of a batch of deletions


class RequestCounts:
    """Counts by the names in `NAMES`; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(NAMES, 0)

    def requested(self, kind: str, times: int = 1) -> None:
        with self._lock:
            self._counts[f"requests_{kind}"] += times

    def moved(self, direction: str, bytes: int) -> None:
        with self._lock:
            self._counts[direction] += bytes

    def add(self, others: Mapping[str, int]) -> None:
        """Count what another process has counted; names that this release does not know are left out."""
        with self._lock:
            for name in NAMES:
                self._counts[name] += others.get(name, 0)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[str, int]:
        """Return the counts, which begin at zero again."""
        with self._lock:
            taken, self._counts = self._counts, dict.fromkeys(NAMES, 0)
        return taken


class InstrumentedStore:
    """A store whose requests are counted."""

    def __init__(self, store: Store, request_counts: RequestCounts) -> None:
        self._store, self._traffic = store, request_counts
        self.remote = store.remote

    def write(self, path: str, chunks: Iterator[bytes], size: int) -> None:
        in_parts = self.remote and size > PART
        self._traffic.requested(PUT, _batches(size, PART) + 2 if in_parts else 1)
        self._store.write(path, self._counting(UP, chunks), size)

    def create(self, path: str, data: bytes) -> bool:
        self._traffic.requested(CREATE)
        self._traffic.moved(UP, len(data))
        return self._store.create(path, data)

    def read(self, path: str, start: int = 0) -> Iterator[bytes]:
        self._traffic.requested(GET)
        return self._counting(DOWN, self._store.read(path, start))

    def tail(self, path: str, length: int) -> tuple[bytes, int]:
        self._traffic.requested(GET)
        data, size = self._store.tail(path, length)
        self._traffic.moved(DOWN, len(data))
        return data, size

    def part(self, path: str, start: int, length: int) -> bytes:
        self._traffic.requested(GET)
        data = self._store.part(path, start, length)
        self._traffic.moved(DOWN, len(data))
        return data

    def size(self, path: str) -> int | None:
        self._traffic.requested(HEAD)
        return self._store.size(path)

    def on_disk(self, path: str) -> Path | None:
        return self._store.on_disk(path)

    def stamp(self, path: str) -> str | None:
        self._traffic.requested(HEAD)
        return self._store.stamp(path)

    def list(self, path: str) -> Iterable[StoredFile]:
        self._traffic.requested(LIST)  # its first page
        for number, file in enumerate(self._store.list(path)):
            if self.remote and number and number % _PAGE == 0:
                self._traffic.requested(LIST)
            yield file

    def list_dirs(self, path: str) -> Iterable[str]:
        self._traffic.requested(LIST)
        return self._store.list_dirs(path)

    def delete(self, path: str) -> bool:
        self._traffic.requested(DELETE)
        return self._store.delete(path)

    def delete_files(self, paths: Sequence[str]) -> None:
        self._traffic.requested(DELETE, self._deletions(len(paths)))
        self._store.delete_files(paths)

    def delete_all(self, path: str, files: Iterable[StoredFile]) -> None:
        gone = list(files)
        self._traffic.requested(DELETE, self._deletions(len(gone)))
        self._store.delete_all(path, gone)

    def _deletions(self, files: int) -> int:
        return _batches(files, _PAGE) if self.remote else files

    def _counting(self, direction: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._traffic.moved(direction, len(chunk))
            yield chunk


def _batches(things: int, of: int) -> int:
    return -(-things // of)
