"""Where SQL or a transform puts another time in place of the source's event time, no row is late by a watermark that its
rows have not reached, and windows go on to close."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.days import Days
from state_ops.records.checkpoint import untold_sources
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir import Pipeline, Stage, agg, delta, files, select, side, testing, union, window
from weir.execution.executor import Executor
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

START = datetime(2026, 1, 1, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")
CLICKS, AGAIN = (files("{landing}/*.parquet", name=name, event_time="at") for name in ("clicks", "again"))
SHIFTED = {
    "earlier": "timestamp_micros(unix_micros(at) - 3600000000) AS at",
    "later": "timestamp_micros(unix_micros(at) + 3600000000) AS at",
    "cut": "timestamp_micros(unix_micros(at) DIV 600000000 * 600000000) AS at",
}
HERE = InMemoryExecutor()


def counts(source, on: str = "at", **more) -> Stage:
    return window("counts", source, key="key", on=on, every="20m", n=agg.count(), sink=delta.append("counts"), **more)


def direct(made: str) -> tuple[Stage, ...]:
    return (counts(CLICKS, select=["key", made]),)


def behind(made: str) -> tuple[Stage, ...]:
    before = select("before", CLICKS, "key", made)
    return before, counts(before)


def renamed(made: str) -> tuple[Stage, ...]:
    return (counts(CLICKS, "since", select=["key", "at AS since", made]),)


def renamed_behind(made: str) -> tuple[Stage, ...]:
    before = select("before", CLICKS, "key", "at AS since", made)
    return before, counts(before, "since")


def united(made: str) -> tuple[Stage, ...]:
    both = union("both", side(CLICKS, select=["key", made]), side(AGAIN, select=["key", made]))
    return both, counts(both)


def site_of(root: Path, stages: tuple[Stage, ...], epochs: int = 9) -> Site:
    """Five rows in an epoch, ten minutes apart."""
    site = Site(
        root, {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_SPARK__PARALLELISM": "2"}, Pipeline("times", stages), __name__
    )
    site.landing.mkdir(parents=True)
    for number in range(epochs):
        at = [START + timedelta(minutes=10 * (5 * number + place)) for place in range(5)]
        rows = pa.table({"key": pa.array([place % 2 for place in range(5)], pa.int64()), "at": pa.array(at, TIME)})
        pq.write_table(rows, site.landing / f"{number}.parquet")
    return site


def table(site: Site) -> pl.DataFrame:
    return pl.read_delta(str(site.storage / "tables" / "counts"))


def assert_none_is_late(site: Site, executor: Executor | None = HERE) -> None:
    """Nor lost, and windows close while rows come. executor: None is Spark."""
    reports = list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor))
    assert not any(report.checkpoint.operators["counts"].rows_late for report in reports)
    assert table(site).height, "windows have closed"
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True, drain=True), executor))
    closed = table(site)
    assert closed["n"].sum() == 5 * len(list(site.landing.iterdir())) * len(site.pipeline.sources)
    assert not closed.select("key", "window_start").is_duplicated().any()


@pytest.mark.parametrize("made", SHIFTED)
@pytest.mark.parametrize("stages", [direct, behind, renamed, renamed_behind, united])
def test_no_row_is_late_by_a_time_that_sql_makes_of_the_event_time(tmp_path, stages, made):
    assert_none_is_late(site_of(tmp_path, stages(SHIFTED[made])))


def test_a_watermark_that_a_test_gives_counts_whatever_sql_makes_of_the_event_time():
    (stage,) = direct(SHIFTED["earlier"])
    ran = testing.run(stage, schema=pa.schema([("key", pa.int64()), ("at", TIME)]))
    closed = ran.epoch([{"key": 1, "at": START}], watermark=START + timedelta(hours=1))
    assert closed["window_start"].to_list() == [START - timedelta(hours=1)]


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("shift", sampled(["earlier", "later", "keeps"]))
def test_no_row_is_late_by_a_time_that_a_transform_makes_of_the_event_time(tmp_path, shift):
    def moved(rows):
        from pyspark.sql import functions as F

        by = {"keeps": "1 = 1", "earlier": "at - INTERVAL 1 HOUR", "later": "at + INTERVAL 1 HOUR"}[shift]
        return rows.withColumn("more" if shift == "keeps" else "at", F.expr(by)).where("key IS NOT NULL")

    site = site_of(tmp_path, (counts(CLICKS, transform=moved),), epochs=3)
    assert_none_is_late(site, None)


@pytest.mark.parametrize("stages", [direct, united])
def test_a_time_that_sql_makes_says_nothing_of_how_far_a_source_is_read(tmp_path, stages):
    site = site_of(tmp_path, stages("timestamp_micros(key * 1000000) AS at"), epochs=1)
    (file,) = site.landing.iterdir()
    rows = pq.read_table(file)
    pq.write_table(rows.set_column(1, "at", pa.nulls(len(rows), TIME)), file)
    (report,) = run(site.pipeline, site.settings, RunOptions(until_caught_up=True), HERE)
    names = sorted(source.name for source in site.pipeline.sources)
    assert [report.checkpoint.offsets[name]["newest"] for name in names] == [None] * len(names)
    assert untold_sources(report.checkpoint, Days(frozenset(names))) == names
