from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.flights import pipeline
from state_ops.checkpoints import retention
from state_ops.checkpoints.reader_holds import HoldWatcher
from state_ops.checkpoints.registry import Registry
from state_ops.checkpoints.shared_state import reference_counts, unreferenced
from state_ops.delta.fenced_table import FencedTable
from state_ops.errors import DamageError, FencedError
from state_ops.ids import CheckpointId, Generation
from state_ops.records.checkpoint import PROMOTION, REWIND, Checkpoint
from state_ops.records.snapshot_files import CHANNEL, OUTPUT, StateFile
from state_ops.storage.storage import Storage
from tests.state_ops.checkpoints.test_registry import APP, a_checkpoint, a_file
from weir.ownership.context import RunContext
from weir.ownership.prune import prune
from weir.settings.configuration import Settings

ONE = Generation(1)


class Keeper:
    """A registry with its objects, that commits listings by the names of their files and keeps the newest few."""

    def __init__(self, storage: Storage, keep: int) -> None:
        self.storage, self.keep = storage, keep
        self.registry = Registry(storage, APP)
        self.generation = self.registry.take_over()
        self.watcher = HoldWatcher()

    def commit(self, id: int, parent: int | None, files: Sequence[StateFile]) -> Checkpoint:
        for file in files:
            if file.new:
                self.storage.put_bytes(file.path, file.name.encode())
        checkpoint = a_checkpoint(id, parent, files, self.generation)
        self.registry.commit(checkpoint, files)
        return checkpoint

    def listings(self) -> dict[CheckpointId, tuple[StateFile, ...]]:
        return {row.id: self.registry.files(row) for row in self.registry.checkpoints()}

    def prune(self) -> retention.RetentionPlan:
        decided = retention.plan(self.registry.checkpoints(), self.listings(), self.keep, self.registry.pins())
        retention.apply(self.registry, self.storage, self.generation, decided, self.watcher)
        return decided

    def counts(self) -> dict[str, int]:
        counted = reference_counts(self.listings().values())
        return {path.rsplit("/", 1)[-1]: number for path, number in counted.items()}

    def objects(self) -> set[str]:
        return {file.path.rsplit("/", 1)[-1] for file in self.storage.list("state")}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "pipeline"))


def files(owner: str, *names: str, old: Sequence[StateFile] = ()) -> list[StateFile]:
    """New files of one checkpoint, after those that it takes over from an older one."""
    return [*(replace(file, new=False) for file in old), *(a_file(name, owner) for name in names)]


def named(listing: Sequence[StateFile], *names: str) -> list[StateFile]:
    return [file for file in listing if file.name in names]


# -- worked example


def test_the_worked_example_of_incremental_checkpoints(storage):
    """Two retained, one operator, one subtask: counts after each completion, and what is deleted when."""
    keeper = Keeper(storage, keep=2)
    first = files("cp1", "1", "2")
    keeper.commit(1, None, first)
    assert keeper.prune().drop == ()
    assert keeper.counts() == {"1": 1, "2": 1}

    second = files("cp2", "3", "4", old=first)
    keeper.commit(2, 1, second)
    assert keeper.prune().drop == ()
    assert keeper.counts() == {"1": 2, "2": 2, "3": 1, "4": 1}

    # Compaction merged 1, 2 and 3.
    third = files("cp3", "(1,2,3)", "5", old=named(second, "4"))
    keeper.commit(3, 2, third)
    pruned = keeper.prune()
    assert (pruned.drop, pruned.delete) == ((1,), ())  # the counts of 1 and 2 fell to one
    assert keeper.counts() == {"1": 1, "2": 1, "3": 1, "4": 2, "5": 1, "(1,2,3)": 1}
    assert keeper.objects() == {"1", "2", "3", "4", "5", "(1,2,3)"}

    # Compaction merged 4, 5 and 6.
    fourth = files("cp4", "(4,5,6)", old=named(third, "(1,2,3)"))
    keeper.commit(4, 3, fourth)
    pruned = keeper.prune()
    assert pruned.drop == (2,)
    assert {file.name for file in pruned.delete} == {"1", "2", "3"}
    assert pruned.bytes == 30
    assert keeper.counts() == {"(1,2,3)": 2, "(4,5,6)": 1, "4": 1, "5": 1}
    assert keeper.objects() == {"4", "5", "(1,2,3)", "(4,5,6)"}
    assert [row.id for row in Registry(storage, APP).checkpoints()] == [3, 4]


