"""Days of a pipeline with several sources, of which one is read ahead of the others."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import PipelineError, WeirError
from tests.recovery.harness import Site
from weir import Pipeline, as_of, deduplicate, delta, files, join
from weir.execution.in_process import InMemoryExecutor
from weir.operations.backfill import backfill, base_of
from weir.run.run import RunOptions, run

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
ORDERS = files("{landing}/orders/*.parquet", name="orders", event_time="at")
CUSTOMERS = files("{landing}/customers/*.parquet", name="customers", event_time="at")


def joined(**more) -> Pipeline:
    named = join("named", ORDERS, CUSTOMERS, on="k", within=("-3650d", "3650d"), sink=delta.append("named"))
    return Pipeline("shop", (named,), max_parallelism=4, **more)


def day(number: int) -> datetime:
    return FIRST + timedelta(days=number - 1)


def land(site: Site, name: str, number: int, rows: list[dict]) -> None:
    folder = site.landing / name
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / f".{number}")
    (folder / f".{number}").rename(folder / f"{number}.parquet")


def orders(site: Site, number: int, value: int) -> None:
    land(site, "orders", number, [{"k": 1, "at": day(number) + timedelta(hours=5), "value": value}])


def shop(root: Path, pipeline: Pipeline) -> Site:
    """A table of customers that is loaded first, and orders, a day an epoch."""
    options = {
        "WEIR_EPOCH__MAX_FILES": "1",
        "WEIR_PIPELINES__SHOP__BACKFILL": json.dumps({"start": "2026-01-01", "keep": 6}),
    }
    site = Site(root, options, pipeline, "tests.recovery.test_backfill_days")
    land(site, "customers", 1, [{"k": 1, "at": day(400), "name": "Ada"}])
    for number in range(1, 6):
        orders(site, number, number)
    went(site)
    return site


def went(site: Site) -> None:
    for _ in run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()):
        pass


def values(site: Site) -> list[int]:
    return sorted(pl.read_delta(str(site.storage / "tables" / "named"))["value"].to_list())


def test_a_source_that_runs_ahead_is_named_with_what_lets_days_go_by_the_other(tmp_path):
    site = shop(tmp_path, joined())
    with pytest.raises(WeirError) as refused:
        base_of(site.pipeline, site.settings, day(3))
    said = str(refused.value)
    for part in (
        "customers to 2027-02-04",
        "orders to 2026-01-03 05:00",
        'days_by=("orders",)',
        "weir fork shop --name",
    ):
        assert part in said


def test_days_go_by_the_source_that_the_pipeline_names(tmp_path):
    site = shop(tmp_path, joined(days_by="orders"))
    orders(site, 3, 33)
    done = backfill(site.pipeline, site.settings, day(3), day(4), promote=True, executor=InMemoryExecutor())
    assert (done.base, done.promoted is not None, values(site)) == (2, True, [1, 2, 4, 5, 33])
    assert done.note is not None and "customers had been read to 2027-02-04" in done.note


def test_versions_of_an_as_of_say_no_days(tmp_path):
    facts = as_of("named", ORDERS, deduplicate("known", CUSTOMERS, key="k"), on="k", sink=delta.append("named"))
    known = facts.inputs[1].origin
    pipeline = Pipeline("shop", (known, facts), max_parallelism=4)
    assert pipeline.days.sources == {"orders"}
    site = shop(tmp_path, pipeline)
    assert base_of(site.pipeline, site.settings, day(3))[0].id == 2


def test_checkpoints_are_kept_for_the_days_of_the_source_that_is_named(tmp_path):
    site = shop(tmp_path, joined(days_by=("orders",)))
    site = replace(site, options={**site.options, "WEIR_CHECKPOINTS__NUM_RETAINED": "1"})
    for number in range(6, 9):
        orders(site, number, number)
    went(site)
    assert base_of(site.pipeline, site.settings, day(5))[0].id == 4


def test_days_go_by_no_source_without_event_time():
    with pytest.raises(PipelineError, match="Days cannot go by"):
        joined(days_by="customer")
