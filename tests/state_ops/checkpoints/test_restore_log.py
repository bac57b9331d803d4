"""The record of restores: bounded, however many there are, and no row is lost to a compaction beside it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from state_ops.checkpoints import restore_log
from state_ops.delta import fenced_table, log_cleanup
from state_ops.delta.log_entries import active_files
from state_ops.ids import CheckpointId
from state_ops.records.restores import Restored
from state_ops.storage.paths import RESTORES
from state_ops.storage.storage import Storage

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def restored(number: int) -> Restored:
    when = BEGAN + timedelta(seconds=number)
    return Restored(CheckpointId(number), f"{number:032x}", "restore", True, None, 1, 1, restored_at=when)


@pytest.fixture
def storage(tmp_path, monkeypatch) -> Storage:
    monkeypatch.setattr(restore_log, "FILES", 5)
    monkeypatch.setattr(restore_log, "KEPT", 12)
    return Storage(str(tmp_path))


def objects(storage: Storage) -> list[str]:
    return [file.path for file in storage.list(RESTORES)]


@pytest.mark.long
def test_a_thousand_restores_leave_as_much_as_a_few(storage):
    for number in range(40):
        restore_log.record(storage, restored(number))
        newest = restore_log.newest(storage)
        assert newest is not None and newest.checkpoint_id == number
    most = len(objects(storage))
    for number in range(40, 80):
        restore_log.record(storage, restored(number))
        assert len(objects(storage)) <= most
    numbers = [int(row.checkpoint_id) for row in restore_log.recorded(storage)]
    assert numbers == list(range(numbers[0], 80)) and len(numbers) >= 12, "the newest, in order"
    named = {f"{RESTORES}/{file.path}" for file in active_files(fenced_table.open_table(storage, RESTORES))}
    assert {path for path in objects(storage) if path.endswith(".parquet") and "_delta_log" not in path} == named


@pytest.mark.long
def test_of_many_files_that_an_earlier_release_has_left_only_the_newest_are_read(storage, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(restore_log, "FILES", 100)
        for number in range(40):
            restore_log.record(storage, restored(number))
    read, reading = list[str](), Storage.read_bytes

    def counted(self, path):
        read.extend([path] if path.endswith(".parquet") else [])
        return reading(self, path)

    monkeypatch.setattr(Storage, "read_bytes", counted)
    restore_log.record(storage, restored(40))
    assert len(read) == restore_log.KEPT
    assert [int(row.checkpoint_id) for row in restore_log.recorded(storage)] == list(range(29, 41))


def test_a_row_that_is_appended_beside_a_compaction_stays(storage, monkeypatch):
    for number in range(5):
        restore_log.record(storage, restored(number))
    read = restore_log._in_order

    def read_while_another_is_recorded(storage, files):
        rows = read(storage, files)
        row = pa.Table.from_pylist([{**vars_of(restored(99))}], schema=restore_log.SCHEMA)
        write_deltalake(storage.full(RESTORES), row, mode="append")
        return rows

    monkeypatch.setattr(restore_log, "_in_order", read_while_another_is_recorded)
    restore_log.record(storage, restored(5))
    monkeypatch.setattr(restore_log, "_in_order", read)
    assert [int(row.checkpoint_id) for row in restore_log.recorded(storage)] == [0, 1, 2, 3, 4, 5, 99]


def vars_of(row: Restored) -> dict[str, object]:
    return {name: getattr(row, name) for name in restore_log.SCHEMA.names}


def test_who_reads_an_older_version_gets_the_rows_that_are_left(storage):
    for number in range(5):
        restore_log.record(storage, restored(number))
    older = active_files(fenced_table.open_table(storage, RESTORES))
    restore_log.record(storage, restored(5))
    assert restore_log._in_order(storage, older) == []
    assert log_cleanup.log_names(storage, RESTORES)


def test_restores_are_recorded_below_a_path_with_brackets(storage, tmp_path):
    """delta-rs' own writer ends with a panic there."""
    storage = Storage(str(tmp_path / "a[1]" / "p"))
    for number in range(8):
        restore_log.record(storage, restored(number))
    assert [int(row.checkpoint_id) for row in restore_log.recorded(storage)] == list(range(8))
