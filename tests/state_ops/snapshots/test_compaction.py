from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rocksdict import DBCompactionStyle, Options, Rdict, WriteBatch, WriteOptions

from state_ops.backends import compaction
from state_ops.backends.compaction import Shard
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.errors import DamageError, TransientError
from state_ops.ids import AttemptId, CheckpointId, Generation, new_attempt_id
from state_ops.records.snapshot_files import Snapshot
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.storage.storage import Storage

Entries = dict[bytes, bytes]

EVERYTHING = (b"", b"\xff" * 9)
SMALL = 0.05  # MiB: what makes a state of these tests large


class Subtask:
    """One subtask, epoch after epoch, as the keyed task drives it."""

    def __init__(self, directory: Path, shard_mb: float) -> None:
        self.storage = Storage(str(directory / "storage"))
        self.home = directory / "work" / "counts" / "0"
        self.shard_mb = shard_mb
        self.base: Snapshot | None = None
        self.number = 0

    def epoch(self, puts: Entries, deletes: Iterable[bytes] = ()) -> Snapshot:
        return self.changed(lambda backend: backend.write(list(puts.items()), list(deletes)))

    def changed(self, change: Callable[[RocksDBBackend], None]) -> Snapshot:
        self.number += 1
        attempt = self._attempt(self.number)
        forked = snapshot.working_copy(self.storage, attempt, self.base)
        backend = self._open(forked.db)
        try:
            change(backend)
            files = snapshot.take(attempt, backend)
        finally:
            backend.close()
        prepared = snapshot.prepare(attempt, forked, files)
        before, self.base = self.base, snapshot.upload(self.storage, attempt, prepared, self.base)
        for directory in self.home.glob(f"*-{before.attempt}" if before else "nothing"):
            shutil.rmtree(directory)
        return self.base

    def reopened(self, read):
        """What `read` makes of the state that the next epoch would find."""
        attempt = self._attempt(self.number + 1)
        forked = snapshot.working_copy(self.storage, attempt, self.base)
        backend = self._open(forked.db)
        try:
            return read(backend)
        finally:
            backend.close()
            shutil.rmtree(attempt.directory)

    def scan(self) -> list[tuple[bytes, bytes]]:
        return self.reopened(lambda backend: list(backend.scan(*EVERYTHING)))

    def starts(self) -> list[bytes]:
        def read(backend: RocksDBBackend) -> list[bytes]:
            return compaction.starts_of(Rdict.list_cf(str(backend.path), Options(raw_mode=True)), "")

        return self.reopened(read)

    def forget_local(self) -> None:
        shutil.rmtree(self.home)

    def _open(self, db: Path) -> RocksDBBackend:
        return RocksDBBackend(db, 16, self.shard_mb)

    def _attempt(self, epoch: int) -> Attempt:
        return Attempt("counts", 0, Generation(1), CheckpointId(epoch), AttemptId(new_attempt_id()), self.home)


@pytest.fixture
def subtask(tmp_path: Path) -> Subtask:
    return Subtask(tmp_path, SMALL)


def keys(number: int, seed: int = 0) -> list[bytes]:
    """Encoded keys as they are: 2 bytes of key group, then the key."""
    draw = random.Random(seed)
    return [draw.randrange(64).to_bytes(2, "big") + b"\x01" + draw.randbytes(8) for _ in range(number)]


def filled(some: Iterable[bytes], seed: int = 0) -> Entries:
    draw = random.Random(seed)
    return {key: draw.randbytes(64) for key in some}


def bytes_of(snapshot: Snapshot) -> int:
    return sum(file.bytes for file in snapshot.files)


def uploaded(snapshot: Snapshot) -> int:
    return sum(file.bytes for file in snapshot.files if file.new)


# -- shards


def test_a_small_state_stays_in_one_piece(subtask):
    first = subtask.epoch(filled(keys(100)))
    assert subtask.starts() == [b""]
    assert len([file for file in first.files if file.name.endswith(".sst")]) == 1


def test_a_state_above_the_threshold_is_cut_into_eight_even_pieces(subtask):
    state = filled(keys(4000))
    subtask.epoch(state)
    starts = subtask.starts()
    assert len(starts) == 8
    ends = [*starts[1:], b"\xff" * 9]
    for start, end in zip(starts, ends, strict=True):
        entries = subtask.reopened(lambda backend, start=start, end=end: list(backend.scan(start, end)))
        assert 400 < len(entries) < 600
        assert dict(entries) == {key: value for key, value in state.items() if start <= key < end}


