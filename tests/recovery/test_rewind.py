"""State, source positions and tables go back together: as if what was abandoned had never happened."""

from __future__ import annotations

import json
from dataclasses import replace

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from state_ops.coordination import requests
from state_ops.coordination.lease import Heartbeat
from state_ops.coordination.requests import Request
from state_ops.errors import BusyError, DamageError, WeirError
from state_ops.records.checkpoint import REWIND, abandoned
from state_ops.records.snapshot_files import OUTPUT, STATE
from tests.recovery import small
from tests.recovery.cutting import changes_fail_from
from tests.recovery.small import Account, Bank
from tests.tools.sampling import sampled
from weir import Epoch, Pipeline, ValueState, agg, delta, stage
from weir.connectors.delta.restore_version import TableRewind
from weir.ownership import derived_checkpoint
from weir.ownership.pipeline_storage import open_storage
from weir.ownership.publish import publish_missing
from weir.restore import rewind
from weir.restore.rewind import hindrances
from weir.run import maintenance

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}


@stage("accounts", source=small.SOURCE, key="id", state=Account, order_by=["at"], sink=delta.append("booked"))
def doubled(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """A bad deploy: every amount counts twice."""
    twice = rows.with_columns(amount=pl.col("amount") * 2)
    state.fold(twice, rows=agg.count(), total=agg.sum("amount"))
    return twice.select("id", "at", "amount")


bad = Pipeline("small", (doubled,), max_parallelism=8)


def deployed(bank: Bank, pipeline: Pipeline) -> Bank:
    return Bank(replace(bank.site, pipeline=pipeline))


@pytest.fixture
def bank(tmp_path) -> Bank:
    """Three good epochs, then five of a bad deploy."""
    bank = Bank.at(tmp_path, **RETAINED)
    bank.epochs(1, 2, 3)
    deployed(bank, bad).epochs(4, 5, 6, 7, 8)
    return bank


def obstacles(bank: Bank, to: int) -> tuple[str, ...]:
    return rewind.plan(bank.site.pipeline, bank.site.settings, to).obstacles


def back(bank: Bank, to: int, **options):
    return maintenance.rewind(bank.site.pipeline, bank.site.settings, to, **options)


def test_after_a_rewind_the_bad_deploy_has_never_happened(bank):
    rewound = back(bank, 3, reason="doubled amounts")
    assert (rewound.id, rewound.parent_id, rewound.kind, rewound.reason) == (
        9,
        3,
        REWIND,
        "to checkpoint 3: doubled amounts",
    )
    bank.assert_exact(1, 2, 3)
    reports = bank.epochs(9)
    assert [report.checkpoint.id for report in reports] == list(range(10, 16)), "ids are never used again"
    assert reports[0].checkpoint.parent_id == 9
    bank.assert_exact(1, 2, 3, 4, 5, 6, 7, 8, 9)


@pytest.mark.long
def test_what_is_abandoned_can_be_looked_at_until_it_is_old(bank):
    back(bank, 3)
    assert bank.ids() == list(range(1, 10))
    reports = bank.epochs(9)
    kept = {row.id for row in bank.registry.checkpoints()}
    assert kept == {3, 9, 10, 11, 12, 13, 14, 15} | set(range(4, 9)), (
        "eight that were not abandoned, and what is newer than those"
    )
    bank.site = replace(bank.site, options={**bank.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "2"})
    bank.epochs(10)
    assert bank.ids() == [reports[-1].checkpoint.id, reports[-1].checkpoint.id + 1]
    bank.assert_exact(*range(1, 11))


@pytest.mark.long
def test_rewinds_may_follow_each_other_and_be_taken_back(bank):
    back(bank, 5)
    back(bank, 2)
    bank.assert_exact(1, 2)
    back(bank, 3)
    bank.assert_exact(1, 2, 3)
    assert bank.registry.head().id == 11
    bank.epochs()
    bank.assert_exact(*range(1, 9))


def test_a_table_that_was_empty_then_is_empty_again(tmp_path):
    bank = Bank.at(tmp_path, **RETAINED)
    early = Pipeline("small", (replace(small.accounts, sink=None),), max_parallelism=8)
    deployed(bank, early).epochs(1)
    bank.epochs(2, 3)
    back(bank, 1)
    assert len(bank.site.table("booked")) == 0
    bank.epochs()
    assert sorted(set(bank.site.table("booked")["amount"])) == [2, 3]


def test_a_zombie_that_publishes_what_was_abandoned_finds_it_published(bank):
    rows = {row.id: row for row in bank.registry.checkpoints()}
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner.context
        zombie.sinks.close()
    back(bank, 3)
    before = DeltaTable(str(bank.site.storage / "tables" / "booked")).version()
    with pytest.raises(WeirError):
        publish_missing(zombie, [rows[7], rows[8]])  # what it records is fenced
    assert DeltaTable(str(bank.site.storage / "tables" / "booked")).version() == before
    bank.epochs()
    bank.assert_exact(*range(1, 9))


def cut_off(bank: Bank, monkeypatch, stop_at: int) -> bool:
    """Rewind, with every change to storage from one on failing, as when the process were gone; whether it came to
    that."""
    with changes_fail_from(monkeypatch, stop_at):
        try:
            back(bank, 3)
        except (WeirError, OSError):
            pass
        else:
            return False
    (bank.site.storage / "coordinator" / "lease.json").unlink(missing_ok=True)  # nobody lives
    return True


@pytest.mark.parametrize("step", sampled([7, 3]))
def test_a_rewind_that_is_cut_off_anywhere_is_finished_by_the_next_run_or_was_none(tmp_path, monkeypatch, step):
    first = Bank.at(tmp_path / "first", **RETAINED)
    first.epochs(1, 2, 3)
    deployed(first, bad).epochs(4, 5)
    outcomes = set()
    for stop_at in range(0, 200, step):
        bank = Bank(first.site.copied_to(tmp_path / f"{stop_at}"))
        if not cut_off(bank, monkeypatch, stop_at):
            break
        head = bank.registry.head()
        outcomes.add(head.kind)
        if head.kind != REWIND:
            assert head.id == 5
            back(bank, 3)
        bank.epochs()
        bank.assert_exact(1, 2, 3, 4, 5)
        bank.site.assert_no_orphans()
    assert stop_at > 10
    assert outcomes == {"checkpoint", REWIND}, "some end before the intent, some after it"


def test_nobody_is_rewound_while_a_coordinator_lives(tmp_path):
    bank = Bank.at(tmp_path, **RETAINED)
    bank.epochs(1, 2)
    with bank.coordinator() as reports:
        bank.land(3)
        small.until(lambda: reports)
        with pytest.raises(BusyError):
            back(bank, 1)
        storage, _ = open_storage(bank.site.pipeline, bank.site.settings)
        requests.send(storage, Request("stop"))
    bank.assert_exact(1, 2, 3)


def test_a_rewind_that_would_lose_input_is_refused_unless_forced(bank):
    (bank.site.landing / "00005.parquet").unlink()
    before = bank.site.objects()
    with pytest.raises(WeirError, match=r"has lost what would be read again \(00005.parquet\)"):
        back(bank, 3)
    assert {name for name in bank.site.objects() if name.startswith("tables")} == {
        name for name in before if name.startswith("tables")
    }
    assert bank.registry.head().id == 8
    back(bank, 3, accepted=obstacles(bank, 3))
    bank.epochs()
    bank.assert_exact(1, 2, 3, 4, 6, 7, 8)


def test_only_obstacles_that_somebody_was_shown_are_accepted(bank):
    """Of input that is gone only the first files are named, and another one goes after somebody has looked."""
    for number in (4, 5, 6, 7):
        (bank.site.landing / f"{number:05}.parquet").unlink()
    shown = obstacles(bank, 3)
    (bank.site.landing / "00008.parquet").unlink()
    with pytest.raises(WeirError, match="has lost what would be read again"):
        back(bank, 3, accepted=shown)
    assert bank.registry.head().id == 8


@pytest.mark.long
def test_as_many_files_that_are_gone_are_not_the_ones_that_somebody_was_shown(bank):
    moved = {number: bank.site.landing / f"{number:05}.parquet" for number in range(4, 9)}
    for number in (4, 5, 6, 7):
        moved[number].rename(bank.site.root / moved[number].name)
    shown = obstacles(bank, 3)
    (bank.site.root / moved[7].name).rename(moved[7])
    moved[8].rename(bank.site.root / moved[8].name)
    with pytest.raises(WeirError, match="has lost what would be read again"):
        back(bank, 3, accepted=shown)
    assert bank.registry.head().id == 8
    back(bank, 3, accepted=obstacles(bank, 3))
    bank.epochs()
    bank.assert_exact(1, 2, 3, 7)


def test_no_two_lists_of_vacuumed_files_or_of_foreign_commits_have_the_same_text():
    def table(*names: str) -> list[str]:
        unknown = tuple(enumerate(names))
        return hindrances([TableRewind("t", 9, 1, (), (), unknown=unknown, vacuumed=names)])

    assert table("a", "b", "c", "d") == table("a", "b", "c", "d")
    for other in (("a", "b", "c", "e"), ("a", "b", "c"), ("a", "b", "c", "d", "e")):
        assert not set(table("a", "b", "c", "d")) & set(table(*other))


@pytest.mark.long
def test_commits_of_others_in_between_are_not_taken_back_unasked(bank):
    table = DeltaTable(str(bank.site.storage / "tables" / "booked"))
    table.optimize.compact()
    with pytest.raises(WeirError, match=r"others have committed to the table booked \(version \d+: OPTIMIZE\)"):
        back(bank, 3)
    back(bank, 3, accepted=obstacles(bank, 3))
    bank.assert_exact(1, 2, 3)
    bank.epochs()
    bank.assert_exact(*range(1, 9))


def test_files_that_would_have_to_come_back_and_are_vacuumed_are_an_obstacle(bank):
    table = DeltaTable(str(bank.site.storage / "tables" / "booked"))
    table.optimize.compact()
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(WeirError, match="files of the table booked are vacuumed"):
        back(bank, 3)


def test_a_damaged_checkpoint_is_not_gone_back_to(bank):
    third = next(row for row in bank.registry.checkpoints() if row.id == 3)
    named = next(file for file in bank.registry.files(third) if file.kind == STATE and file.name.startswith("MANIFEST"))
    path = bank.site.storage / named.path
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DamageError, match="Checkpoint 3 cannot be restored"):
        back(bank, 3)
    assert bank.registry.head().id == 8


