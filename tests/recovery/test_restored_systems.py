"""A sink that is no table, whose system somebody has restored from a backup: a rewind goes back to that moment with it,
and every row comes once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from state_ops.errors import DamageError, WeirError
from tests.recovery import ledger
from tests.recovery.refusing_ledger import banks
from tests.recovery.small import Bank
from tests.recovery.test_rows_refused import amounts, booked, both
from weir.ownership import derived_checkpoint, publish
from weir.restore import rewind
from weir.run import fsck, maintenance


@pytest.fixture(params=[False, True], ids=["rows stay", "rows are taken back"])
def bank(request, tmp_path) -> Bank:
    return banks(tmp_path / "site", both(str(tmp_path / "ledger.db"), takes_back=request.param))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "ledger.db"


def restored(bank: Bank, path: Path, to: int) -> None:
    """Three checkpoints, after which the ledger is again as it was after checkpoint `to`; 0: it is new."""
    for number in (1, 2, 3):
        bank.epochs(number)
        if number == to:
            shutil.copy(path, path.with_suffix(".backup"))
    path.unlink()
    if to:
        path.with_suffix(".backup").rename(path)


def back(bank: Bank, to: int):
    decided = rewind.plan(bank.site.pipeline, bank.site.settings, to)
    (obstacle,) = [one for one in decided.obstacles if "by its marker" in one]
    assert decided.obstacles == (obstacle,), "nothing that stays in the ledger, for it has none of that"
    with pytest.raises(WeirError, match="by its marker, where"):
        maintenance.rewind(bank.site.pipeline, bank.site.settings, to)
    return maintenance.rewind(bank.site.pipeline, bank.site.settings, to, accepted=decided.obstacles)


def assert_exact(bank: Bank, path: Path, *numbers: int) -> None:
    assert booked(str(path)) == amounts(bank) == list(numbers)
    assert len(ledger.rows_of(str(path))) == 10 * len(numbers)
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings


@pytest.mark.parametrize("to", [0, 1, 2])
def test_a_rewind_goes_back_to_the_moment_of_the_backup(bank, path, to):
    restored(bank, path, to)
    with pytest.raises(DamageError) as damage:
        bank.epochs(4)
    assert f"weir rewind small --to {to} --force" in (damage.value.next or "")
    rewound = back(bank, to)
    assert rewound.sinks["ledger"].lacks == [id for id in (1, 2, 3) if id > to]
    bank.epochs()
    assert_exact(bank, path, 1, 2, 3, 4)


@pytest.mark.parametrize("to", [0, 1])
def test_whoever_comes_after_a_crash_completes_it(bank, path, to, monkeypatch):
    restored(bank, path, to)
    with monkeypatch.context() as patched:
        patched.setattr(derived_checkpoint, "publish_missing", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
        with pytest.raises(WeirError, match="cut off"):
            back(bank, to)
    bank.epochs(4)
    assert_exact(bank, path, 1, 2, 3, 4)


def test_rows_that_are_committed_and_not_published_come_with_the_others(bank, path, monkeypatch):
    restored(bank, path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(publish, "_publish", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
        patched.setattr("weir.sinks.open_sinks.Sinks.check_chain", lambda *_: None)
        with pytest.raises(WeirError, match="cut off"):
            bank.epochs(4)
    with pytest.raises(DamageError, match="is at 1, not at 3"):
        bank.epochs()
    back(bank, 1)
    bank.epochs()
    assert_exact(bank, path, 1, 2, 3, 4)


@pytest.mark.parametrize("to", [0, 2])
def test_a_rewind_to_another_moment_is_refused(bank, path, to):
    """Rows between that moment and the backup's would be missing, or there twice."""
    restored(bank, path, 1)
    accepted = rewind.plan(bank.site.pipeline, bank.site.settings, to).obstacles
    with pytest.raises(DamageError, match="its last published checkpoint is 1"):
        maintenance.rewind(bank.site.pipeline, bank.site.settings, to, accepted=accepted)
    assert bank.registry.head().id == 3


def test_nobody_goes_back_to_rows_that_went_with_the_restore_without_hearing_of_it(bank, path):
    restored(bank, path, 1)
    back(bank, 1)
    with pytest.raises(WeirError, match="rows of checkpoint 3 never came into the sink ledger"):
        maintenance.rewind(bank.site.pipeline, bank.site.settings, 3)
