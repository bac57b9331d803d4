from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from state_ops.checkpoints.registry import Registry
from state_ops.delta import fenced_table, log_cleanup, log_entries
from state_ops.errors import DamageError, FencedError, PrunedError
from state_ops.ids import AttemptId, CheckpointId, Generation
from state_ops.records.checkpoint import NEWEST_FORMAT, Checkpoint
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.publications import Publication
from state_ops.records.sink_link import SinkLink
from state_ops.records.snapshot_files import OUTPUT, STATE, StateFile
from state_ops.storage.storage import Storage

APP = "weir/tried/main"
NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


def a_file(name: str, owner: str = "a1", *, new: bool = True, kind: str = STATE, size: int = 10) -> StateFile:
    """A file of one subtask; the same name and owner always are the same object."""
    path = f"state/counts/g1-e1/0-{owner}/{name}" if kind == STATE else f"tables/out/data/g1-e1/{owner}-{name}"
    sink, rows = (None, None) if kind == STATE else ("out", 3)
    attempt = AttemptId(owner)
    return StateFile("counts", 0, kind, name, path, size, f"digest of {name}", new, attempt, attempt, sink, rows)


def a_checkpoint(
    id: int, parent: int | None, files: Sequence[StateFile] = (), generation: int = 1, **other
) -> Checkpoint:
    values = {
        "id": CheckpointId(id),
        "parent_id": None if parent is None else CheckpointId(parent),
        "kind": "checkpoint",
        "generation": Generation(generation),
        "commit_id": f"commit-{id}-{generation}",
        "triggered_at": NOON,
        "completed_at": NOON,
        "epoch_now": NOON,
        "trigger": "manual",
        "reason": "a test",
        "offsets": {"landing": {"seen": [f"{id}.parquet"]}},
        "slice": {"landing": {"rows": id}},
        "watermarks": {"counts": 1_700_000_000_000_000},
        "operators": {"counts": OperatorStats.from_json({"parallelism": 1})},
        "sinks": {"out": SinkLink(id, parent)},
        "inputs": {},
        "ms": {"stage:counts": 1.5},
        "totals": {"epochs": id},
        "files": len(files),
        "bytes_total": sum(file.bytes for file in files),
        "bytes_new": sum(file.bytes for file in files if file.new),
    }
    return Checkpoint(**{**values, **other})


def put(
    registry: Registry, id: int, parent: int | None, files: Sequence[StateFile] = (), generation: int = 1
) -> Checkpoint:
    checkpoint = a_checkpoint(id, parent, files, generation)
    registry.commit(checkpoint, files)
    return checkpoint


def drop(registry: Registry, ids: list[int], generation: int = 1) -> None:
    """What pruning does to the registry when nothing else holds these checkpoints."""
    unnamed = registry.drop_rows(Generation(generation), [CheckpointId(id) for id in ids])
    unnamed += registry.drop_listings(Generation(generation), registry.orphan_listings())
    registry._files.storage.delete_files(unnamed)


def published(id: int) -> Publication:
    return Publication(CheckpointId(id), "out", id, 1, 3, NOON, 1.0)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "pipeline"))


@pytest.fixture
def registry(storage: Storage) -> Registry:
    """A registry that this process has taken over as generation 1."""
    opened = Registry(storage, APP)
    assert opened.take_over() == 1
    return opened


# -- what is recorded


def test_a_registry_that_nobody_made_reads_as_empty(storage):
    registry = Registry(storage, APP)
    assert (registry.checkpoints(), registry.head(), registry.publications(), registry.generation()) == (
        [],
        None,
        [],
        0,
    )
    assert not list(storage.list())


def test_what_was_committed_is_read_back_by_anyone(storage, registry):
    files = (a_file("1.sst"), a_file("out.parquet", kind=OUTPUT))
    first = put(registry, 1, None, files)
    second = put(registry, 2, 1, (replace(files[0], new=False),))
    registry.record_publications(Generation(1), [published(1)])
    reader = Registry(storage, APP)
    assert reader.checkpoints() == [first, second]
    assert reader.head() == second
    assert set(reader.files(first)) == set(files)
    assert [file.new for file in reader.files(second)] == [False]
    assert reader.publications() == [published(1)]