def test_the_rewind_names_no_published_rows_and_the_same_state(bank):
    rewound = back(bank, 3)
    third = next(row for row in bank.registry.checkpoints() if row.id == 3)
    listed = {file.path for file in bank.registry.files(third) if file.kind == STATE}
    assert {file.path for file in bank.registry.files(rewound)} == listed
    assert not [file for file in bank.registry.files(rewound) if file.kind == OUTPUT or file.new]


def test_the_command_shows_what_would_change_and_asks(bank, weir):
    shown = weir(bank.site, "rewind", "small", "--to", "3", "--dry-run", "--json")
    facts = json.loads(shown.out)
    assert facts["abandoned"] == [4, 5, 6, 7, 8]
    assert facts["sources"] == {"landing": {"again": 5, "gone": []}}
    assert facts["tables"]["booked"]["rows_removed"] == 50
    assert facts["checkpoint"] is None
    assert weir(bank.site, "rewind", "small", "--to", "3").code == 2, "nobody can be asked"
    assert weir(bank.site, "rewind", "small").code == 2
    assert weir(bank.site, "rewind", "small", "--to", "77").code == 1
    output = weir(bank.site, "rewind", "small", "--to", "3", "--dry-run").out
    assert "Undone: everything after 3; of it 4, 5, 6, 7, 8 are still retained and can be taken back to." in output
    done = weir(bank.site, "rewind", "small", "--to", "3", "--yes")
    assert done.code == 0
    assert "is at checkpoint 9, back to checkpoint 3" in done.out
    assert done.out.count("Undone: ") == 1 and sum(line.startswith("table ") for line in done.out.splitlines()) == 1
    bank.assert_exact(1, 2, 3)
    assert weir(bank.site, "fsck", "small").code == 0


