"""A run on each backend that is killed, fails, loses its local files and changes its backend; against a replay."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from state_ops.errors import ConfigurationError, StateSizeError, TransientError
from state_ops.records.snapshot_files import STATE
from state_ops.snapshots import stage_upload
from tests.recovery.small import Bank
from tests.state_ops import installed
from tests.tools.reading import without
from tests.tools.sampling import sampled
from weir.epoch import steps
from weir.settings.configuration import PROJECT

# Runs the next epochs of a bank, and dies at the end of an upload, by which everything is staged and nothing committed.
_DOOMED = """
import os, signal, sys
from pathlib import Path
from state_ops.snapshots import stage_upload as pending_upload
from tests.recovery.small import Bank

real = pending_upload.upload

def upload(*args, **options):
    real(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)

pending_upload.upload = upload
bank = Bank.at(Path(sys.argv[1]), WEIR_STATE__BACKEND=sys.argv[2], WEIR_LEASE__HEARTBEAT_SECONDS="0.5")
bank.epochs(*map(int, sys.argv[3:]))
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = installed.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    return site


def bank_on(root: Path, backend: str, **options: str) -> Bank:
    return Bank.at(root / "bank", WEIR_STATE__BACKEND=backend, **options)


@pytest.mark.parametrize("backend", sampled(["rocksdb", "memory", "filesystem", "sqlite"], 2))
def test_a_run_that_is_killed_fails_and_loses_its_files_equals_a_replay(tmp_path, site, backend, monkeypatch):
    bank = bank_on(tmp_path, backend, WEIR_LEASE__HEARTBEAT_SECONDS="0.5")
    bank.epochs(1, 2)
    if backend in (
        "filesystem",
        "sqlite",
    ):  # memory is the same; rocksdb is killed at every one of its calls by the matrix
        env = os.environ | {"PYTHONPATH": f"{PROJECT}{os.pathsep}{site}"}
        doomed = subprocess.run([sys.executable, "-c", _DOOMED, bank.site.root, backend, "3"], env=env, check=False)
        assert doomed.returncode == -signal.SIGKILL
        assert bank.registry.head().id == 2
    bank.epochs(3, 4)
    bank.assert_exact(1, 2, 3, 4)

    real = stage_upload.upload

    def failing(*args, **options):
        monkeypatch.setattr(stage_upload, "upload", real)
        real(*args, **options)
        raise TransientError("the storage went away")

    monkeypatch.setattr(stage_upload, "upload", failing)
    with pytest.raises(TransientError, match="the storage went away"):
        bank.epochs(5)
    bank.assert_exact(1, 2, 3, 4)
    bank.epochs(6)
    shutil.rmtree(bank.site.root / "work")
    bank.epochs(7)
    bank.assert_exact(1, 2, 3, 4, 5, 6, 7)
    bank.site.assert_no_orphans()
    assert bank.registry.head().operators["accounts"].backend == backend


@pytest.mark.parametrize("backend", ["filesystem", "sqlite"])
def test_a_subtask_that_wrote_nothing_names_its_files_again_but_not_in_full_mode(tmp_path, site, backend):
    bank = bank_on(tmp_path, backend)
    bank.epochs(1)
    before = state_objects(bank)
    assert len(bank.epochs(drain=True)) == 1
    assert state_objects(bank) == before
    full = bank_on(tmp_path, backend, WEIR_CHECKPOINTS__MODE="full")
    assert len(full.epochs(drain=True)) == 1
    assert not state_objects(full) & before
    full.assert_exact(1)


@pytest.mark.long
def test_state_past_the_limit_of_memory_declines_the_epoch_and_goes_on_in_files(tmp_path):
    bank = bank_on(tmp_path, "memory", WEIR_STATE__MAX_STATE_SIZE_MB="0.0005", WEIR_CHECKPOINTS__TOLERABLE_FAILURES="9")
    bank.epochs(1)
    with pytest.raises(StateSizeError) as raised:  # tolerated failures are those that may pass
        for number in range(2, 30):
            bank.epochs(number)
    for word in ("stage accounts", "state.max_state_size_mb", "filesystem"):
        assert word in str(raised.value), word
    assert number > 2
    bank.assert_exact(*range(1, number))
    bank = bank_on(tmp_path, "filesystem")
    bank.epochs()
    bank.assert_exact(*range(1, number + 1))


@pytest.mark.parametrize(("before", "after"), [("rocksdb", "filesystem"), ("memory", "rocksdb"), ("sqlite", "memory")])
def test_another_backend_is_refused_before_the_first_row(tmp_path, site, before, after):
    bank_on(tmp_path, before).epochs(1)
    other = bank_on(tmp_path, after)
    objects = other.site.objects()
    with pytest.raises(ConfigurationError) as raised:
        other.epochs(2)
    for word in (f"'{before}'", f"'{after}'", "accounts", "new uid"):
        assert word in str(raised.value), word
    assert {name for name in other.site.objects() if name.startswith("state/")} == {
        name for name in objects if name.startswith("state/")
    }
    other.assert_exact(1)  # is read with what wrote it
    bank = bank_on(tmp_path, before)
    bank.epochs(3)
    bank.assert_exact(1, 2, 3)


def test_a_checkpoint_that_names_no_backend_is_rocksdbs(tmp_path, monkeypatch):
    stats = steps.figures_of
    bank = bank_on(tmp_path, "rocksdb")
    with monkeypatch.context() as patch:
        patch.setattr(steps, "figures_of", lambda *of: without(stats(*of), "backend"))
        bank.epochs(1)
    bank.assert_exact(1)
    with pytest.raises(ConfigurationError, match="'rocksdb'"):
        bank_on(tmp_path, "memory").epochs(2)
    bank.epochs(3)
    bank.assert_exact(1, 2, 3)


def test_an_unknown_backend_is_refused_before_the_first_row(tmp_path):
    bank = bank_on(tmp_path, "rockdb")
    with pytest.raises(ConfigurationError, match="no state backend 'rockdb'"):
        bank.epochs(1)
    assert not [name for name in bank.site.objects() if name.startswith(("state/", "tables/"))]


def state_objects(bank: Bank) -> set[str]:
    return {file.path for file in bank.registry.files(bank.registry.head()) if file.kind == STATE}
