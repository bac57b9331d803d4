"""State that several databases hold, each a range of keys: what a subtask has after its parallelism changed.

    000012.sst                       one database: files under the names that its backend gave them
    0000~000012.sst 0040~000007.sst  several: before the `~` the first key, in hex, of the range that the database holds

Putting databases side by side rewrites nothing and uploads nothing: their files are those that the old subtasks have
uploaded. Which of them a key is in is read off the names; what an old subtask held beyond the new one's key groups is
clipped. Databases that are small, or too many, are copied into a neighbour (`folded`), because each one costs an epoch
a file and a flush of its own."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from state_ops.backends.base import BEYOND, Backend, BackendFactory, BackendOptions, Backwards, Clipping, Tracing
from state_ops.backends.key_ranges import by_range
from state_ops.errors import DamageError

MARK = "~"
MOST = 16
SMALL_BYTES = 4 << 20

_BATCH = 10_000


def named(start: bytes, name: str) -> str:
    """Return the name of a database's file in a snapshot of several.

    Args:
        start: The first key that it may hold.
    """
    return f"{start.hex()}{MARK}{name}"


def parted(name: str) -> tuple[bytes | None, str]:
    """Return the key at which the database of a snapshot's file begins, and the name that its backend gave the file.

    The key is None if there is only one database.

    Raises:
        DamageError: For a name that Weir never gives.
    """
    start, mark, file_name = name.rpartition(MARK)
    if not mark:
        return None, name
    try:
        return bytes.fromhex(start), file_name
    except ValueError as error:
        raise DamageError(f"The state has a file {name!r}, whose name Weir never gives.") from error


def is_part(name: str) -> bool:
    """Return whether a snapshot's file belongs to one database of several."""
    return MARK in name


def is_immutable(kind: BackendFactory) -> Callable[[str], bool]:
    """Return a function that says of a snapshot's file whether the backend never changes it in place."""

    def answer(name: str) -> bool:
        return kind.is_immutable(parted(name)[1])

    return answer


def opened(kind: BackendFactory, directory: Path, options: BackendOptions) -> Backend:
    """Open the state in `directory`, whose files are as a snapshot names them. Errors: those of the backend."""
    starts: dict[bytes, list[tuple[Path, str]]] = {}
    for file in directory.iterdir():
        start, file_name = parted(file.name)
        if start is not None:
            starts.setdefault(start, []).append((file, file_name))
    if not starts:
        return kind.open(directory, options)
    parts: list[tuple[bytes, Backend]] = []
    try:
        for start in sorted(starts):
            home = directory / f"from-{start.hex()}"
            home.mkdir()
            for file, file_name in starts[start]:
                file.rename(home / file_name)
            parts.append((start, kind.open(home, replace(options, key=_key_of(start, options.key)))))
    except BaseException:
        for _, part in parts:
            with suppress(Exception):
                part.close()
        raise
    return Joined(parts)


def _key_of(start: bytes, key: str) -> str:
    """Return the key of one database's snapshot. key: That of the subtask's, if it had one database."""
    above, _, name = key.rpartition("/")
    return f"{above}/{named(start, name)}" if key else ""


class Joined:
    """Databases side by side, in key order.

    Args:
        parts: The first key of each, and the database.
    """

    def __init__(self, parts: Sequence[tuple[bytes, Backend]]) -> None:
        self._starts = [start for start, _ in parts]
        self._parts = [part for _, part in parts]
        self._folded = False

    @property
    def written(self) -> bool:
        return self._folded or any(part.written for part in self._parts)

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        values: list[bytes | None] = [None] * len(keys)
        placed = [(key, at) for at, key in enumerate(keys)]
        for part, some in zip(self._parts, by_range(placed, self._starts), strict=True):
            if some:
                for (_, at), value in zip(some, part.multi_get([key for key, _ in some]), strict=True):
                    values[at] = value
        return values

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        gone = by_range([(key,) for key in deletes], self._starts)
        for part, some, keys in zip(self._parts, by_range(puts, self._starts), gone, strict=True):
            if some or keys:
                part.write(some, [key for (key,) in keys])

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        first, last = bisect_right(self._starts[1:], start), bisect_left(self._starts[1:], end) + 1
        for part in self._parts[first:last]:
            yield from part.scan(start, end)

    def scan_back(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        first, last = bisect_right(self._starts[1:], start), bisect_left(self._starts[1:], end) + 1
        for part in reversed(self._parts[first:last]):
            yield from scan_back(part, start, end)

    def approximate_entries(self) -> int:
        return sum(part.approximate_entries() for part in self._parts)

    def keep_only(self, start: bytes, end: bytes) -> None:
        last = len(self._parts) - 1
        # Those in the middle as well: so they learn to leave merges for later.
        for at, part in enumerate(self._parts):
            clip(part, start if at == 0 else b"", end if at == last else BEYOND)

    def has_traces(self, start: bytes, end: bytes) -> bool:
        return any(has_traces(part, start, end) for part in self._parts)

    def fold(self, sizes: Sequence[int]) -> None:
        """Copy databases that are small, or too many, into the one beside them.

        Args:
            sizes: Of each, in bytes.
        """
        left = list(sizes)
        while len(self._parts) > 1 and (min(left) < SMALL_BYTES or len(left) > MOST):
            at = left.index(min(left))
            into = (
                at - 1 if at else 1
            )  # whose name stays, so that its files need not be uploaded: the first one has what is before it
            _copy(self._parts[at], self._parts[into])
            self._parts[at].close()
            left[into] += left[at]
            for items in (self._parts, left, self._starts):
                del items[at]
            self._folded = True

    def snapshot(self, target: Path) -> list[Path]:
        target.mkdir()
        files = []
        for start, part in zip(self._starts, self._parts, strict=True):
            directory = target / f"from-{start.hex()}"
            for file in part.snapshot(directory):
                files.append(target / named(start, file.name))
                file.rename(files[-1])
        return files

    def close(self) -> None:
        failed: Exception | None = None
        while self._parts:
            try:
                self._parts.pop().close()
            except Exception as error:  # the others must not hold on to memory and files
                failed = failed or error
        self._starts = []
        if failed is not None:
            raise failed


def has_traces(backend: Backend, start: bytes, end: bytes) -> bool:
    """Return whether files of the state may have bytes of keys with start <= key < end.

    True if the backend cannot tell.
    """
    return not isinstance(backend, Tracing) or backend.has_traces(start, end)


def scan_back(backend: Backend, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Entries with start <= key < end, the highest key first."""
    if isinstance(backend, Backwards):
        return backend.scan_back(start, end)
    return reversed(list(backend.scan(start, end)))


def clip(backend: Backend, start: bytes, end: bytes) -> None:
    """Forget all entries but those with start <= key < end."""
    if isinstance(backend, Clipping):
        backend.keep_only(start, end)
        return
    for low, high in ((b"", start), (end, BEYOND)):
        while keys := [key for key, _ in _some(backend, low, high)]:
            backend.write([], keys)


def _some(backend: Backend, start: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
    return [entry for _, entry in zip(range(_BATCH), backend.scan(start, end), strict=False)]


def _copy(source: Backend, target: Backend) -> None:
    start = b""
    while entries := _some(source, start, BEYOND):
        target.write(entries)
        start = entries[-1][0] + b"\0"