def test_brackets_in_reasons_are_shown_as_they_are(bank, weir):
    reason = "of [x] and [bold]y[/]"
    assert weir(bank.site, "savepoint", "small", "--name", "good", "--reason", reason).code == 0
    assert reason in weir(bank.site, "savepoints", "small").out
    assert weir(bank.site, "fork", "small", "--name", "fix", "--from", "3", "--reason", reason).code == 0
    assert reason in weir(bank.site, "forks", "small").out
    assert (
        f"to checkpoint 3: {reason}."
        in weir(bank.site, "rewind", "small", "--to", "3", "--yes", "--reason", reason).out
    )


@pytest.mark.parametrize("accepting", [(), ("--yes",), ("--force",), ("--force", "--yes")])
def test_a_rewind_to_the_newest_checkpoint_takes_nothing_back(bank, weir, accepting):
    before = bank.registry.generation()
    for dry in ((), ("--dry-run",)):
        shown = weir(bank.site, "rewind", "small", "--to", "8", *accepting, *dry)
        assert (shown.code, shown.out) == (0, "small is at checkpoint 8 already; nothing to take back.\n")
        facts = json.loads(weir(bank.site, "rewind", "small", "--to", "8", *accepting, *dry, "--json").out)
        assert (facts["to"], facts["abandoned"], facts["checkpoint"]) == (8, [], None if dry else 8)
    assert bank.registry.generation() == before
    bank.epochs(9)
    assert bank.ids()[-2:] == [8, 9] and len(bank.site.table("booked")) == 90


def test_the_owner_takes_nothing_back_either_where_the_newest_checkpoint_is_asked_for(bank):
    assert back(bank, 8) == bank.registry.head()
    assert bank.registry.head().id == 8
    bank.epochs(9)
    assert bank.ids()[-2:] == [8, 9] and len(bank.site.table("booked")) == 90


def test_a_rewind_beside_a_coordinator_is_refused_also_to_the_newest_checkpoint(bank, weir):
    storage, registry = open_storage(bank.site.pipeline, bank.site.settings)
    with Heartbeat(storage, registry.take_over(), 8, 5.0, None):
        refused = weir(bank.site, "rewind", "small", "--to", "8", "--yes")
        assert refused.code != 0 and "A coordinator of small is running" in refused.err


@pytest.mark.long
def test_the_command_takes_a_savepoints_name_too(bank, weir):
    assert weir(bank.site, "savepoint", "small", "--name", "good").code == 0
    bank.epochs(9)
    for named in (("--to", "good"), ("--savepoint", "good")):
        facts = json.loads(weir(bank.site, "rewind", "small", *named, "--dry-run", "--json").out)
        assert facts["to"] == 8
    unknown = weir(bank.site, "rewind", "small", "--to", "bad")
    assert unknown.code == 1 and "no savepoint 'bad'" in unknown.err and "good (8)" in unknown.err
    assert (
        "is at checkpoint 10, back to checkpoint 8" in weir(bank.site, "rewind", "small", "--to", "good", "--yes").out
    )


