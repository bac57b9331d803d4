"""State in a dict, and in a single file at each checkpoint: the backends `filesystem` and `memory`.

Every epoch reads the whole state and, if something was written, writes the whole state: for states that are small or
that change almost entirely. `memory` is the same with a limit, so that a small state that grows says so before it is
felt.
`MemoryBackend()` by itself serves schema inference and unit tests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from state_ops.backends import arrow_file as files
from state_ops.backends.base import BackendOptions
from state_ops.errors import DamageError, StateSizeError

FILE = "state.arrow"
FORMAT = "entries-1"

_SAMPLE = 1024
_OBJECT_BYTES = 150  # an entry's two bytes objects, without their content, its slot in the dict and in the order


class MemoryBackend:
    """Entries in memory.

    Args:
        entries: To begin with, in key order.
        limit: Bytes of keys and values; None: no limit.
    """

    def __init__(self, entries: dict[bytes, bytes] | None = None, limit: int | None = None, where: str = "") -> None:
        self._entries = entries if entries is not None else {}
        self._order = _Order(list(self._entries))
        self._limit, self._where = limit, where
        self._bytes = _size(self._entries) if limit is not None else 0
        self._shared = False  # with what was frozen: to be copied before the first change
        self.written = False

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(map(self._entries.get, keys))

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        """Write a batch. Raises StateSizeError, with nothing changed, if the state would exceed its limit."""
        if not puts and not deletes:
            return
        fresh = dict(puts)
        gone = {key for key in deletes if key in self._entries and key not in fresh}
        if self._limit is not None:
            self._bytes = self._allowed(fresh, gone)
        if self._shared:
            self._entries, self._shared = dict(self._entries), False
        self._order.add(fresh.keys() - self._entries.keys())
        self._entries.update(fresh)
        for key in gone:
            del self._entries[key]
        self._order.removed(len(gone))
        self.written = True

    def _allowed(self, fresh: Mapping[bytes, bytes], gone: Collection[bytes]) -> int:
        """Return how many bytes the state has after a write; raise StateSizeError if they are more than the limit."""
        replaced = [*(fresh.keys() & self._entries.keys()), *gone]
        bytes = self._bytes + _size(fresh) - sum(len(key) + len(self._entries[key]) for key in replaced)
        assert self._limit is not None
        if bytes > max(self._limit, self._bytes):  # what was too large before the limit was lowered may still shrink
            raise StateSizeError(
                f"The state would be {bytes / (1 << 20):.2f} MiB, but the memory backend keeps at most "
                f"{self._limit / (1 << 20):g} MiB for a subtask (state.max_state_size_mb).",
                where=self._where or None,
                next="Set state.backend to filesystem, which goes on from the same checkpoints, or raise "
                "state.max_state_size_mb. For state of any size use rocksdb; the stage then needs a new uid and "
                "starts empty.",
            )
        return bytes

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        keys = self._order.between(start, end, self._entries)
        return zip(keys, map(self._entries.__getitem__, keys), strict=True)

    def scan_back(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        keys = self._order.between(start, end, self._entries)[::-1]
        return zip(keys, map(self._entries.__getitem__, keys), strict=True)

    def approximate_entries(self) -> int:
        return len(self._entries)

    def keep_only(self, start: bytes, end: bytes) -> None:
        self._entries = {key: value for key, value in self._entries.items() if start <= key < end}
        self._shared = False
        self._order = _Order(sorted(self._entries))
        self._bytes = _size(self._entries) if self._limit is not None else 0
        self.written = True

    def has_traces(self, start: bytes, end: bytes) -> bool:
        return any(start <= key < end for key in self._entries)

    def snapshot(self, target: Path) -> list[Path]:
        return _write(target, self._entries)

    def freeze(self) -> FrozenEntries:
        limited = self._limit is not None
        return FrozenEntries(self._entries, self._order, self._bytes if limited else _about(self._entries), limited)

    def close(self) -> None:
        self._entries, self._order = {}, _Order([])


@dataclass(frozen=True, slots=True, repr=False)
class FrozenEntries:
    """A state in memory, between the epoch that left it and the next. Copy-on-write: the dict is shared until that
    changes something.

    Attributes:
        order: The keys', of which each backend gets its own.
        file_bytes: Of keys and values, exactly where there is a limit.
    """

    entries: dict[bytes, bytes]
    order: _Order
    file_bytes: int
    limited: bool
    files: tuple[str, ...] = (FILE,)

    @property
    def memory_bytes(self) -> int:
        return self.file_bytes + _OBJECT_BYTES * len(self.entries)

    def write(self, target: Path) -> list[Path]:
        return _write(target, self.entries)

    def reopen(self, options: BackendOptions) -> MemoryBackend:
        opened = MemoryBackend(None, _limit(options) if self.limited else None, options.where)
        opened._entries, opened._order, opened._bytes = self.entries, self.order.copy(), self.file_bytes
        opened._shared = True
        return opened


def _write(target: Path, entries: Mapping[bytes, bytes]) -> list[Path]:
    target.mkdir()
    files.write(target / FILE, sorted(entries), entries)
    return [target / FILE]


def _limit(options: BackendOptions) -> int:
    return int(options.max_state_size_mb * (1 << 20))


class _Order:
    """The keys of a dict in order, for scans between writes: sorted runs, each more than twice as long as the next.

    A scan after k new keys merges about k log n of n, instead of sorting all (O'Neil et al., The Log-Structured
    Merge-Tree, 1996, in small). Keys that were removed stay in their runs until these are merged, or outnumber the
    others."""

    def __init__(self, keys: list[bytes]) -> None:
        self._runs: list[list[bytes]] = [keys] if keys else []  # longest first
        self._fresh: set[bytes] = set()
        self._removed = 0

    def copy(self) -> _Order:
        """Another one to go on with. Runs are never changed, only merged into new ones."""
        other = _Order([])
        other._runs, other._fresh, other._removed = list(self._runs), set(self._fresh), self._removed
        return other

    def add(self, keys: Iterable[bytes]) -> None:
        self._fresh.update(keys)

    def removed(self, number: int) -> None:
        self._removed += number

    def between(self, start: bytes, end: bytes, alive: Mapping[bytes, bytes]) -> list[bytes]:
        """Return the keys of `alive` with start <= key < end, in order."""
        self._settle(alive)
        parts = [run[bisect_left(run, start) : bisect_left(run, end)] for run in self._runs]
        keys = parts[0] if len(parts) == 1 else _merged(parts)
        return [key for key in keys if key in alive] if self._removed else keys

    def _settle(self, alive: Mapping[bytes, bytes]) -> None:
        if self._fresh:
            self._runs.append(sorted(self._fresh))
            self._fresh = set()
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._runs[-2:] = [_merged(self._runs[-2:])]
        if self._removed > 64 + len(alive):
            self._runs, self._removed = [sorted(alive)], 0


def _merged(runs: list[list[bytes]]) -> list[bytes]:
    """Sorted runs as one; a key that was removed and put again stands in two of them."""
    return list(dict.fromkeys(sorted(key for run in runs for key in run)))


def _size(entries: Mapping[bytes, bytes]) -> int:
    return sum(map(len, entries)) + sum(map(len, entries.values()))


def _about(entries: Mapping[bytes, bytes]) -> int:
    """Return about `_size`, from a sample."""
    step = max(1, len(entries) // _SAMPLE)
    return step * sum(len(key) + len(value) for key, value in islice(entries.items(), 0, None, step))


@dataclass(frozen=True, slots=True)
class FilesystemFactory:
    """State in memory, one file per subtask and checkpoint.

    Attributes:
        limited: At most `max_state_size_mb` of it.
    """

    limited: bool = False
    format: str = FORMAT

    def is_immutable(self, name: str) -> bool:
        return name == FILE

    def open(self, directory: Path, options: BackendOptions) -> MemoryBackend:
        strange = sorted(path.name for path in directory.iterdir() if path.name != FILE)
        if strange:
            raise DamageError(
                f"This state has a file {strange[0]!r}, which neither the filesystem nor the memory backend writes.",
                where=str(directory),
                next="Set state.backend to the backend that wrote this state.",
            )
        file = directory / FILE
        entries = files.read(file) if file.exists() else {}
        return MemoryBackend(entries, _limit(options) if self.limited else None, options.where)


FILESYSTEM = FilesystemFactory()
MEMORY = FilesystemFactory(limited=True)
