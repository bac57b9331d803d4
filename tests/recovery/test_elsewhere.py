"""Tables that lie outside of the pipeline's storage, were there before, and that others write to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.errors import ConfigurationError, PipelineError, WeirError
from state_ops.storage.storage import Storage
from tests.recovery import small
from tests.recovery.small import Bank, InMemoryExecutor
from weir import Pipeline, delta
from weir.operations import forks, promotion
from weir.ownership.pipeline_storage import open_storage
from weir.restore import rewind
from weir.run import fsck, maintenance

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}
SCHEMA = pa.schema([("id", pa.string()), ("at", pa.int64()), ("amount", pa.int64())])
OLD = pa.table({"id": ["old"], "at": [0], "amount": [0]}, schema=SCHEMA)


@pytest.fixture
def warehouse(tmp_path) -> Path:
    """A table of others' with a row."""
    write_deltalake(str(tmp_path / "warehouse" / "booked"), OLD)
    return tmp_path / "warehouse" / "booked"


def writing(name: str, warehouse: Path, root: Path) -> Bank:
    """A pipeline that writes to the table."""
    stage = replace(small.accounts, sink=delta.append(str(warehouse)))
    site = Bank.at(root, **RETAINED).site
    return Bank(replace(site, pipeline=Pipeline(name, (stage,), max_parallelism=8)))


@pytest.fixture
def bank(tmp_path, warehouse) -> Bank:
    return writing("small", warehouse, tmp_path / "site")


def amounts(warehouse: Path) -> list[int]:
    rows = DeltaTable(str(warehouse)).to_pyarrow_table()
    return sorted(set(rows["amount"].to_pylist())) if rows.num_rows % 10 == 1 else rows["amount"].to_pylist()


def test_rows_are_appended_to_what_is_there(bank, warehouse):
    bank.epochs(1, 2)
    assert amounts(warehouse) == [0, 1, 2]
    assert not (bank.site.storage / "tables").exists()
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings
    (staged,) = [path for path in warehouse.iterdir() if path.name.startswith("data-")]
    assert staged.is_dir()


def test_a_rewind_takes_back_its_own_rows_alone(bank, warehouse):
    bank.epochs(1, 2, 3)
    write_deltalake(str(warehouse), OLD, mode="append")
    obstacles = rewind.plan(bank.site.pipeline, bank.site.settings, 1).obstacles
    assert "others have committed" in obstacles[0]
    DeltaTable(str(warehouse)).restore(DeltaTable(str(warehouse)).version() - 1)
    obstacles = rewind.plan(bank.site.pipeline, bank.site.settings, 1).obstacles
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 1, accepted=obstacles)
    assert amounts(warehouse) == [0, 1]
    bank.epochs(4)
    assert amounts(warehouse) == [0, 1, 2, 3, 4]


@pytest.mark.long
def test_a_rewind_tells_its_own_checkpoints_from_those_of_another_pipeline(bank, warehouse, tmp_path):
    """Both count from 1."""
    other = writing("successor", warehouse, tmp_path / "other")
    for number in (1, 2, 3):
        bank.epochs(number)
        other.epochs(number)
    entries = [entry for entry in DeltaTable(str(warehouse)).history() if entry.get("weir.checkpoint") == "1"]
    assert len(entries) == 2
    plan = rewind.plan(other.site.pipeline, other.site.settings, 2)
    assert plan.tables[0].rows == 20
    plan = rewind.plan(bank.site.pipeline, bank.site.settings, 2)
    assert plan.tables[0].rows == 30 and "others have committed" in plan.obstacles[0]
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 3 - 1, accepted=plan.obstacles)
    assert DeltaTable(str(warehouse)).to_pyarrow_table().num_rows == 1 + 20 + 10


