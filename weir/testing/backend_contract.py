"""The contract of every state backend, as tests: `BackendContract`, for the backends of Weir and of third parties.

    class TestVault(BackendContract):
        @pytest.fixture
        def system(self, tmp_path):
            return BackendSystem(tmp_path, FACTORY, BackendOptions(own={"root": str(tmp_path / "vault")}))

`system` is a `BackendSystem`. It takes a subtask's state from snapshot to snapshot, as epochs do.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from state_ops.backends.base import (
    MOST_REFERENCE_BYTES,
    REFERENCE,
    Backend,
    BackendFactory,
    BackendOptions,
    Freezing,
    Frozen,
    Keeping,
)
from state_ops.backends.composite import scan_back
from state_ops.errors import DamageError, TransientError
from state_ops.ids import AttemptId, CheckpointId, Generation, new_attempt_id
from state_ops.records.snapshot_files import Snapshot
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.snapshots.sweep import sweep
from state_ops.storage.storage import Storage
from weir.testing.expected import raises

Entries = dict[bytes, bytes]
Puts = Sequence[tuple[bytes, bytes]]
_ALL = (b"", b"\xff" * 9)


class BackendSystem:
    """The backend under test: the state of one subtask, from snapshot to snapshot.

    Args:
        home: An empty directory.
        factory: The backend.
        options: The settings with which it is opened.
        mode: "full" takes snapshots that depend on no other, as `checkpoints.mode` says. "asynchronous" writes them
            after the barrier, and opens every second fork of the newest one without its files.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from state_ops.backends.memory import FILESYSTEM
        >>> from weir.testing import BackendSystem
        >>> with TemporaryDirectory() as home:
        ...     system = BackendSystem(Path(home), FILESYSTEM)
        ...     taken = system.write(None, ([(b"key", b"value")], []))
        ...     system.forget_local()
        ...     system.read(taken)
        {b'key': b'value'}
    """

    def __init__(
        self, home: Path, factory: BackendFactory, options: BackendOptions | None = None, mode: str = ""
    ) -> None:
        self.storage = Storage(str(home / "storage"))
        self.work = home / "work" / "counts" / "0"
        self.factory, self.options = factory, options or BackendOptions()
        self.full, self.asynchronous = mode == "full", mode == "asynchronous"
        self._epochs = 0
        self._frozen: dict[AttemptId, Frozen] = {}

    def attempt(self) -> Attempt:
        """Return an attempt at the next epoch."""
        self._epochs += 1
        return Attempt("counts", 0, Generation(1), CheckpointId(self._epochs), new_attempt_id(), self.work)

    def options_of(self, attempt: Attempt) -> BackendOptions:
        """Return the settings with which an attempt opens its state."""
        return replace(self.options, where="stage counts", key=self.storage.full(attempt.reference))

    @contextmanager
    def opened(self, base: Snapshot | None) -> Iterator[tuple[Backend, Callable[[], Snapshot]]]:
        """Yield a fork of a snapshot, and a function that takes its snapshot and closes it."""
        attempt, immutable = self.attempt(), self.factory.is_immutable
        held = self._frozen.get(base.attempt) if base and self._epochs % 2 else None
        forked = snapshot.working_copy(self.storage, attempt, base, None, immutable, read=held is None)
        taken: list[Snapshot] = []
        with snapshot.healing(forked):
            options = self.options_of(attempt)
            backend = held.reopen(options) if held else self.factory.open(forked.db, options)

            def take() -> Snapshot:
                if self.asynchronous:
                    assert isinstance(backend, Freezing)
                    frozen = self._frozen[attempt.id] = backend.freeze()
                    backend.close()
                    prepared = snapshot.begin(attempt, forked, frozen, immutable)
                else:
                    files = snapshot.take(attempt, backend)
                    backend.close()
                    prepared = snapshot.prepare(attempt, forked, files, immutable)
                taken.append(snapshot.upload(self.storage, attempt, prepared, base, full=self.full))
                return taken[0]

            try:
                yield backend, take
            except BaseException:
                with suppress(Exception):
                    backend.close()
                raise
            if not taken:
                backend.close()
                shutil.rmtree(attempt.directory)

    def write(self, base: Snapshot | None, *batches: tuple[Puts, Sequence[bytes]]) -> Snapshot:
        """Return the snapshot of an epoch that writes batches of puts and deletes."""
        with self.opened(base) as (backend, take):
            for puts, deletes in batches:
                backend.write(puts, deletes)
            return take()

    def read(self, base: Snapshot | None, back: bool = False) -> Entries:
        """Return the entries of a snapshot. back: Read from the end."""
        with self.opened(base) as (backend, _):
            if back:
                return dict(scan_back(backend, *_ALL))
            entries = list(backend.scan(*_ALL))
            keys = [key for key, _ in entries]
            assert keys == sorted(set(keys)), "a scan is not in key order"
            assert backend.multi_get(keys) == [value for _, value in entries]
            return dict(entries)

    def forget_local(self) -> None:
        """Lose all files of this host, as another host has none."""
        self._frozen.clear()
        shutil.rmtree(self.work, ignore_errors=True)

    def local(self, of: Snapshot) -> Path:
        """Return the directory with a snapshot's files on this host."""
        (directory,) = self.work.glob(f"*-{of.attempt}")
        return directory / "snapshot"

    def kept(self) -> set[str]:
        """Return the keys of all that a backend keeps for this system."""
        assert isinstance(self.factory, Keeping)
        return set(self.factory.kept(f"{self.storage.uri}/", self.options))


