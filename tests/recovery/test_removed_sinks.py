"""A deploy that removes, renames, moves or changes a sink after an epoch was cut off before its commit: what the epoch
staged is swept, and what a table has stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from state_ops.checkpoints.registry import Registry
from state_ops.errors import WeirError
from tests.recovery import small
from tests.recovery.ledger import LedgerSink
from tests.recovery.small import Bank
from weir import Pipeline, delta
from weir.run import fsck, maintenance


def using(bank: Bank, sink: object, **options: object) -> Bank:
    stage = replace(small.accounts, sink=sink)
    return Bank(replace(bank.site, pipeline=Pipeline("small", (stage,), max_parallelism=8, **options)))


@pytest.fixture
def bank(tmp_path) -> Bank:
    return Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="8")


def cut(bank: Bank, monkeypatch, number: int) -> None:
    """An epoch whose process ends right before the commit."""

    def crash(*asked, **options):
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", crash)
        patched.setattr("weir.ownership.fencing.delete_staged", crash)
        patched.setattr("weir.ownership.leftovers.remove", crash)
        with pytest.raises(WeirError):
            bank.epochs(number)


def staged(root: Path) -> set[Path]:
    return {path for path in root.rglob("*.parquet") if path.parent.name.startswith("g") and "data" in path.parts[-3]}


def amounts(place: Path) -> dict[int, int]:
    return dict(DeltaTable(str(place)).to_pandas()["amount"].value_counts().sort_index())


KILLED = """
import os, signal, sys
from pathlib import Path
from state_ops.checkpoints.registry import Registry
from tests.recovery.small import Bank
Registry.commit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
Bank.at(Path(sys.argv[1]), WEIR_CHECKPOINTS__NUM_RETAINED="8").epochs()
"""

Sinks = Callable[[Path], object]
CHANGES: dict[str, tuple[Sinks, Sinks]] = {
    "removed": (lambda _: delta.append("booked"), lambda _: None),
    "renamed": (lambda _: delta.append("booked"), lambda _: delta.append("other")),
    "moved elsewhere": (lambda _: delta.append("booked"), lambda root: delta.append(str(root / "there/booked"))),
    "removed elsewhere": (lambda root: delta.append(str(root / "there/booked")), lambda _: None),
    "moved here": (lambda root: delta.append(str(root / "there/booked")), lambda _: delta.append("booked")),
    "another system": (
        lambda _: delta.append("booked"),
        lambda root: LedgerSink(name="ledger", path=str(root / "ledger.db")),
    ),
    "upserted": (lambda _: delta.append("booked"), lambda _: delta.upsert("booked", "id", order_by=["at"])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_of_an_epoch_that_failed_go_with_their_sink(bank, monkeypatch, tmp_path, change):
    then, now = (sink(tmp_path) for sink in CHANGES[change])
    before, deployed = using(bank, then), using(bank, now)
    before.epochs(1)
    (table,) = (path.parent for path in tmp_path.rglob("_delta_log") if "tables" in path.parts or "there" in path.parts)
    published = staged(tmp_path)
    cut(before, monkeypatch, 2)
    assert staged(tmp_path) > published
    with maintenance.owning(deployed.site.pipeline, deployed.site.settings, epochs=False):
        pass
    assert staged(tmp_path) == published
    assert amounts(table) == {1: 10}
    if not change.startswith("moved"):  # its rows are elsewhere than the code says, which is damage
        assert not fsck.examine(deployed.site.pipeline, deployed.site.settings).findings


def test_rows_of_a_process_that_was_killed_go_with_their_sink(bank, tmp_path):
    before, deployed = using(bank, delta.append("booked")), using(bank, None)
    before.epochs(1)
    published = staged(tmp_path)
    before.land(2)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(bank.site.root)], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert staged(tmp_path) > published
    deployed.epochs()
    assert staged(tmp_path) == published
    assert amounts(bank.site.storage / "tables" / "booked") == {1: 10}
    assert not fsck.examine(deployed.site.pipeline, deployed.site.settings).findings


def test_rows_of_a_first_epoch_that_failed_are_swept_though_no_checkpoint_knows_its_sink(bank, monkeypatch, tmp_path):
    cut(using(bank, delta.append("booked")), monkeypatch, 1)
    deployed = using(bank, None)
    left = staged(tmp_path)
    findings = fsck.examine(deployed.site.pipeline, deployed.site.settings).findings
    assert left and {tmp_path / "site" / "storage" / "small" / finding.path for finding in findings} >= left
    assert {finding.kind.value for finding in findings if "tables/" in (finding.path or "")} == {"orphan rows"}
    deployed.epochs()
    assert not staged(tmp_path)
    findings = fsck.examine(deployed.site.pipeline, deployed.site.settings).findings
    assert {finding.path for finding in findings} <= {"tables/booked/_delta_log/00000000000000000000.json"}


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_rows_that_a_table_got_before_the_commit_stay_when_its_sink_goes(bank, monkeypatch, tmp_path, delivery):
    before = using(bank, delta.append("booked"), delivery="at_least_once")
    before.epochs(1)
    cut(before, monkeypatch, 2)
    table = bank.site.storage / "tables" / "booked"
    assert amounts(table) == {1: 10, 2: 10}
    deployed = using(bank, None, delivery=delivery)
    deployed.epochs(3)
    assert amounts(table) == {1: 10, 2: 10}
    assert not [one for one in fsck.examine(deployed.site.pipeline, deployed.site.settings).findings if one.bytes]


@pytest.mark.parametrize("lies", ["tables", "there"])
def test_a_table_that_nobody_can_read_keeps_no_pipeline_from_starting(bank, monkeypatch, tmp_path, lies):
    place = bank.site.storage / "tables" / "booked" if lies == "tables" else tmp_path / "there" / "booked"
    before = using(bank, delta.append("booked" if lies == "tables" else str(place)))
    before.epochs(1)
    cut(before, monkeypatch, 2)
    if lies == "tables":
        (place / "_delta_log" / f"{0:020}.json").write_text("{torn")
    else:
        place.rename(tmp_path / "kept")
        place.write_text("no directory")
    left = staged(tmp_path)
    deployed = using(bank, None)
    deployed.epochs(3)
    assert staged(tmp_path) == left
    findings = fsck.examine(deployed.site.pipeline, deployed.site.settings).findings
    assert {"tables": "unreadable table", "there": "missing table"}[lies] in {one.kind.value for one in findings}
