"""What a branch made otherwise: by table, day and key, and in the state."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import polars as pl
import pyarrow as pa
import pytest

from state_ops.value_text import text_of
from tests.recovery.conftest import weir as weir
from tests.recovery.small import SOURCE, Bank, accounts, pipeline
from tests.recovery.test_forks import Branched, at, ran
from tests.recovery.test_promotion import corrected, green
from tests.recovery.test_restore import reordered
from tests.recovery.test_rewind import bad
from tests.tools.stages import altered
from weir import Epoch, ListOf, Pipeline, State, ValueState, agg, aggregate, deduplicate, delta, stage
from weir.operations.branch_diff import diff


@pytest.fixture
def bank(tmp_path) -> Branched:
    bank = at(tmp_path)
    bank.epochs(1, 2, 3)
    bank.fork(at=1)
    return bank


def difference(bank: Branched, code=pipeline, name: str = "fix"):
    return diff(code, bank.site.settings, name)


def test_the_same_code_on_the_same_input_differs_in_nothing(bank):
    ran(bank.branch("fix"))
    compared = difference(bank)
    assert compared.same
    assert compared.tables[0].rows == (20, 20)
    assert "**Nothing differs.**" in compared.to_markdown()


@pytest.mark.parametrize(
    "command", ["diff small fix", "backfill small --from 2026-01-01 --to 2026-01-02"], ids=lambda command: command[:4]
)
def test_a_report_for_which_there_is_no_directory_is_refused_before_the_work(bank, weir, tmp_path, command):
    done = weir(bank.site, *command.split(), "--report", str(tmp_path / "no" / "diff.md"))
    assert (done.code, done.out) == (2, "") and "there is no such directory" in done.err


@pytest.mark.long
def test_rows_whose_columns_came_in_another_order_are_the_same_rows(bank):
    deployed = replace(pipeline, stages=(reordered,))
    bank = replace(bank, site=replace(bank.site, pipeline=deployed))
    bank.epochs(4)
    ran(bank.branch("fix", deployed))
    compared = difference(bank, deployed)
    assert compared.same
    assert compared.tables[0].rows == (30, 30)


def test_a_branch_that_has_read_less_says_so(bank):
    compared = difference(bank)
    assert (compared.to_dict()["files_behind"], compared.same) == ({"landing": 2}, False)
    assert compared.tables[0].counts == {"added": 0, "removed": 20, "changed": 0}
    assert "still to read 2 files of landing" in compared.to_markdown()


@pytest.mark.long
def test_other_amounts_are_changes_of_the_same_keys(bank):
    ran(bank.branch("fix", bad))
    compared = difference(bank, bad)
    (table,), (state,) = compared.tables, compared.states
    assert table.counts == {"added": 0, "removed": 0, "changed": 20}
    assert [(row["change"], row["amount"]) for row in table.sample[:2]] == [("was", 2), ("is", 4)]
    assert state.counts == {"added": 0, "removed": 0, "changed": 12}
    report = compared.to_markdown()
    assert "| state of accounts | | | 0 | 0 | 12 |" in report
    assert compared.to_dict()["tables"]["booked"]["rows_branch"] == 20


def test_corrected_input_shows_in_rows_and_state(bank):
    corrected(bank, 3)
    ran(bank.branch("fix"))
    compared = difference(bank)
    assert {row["amount"] for row in compared.tables[0].sample} == {3, 300}
    assert compared.states[0].counts == {"added": 0, "removed": 0, "changed": 10}


@pytest.mark.long
def test_a_stage_that_only_the_branch_has(bank):
    ran(Bank(replace(bank.branch("fix", green).site)))
    compared = difference(bank, green)
    assert {table.table: table.rows for table in compared.tables} == {"booked": (20, 20), "large": (0, 10)}
    states = {state.stage: state for state in compared.states}
    assert states["large"].why == "only the branch has it"
    assert states["accounts"].counts == {"added": 0, "removed": 0, "changed": 0}
    assert compared.same is False


@pytest.mark.long
def test_a_table_that_the_branch_s_code_has_no_more(bank):
    code = Pipeline("small", (replace(accounts, sink=None),), max_parallelism=8)
    ran(bank.branch("fix", code))
    compared = difference(bank, code)
    assert compared.tables[0].counts == {"added": 0, "removed": 20, "changed": 0}


class Seen(State):
    """Moments in a list, which a report shows as a table does."""

    moments: ListOf[datetime]


def clocked(without: str) -> Pipeline:
    """Stages whose state or rows say when they were made, and one with a list. without: a key that a branch leaves
    out."""

    @stage("seen", source=SOURCE, key="id", state=Seen, order_by=["at"])
    def seen(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
        moment = pl.from_epoch(pl.col("amount") * 86_400, time_unit="s").dt.replace_time_zone("UTC")
        kept = rows.filter(pl.col("id") != without)
        state.moments.append(kept.select("id", moments=moment))

    where = f"id <> '{without}'"
    return Pipeline(
        "small",
        (
            deduplicate("firsts", SOURCE, key="id", where=where, sink=delta.append("firsts")),
            aggregate("means", SOURCE, key="id", where=where, sink=delta.append("means"), mean=agg.mean("amount")),
            seen,
        ),
        max_parallelism=8,
    )


@pytest.mark.long
def test_what_says_when_a_row_was_processed_is_left_out_and_named_so_that_a_real_difference_shows(tmp_path):
    bank = Branched(replace(at(tmp_path).site, pipeline=clocked("nobody")))
    bank.epochs(1, 2, 3)
    bank.fork(at=1)
    same = bank.branch("fix", clocked("nobody"))
    ran(Bank(replace(same.site, options={**same.site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "2"})))
    compared = difference(bank, clocked("nobody"))
    assert compared.same, compared.to_markdown()

    bank.fork("less", at=1)
    ran(bank.branch("less", clocked("only-3-0")))
    compared = difference(bank, clocked("only-3-0"), "less")
    tables, states = (
        {table.table: table for table in compared.tables},
        {state.stage: state for state in compared.states},
    )
    for part in (*compared.tables, *compared.states):
        assert part.counts == {"added": 0, "removed": 1, "changed": 0}, part
    assert states["firsts"].left_out == ("first_seen", "expires") and tables["means"].left_out == ("epoch",)
    assert tables["means"].sample == [{"change": "removed", "id": "only-3-0", "mean": 3.0}]
    report = compared.to_markdown()
    assert "Left out of the state of firsts: first_seen, expires, which say when a row was processed." in report
    assert "Left out of the table means: epoch, which says when a row was processed." in report
    assert r"| removed | only-3-0 | moments | \[1970-01-04 00:00:00+00:00\] |  |" in report
    assert "| removed | only-3-0 | 3.0 |" in report
    assert "| removed | only-3-0 |  |  |  |" in report, "of a deduplication's key nothing but itself"
    assert compared.to_dict()["state"]["firsts"]["left_out"] == ["first_seen", "expires"]


def open_to(*names: str) -> Pipeline:
    """Hands out further columns to a table that takes any."""

    def wide(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        more = [pl.col("amount").alias(name) for name in names]
        return accounts.function(rows, state, epoch).with_columns(more)

    sink = delta.append("booked", evolve="add")
    return Pipeline("small", (altered(accounts, function=wide, sink=sink),), max_parallelism=8)


@pytest.mark.parametrize(("second", "third"), [((), ("more",)), (("more",), ())])
def test_columns_that_came_or_went_since_the_fork_are_compared_in_the_files_that_have_them(tmp_path, second, third):
    bank = at(tmp_path)
    for number, names in enumerate(((), second, third), 1):
        Branched(replace(bank.site, pipeline=open_to(*names))).epochs(number)
    code = open_to("more")
    Branched(replace(bank.site, pipeline=code)).fork(at=1)
    ran(bank.branch("fix", code))
    (table,) = difference(bank, code).tables
    assert (table.columns, table.counts["changed"]) == ("", 10), "what one of the epochs has lacked"
    assert {row["more"] for row in table.sample if row["change"] == "was"} == {None}


class More(State):
    """An account with a field more."""

    rows: int = 0
    total: int = 0
    largest: int | None = None


def test_a_field_that_only_the_branch_has_is_a_difference(bank, weir):
    def with_largest(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count(), total=agg.sum("amount"), largest=agg.max("amount"))
        return rows.select("id", "at", "amount")

    code = Pipeline("small", (altered(accounts, function=with_largest, state=More),), max_parallelism=8)
    ran(bank.branch("fix", code))
    compared = difference(bank, code)
    assert not compared.same and not any(compared.states[0].counts.values())
    assert "State of accounts: only the branch has largest." in compared.to_markdown()
    assert compared.to_dict()["state"]["accounts"]["fields"] == "only the branch has largest"
    assert "state of accounts: only the branch has largest" in weir(bank.site, "diff", "small", "fix").out


def test_values_are_shown_as_tables_show_them():
    moment = datetime(2024, 5, 1, 12, tzinfo=UTC)
    assert text_of([moment, None]) == "[2024-05-01 12:00:00+00:00, null]"
    assert text_of({"at": moment, "raw": b"\x01"}) == "{at: 2024-05-01 12:00:00+00:00, raw: 01}"
    (spent,) = pa.array([[("a", 1.5)]], pa.map_(pa.string(), pa.float64())).to_pylist()
    assert (text_of(spent), text_of(None), text_of("it's")) == ("{a: 1.5}", "", "it's")