def some(*numbers: int, value: bytes = b"v") -> list[tuple[bytes, bytes]]:
    """Return entries with these numbers."""
    return [(f"key{number:05}".encode(), value + str(number).encode()) for number in numbers]


class BackendContract:
    """The tests. A subclass has a fixture `system` that returns a `BackendSystem`.

    Example:
        >>> from weir.testing import BackendContract
        >>> [name for name in dir(BackendContract) if "durable" in name]
        ['test_a_reference_is_small_and_durable']
    """

    # -- one epoch

    def test_values_come_in_the_order_of_the_keys_that_are_asked_for(self, system: BackendSystem) -> None:
        with system.opened(None) as (backend, _):
            backend.write([(b"b", b"2"), (b"a", b"1"), (b"d", b"4")])
            assert backend.multi_get([b"d", b"nothing", b"a", b"d", b"b"]) == [b"4", None, b"1", b"4", b"2"]
            assert backend.multi_get([]) == []

    def test_a_write_is_seen_by_the_next_read_and_a_delete_too(self, system: BackendSystem) -> None:
        with system.opened(None) as (backend, _):
            backend.write(some(1, 2))
            backend.write(some(2, value=b"new"), [b"key00001", b"never there"])
            assert dict(backend.scan(*_ALL)) == dict(some(2, value=b"new"))
            backend.write([], [b"key00002"])
            assert list(backend.scan(*_ALL)) == []
            backend.write(some(2))
            assert list(backend.scan(*_ALL)) == some(2)

    def test_in_a_batch_deletes_come_first_and_of_several_puts_the_last_counts(self, system: BackendSystem) -> None:
        with system.opened(None) as (backend, _):
            backend.write([(b"k", b"before")])
            backend.write([(b"k", b"first"), (b"k", b"last")], [b"k"])
            assert backend.multi_get([b"k"]) == [b"last"]

    def test_a_scan_is_in_bytewise_order_and_half_open(self, system: BackendSystem) -> None:
        keys = [b"\x00", b"\x00\x00", b"\x00\x01", b"\x01", b"a", b"ab", b"b", b"\x7f", b"\x80", b"\xff", b"\xff\xff"]
        with system.opened(None) as (backend, _):
            backend.write([(key, key[::-1]) for key in random.Random(1).sample(keys, len(keys))])
            for start in [b"", *keys]:
                for end in [*keys, b"\xff" * 9]:
                    expected = [(key, key[::-1]) for key in sorted(keys) if start <= key < end]
                    assert list(backend.scan(start, end)) == expected, (start, end)
                    assert list(scan_back(backend, start, end)) == expected[::-1], (start, end)

    def test_scans_between_writes_see_every_write(self, system: BackendSystem) -> None:
        model: Entries = {}
        draw = random.Random(2)
        with system.opened(None) as (backend, _):
            for step in range(150):
                puts = [(draw.randbytes(1) + b"x", str(step).encode()) for _ in range(draw.randrange(4))]
                deletes = draw.sample(sorted(model), min(len(model), draw.randrange(4)))
                backend.write(puts, deletes)
                for key in deletes:
                    model.pop(key, None)
                model |= dict(puts)
                start = draw.randbytes(1)
                assert list(backend.scan(start, _ALL[1])) == sorted(e for e in model.items() if e[0] >= start)
                assert list(backend.scan(b"", start)) == sorted(e for e in model.items() if e[0] < start)

    def test_a_scan_that_is_dropped_half_way_does_no_harm(self, system: BackendSystem) -> None:
        with system.opened(None) as (backend, _):
            backend.write(some(*range(100)))
            scan = backend.scan(*_ALL)
            assert [next(scan), next(scan)] == some(0, 1)
            del scan
            backend.write([], [b"key00002"])
            assert next(backend.scan(b"key00002", b"z")) == some(3)[0]
            assert next(scan_back(backend, b"a", b"key00003")) == some(1)[0]
            backend.write([], [b"key00001"])
            assert next(scan_back(backend, b"a", b"key00003")) == some(0)[0]

    def test_empty_and_large_values_are_values(self, system: BackendSystem) -> None:
        large = random.Random(3).randbytes(5 << 20)
        state = {b"empty": b"", b"large": large, b"k" * 3000: b"long key"}
        first = system.write(None, (list(state.items()), []))
        system.forget_local()
        assert system.read(first) == state

    def test_written_says_whether_anything_was(self, system: BackendSystem) -> None:
        with system.opened(None) as (backend, _):
            backend.multi_get([b"k"])
            list(backend.scan(*_ALL))
            backend.write([], [])
            assert not backend.written
            backend.write([(b"k", b"v")])
            assert backend.written
        base = system.write(None, (some(1), []))
        with system.opened(base) as (backend, _):
            assert not backend.written
            backend.write([], [b"key00001"])
            assert backend.written

    def test_it_knows_roughly_how_much_it_holds(self, system: BackendSystem) -> None:
        with system.opened(None) as (backend, _):
            assert backend.approximate_entries() == 0
            backend.write(some(*range(200)))
            assert 100 <= backend.approximate_entries() <= 400

    # -- snapshots

    def test_a_snapshot_is_the_state_whether_its_files_are_here_or_in_storage(self, system: BackendSystem) -> None:
        state = dict(some(*range(500)))
        first = system.write(None, (list(state.items()), []))
        assert first.files
        assert system.read(first) == state
        system.forget_local()
        assert system.read(first) == state

    def test_a_state_that_became_empty_stays_empty(self, system: BackendSystem) -> None:
        first = system.write(None, (some(1, 2), []))
        two = system.write(first, ([], [b"key00001", b"key00002"]))
        assert system.read(two) == {}
        system.forget_local()
        assert system.read(two) == {}
        assert system.read(system.write(two, (some(3), []))) == dict(some(3))

    def test_a_snapshot_stays_what_it_is_while_forks_of_it_go_on(self, system: BackendSystem) -> None:
        base = system.write(None, (some(*range(50)), []))
        before = {path.name: path.read_bytes() for path in system.local(base).iterdir()}
        left = system.write(base, (some(*range(25), value=b"left"), [b"key00049"]), (some(60), []))
        right = system.write(base, ([], [b"key00000"]), (some(1, value=b"right"), []))
        assert {path.name: path.read_bytes() for path in system.local(base).iterdir()} == before
        original = dict(some(*range(50)))
        of_left = {**dict(some(*range(49))), **dict(some(*range(25), value=b"left")), **dict(some(60))}
        of_right = {**dict(some(*range(1, 50))), **dict(some(1, value=b"right"))}
        for _ in range(2):
            assert [system.read(taken) for taken in (base, left, right)] == [original, of_left, of_right]
            system.forget_local()

    def test_two_forks_of_one_snapshot_are_open_at_once(self, system: BackendSystem) -> None:
        base = system.write(None, (some(*range(50)), []))
        with system.opened(base) as (first, take_one), system.opened(base) as (other, take_other):
            first.write(some(1, value=b"one"))
            other.write(some(1, value=b"other"))
            assert first.multi_get([b"key00001"]) == [b"one1"]
            assert other.multi_get([b"key00001"]) == [b"other1"]
            taken = take_one(), take_other()
        assert [system.read(each)[b"key00001"] for each in taken] == [b"one1", b"other1"]

    def test_what_is_written_after_a_snapshot_is_not_in_it(self, system: BackendSystem) -> None:
        first = system.write(None, (some(1), []))
        attempt, immutable = system.attempt(), system.factory.is_immutable
        forked = snapshot.working_copy(system.storage, attempt, first, None, immutable)
        backend = system.factory.open(forked.db, system.options_of(attempt))
        backend.write(some(2))
        files = snapshot.take(attempt, backend)
        before = {file.name: file.read_bytes() for file in files}
        backend.write(some(3))
        assert {file.name: file.read_bytes() for file in files} == before
        backend.close()
        prepared = snapshot.prepare(attempt, forked, files, immutable)
        taken = snapshot.upload(system.storage, attempt, prepared, first, full=system.full)
        assert system.read(taken) == dict(some(1, 2))

    def test_many_epochs_of_many_batches(self, system: BackendSystem) -> None:
        model: Entries = {}
        base: Snapshot | None = None
        draw = random.Random(4)
        for epoch in range(12):
            batches = []
            for _ in range(6):
                puts = some(*(draw.randrange(400) for _ in range(40)), value=f"e{epoch}-".encode())
                deletes = [key for key, _ in some(*(draw.randrange(400) for _ in range(10)))]
                for key in deletes:
                    model.pop(key, None)
                model |= dict(puts)
                batches.append((puts, deletes))
            base = system.write(base, *batches)
            sweep(system.attempt(), {base.attempt}, (), 1)
            if epoch % 5 == 4:
                system.forget_local()
        assert system.read(base) == model

    # -- damage

    def test_damage_in_storage_is_found_before_the_state_is_opened(self, system: BackendSystem) -> None:
        base = system.write(None, (some(*range(200)), []))
        system.forget_local()
        for file in base.files:
            stored = Path(system.storage.full(file.path))
            whole = stored.read_bytes()
            for harm in ("cut off", "flip", "lose"):
                spoil(stored, harm, len(whole) // 2)
                with raises(DamageError):
                    system.read(base)
                stored.parent.mkdir(parents=True, exist_ok=True)
                stored.write_bytes(whole)
                system.forget_local()
        assert system.read(base) == dict(some(*range(200)))

    def test_damage_to_local_files_never_becomes_another_value(self, system: BackendSystem) -> None:
        state = dict(some(*range(300)))
        base = system.write(None, (list(state.items()), []))
        held = 0
        harms = [("cut off", 0.5), ("lose", 0.0), *(("flip", at / 5) for at in range(5))]
        for number, (file, harm, share) in enumerate((file, *harm) for file in base.files for harm in harms):
            local = system.local(base) / file.name
            spoil(local, harm, int(share * local.stat().st_size))
            for _ in range(2):  # a first read may be answered by blocks that the process still has in memory
                try:
                    assert system.read(base, back=bool(number % 2)) == state
                except TransientError as error:  # the local copy was dropped, and the replay fetches it again
                    assert isinstance(error.__cause__, DamageError)
                    assert system.read(base) == state
                    held += 1
            system.forget_local()
            assert system.read(base) == state
        immutable = any(system.factory.is_immutable(file.name) for file in base.files)
        assert (held > 0) == immutable, "copies are compared with their digests; the backend checks other files"

    # -- snapshots that the backend keeps

    def test_a_reference_is_small_and_durable(self, system: BackendSystem) -> None:
        keeps(system)
        first = system.write(None, (some(*range(100)), []))
        (file,) = first.files
        assert file.name == REFERENCE and file.bytes <= MOST_REFERENCE_BYTES
        system.forget_local()
        assert system.read(first) == dict(some(*range(100)))

    def test_it_lists_what_it_keeps_and_what_was_begun(self, system: BackendSystem) -> None:
        keeps(system)
        assert system.kept() == set()
        first = system.write(None, (some(1), []))
        two = system.write(first, (some(2), []))
        named = {system.storage.full(file.path) for taken in (first, two) for file in taken.files}
        assert system.kept() == named
        system.read(two)
        assert system.kept() == named, "reading keeps nothing"
        with system.opened(two) as (backend, _):
            backend.write(some(3))
        assert named <= system.kept() and len(system.kept() - named) <= 1
        delete(system, *system.kept() - named)
        assert system.kept() == named
        assert system.read(two) == dict(some(1, 2))

    def test_a_snapshot_is_deleted_alone(self, system: BackendSystem) -> None:
        keeps(system)
        first = system.write(None, (some(1, 2), []))
        two = system.write(first, (some(2, value=b"new"), []))
        other = system.write(first, (some(3), []))
        system.forget_local()
        delete(system, *(system.storage.full(file.path) for file in first.files))
        delete(system, *(system.storage.full(file.path) for file in first.files))  # what is gone is no error
        assert system.read(two) == {**dict(some(1)), **dict(some(2, value=b"new"))}
        assert system.read(other) == dict(some(1, 2, 3))
        with raises(DamageError):
            system.read(first)
        assert [problem(system, taken) is None for taken in (first, two, other)] == [False, True, True]

    def test_one_more_snapshot_needs_no_write(self, system: BackendSystem) -> None:
        keeps(system)
        first = system.write(None, (some(1, 2), []))
        again = system.write(first)
        assert {file.path for file in again.files}.isdisjoint(file.path for file in first.files)
        delete(system, *(system.storage.full(file.path) for file in first.files))
        system.forget_local()
        assert system.read(again) == dict(some(1, 2))


def spoil(file: Path, harm: str, at: int) -> None:
    """Harm a file in place, as a disk does: what shares its inode is harmed as well."""
    if harm == "lose":
        file.unlink()
    elif harm == "cut off":
        os.truncate(file, at)
    else:
        with file.open("r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte[0] ^ 16]))


def keeps(system: BackendSystem) -> None:
    """Skip the test if the backend's snapshots are files."""
    if not isinstance(system.factory, Keeping):
        import pytest

        pytest.skip("its snapshots are files")


def delete(system: BackendSystem, *keys: str) -> None:
    """Let the backend delete the snapshots of these keys."""
    assert isinstance(system.factory, Keeping)
    system.factory.delete(keys, system.options)


def problem(system: BackendSystem, taken: Snapshot) -> str | None:
    """Return what the backend says is wrong with a snapshot."""
    assert isinstance(system.factory, Keeping)
    (file,) = taken.files
    reference = (system.storage.read_bytes(file.path) or b"").decode()
    return system.factory.problem(reference, system.options)
