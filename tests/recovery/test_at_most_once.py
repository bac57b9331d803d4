"""At most once: positions are committed before an epoch begins, and what a sink may have got is not given again."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from dataclasses import replace

import polars as pl
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from state_ops.checkpoints.registry import Registry
from state_ops.days import Days
from state_ops.errors import (
    ConfigurationError,
    DamageError,
    FencedError,
    InputError,
    PipelineError,
    TransientError,
    WeirError,
)
from state_ops.fsck.findings import Severity
from state_ops.records.checkpoint import POSITIONS, PROMOTION, before
from tests.recovery import ledger, small
from tests.recovery.harness import Site
from tests.recovery.ledger import LedgerSink
from tests.recovery.queue_source import Queue, QueueSource
from tests.recovery.small import Bank
from tests.tools.sampling import sampled
from tests.tools.stages import altered
from weir import Epoch, Pipeline, ValueState, delta, expect, foreach
from weir.connectors.delta import restore_version
from weir.epoch import positions
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.operations import forks, promotion
from weir.operations.plan import plan
from weir.ownership.publish import publish_missing
from weir.restore import rewind
from weir.run import fsck, maintenance
from weir.run.run import RunOptions, run

RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "8"}
KINDS = ["table", "ledger", "function"]
BOTH = sampled(KINDS, 2)


@pytest.fixture(params=sampled(KINDS))
def bank(tmp_path, request) -> Bank:
    path = str(tmp_path / "ledger.db")
    sinks = {
        "table": delta.append("booked"),
        "ledger": LedgerSink(name="booked", path=path),
        "function": foreach(lambda rows, checkpoint: booked(path, rows, checkpoint), name="booked"),
    }
    return bank_at(tmp_path / "site", sinks[request.param], path)


@pytest.fixture
def table(tmp_path) -> Bank:
    return bank_at(tmp_path / "site", delta.append("booked"), "")


class Given(Bank):
    """path: of the ledger."""

    path: str = ""


def bank_at(root, sink, path: str) -> Bank:
    plain = Bank.at(root, **RETAINED)
    stages = (replace(small.accounts, sink=sink),)
    bank = Given(replace(plain.site, pipeline=Pipeline("small", stages, max_parallelism=8, delivery="at_most_once")))
    bank.path = path
    return bank


def booked(path: str, rows: pa.Table, checkpoint: int) -> None:
    with ledger.transaction(path) as connection:
        given = [(checkpoint, row["id"], row["amount"]) for row in rows.to_pylist()]
        connection.executemany("INSERT INTO booked VALUES (?, ?, ?)", given)


def amounts(bank: Bank) -> dict[int, int]:
    """How often each file's rows were delivered."""
    is_table = bank.site.pipeline.sinks[0] in bank.site.pipeline.tables
    given = list(bank.site.table("booked")["amount"]) if is_table else [n for _, n in ledger.rows_of(bank.path)]
    counts = Counter(int(amount) for amount in given)
    assert all(count % 10 == 0 for count in counts.values())
    return {amount: count // 10 for amount, count in sorted(counts.items())}


def damage(bank: Bank) -> list[str]:
    findings = fsck.examine(bank.site.pipeline, bank.site.settings).findings
    return [str(finding.kind) for finding in findings if finding.severity is Severity.DAMAGE]


class Broken(InMemoryExecutor):
    """Its jobs fail."""

    def run(self, *_, **__):
        raise OSError("cut off")


def cut_off(*asked, **options):
    raise OSError("cut off")


def lose(bank: Bank, *numbers: int) -> None:
    with pytest.raises(WeirError):
        bank.epochs(*numbers, executor=Broken())


@pytest.mark.parametrize("bank", BOTH, indirect=True)
def test_without_failures_each_row_comes_once_and_positions_come_first(bank, monkeypatch):
    committed = []
    commit = Registry.commit

    def watched(self, checkpoint, files, **options):
        committed.append((checkpoint.id, checkpoint.parent_id, checkpoint.kind, checkpoint.offsets["landing"]["files"]))
        return commit(self, checkpoint, files, **options)

    class Watching(InMemoryExecutor):
        def run(self, *arguments, **options):
            committed.append("stage")
            return super().run(*arguments, **options)

    monkeypatch.setattr(Registry, "commit", watched)
    reports = bank.epochs(1, 2, executor=Watching())
    assert committed == [
        (1, None, "positions", 1), "stage", (2, 1, "checkpoint", 1),
        (3, 2, "positions", 2), "stage", (4, 3, "checkpoint", 2),
    ]  # fmt: skip
    assert bank.ids() == [2, 4] == [report.checkpoint.id for report in reports], "positions go with the next epoch"
    assert amounts(bank) == {1: 1, 2: 1} and bank.state()["k0"] == (2, 3)
    assert [len(report.publications) for report in reports] == [1, 1]
    assert "rows_lost" not in bank.registry.head().totals
    assert not fsck.examine(bank.site.pipeline, bank.site.settings).findings


@pytest.mark.parametrize("bank", BOTH, indirect=True)
def test_rows_of_an_epoch_that_fails_are_lost_in_sinks_and_state(bank, weir):
    lose(bank, 1)  # the first one, behind which there is nothing
    bank.epochs(2)
    lose(bank, 3)
    head = bank.registry.head()
    assert head.kind == POSITIONS and head.totals["rows_lost"] == 10 and head.totals["rows_ahead"] == 10
    if bank.site.pipeline.tables:  # the command finds the table's pipeline, which is alike
        assert "20 rows were read, and lost" in weir(bank.site, "status", "small").out
    bank.epochs(4)
    assert amounts(bank) == {2: 1, 4: 1}
    assert bank.state()["k0"] == (2, 6) and "only-3-0" not in bank.state()
    head = bank.registry.head()
    assert (head.totals["rows_read"], head.totals["rows_lost"]) == (20, 20) and "rows_ahead" not in head.totals
    assert damage(bank) == []


def test_rows_that_a_sink_does_not_take_are_lost_there_alone(bank, monkeypatch):
    bank.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr("weir.ownership.publish._publish", cut_off)
        with pytest.raises(WeirError):
            bank.epochs(2)
    assert damage(bank) == [], "a sink that is behind is none"
    bank.epochs(3)
    assert amounts(bank) == {1: 1, 3: 1} and bank.state()["k0"] == (3, 6)
    assert damage(bank) == []


def test_a_table_that_is_gone_is_damage_still(table):
    table.epochs(1)
    shutil.rmtree(table.site.storage / "tables" / "booked")
    with pytest.raises(WeirError, match="it is gone"):
        table.epochs(2)
    assert damage(table)


def test_rows_are_published_after_a_crash_where_no_sink_can_have_them(bank, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "record_publications", cut_off)
        with pytest.raises(WeirError):
            bank.epochs(1)
    assert amounts(bank) == {}
    bank.epochs(2)
    assert amounts(bank) == {1: 1, 2: 1}


def test_what_is_recorded_is_not_published_again(bank):
    bank.epochs(1, 2)
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        assert publish_missing(owner.context, bank.registry.checkpoints()) == []
    assert amounts(bank) == {1: 1, 2: 1}


@pytest.mark.parametrize("bank", BOTH, indirect=True)
def test_a_zombie_publishes_nothing_once_it_is_fenced(bank, monkeypatch):
    bank.epochs(1)
    with maintenance.owning(bank.site.pipeline, bank.site.settings, epochs=False) as owner:
        zombie = owner.context
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "record_publications", cut_off)
        with pytest.raises(WeirError):
            bank.epochs(2)
    head = bank.registry.head()
    with pytest.raises(FencedError):
        publish_missing(zombie, [head])
    assert amounts(bank) == {1: 1}
    bank.epochs(3)
    assert amounts(bank) == {1: 1, 2: 1, 3: 1}


