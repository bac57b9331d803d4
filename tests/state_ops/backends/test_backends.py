"""The contract of state backends, for every backend; and what each promises beyond it."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state_ops.backends import arrow_file, memory_budget
from state_ops.backends.base import BackendOptions
from state_ops.backends.composite import scan_back
from state_ops.backends.loader import misfit, named
from state_ops.backends.memory import FILE, FILESYSTEM, MEMORY, MemoryBackend
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.errors import ConfigurationError, DamageError, PipelineError, StateSizeError
from state_ops.ids import CheckpointId, Generation, new_attempt_id
from state_ops.records.snapshot_files import Snapshot
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from tests.state_ops import installed
from tests.tools.distributions import describe
from weir.testing import BackendContract, BackendSystem
from weir.testing.backend_contract import Entries, some

EVERYTHING = (b"", b"\xff" * 9)
OPTIONS = BackendOptions(memory_mb=16, max_state_size_mb=64, where="stage counts")


@pytest.fixture(scope="module")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    site = installed.install(tmp_path_factory.mktemp("site"))
    sys.path.insert(0, str(site))
    yield
    sys.path.remove(str(site))


BACKENDS = ["memory", "filesystem", "rocksdb", "rocksdb-full", "sqlite", "weir_sqlite:FACTORY", "vault", "vault-full"]
ASYNCHRONOUS = ["memory-asynchronous", "filesystem-asynchronous"]


@pytest.fixture(params=[*BACKENDS, *ASYNCHRONOUS])
def system(request: pytest.FixtureRequest, tmp_path: Path, third_party: None) -> BackendSystem:
    name, _, mode = request.param.partition("-")
    return BackendSystem(tmp_path, named(name), replace(OPTIONS, own={"root": str(tmp_path / "vault")}), mode)


class TestEveryBackend(BackendContract): ...


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


# -- snapshots


_KEYS = st.binary(min_size=1, max_size=3)
_BATCH = st.tuples(st.lists(st.tuples(_KEYS, st.binary(max_size=6)), max_size=6), st.lists(_KEYS, max_size=4))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(epochs=st.lists(st.lists(_BATCH, max_size=4), max_size=4), bounds=st.tuples(_KEYS, _KEYS), remote=st.booleans())
def test_it_is_a_sorted_map_through_any_writes_and_snapshots(system, epochs, bounds, remote):
    model: Entries = {}
    base: Snapshot | None = None
    start, end = bounds
    for batches in epochs:
        with system.opened(base) as (backend, take):
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
            system.forget_local()
    assert system.read(base) == model
    system.forget_local()


# -- what snapshots cost


def test_an_unchanged_rocksdb_file_is_not_uploaded_again_and_a_whole_state_is(system):
    first = system.write(None, (some(*range(100)), []))
    two = system.write(first, (some(1, value=b"new"), []))
    again = {file.path for file in two.files} & {file.path for file in first.files}
    incremental = system.factory.format == "rocksdb" and not system.full
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
    describe(tmp_path, "weir-other", "weir.backends", {"sqlite": "weir_other:F", "rocksdb": "weir_other:F"})
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