def test_a_state_that_grows_is_cut_while_it_is_written_and_keeps_to_its_memory(tmp_path):
    state = {key: value * 6 for key, value in filled(keys(40_000)).items()}
    entries = list(state.items())
    backend = RocksDBBackend(tmp_path / "db", 16, shard_mb=0.5)
    try:
        for at in range(0, len(entries), 1000):
            backend.write(entries[at : at + 1000], [key for key, _ in entries[at - 1100 : at - 1000]])
        assert len(Rdict.list_cf(str(tmp_path / "db"), Options(raw_mode=True))) == 8
        held = []
        for at in range(0, 8000, 100):
            backend.write([(key, key * 100) for key, _ in entries[at : at + 100]])
            held.append(
                sum(shard.property_int_value("rocksdb.cur-size-active-mem-table") or 0 for shard in backend._shards)
            )
        assert 0 < max(held) < 6 << 20  # of 16 MiB in all; eight shards that each had all memtables would hold 32
        for at in range(1000, len(entries), 1000):
            for key, _ in entries[at - 1100 : at - 1000]:
                state.pop(key, None)
        state |= {key: key * 100 for key, _ in entries[:8000]}
        assert list(backend.scan(*EVERYTHING)) == sorted(state.items())
        assert list(backend.scan_back(*EVERYTHING)) == sorted(state.items(), reverse=True)
    finally:
        backend.close()


def test_one_shard_that_outgrows_the_others_is_cut_again(subtask):
    state = filled(keys(3000))
    subtask.epoch(state)
    before = subtask.starts()
    hot = filled((before[3] + os.urandom(6) for _ in range(6000)), seed=1)
    subtask.epoch(hot)
    after = subtask.starts()
    assert set(before) < set(after)
    assert all(before[3] < start for start in set(after) - set(before))
    assert len([start for start in after if start.startswith(before[3][:2])]) > 2
    assert subtask.scan() == sorted({**state, **hot}.items())


def test_keys_that_differ_too_late_to_be_cut_stay_together(subtask):
    state = filled(b"k" * 300 + number.to_bytes(4, "big") for number in range(2000))
    subtask.epoch(state)
    assert subtask.starts() == [b""]
    assert subtask.scan() == sorted(state.items())


def test_reading_does_not_cut(subtask, tmp_path):
    large = Subtask(tmp_path, 64)
    large.epoch(filled(keys(4000)))
    subtask.base, subtask.number = large.base, large.number
    assert len(subtask.scan()) == 4000
    assert subtask.starts() == [b""]


operations = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3999), max_size=40),
        st.lists(st.integers(0, 3999), max_size=40),
        st.sampled_from(["local", "storage"]),
        st.integers(0, 65),
        st.integers(0, 65),
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(epochs=operations, first=st.sampled_from([50, 300, 3000]))
def test_whatever_happens_the_state_reads_back_as_a_dict_would(tmp_path_factory, epochs, first):
    subtask = Subtask(tmp_path_factory.mktemp("compaction"), SMALL)
    names = keys(4000)
    model = filled(names[:first])
    subtask.epoch(model)
    for number, (put, deleted, where, low, high) in enumerate(epochs):
        fresh = filled((names[index] for index in put), seed=number + 1)
        # From the third epoch on the state is large in any case: the first sizes are cut at another time each.
        fresh |= filled(names[1000:2500], seed=number) if number == 1 else {}
        gone = {names[index] for index in deleted} - fresh.keys()
        subtask.epoch(fresh, gone)
        model = {key: value for key, value in {**model, **fresh}.items() if key not in gone}
        if where == "storage":
            subtask.forget_local()
        start, end = low.to_bytes(2, "big"), high.to_bytes(2, "big")

        def compare(backend: RocksDBBackend, start=start, end=end, model=model) -> None:
            ordered = sorted(model.items())
            assert list(backend.scan(*EVERYTHING)) == ordered
            assert list(backend.scan(start, end)) == [entry for entry in ordered if start <= entry[0] < end]
            assert backend.multi_get(names) == [model.get(key) for key in names]

        subtask.reopened(compare)
    assert len(subtask.starts()) >= 8


def test_a_state_that_was_written_in_one_family_goes_on(subtask, tmp_path):
    state = filled(keys(4000))
    db = _single_family(tmp_path / "old", state)
    attempt = subtask._attempt(1)
    attempt.directory.mkdir(parents=True)
    backend = RocksDBBackend(db, 16, SMALL)
    try:
        assert list(backend.scan(*EVERYTHING)) == sorted(state.items())
        files = snapshot.take(attempt, backend)
    finally:
        backend.close()
    prepared = snapshot.prepare(attempt, snapshot.WorkingCopy(db, {}), files)
    subtask.base = snapshot.upload(subtask.storage, attempt, prepared, None)
    subtask.number = 1
    assert len(subtask.starts()) == 8
    newer = filled(list(state)[:100], seed=2)
    subtask.epoch(newer)
    subtask.forget_local()
    assert subtask.scan() == sorted({**state, **newer}.items())


def _single_family(path: Path, state: Entries) -> Path:
    """A database as it was before there were shards."""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compaction_style(DBCompactionStyle.universal())
    db = Rdict(str(path), options=options)
    write = WriteOptions()
    write.disable_wal = True
    batch = WriteBatch(raw_mode=True)
    for key, value in state.items():
        batch.put(key, value)
    db.write(batch, write)
    db.close()
    return path


