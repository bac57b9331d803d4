"""The registry's own upkeep: bounded logs, upgrades of older registries, and everybody who stood still meanwhile."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from state_ops.checkpoints.registry import CHECKPOINTS, STATE_FILES, Registry
from state_ops.delta import fenced_table, log_cleanup, log_entries
from state_ops.delta.fenced_table import FencedTable
from state_ops.errors import ConfigurationError, DamageError, FencedError
from state_ops.ids import CheckpointId, Generation
from state_ops.storage.storage import Storage
from tests.state_ops.checkpoints.test_registry import APP, a_checkpoint, a_file, published, put
from tests.tools.sampling import sampled

GOLDEN = Path(__file__).parents[2] / "golden" / "registry-format-1"
TABLES = ("checkpoints", "state_files", "publications", "pins")
KEPT = 3


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "pipeline"))


@pytest.fixture
def often(monkeypatch) -> int:
    """Upkeep every few commits, so that a few epochs are what otherwise takes dozens."""
    monkeypatch.setattr(log_cleanup, "INTERVAL", 4)
    return log_cleanup.INTERVAL


def taken(storage: Storage) -> Registry:
    registry = Registry(storage, APP)
    registry.take_over()
    return registry


def epoch(registry: Registry, id: int, generation: int = 1) -> None:
    """What one epoch does to the registry: commit, record the publication, prune, keep the logs short."""
    put(registry, id, id - 1 or None, [a_file("1.sst"), a_file(f"{id}.sst")], generation)
    registry.record_publications(Generation(generation), [published(id)])
    beyond = [row.id for row in registry.checkpoints()[:-KEPT]]
    unnamed = registry.drop_rows(Generation(generation), beyond)
    if orphan_listings := registry.orphan_listings():
        unnamed += registry.drop_listings(Generation(generation), orphan_listings)
    registry._files.storage.delete_files(unnamed)
    registry.keep_up(Generation(generation))


def epochs(registry: Registry, first: int, last: int, generation: int = 1) -> None:
    for id in range(first, last + 1):
        epoch(registry, id, generation)


def log_of(storage: Storage, table: str) -> list[str]:
    return sorted(log_cleanup.log_names(storage, f"registry/{table}"))


def versions(names: list[str]) -> list[int]:
    return sorted(int(name[:20]) for name in names if name.endswith(".json"))


def state_of(storage: Storage) -> tuple:
    """All that a newcomer sees, and every file that the tables name or have."""
    reader = Registry(storage, APP)
    rows = reader.checkpoints()
    files = sorted(file.path for file in storage.list("registry") if "_delta_log" not in file.path)
    return reader.generation(), rows, [reader.files(row) for row in rows], reader.publications(), files


# -- what an epoch costs does not depend on how many there were


@pytest.mark.long
def test_the_hundred_and_fiftieth_epoch_costs_what_the_fiftieth_did(storage, monkeypatch):
    """Counted, not timed: operations on storage and on the tables, objects below the registry, entries of the logs."""
    asked: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def counting(self, *args, **kwargs):
            asked[name] += 1
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("size", "put_bytes", "read_bytes", "list", "delete"):
        counted(Storage, name)
    for name in ("update_incremental", "create_write_transaction", "transaction_version", "create_checkpoint"):
        counted(DeltaTable, name)
    registry = taken(storage)
    seen = {}
    for last in (30, 50, 130, 150):
        epochs(registry, max((row.id for row in registry.checkpoints()), default=0) + 1, last)
        objects = sum(1 for _ in storage.list("registry"))
        seen[last] = dict(asked), objects, [len(log_of(storage, table)) for table in TABLES]
        asked.clear()
    assert seen[150] == seen[50], "twenty epochs each, at the same phase of the upkeep"
    _, objects, logs = seen[150]
    assert max(logs) <= 2 * log_cleanup.INTERVAL + 5
    assert objects <= sum(logs) + 3 * KEPT


def test_delta_checkpoints_remember_the_generation_and_no_dropped_files(storage, often):
    registry = taken(storage)
    epochs(registry, 1, 18)
    for table in TABLES[:3]:
        newest = [name for name in log_of(storage, table) if name.endswith(".checkpoint.parquet")][-1]
        path = f"{storage.full(f'registry/{table}')}/_delta_log/{newest}"
        rows = pq.read_table(path, use_threads=False, partitioning=None).to_pylist()
        assert [row["txn"]["version"] for row in rows if row["txn"]] == [1]
        assert not [row for row in rows if row["remove"]]
        assert sum(1 for row in rows if row["add"]) <= KEPT + 1


def test_a_quiet_tables_generation_outlives_the_entries_that_set_it(storage, monkeypatch):
    monkeypatch.setattr(log_cleanup, "INTERVAL", 1)
    registry = taken(storage)
    epochs(registry, 1, 3)
    for _ in range(3):
        handle = fenced_table.open_table(storage, "registry/pins")
        handle.alter.set_table_properties({"delta.appendOnly": "false"})  # by nobody's generation
        handle.update_incremental()
        log_cleanup.write_checkpoint(handle)
        log_cleanup.clean_up(storage, "registry/pins")
    assert min(versions(log_of(storage, "pins"))) > 2
    assert Registry(storage, APP)._pins.generation() == 1


# -- who stood still while the log was cleaned up


def test_a_reader_that_stood_still_reads_what_there_is_now(storage, often):
    registry = taken(storage)
    epochs(registry, 1, 3)
    reader = Registry(storage, APP)
    old = reader.head()
    reader.publications(), reader.pins(), reader.files(old), reader.generation()
    epochs(registry, 4, 18)
    assert old.id not in [row.id for row in reader.checkpoints()]
    assert [row.id for row in reader.checkpoints()] == [16, 17, 18]
    assert [row.checkpoint_id for row in reader.publications()] == [16, 17, 18]
    assert {file.name for file in reader.files(reader.head())} == {"1.sst", "18.sst"}
    assert (reader.generation(), reader.pins()) == (1, [])


@pytest.mark.parametrize("ask", sampled(["checkpoints", "generation", "publications", "orphan_listings"], 2))
def test_a_reader_that_is_overtaken_in_the_middle_of_a_read_looks_again(storage, often, monkeypatch, ask):
    registry = taken(storage)
    epochs(registry, 1, 5)
    reader = Registry(storage, APP)
    real_files, real_version, late = fenced_table.active_files, DeltaTable.transaction_version, []

    def overtaken() -> None:
        if not late:
            late.append(True)
            epochs(registry, 6, 18)

    def files(handle):
        overtaken()
        return real_files(handle)

    def version(handle, app_id):
        overtaken()
        return real_version(handle, app_id)

    monkeypatch.setattr(fenced_table, "active_files", files)
    monkeypatch.setattr(DeltaTable, "transaction_version", version)
    answer = getattr(reader, ask)()
    assert late
    assert answer == getattr(Registry(storage, APP), ask)()


def test_an_opener_that_stood_still_takes_a_zombies_entry_for_nobodys(storage, often, monkeypatch):
    """Its version was cleaned away, and a zombie's entry stands there now: alone it would prove that nothing came after
    it."""
    epochs(taken(storage), 1, 5)
    real, slept = Storage.read_bytes, []

    def reading(self, path):
        if "checkpoints/_delta_log" in path and not slept:
            slept.append(path)
            epochs(taken(storage), 6, 18, generation=2)
            assert storage.create(path, b'{"commitInfo":{}}')
        return real(self, path)

    monkeypatch.setattr(Storage, "read_bytes", reading)
    reader = Registry(storage, APP)
    assert reader.generation() == 2
    assert [row.id for row in reader.checkpoints()] == [16, 17, 18]


def test_a_reader_does_not_follow_an_entry_that_stands_where_its_next_one_was_cleaned_away(storage, often):
    zombie, reader = taken(storage), Registry(storage, APP)
    epochs(zombie, 1, 5)
    assert reader.generation() == 1
    version = reader._checkpoints.last_known().number
    epochs(taken(storage), 6, 18, generation=2)
    assert storage.create(log_entries.entry_path("registry/checkpoints", version + 1), b'{"commitInfo":{}}')
    assert reader.generation() == 2


ACTS: dict[str, Callable[[Registry], object]] = {
    "a listing": lambda zombie: put(zombie, 6, 5, [a_file("zombie.sst")]),
    "a row": lambda zombie: put(zombie, 6, 5),
    "a publication": lambda zombie: zombie.record_publications(Generation(1), [published(6)]),
    "pruned rows": lambda zombie: zombie.drop_rows(Generation(1), [CheckpointId(id) for id in range(4, 99)]),
}


@pytest.mark.parametrize("act", sampled(ACTS, 2))
def test_a_zombie_that_slept_through_many_epochs_is_fenced(storage, often, act):
    zombie = taken(storage)
    epochs(zombie, 1, 5)
    successor = Registry(storage, APP)
    assert successor.take_over() == 2
    epochs(successor, 6, 18, generation=2)
    before = state_of(storage)
    with pytest.raises(FencedError, match=r"generation 1, but .* belongs to generation 2"):
        ACTS[act](zombie)
    assert _named(state_of(storage)) == _named(before)


@pytest.mark.parametrize("act", sampled(ACTS, 2))
def test_a_zombie_that_slept_in_the_middle_of_its_commit_is_fenced(storage, often, monkeypatch, act):
    """It read that it owns the table; then came a successor, many epochs and the clean-up of all that it had read."""
    zombie = taken(storage)
    epochs(zombie, 1, 5)
    real, seen = log_entries.append, []

    def slept(version, *args, **kwargs):
        monkeypatch.setattr(log_entries, "append", real)
        successor = Registry(storage, APP)
        successor.take_over()
        epochs(successor, 6, 18, generation=2)
        seen.append(state_of(storage))
        return real(version, *args, **kwargs)

    monkeypatch.setattr(log_entries, "append", slept)
    with pytest.raises(FencedError, match=r"generation 1, but .* belongs to generation 2"):
        ACTS[act](zombie)
    assert _named(state_of(storage)) == _named(seen[0])


def _named(state: tuple) -> tuple:
    """Without the Parquet files that the zombie wrote and nothing names."""
    *seen, files = state
    return (*seen, [path for path in files if "0006-" not in path])


class LatePut:
    """A committer knew the newest version, and was stopped; it puts its entry long after.

    commits: the function that commits, by module and name. delta-rs looks for the newest version inside of one call
    into Rust, so the log is set back to what was there, for the time of that call, and the entry that it makes is then
    put where it would have landed, if a conditional put succeeds there.
    """

    def __init__(self, monkeypatch, aside: Path, meanwhile: Callable[[], None], table: str, commits) -> None:
        self._aside, self._commits = aside, commits
        self._real, self._patch, self._meanwhile, self._table = getattr(*commits), monkeypatch, meanwhile, table
        self.landed: list[str] = []
        self.before: tuple = ()
        monkeypatch.setattr(*commits, self)

    def __call__(self, handle, *args, **kwargs):
        if self._table not in handle.table_uri:
            return self._real(handle, *args, **kwargs)
        self._patch.setattr(*self._commits, self._real)
        log = Path(handle.table_uri.removeprefix("file://")) / "_delta_log"
        saved, current = self._aside / "saved", self._aside / "current"
        shutil.copytree(log, saved)
        before = set(_names(log))
        self._meanwhile()
        log.rename(current)
        saved.rename(log)
        try:
            return self._real(handle, *args, **kwargs)
        finally:
            landed = set(_names(log)) - before
            self.landed += [name for name in landed if not (current / name).exists()]
            for name in self.landed:
                (log / name).rename(current / name)
            shutil.rmtree(log)
            current.rename(log)


def _names(log: Path) -> Iterator[str]:
    return (file.name for file in log.iterdir() if file.name[0].isdigit())


TABLE_OF = {
    "a listing": "state_files",
    "a row": "registry/checkpoints",
    "a publication": "publications",
    "pruned rows": "registry/checkpoints",
}


@pytest.mark.parametrize("act", sampled(ACTS, 2))
def test_an_entry_put_where_one_was_cleaned_away_counts_for_nobody(storage, often, monkeypatch, tmp_path, act):
    zombie, successor = taken(storage), Registry(storage, APP)
    epochs(zombie, 1, 5)
    seen = []

    def meanwhile() -> None:
        successor.take_over()
        epochs(successor, 6, 18, generation=2)
        seen.append(state_of(storage))

    late = LatePut(monkeypatch, tmp_path, meanwhile, TABLE_OF[act], (log_entries, "append"))
    with pytest.raises(FencedError, match=r"generation 1, but .* belongs to generation 2"):
        ACTS[act](zombie)
    assert len(late.landed) == 1, "the put itself succeeded"
    assert _named(state_of(storage)) == _named(seen[0])
    epochs(successor, 19, 24, generation=2)
    assert not [name for table in TABLES for name in log_of(storage, table) if name == late.landed[0]]
    assert [row.id for row in Registry(storage, APP).checkpoints()] == [22, 23, 24]


def test_of_two_takers_one_wins_although_the_other_puts_its_claim_long_after(storage, often, monkeypatch, tmp_path):
    """Both read generation 1 and both would be generation 2: the late one must not go by the winner's number."""
    epochs(taken(storage), 1, 5)
    winner, loser = Registry(storage, APP), Registry(storage, APP)

    def meanwhile() -> None:
        assert winner.take_over() == 2
        epochs(winner, 6, 18, generation=2)

    monkeypatch.setattr("state_ops.checkpoints.registry.probe_conditional_put", lambda *_: None)
    late = LatePut(monkeypatch, tmp_path, meanwhile, "registry/checkpoints", (fenced_table, "commit"))
    with pytest.raises(FencedError, match="at the same moment"):
        loser.take_over()
    assert len(late.landed) == 1, "the put itself succeeded"
    assert Registry(storage, APP).generation() == 2
    epochs(winner, 19, 21, generation=2)


