"""Forks: a branch has what its pipeline had, copies nothing, disturbs nothing, and takes nothing with it when it
goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from state_ops.coordination import lease, requests
from state_ops.errors import BusyError, ConfigurationError, DamageError, WeirError
from state_ops.fsck.findings import Kind
from state_ops.fsck.repair import plan_repair
from state_ops.records.checkpoint import FORK
from state_ops.records.pins import BRANCH
from state_ops.records.snapshot_files import STATE
from state_ops.storage.branches import is_inherited, own_of_parent
from tests.recovery.cutting import changes_fail_from
from tests.recovery.small import Bank, pipeline, until
from tests.recovery.test_rewind import bad
from tests.tools.sampling import sampled
from weir.execution.in_process import InMemoryExecutor
from weir.operations import forks
from weir.ownership.pipeline_storage import open_storage
from weir.run import fsck, maintenance
from weir.run.run import RunOptions, run

MANY = {"WEIR_CHECKPOINTS__NUM_RETAINED": "3"}


class Branched(Bank):
    """A bank of which `bank.branch("fix")` is a branch, looked at by the same means."""

    def branch(self, name: str, code=pipeline) -> Bank:
        branch = forks.branched(code, self.site.settings, name)
        return Bank(replace(self.site, pipeline=branch))

    def fork(self, name: str = "fix", at=None, **options) -> forks.Fork:
        return forks.fork(self.site.pipeline, self.site.settings, name, at, **options)


def at(tmp_path, **options: str) -> Branched:
    return Branched(Bank.at(tmp_path, **{**MANY, **options}).site)


@pytest.fixture
def bank(tmp_path) -> Branched:
    bank = at(tmp_path)
    bank.epochs(1, 2, 3)
    return bank


def nobody_lives(bank: Bank) -> None:
    """As after the death of the processes that had what leases say."""
    for left in bank.site.root.rglob("lease.json"):
        left.unlink()


def ran(branch: Bank) -> list:
    return list(run(branch.site.pipeline, branch.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def test_a_fork_copies_nothing_and_has_the_state_of_its_checkpoint(bank):
    before = bank.site.objects()
    fork = bank.fork(at=2)
    assert (fork.branch.name, fork.base, fork.to_dict()["files_behind"]) == ("fix", 2, {"landing": 1})
    new = bank.site.objects().keys() - before.keys()
    assert not [name for name in new if "/state/" in name or "/channels/" in name or "/tables/" in name]
    assert fork.bytes_own == 0
    branch = bank.branch("fix")
    assert (branch.registry.head().id, branch.registry.head().kind) == (2, FORK)
    assert branch.state() == {
        **{f"k{key}": (2, 3) for key in range(8)},
        **{f"only-{number}-{key}": (1, number) for number in (1, 2) for key in range(2)},
    }


def test_a_branch_reads_what_its_pipeline_has_read_and_no_more(bank):
    bank.fork(at=1)
    bank.land(4, 5)
    branch = bank.branch("fix")
    assert [report.checkpoint.id for report in ran(branch)] == [2, 3]
    assert branch.state() == bank.state()
    assert sorted(branch.site.table("booked")["amount"]) == [2] * 10 + [3] * 10, "its rows, in a table of its own"
    assert not ran(branch), "production has not read 4 and 5"
    [fork] = forks.forks(bank.site.pipeline, bank.site.settings)
    shared, listing = fork.head.bytes_total - fork.bytes_own, branch.registry.files(fork.head)
    assert fork.bytes_own > 0
    assert shared == sum(file.bytes for file in listing if file.kind == STATE and is_inherited(file.path))
    bank.epochs()
    assert [report.checkpoint.id for report in ran(branch)] == [4, 5]
    assert branch.state() == bank.state()
    bank.assert_exact(1, 2, 3, 4, 5)


@pytest.mark.long
def test_other_code_on_the_same_input(bank):
    bank.fork(at=1)
    branch = bank.branch("fix", bad)
    ran(branch)
    assert branch.state()["k0"] == (3, 1 + 2 * 2 + 2 * 3)
    bank.assert_exact(1, 2, 3)


def test_pruning_never_takes_what_a_branch_was_forked_from(bank):
    bank.fork(at=1)
    bank.epochs(*range(4, 12))
    assert bank.ids()[0] == 1
    branch = bank.branch("fix")
    named = branch.registry.files(branch.registry.head())
    assert named and all(is_inherited(file.path) for file in named)
    assert not fsck.examine(branch.site.pipeline, branch.site.settings).findings, "all of it is there"
    ran(branch)
    assert branch.state() == bank.state()
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings
    assert not fsck.examine(branch.site.pipeline, branch.site.settings).findings


@pytest.mark.long
def test_fsck_of_a_branch_looks_at_what_it_inherits(bank):
    bank.fork(at=2)
    branch = bank.branch("fix")
    for _ in range(2):  # as it was forked, then with an epoch of its own beside what it inherits
        report = fsck.examine(branch.site.pipeline, branch.site.settings)
        assert not report.findings
        assert report.checkpoints and all(checkpoint.intact for checkpoint in report.checkpoints)
        assert plan_repair(report).refused is None
        ran(branch)
    inherited = [file.path for file in branch.registry.files(branch.registry.head()) if is_inherited(file.path)]
    assert inherited
    (bank.site.storage / own_of_parent(inherited[0])).unlink()
    damage = fsck.examine(branch.site.pipeline, branch.site.settings).damage
    assert {(finding.kind, finding.path) for finding in damage} == {(Kind.MISSING_OBJECT, inherited[0])}


def test_a_branch_deletes_only_what_is_its_own(bank):
    bank.fork()
    branch = bank.branch("fix")
    named = [file.path for file in bank.registry.files(bank.registry.head())]
    bank.epochs(*range(4, 9))
    ran(branch)  # num_retained is 3: its first checkpoints go
    assert branch.ids()[0] > 3
    left = bank.site.objects()
    assert not [name for name in named if name not in left]
    storage, _ = open_storage(branch.site.pipeline, branch.site.settings)
    for touch in (lambda: storage.delete("parent/state/x"), lambda: storage.put_bytes("parent/state/x", b"")):
        with pytest.raises(DamageError, match="leaves the branch"):
            touch()


@pytest.mark.long
def test_dropping_frees_what_only_the_branch_kept(bank):
    bank.fork(at=1)
    bank.epochs(*range(4, 9))
    ran(bank.branch("fix"))
    before = bank.site.objects()
    forks.drop(bank.site.pipeline, bank.site.settings, "fix")
    left = bank.site.objects()
    assert not [name for name in left if name.startswith("branches/")]
    assert 1 not in bank.ids()
    assert any(name.startswith("state/") for name in before.keys() - left.keys())
    assert not forks.forks(bank.site.pipeline, bank.site.settings)
    bank.epochs(9)
    bank.assert_exact(*range(1, 10))
    with pytest.raises(WeirError, match="no branch 'fix'"):
        bank.branch("fix")


def test_a_running_coordinator_forks_and_drops(bank):
    with bank.coordinator() as reports:
        storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
        until(lambda: lease.alive(lease.read(storage)))
        bank.fork(at=3, reason="beside it")
        (fork,) = forks.forks(bank.site.pipeline, bank.site.settings)
        assert (fork.branch.name, fork.reason) == ("fix", "beside it")
        with pytest.raises(WeirError, match="a branch 'fix' already"):
            bank.fork()
        assert not ran(bank.branch("fix"))
        forks.drop(bank.site.pipeline, bank.site.settings, "fix")
        assert registry.pinned(BRANCH, "fix") is None
        requests.send(storage, requests.Request(requests.STOP))
    assert not reports
    bank.assert_exact(1, 2, 3)


def test_a_branch_that_runs_is_not_dropped(bank):
    bank.fork()
    branch = bank.branch("fix")
    with branch.coordinator():
        storage, _ = open_storage(branch.site.pipeline, branch.site.settings)
        until(lambda: lease.alive(lease.read(storage)))
        with pytest.raises(BusyError, match="small@fix"):
            forks.drop(bank.site.pipeline, bank.site.settings, "fix")
        requests.send(storage, requests.Request(requests.STOP))
    forks.drop(bank.site.pipeline, bank.site.settings, "fix")


def test_branches_have_no_branches_and_names_are_checked(bank):
    bank.fork()
    with pytest.raises(ConfigurationError, match="branches have none"):
        forks.fork(bank.branch("fix").site.pipeline, bank.site.settings, "more")
    with pytest.raises(ConfigurationError, match="cannot name a branch"):
        bank.fork("a/b")
    with pytest.raises(WeirError, match="no checkpoint 99"):
        bank.fork("other", 99)


def test_a_fork_of_a_savepoint(bank):
    maintenance.savepoint(bank.site.pipeline, bank.site.settings, "before", "", 5)
    bank.epochs(*range(4, 9))
    assert bank.fork("fix", "before").base == 3


@pytest.mark.parametrize(("what", "step"), sampled([("fork", 13), ("fork", 5), ("drop", 5)]))
def test_cut_off_anywhere_it_is_finished_by_asking_again(tmp_path, monkeypatch, what, step):
    for stop_at in range(0, 120, step):
        bank = at(tmp_path / str(stop_at))
        bank.epochs(1, 2)
        if what == "drop":
            bank.fork(at=1)
            ran(bank.branch("fix"))

        def ask(bank=bank):
            if what == "fork":
                return bank.fork(at=1)
            return forks.drop(bank.site.pipeline, bank.site.settings, "fix")

        went_on = False
        with changes_fail_from(monkeypatch, stop_at):
            try:
                ask()
                went_on = True
            except (WeirError, OSError):
                pass
        nobody_lives(bank)
        bank.epochs(3)  # production goes on, whatever came of it
        bank.assert_exact(1, 2, 3)
        there = {fork.branch.name: fork for fork in forks.forks(bank.site.pipeline, bank.site.settings)}
        if what == "fork":
            if "fix" not in there or there["fix"].head is None:
                ask()
            branch = bank.branch("fix")
            ran(branch)
            assert branch.state() == bank.state()
        else:
            if there:
                ask()
            assert not forks.forks(bank.site.pipeline, bank.site.settings)
            assert not [name for name in bank.site.objects() if name.startswith("branches/")]
        assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings
        if went_on:
            return
    raise AssertionError("it never came to its end")


def test_a_branch_that_is_not_whole_runs_nothing_and_is_not_promoted(bank, monkeypatch):
    def dies(*_, **__):
        raise OSError("this process is gone")

    with monkeypatch.context() as patched:
        patched.setattr(forks, "_plant", dies)
        with pytest.raises(WeirError):
            bank.fork(at=2)
    branch = bank.branch("fix")
    with pytest.raises(WeirError, match="small@fix is not whole"):
        ran(branch)
    assert bank.fork(at=2).base == 2, "asked for again, it is finished"
    assert [report.checkpoint.id for report in ran(branch)] == [3]


def test_what_a_zombie_of_a_dropped_branch_writes_is_removed(bank):
    fork = bank.fork()
    forks.drop(bank.site.pipeline, bank.site.settings, "fix")
    left = bank.site.storage / "branches" / fork.branch.id / "coordinator" / "lease.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    (finding,) = fsck.examine(bank.site.pipeline, bank.site.settings).findings
    assert finding.path.endswith("coordinator/lease.json")
    bank.epochs(4)
    assert not left.exists()
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings
