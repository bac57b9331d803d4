"""Failure scenarios of checkpoints and their objects, over whole runs without Spark. Numbers as in other engines' lists
of such cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.errors import DamageError, TransientError
from tests.recovery.small import Bank


@pytest.fixture
def bank(tmp_path) -> Bank:
    return Bank.at(tmp_path / "site")


def lost(*_: object) -> None:
    raise TransientError("the cluster was away")


@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
def test_case_7_a_commit_that_fails_after_all_acks_leaves_the_old_checkpoint(bank, monkeypatch, landed):
    bank.epochs(1)
    commit = Registry.commit

    def failing(self, checkpoint, files):
        if landed:
            commit(self, checkpoint, files)
        raise OSError("the connection was lost")

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", failing)
        if landed:
            bank.epochs(2)
        else:
            with pytest.raises(TransientError, match="could not be committed"):
                bank.epochs(2)
    assert bank.ids() == ([2] if landed else [1])
    if not landed:
        objects = {name for name in bank.site.objects() if "-e2/" in name}
        assert not objects, "the new state is discarded"
    bank.epochs()
    bank.assert_exact(1, 2)
    bank.site.assert_no_orphans()


@pytest.mark.parametrize("cut", ["missing", "truncated"])
def test_case_22_local_copies_do_not_hide_that_the_newest_checkpoint_lost_an_object(bank, cut):
    """Going on would re-reference what is gone, until pruning has left no checkpoint that could be restored."""
    three = Bank(replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "3"}))
    three.epochs(1, 2, 3)
    sst = next((bank.site.storage / "state/accounts").glob("g*-e3/*/*.sst"))
    if cut == "missing":
        sst.unlink()
    else:
        sst.write_bytes(sst.read_bytes()[:-1])
    before = bank.site.objects()
    with pytest.raises(DamageError, match=f"checkpoint 3 {'is missing' if cut == 'missing' else 'has'}") as raised:
        bank.epochs(4)
    assert sst.name in str(raised.value) and "weir fsck small" in str(raised.value)
    assert {name for name in before if name.startswith("state/")} <= bank.site.objects().keys(), "nothing was pruned"
    assert bank.ids() == [1, 2, 3]

    full = Bank(replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__MODE": "full"}))
    full.epochs()
    _forget_local(bank)
    bank.epochs(5)
    bank.assert_exact(1, 2, 3, 4, 5)


def test_somebodys_files_among_staged_rows_are_left_alone(bank):
    bank.epochs(1)
    theirs = bank.site.storage / "tables/booked/data/g1-e9/mine.txt"
    ours = theirs.with_name("0-0123456789abcdef0123456789abcdef.parquet")
    theirs.parent.mkdir(parents=True)
    for file in (theirs, ours):
        file.write_bytes(b"x")
    bank.epochs(2)
    assert (theirs.exists(), ours.exists()) == (True, False)


def _forget_local(bank: Bank) -> None:
    work = Path(bank.site.settings.work_dir)
    for path in sorted(work.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