def test_of_two_takers_one_wins_although_the_others_view_was_cleaned_away(storage, often, monkeypatch):
    epochs(taken(storage), 1, 5)
    winner, loser, real = Registry(storage, APP), Registry(storage, APP), fenced_table.commit

    def slept(handle, *args, **kwargs):
        monkeypatch.setattr(fenced_table, "commit", real)
        assert winner.take_over() == 2
        epochs(winner, 6, 18, generation=2)
        return real(handle, *args, **kwargs)

    monkeypatch.setattr("state_ops.checkpoints.registry.probe_conditional_put", lambda *_: None)
    monkeypatch.setattr(fenced_table, "commit", slept)
    with pytest.raises(FencedError, match="at the same moment"):
        loser.take_over()
    assert Registry(storage, APP).generation() == 2


def test_a_zombies_hint_to_an_old_delta_checkpoint_misleads_nobody(storage, often):
    registry = taken(storage)
    epochs(registry, 1, 8)
    hint = Path(storage.full("registry/checkpoints")) / "_delta_log" / "_last_checkpoint"
    old = hint.read_bytes()
    epochs(registry, 9, 18)
    before = state_of(storage)
    hint.write_bytes(old)
    assert state_of(storage) == before
    epochs(registry, 19, 20)
    assert Registry(storage, APP).head().id == 20