def test_a_checkpoint_without_files_is_one_too(storage, registry):
    empty = put(registry, 1, None)
    assert Registry(storage, APP).files(empty) == ()
    assert Registry(storage, APP).head() == empty


def test_a_listing_without_a_row_does_not_count(storage, registry, monkeypatch):
    first = put(registry, 1, None, [a_file("1.sst")])
    lost = a_checkpoint(2, 1, [a_file("2.sst"), a_file("3.sst")], commit_id="lost")
    with monkeypatch.context() as patched:
        patched.setattr(registry._checkpoints, "commit", _killed)
        with pytest.raises(KeyboardInterrupt):
            registry.commit(lost, [a_file("2.sst"), a_file("3.sst")])
    reader = Registry(storage, APP)
    assert reader.checkpoints() == [first]
    assert not reader.holds(lost)
    retried = replace(lost, commit_id="retried", files=1)
    registry.commit(retried, [a_file("4.sst")])
    assert [file.name for file in Registry(storage, APP).files(retried)] == ["4.sst"]
    storage.delete_files(registry.drop_listings(Generation(1), registry.orphan_listings()))
    assert len(list(storage.list("registry/state_files/checkpoint_id=2"))) == 1
    assert [file.name for file in Registry(storage, APP).files(retried)] == ["4.sst"]
    assert [file.name for file in Registry(storage, APP).files(first)] == ["1.sst"]


