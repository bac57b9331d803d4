"""Snapshots on a disk without hard links: files are copied, and objects are told apart as elsewhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.snapshots import snapshot
from state_ops.snapshots.object_cache import ObjectCache
from state_ops.storage import disks
from tests.state_ops.snapshots.test_snapshot import Subtask, entries, tables


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS], ids=lambda number: errno.errorcode[number])
def subtask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Subtask:
    def refused(source: object, target: object, **_: object) -> None:
        raise OSError(request.param, os.strerror(request.param), str(source), None, str(target))

    monkeypatch.setattr(os, "link", refused)  # FAT and its like cannot be mounted by everybody
    monkeypatch.setattr(disks, "_links", {})
    return Subtask(tmp_path)


def test_epochs_follow_each_other_and_only_new_tables_are_uploaded(subtask):
    first = subtask.epoch(1, None, entries(1))
    second = subtask.epoch(2, first, entries(2))
    third = subtask.epoch(3, second, entries(1, value=b"new"))
    assert tables(first).items() <= tables(second).items() <= tables(third).items()
    assert [len(tables(of)) for of in (first, second, third)] == [1, 2, 3]
    assert subtask.read(first) == entries(1)
    assert subtask.read(third) == entries(2) | entries(1, value=b"new")
    subtask.forget_local()
    assert subtask.read(third) == entries(2) | entries(1, value=b"new")


def test_a_run_that_is_written_as_a_file_is_taken_in(subtask):
    many = entries(*range(20_000))
    attempt = subtask.attempt(1)
    backend = RocksDBBackend(snapshot.working_copy(subtask.storage, attempt, None).db, 16, shard_mb=0.1)
    backend.write(sorted(many.items()))
    files = snapshot.take(attempt, backend)
    assert dict(backend.scan(b"", b"\xff" * 9)) == many
    backend.close()
    assert len(files) > 3
    again = RocksDBBackend(files[0].parent, 16)
    assert dict(again.scan(b"", b"\xff" * 9)) == many
    again.close()


def test_a_host_keeps_objects_that_it_has_fetched(subtask, tmp_path):
    base = subtask.epoch(1, None, entries(1))
    objects = ObjectCache(tmp_path / "objects", 1 << 20)
    assert snapshot.fetch(subtask.storage, base, _new(tmp_path / "a"), objects=objects).stored
    assert snapshot.fetch(subtask.storage, base, _new(tmp_path / "b"), objects=objects).cached
    (table,) = tables(base)
    assert (tmp_path / "a" / table).read_bytes() == (tmp_path / "b" / table).read_bytes()


def _new(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_a_copy_that_breaks_off_leaves_nothing_and_no_file_is_overwritten(subtask, tmp_path):
    with pytest.raises(FileNotFoundError):
        disks.link(tmp_path / "absent", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
    with pytest.raises(FileExistsError):
        disks.link(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "other").read_text() == "other"


def test_the_disk_is_asked_once(subtask, tmp_path):
    assert not disks.has_links(tmp_path)
    assert list(disks._links.values()) == [False]