def test_a_run_ends_where_nobody_can_tell_whether_positions_were_committed(table, monkeypatch):
    table.epochs(1)
    commit = Registry.commit

    def lost(self, checkpoint, files, **options):
        commit(self, checkpoint, files, **options)
        raise OSError("the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", lost)
        with pytest.raises(WeirError, match="Nobody can tell whether the positions before epoch 4 were committed"):
            table.epochs(2)
    assert table.registry.head().kind == POSITIONS
    table.epochs(3)
    assert amounts(table) == {1: 1, 3: 1}


def test_a_run_that_tolerates_failures_goes_on_behind_the_positions(table):
    class Once(InMemoryExecutor):
        failed = False

        def run(self, *arguments, **options):
            if not Once.failed:
                Once.failed = True
                raise TransientError("An executor is gone.", next="Go on.")
            return super().run(*arguments, **options)

    site = replace(table.site, options={**table.site.options, "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "1"})
    Bank(site).epochs(1, 2, executor=Once())
    assert amounts(table) == {2: 1}
    assert table.registry.head().totals["rows_lost"] == 10


def test_bad_input_that_an_epoch_has_met_holds_nothing(table):
    class Unreadable(InMemoryExecutor):
        def run(self, *_, **__):
            error = InputError("It cannot be read.", next="Repair it.")
            error.files = {"landing": {"00001.parquet": (1, 1)}}
            raise error

    with pytest.raises(InputError):
        table.epochs(1, executor=Unreadable())
    assert not (table.site.storage / "coordinator" / "held.json").exists()
    table.epochs(2)
    assert amounts(table) == {2: 1}


# -- back and aside


def test_a_rewind_takes_a_table_back_to_rows_that_never_came(table, monkeypatch):
    table.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr("weir.ownership.publish._publish", cut_off)
        with pytest.raises(WeirError):
            table.epochs(2)
    table.epochs(3)
    assert amounts(table) == {1: 1, 3: 1}
    maintenance.rewind(table.site.pipeline, table.site.settings, 4)
    assert amounts(table) == {1: 1} and table.state()["k0"] == (2, 3)
    table.epochs(4)
    assert amounts(table) == {1: 1, 3: 1, 4: 1}
    assert damage(table) == []


@pytest.mark.long
@pytest.mark.parametrize("came", sampled([True, False]))
def test_a_rewind_takes_a_table_back_to_where_nothing_had_come(table, monkeypatch, came):
    with monkeypatch.context() as patched:
        patched.setattr("weir.ownership.publish._publish", cut_off)
        for number in (1,) if came else (1, 2):
            with pytest.raises(WeirError):
                table.epochs(number)
    if came:
        table.epochs(2)
    assert amounts(table) == ({2: 1} if came else {})
    maintenance.rewind(table.site.pipeline, table.site.settings, 2)
    assert amounts(table) == {} and table.state()["k0"] == (1, 1)
    table.epochs(3)
    assert amounts(table) == {2: 1, 3: 1} and table.state()["k0"] == (3, 6)
    assert damage(table) == []


def test_a_table_whose_log_tells_of_no_publication_is_not_taken_back_with_rows_in_it(table, monkeypatch):
    """It may have been put in the place of the table that the rows went to."""
    table.epochs(1, 2)
    rows = table.site.table("booked")
    shutil.rmtree(table.site.storage / "tables" / "booked")
    write_deltalake(table.site.storage / "tables" / "booked", pa.Table.from_pandas(rows, preserve_index=False))
    with pytest.raises(WeirError, match="does not reach back to checkpoint 2"):
        maintenance.rewind(table.site.pipeline, table.site.settings, 2)


@pytest.mark.long
def test_a_rewind_that_is_cut_off_is_carried_out_by_the_next_run(table, monkeypatch):
    table.epochs(1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(restore_version, "rewind", cut_off)
        with pytest.raises(WeirError):
            maintenance.rewind(table.site.pipeline, table.site.settings, 2)
    assert amounts(table) == {1: 1, 2: 1}
    table.epochs(3)
    assert amounts(table) == {1: 1, 2: 1, 3: 1}, "2 was taken back and read again"


def test_what_was_lost_can_be_read_again_by_a_rewind(table):
    table.epochs(1)
    lose(table, 2)
    maintenance.rewind(table.site.pipeline, table.site.settings, 2)
    table.epochs(3)
    assert amounts(table) == {1: 1, 2: 1, 3: 1} and table.state()["k0"] == (3, 6)


@pytest.mark.long
def test_nothing_goes_on_from_positions_alone(table):
    table.epochs(1)
    lose(table, 2)
    lost = table.registry.head()
    table.land(3)
    assert state_reader.whole(table.site.pipeline, table.registry, None).id == 2
    with pytest.raises(WeirError, match="has positions alone"):
        rewind.plan(table.site.pipeline, table.site.settings, lost.id)
    with pytest.raises(WeirError, match="has positions alone"):
        forks.fork(table.site.pipeline, table.site.settings, "aside", lost.id)
    fork = forks.fork(table.site.pipeline, table.site.settings, "aside")
    assert fork.base == 2
    branch = replace(table.site.pipeline, branch=fork.branch)
    with pytest.raises(WeirError):
        list(run(branch, table.site.settings, RunOptions(until_caught_up=True), Broken()))
    list(run(branch, table.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    state = {
        row["id"]: row["rows"]
        for rows in state_reader.scan(branch, table.site.settings, "accounts")
        for row in rows.to_pylist()
    }
    assert state["k0"] == 2, (
        "the branch reads what its pipeline is past, though that is lost there, and again after a crash"
    )


def test_a_branch_is_promoted_with_each_row_once(table):
    table.epochs(1, 2, 3)
    forks.fork(table.site.pipeline, table.site.settings, "aside", 2)
    promoted = promotion.promote(table.site.pipeline, table.site.settings, "aside", executor=InMemoryExecutor())
    assert (promoted.kind, promoted.parent_id) == (PROMOTION, 2)
    assert amounts(table) == {1: 1, 2: 1, 3: 1} and table.state()["k0"] == (3, 6)
    table.epochs(4)
    assert amounts(table) == {1: 1, 2: 1, 3: 1, 4: 1} and table.state()["k0"] == (4, 10)
    assert damage(table) == []


def test_a_backfill_begins_at_no_positions_alone(table):
    table.epochs(1)
    row = replace(table.registry.head(), watermarks={"accounts": 5})
    assert before([row, replace(row, kind=POSITIONS)], 6, Days(frozenset(), frozenset({"accounts"}))) == [row]


@pytest.mark.long
def test_waiting_rows_survive_the_epoch_after_them(tmp_path):
    """Unaligned checkpoints: positions carry the rows that wait in front of a stage."""
    second = altered(small.accounts, uid="second", input=small.accounts, sink=delta.append("again"))
    pipeline = Pipeline("small", (small.accounts, second), max_parallelism=8, delivery="at_most_once")
    options = {**RETAINED, "WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": "0"}
    bank = Bank(replace(Bank.at(tmp_path / "site", **options).site, pipeline=pipeline))
    bank.epochs(1, 2)
    lose(bank, 3)
    bank.epochs(4)
    given = Counter(int(amount) for amount in bank.site.table("again")["amount"])
    assert given == {1: 10, 2: 10, 4: 10}
    assert damage(bank) == []


# -- under another delivery before, or afterwards


def delivering(bank: Given, delivery: str) -> Given:
    changed = Given(replace(bank.site, pipeline=replace(bank.site.pipeline, delivery=delivery)))
    changed.path = bank.path
    return changed


def test_what_came_before_a_commit_is_not_given_again_after_a_change_to_at_most_once(bank, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "record_publications", cut_off)
        with pytest.raises(WeirError):
            delivering(bank, "at_least_once").epochs(1)
    assert amounts(bank) == {1: 1} and bank.ids() == [1]
    bank.epochs(2)
    assert amounts(bank) == {1: 1, 2: 1} and bank.state()["k0"] == (2, 3)
    assert damage(bank) == []


@pytest.mark.parametrize("bank", BOTH, indirect=True)
def test_a_sink_that_may_have_rows_of_an_epoch_that_failed_gets_none_at_most_once(bank, monkeypatch):
    more = delivering(bank, "at_least_once")
    more.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", cut_off)
        with pytest.raises(WeirError):
            more.epochs(2)
    with pytest.raises(DamageError, match="et it deliver at least once until"):
        bank.epochs(3)
    assert amounts(bank) == {1: 1, 2: 1}
    more.epochs(4)  # 2 and 3 too, which are there
    given = amounts(bank)
    assert given == {1: 1, 2: 2, 3: 1, 4: 1}
    lose(bank, 5)
    bank.epochs(6)
    assert amounts(bank) == {**given, 6: 1}
    assert damage(bank) == []


def test_a_sink_whose_very_first_epoch_failed_gets_none_at_most_once(bank, monkeypatch):
    """No checkpoint tells that it may have rows; the lease does, also that of a run that was refused."""
    more = delivering(bank, "at_least_once")
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", cut_off)
        with pytest.raises(WeirError):
            more.epochs(1)
    for _ in range(2):
        with pytest.raises(DamageError, match="et it deliver at least once until"):
            bank.epochs()
    assert amounts(bank) == {1: 1} and bank.ids() == []
    more.epochs(2)
    given = amounts(bank)
    bank.epochs(3)
    assert amounts(bank) == {**given, 3: 1} == {1: 2, 2: 1, 3: 1}
    assert damage(bank) == []


def test_an_epoch_that_failed_at_most_once_holds_no_later_one(bank):
    lose(bank, 1)
    delivering(bank, "at_least_once").epochs(2)
    lose(bank, 3)
    bank.epochs(4)
    assert amounts(bank) == {2: 1, 4: 1}


@pytest.mark.parametrize("delivery", sampled(["exactly_once", "at_least_once"]))
def test_another_delivery_says_what_to_do_where_rows_were_lost(table, monkeypatch, delivery):
    table.epochs(1)
    with monkeypatch.context() as patched:
        patched.setattr("weir.ownership.publish._publish", cut_off)
        with pytest.raises(WeirError):
            table.epochs(2)
    changed = delivering(table, delivery)
    with pytest.raises(DamageError, match="let it deliver at most once until it has got rows of a later epoch"):
        changed.epochs(3)
    table.epochs(4)
    changed.epochs(5)
    assert amounts(changed) == {1: 1, 3: 1, 4: 1, 5: 1}
    assert damage(changed) == []


# -- a source that gives each row once


def numbers(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    return rows.select("id", "n")


@pytest.fixture
def queue(tmp_path) -> tuple[Queue, Site]:
    source = QueueSource(name="in", path=str(tmp_path / "queue.db"))
    fed = altered(small.accounts, input=source, order_by=("n",), function=numbers, sink=delta.append("out"))
    pipeline = Pipeline("small", (fed,), max_parallelism=8, delivery="at_most_once")
    return Queue(str(tmp_path / "queue.db")), replace(Bank.at(tmp_path / "site", **RETAINED).site, pipeline=pipeline)


def test_a_queue_is_neither_planned_empty_nor_forked_and_a_rewind_says_what_is_missing(queue, weir, monkeypatch):
    source, site = queue
    source.put([("a", 1), ("b", 2)])
    options = RunOptions(until_caught_up=True)
    list(run(site.pipeline, site.settings, options, InMemoryExecutor()))
    source.put([("a", 3)])
    plan(site.pipeline, site.settings)
    assert source.lag({"n": 2}).rows == 1, "a plan takes nothing"
    list(run(site.pipeline, site.settings, options, InMemoryExecutor()))
    assert sorted(site.table("out")["n"]) == [1, 2, 3]
    obstacles = rewind.plan(site.pipeline, site.settings, 2).obstacles
    assert [
        text for text in obstacles if "in has lost what would be read again (queue in cannot be read again)" in text
    ]
    with pytest.raises(ConfigurationError, match="can be read once"):
        forks.fork(site.pipeline, site.settings, "aside")


def test_a_queue_may_forget_rows_before_they_are_applied(queue, monkeypatch):
    source, site = queue
    source.put([("a", 1)])
    calls = []

    class Watching(InMemoryExecutor):
        def run(self, *arguments, **options):
            calls.append("stage")
            return super().run(*arguments, **options)

    monkeypatch.setattr(Queue, "committed", lambda _, position: calls.append(position["n"]))
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), Watching()))
    assert calls == [1, "stage", 1]


def test_a_row_of_a_queue_is_lost_with_its_epoch(queue, monkeypatch):
    source, site = queue
    source.put([("a", 1)])
    options = RunOptions(until_caught_up=True)
    with monkeypatch.context() as patched:
        patched.setattr(positions, "commit", cut_off)
        with pytest.raises(WeirError):
            list(run(site.pipeline, site.settings, options, InMemoryExecutor()))
    source.put([("b", 2)])
    list(run(site.pipeline, site.settings, options, InMemoryExecutor()))
    assert sorted(site.table("out")["n"]) == [2]
    with sqlite3.connect(source._path) as connection:
        assert connection.execute("SELECT COUNT(*) FROM queue").fetchone() == (0,)
    assert not list(site.storage.glob("landed/**/*.parquet")), "nothing needs what was landed"


# -- definitions


def test_gates_that_decline_epochs_are_refused_with_at_most_once():
    for failing in ("hold", "quarantine"):
        gate = expect("ExpectColumnValuesToNotBeNull", column="id", on_failure=failing)
        with pytest.raises(PipelineError, match="may decline an epoch whose rows are then lost"):
            Pipeline("small", (replace(small.accounts, gates=(gate,)),), delivery="at_most_once")
    warned = expect("ExpectColumnValuesToNotBeNull", column="id", on_failure="warn")
    Pipeline("small", (replace(small.accounts, gates=(warned,)),), delivery="at_most_once")
