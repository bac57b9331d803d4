"""Epochs whose snapshots are written after the barrier: built upon before they are written, lost, and never trusted too early."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from configs.settings import PROJECT
from pipelines.runtime import keyed_stage
from pipelines.runtime.run import RunOptions, run
from state_ops import snapshot, warm, writing
from state_ops.backends.memory import FILE
from state_ops.checkpoint import STATE
from state_ops.errors import TransientError
from tests.recovery.small import Apart, Bank
from tests.state_ops import dying

ASYNCHRONOUS = {"WEIR_STATE__ASYNCHRONOUS_SNAPSHOTS": "true", "WEIR_SPARK__PARALLELISM": "1"}


@pytest.fixture(params=["filesystem", "memory"])
def bank(request, tmp_path) -> Bank:
    return bank_on(tmp_path, request.param)


def bank_on(root: Path, backend: str, **options: str) -> Bank:
    return Bank.at(root / "bank", WEIR_STATE__BACKEND=backend, **ASYNCHRONOUS, **options)


@pytest.fixture
def begun(monkeypatch) -> list[str]:
    """The attempts whose snapshots have been begun after their barrier."""
    real, found = writing.begin, list[str]()

    def begin(directory, write):
        found.append(directory.name)
        return real(directory, write)

    monkeypatch.setattr(writing, "begin", begin)
    return found


def test_the_next_epoch_is_built_on_a_state_that_is_not_written_yet(bank, monkeypatch):
    """The first snapshot is written when the second epoch has done its work on it."""
    built, waited = Event(), list[bool]()
    real, runs = writing.begin, keyed_stage.run

    def begin(directory, write):
        def late(target):
            if "-e1-" in directory.name:
                waited.append(built.wait(30))
            write(target)

        return real(directory, late)

    def working(task, subtask, batches):
        ack = runs(task, subtask, batches)
        if task.epoch == 2:
            built.set()
        return ack

    monkeypatch.setattr(writing, "begin", begin)
    monkeypatch.setattr(keyed_stage, "run", working)
    bank.epochs(1, 2, 3)
    assert waited == [True]
    bank.assert_exact(1, 2, 3)


def test_who_has_no_share_in_its_memory_reads_the_files_instead(bank, begun, monkeypatch):
    """As a worker process that did not run the epoch before."""
    with monkeypatch.context() as patch:
        patch.setattr(warm, "claim", lambda *_: None)
        bank.epochs(1, 2, 3)
    shutil.rmtree(bank.site.root / "work")
    bank.epochs(4)
    bank.assert_exact(1, 2, 3, 4)
    assert len(begun) == 4


def test_state_in_memory_is_opened_without_its_files_and_only_by_who_builds_on_it(bank, begun, monkeypatch):
    opened: list[bool] = []
    real = snapshot.fork

    def fork(*given, read=True, **options):
        opened.append(read)
        return real(*given, read=read, **options)

    monkeypatch.setattr(snapshot, "fork", fork)
    bank.epochs(1, 2)
    assert opened == [True, False]
    bank.epochs(3)
    assert opened == [True, False, False], "in another run of the same process"
    bank.assert_exact(1, 2, 3)
    other = bank_on(bank.site.root.parent, "memory" if _backend(bank) == "filesystem" else "filesystem")
    del opened[:]
    other.epochs(4)
    assert opened == [True], "another backend, another limit"
    other.assert_exact(1, 2, 3, 4)


def test_one_that_is_lost_declines_its_epoch_and_what_was_built_on_it_and_is_written_at_the_barrier(
    bank, begun, monkeypatch
):
    real = writing.begin

    def begin(directory, write):
        def lost(target):
            target.mkdir()
            (target / FILE).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")

        return real(directory, lost if "-e2-" in directory.name else write)

    bank.epochs(1)
    monkeypatch.setattr(writing, "begin", begin)
    tolerant = bank_on(bank.site.root.parent, _backend(bank), WEIR_CHECKPOINTS__TOLERABLE_FAILURES="3")
    reports = tolerant.epochs(2, 3)
    tolerant.assert_exact(1, 2, 3)
    again = reports[0].checkpoint.id
    assert again > 2
    assert [name for name in begun if f"-e{again}-" in name] == [], "after a failure at the barrier"
    tolerant.epochs(4)
    assert len(begun) > 2, "and then after it again"
    tolerant.assert_exact(1, 2, 3, 4)
    tolerant.site.assert_no_orphans()


def test_without_tolerance_the_run_says_what_was_lost(bank, monkeypatch):
    real = writing.begin

    def begin(directory, write):
        def lost(target):
            raise OSError(28, "No space left on device")

        return real(directory, lost)

    monkeypatch.setattr(writing, "begin", begin)
    with pytest.raises(TransientError, match=r"not written after its barrier: OSError.*No space left"):
        bank.epochs(1)
    monkeypatch.setattr(writing, "begin", real)
    bank.epochs(2)
    bank.assert_exact(1, 2)


def test_a_state_that_takes_more_than_it_may_is_written_at_the_barrier(bank, begun, monkeypatch):
    bank.epochs(1)
    assert len(begun) == 1
    monkeypatch.setattr("state_ops.backends.memory._OBJECT_BYTES", 300 << 20)
    bank.epochs(2)
    bank.assert_exact(1, 2)
    assert len(begun) == 1


def test_off_nothing_is_written_after_the_barrier_nor_kept(bank, begun, monkeypatch):
    kept: list[object] = []
    monkeypatch.setattr(warm, "keep", lambda *given: kept.append(given))
    plain = Bank.at(bank.site.root, WEIR_STATE__BACKEND=_backend(bank))
    plain.epochs(1, 2)
    plain.assert_exact(1, 2)
    assert not begun and not kept


def test_a_worker_that_does_not_share_the_disk_writes_at_the_barrier(bank, begun):
    bank.epochs(1, 2, executor=Apart())
    bank.assert_exact(1, 2)
    assert not begun


# Runs the next epochs of a bank, and dies while the first snapshot is written.
_DOOMED = """
import os, signal, sys
from pathlib import Path
from state_ops import writing
from tests.recovery.small import Bank

