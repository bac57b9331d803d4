"""A disk fills up: the error names it, its path and what is free, wherever it is met; nothing is lost, and room lets
the pipeline go on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from state_ops.errors import TransientError
from state_ops.storage import disks
from tests.recovery.small import Bank

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
