"""The contract of state backends, for every backend; and what each promises beyond it."""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state_ops.backends import arrow_file, memory_budget
from state_ops.backends.base import Backend, BackendFactory, BackendOptions, Freezing, Frozen
from state_ops.backends.composite import scan_back
from state_ops.backends.loader import misfit, named
from state_ops.backends.memory import FILE, FILESYSTEM, MEMORY, MemoryBackend
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.errors import ConfigurationError, DamageError, PipelineError, StateSizeError, TransientError
from state_ops.ids import AttemptId, CheckpointId, Generation, new_attempt_id
from state_ops.records.snapshot_files import Snapshot
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.snapshots.sweep import sweep
from state_ops.storage.storage import Storage
from tests.state_ops import installed

EVERYTHING = (b"", b"\xff" * 9)
OPTIONS = BackendOptions(memory_mb=16, max_state_size_mb=64, where="stage counts")

Entries = dict[bytes, bytes]
Puts = Sequence[tuple[bytes, bytes]]


class Lineage:
    """One subtask's state from snapshot to snapshot, as the keyed task drives it. mode: "full", as checkpoints.mode
    says, or "asynchronous", which writes after the barrier, and opens every second fork of the newest snapshot without
    its files."""

    def __init__(self, directory: Path, factory: BackendFactory, mode: str = "") -> None:
        self.storage = Storage(str(directory / "storage"))
        self.home = directory / "work" / "counts" / "0"
        self.factory, self.full, self.asynchronous = factory, mode == "full", mode == "asynchronous"
        self.number = 0
        self.frozen: dict[AttemptId, Frozen] = {}

    @contextmanager
    def opened(self, base: Snapshot | None) -> Iterator[tuple[Backend, Callable[[], Snapshot]]]:
        """A fork of `base`, and what to call for its snapshot, which closes it."""
        self.number += 1
        attempt = Attempt("counts", 0, Generation(1), CheckpointId(self.number), new_attempt_id(), self.home)
        held = self.frozen.get(base.attempt) if base and self.number % 2 else None
        forked = snapshot.working_copy(self.storage, attempt, base, None, self.factory.is_immutable, read=held is None)
        taken: list[Snapshot] = []
        with snapshot.healing(forked):
            backend = held.reopen(OPTIONS) if held else self.factory.open(forked.db, OPTIONS)

            def take() -> Snapshot:
                if self.asynchronous:
                    assert isinstance(backend, Freezing)
                    frozen = self.frozen[attempt.id] = backend.freeze()
                    backend.close()
                    prepared = snapshot.begin(attempt, forked, frozen, self.factory.is_immutable)
                else:
                    files = snapshot.take(attempt, backend)
                    backend.close()
                    prepared = snapshot.prepare(attempt, forked, files, self.factory.is_immutable)
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
        with self.opened(base) as (backend, take):
            for puts, deletes in batches:
                backend.write(puts, deletes)
            return take()

    def read(self, base: Snapshot | None, back: bool = False) -> Entries:
        with self.opened(base) as (backend, _):
            if back:
                return dict(scan_back(backend, *EVERYTHING))
            entries = list(backend.scan(*EVERYTHING))
            keys = [key for key, _ in entries]
            assert keys == sorted(set(keys))
            assert backend.multi_get(keys) == [value for _, value in entries]
            return dict(entries)

    def forget_local(self) -> None:
        self.frozen.clear()
        shutil.rmtree(self.home, ignore_errors=True)

    def local(self, of: Snapshot) -> Path:
        (directory,) = self.home.glob(f"*-{of.attempt}")
        return directory / "snapshot"


@pytest.fixture(scope="module")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    site = installed.install(tmp_path_factory.mktemp("site"))
    sys.path.insert(0, str(site))
    yield
    sys.path.remove(str(site))


BACKENDS = ["memory", "filesystem", "rocksdb", "rocksdb-full", "sqlite", "weir_sqlite:FACTORY"]
ASYNCHRONOUS = ["memory-asynchronous", "filesystem-asynchronous"]