def _killed(*_args, **_kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("recorded", [1, 3])
def test_a_listing_of_another_length_is_damage(storage, registry, recorded):
    files = [a_file("1.sst"), a_file("2.sst")]
    checkpoint = a_checkpoint(1, None, files)
    registry.commit(replace(checkpoint, files=recorded), files)
    with pytest.raises(DamageError, match=f"has {recorded} files?, but 2 are listed"):
        Registry(storage, APP).files(replace(checkpoint, files=recorded))


def test_a_missing_file_of_the_registry_is_damage(storage, registry):
    checkpoint = put(registry, 1, None, [a_file("1.sst")])
    for file in list(storage.list("registry/state_files/checkpoint_id=1")):
        storage.delete(file.path)
    with pytest.raises(DamageError, match="missing from storage"):
        Registry(storage, APP).files(checkpoint)
    for file in list(storage.list("registry/checkpoints/data")):
        storage.delete(file.path)
    with pytest.raises(DamageError, match="missing from storage"):
        Registry(storage, APP).checkpoints()


def test_case_23_a_row_of_a_future_format_is_refused(storage, registry):
    put(registry, 1, None)
    registry.commit(a_checkpoint(2, 1, format_version=NEWEST_FORMAT + 1), [])
    with pytest.raises(DamageError, match=f"Checkpoint 2 has format {NEWEST_FORMAT + 1}") as raised:
        Registry(storage, APP).checkpoints()
    assert "Upgrade" in raised.value.next


# -- fencing


def test_every_take_over_is_a_generation_higher(storage):
    assert [Registry(storage, APP).take_over() for _ in range(3)] == [1, 2, 3]
    assert Registry(storage, APP).generation() == 3


def test_of_two_takers_at_once_one_wins(storage, monkeypatch):
    Registry(storage, APP).take_over()
    real, rival = fenced_table.commit, Registry(storage, APP)
    outcome = []

    def overtaken(handle, *args, **kwargs):
        monkeypatch.setattr(fenced_table, "commit", real)
        if "registry/checkpoints" in handle.table_uri:
            outcome.append(rival.take_over())  # between our read of the old generation and our commit
        return real(handle, *args, **kwargs)

    late = Registry(storage, APP)
    monkeypatch.setattr("state_ops.checkpoints.registry.probe_conditional_put", lambda *_: None)
    monkeypatch.setattr(fenced_table, "commit", overtaken)
    with pytest.raises(FencedError, match="at the same moment"):
        late.take_over()
    assert outcome == [2]
    assert Registry(storage, APP).generation() == 2
    put(rival, 1, None, generation=2)


def test_a_loser_that_is_late_with_its_lower_generation_does_not_stop_the_winner(storage, monkeypatch):
    loser, winner = Registry(storage, APP), Registry(storage, APP)
    loser.take_over()
    real = fenced_table.commit

    def overtaken(handle, *args, **kwargs):
        if "state_files" in handle.table_uri:
            monkeypatch.setattr(fenced_table, "commit", real)
            real(
                DeltaTable(handle.table_uri), APP, 2
            )  # by one that claimed `checkpoints` as 2, just before we did as 3
        return real(handle, *args, **kwargs)

    monkeypatch.setattr(fenced_table, "commit", overtaken)
    registry = Registry(storage, APP)
    monkeypatch.setattr(registry._checkpoints, "claim", lambda **_: winner._checkpoints.claim(Generation(3)))
    assert registry.take_over() == 3
    put(registry, 1, None, [a_file("1.sst")], generation=3)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_zombie_commits_nothing_after_a_take_over(storage, registry, reopened):
    first = put(registry, 1, None, [a_file("1.sst")])
    successor = Registry(storage, APP)
    successor.take_over()
    zombie = Registry(storage, APP) if reopened else registry
    versions = _versions(storage)
    for act in (
        lambda: put(zombie, 2, 1, [a_file("2.sst")]),
        lambda: put(zombie, 2, 1),
        lambda: zombie.record_publications(Generation(1), [published(1)]),
        lambda: zombie.drop_rows(Generation(1), [CheckpointId(1)]),
    ):
        with pytest.raises(FencedError, match=r"generation 1, but .* belongs to generation 2"):
            act()
    assert _versions(storage) == versions
    assert Registry(storage, APP).checkpoints() == [first]
    assert Registry(storage, APP).files(first) == (a_file("1.sst"),)
    put(successor, 2, 1, generation=2)


def _versions(storage: Storage) -> list[int]:
    names = ("checkpoints", "state_files", "publications")
    return [DeltaTable(storage.full(f"registry/{name}")).version() for name in names]


def test_a_zombie_is_fenced_although_it_was_overtaken_in_the_middle_of_its_commit(storage, registry, monkeypatch):
    put(registry, 1, None)
    real, successor = log_entries.append, Registry(storage, APP)

    def overtaken(handle, *args, **kwargs):
        monkeypatch.setattr(log_entries, "append", real)
        successor.take_over()  # after the zombie read that it owns the table
        return real(handle, *args, **kwargs)

    monkeypatch.setattr(log_entries, "append", overtaken)
    with pytest.raises(FencedError):
        put(registry, 2, 1)
    assert [row.id for row in Registry(storage, APP).checkpoints()] == [1]


def test_a_commit_that_meets_another_of_its_own_generation_is_tried_again(storage, registry, monkeypatch):
    real, twin = log_entries.append, Registry(storage, APP)

    def raced(handle, *args, **kwargs):
        monkeypatch.setattr(log_entries, "append", real)
        twin.record_publications(Generation(1), [published(1)])
        return real(handle, *args, **kwargs)

    monkeypatch.setattr(log_entries, "append", raced)
    registry.record_publications(Generation(1), [published(2)])
    assert Registry(storage, APP).publications() == [published(1), published(2)]


def test_threads_that_commit_to_one_table_take_turns(storage, registry, monkeypatch):
    """An epoch is committed while older ones are pruned: neither may follow a version that the other is about to
    replace."""
    parent = None
    for id in range(1, 11):
        put(registry, id, parent, [a_file(f"{id}.sst")])
        parent = id
    append, at_once, most = log_entries.append, [], []

    def prune(id):
        registry.drop_rows(Generation(1), [CheckpointId(id)])
        registry.drop_listings(
            Generation(1), [orphan for orphan in registry.orphan_listings(as_owner=True) if orphan.checkpoint_id == id]
        )

    def noted(version, *others):
        at_once.append(version.path)
        most.append(at_once.count(version.path))
        time.sleep(0.01)
        committed = append(version, *others)
        at_once.remove(version.path)
        return committed

    monkeypatch.setattr(log_entries, "append", noted)
    with ThreadPoolExecutor(2) as pool:
        pruning = pool.submit(lambda: [prune(id) for id in range(1, 10)])
        for id in range(11, 21):
            put(registry, id, id - 1, [a_file(f"{id}.sst")])
        pruning.result()
    assert max(most) == 1
    reader = Registry(storage, APP)
    assert [row.id for row in reader.checkpoints()] == list(range(10, 21))
    assert all(len(reader.files(row)) == 1 for row in reader.checkpoints())
    assert [row.id for row in registry.checkpoints(as_owner=True)] == list(range(10, 21))


@pytest.mark.parametrize("parent", [None, 1, 3])
def test_a_commit_is_refused_when_the_head_is_not_its_parent(storage, registry, parent):
    put(registry, 1, None)
    head = put(registry, 2, 1)
    with pytest.raises(FencedError, match=f"newest checkpoint is 2, not {parent}"):
        put(registry, 5, parent, [a_file("5.sst")])
    assert Registry(storage, APP).head() == head


def test_pruned_checkpoints_do_not_hide_who_the_head_is(registry):
    for id in range(1, 5):
        put(registry, id, id - 1 or None)
    drop(registry, [CheckpointId(1), CheckpointId(2)])
    with pytest.raises(FencedError, match="newest checkpoint is 4, not None"):
        put(registry, 5, None)
    put(registry, 5, 4)


def test_a_commit_of_unknown_outcome_is_asked_for_by_its_own_name(registry, monkeypatch):
    real = log_entries.append

    def reported_as_failed(handle, *args, **kwargs):
        real(handle, *args, **kwargs)
        raise OSError("connection reset")

    def never_arrived(*_args, **_kwargs):
        raise OSError("connection reset")

    landed, lost = a_checkpoint(1, None), a_checkpoint(2, 1, generation=2)
    for checkpoint, how, there in ((landed, reported_as_failed, True), (lost, never_arrived, False)):
        monkeypatch.setattr(log_entries, "append", how)
        with pytest.raises(OSError, match="connection reset"):
            registry.commit(checkpoint, [])
        monkeypatch.setattr(log_entries, "append", real)
        registry.take_over()
        assert registry.holds(checkpoint) is there
    assert not registry.holds(replace(landed, commit_id="another try of the same id"))
    assert registry.head() == landed


@pytest.mark.parametrize("table", ["checkpoints", "state_files"])
def test_a_commit_that_landed_but_was_reported_as_a_conflict_is_a_success(storage, registry, monkeypatch, table):
    put(registry, 1, None)
    real, failed = log_entries.append, []

    def reported_as_conflict(handle, *args, **kwargs):
        result = real(handle, *args, **kwargs)
        if table in handle.table_uri and not failed:
            failed.append(table)
            raise CommitFailedError("the version exists")  # it does: the store's client tried twice
        return result

    monkeypatch.setattr(log_entries, "append", reported_as_conflict)
    second = put(registry, 2, 1, [a_file("2.sst"), a_file("3.sst")])
    assert failed == [table]
    third = put(registry, 3, 2, [a_file("4.sst")])
    reader = Registry(storage, APP)
    assert [row.id for row in reader.checkpoints()] == [1, 2, 3]
    assert set(reader.files(second)) == set(registry.files(second)) == {a_file("2.sst"), a_file("3.sst")}
    assert reader.files(third) == (a_file("4.sst"),)


def test_coordinators_that_race_make_one_chain(storage):
    """Five that know nothing of each other, on storage where nothing is yet: each id once, built on the one before."""
    committed: list[str] = []

    def coordinate(name: int) -> None:
        for turn in range(3):
            mine = Registry(storage, APP)
            try:
                generation = mine.take_over()
                for step in range(3):
                    head = mine.head()
                    id, parent = (head.id + 1, head.id) if head else (1, None)
                    files = [a_file(f"{id}.sst", f"{name}")]
                    checkpoint = a_checkpoint(id, parent, files, generation, commit_id=f"{name}-{turn}-{step}")
                    mine.commit(checkpoint, files)
                    committed.append(checkpoint.commit_id)
            except FencedError:
                continue

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(coordinate, range(5)))
    reader = Registry(storage, APP)
    rows = reader.checkpoints()
    assert len(rows) >= 3  # the last one to take over was fenced by nobody
    assert [row.id for row in rows] == list(range(1, len(rows) + 1))
    assert [row.parent_id for row in rows] == [None, *range(1, len(rows))]
    assert sorted(row.commit_id for row in rows) == sorted(committed)
    assert [row.generation for row in rows] == sorted(row.generation for row in rows)
    assert all(len(reader.files(row)) == 1 for row in rows)
    reader.drop_listings(reader.take_over(), reader.orphan_listings())
    assert all(len(Registry(storage, APP).files(row)) == 1 for row in rows)


