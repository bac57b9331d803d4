"""State in a backend of others that keeps its snapshots: whatever happens, results are those of a replay of the input by
Polars, and the backend keeps exactly the snapshots that checkpoints name.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

from state_ops.backends.base import REFERENCE
from state_ops.backends.composite import is_part
from state_ops.backends.loader import keeper
from state_ops.errors import ConfigurationError, DamageError, PipelineError
from state_ops.fsck.findings import Kind
from state_ops.records.pins import BRANCH
from state_ops.records.snapshot_files import STATE
from state_ops.storage.storage import Storage
from tests.recovery import small
from tests.recovery.small import Bank
from tests.recovery.test_backfill import Plant
from tests.state_ops import installed
from weir import debugging
from weir.execution.in_process import InMemoryExecutor
from weir.operations import drill, forks, plan, promotion
from weir.operations.pull_request.review import review
from weir.ownership.pipeline_storage import backend_options, open_storage
from weir.ownership.prune import prune
from weir.restore import restore
from weir.restore.recovery import owning
from weir.run import fsck, maintenance
from weir.settings.configuration import PROJECT

# Runs the next epochs of a bank, and dies right after a snapshot of the backend, or when everything is uploaded.
_DOOMED = """
import os, signal, sys
from pathlib import Path
from state_ops.snapshots import snapshot, stage_upload
from tests.recovery.small import Bank

module, name = {"snapshot": (snapshot, "take"), "upload": (stage_upload, "upload")}[sys.argv[3]]
real = getattr(module, name)

