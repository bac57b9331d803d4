"""Runs, the sorted changes of a whole epoch: RocksDB keeps each as a file of its own, as long as nothing else is
written."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.backends import rocksdb
from state_ops.backends.base import Compression, SortedRun
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.ids import AttemptId, CheckpointId, Generation, new_attempt_id
from state_ops.records.snapshot_files import Snapshot
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.storage.storage import Storage

Entries = dict[bytes, bytes]
EVERYTHING = (b"", b"\xff" * 9)
SMALL = 0.05  # MiB: what makes a state of these tests large


@pytest.fixture(autouse=True)
def _any_run_is_large(monkeypatch):
    monkeypatch.setattr(rocksdb, "_FILE_ENTRIES", 1)


def run_of(entries: Entries, more: bool = False) -> SortedRun:
    keys = sorted(entries)
    return SortedRun(keys, [entries[key] for key in keys], more)


def some(number: int, seed: int, length: int = 40) -> Entries:
    pick = random.Random(seed)
    return {b"%07d" % pick.randrange(20 * number): pick.randbytes(length) for _ in range(number)}


def tables(path: Path) -> set[str]:
    return {file.name for file in path.iterdir() if rocksdb.is_table(file.name)}


class Subtask:
    """One subtask, epoch after epoch; `forget` loses the host."""

    def __init__(self, directory: Path, shard_mb: float = 64, compression: Compression = "lz4") -> None:
        self.compression = compression
        self.storage, self.home, self.shard_mb = (
            Storage(str(directory / "storage")),
            directory / "work" / "s" / "0",
            shard_mb,
        )
        self.base: Snapshot | None = None
        self.number = 0

    def epoch(self, *writes: tuple) -> Snapshot:
        self.number += 1
        attempt = Attempt("s", 0, Generation(1), CheckpointId(self.number), AttemptId(new_attempt_id()), self.home)
        forked = snapshot.working_copy(self.storage, attempt, self.base)
        backend = RocksDBBackend(forked.db, 16, self.shard_mb, self.compression)
        for write in writes:
            backend.write(*write)
        files = snapshot.take(attempt, backend)
        backend.close()
        self.base = snapshot.upload(self.storage, attempt, snapshot.prepare(attempt, forked, files), self.base)
        return self.base

    def entries(self, directory: Path) -> Entries:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        assert self.base is not None
        snapshot.fetch(self.storage, self.base, directory)
        backend = RocksDBBackend(directory, 16, self.shard_mb)
        stored = dict(backend.scan(*EVERYTHING))
        assert backend.multi_get(sorted(stored)) == [stored[key] for key in sorted(stored)]
        backend.close()
        return stored


def test_a_run_is_a_sequence_of_pairs():
    run = run_of({b"b": b"2", b"a": b"1", b"c": b"3"})
    assert list(run) == [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]
    assert dict(run) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    assert (len(run), run[1], list(run[1:])) == (3, (b"b", b"2"), [(b"b", b"2"), (b"c", b"3")])


@pytest.mark.parametrize("shard_mb", [64, SMALL])
def test_epochs_of_runs_leave_what_was_put_last_and_upload_only_what_changed(tmp_path, shard_mb):
    subtask, expected = Subtask(tmp_path, shard_mb), {}
    for number in range(20):
        changed = some(2000 if number == 0 else 300, seed=number)
        expected |= changed
        before = subtask.base
        taken = subtask.epoch((run_of(changed),))
        if number == 12:
            shutil.rmtree(subtask.home)
        if before is not None and number < 6 and shard_mb == 64:
            assert {file.name for file in before.files if rocksdb.is_table(file.name)} < {
                file.name for file in taken.files
            }
            assert [file.new for file in taken.files if rocksdb.is_table(file.name)].count(True) == 1
    assert subtask.entries(tmp_path / "restored") == expected


def test_a_run_and_what_follows_it_are_one_file(tmp_path):
    subtask = Subtask(tmp_path)
    subtask.epoch((run_of(some(500, seed=1)),))
    before = subtask.entries(tmp_path / "one")
    gone, fresh = sorted(before)[:5], some(20, seed=3)
    taken = subtask.epoch((run_of(some(500, seed=2)),), (list(fresh.items()), gone))
    assert [file.new for file in taken.files if rocksdb.is_table(file.name)].count(True) == 1
    expected = {**before, **some(500, seed=2)}
    assert subtask.entries(tmp_path / "two") == {k: v for k, v in expected.items() if k not in gone} | fresh


def test_a_run_overwrites_what_the_epoch_wrote_before_it(tmp_path):
    subtask = Subtask(tmp_path)
    subtask.epoch(([(b"a", b"old"), (b"b", b"old")], [b"c"]), (run_of({b"b": b"new", b"c": b"new"}),))
    assert subtask.entries(tmp_path / "restored") == {b"a": b"old", b"b": b"new", b"c": b"new"}


@pytest.mark.parametrize("shard_mb", [64, SMALL])
def test_a_run_with_deletes_is_one_file_of_each_shard_in_which_the_last_word_counts(tmp_path, shard_mb):
    subtask, expected = Subtask(tmp_path, shard_mb), {}
    for number in range(12):
        changed = some(2000 if number == 0 else 300, seed=number)
        pick = random.Random(number)
        gone = {*pick.sample(sorted(expected), min(200, len(expected))), *pick.sample(sorted(changed), 20)}
        gone |= {key + b"-absent" for key in pick.sample(sorted(changed), 20)} | {b"9", b"0"}
        expected = {key: value for key, value in expected.items() if key not in gone} | changed
        taken = subtask.epoch((run_of(changed), sorted(gone)))
        if number < 6 and shard_mb == 64:
            assert [file.new for file in taken.files if rocksdb.is_table(file.name)].count(True) == 1
    subtask.epoch((SortedRun([], []), sorted(expected)[::2]))
    assert subtask.entries(tmp_path / "restored") == {key: expected[key] for key in sorted(expected)[1::2]}


@pytest.mark.parametrize("shard_mb", [64, SMALL])
@pytest.mark.parametrize("disturbed", [False, True])
def test_runs_that_follow_each_other_are_one_file_of_each_shard_until_something_below_is_asked_for(
    tmp_path, shard_mb, disturbed
):
    expected = some(4000, seed=1)
    with closing(RocksDBBackend(tmp_path / "db", 16, shard_mb)) as backend:
        backend.write(run_of(expected))
        backend.snapshot(tmp_path / "base")
        changed = dict.fromkeys(sorted(expected)[::4][:900], b"new")
        ascending = list(changed)
        for at in range(0, 900, 100):
            part = ascending[at : at + 100]
            asked = [*part, ascending[0]] if disturbed and at == 500 else part
            written = expected | {key: changed[key] for key in ascending[:at]}
            assert backend.multi_get(asked) == [written.get(key) for key in asked]
            gone = [part[7] + b"-absent", part[50] + b"-absent"]
            backend.write(run_of({key: changed[key] for key in part}, at < len(ascending) - 100), gone)
        assert backend.approximate_entries() >= len(expected), "what is in files is counted"
        assert len(list(backend.path.glob("*.unfinished"))) == (0 if disturbed else len(backend._starts))
        backend.snapshot(tmp_path / "taken")
        if shard_mb == 64:  # else shards are merged as well
            assert len(tables(tmp_path / "taken") - tables(tmp_path / "base")) == 1 + disturbed
        assert dict(backend.scan(*EVERYTHING)) == expected | changed
        assert not list(backend.path.glob("*.unfinished"))


def test_a_run_within_one_that_was_to_be_below_it_has_the_last_word(tmp_path):
    with closing(RocksDBBackend(tmp_path / "db", 16)) as backend:
        backend.write(run_of({b"a": b"1", b"c": b"1"}, more=True))
        backend.write(run_of({b"b": b"2", b"c": b"2"}, more=True))
        backend.write(run_of({b"d": b"3"}))
        backend.snapshot(tmp_path / "taken")
        assert dict(backend.scan(*EVERYTHING)) == {b"a": b"1", b"b": b"2", b"c": b"2", b"d": b"3"}


def test_large_values_are_a_run_although_they_are_few(tmp_path, monkeypatch):
    monkeypatch.setattr(rocksdb, "_FILE_ENTRIES", 10_000)
    monkeypatch.setattr(rocksdb, "_FILE_BYTES", 50_000)
    for number, (length, is_file) in enumerate([(40, False), (1000, True)]):
        with closing(RocksDBBackend(tmp_path / str(number), 16)) as backend:
            backend.write(run_of(some(100, seed=1, length=length), more=True))
            assert bool(list(backend.path.glob("*.unfinished"))) == is_file


class Uncounted(SortedRun):
    """A run of which parts may be asked for, but not its entries one by one."""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        raise AssertionError("a run is cut by its order, not entry by entry")


def test_a_run_too_small_for_files_goes_to_its_shards_in_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(rocksdb, "_FILE_ENTRIES", 10_000)
    expected = some(4000, seed=1)
    with closing(RocksDBBackend(tmp_path / "db", 16, SMALL)) as backend:
        backend.write(list(expected.items()))
        backend.snapshot(tmp_path / "cut")
        starts = backend._starts
        assert len(starts) == 8
        changed = some(300, seed=2) | dict.fromkeys(starts[1:], b"first") | {start + b"!": b"" for start in starts}
        run = run_of(changed)
        backend.write(Uncounted(run.ascending, run.values))
        expected |= changed
        for start, end, shard in zip(starts, [*starts[1:], EVERYTHING[1]], backend._shards, strict=True):
            within = {key: value for key, value in expected.items() if start <= key < end}
            assert dict(rocksdb._scan(backend.path, shard, b"", None)) == within, "no shard has keys of another"
        assert list(backend.scan(*EVERYTHING)) == sorted(expected.items())


@settings(max_examples=25)
@given(data=st.data())
def test_whatever_is_read_and_written_around_runs_a_dict_says_the_same(tmp_path_factory, data):
    keys = st.binary(min_size=1, max_size=3)
    entries = st.dictionaries(keys, st.binary(max_size=5), min_size=1, max_size=8)
    expected: Entries = {}
    path = tmp_path_factory.mktemp("runs")
    with closing(RocksDBBackend(path, 16)) as backend:  # also where hypothesis gives an example up
        for step in data.draw(
            st.lists(st.sampled_from(["run", "more", "puts", "deletes", "get", "scan", "snapshot"]), max_size=12)
        ):
            if step in ("run", "more", "puts"):
                changed = data.draw(entries)
                backend.write(list(changed.items()) if step == "puts" else run_of(changed, step == "more"))
                expected |= changed
                assert backend.written
            elif step == "deletes":
                gone = data.draw(st.lists(keys, min_size=1, max_size=3))
                backend.write([], gone)
                expected = {key: value for key, value in expected.items() if key not in gone}
            elif step == "get":
                asked = data.draw(st.lists(keys)) + data.draw(st.sampled_from([[*expected, b"not there"], []]))
                assert backend.multi_get(asked) == [expected.get(key) for key in asked]
            elif step == "scan":
                assert list(backend.scan(b"", b"\xff" * 4)) == sorted(expected.items())
            else:
                backend.snapshot(path / f"snapshot{len(list(path.glob('snapshot*')))}")
        assert list(backend.scan(b"", b"\xff" * 4)) == sorted(expected.items())
