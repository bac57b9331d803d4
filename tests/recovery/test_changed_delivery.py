"""What sinks got before a commit that failed, and who comes after: under another delivery, without the lease, or while
the process that was taken for dead goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.coordination.lease import LEASE, Heartbeat
from state_ops.errors import DamageError, WeirError
from state_ops.ids import CheckpointId, Generation, epoch_dir
from state_ops.records.checkpoint import PROMOTION
from tests.recovery import small
from tests.recovery.ledger import LedgerSink
from tests.recovery.small import Bank
from tests.recovery.test_delivery import RETAINED, amounts, bank, cut_off, damage  # noqa: F401  a fixture
from tests.recovery.test_forks import Branched, at
from tests.recovery.test_promotion import promoted
from tests.tools.sampling import sampled
from weir.definition import Finding, Verdict
from weir.execution.in_process import InMemoryExecutor
from weir.operations.plan import plan
from weir.ownership.publish import deliver
from weir.restore import recovery, rewind
from weir.run import maintenance
from weir.sinks.open_sinks import Sinks


def delivering(bank: Bank, delivery: str) -> Bank:  # noqa: F811
    return Bank(replace(bank.site, pipeline=replace(bank.site.pipeline, delivery=delivery)))


@pytest.fixture
def ahead(bank, monkeypatch):  # noqa: F811
    """A sink with checkpoint 1, and with 2, whose commit failed."""
    bank.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", cut_off)
        with pytest.raises(WeirError):
            bank.epochs(2)
    assert amounts(bank) == {1: 1, 2: 1} and bank.ids() == [1]
    return bank


@pytest.mark.parametrize("delivery", sampled(["exactly_once", "at_most_once"]))
def test_rows_of_an_epoch_that_failed_stay_when_delivery_changes(ahead, delivery):
    with pytest.raises(DamageError, match="deliver at least once until it has got rows"):
        delivering(ahead, delivery).epochs(3)
    ahead.epochs(3)
    (ahead.site.storage / LEASE).unlink()  # which says what was begun at least once: the table's log says it too
    changed = delivering(ahead, delivery)
    changed.epochs(4)
    changed.epochs(5)
    assert amounts(changed) == {1: 1, 2: 2, 3: 1, 4: 1, 5: 1}
    assert changed.state()["k0"] == (5, 15)
    assert damage(changed) == []


@pytest.mark.parametrize(
    ("now", "what"),
    sampled(
        [
            (
                "exactly_once",
                "delivery was at least once, is exactly once: sinks get each row once from now on; what came",
            ),
            ("at_most_once", "delivery was at least once, is at most once: an epoch that fails is lost from now on"),
        ]
    ),
)
def test_a_plan_says_from_what_to_what_delivery_changes_and_when_a_run_is_refused(ahead, now, what):
    def of_delivery(bank: Bank) -> list[Finding]:  # noqa: F811
        planned = plan(bank.site.pipeline, bank.site.settings, executor=InMemoryExecutor())
        return [finding for finding in planned.findings if finding.aspect == "delivery"]

    changed = delivering(ahead, now)
    change, *refused = of_delivery(changed)
    assert change.what.startswith(what) and change.verdict is Verdict.COMPATIBLE
    assert refused and {finding.verdict for finding in refused} == {Verdict.REFUSED}
    with pytest.raises(DamageError) as stopped:
        changed.epochs(3)
    assert stopped.value.what in {finding.what for finding in refused}
    assert of_delivery(ahead) == []
    ahead.epochs(3)
    assert len(of_delivery(changed)) == 1, "a run goes on"
    changed.epochs(4)
    assert of_delivery(changed) == [] and of_delivery(ahead)[0].what.startswith(f"delivery was {now.replace('_', ' ')}")


@pytest.mark.parametrize("bank", ["table"], indirect=True)  # rows of others are staged where no system can name them
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_take_over_leaves_what_a_process_taken_for_dead_may_still_deliver(bank, delivery):  # noqa: F811
    """It has staged its rows and proven that it is the owner; at least once, the table may get them any moment."""
    bank = delivering(bank, delivery)
    bank.epochs(1)
    staged, *_ = (bank.site.storage / bank.site.pipeline.staging(bank.site.pipeline.sinks[0])).glob("*/*.parquet")
    theirs = staged.parent.parent / epoch_dir(Generation(1), CheckpointId(9)) / staged.name
    theirs.parent.mkdir()
    theirs.write_bytes(staged.read_bytes())
    bank.epochs(2)
    assert theirs.exists() == (delivery == "at_least_once")


@pytest.mark.parametrize("delivery", sampled(["exactly_once", "at_most_once"]))
def test_who_was_taken_for_dead_breaks_no_table_whose_delivery_has_changed(tmp_path, monkeypatch, delivery):
    """It began an epoch and proved that the pipeline was its own, at least once; its successor delivers otherwise, and
    has swept what was left when the rows come."""
    plain = Bank.at(tmp_path / "site", **RETAINED)
    small_bank = Bank(replace(plain.site, pipeline=replace(plain.site.pipeline, delivery="at_least_once")))
    small_bank.epochs(1)
    head = small_bank.registry.head()
    with maintenance.owning(small_bank.site.pipeline, small_bank.site.settings, epochs=False) as owner:
        zombie = owner
        zombie.heartbeat.begin(CheckpointId(2), early=True)
    ours, theirs = epoch_dir(Generation(1), head.id), epoch_dir(zombie.context.generation, CheckpointId(2))
    staged = [file for file in small_bank.registry.files(head) if file.in_table]
    late_files = [replace(file, path=file.path.replace(ours, theirs)) for file in staged]
    for file, late in zip(staged, late_files, strict=True):
        (small_bank.site.storage / late.path).parent.mkdir(exist_ok=True)
        (small_bank.site.storage / late.path).write_bytes((small_bank.site.storage / file.path).read_bytes())
    sweep = recovery.remove_leftovers

    def swept(context) -> None:
        sweep(context)
        link = head.sinks["booked"].updated(id=CheckpointId(2), before=head.id)
        late = replace(head, id=CheckpointId(2), sinks={"booked": link})
        deliver(zombie.context, late, late_files)

    monkeypatch.setattr(zombie.context.registry, "prove", lambda _: None)
    monkeypatch.setattr(recovery, "remove_leftovers", swept)
    with pytest.raises(DamageError, match=r"is not where the registry says|et it deliver at least once until"):
        delivering(small_bank, delivery).epochs(2)
    is_late = delivery == "exactly_once"  # at most once it was refused before
    assert amounts(small_bank) == ({1: 2} if is_late else {1: 1}), "the table can be read"
    monkeypatch.undo()
    small_bank.epochs(3)
    delivering(small_bank, delivery).epochs(4)
    assert amounts(small_bank) == {1: 2 if is_late else 1, 2: 1, 3: 1, 4: 1} and damage(small_bank) == []


def test_no_row_is_taken_for_one_of_an_epoch_that_nobody_knows_any_more(ahead):
    """The lease is lost, or storage came back from a backup that is older than the sink."""
    (ahead.site.storage / LEASE).unlink()
    (ahead.site.landing / "00002.parquet").rename(ahead.site.landing / "00009.parquet")
    ahead.epochs(3)
    assert amounts(ahead) == {1: 1, 2: 2, 3: 1}


def test_a_rewind_is_above_an_epoch_that_nobody_knows_any_more(ahead, monkeypatch):
    ahead.epochs(3)
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", cut_off)
        with pytest.raises(WeirError):
            ahead.epochs(4)
    (ahead.site.storage / LEASE).unlink()
    obstacles = rewind.plan(ahead.site.pipeline, ahead.site.settings, 1).obstacles
    maintenance.rewind(ahead.site.pipeline, ahead.site.settings, 1, accepted=obstacles)
    ahead.epochs(5)
    if isinstance(ahead.site.pipeline.sinks[0], LedgerSink):  # it keeps what it has been given
        assert amounts(ahead) == {1: 1, 2: 3, 3: 2, 4: 2, 5: 1}
    else:
        assert amounts(ahead) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert damage(ahead) == []


@pytest.mark.parametrize("until", sampled(["its successor begins an epoch", "its successor has looked at the sink"]))
def test_who_was_taken_for_dead_shares_no_id_with_its_successor(bank, monkeypatch, until):  # noqa: F811
    """It wakes up between the last look at its lease and the take-over, begins an epoch, proves that the pipeline is
    its own, and delivers so late that the successor must find out by itself."""
    bank.epochs(1, 2)
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner
    head, take_over, begin, marker = bank.registry.head(), Registry.take_over, Heartbeat.begin, Sinks.marker
    done: list[str] = []

    def woken(self, *arguments, **options):
        if not done:
            begin(zombie.heartbeat, head.id + 1)
            zombie.context.registry.prove(zombie.context.generation)
            done.append("proven")
        return take_over(self, *arguments, **options)

    def deliver_late() -> None:
        if len(done) == 2:
            done.append("delivered")
            link = head.sinks["booked"].updated(id=head.id + 1, before=head.id)
            deliver(zombie.context, replace(head, id=head.id + 1, sinks={"booked": link}), bank.registry.files(head))

    def begun(self, id, **options):
        begin(self, id, **options)
        done.append("begun")
        if until == "its successor begins an epoch":
            deliver_late()

    def looked(self, *arguments):
        before = marker(self, *arguments)
        deliver_late()
        return before

    monkeypatch.setattr(Registry, "take_over", woken)
    monkeypatch.setattr(Heartbeat, "begin", begun)
    monkeypatch.setattr(Sinks, "marker", looked)
    monkeypatch.setattr(zombie.context.registry, "prove", lambda _: None)
    bank.epochs(3)
    assert "delivered" in done
    assert set(amounts(bank)) == {1, 2, 3} and amounts(bank)[3] == 1
    assert bank.state()["k0"] == (3, 6) and damage(bank) == []


@pytest.mark.long
def test_a_promotion_passes_what_has_failed_in_the_pipeline_and_on_the_branch(tmp_path, monkeypatch):
    """The table was ahead at the fork's base, the branch's table is ahead of the branch, and the pipeline's again."""
    pipeline = replace(small.pipeline, delivery="at_least_once")
    branched = Branched(replace(at(tmp_path, **RETAINED).site, pipeline=pipeline))

    def fail(act) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Registry, "commit", cut_off)
            with pytest.raises(WeirError):
                act()

    branched.epochs(1)
    fail(lambda: branched.epochs(2))
    branched.epochs(3)
    branched.fork(at=1)
    fail(lambda: branched.epochs(4))
    fail(lambda: promoted(branched, code=pipeline))
    promoted(branched, code=pipeline)
    assert branched.registry.head().kind == PROMOTION and amounts(branched).keys() == {1, 2, 3}
    branched.epochs(5)
    assert amounts(branched).keys() == {1, 2, 3, 4, 5}
    assert branched.state()["k0"] == (5, 15) and damage(branched) == []