def doomed(*args, **options):
    real(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(module, name, doomed)
bank = Bank.at(Path(sys.argv[1]), **{**__import__("json").loads(sys.argv[2])})
bank.epochs(*map(int, sys.argv[4:]))
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = installed.install(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(site))
    return site


def vault() -> ModuleType:
    return importlib.import_module("weir_vault")


def options(root: Path, **more: str) -> dict[str, str]:
    return {
        "WEIR_STATE__BACKEND": "vault",
        "WEIR_STATE__OPTIONS": json.dumps({"root": str(root / "vault")}),
        "WEIR_CHECKPOINTS__NUM_RETAINED": "2",
        "WEIR_SPARK__PARALLELISM": "2",
        "WEIR_LEASE__HEARTBEAT_SECONDS": "0.5",
        **more,
    }


@pytest.fixture
def bank(tmp_path: Path, site: Path) -> Bank:
    return Bank.at(tmp_path / "bank", **options(tmp_path))


def with_options(bank: Bank, **more: str) -> Bank:
    return Bank(replace(bank.site, options={**bank.site.options, **more}))


def branch_of(bank: Bank, name: str) -> Bank:
    return Bank(replace(bank.site, pipeline=forks.branched(bank.site.pipeline, bank.site.settings, name)))


def assert_replayed(bank: Bank) -> None:
    """State and table are what Polars makes of all files that have landed."""
    rows = pl.concat([pl.read_parquet(file) for file in sorted(bank.site.landing.glob("*.parquet"))])
    sums = rows.group_by("id").agg(rows=pl.len().cast(pl.Int64), total=pl.sum("amount"))
    assert bank.state() == {id: (count, total) for id, count, total in sums.iter_rows()}
    table = bank.site.table("booked")
    assert sorted(zip(table["id"], table["amount"], strict=True)) == sorted(rows.select("id", "amount").iter_rows())


def kept(bank: Bank) -> set[str]:
    """All that the backend keeps, for whichever storage."""
    state = keeper("vault", backend_options(bank.site.settings))
    assert state is not None
    return set(state.kept(""))


def named(*banks: Bank) -> set[str]:
    """The snapshots that retained checkpoints name."""
    keys = set()
    for bank in banks:
        storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
        for row in registry.checkpoints():
            keys |= {storage.full(file.path) for file in registry.files(row) if file.kind == STATE}
    return keys


def ended(bank: Bank) -> None:
    """Delete every checkpoint without a name."""
    with owning(bank.site.pipeline, bank.site.settings, InMemoryExecutor(), epochs=False) as owner:
        maintenance.end(owner.context)


def test_the_backend_keeps_what_retained_checkpoints_name_and_no_more(bank):
    assert not plan.plan(bank.site.pipeline, bank.site.settings).stops
    for number in range(1, 6):
        bank.epochs(number)
        assert kept(bank) == named(bank)
    assert bank.ids() == [4, 5] and len(kept(bank)) == 4
    assert all(key.endswith(f"/{REFERENCE}") for key in kept(bank))
    assert_replayed(bank)
    assert not plan.plan(bank.site.pipeline, bank.site.settings).stops
    bank.site.assert_no_orphans()
    shutil.rmtree(bank.site.root / "work")
    bank.epochs(6)
    assert_replayed(bank)
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings


def test_a_savepoint_keeps_its_snapshots_until_it_is_dropped(bank):
    bank.epochs(1)
    maintenance.savepoint(bank.site.pipeline, bank.site.settings, "first", "", 60)
    bank.epochs(2, 3, 4)
    assert bank.ids() == [1, 3, 4] and kept(bank) == named(bank)
    maintenance.drop_savepoint(bank.site.pipeline, bank.site.settings, "first", 60)
    bank.epochs(5)
    assert bank.ids() == [4, 5] and kept(bank) == named(bank)


@pytest.mark.parametrize("when", ["snapshot", "upload"])
def test_a_run_that_is_killed_before_its_commit_leaves_nothing_for_long(bank, site, when):
    bank.epochs(1, 2)
    env = os.environ | {"PYTHONPATH": f"{PROJECT}{os.pathsep}{site}"}
    asked = [str(bank.site.root), json.dumps(bank.site.options), when, "3"]
    doomed = subprocess.run([sys.executable, "-c", _DOOMED, *asked], env=env, check=False)
    assert doomed.returncode == -signal.SIGKILL
    assert bank.registry.head().id == 2
    left = kept(bank) - named(bank)
    assert left, "the backend has made a snapshot that no checkpoint names"
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    orphans = {storage.full(finding.path) for finding in fsck.examine(bank.site.pipeline, bank.site.settings).findings}
    assert left <= orphans
    bank.epochs(4)
    assert kept(bank) == named(bank)
    assert_replayed(bank)


def test_repair_deletes_what_was_left(bank, weir):
    bank.epochs(1)
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    path = f"state/accounts/g1-e9/0-{'0' * 32}/{REFERENCE}"
    vault().Vault(backend_options(bank.site.settings)).begin(storage.full(path))
    report = fsck.examine(bank.site.pipeline, bank.site.settings)
    assert [(finding.kind, finding.path) for finding in report.findings] == [(Kind.ORPHAN_OBJECT, path)]
    assert weir(bank.site, "fsck", "small", "--repair", "--yes").code == 0
    assert kept(bank) == named(bank)


def test_it_goes_back_and_on_at_another_parallelism(bank):
    bank.epochs(1, 2)
    maintenance.rewind(bank.site.pipeline, bank.site.settings, 1)
    assert kept(bank) == named(bank)
    bank.epochs()
    assert_replayed(bank)
    for number, parallelism in enumerate((3, 1, 4), 3):
        bank = with_options(bank, WEIR_SPARK__PARALLELISM=str(parallelism))
        bank.epochs(number)
        files = [file for file in bank.registry.files(bank.registry.head()) if file.kind == STATE]
        assert parallelism == 4 or any(is_part(file.name) for file in files), "databases lie side by side"
        assert_replayed(bank)
        assert kept(bank) == named(bank)
        shutil.rmtree(bank.site.root / "work")
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings


def test_a_branch_has_snapshots_of_its_own_and_its_promotion_outlives_it(bank):
    code, settings = bank.site.pipeline, bank.site.settings
    bank.epochs(1, 2)
    before = kept(bank)
    forks.fork(code, settings, "fix", 1)
    assert kept(bank) == before, "a fork copies nothing"
    branch = branch_of(bank, "fix")
    branch.epochs()
    assert kept(bank) == before | {key for key in named(branch) if "/branches/" in key} > before
    assert not fsck.examine(branch.site.pipeline, settings).findings
    promotion.promote(code, settings, "fix", executor=InMemoryExecutor())
    forks.drop(code, settings, "fix")
    assert not [pin for pin in bank.registry.pins() if pin.kind == BRANCH]
    bank.epochs(3)
    assert kept(bank) == named(bank) and not [key for key in kept(bank) if "/branches/" in key]
    shutil.rmtree(bank.site.root / "work")
    bank.epochs(4)
    assert_replayed(bank)
    assert not fsck.examine(code, settings).findings


def test_a_branch_that_is_dropped_takes_its_snapshots_along(bank):
    bank.epochs(1, 2)
    forks.fork(bank.site.pipeline, bank.site.settings, "try", 1)
    branch_of(bank, "try").epochs()
    forks.drop(bank.site.pipeline, bank.site.settings, "try")
    bank.epochs(3)
    assert kept(bank) == named(bank)
    assert_replayed(bank)


def test_another_pipeline_starts_from_a_savepoint_and_either_may_go(bank):
    bank.epochs(1)
    maintenance.savepoint(bank.site.pipeline, bank.site.settings, "base", "", 60)
    other = Bank(replace(bank.site, pipeline=small.successor))
    other.epochs(2, start_from=f"{bank.site.storage}:base")
    assert kept(bank) == named(bank, other)
    ended(bank)
    maintenance.drop_savepoint(bank.site.pipeline, bank.site.settings, "base", 60)
    ended(bank)
    assert kept(bank) == named(other)
    shutil.rmtree(bank.site.root / "work")
    other.epochs(3)
    assert other.state()["k0"] == (3, 6)


def test_what_the_backend_has_lost_is_said_and_gone_back_from(bank):
    bank.epochs(1, 2)
    (row, head), registry = bank.registry.checkpoints(), bank.registry
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    lost = next(file for file in registry.files(head) if file.kind == STATE)
    vault().Vault(backend_options(bank.site.settings)).delete(storage.full(lost.path))
    (finding,) = fsck.examine(bank.site.pipeline, bank.site.settings).findings
    assert (finding.kind, finding.path, finding.checkpoints) == (Kind.MISSING_OBJECT, lost.path, (2,))
    assert "The vault has no such snapshot" in finding.what
    assert drill.drill(bank.site.pipeline, bank.site.settings, InMemoryExecutor()).problems
    with pytest.raises(DamageError, match="no such snapshot"):
        restore.restore(bank.site.pipeline, bank.site.settings, storage, registry, head, "test")
    maintenance.rewind(bank.site.pipeline, bank.site.settings, row.id)
    bank.epochs()
    assert_replayed(bank)


def test_epochs_are_played_again_and_nothing_of_that_stays(bank, tmp_path):
    bank.epochs(1, 2)
    before = kept(bank)
    assert debugging.debug(bank.site.pipeline, 2, settings=bank.site.settings).is_same
    assert kept(bank) == before
    done = drill.drill(bank.site.pipeline, bank.site.settings, InMemoryExecutor())
    assert (done.problems, done.not_replayed) == ((), None)
    assert kept(bank) == before
    tried = review(
        bank.site.pipeline, bank.site.settings, epochs=1, scratch=tmp_path / "ci", executor=InMemoryExecutor()
    )
    assert tried.failed is None and not tried.found
    assert kept(bank) == before


def test_a_backfill_of_it_is_a_recomputation(tmp_path, site):
    plant = Plant.at(tmp_path / "plant")
    plant = Plant(replace(plant.site, options={**plant.site.options, **options(tmp_path)}))
    plant.land(1, 2, 3, 4)
    plant.run()
    plant.land(2, 3, value=100)
    assert plant.backfill(2, 3, promote=True).promoted is not None
    plant.assert_exact()
    assert kept(Bank(plant.site)) == named(Bank(plant.site))
    plant.land(5)
    plant.run()
    plant.assert_exact()


def test_under_another_backend_no_snapshot_is_lost(bank):
    bank.epochs(1, 2)
    other = with_options(bank, WEIR_STATE__BACKEND="filesystem", WEIR_STATE__OPTIONS="{}")
    before = kept(bank)
    with pytest.raises(ConfigurationError, match="new uid"):
        other.epochs(3)
    with owning(other.site.pipeline, other.site.settings, InMemoryExecutor(), epochs=False) as owner:
        assert prune(owner.context, keep=1) == (1,)
    assert kept(bank) == before > named(bank), "only the backend that keeps them can delete them"
    bank.epochs()
    assert kept(bank) == named(bank)
    assert_replayed(bank)


def test_storage_tells_the_backend_wherever_it_is(bank):
    bank.epochs(1)
    storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
    assert pickle.loads(pickle.dumps(storage)).keeper == storage.keeper is not None
    path = next(file.path for file in storage.list("state"))
    assert not Storage(storage.uri).delete(path)
    assert storage.size(path) and storage.full(path) in kept(bank)
    assert storage.delete(path)
    assert storage.size(path) is None and storage.full(path) not in kept(bank)


def test_a_reference_that_is_too_long_is_refused(bank, monkeypatch):
    kind = vault().VaultBackend
    real = kind.snapshot

    def long(self, target):
        (file,) = real(self, target)
        file.write_text("x" * 4097)
        return [file]

    monkeypatch.setattr(kind, "snapshot", long)
    with pytest.raises(PipelineError, match="has 4,097 bytes"):
        bank.epochs(1)
    monkeypatch.undo()
