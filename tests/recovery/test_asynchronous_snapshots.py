"""Epochs whose snapshots are written after the barrier: built upon before they are written, lost, and never trusted too
early."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from state_ops.backends.base import Frozen
from state_ops.backends.memory import FILE, MemoryBackend
from state_ops.errors import TransientError
from state_ops.ids import AttemptId
from state_ops.records.snapshot_files import STATE, LocalSnapshot, Snapshot
from state_ops.snapshots import async_writer, snapshot
from tests.recovery.small import Apart, Bank
from tests.state_ops import dying
from weir.run.run import RunOptions, run
from weir.settings.configuration import PROJECT
from weir.task import run_task, worker_cache
from weir.task.async_snapshot import AsyncSnapshot

ASYNCHRONOUS = {"WEIR_STATE__ASYNCHRONOUS_SNAPSHOTS": "true", "WEIR_SPARK__PARALLELISM": "1"}


@pytest.fixture(params=["filesystem", "memory"])
def bank(request, tmp_path) -> Bank:
    return bank_on(tmp_path, request.param)


def bank_on(root: Path, backend: str, **options: str) -> Bank:
    return Bank.at(root / "bank", WEIR_STATE__BACKEND=backend, **ASYNCHRONOUS, **options)


@pytest.fixture
def begun(monkeypatch) -> list[str]:
    """The attempts whose snapshots have been begun after their barrier."""
    real, directories = async_writer.begin, list[str]()

    def begin(directory, write):
        directories.append(directory.name)
        return real(directory, write)

    monkeypatch.setattr(async_writer, "begin", begin)
    return directories


def test_the_next_epoch_is_built_on_a_state_that_is_not_written_yet(bank, monkeypatch):
    """The first snapshot that is written after its barrier is written when the next epoch has done its work on it."""
    built, waited, held = Event(), list[bool](), list[int]()
    real, runs = async_writer.begin, run_task.run

    def begin(directory, write):
        first = not held
        held.append(_epoch(directory.name))

        def late(target):
            if first:
                waited.append(built.wait(30))
            write(target)

        return real(directory, late)

    def working(task, subtask, batches):
        ack = runs(task, subtask, batches)
        if held and task.epoch == held[0] + 1:
            built.set()
        return ack

    monkeypatch.setattr(async_writer, "begin", begin)
    monkeypatch.setattr(run_task, "run", working)
    bank.epochs(*range(1, 7))
    assert waited == [True]
    bank.assert_exact(*range(1, 7))


def test_who_has_no_share_in_its_memory_reads_the_files_instead(bank, begun, monkeypatch):
    """As a worker process that did not run the epoch before."""
    with monkeypatch.context() as patch:
        patch.setattr(worker_cache, "claim", lambda *_: None)
        bank.epochs(*range(1, 7))
    assert len(begun) >= 3
    shutil.rmtree(bank.site.root / "work")
    bank.epochs(7)
    bank.assert_exact(*range(1, 8))


def test_a_run_begins_at_the_barrier_and_goes_on_after_it_once_an_epoch_is_confirmed(bank, begun):
    """Else an epoch that ends its worker could keep the one before it from ever being confirmed, run after run."""
    for number in (1, 2):
        bank.epochs(number)
        assert not begun
    bank.epochs(*range(3, 9))
    assert begun and not any("-e3-" in name for name in begun)
    bank.assert_exact(*range(1, 9))


def test_state_in_memory_is_opened_without_its_files(bank, monkeypatch):
    opened: list[bool] = []
    real = snapshot.working_copy

    def fork(*given, read=True, **options):
        opened.append(read)
        return real(*given, read=read, **options)

    monkeypatch.setattr(snapshot, "working_copy", fork)
    bank.epochs(*range(1, 8))
    assert opened == sorted(opened, reverse=True), "from the second one on that is kept in memory"
    assert opened[:2] == [True, True] and opened[-2:] == [False, False]
    bank.assert_exact(*range(1, 8))


def test_only_who_builds_on_it_gets_a_state_and_only_with_the_same_backend():
    backend, attempt = MemoryBackend(), AttemptId("one")
    backend.write([(b"a", b"1")])
    base = LocalSnapshot(0, attempt, ())

    def freezer(asynchronous: bool = True, name: str = "memory") -> AsyncSnapshot:
        return AsyncSnapshot(asynchronous, name, "only-who-builds-on-it", 0, 1 << 20)

    def kept() -> Frozen:
        keeping = freezer()
        frozen = keeping.freeze(backend)
        assert frozen is not None
        keeping.keep(attempt)
        return frozen

    frozen = kept()
    assert freezer().claim(base) is frozen
    assert freezer().claim(base) is None, "it is somebody's by now"
    kept()
    assert freezer(name="filesystem").claim(base) is None, "another backend, another limit"
    kept()
    assert freezer(asynchronous=False).claim(base) is None
    assert freezer().claim(Snapshot(0, attempt, (), rescaled=True)) is None
    assert freezer().claim(LocalSnapshot(0, AttemptId("another"), ())) is None
    assert freezer(asynchronous=False).freeze(backend) is None


def test_one_that_is_lost_declines_its_epoch_and_what_was_built_on_it_and_is_written_at_the_barrier(
    tmp_path, begun, monkeypatch
):
    bank = bank_on(tmp_path, "filesystem", WEIR_CHECKPOINTS__TOLERABLE_FAILURES="3")
    real, lost = async_writer.begin, list[int]()

    def begin(directory, write):
        def half(target):
            target.mkdir()
            (target / FILE).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")

        if lost:
            return real(directory, write)
        lost.append(_epoch(directory.name))
        return real(directory, half)

    monkeypatch.setattr(async_writer, "begin", begin)
    reports = bank.epochs(*range(1, 8))
    bank.assert_exact(*range(1, 8))
    again = next(report.checkpoint.id for report in reports if report.checkpoint.id > lost[0])
    ids = [_epoch(name) for name in begun]
    assert lost[0] in ids and lost[0] not in [report.checkpoint.id for report in reports]
    assert again not in ids, "after a failure at the barrier"
    assert ids[-1] > again, "and then after it again"
    bank.site.assert_no_orphans()


def test_without_tolerance_the_run_says_what_was_lost(bank, monkeypatch):
    real = async_writer.begin

    def begin(directory, write):
        def lost(target):
            raise OSError(28, "No space left on device")

        return real(directory, lost)

    monkeypatch.setattr(async_writer, "begin", begin)
    with pytest.raises(TransientError, match=r"not written after its barrier: OSError.*No space left"):
        bank.epochs(*range(1, 6))
    monkeypatch.setattr(async_writer, "begin", real)
    bank.epochs(6)
    bank.assert_exact(*range(1, 7))


def test_a_state_that_takes_more_than_it_may_is_written_at_the_barrier(bank, begun, monkeypatch):
    bank.epochs(*range(1, 6))
    assert (before := len(begun)) > 0
    monkeypatch.setattr("state_ops.backends.memory._OBJECT_BYTES", 300 << 20)
    bank.epochs(*range(6, 11))
    bank.assert_exact(*range(1, 11))
    assert len(begun) == before


def test_off_nothing_is_written_after_the_barrier_nor_kept(bank, begun, monkeypatch):
    kept: list[object] = []
    monkeypatch.setattr(worker_cache, "keep", lambda *given: kept.append(given))
    plain = Bank.at(bank.site.root, WEIR_STATE__BACKEND=_backend(bank))
    plain.epochs(*range(1, 6))
    plain.assert_exact(*range(1, 6))
    assert not begun and not kept


def test_a_worker_that_does_not_share_the_disk_writes_at_the_barrier(bank, begun):
    bank.epochs(*range(1, 6), executor=Apart())
    bank.assert_exact(*range(1, 6))
    assert not begun


# Runs the next epochs of a bank, and dies while the first snapshot is written.
_DOOMED = """
import os, signal, sys
from pathlib import Path
from state_ops.snapshots import async_writer as writing
from tests.recovery.small import Bank

