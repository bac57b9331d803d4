"""The classic example of a state cache, on a real RocksDB whose every get and put is counted.

Each event reads its user's value and updates it: U1 E1, U1 E2, U2 E1, U2 E2, checkpoint, U1 x 2, U2 x 2, U3 E1,
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.keyed.per_key.state_cache import CacheFigures, CacheSizes, StateCache, ValueStore


class Counted:
    """A backend that notes every key that is read or written, and how many batches that took."""

    def __init__(self, backend: RocksDBBackend) -> None:
        self._backend = backend
        self.gets: list[bytes] = []
        self.puts: list[bytes] = []
        self.deletes: list[bytes] = []
        self.batches = 0

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.gets += keys
        return self._backend.multi_get(keys)

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = ()) -> None:
        self.puts += [key for key, _ in puts]
        self.deletes += deletes
        self.batches += 1
        self._backend.write(puts, deletes)

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._backend.scan(start, end)


class Users:
    """A count of events per user, through a cache."""

    def __init__(self, backend: Counted, l1: int, l2: int = 0) -> None:
        self.backend = backend
        self.cache: StateCache[int] = StateCache(ValueStore(backend, _encode, _decode), CacheSizes(l1, l2))

    def event(self, user: str) -> tuple[str, str]:
        """Apply one event; returns the users that it made RocksDB get, and those that it made it put."""
        return self._counted(lambda: self.cache.update(user.encode(), (self.cache.get(user.encode()) or 0) + 1))

    def read(self, user: str) -> tuple[str, str]:
        return self._counted(lambda: self.cache.get(user.encode()))

    def checkpoint(self) -> tuple[str, str]:
        before = self.backend.batches
        counted = self._counted(lambda: setattr(self, "figures", self.cache.barrier()))
        assert self.backend.batches - before <= 1
        return counted

    def stored(self) -> dict[str, int]:
        return {key.decode(): int(value) for key, value in self.backend.scan(b"", b"\xff")}

    def _counted(self, step) -> tuple[str, str]:
        gets, puts = len(self.backend.gets), len(self.backend.puts)
        step()
        return _names(self.backend.gets[gets:]), _names(self.backend.puts[puts:])


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Counted]:
    opened = RocksDBBackend(tmp_path / "db", 16)
    yield Counted(opened)
    opened.close()


def test_one_layer(backend: Counted) -> None:
    users = Users(backend, 2)
    assert users.event("U1") == ("U1", "")  # miss
    assert users.event("U1") == ("", "")  # hit
    assert users.event("U2") == ("U2", "")
    assert users.event("U2") == ("", "")
    assert users.stored() == {}
    assert users.checkpoint() == ("", "U1 U2")
    assert users.figures == CacheFigures(l1_hits=2, misses=2, flushed=2)
    assert users.stored() == {"U1": 2, "U2": 2}
    assert [users.event(user) for user in ("U1", "U1", "U2", "U2")] == [("", "")] * 4
    assert users.event("U3") == ("U3", "U1")  # the cache is full: the least recently used one goes, and it is dirty
    assert users.checkpoint() == ("", "U2 U3")
    assert users.figures == CacheFigures(l1_hits=4, misses=1, evicted=1, flushed=2)
    assert users.stored() == {"U1": 4, "U2": 4, "U3": 1}


def test_one_layer_with_a_checkpoint_just_before_the_third_user(backend: Counted) -> None:
    users = Users(backend, 2)
    for user in ("U1", "U1", "U2", "U2"):
        users.event(user)
    assert users.checkpoint() == ("", "U1 U2")
    for user in ("U1", "U1", "U2", "U2"):
        assert users.event(user) == ("", "")
    assert users.checkpoint() == ("", "U1 U2")
    assert users.event("U3") == ("U3", "")  # U1 is evicted clean
    assert users.checkpoint() == ("", "U3")
    assert users.stored() == {"U1": 4, "U2": 4, "U3": 1}


def test_two_layers(backend: Counted) -> None:
    users = Users(backend, 1, 1)
    assert users.event("U1") == ("U1", "")  # misses both, into L1
    assert users.event("U1") == ("", "")  # L1 hit
    assert users.event("U2") == ("U2", "U1")  # misses both; U1 moves to L2 and is put at once
    assert users.event("U2") == ("", "")  # L1 hit
    assert users.checkpoint() == ("", "U2")  # U1 in L2 is not dirty
    assert users.figures == CacheFigures(l1_hits=2, misses=2, evicted=1, flushed=1)
    assert users.stored() == {"U1": 2, "U2": 2}
    assert users.event("U1") == ("", "")  # L2 hit: they change places, and U2 is clean
    assert users.event("U1") == ("", "")
    assert users.event("U2") == ("", "U1")  # L2 hit: U1 leaves L1, dirty
    assert users.event("U2") == ("", "")
    assert users.event("U3") == ("U3", "U2")  # U1 is dropped from L2
    assert users.checkpoint() == ("", "U3")
    assert users.figures == CacheFigures(l1_hits=2, l2_hits=2, misses=1, evicted=2, flushed=1)
    assert users.stored() == {"U1": 4, "U2": 4, "U3": 1}


@pytest.mark.parametrize(("l1", "l2"), [(2, 0), (1, 1)])
def test_what_was_only_read_is_never_put(backend: Counted, l1: int, l2: int) -> None:
    users = Users(backend, l1, l2)
    for user in ("U1", "U2", "U3"):
        users.event(user)
    users.checkpoint()
    fresh = Users(backend, l1, l2)
    for user in ("U1", "U2", "U3", "U4", "U1", "U4", "U2"):
        assert fresh.read(user)[1] == ""
    assert fresh.checkpoint() == ("", "")
    assert backend.deletes == []


def _encode(values: Sequence[int]) -> list[bytes]:
    return [str(value).encode() for value in values]


def _decode(values: Sequence[bytes]) -> list[int]:
    return [int(value) for value in values]


def _names(keys: Sequence[bytes]) -> str:
    return " ".join(key.decode() for key in keys)
