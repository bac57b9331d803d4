"""What sinks got before a commit that failed, and who comes after: under another delivery, without the lease, or while
the process that was taken for dead goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.runtime.ownership.publish import deliver
from pipelines.runtime.restore import rewind
from pipelines.runtime.run import maintenance
from state_ops.checkpoints.registry import Registry
from state_ops.coordination.lease import LEASE, Heartbeat
from state_ops.errors import DamageError, WeirError
from tests.recovery.ledger import LedgerSink
from tests.recovery.small import Bank
from tests.recovery.test_delivery import amounts, bank, cut_off, damage  # noqa: F401  a fixture


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


@pytest.mark.parametrize("delivery", ["exactly_once", "at_most_once"])
def test_rows_of_an_epoch_that_failed_stay_when_delivery_changes(ahead, delivery):
    with pytest.raises(DamageError, match="deliver at least once until it has got rows"):
        delivering(ahead, delivery).epochs(3)
    ahead.epochs(3)
    changed = delivering(ahead, delivery)
    changed.epochs(4)
    changed.epochs(5)
    assert amounts(changed) == {1: 1, 2: 2, 3: 1, 4: 1, 5: 1}
    assert changed.state()["k0"] == (5, 15)
    assert damage(changed) == []


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


def test_who_was_taken_for_dead_shares_no_id_with_its_successor(bank, monkeypatch):  # noqa: F811
    """It wakes up between the last look at its lease and the take-over, begins an epoch, proves that the pipeline is its
    own, and delivers once the successor has looked at the sink."""
    bank.epochs(1, 2)
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner
    head, take_over, begin = bank.registry.head(), Registry.take_over, Heartbeat.begin
    proven, delivered = [], []

    def woken(self, *arguments, **options):
        if not proven:
            begin(zombie.heartbeat, head.id + 1)
            zombie.context.registry.prove(zombie.context.generation)
            proven.append(True)
        return take_over(self, *arguments, **options)

    def late(self, id):
        begin(self, id)
        if not delivered:
            delivered.append(True)
            link = {**head.sinks["booked"], "id": head.id + 1, "before": head.id}
            deliver(zombie.context, replace(head, id=head.id + 1, sinks={"booked": link}), bank.registry.files(head))

    monkeypatch.setattr(Registry, "take_over", woken)
    monkeypatch.setattr(Heartbeat, "begin", late)
    monkeypatch.setattr(zombie.context.registry, "prove", lambda _: None)
    bank.epochs(3)
    assert set(amounts(bank)) == {1, 2, 3} and amounts(bank)[3] == 1
    assert bank.state()["k0"] == (3, 6) and damage(bank) == []