real = writing.begin

def begin(directory, write):
    def doomed(target):
        target.mkdir()
        os.kill(os.getpid(), signal.SIGKILL)

    return real(directory, doomed)

writing.begin = begin
options = dict(option.split("=") for option in sys.argv[2:])
Bank.at(Path(sys.argv[1]), **options).epochs(*range(2, 8))
"""


def test_a_run_that_is_killed_while_it_writes_goes_on(tmp_path):
    options = {"WEIR_LEASE__HEARTBEAT_SECONDS": "0.5"}
    bank = bank_on(tmp_path, "filesystem", **options)
    bank.epochs(1)
    arguments = [
        f"{name}={value}" for name, value in (ASYNCHRONOUS | options | {"WEIR_STATE__BACKEND": "filesystem"}).items()
    ]
    env = os.environ | {"PYTHONPATH": str(PROJECT)}
    doomed = subprocess.run([sys.executable, "-c", _DOOMED, bank.site.root, *arguments], env=env, check=False)
    assert doomed.returncode == -signal.SIGKILL
    assert 2 <= bank.registry.head().id < 7
    bank.epochs()
    bank.assert_exact(*range(1, 8))
    bank.site.assert_no_orphans()


@pytest.mark.long
def test_on_spark_a_worker_that_dies_while_it_writes_costs_the_epoch_and_nothing_else(tmp_path, spark):
    mark = tmp_path / "died"
    options = {"WEIR_STATE__OPTIONS__MARK": str(mark), "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "3"}
    bank = bank_on(tmp_path, dying.NAME, **options)
    bank.land(*range(1, 8))
    reports = list(run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True)))
    assert mark.exists()
    assert reports[-1].checkpoint.id > 7, "one was declined, and played again"
    bank.assert_exact(*range(1, 8))
    bank.site.assert_no_orphans()
    (file,) = [file for file in bank.registry.files(bank.registry.head()) if file.kind == STATE]
    assert file.name == FILE


def _backend(bank: Bank) -> str:
    return str(bank.site.settings.state.backend)


def _epoch(directory: str) -> int:
    """Of an attempt, from its directory's name."""
    return int(directory.split("-")[1].removeprefix("e"))