@pytest.fixture(params=[*BACKENDS, *ASYNCHRONOUS])
def lineage(request: pytest.FixtureRequest, tmp_path: Path, third_party: None) -> Lineage:
    name, _, mode = request.param.partition("-")
    return Lineage(tmp_path, named(name), mode)


def some(*numbers: int, value: bytes = b"v") -> list[tuple[bytes, bytes]]:
    return [(f"key{number:05}".encode(), value + str(number).encode()) for number in numbers]


# -- one epoch


def test_values_come_in_the_order_of_the_keys_that_are_asked_for(lineage):
    with lineage.opened(None) as (backend, _):
        backend.write([(b"b", b"2"), (b"a", b"1"), (b"d", b"4")])
        assert backend.multi_get([b"d", b"nothing", b"a", b"d", b"b"]) == [b"4", None, b"1", b"4", b"2"]
        assert backend.multi_get([]) == []


def test_a_write_is_seen_by_the_next_read_and_a_delete_too(lineage):
    with lineage.opened(None) as (backend, _):
        backend.write(some(1, 2))
        backend.write(some(2, value=b"new"), [b"key00001", b"never there"])
        assert dict(backend.scan(*EVERYTHING)) == dict(some(2, value=b"new"))
        backend.write([], [b"key00002"])
        assert list(backend.scan(*EVERYTHING)) == []
        backend.write(some(2))
        assert list(backend.scan(*EVERYTHING)) == some(2)


def test_in_a_batch_deletes_come_first_and_of_several_puts_the_last_counts(lineage):
    with lineage.opened(None) as (backend, _):
        backend.write([(b"k", b"before")])
        backend.write([(b"k", b"first"), (b"k", b"last")], [b"k"])
        assert backend.multi_get([b"k"]) == [b"last"]


def test_a_scan_is_in_bytewise_order_and_half_open(lineage):
    keys = [
        b"\x00",
        b"\x00\x00",
        b"\x00\x01",
        b"\x01",
        b"a",
        b"a\x00",
        b"ab",
        b"b",
        b"\x7f",
        b"\x80",
        b"\xff",
        b"\xff\xff",
    ]
    with lineage.opened(None) as (backend, _):
        backend.write([(key, key[::-1]) for key in random.Random(1).sample(keys, len(keys))])
        for start in [b"", *keys]:
            for end in [*keys, b"\xff" * 9]:
                expected = [(key, key[::-1]) for key in sorted(keys) if start <= key < end]
                assert list(backend.scan(start, end)) == expected, (start, end)
                assert list(scan_back(backend, start, end)) == expected[::-1], (start, end)


def test_scans_between_writes_see_every_write(lineage):
    model: Entries = {}
    draw = random.Random(2)
    with lineage.opened(None) as (backend, _):
        for step in range(150):
            puts = [(draw.randbytes(1) + b"x", str(step).encode()) for _ in range(draw.randrange(4))]
            deletes = draw.sample(sorted(model), min(len(model), draw.randrange(4)))
            backend.write(puts, deletes)
            for key in deletes:
                model.pop(key, None)
            model |= dict(puts)
            start = draw.randbytes(1)
            assert list(backend.scan(start, b"\xff" * 9)) == sorted(e for e in model.items() if e[0] >= start)
            assert list(backend.scan(b"", start)) == sorted(e for e in model.items() if e[0] < start)


def test_a_scan_does_not_pass_over_what_was_deleted_behind_its_end(tmp_path, monkeypatch):
    """A state that an epoch has emptied is asked for each of its key groups, or for many keys."""
    counted = memory_budget.options(memory_budget.budget(16), 1, 100, "lz4")
    counted.enable_statistics()
    monkeypatch.setattr(RocksDBBackend, "_options", lambda *_: counted)
    keys = [number.to_bytes(4, "big") for number in range(1000)]
    with closing(RocksDBBackend(tmp_path / "db", 16)) as backend:
        backend.write([(key, b"") for key in keys])
        backend.write([], keys)
        for start, end in pairwise(keys[400:600]):
            assert not list(backend.scan(start, end))
    skipped = re.search(r"rocksdb.number.iter.skip COUNT : (\d+)", counted.get_statistics() or "")
    assert skipped is not None and 0 < int(skipped[1]) < 10 * len(keys)


