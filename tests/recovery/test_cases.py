"""Failure scenarios of checkpoints and their objects, over whole runs without Spark. Numbers as in other engines' lists
of such cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.errors import DamageError, TransientError, WeirError
from tests.recovery.small import Bank
from weir.epoch import failover, steps


@pytest.fixture
def bank(tmp_path) -> Bank:
    return Bank.at(tmp_path / "site")


def lost(*_: object) -> None:
    raise TransientError("the cluster was away")


def test_case_3_a_failed_checkpoints_discarded_uploads_harm_no_earlier_one(bank, monkeypatch):
    bank.epochs(1, 2)
    kept = bank.site.objects()
    with monkeypatch.context() as patched:
        patched.setattr(steps, "completed", lost)  # everything is uploaded and acked, nothing committed
        with pytest.raises(TransientError):
            bank.epochs(3)
    left = {name for name in bank.site.objects() if name.startswith(("state/", "tables/booked/data"))}
    assert left == {name for name in kept if name.startswith(("state/", "tables/booked/data"))}
    bank.assert_exact(1, 2)
    assert [report.checkpoint.id for report in bank.epochs()] == [4], "its id is not used again"
    bank.assert_exact(1, 2, 3)


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


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["oldest", "middle", "newest"])
def test_case_8_one_of_three_unreadable_checkpoints_is_raised_not_skipped(bank, victim):
    three = Bank(replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "3"}))
    three.epochs(1, 2, 3)
    rows = sorted((bank.site.storage / "registry/checkpoints/data").glob("*.parquet"))
    rows[victim].write_bytes(rows[victim].read_bytes()[:-20])
    before = bank.site.objects()
    with pytest.raises(WeirError) as raised:
        three.epochs(4)
    assert rows[victim].name in str(raised.value)
    after = bank.site.objects()
    assert all(after[name] == digest for name, digest in before.items() if name.startswith(("state/", "tables/")))
    assert not [name for name in after if "-e4/" in name]


def test_case_8_a_missing_listing_stops_the_run_before_anything_is_deleted(bank):
    three = Bank(replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "3"}))
    three.epochs(1, 2, 3)
    listing = next((bank.site.storage / "registry/state_files/checkpoint_id=2").glob("*.parquet"))
    listing.unlink()
    before = {name for name in bank.site.objects() if name.startswith("state/")}
    with pytest.raises(DamageError) as raised:
        bank.epochs(4)
    assert listing.name in str(raised.value)
    assert {name for name in bank.site.objects() if name.startswith("state/")} == before


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


def test_case_19_what_an_abandoned_line_left_never_comes_back(bank, monkeypatch, tmp_path):
    """A coordinator gets as far as epochs 2 to 4 and none of it is committed or cleaned up; the next goes on as 5, 6,
    ..."""
    bank.site.options["WEIR_CHECKPOINTS__MAX_CONCURRENT"] = "1"  # else more ids would be begun
    bank.epochs(1)
    base = bank.site.objects()
    with monkeypatch.context() as patched:
        patched.setattr(steps, "completed", lost)
        patched.setattr(failover, "discard", lambda *_: None)
        for numbers in ([2], [3], [4]):
            with pytest.raises(TransientError):
                bank.epochs(*numbers)
            # What it left in storage is put aside before the next coordinator cleans up.
            for name in bank.site.objects().keys() - base.keys():
                if name.startswith(("state/", "tables/booked/data")):
                    aside = tmp_path / "aside" / name
                    aside.parent.mkdir(parents=True, exist_ok=True)
                    aside.write_bytes((bank.site.storage / name).read_bytes())
    abandoned = [path.relative_to(tmp_path / "aside") for path in (tmp_path / "aside").rglob("*") if path.is_file()]
    assert {str(path).split("-e")[1].split("/")[0] for path in abandoned} == {"2", "3", "4"}
    for path in abandoned:  # as if it had been written late, by a zombie
        target = bank.site.storage / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((tmp_path / "aside" / path).read_bytes())
    assert [report.checkpoint.id for report in bank.epochs()] == [5, 6, 7]
    bank.assert_exact(1, 2, 3, 4)
    bank.epochs()
    assert not [path for path in abandoned if (bank.site.storage / path).exists()]
    bank.site.assert_no_orphans()
    _forget_local(bank)
    bank.epochs(5)
    bank.assert_exact(1, 2, 3, 4, 5)


def _forget_local(bank: Bank) -> None:
    work = Path(bank.site.settings.work_dir)
    for path in sorted(work.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
