"""A table of a sink that somebody has restored by Delta's RESTORE: rows that Weir has published are never missed in
silence, and both ways on lead to every row once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deltalake import DeltaTable

from state_ops.delta.set_back import SetBack, set_back
from state_ops.errors import DamageError, WeirError
from state_ops.fsck.findings import Kind
from state_ops.storage.storage import Storage
from tests.recovery import small
from tests.recovery.small import Bank
from tests.recovery.test_backfill import Plant
from weir import Pipeline, Sink, delta
from weir.execution.in_process import InMemoryExecutor
from weir.ownership import publish
from weir.restore import rewind as rewinding
from weir.run import fsck, maintenance
from weir.run.run import RunOptions, run

KINDS: dict[str, Sink] = {
    "append": delta.append("booked"),
    "upsert": delta.upsert("booked", "id"),
    "replace": delta.replace("booked", by="amount"),
    "replace where": delta.replace("booked", where="amount > 0"),
}
RESTORED = "a RESTORE by another writer, has set it back"


def expected(kind: str, *numbers: int) -> list[tuple[str, int]]:
    """What a table has of these files."""
    rows = [(key, number) for number in numbers for key in keys(number)]
    if kind == "upsert":
        return sorted(dict(rows).items())
    return sorted(rows if kind != "replace where" else [(key, numbers[-1]) for key in keys(numbers[-1])])


def keys(number: int) -> list[str]:
    return [f"k{key}" for key in range(8)] + [f"only-{number}-{key}" for key in range(2)]


def rows(bank: Bank) -> list[tuple[str, int]]:
    table = bank.site.table("booked")
    return sorted(zip(table["id"], table["amount"], strict=True))


def table(bank: Bank) -> DeltaTable:
    return DeltaTable(str(bank.site.storage / "tables" / "booked"))


def at(tmp_path, kind: str) -> Bank:
    """Three files, each of which one version of the table has, from version 1 on."""
    plain = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="8")
    stage = replace(small.accounts, sink=KINDS[kind])
    bank = Bank(replace(plain.site, pipeline=Pipeline("small", (stage,), max_parallelism=8)))
    bank.epochs(1, 2, 3)
    assert table(bank).version() == 3
    return bank


def restored(bank: Bank) -> None:
    table(bank).restore(2)


def compacted_and_restored(bank: Bank) -> None:
    table(bank).optimize.compact()
    table(bank).restore(1)


def restored_and_added_to(bank: Bank) -> None:
    """The newest RESTORE is to a version that lacked rows already."""
    table(bank).restore(1)
    table(bank).delete()
    table(bank).restore(4)


SETS_BACK = [restored, compacted_and_restored, restored_and_added_to]


def pending(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose process ends before it is published."""

    def dies(*_):
        raise OSError("this process is gone")

    with monkeypatch.context() as patched:
        patched.setattr(publish, "_publish", dies)
        with pytest.raises((OSError, WeirError)):
            bank.epochs(4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", SETS_BACK)
def test_a_table_that_lacks_published_rows_gets_no_more_until_it_has_them(tmp_path, kind, how):
    bank = at(tmp_path, kind)
    how(bank)
    with pytest.raises(DamageError, match=RESTORED) as refused:
        bank.epochs(4)
    whole = 4 if how is compacted_and_restored else 3
    assert f"Version {whole} has them" in refused.value.what
    assert "sink-altered.md" in str(refused.value.next)
    assert bank.registry.head().id == 3, "nothing is read that could not be published"
    table(bank).restore(3)
    bank.epochs()
    assert rows(bank) == expected(kind, 1, 2, 3, 4)
    bank.epochs(5)
    assert rows(bank) == expected(kind, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rewind_takes_the_restore_back_and_reads_its_rows_again(tmp_path, kind):
    bank = at(tmp_path, kind)
    restored(bank)
    pipeline, settings = bank.site.pipeline, bank.site.settings
    (obstacle,) = rewinding.plan(pipeline, settings, 2).obstacles
    assert "RESTORE" in obstacle
    maintenance.rewind(pipeline, settings, 2, accepted=[obstacle])
    bank.epochs(4)
    assert rows(bank) == expected(kind, 1, 2, 3, 4)
    bank.site.assert_no_orphans()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", ["table", "pipeline"])
def test_what_is_committed_and_not_published_waits_until_the_rows_before_it_are_back(tmp_path, monkeypatch, kind, back):
    bank = at(tmp_path, kind)
    pending(bank, monkeypatch)
    restored(bank)
    for _ in range(2):
        with pytest.raises(DamageError, match=RESTORED):
            bank.epochs()
    if back == "table":
        table(bank).restore(3)
    else:
        pipeline, settings = bank.site.pipeline, bank.site.settings
        accepted = rewinding.plan(pipeline, settings, 2).obstacles
        maintenance.rewind(pipeline, settings, 2, accepted=accepted)
    bank.epochs(5)
    assert rows(bank) == expected(kind, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restore_that_takes_back_only_what_others_did_is_gone_on_from(tmp_path, kind):
    bank = at(tmp_path, kind)
    table(bank).delete("amount = 3")
    table(bank).restore(3)
    bank.epochs(4)
    assert rows(bank) == expected(kind, 1, 2, 3, 4)
    table(bank).delete()
    table(bank).restore(6)
    bank.epochs(5)
    assert rows(bank) == expected(kind, 1, 2, 3, 4, 5)
    table(bank).optimize.compact()
    assert rows(bank) == expected(kind, 1, 2, 3, 4, 5)
    bank.epochs(6)
    assert rows(bank) == expected(kind, 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("kind", ["append", "upsert"])
def test_a_coordinator_that_runs_meets_the_restore_at_its_next_publish(tmp_path, kind):
    bank = at(tmp_path, kind)

    def meanwhile() -> None:
        found = run(bank.site.pipeline, bank.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor())
        bank.land(4, 5)
        next(found)
        table(bank).restore(2)
        list(found)

    with pytest.raises(DamageError, match=RESTORED):
        meanwhile()
    whole = set_back(
        Storage(str(bank.site.storage)), "tables/booked", table(bank), f"{bank.site.pipeline.app_id}/booked"
    )
    table(bank).restore(whole.whole)
    bank.epochs()
    assert rows(bank) == expected(kind, 1, 2, 3, 4, 5)


def test_fsck_names_it_and_what_others_did_before_the_first_publish_is_none(tmp_path):
    bank = at(tmp_path, "append")
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings
    restored(bank)
    findings = fsck.examine(bank.site.pipeline, bank.site.settings).findings
    assert [finding.kind for finding in findings] == [Kind.SINK_SET_BACK]
    assert "Version 3 has them" in findings[0].what
    storage = Storage(str(bank.site.storage))
    assert set_back(storage, "tables/booked", table(bank), bank.site.pipeline.app_id + "/booked") == SetBack(4, 3, 3)
    assert set_back(storage, "tables/booked", table(bank), "another/booked") is None


def test_a_range_is_not_promoted_into_a_table_that_lacks_rows(tmp_path):
    plant = Plant.at(tmp_path)
    plant.land(1, 2, 3, 4)
    plant.run()
    readings = DeltaTable(str(plant.site.storage / "tables" / "readings"))
    readings.restore(readings.version() - 1)
    plant.land(3, value=100)
    head = plant.head
    with pytest.raises(DamageError, match=RESTORED):
        plant.backfill(3, 3, replaces="range", promote=True)
    assert plant.head == head
    readings.restore(readings.version() - 1)
    assert plant.backfill(3, 3, replaces="range", promote=True).promoted is not None
    plant.assert_exact(state=False)
