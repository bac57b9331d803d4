"""What a branch made otherwise: by table, day and key, and in the state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.api import Pipeline
from pipelines.runtime.fork_diff import diff
from tests.recovery.small import Bank, accounts, pipeline
from tests.recovery.test_forks import Branched, at, ran
from tests.recovery.test_promotion import corrected, green
from tests.recovery.test_restore import reordered
from tests.recovery.test_rewind import bad


@pytest.fixture
def bank(tmp_path) -> Branched:
    found = at(tmp_path)
    found.epochs(1, 2, 3)
    found.fork(at=1)
    return found


def found(bank: Branched, code=pipeline, name: str = "fix"):
    return diff(code, bank.site.settings, name)


def test_the_same_code_on_the_same_input_differs_in_nothing(bank):
    ran(bank.branch("fix"))
    compared = found(bank)
    assert compared.same
    assert compared.tables[0].rows == (20, 20)
    assert "**Nothing differs.**" in compared.to_markdown()


def test_rows_whose_columns_came_in_another_order_are_the_same_rows(bank):
    deployed = replace(pipeline, stages=(reordered,))
    bank = replace(bank, site=replace(bank.site, pipeline=deployed))
    bank.epochs(4)
    ran(bank.branch("fix", deployed))
    compared = found(bank, deployed)
    assert compared.same
    assert compared.tables[0].rows == (30, 30)


def test_a_branch_that_has_read_less_says_so(bank):
    compared = found(bank)
    assert (compared.behind, compared.same) == ({"landing": 2}, False)
    assert compared.tables[0].counts == {"added": 0, "removed": 20, "changed": 0}
    assert "still to read 2 files of landing" in compared.to_markdown()


def test_other_amounts_are_changes_of_the_same_keys(bank):
    ran(bank.branch("fix", bad))
    compared = found(bank, bad)
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
    compared = found(bank)
    assert {row["amount"] for row in compared.tables[0].sample} == {3, 300}
    assert compared.states[0].counts == {"added": 0, "removed": 0, "changed": 10}


def test_a_stage_that_only_the_branch_has(bank):
    ran(Bank(replace(bank.branch("fix", green).site)))
    compared = found(bank, green)
    assert {one.table: one.rows for one in compared.tables} == {"booked": (20, 20), "large": (0, 10)}
    states = {one.stage: one for one in compared.states}
    assert states["large"].why == "only the branch has it"
    assert states["accounts"].counts == {"added": 0, "removed": 0, "changed": 0}
    assert compared.same is False


def test_a_table_that_the_branch_s_code_has_no_more(bank):
    code = Pipeline("small", (replace(accounts, sink=None),), max_parallelism=8)
    ran(bank.branch("fix", code))
    compared = found(bank, code)
    assert compared.tables[0].counts == {"added": 0, "removed": 20, "changed": 0}