def test_a_scan_that_is_dropped_half_way_does_no_harm(lineage):
    with lineage.opened(None) as (backend, _):
        backend.write(some(*range(100)))
        scan = backend.scan(*EVERYTHING)
        assert [next(scan), next(scan)] == some(0, 1)
        del scan
        backend.write([], [b"key00002"])
        assert next(backend.scan(b"key00002", b"z")) == some(3)[0]
        assert next(scan_back(backend, b"a", b"key00003")) == some(1)[0]
        backend.write([], [b"key00001"])
        assert next(scan_back(backend, b"a", b"key00003")) == some(0)[0]


def test_empty_and_large_values_are_values(lineage):
    large = random.Random(3).randbytes(5 << 20)
    state = {b"empty": b"", b"large": large, b"k" * 3000: b"long key"}
    first = lineage.write(None, (list(state.items()), []))
    lineage.forget_local()
    assert lineage.read(first) == state


def test_written_says_whether_anything_was(lineage):
    with lineage.opened(None) as (backend, _):
        backend.multi_get([b"k"])
        list(backend.scan(*EVERYTHING))
        backend.write([], [])
        assert not backend.written
        backend.write([(b"k", b"v")])
        assert backend.written
    base = lineage.write(None, (some(1), []))
    with lineage.opened(base) as (backend, _):
        assert not backend.written
        backend.write([], [b"key00001"])
        assert backend.written


# -- snapshots


def test_a_snapshot_is_the_state_whether_its_files_are_here_or_in_storage(lineage):
    state = dict(some(*range(500)))
    first = lineage.write(None, (list(state.items()), []))
    assert first.files
    assert lineage.read(first) == state
    lineage.forget_local()
    assert lineage.read(first) == state


def test_a_backend_knows_roughly_how_much_it_holds(lineage):
    entries = {f"k{number:03}".encode(): b"v" for number in range(200)}
    with lineage.opened(None) as (backend, _):
        assert backend.approximate_entries() == 0
        backend.write(list(entries.items()))
        assert 100 <= backend.approximate_entries() <= 400


def test_a_state_that_became_empty_stays_empty(lineage):
    first = lineage.write(None, (some(1, 2), []))
    two = lineage.write(first, ([], [b"key00001", b"key00002"]))
    assert lineage.read(two) == {}
    lineage.forget_local()
    assert lineage.read(two) == {}
    assert lineage.read(lineage.write(two, (some(3), []))) == dict(some(3))


def test_a_snapshot_stays_what_it_is_while_forks_of_it_go_on(lineage):
    base = lineage.write(None, (some(*range(50)), []))
    before = {path.name: path.read_bytes() for path in lineage.local(base).iterdir()}
    left = lineage.write(base, (some(*range(25), value=b"left"), [b"key00049"]), (some(60), []))
    right = lineage.write(base, ([], [b"key00000"]), (some(1, value=b"right"), []))
    assert {path.name: path.read_bytes() for path in lineage.local(base).iterdir()} == before
    original = dict(some(*range(50)))
    for _ in range(2):
        assert lineage.read(base) == original
        assert lineage.read(left) == {
            **dict(some(*range(49))),
            **dict(some(*range(25), value=b"left")),
            **dict(some(60)),
        }
        assert lineage.read(right) == {**dict(some(*range(1, 50))), **dict(some(1, value=b"right"))}
        lineage.forget_local()


def test_two_forks_of_one_snapshot_are_open_at_once(lineage):
    base = lineage.write(None, (some(*range(50)), []))
    with lineage.opened(base) as (first, take_one), lineage.opened(base) as (other, take_other):
        first.write(some(1, value=b"one"))
        other.write(some(1, value=b"other"))
        assert first.multi_get([b"key00001"]) == [b"one1"]
        assert other.multi_get([b"key00001"]) == [b"other1"]
        taken = take_one(), take_other()
    assert [lineage.read(each)[b"key00001"] for each in taken] == [b"one1", b"other1"]