# -- crashes


def test_a_crash_between_the_delta_checkpoint_and_the_clean_up_is_made_good(storage, often, monkeypatch):
    registry = taken(storage)
    epochs(registry, 1, 8)
    with monkeypatch.context() as patched:
        patched.setattr(log_cleanup, "clean_up", _killed)
        with pytest.raises(KeyboardInterrupt):
            epochs(registry, 9, 20)
    assert [log for table in TABLES if log_cleanup.superseded(log := log_of(storage, table))]
    _goes_on(storage)


@pytest.mark.parametrize("survived", [0, 1, 3])
def test_a_crash_in_the_clean_up_leaves_an_unbroken_end_of_the_log(storage, often, monkeypatch, survived):
    registry = taken(storage)
    epochs(registry, 1, 8)
    real, deleted = Storage.delete, []

    def killed(self, path):
        if "/_delta_log/" in path:
            if len(deleted) == survived:
                raise KeyboardInterrupt
            deleted.append(path)
        return real(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            epochs(registry, 9, 20)
    for table in TABLES:
        left = versions(log_of(storage, table))
        assert left == list(range(left[0], left[-1] + 1))
    _goes_on(storage)


def _killed(*_args, **_kwargs):
    raise KeyboardInterrupt


def _goes_on(storage: Storage) -> None:
    """A reader reads, a successor takes over, commits, and finishes the clean-up."""
    head = Registry(storage, APP).head()
    successor = Registry(storage, APP)
    assert successor.take_over() == 2
    assert not [log for table in TABLES if log_cleanup.superseded(log := log_of(storage, table))]
    assert successor.head() == head
    epochs(successor, head.id + 1, head.id + 5, generation=2)
    assert Registry(storage, APP).head().id == head.id + 5


@pytest.mark.parametrize("error", [OSError("read-only"), DeltaError("no space")])
def test_upkeep_that_fails_fails_no_commit_and_is_done_later(storage, often, monkeypatch, error):
    registry = taken(storage)
    with monkeypatch.context() as patched:
        patched.setattr(log_cleanup, "write_checkpoint", _raises(error))
        epochs(registry, 1, 12)
        assert not [name for table in TABLES for name in log_of(storage, table) if "checkpoint" in name]
    epochs(registry, 13, 20)
    assert Registry(storage, APP).head().id == 20
    assert max(len(log_of(storage, table)) for table in TABLES) <= 2 * often + 5


def test_who_owns_the_registry_no_more_leaves_its_logs_alone(storage, often):
    zombie = taken(storage)
    for id in range(1, 2 * often):
        put(zombie, id, id - 1 or None, [a_file(f"{id}.sst")])
    taken(storage)
    before = log_of(storage, "checkpoints")
    with pytest.raises(FencedError, match=r"generation 1, but .* belongs to generation 2"):
        zombie.keep_up(Generation(1))
    assert log_of(storage, "checkpoints") == before


def _raises(error: Exception) -> Callable:
    def fails(*_args):
        raise error

    return fails


def test_a_log_whose_entries_are_missing_is_damage(storage):
    registry = taken(storage)
    put(registry, 1, None)
    log = Path(storage.full("registry/checkpoints")) / "_delta_log"
    (log / f"{1:020d}.json").unlink()
    with pytest.raises((DamageError, DeltaError)):
        Registry(storage, APP).checkpoints()


# -- which entries may go


def test_only_what_lies_behind_the_last_but_one_delta_checkpoint_goes_and_the_oldest_first():
    def entry(version: int, end: str = "json") -> str:
        return f"{version:020d}.{end}"

    log = [entry(version) for version in range(12)] + ["_last_checkpoint", "not-a-version.json"]
    assert log_cleanup.superseded(log) == []
    assert log_cleanup.superseded([*log, entry(8, "checkpoint.parquet")]) == []
    two = [*log, entry(8, "checkpoint.parquet"), entry(4, "checkpoint.parquet")]
    assert log_cleanup.superseded(two) == [entry(version) for version in range(4)]
    three = [*two, entry(2, "checkpoint.parquet"), entry(2, "json#1")]
    assert log_cleanup.superseded(three) == [
        entry(0),
        entry(1),
        entry(2, "checkpoint.parquet"),
        entry(2),
        entry(2, "json#1"),
        entry(3),
    ]
    part = entry(10, "checkpoint.0000000001.0000000002.parquet")
    assert log_cleanup.superseded([*log, part, entry(8, "checkpoint.parquet")]) == [], "half a checkpoint is none"


# -- registries of other releases


@pytest.fixture
def golden(storage) -> Storage:
    """A registry that the first release wrote: two checkpoints, three tables, no table property of today."""
    shutil.copytree(GOLDEN, storage.uri)
    return storage


def test_a_registry_of_the_first_release_opens_and_goes_on(golden, often):
    reader = Registry(golden, APP)
    kept = a_file("1.sst")
    files = [kept, a_file("2.sst", "a2"), a_file("rows.parquet", "a2", kind="output")]
    first, second = a_checkpoint(1, None, [kept]), a_checkpoint(2, 1, files)
    assert reader.checkpoints() == [first, second]
    assert (reader.files(first), set(reader.files(second))) == ((kept,), set(files))
    assert reader.publications() == [published(1), published(2)]
    assert (reader.generation(), reader.pins()) == (1, [])
    successor = Registry(golden, APP)
    assert successor.take_over() == 2
    for table in TABLES:
        properties = DeltaTable(golden.full(f"registry/{table}")).metadata().configuration
        assert {name: properties.get(name) for name in log_cleanup.PROPERTIES} == log_cleanup.PROPERTIES
    assert successor.head() == second
    epochs(successor, 3, 20, generation=2)
    assert [row.id for row in Registry(golden, APP).checkpoints()] == [18, 19, 20]
    assert max(len(log_of(golden, table)) for table in TABLES) <= 2 * often + 5


def test_properties_are_set_by_who_owns_the_table_alone(golden):
    owner = Registry(golden, APP)
    owner.take_over()
    Registry(golden, APP).take_over()
    handle = DeltaTable(golden.full("registry/checkpoints"))
    handle.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 7 days"})
    with pytest.raises(FencedError, match=r"generation 2, but .* belongs to generation 3"):
        owner._checkpoints.upgrade(Generation(2))


def test_a_long_log_of_an_older_release_gets_short(storage, often, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(log_cleanup, "is_due", lambda _: False)
        older.setattr(log_cleanup, "PROPERTIES", {})
        epochs(taken(storage), 1, 30)
    assert min(len(log_of(storage, table)) for table in TABLES[:3]) > 50
    successor = Registry(storage, APP)
    successor.take_over()
    epochs(successor, 31, 36, generation=2)
    assert max(len(log_of(storage, table)) for table in TABLES) <= 2 * often + 5
    assert [row.id for row in Registry(storage, APP).checkpoints()] == [34, 35, 36]


def test_a_table_that_forgets_transaction_versions_is_refused(storage):
    registry = taken(storage)
    handle = DeltaTable(storage.full("registry/state_files"))
    handle.alter.set_table_properties({"delta.setTransactionRetentionDuration": "interval 1 days"})
    with pytest.raises(ConfigurationError, match="state_files forgets transaction versions"):
        registry.take_over()


@pytest.mark.parametrize(
    ("table", "schema", "column"), [("checkpoints", CHECKPOINTS, "offsets"), ("state_files", STATE_FILES, "digest")]
)
def test_a_table_without_a_needed_column_is_damage(storage, table, schema, column):
    less = pa.schema([field for field in schema if field.name != column])
    partition = ["checkpoint_id"] if table == "state_files" else []
    FencedTable(storage, f"registry/{table}", less, APP, partition).ensure()
    with pytest.raises(DamageError, match=f"registry/{table} has no column {column}"):
        getattr(Registry(storage, APP), {"checkpoints": "head", "state_files": "orphan_listings"}[table])()
    with pytest.raises(DamageError, match=f"has no column {column}"):
        Registry(storage, APP).take_over()


def test_a_file_without_a_needed_column_is_damage(storage):
    checkpoint = put(taken(storage), 1, None, [a_file("1.sst")])
    path = next(Path(storage.uri).glob("registry/state_files/checkpoint_id=1/*.parquet"))
    pq.write_table(pq.read_table(path, partitioning=None, use_threads=False).drop_columns(["digest"]), path)
    with pytest.raises(DamageError, match="has no column digest"):
        Registry(storage, APP).files(checkpoint)


def test_rows_of_a_release_that_had_fewer_columns_are_read_and_the_table_gets_the_new_ones(storage, monkeypatch):
    """`run_id` of checkpoints and `rows` of files stand for columns that came later: they have defaults."""
    checkpoint = a_checkpoint(1, None, [a_file("1.sst")])
    with monkeypatch.context() as older:
        for name, schema, gone in (("CHECKPOINTS", CHECKPOINTS, "run_id"), ("STATE_FILES", STATE_FILES, "rows")):
            less = pa.schema([field for field in schema if field.name != gone])
            older.setattr(f"state_ops.checkpoints.registry.{name}", less)
        taken(storage).commit(checkpoint, [a_file("1.sst")])
    reader = Registry(storage, APP)
    assert reader.checkpoints() == [checkpoint]
    assert reader.files(checkpoint) == (a_file("1.sst"),)
    successor = taken(storage)
    names = {field.name for field in DeltaTable(storage.full("registry/checkpoints")).schema().fields}
    assert names == set(CHECKPOINTS.names)
    rows = a_file("rows.parquet", kind="output")
    later = replace(a_checkpoint(2, 1, [rows], generation=2), run_id="a run")
    successor.commit(later, [rows])
    assert Registry(storage, APP).checkpoints() == [checkpoint, later]
    assert Registry(storage, APP).files(later) == (rows,)


def test_columns_of_a_later_release_are_left_alone(storage, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr("state_ops.checkpoints.registry.CHECKPOINTS", CHECKPOINTS.append(pa.field("mood", pa.string())))
        newer.setattr("state_ops.checkpoints.registry._optional", lambda _: frozenset({"mood", "run_id"}))
        taken(storage)
        handle = fenced_table.open_table(storage, "registry/checkpoints")
        assert "mood" in {field.name for field in handle.schema().fields}
    registry = Registry(storage, APP)
    assert registry.take_over() == 2
    checkpoint = put(registry, 1, None, generation=2)
    assert Registry(storage, APP).checkpoints() == [checkpoint]