# -- pruning the tables


def test_dropped_checkpoints_are_gone_with_their_listings_and_publications(storage, registry):
    checkpoints = [put(registry, id, id - 1 or None, [a_file(f"{id}.sst")]) for id in range(1, 4)]
    for id in range(1, 4):
        registry.record_publications(Generation(1), [published(id)])
    drop(registry, [CheckpointId(1), CheckpointId(2)])
    reader = Registry(storage, APP)
    assert reader.checkpoints() == checkpoints[2:]
    assert reader.publications() == [published(3)]
    assert reader.files(checkpoints[2]) == (a_file("3.sst"),)
    for name in ("checkpoints/data", "state_files/checkpoint_id=3", "publications/data"):
        assert len(list(storage.list(f"registry/{name}"))) == 1
    assert not list(storage.list("registry/state_files/checkpoint_id=1"))
    drop(registry, [])


def test_what_a_recovery_has_published_of_several_checkpoints_goes_with_each(storage, registry):
    put(registry, 1, None)
    put(registry, 2, 1)
    registry.record_publications(Generation(1), [published(1), published(2)])
    drop(registry, [2])
    assert Registry(storage, APP).publications() == [published(1)]


def test_what_is_published_while_listings_are_dropped_counts(storage, registry, monkeypatch):
    """The next epoch is committed and published beside pruning."""
    put(registry, 1, None)
    put(registry, 2, 1)
    registry.record_publications(Generation(1), [published(1), published(2)])
    unnamed, real = registry.drop_rows(Generation(1), [CheckpointId(1)]), registry.checkpoints
    orphan_listings = registry.orphan_listings()

    def overtaken(**fields):
        rows = real(**fields)
        monkeypatch.setattr(registry, "checkpoints", real)
        put(registry, 3, 2)
        registry.record_publications(Generation(1), [published(3)])
        return rows

    monkeypatch.setattr(registry, "checkpoints", overtaken)
    unnamed += registry.drop_listings(Generation(1), orphan_listings)
    storage.delete_files(unnamed)
    assert Registry(storage, APP).publications() == [published(2), published(3)]