@pytest.mark.long
def test_what_others_commit_after_a_rewind_was_decided_stays(bank, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(
            derived_checkpoint, "publish_missing", lambda *_: (_ for _ in ()).throw(OSError("the process is gone"))
        )
        with pytest.raises(WeirError):
            back(bank, 3)
    assert bank.registry.head().kind == REWIND
    table = str(bank.site.storage / "tables" / "booked")
    other = bank.site.table("booked").head(1).assign(id="theirs")
    write_deltalake(table, other, mode="append")
    bank.epochs()
    booked = bank.site.table("booked")
    assert list(booked["id"]).count("theirs") == 1
    assert len(booked) == 81


@pytest.mark.long
def test_savepoints_say_until_when_tables_can_be_taken_back_to_them(bank, weir):
    output = weir(bank.site, "savepoint", "small", "--name", "good").err
    assert "the table booked keeps its log for 30 days (delta.logRetentionDuration): it can be taken back" in output
    assert "keeps its log" not in weir(bank.site, "savepoints", "small").err, "once, when one is made"
    table = DeltaTable(str(bank.site.storage / "tables" / "booked"))
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 400 days"})
    assert "keeps its log" not in weir(bank.site, "savepoint", "small", "--name", "better").err
    back(bank, 3)  # such a commit of others changes no rows
    bank.assert_exact(1, 2, 3)


def decided_only(bank: Bank, monkeypatch, to: int) -> None:
    """A rewind whose process is gone right after its row."""
    with monkeypatch.context() as patched:
        patched.setattr(
            derived_checkpoint, "publish_missing", lambda *_: (_ for _ in ()).throw(OSError("the process is gone"))
        )
        with pytest.raises(WeirError):
            back(bank, to)
    assert bank.registry.head().kind == REWIND


@pytest.mark.long
def test_a_table_that_is_compacted_before_a_rewind_came_to_it_is_taken_back_all_the_same(bank, monkeypatch):
    decided_only(bank, monkeypatch, 3)
    DeltaTable(str(bank.site.storage / "tables" / "booked")).optimize.compact()
    bank.epochs()
    bank.assert_exact(*range(1, 9))


@pytest.mark.long
def test_files_that_come_back_are_found_by_who_skips_by_statistics(bank):
    table = str(bank.site.storage / "tables" / "booked")
    DeltaTable(table).optimize.compact()
    before = bank.ids()[-1]
    bank.epochs(9)
    DeltaTable(table).optimize.compact()
    bank.epochs(10)
    back(bank, before + 1, accepted=obstacles(bank, before + 1))
    numbers = [action["num_records"] for action in pa.table(DeltaTable(table).get_add_actions()).to_pylist()]
    assert sum(numbers) == len(bank.site.table("booked")) == 90
    assert len(DeltaTable(table).to_pyarrow_dataset().to_table(filter=pc.field("id") == "only-9-1")) == 1


def test_a_table_that_is_elsewhere_stops_a_rewind_before_anything_is_decided(bank):
    table = bank.site.storage / "tables" / "booked"
    newest = max(table.glob("_delta_log/*.json"))
    newest.unlink()
    with pytest.raises(DamageError, match="A sink table is not where the registry says"):
        back(bank, 3)
    assert bank.registry.head().id == 8


def test_a_sink_that_the_code_has_no_more_goes_back_too(tmp_path):
    bank = Bank.at(tmp_path, **RETAINED)
    bank.epochs(1, 2, 3)
    silent = deployed(bank, Pipeline("small", (replace(small.accounts, sink=None),), max_parallelism=8))
    silent.epochs(4)
    back(silent, 2)
    assert len(bank.site.table("booked")) == 20
    bank.epochs()
    bank.assert_exact(1, 2, 3, 4)


def test_a_mistaken_rewind_can_be_taken_back(tmp_path, weir):
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    bank.epochs(1)
    assert weir(bank.site, "savepoint", "small", "--name", "old").code == 0
    bank.epochs(2, 3, 4)
    back(bank, 1)
    assert bank.ids() == [1, 3, 4, 5]
    back(bank, 4)
    bank.assert_exact(1, 2, 3, 4)


def test_a_table_whose_first_entries_are_gone_is_not_taken_for_one_that_began_empty(tmp_path):
    bank = Bank.at(tmp_path, **RETAINED)
    early = Pipeline("small", (replace(small.accounts, sink=None),), max_parallelism=8)
    deployed(bank, early).epochs(1)
    bank.epochs(2, 3)
    table = DeltaTable(str(bank.site.storage / "tables" / "booked"))
    table.create_checkpoint()
    for entry in sorted((bank.site.storage / "tables" / "booked" / "_delta_log").glob("*.json"))[:-1]:
        entry.unlink()
    with pytest.raises(DamageError, match="its log begins with version"):
        back(bank, 1)


def test_a_rewind_is_remembered_for_as_long_as_something_that_it_abandoned(tmp_path, weir):
    bank = Bank.at(tmp_path, WEIR_CHECKPOINTS__NUM_RETAINED="2")
    bank.epochs(1, 2)
    assert weir(bank.site, "savepoint", "small", "--name", "bad").code == 0
    back(bank, 1)
    bank.epochs(3, 4, 5)
    rows = bank.registry.checkpoints()
    assert 2 in {row.id for row in rows}
    assert abandoned(rows) == {2: 3}
