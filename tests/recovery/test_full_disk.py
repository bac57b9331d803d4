"""A disk fills up: the error names it, its path and what is free, wherever it is met; nothing is lost, and room lets
the pipeline go on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import DiskFullError, TransientError
from state_ops.records.acks import Ack
from state_ops.storage import disks
from tests.recovery.small import Bank
from weir.execution import direct_read
from weir.execution.executor import Deadline, InputRows
from weir.execution.external_sort import in_order
from weir.execution.in_process import InMemoryExecutor
from weir.task import run_task
from weir.task.run_task import KeyedTask

BYTES = 4 << 20


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of its own, of 4 MiB."""
    at = tmp_path / "small disk"
    at.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={BYTES}", "tmpfs", str(at)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a disk that can be full needs mount: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill(disk: Path) -> Path:
    """To the last byte, by somebody else."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


@pytest.mark.parametrize("setting", ["storage.root", "local.work_dir"])
def test_a_run_names_the_disk_that_is_full_with_path_and_bytes_free(tmp_path, small_disk, setting, weir):
    variable = f"WEIR_{setting.replace('.', '__').upper()}"
    bank = Bank.at(tmp_path / "site", **{variable: str(small_disk / "place")})
    bank.epochs(1)
    filler = fill(small_disk)
    with pytest.raises(TransientError) as raised:
        bank.epochs(2)
    message = str(raised.value)
    assert f"the disk {small_disk} of {small_disk / 'place'}" in message
    assert f"0 bytes free of {BYTES:,}" in message and f"({setting})" in message
    assert "docs/playbooks/disk-full.md" in message
    filler.unlink()
    bank.epochs()
    assert bank.ids() == [2] or bank.ids() == [3]


def test_what_is_not_there_because_the_disk_is_full_names_the_disk(small_disk):
    """A library that could not write a file may only say that it cannot find it."""
    fill(small_disk)
    hidden = FileNotFoundError(2, "No such file or directory", str(small_disk / "state" / "000012.sst"))
    assert f"the disk {small_disk} of " in disks.full(hidden, {"local.work_dir": small_disk / "work"})
    assert disks.full(hidden, {"local.work_dir": small_disk.parent}) is None, "another disk has room"


def test_an_error_says_which_disk_it_means_though_room_was_made_since(small_disk):
    cause = OSError(28, "No space left on device", str(small_disk / "x"))
    wrapped = TransientError("A snapshot was not written.")
    wrapped.__cause__ = cause
    assert f"the disk {small_disk} of {small_disk / 'x'}" in disks.full(wrapped, {"storage.root": "/"})
    assert disks.full(OSError("something else"), {"local.work_dir": small_disk}) is None
    assert disks.full(OSError(28, "full"), {"storage.root": "s3://bucket/prefix"}) is None, "that is no disk"


class Sorting(InMemoryExecutor):
    """Its subtasks read and sort their rows by themselves, as those on Spark do, on their local disk."""

    def run(
        self,
        task: KeyedTask,
        rows: InputRows | None,
        columns: pa.Schema,  # noqa: ARG002 - they are in the rows
        deadline: Deadline,  # noqa: ARG002
    ) -> list[Ack]:
        assert rows is not None
        layout = (task.parallelism, task.max_parallelism, 65_536, task.work_dir)
        acks = [
            run_task.run(task, subtask, direct_read.own_batches(task.stage, rows, subtask, *layout))
            for subtask in range(task.parallelism)
        ]
        return [Ack.from_json(ack.to_json()) for ack in acks]


def test_rows_that_do_not_fit_while_they_are_sorted_name_the_disk_as_it_was_then(tmp_path, small_disk, monkeypatch):
    """What is sorted goes with the error, so that nobody could tell afterwards which disk was full."""
    monkeypatch.setattr(direct_read, "in_order", partial(in_order, most_bytes=1 << 20))
    bank = Bank.at(tmp_path / "site", WEIR_LOCAL__WORK_DIR=str(small_disk / "work"))
    bank.site.landing.mkdir(parents=True)
    count = 300_000
    rows = pa.table({"id": ["k"] * count, "at": list(range(count)), "amount": [1] * count})
    pq.write_table(rows, bank.site.landing / "00001.parquet")
    with pytest.raises(DiskFullError) as raised:
        bank.epochs(executor=Sorting())
    where = str(raised.value.where)
    assert where.count("the disk ") == 1 and "stage accounts" in where, where
    assert f"the disk {small_disk} of {small_disk / 'work'}" in where
    assert f"has 0 bytes free of {BYTES:,} (local.work_dir)" in where
    assert "docs/playbooks/disk-full.md" in str(raised.value.next)
    assert not list((small_disk / "work").rglob("*.arrow")), "it leaves nothing behind"
    assert bank.ids() == []
    monkeypatch.undo()
    bank.epochs(executor=Sorting())
    assert bank.state() == {"k": (count, count)}