real = writing.begin

def begin(directory, write):
    def doomed(target):
        target.mkdir()
        os.kill(os.getpid(), signal.SIGKILL)

    return real(directory, doomed)

writing.begin = begin
options = dict(option.split("=") for option in sys.argv[2:])
Bank.at(Path(sys.argv[1]), **options).epochs(2, 3)
"""


def test_a_run_that_is_killed_while_it_writes_goes_on(tmp_path):
    options = {"WEIR_LEASE__HEARTBEAT_SECONDS": "0.5"}
    bank = bank_on(tmp_path, "filesystem", **options)
    bank.epochs(1)
    said = [
        f"{name}={value}" for name, value in (ASYNCHRONOUS | options | {"WEIR_STATE__BACKEND": "filesystem"}).items()
    ]
    env = os.environ | {"PYTHONPATH": str(PROJECT)}
    doomed = subprocess.run([sys.executable, "-c", _DOOMED, bank.site.root, *said], env=env, check=False)
    assert doomed.returncode == -signal.SIGKILL
    assert bank.registry.head().id == 1
    bank.epochs()
    bank.assert_exact(1, 2, 3)
    bank.site.assert_no_orphans()


def test_on_spark_a_worker_that_dies_while_it_writes_costs_the_epoch_and_nothing_else(tmp_path, spark):
    mark = tmp_path / "died"
    options = {"WEIR_STATE__OPTIONS__MARK": str(mark), "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "3"}
    bank = bank_on(tmp_path, dying.NAME, **options)
    bank.land(1, 2, 3)
    reports = list(run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True)))
    assert mark.exists()
    assert reports[0].checkpoint.id > 1, "the first one was declined"
    bank.assert_exact(1, 2, 3)
    bank.site.assert_no_orphans()
    (file,) = [file for file in bank.registry.files(bank.registry.head()) if file.kind == STATE]
    assert file.name == FILE


def _backend(bank: Bank) -> str:
    return str(bank.site.settings.state.backend)