def test_a_reader_that_loses_the_race_with_pruning_looks_again(storage, registry, monkeypatch):
    for id in range(1, 4):
        put(registry, id, id - 1 or None, [a_file(f"{id}.sst")])
    reader = Registry(storage, APP)
    real = reader._checkpoints.read_rows

    def overtaken(files):
        monkeypatch.setattr(reader._checkpoints, "read_rows", real)
        drop(registry, [CheckpointId(1), CheckpointId(2)])
        return real(files)

    monkeypatch.setattr(reader._checkpoints, "read_rows", overtaken)
    assert [row.id for row in reader.checkpoints()] == [3]


def test_a_listing_that_was_pruned_meanwhile_is_not_damage(storage, registry):
    first = put(registry, 1, None, [a_file("1.sst")])
    reader = Registry(storage, APP)
    assert reader.head() == first
    second = put(registry, 2, 1, [a_file("2.sst")])
    drop(registry, [CheckpointId(1)])
    with pytest.raises(PrunedError, match="Checkpoint 1 was pruned"):
        reader.files(first)
    assert reader.files(second) == (a_file("2.sst"),)


def test_only_what_no_table_names_is_removed(storage, monkeypatch):
    """Killed between writing a file and committing it, in each of the three tables, and in the middle of a probe."""
    with monkeypatch.context() as often:
        often.setattr(log_cleanup, "INTERVAL", 1)
        dead = Registry(storage, APP)
        dead.take_over()
        kept = put(dead, 1, None, [a_file("1.sst")])
        dead.record_publications(Generation(1), [published(1)])
        dead.keep_up(Generation(1))
    successor = Registry(storage, APP)
    generation = successor.take_over()
    root = Path(storage.uri)
    assert list(root.glob("registry/*/_delta_log/*.checkpoint.parquet")), "Parquet files that no table names, but a log"
    (root / "registry/checkpoints/data/somebodys-export.parquet").write_bytes(b"not Weir's to delete")
    before = _contents(root)

    orphan_listings = [
        "checkpoints/data/00000000000000000002-lost.parquet",
        "state_files/checkpoint_id=2/00000000000000000002-lost.parquet",
        "state_files/checkpoint_id=1/00000000000000000001-lost.parquet",
        "publications/data/00000000000000000002-lost.parquet",
        ".probe-0123/_delta_log/00000000000000000000.json",
        ".probe-4567/part.parquet",
    ]
    for orphan in orphan_listings:
        (root / "registry" / orphan).parent.mkdir(parents=True, exist_ok=True)
        (root / "registry" / orphan).write_bytes(b"half a file")
    successor.remove_unnamed(generation)

    assert before.items() <= _contents(root).items()
    assert not [name for name in _contents(root).keys() - before.keys() if "/_delta_log/" not in name]
    assert not list((root / "registry").glob(".probe-*")), "nor are empty directories left"
    reader = Registry(storage, APP)
    assert (reader.checkpoints(), reader.files(kept)) == ([kept], (a_file("1.sst"),))
    assert reader.publications() == [published(1)]
    put(successor, 2, 1, generation=generation)