# -- counts


def test_case_1_a_shared_file_goes_with_the_last_checkpoint_that_names_it(storage):
    keeper = Keeper(storage, keep=1)
    first = files("cp1", "1")
    keeper.commit(1, None, first)
    keeper.commit(2, 1, files("cp2", old=first))
    assert keeper.prune().delete == ()
    assert keeper.objects() == {"1"}
    keeper.commit(3, 2, files("cp3", "3"))
    assert [file.name for file in keeper.prune().delete] == ["1"]
    assert keeper.objects() == {"3"}


def test_published_output_is_never_deleted_but_channels_are(storage):
    keeper = Keeper(storage, keep=1)
    output = a_file("out.parquet", kind=OUTPUT)
    channel = replace(a_file("rows.parquet"), kind=CHANNEL, path="channels/counts/g1-e1/0-a.parquet")
    keeper.commit(1, None, [output, channel])
    keeper.commit(2, 1, [])
    assert [file.path for file in keeper.prune().delete] == [channel.path]
    assert storage.size(output.path) is not None
    assert storage.size(channel.path) is None


def test_pinned_checkpoints_stay(storage):
    keeper = Keeper(storage, keep=1)
    for id in range(1, 5):
        keeper.commit(id, id - 1 or None, files(f"cp{id}", str(id)))
    rows, listings = keeper.registry.checkpoints(), keeper.listings()
    decided = retention.plan(rows, listings, keep=1, needed={CheckpointId(2): ["the base of an epoch in flight"]})
    assert decided.drop == (1, 3)
    assert {file.name for file in decided.delete} == {"1", "3"}


@pytest.mark.parametrize("kind", [REWIND, PROMOTION])
def test_what_left_a_checkpoint_behind_is_called_by_its_name(kind: str) -> None:
    rows = [a_checkpoint(1, None), a_checkpoint(2, 1), replace(a_checkpoint(3, 1), kind=kind)]
    (why,) = retention.reasons(rows, keep=3)[CheckpointId(2)]
    assert why == f"abandoned by {kind} 3, which can be taken back while it is among the newest"


def test_a_file_that_one_checkpoint_lists_twice_is_one_reference():
    twice = [a_file("1"), replace(a_file("1"), subtask=1)]
    assert reference_counts([twice]) == {a_file("1").path: 1}
    assert unreferenced([twice], []) == [twice[1]]


# -- order and interruptions


def test_rows_go_before_objects_and_checkpoints_before_their_listings(storage, monkeypatch):
    keeper = Keeper(storage, keep=1)
    keeper.commit(1, None, files("cp1", "1"))
    keeper.commit(2, 1, files("cp2", "2"))
    seen = []
    real_commit, real_delete = FencedTable.commit, Storage.delete_files

    def commit(self, generation, adds=(), removes=(), check=None):
        seen.append(f"rows of {self.path}")
        real_commit(self, generation, adds, removes, check)

    def delete(self, paths):
        for path in paths:
            seen.append("object" if path.startswith("state/") else "file of " + "/".join(path.split("/")[:2]))
        return real_delete(self, paths)

    monkeypatch.setattr(FencedTable, "commit", commit)
    monkeypatch.setattr(Storage, "delete_files", delete)
    keeper.prune()
    assert seen == [
        "rows of registry/checkpoints",
        "rows of registry/state_files",
        "file of registry/checkpoints",
        "file of registry/state_files",
        "object",
    ]