def test_what_is_written_after_a_snapshot_is_not_in_it(lineage):
    with lineage.opened(None) as (backend, take):
        backend.write(some(1))
        first = take()
    attempt = replace_epoch(lineage)
    forked = snapshot.working_copy(lineage.storage, attempt, first, None, lineage.factory.is_immutable)
    backend = lineage.factory.open(forked.db, OPTIONS)
    backend.write(some(2))
    files = snapshot.take(attempt, backend)
    before = {file.name: file.read_bytes() for file in files}
    backend.write(some(3))
    assert {file.name: file.read_bytes() for file in files} == before
    backend.close()
    prepared = snapshot.prepare(attempt, forked, files, lineage.factory.is_immutable)
    taken = snapshot.upload(lineage.storage, attempt, prepared, first, full=lineage.full)
    assert lineage.read(taken) == dict(some(1, 2))


def replace_epoch(lineage: Lineage) -> Attempt:
    lineage.number += 1
    return Attempt("counts", 0, Generation(1), CheckpointId(lineage.number), new_attempt_id(), lineage.home)


def test_many_epochs_of_many_batches(lineage):
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
        base = lineage.write(base, *batches)
        sweep(replace_epoch(lineage), {base.attempt}, (), 1)
        if epoch % 5 == 4:
            lineage.forget_local()
    assert lineage.read(base) == model


_KEYS = st.binary(min_size=1, max_size=3)
_BATCH = st.tuples(st.lists(st.tuples(_KEYS, st.binary(max_size=6)), max_size=6), st.lists(_KEYS, max_size=4))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(epochs=st.lists(st.lists(_BATCH, max_size=4), max_size=4), bounds=st.tuples(_KEYS, _KEYS), remote=st.booleans())
def test_it_is_a_sorted_map_through_any_writes_and_snapshots(lineage, epochs, bounds, remote):
    model: Entries = {}
    base: Snapshot | None = None
    start, end = bounds
    for batches in epochs:
        with lineage.opened(base) as (backend, take):
            for puts, deletes in batches:
                backend.write(puts, deletes)
                for key in deletes:
                    model.pop(key, None)
                model |= dict(puts)
                inside = sorted(entry for entry in model.items() if start <= entry[0] < end)
                assert list(backend.scan(start, end)) == inside
                assert list(scan_back(backend, start, end)) == inside[::-1]
            assert backend.written == any(puts or deletes for puts, deletes in batches)
            if backend.written:
                base = take()
        if remote:
            lineage.forget_local()
    assert lineage.read(base) == model
    lineage.forget_local()


# -- damage