def _contents(root: Path) -> dict[str, bytes]:
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def test_the_tables_can_be_read_as_plain_sql_says(storage, registry):
    put(registry, 1, None, [a_file("1.sst"), a_file("2.sst")])
    duckdb = pytest.importorskip("duckdb")
    path = storage.full("registry")
    rows = duckdb.sql(f"SELECT id, trigger, offsets FROM read_parquet('{path}/checkpoints/data/*.parquet')").fetchall()
    assert [(id, trigger, json.loads(offsets)) for id, trigger, offsets in rows] == [
        (1, "manual", {"landing": {"seen": ["1.parquet"]}})
    ]
    listed = duckdb.sql(
        f"SELECT checkpoint_id, name FROM read_parquet('{path}/state_files/*/*.parquet', hive_partitioning = true)"
        " ORDER BY 2"
    ).fetchall()
    assert listed == [(1, "1.sst"), (1, "2.sst")]


@pytest.mark.long
def test_a_listing_of_a_hundred_thousand_files_is_read_back_exactly(storage, registry):
    files = tuple(
        replace(
            a_file(f"{index}.sst", f"a{index % 7}", new=index % 3 == 0, kind=OUTPUT if index % 5 == 0 else STATE),
            subtask=index % 100,
            bytes=index << 20,
            snapshot=None if index % 2 else AttemptId(f"s{index % 11}"),
        )
        for index in range(100_000)
    )
    checkpoint = put(registry, 1, None, files)
    assert Registry(storage, APP).files(checkpoint) == files