def test_objects_that_an_interrupted_prune_left_are_the_next_generations_orphans(storage, monkeypatch):
    keeper = Keeper(storage, keep=1)
    first = files("cp1", "1", "2")
    keeper.commit(1, None, first)
    keeper.commit(2, 1, files("cp2", "3", old=named(first, "2")))
    real = Storage.delete_files

    def killed(self, paths):
        if any(path.startswith("state/") for path in paths):
            raise KeyboardInterrupt
        return real(self, paths)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "delete_files", killed)
        with pytest.raises(KeyboardInterrupt):
            keeper.prune()
    assert keeper.objects() == {"1", "2", "3"}
    successor = Keeper(storage, keep=1)
    assert [row.id for row in successor.registry.checkpoints()] == [2]
    orphans = retention.orphans(storage, successor.listings().values(), successor.generation)
    assert [file.path for file in orphans] == [first[0].path]


def test_only_older_generations_have_orphans_and_only_where_attempts_stage(storage):
    keeper = Keeper(storage, keep=3)
    keeper.commit(1, None, files("cp1", "1"))
    for path in (
        "state/counts/g1-e1/0-lost/000008.sst",
        "state/counts/g1-e9/0-lost/.tmp-123-000008.sst",
        "channels/counts/g2-e7/0-lost.parquet",
        "exchange/counts/g2-e7/0-lost/0.blocks",
        "exchange/counts/g2-e7/0-lost/.tmp-123-1.blocks",
        "exchange/counts/g3-e7/0-live/0.blocks",
        "exchange/counts/g2-e7/0-lost/notes.md",
        "state/counts/g3-e7/0-live/000008.sst",
        "state/counts/g4-e1/0-newer/000008.sst",
        "state/notes.txt",
        "tables/out/data/g1-e5/0-lost.parquet",
        "channels/counts/elsewhere/x.parquet",
        "state/counts/g1-e1/somebodys.txt",
        "channels/counts/g1-e1/notes.md",
    ):
        storage.put_bytes(path, b"x")
    orphans = {file.path for file in retention.orphans(storage, keeper.listings().values(), Generation(3))}
    assert orphans == {
        "state/counts/g1-e1/0-lost/000008.sst",
        "state/counts/g1-e9/0-lost/.tmp-123-000008.sst",
        "channels/counts/g2-e7/0-lost.parquet",
        "exchange/counts/g2-e7/0-lost/0.blocks",
        "exchange/counts/g2-e7/0-lost/.tmp-123-1.blocks",
    }


def test_a_fenced_coordinator_prunes_nothing(storage):
    keeper = Keeper(storage, keep=1)
    keeper.commit(1, None, files("cp1", "1"))
    keeper.commit(2, 1, files("cp2", "2"))
    Keeper(storage, keep=1)
    with pytest.raises(FencedError):
        keeper.prune()
    assert keeper.objects() == {"1", "2"}
    assert len(Registry(storage, APP).checkpoints()) == 2


def test_who_is_being_replaced_deletes_no_object(storage):
    """Its rows have gone; its successor has claimed no more than the first table, so that the listings could go,
    too."""
    keeper = Keeper(storage, keep=1)
    keeper.commit(1, None, files("cp1", "1"))
    keeper.commit(2, 1, files("cp2", "2"))
    keeper.registry.drop_rows(keeper.generation, [CheckpointId(1)])
    Registry(storage, APP)._checkpoints.claim()
    nothing = retention.RetentionPlan((), ())
    with pytest.raises(FencedError):
        retention.apply(keeper.registry, storage, keeper.generation, nothing, keeper.watcher)
    assert keeper.objects() == {"1", "2"}


def test_a_damaged_listing_stops_every_deletion(storage):
    keeper = Keeper(storage, keep=1)
    first = files("cp1", "1", "2")
    keeper.commit(1, None, first)
    broken = files("cp2", "3", old=first)
    keeper.registry.commit(a_checkpoint(2, 1, broken), broken[:1])
    keeper.commit(3, 2, files("cp3", "4", old=first[1:]))
    context = RunContext(pipeline, Settings(), storage, Registry(storage, APP), ONE, None, {})  # type: ignore[arg-type]
    with pytest.raises(DamageError, match="checkpoint 2 is damaged"):
        prune(context)
    assert keeper.objects() == {"1", "2", "4"}
    assert [row.id for row in Registry(storage, APP).checkpoints()] == [1, 2, 3]