@pytest.mark.parametrize("harm", ["cut off", "flip", "lose"])
def test_damage_in_storage_is_found_before_the_state_is_opened(lineage, harm):
    base = lineage.write(None, (some(*range(200)), []))
    lineage.forget_local()
    for file in base.files:
        stored = Path(lineage.storage.full(file.path))
        whole = stored.read_bytes()
        spoil(stored, harm, len(whole) // 2)
        with pytest.raises(DamageError):
            lineage.read(base)
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_bytes(whole)
        lineage.forget_local()
    assert lineage.read(base) == dict(some(*range(200)))


@pytest.mark.parametrize("back", [False, True])
def test_damage_to_local_files_never_becomes_another_value(lineage, back):
    state = dict(some(*range(300)))
    base = lineage.write(None, (list(state.items()), []))
    held = 0
    for name in sorted(file.name for file in base.files):
        for harm, share in [("cut off", 0.5), ("lose", 0.0), *(("flip", at / 5) for at in range(5))]:
            local = lineage.local(base) / name
            spoil(local, harm, int(share * local.stat().st_size))
            for _ in range(2):  # a first read may be answered by blocks that the process still has in memory
                try:
                    assert lineage.read(base, back) == state
                except TransientError as error:  # the local copy was dropped, and the replay fetches it again
                    assert isinstance(error.__cause__, DamageError)
                    assert lineage.read(base) == state
                    held += 1
            lineage.forget_local()
            assert lineage.read(base) == state
    immutable = any(lineage.factory.is_immutable(file.name) for file in base.files)
    assert (held > 0) == immutable, (
        "files that are copied are compared with their digests, others find damage themselves"
    )


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


# -- what snapshots cost


def test_an_unchanged_rocksdb_file_is_not_uploaded_again_and_a_whole_state_is(lineage):
    first = lineage.write(None, (some(*range(100)), []))
    two = lineage.write(first, (some(1, value=b"new"), []))
    again = {file.path for file in two.files} & {file.path for file in first.files}
    incremental = lineage.factory.format == "rocksdb" and not lineage.full
    assert bool(again) == incremental
    assert all(file.new for file in two.files if file.path not in again)


def test_a_snapshot_of_files_that_could_not_be_restored_is_refused_before_it_counts(tmp_path):
    class Nested(MemoryBackend):
        def snapshot(self, target: Path) -> list[Path]:
            (file,) = super().snapshot(target)
            (target / "part").mkdir()
            return [file.rename(target / "part" / FILE)]

    attempt = Attempt("counts", 0, Generation(1), CheckpointId(1), new_attempt_id(), tmp_path)
    attempt.directory.mkdir()
    with pytest.raises(PipelineError, match="Nested breaks its contract"):
        snapshot.take(attempt, Nested())


# -- memory and filesystem


def test_past_its_limit_memory_says_what_to_do_and_stays_as_it_was(tmp_path):
    options = replace(OPTIONS, max_state_size_mb=1)
    backend = MEMORY.open(tmp_path, options)
    backend.write([(b"a", bytes(600_000))])
    backend.write([(b"a", bytes(700_000)), (b"b", b"small")])  # replaces: not 1.3 MB
    with pytest.raises(StateSizeError) as raised:
        backend.write([(b"c", bytes(400_000)), (b"b", b"other")], [b"missing"])
    for word in ("1.05 MiB", "1 MiB", "stage counts", "state.max_state_size_mb", "filesystem", "rocksdb"):
        assert word in str(raised.value), word
    assert dict(backend.scan(*EVERYTHING)) == {b"a": bytes(700_000), b"b": b"small"}
    backend.write([(b"c", bytes(400_000))], [b"a"])
    files = backend.snapshot(tmp_path / "snapshot")
    assert backend.multi_get([b"a", b"b"]) == [None, b"small"]
    backend.write([], [b"b", b"c"])
    backend.write([(b"d", bytes(1_000_000))])

    lowered = MEMORY.open(files[0].parent, replace(OPTIONS, max_state_size_mb=0.1))
    lowered.write([(b"c", bytes(300_000))])  # smaller than it was, though not small enough
    with pytest.raises(StateSizeError):
        lowered.write([(b"e", b"more")])
    FILESYSTEM.open(files[0].parent, options).write([(b"c", bytes(4_000_000))])


def test_a_file_of_entries_that_is_not_what_was_written_is_damage(tmp_path):
    state = {b"a": b"1", b"b": b"", b"c": bytes(1000)}
    arrow_file.write(tmp_path / "whole", sorted(state), state)
    whole = (tmp_path / "whole").read_bytes()
    assert arrow_file.read(tmp_path / "whole") == state
    for at in range(len(whole)):
        (tmp_path / "flipped").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamageError, match="flipped"):
            arrow_file.read(tmp_path / "flipped")
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(DamageError, match="cut"):
            arrow_file.read(tmp_path / "cut")
    (tmp_path / "longer").write_bytes(whole + b"\0")
    with pytest.raises(DamageError):
        arrow_file.read(tmp_path / "longer")


def test_a_file_of_entries_that_somebody_else_wrote_is_damage(tmp_path, monkeypatch):
    arrow_file.write(tmp_path / "unordered", [b"b", b"a"], {b"a": b"", b"b": b""})
    arrow_file.write(tmp_path / "twice", [b"a", b"a"], {b"a": b""})
    monkeypatch.setattr(arrow_file, "SCHEMA", pa.schema([("key", pa.large_binary()), ("value", pa.large_binary())]))
    arrow_file.write(tmp_path / "nullable", [b"a"], {b"a": b""})
    monkeypatch.undo()
    for name in ("unordered", "twice", "nullable"):
        with pytest.raises(DamageError, match=name):
            arrow_file.read(tmp_path / name)


