"""The upgrade of docs/how-to/upgrade.md: savepoint, another schema and parallelism, plan, run, compare."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import polars as pl
import pytest

from tests.recovery.conftest import weir as weir
from tests.recovery.small import Bank
from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, renamed_from, stage


class Account(State):
    """That of `small`, with a field renamed and two more."""

    booked: Annotated[int, renamed_from("rows")] = 0
    total: int = 0
    highest: int | None = None
    branch: str = "main"


@stage(
    "accounts",
    source=files("{landing}/*.parquet", name="landing"),
    key="id",
    state=Account,
    order_by=["at"],
    sink=delta.append("booked"),
)
def accounts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """As before, and the highest amount since the upgrade."""
    state.fold(rows, booked=agg.count(), total=agg.sum("amount"), highest=agg.max("amount"))
    return rows.select("id", "at", "amount")


pipeline = Pipeline("small", (accounts,), max_parallelism=8)
FIELDS = ("booked", "total", "highest", "branch")


def replayed(before: tuple[int, ...], after: tuple[int, ...]) -> dict[str, tuple]:
    """What the files say, by key: those that the old code has read, then those of the new code."""
    state: dict[str, tuple] = {}
    for number in (*before, *after):
        for key in [f"k{key}" for key in range(8)] + [f"only-{number}-{key}" for key in range(2)]:
            booked, total, highest, branch = state.get(key, (0, 0, None, "main"))
            state[key] = (booked + 1, total + number, number if number in after else highest, branch)
    return state


def test_savepoint_change_plan_run_compare(tmp_path, weir):
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="2")
    bank.epochs(1, 2, 3)
    assert weir(bank.site, "savepoint", "small", "--name", "before-upgrade").code == 0

    options = {**bank.site.options, "WEIR_SPARK__PARALLELISM": "5"}
    site = replace(bank.site, pipeline=pipeline, module=__name__, options=options)
    planned = weir(site, "plan", "small", "--savepoint", "before-upgrade", "--json")
    assert planned.code == 0, planned.err
    verdicts = {finding["what"]: finding["verdict"] for finding in json.loads(planned.out)["findings"]}
    assert verdicts == {
        "field rows is called booked now": "migrates",
        "field highest (int64, nullable) was added": "migrates",
        "field branch (string, default 'main') was added": "migrates",
        "rescales from 2 to 5 subtasks, in the first epoch": "compatible",
    }
    assert json.loads(planned.out)["samples"][0]["rows"] > 0

    upgraded = Bank(site)
    upgraded.epochs(4, 5)
    rows = json.loads(f"[{','.join(weir(site, 'state', 'scan', 'small', 'accounts', '--json').out.splitlines())}]")
    expected = replayed((1, 2, 3), (4, 5))
    assert {row["id"]: tuple(row[name] for name in FIELDS) for row in rows} == expected

    compared = weir(site, "state", "diff", "small", "accounts", "before-upgrade", "5", "--json")
    difference = json.loads(compared.out)
    old = replayed((1, 2, 3), ())
    assert difference["added"] == len(expected.keys() - old.keys()) == 4
    assert difference["removed"] == 0 and difference["changed"] == sum(expected[key][1] != old[key][1] for key in old)
    assert difference["fields_only_in_to"] == ["booked", "highest", "branch"] and difference["fields_only_in_from"] == [
        "rows"
    ]
    booked = site.table("booked")
    assert sorted(booked["amount"]) == sorted([number for number in (1, 2, 3, 4, 5) for _ in range(10)])
    site.assert_no_orphans()


@pytest.mark.long
def test_an_upgrade_that_was_a_mistake_is_taken_back(tmp_path, weir):
    bank = Bank.at(tmp_path, WEIR_SPARK__PARALLELISM="2")
    bank.epochs(1, 2)
    assert weir(bank.site, "savepoint", "small", "--name", "before-upgrade").code == 0
    Bank(replace(bank.site, pipeline=pipeline, module=__name__)).epochs(3)
    output = weir(bank.site, "plan", "small").out
    assert "field rows (int64, default 0) was added" in output, "the old code alone would count from 0 again"

    assert weir(bank.site, "rewind", "small", "--savepoint", "before-upgrade", "--yes").code == 0
    assert "its state is used as it is" in weir(bank.site, "plan", "small").out
    bank.epochs()
    bank.assert_exact(1, 2, 3)