def test_a_family_that_weir_never_makes_is_damage(tmp_path):
    db = Rdict(str(_single_family(tmp_path / "db", filled(keys(10)))), options=Options(raw_mode=True))
    db.create_column_family("other", Options(raw_mode=True))
    db.close()
    with pytest.raises(DamageError, match="other"):
        RocksDBBackend(tmp_path / "db", 16)


# -- what an epoch uploads


@pytest.mark.long
def test_no_epoch_uploads_more_than_a_quarter_and_all_together_little(tmp_path):
    subtask = Subtask(tmp_path, shard_mb=1)
    names = sorted(set(keys(40_000)))
    state = bytes_of(subtask.epoch(filled(names)))
    assert len(subtask.starts()) == 8
    draw = random.Random(7)
    shares, fulls = [], []
    for number in range(120):
        next_snapshot = subtask.epoch(filled(draw.sample(names, len(names) // 66), seed=number))
        shares.append(uploaded(next_snapshot) / state)
        fulls.append(bytes_of(next_snapshot) / state)
    assert max(shares) < 0.25
    assert sum(fulls) / sum(shares) > 15
    assert max(fulls) < 2  # merges keep up: the state does not pile up on itself


def test_large_merges_take_turns_among_shards_of_one_age():
    state = [Shard(base=100, delta=0, runs=1)] * 8
    merged: list[int] = []
    for _ in range(300):
        state = [Shard(shard.base, shard.delta + 1, 2) for shard in state]
        due = compaction.due(state)
        assert len(due) <= 1
        for index in due:
            state[index] = Shard(100, 0, 1)
        merged += due
    assert {merged.count(index) for index in range(8)} <= {3, 4, 5}
    assert max(shard.delta for shard in state) < 90


def test_overdue_shards_are_merged_by_need_within_an_eighth_of_the_state():
    small = Shard(base=10, delta=9, runs=3)
    assert compaction.due([small, Shard(1000, 10, 2), Shard(100, 95, 2), small]) == [0, 3]
    assert compaction.due([small, Shard(1000, 10, 2), Shard(100, 125, 2), small]) == [2]
    assert compaction.due([Shard(1000, 999, 2), small]) == [0]  # one goes even if it is large
    assert compaction.due([Shard(100, 500, 9)]) == []  # one alone is RocksDB's business


def test_an_epoch_does_not_wait_for_a_merge_that_rocksdb_calls_pending_but_never_starts(tmp_path):
    # As many runs as the trigger asks for, each half the size of the one before it: nothing fits together.
    backend = RocksDBBackend(tmp_path / "db", 16)
    try:
        for number in range(8):
            backend.write(list(filled(keys(6400 >> number, seed=number)).items()))
            clock = time.monotonic()
            backend.snapshot(tmp_path / str(number))
            took = time.monotonic() - clock
        assert backend._db.property_int_value("rocksdb.compaction-pending") == 1
    finally:
        backend.close()
    assert took < 10


def test_an_epoch_that_clips_merges_nothing_although_merges_are_due(subtask, monkeypatch):
    state = filled(keys(6000))
    subtask.epoch(state)
    monkeypatch.setattr(compaction, "due", lambda _: [])  # so that they gather
    for seed in range(1, 8):
        some = filled(random.Random(seed).sample(sorted(state), 600), seed)
        state |= some
        subtask.epoch(some)
    monkeypatch.undo()
    low, high = (10).to_bytes(2, "big"), (41).to_bytes(2, "big")
    clipped = subtask.changed(lambda backend: backend.keep_only(low, high))
    assert uploaded(clipped) < bytes_of(clipped) / 10
    left = {key: value for key, value in state.items() if low <= key < high}
    assert subtask.scan() == sorted(left.items())
    key = min(left)
    later = subtask.epoch({key: b"later"})  # merges what was due
    assert uploaded(later) > bytes_of(later) / 10
    assert subtask.scan() == sorted((left | {key: b"later"}).items())


def test_a_merge_that_meets_a_damaged_file_says_damage(subtask):
    names = keys(4000)
    subtask.epoch(filled(names))
    subtask.epoch(filled(names[:2000], seed=1))
    attempt = subtask._attempt(3)
    forked = snapshot.working_copy(subtask.storage, attempt, subtask.base)
    for file in forked.db.glob("*.sst"):
        content = bytearray(file.read_bytes())
        content[100:200] = bytes(100)
        file.unlink()
        file.write_bytes(content)
    backend = subtask._open(forked.db)
    with pytest.raises(DamageError, match="Corruption"):
        backend.write(list(filled(names[1000:], seed=2).items()))
        snapshot.take(attempt, backend)
    with suppress(TransientError):  # it would like to write what it still holds
        backend.close()
