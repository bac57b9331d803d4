"""Epochs that have no rows for a stage: no job is run of one that only rows let act."""

from __future__ import annotations

import random
from collections import Counter

import polars as pl
import pytest

from tests.weir.operators.test_stateless import SHOP, land, newest, rows, site_of, slices, table
from weir import (
    Pipeline,
    State,
    agg,
    aggregate,
    deduplicate,
    delta,
    lookup,
    select,
    stage,
    top_n,
    union,
    window,
)
from weir.execution.in_process import InMemoryExecutor
from weir.operators.watermarks import acts_on_rows_alone
from weir.run.run import RunOptions, run


class Noting(InMemoryExecutor):
    """Counts the jobs of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = Counter[str]()

    def run(self, task, *args):
        self.jobs[task.stage.uid] += 1
        return super().run(task, *args)


dear = select("dear", SHOP, "*", where="price >= 50")
both = union("both", dear, dear)
sums = aggregate("sums", both, key="key", rows=agg.count(), price=agg.sum("price"), sink=delta.append("sums"))
PIPELINE = Pipeline("quiet", (dear, both, sums))


def ran(site, **options: str) -> tuple[Counter[str], list]:
    site.options.update(options)
    executor = Noting()
    asked = RunOptions(until_caught_up=True)
    return executor.jobs, list(run(site.pipeline, site.settings, asked, executor))


def expected(given: pl.DataFrame) -> list[tuple]:
    kept = given.filter(pl.col("price") >= 50)
    of = pl.concat([kept, kept]).group_by("key").agg(pl.len().cast(pl.Int64), pl.col("price").sum()).sort("key")
    return of.rows()


def test_no_job_is_run_for_a_stage_that_no_row_reaches(tmp_path):
    site, given = site_of(tmp_path, PIPELINE, WEIR_EPOCH__MAX_FILES="1"), rows(1, 90)
    cheap = given.filter(pl.col("price").fill_null(0) < 50)
    parts = [cheap[:10], given[:40], cheap[10:30], given[40:]]
    land(site, "shop", parts)
    jobs, reports = ran(site)
    assert len(reports) == 4
    assert jobs == {"dear": 4, "both": 2, "sums": 2}
    assert reports[0].checkpoint.operators["sums"].entries == 0
    assert newest(table(site, "sums").sort("epoch")).rows() == expected(pl.concat(parts))
    quiet, before = reports[2].checkpoint.operators["sums"], reports[1].checkpoint.operators["sums"]
    assert (quiet.files_total, quiet.bytes_total, quiet.entries) == (
        before.files_total,
        before.bytes_total,
        before.entries,
    )
    assert (quiet.files_new, quiet.rows_in, quiet.rows_out) == (0, 0, 0) and quiet.files_total > 0


def test_a_job_is_run_all_the_same_where_state_moves_or_is_to_depend_on_nothing_before(tmp_path):
    site, given = site_of(tmp_path, PIPELINE, WEIR_EPOCH__MAX_FILES="1"), rows(2, 90)
    cheap = given.filter(pl.col("price").fill_null(0) < 50)
    land(site, "shop", [given])
    ran(site)
    land(site, "shop", [cheap], first=1)
    jobs, _ = ran(site, WEIR_SPARK__PARALLELISM="3")
    assert jobs["sums"] == 1
    land(site, "shop", [cheap], first=2)
    jobs, _ = ran(site)
    assert jobs["sums"] == 0
    land(site, "shop", [cheap], first=3)
    jobs, (report,) = ran(site, WEIR_CHECKPOINTS__MODE="full")
    assert jobs["sums"] == 1
    assert report.checkpoint.operators["sums"].files_new == report.checkpoint.operators["sums"].files_total > 0
    land(site, "shop", slices(given, random.Random(2), 2), first=4)
    ran(site, WEIR_CHECKPOINTS__MODE="incremental", WEIR_SPARK__PARALLELISM="2")
    assert newest(table(site, "sums").sort("epoch")).rows() == expected(pl.concat([given, given]))


class Last(State):
    """Of one key."""

    price: int = 0


def function(**more):
    def seen(rows: pl.DataFrame, state, epoch) -> pl.DataFrame:
        return rows

    def fired(timers: pl.DataFrame, state, epoch) -> pl.DataFrame:
        return timers

    more = {"on_timer": fired} if more.pop("timed", False) else more
    return stage("it", source=SHOP, key="key", state=Last, **more)(seen)


@pytest.mark.parametrize(
    ("of", "alone"),
    [
        (dear, True),
        (both, True),
        (sums, True),
        (lookup("it", SHOP, table="t", on="key"), True),
        (lookup("it", SHOP, table="t", on="key", broadcast=False), True),
        (function(), True),
        (function(ttl="1h"), False),
        (function(timed=True), False),
        (window("it", SHOP, key="key", on="at", every="1m", n=agg.count()), False),
        (window("it", SHOP, key="key", on=None, every="1m", n=agg.count()), False),
        (deduplicate("it", SHOP, key="key", on="at", ttl="1m"), False),
        (top_n("it", SHOP, key="key", by="price", n=1), False),
    ],
)
def test_time_alone_lets_windows_timers_and_what_is_forgotten_act(of, alone):
    assert acts_on_rows_alone(of) is alone