@pytest.mark.long
def test_what_a_crash_left_is_swept_and_another_pipelines_is_not(bank, warehouse, tmp_path, monkeypatch):
    other = writing("successor", warehouse, tmp_path / "other")
    other.epochs(1)

    def crash(*asked, **options):
        raise OSError("cut off")

    bank.epochs(1)
    for of in (bank, other):
        with monkeypatch.context() as patched:
            patched.setattr("state_ops.checkpoints.registry.Registry.commit", crash)
            patched.setattr("weir.ownership.fencing.delete_staged", crash)
            patched.setattr("weir.ownership.leftovers.remove", crash)
            with pytest.raises(WeirError):
                of.epochs(2)
    before = _staged(warehouse)
    bank.epochs(3)
    live = {uri.partition("/booked/")[2] for uri in DeltaTable(str(warehouse)).file_uris()}
    left = {path.rpartition("/")[0] for path in _staged(warehouse) - live}
    assert before - live - _staged(warehouse), "its own are swept"
    mine = {path.partition("/")[0] for path in live if "-e1/" in path}
    assert len(mine) == 2 and len({path.partition("/")[0] for path in left}) == 1, "the other pipeline's are not"
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings
    other.epochs(3)
    rows = DeltaTable(str(warehouse)).to_pyarrow_table()
    assert rows.num_rows == 1 + 2 * 30


def _staged(warehouse: Path) -> set[str]:
    return {str(path.relative_to(warehouse)) for path in warehouse.glob("data-*/*/*.parquet")}


def test_a_branch_has_a_table_of_its_own_and_is_promoted(bank, warehouse):
    bank.epochs(1, 2, 3)
    settings = bank.site.settings
    forks.fork(bank.site.pipeline, settings, "fix", 1)
    branch = Bank(replace(bank.site, pipeline=forks.branched(bank.site.pipeline, settings, "fix")))
    branch.epochs()
    assert amounts(warehouse) == [0, 1, 2, 3]
    assert open_storage(branch.site.pipeline, settings)[0].list_dirs("tables") == ["booked"]
    promotion.promote(bank.site.pipeline, settings, "fix", executor=InMemoryExecutor())
    assert amounts(warehouse) == [0, 1, 2, 3]
    bank.epochs(4)
    assert amounts(warehouse) == [0, 1, 2, 3, 4]


def test_a_table_that_asks_for_more_is_refused_before_the_first_row(bank, warehouse):
    DeltaTable(str(warehouse)).alter.add_constraint({"positive": "amount >= 0"})
    with pytest.raises(PipelineError, match="constraint positive"):
        bank.epochs(1)


def test_upserts_reach_a_table_elsewhere(tmp_path, warehouse):
    stage = replace(small.accounts, sink=delta.upsert(str(warehouse), "id"))
    site = Bank.at(tmp_path / "site", **RETAINED).site
    bank = Bank(replace(site, pipeline=Pipeline("small", (stage,), max_parallelism=8)))
    bank.epochs(1, 2)
    rows = DeltaTable(str(warehouse)).to_pyarrow_table().to_pylist()
    assert len(rows) == 1 + 8 + 4
    assert {row["amount"] for row in rows if row["id"].startswith("k")} == {2}
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings


def test_storage_reaches_what_is_mounted(tmp_path):
    storage = Storage(str(tmp_path / "own"), mounts={"tables/there": str(tmp_path / "there")})
    storage.put_bytes("tables/here/a", b"1")
    storage.put_bytes("tables/there/b/c", b"2")
    assert (tmp_path / "there" / "b" / "c").read_bytes() == b"2"
    assert sorted(file.path for file in storage.list()) == ["tables/here/a", "tables/there/b/c"]
    assert [file.path for file in storage.list("tables/there/b")] == ["tables/there/b/c"]
    assert sorted(storage.list_dirs("tables")) == ["here", "there"]
    assert storage.list_dirs("tables/there") == ["b"]
    assert storage.full("tables/there") == str(tmp_path / "there")
    assert storage.path_of(storage.full("tables/there/b/c")) == "tables/there/b/c"
    assert not storage.create("tables/there/b/c", b"3") and storage.create("tables/there/d", b"4")
    storage.delete_files(["tables/here/a", "tables/there/d"])
    assert storage.delete_tree("tables/there/b") == 1
    assert not list(storage.list())
    copy, arguments = storage.__reduce__()
    assert copy(*arguments).full("tables/there") == storage.full("tables/there")
    with pytest.raises(ConfigurationError, match="another kind of store"):
        Storage(str(tmp_path / "own"), mounts={"tables/there": "s3://bucket/there"})