def test_many_entries_go_into_batches_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_file, "_BATCH_BYTES", 1000)
    monkeypatch.setattr(arrow_file, "_BATCH_ENTRIES", 10)
    draw = random.Random(5)
    state = {number.to_bytes(2, "big"): draw.randbytes(draw.choice([0, 10, 3000])) for number in range(105)}
    arrow_file.write(tmp_path / FILE, sorted(state), state)
    with pa.OSFile(str(tmp_path / FILE)) as opened:
        sizes = [batch.num_rows for batch in pa.ipc.open_stream(opened)]
    assert sum(sizes) == 105
    assert max(sizes) <= 10
    assert min(sizes) == 1
    assert list(arrow_file.read(tmp_path / FILE).items()) == sorted(state.items())


def test_scans_between_writes_do_not_sort_the_whole_state_again():
    comparisons = 0

    class Key(bytes):
        def __lt__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return bytes.__lt__(self, other)  # type: ignore[operator]

        __hash__ = bytes.__hash__

    draw = random.Random(6)
    backend = MemoryBackend()
    for _ in range(2000):
        backend.write([(Key(draw.randbytes(8)), b"")])
        list(backend.scan(Key(b"\x00"), Key(b"\x00\x01")))
    assert comparisons < 2000 * 120  # sorting, or only looking at all keys, would take a million


def test_files_of_another_backend_are_not_taken_for_an_empty_state(tmp_path):
    rocksdb = RocksDBBackend(tmp_path / "db", 16)
    rocksdb.write(some(1))
    files = rocksdb.snapshot(tmp_path / "snapshot")
    rocksdb.close()
    with pytest.raises(DamageError, match="neither the filesystem nor the memory backend"):
        FILESYSTEM.open(tmp_path / "snapshot", OPTIONS)
    (tmp_path / "snapshot" / "CURRENT").unlink()
    assert any(file.suffix == ".sst" for file in files)
    with pytest.raises(DamageError, match="CURRENT is missing"):
        RocksDBBackend(tmp_path / "snapshot", 16)


# -- names


def test_backends_are_found_by_name_entry_point_or_dotted_name(third_party):
    import weir_sqlite  # type: ignore[import-not-found]

    assert named("memory") is MEMORY
    assert named("filesystem") is FILESYSTEM
    assert named("sqlite") is named("weir_sqlite:FACTORY") is weir_sqlite.FACTORY


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("rocks", ["no state backend 'rocks'", "rocksdb, filesystem, memory, sqlite", "weir.backends"]),
        ("weir_missing:FACTORY", ["cannot be imported", "weir_missing"]),
        ("weir_sqlite:MISSING", ["cannot be imported", "MISSING"]),
        ("weir_sqlite:SQLiteFactory", ["is a class"]),
        ("weir_sqlite:FILE", ["has no", "is_immutable"]),
        (":", ["cannot be imported"]),
    ],
)
def test_a_name_that_is_no_backend_is_refused(third_party, name, messages):
    with pytest.raises(ConfigurationError) as raised:
        named(name)
    for words in messages:
        assert words in str(raised.value), words


def test_a_name_that_two_distributions_offer_is_refused(tmp_path, third_party, monkeypatch):
    metadata = tmp_path / "weir_other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: weir-other\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[weir.backends]\nsqlite = weir_other:F\nrocksdb = weir_other:F\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    named.cache_clear()
    with pytest.raises(ConfigurationError, match="Several distributions offer"):
        named("sqlite")
    assert named("rocksdb").format == "rocksdb"  # Weir's own names are not for others
    named.cache_clear()


def test_state_is_opened_by_backends_of_its_format_only(third_party):
    for same in [("memory", "filesystem"), ("filesystem", "memory"), ("sqlite", "weir_sqlite:FACTORY")]:
        assert misfit(*same) is None
    assert "'rocksdb'" in (misfit("rocksdb", "memory") or "")
    assert "not known here" in (misfit("uninstalled", "memory") or "")
    assert misfit("uninstalled", "rocksdb") is not None
