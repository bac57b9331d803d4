"""Snapshots that are written after their barrier: whoever needs one waits for it, and for no longer than there is
anything to wait for."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from threading import Event

import pytest

from state_ops.backends.base import BackendOptions, SortedRun
from state_ops.backends.memory import FILE, MEMORY, MemoryBackend
from state_ops.errors import LocalBaseError, PipelineError, StateSizeError, TransientError
from state_ops.ids import CheckpointId, Generation, new_attempt_id
from state_ops.records.snapshot_files import LocalFile, LocalSnapshot
from state_ops.snapshots import async_writer, snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.storage.storage import CancelledError, Storage
from weir.settings.configuration import PROJECT

OPTIONS = BackendOptions()
EVERYTHING = (b"", b"\xff" * 9)

# Begins a snapshot, says so and never gets done.
_ENDLESS = """
import sys, time
from pathlib import Path
from state_ops.snapshots import async_writer as writing

def write(target):
    target.mkdir()
    print("begun", flush=True)
    time.sleep(600)

writing.begin(Path(sys.argv[1]), write).join()
"""


def _attempt(home: Path) -> Attempt:
    attempt = Attempt("counts", 0, Generation(1), CheckpointId(1), new_attempt_id(), home / "counts" / "0")
    attempt.directory.mkdir(parents=True)
    return attempt


# Waiting


def test_it_is_whole_when_the_wait_for_it_ends(tmp_path):
    go, order = Event(), list[str]()

    def write(target: Path) -> None:
        target.mkdir()
        (target / "half").write_text("")
        assert go.wait(30)
        (target / "whole").write_text("")
        order.append("written")

    def wait() -> None:
        async_writer.settle(tmp_path)
        order.append("waited")

    writer = async_writer.begin(tmp_path, write)
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    assert order == [] and not (tmp_path / "snapshot").exists()
    go.set()
    waiting.join(30)
    writer.join(30)
    assert order == ["written", "waited"]
    assert {file.name for file in (tmp_path / "snapshot").iterdir()} == {"half", "whole"}
    async_writer.settle(tmp_path)  # again, at once


def test_a_write_that_fails_is_said_to_whoever_waits(tmp_path):
    def write(target: Path) -> None:
        raise OSError(28, "No space left on device")

    async_writer.begin(tmp_path, write).join(30)
    for _ in range(2):
        with pytest.raises(TransientError, match="No space left on device"):
            async_writer.settle(tmp_path)


def test_a_full_disk_gets_room_for_the_reason(tmp_path, monkeypatch):
    pwrite = os.pwrite

    def full(lock: int, data: bytes, at: int) -> int:
        if (tmp_path / ".snapshot").exists():
            raise OSError(28, "No space left on device")
        return pwrite(lock, data, at)

    def write(target: Path) -> None:
        target.mkdir()
        (target / "half").write_bytes(b"x" * 1000)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    async_writer.begin(tmp_path, write).join(30)
    with pytest.raises(TransientError, match="No space left on device"):
        async_writer.settle(tmp_path)


def test_nobody_waits_for_a_process_that_was_killed(tmp_path):
    command = [sys.executable, "-c", _ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PROJECT, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            with pytest.raises(TransientError, match="time was up"):  # it lives
                async_writer.settle(tmp_path, time.monotonic() + 0.2)
        finally:
            process.kill()
    with pytest.raises(TransientError, match="process that wrote it has ended"):
        async_writer.settle(tmp_path, time.monotonic() + 30)


def test_a_wait_can_be_cancelled(tmp_path):
    go, cancelled = Event(), Event()
    writer = async_writer.begin(tmp_path, lambda target: go.wait(30) and target.mkdir())
    threading.Timer(0.1, cancelled.set).start()
    with pytest.raises(CancelledError):
        async_writer.settle(tmp_path, cancelled=cancelled)
    go.set()
    writer.join(30)


def test_a_snapshot_that_is_made_between_two_looks_is_not_taken_for_lost(tmp_path, monkeypatch):
    ended = async_writer._ended

    def late(file: Path) -> tuple[bool, str]:
        async_writer.begin(tmp_path, Path.mkdir).join(30)
        return ended(file)

    monkeypatch.setattr(async_writer, "_ended", late)
    async_writer.settle(tmp_path)


def test_where_none_was_begun_there_is_nothing_to_wait_for(tmp_path):
    with pytest.raises(FileNotFoundError):
        async_writer.settle(tmp_path)


def test_an_attempt_that_is_swept_while_it_is_written_troubles_nobody(tmp_path, monkeypatch):
    troubled: list[object] = []
    monkeypatch.setattr(threading, "excepthook", troubled.append)
    go, directory = Event(), tmp_path / "attempt"
    directory.mkdir()

    def write(target: Path) -> None:
        assert go.wait(30)
        target.mkdir()

    writer = async_writer.begin(directory, write)
    shutil.rmtree(directory)
    go.set()
    writer.join(30)
    assert not troubled and not directory.exists()


# What is uploaded, and built upon


def test_an_upload_waits_for_it(tmp_path):
    storage, attempt, go = Storage(str(tmp_path / "storage")), _attempt(tmp_path), Event()
    begun = _begun(storage, attempt, go)
    assert [file.writing for file in begun.files] == [True]
    threading.Timer(0.2, go.set).start()
    (file,) = snapshot.upload(storage, attempt, begun, None).files
    assert go.is_set()
    assert file.bytes == (attempt.directory / "snapshot" / FILE).stat().st_size, "of the file, not the estimate"


def test_the_next_fork_waits_for_it(tmp_path):
    storage, attempt, go = Storage(str(tmp_path / "storage")), _attempt(tmp_path), Event()
    begun = _begun(storage, attempt, go)
    threading.Timer(0.2, go.set).start()
    second = Attempt("counts", 0, Generation(1), CheckpointId(2), new_attempt_id(), attempt.home)
    forked = snapshot.working_copy(storage, second, begun, None, MEMORY.is_immutable)
    assert go.is_set()
    assert dict(MEMORY.open(forked.db, OPTIONS).scan(*EVERYTHING)) == {b"a": b"1", b"b": b"2"}


def _begun(storage: Storage, attempt: Attempt, go: Event) -> LocalSnapshot:
    """A snapshot of two entries that is written when `go` is set."""
    backend = MemoryBackend()
    backend.write([(b"a", b"1"), (b"b", b"2")])
    forked = snapshot.working_copy(storage, _attempt(attempt.home.parent.parent), None)
    return snapshot.begin(attempt, forked, _Slow(backend, go), MEMORY.is_immutable)


def test_a_base_whose_writer_is_gone_is_left_to_storage(tmp_path):
    storage, attempt = Storage(str(tmp_path / "storage")), _attempt(tmp_path)
    async_writer.begin(attempt.directory, lambda target: target / 0).join(30)
    base = LocalSnapshot(0, attempt.id, (LocalFile(FILE, 10, None, False, writing=True),))
    second = Attempt("counts", 0, Generation(1), CheckpointId(2), new_attempt_id(), attempt.home)
    with pytest.raises(LocalBaseError):
        snapshot.working_copy(storage, second, base, None, MEMORY.is_immutable)
    with pytest.raises(TransientError, match="TypeError"):
        snapshot.upload(storage, attempt, base, None)


@pytest.mark.parametrize(
    ("files", "immutable", "message"), [(("other",), True, "wrote"), ((FILE,), False, "changed in place")]
)
def test_a_backend_that_breaks_the_contract_is_named(tmp_path, files, immutable, message):
    storage, attempt = Storage(str(tmp_path / "storage")), _attempt(tmp_path)
    backend = MemoryBackend()
    backend.write([(b"a", b"1")])
    frozen = _Slow(backend, None, files)
    forked = snapshot.working_copy(storage, _attempt(tmp_path), None)
    with pytest.raises((PipelineError, TransientError), match=message) as raised:
        begun = snapshot.begin(attempt, forked, frozen, lambda _: immutable)
        snapshot.upload(storage, attempt, begun, None)
    assert "_Slow breaks its contract" in str(raised.value)


class _Slow:
    """A frozen state that is written when somebody says so."""

    def __init__(self, backend: MemoryBackend, go: Event | None, files: tuple[str, ...] = (FILE,)) -> None:
        self._frozen, self._go, self.files = backend.freeze(), go, files
        self.file_bytes = self.memory_bytes = 1

    def write(self, target: Path) -> list[Path]:
        assert self._go is None or self._go.wait(30)
        return self._frozen.write(target)

    def reopen(self, options: BackendOptions) -> MemoryBackend:
        return self._frozen.reopen(options)


# What is frozen


def test_what_is_written_after_the_barrier_is_not_in_the_snapshot_nor_in_another_thaw(tmp_path):
    backend = MemoryBackend()
    backend.write([(b"a", b"1"), (b"b", b"2"), (b"c", b"3")])
    frozen = backend.freeze()
    backend.close()
    first, second, third = (frozen.reopen(OPTIONS) for _ in range(3))
    before = {b"a": b"1", b"b": b"2", b"c": b"3"}
    first.write([(b"f", b"6")])
    assert dict(third.scan(*EVERYTHING)) == before
    first.write([], [b"f"])
    first.write([(b"a", b"x"), (b"d", b"4")], [b"b"])
    first.write([(b"e", b"5")])
    second.keep_only(b"b", b"c")
    second.write([(b"z", b"9")])
    assert dict(first.scan(*EVERYTHING)) == {b"a": b"x", b"c": b"3", b"d": b"4", b"e": b"5"}
    assert dict(second.scan(*EVERYTHING)) == {b"b": b"2", b"z": b"9"}
    assert dict(third.scan(*EVERYTHING)) == before and not third.written
    frozen.write(tmp_path / "snapshot")
    assert dict(MEMORY.open(tmp_path / "snapshot", OPTIONS).scan(*EVERYTHING)) == before


def test_a_state_that_goes_on_without_its_files_is_still_a_sorted_map():
    chance = random.Random(3)
    model: dict[bytes, bytes] = {}
    backend = MemoryBackend()
    for _ in range(60):
        for _ in range(3):
            puts = [(bytes([chance.randrange(40)]), bytes([chance.randrange(256)])) for _ in range(5)]
            gone = [bytes([chance.randrange(40)]) for _ in range(4)]
            model = {key: value for key, value in model.items() if key not in gone} | dict(puts)
            backend.write(puts, gone)
            if chance.random() < 0.5:
                assert list(backend.scan(*EVERYTHING)) == sorted(model.items())
        backend = backend.freeze().reopen(OPTIONS)
        assert list(backend.scan(b"\x05", b"\x20")) == sorted(
            (key, value) for key, value in model.items() if b"\x05" <= key < b"\x20"
        )
        assert backend.approximate_entries() == len(model)


def test_the_limit_of_memory_holds_from_epoch_to_epoch():
    limited = BackendOptions(max_state_size_mb=100 / (1 << 20))
    backend = MemoryBackend(None, 100, "stage counts")
    backend.write([(b"a", b"x" * 59)])
    frozen = backend.freeze()
    assert frozen.file_bytes == 60
    thawed = frozen.reopen(limited)
    with pytest.raises(StateSizeError):
        thawed.write([(b"b", b"x" * 40)])
    assert list(thawed.scan(*EVERYTHING)) == [(b"a", b"x" * 59)]
    thawed.write([(b"b", b"x" * 39)])
    with pytest.raises(StateSizeError):
        thawed.freeze().reopen(limited).write([(b"c", b"")])


@pytest.mark.parametrize("entries", [0, 1, 1000, 50_000])
def test_the_size_of_what_is_held_is_about_right(entries):
    backend = MemoryBackend()
    keys = [number.to_bytes(8, "big") for number in range(entries)]
    values = [b"x" * (number % 100) for number in range(entries)]
    backend.write(SortedRun(keys, values))
    frozen = backend.freeze()
    really = sum(map(len, keys)) + sum(map(len, values))
    assert really * 0.9 <= frozen.file_bytes <= really * 1.1
    objects = sys.getsizeof(frozen.entries) + sum(map(sys.getsizeof, keys)) + sum(map(sys.getsizeof, values))
    assert objects * 0.8 - 300 <= frozen.memory_bytes <= objects * 1.4 + 300
