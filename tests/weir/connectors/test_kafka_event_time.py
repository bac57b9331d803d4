"""Event time of a topic whose partitions lie a day apart: whole runs on a real broker, beside a replay by Polars."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa

from tests.recovery.harness import Site
from weir import Pipeline, agg, delta, kafka, window
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
SCHEMA = {"id": pa.string(), "at": pa.timestamp("us", "UTC")}


def test_partitions_that_lie_a_day_apart_have_not_one_late_row(request, tmp_path):
    kafka_topics = request.getfixturevalue("kafka")  # `kafka` is what authors import
    topic = kafka_topics.create(partitions=3)
    begins = {0: NOON, 1: NOON - timedelta(hours=24), 2: NOON - timedelta(hours=7)}
    rows = []
    for partition, begin in begins.items():
        of = [{"id": f"k{n % 5}", "at": (begin + timedelta(minutes=7 * n)).isoformat()} for n in range(200)]
        kafka_topics.send(topic, [json.dumps(row).encode() for row in of], partition)
        rows += of
    clicks = kafka(topic, name="clicks", servers=kafka_topics.servers, schema=SCHEMA, event_time="at", idle_after=None)
    hours = window(
        "hours", clicks, key="id", on="at", every="1h", lateness="0s", sink=delta.append("hours"),
        late=delta.append("late"), n=agg.count(),
    )  # fmt: skip
    options = {"WEIR_EPOCH__MAX_ROWS": "70", "WEIR_SPARK__PARALLELISM": "2"}
    site = Site(tmp_path, options, Pipeline("clicks", (hours,), max_parallelism=4), __name__)
    done = list(
        run(
            site.pipeline, site.settings, RunOptions(until_caught_up=True, drain=True), executor=InMemoryExecutor()
        )
    )  # fmt: skip
    assert len(done) > 8
    assert site.table("late").empty
    given = pl.from_pandas(site.table("hours")).select("id", pl.col("window_start"), "n").sort("id", "window_start")
    expected = (
        pl.DataFrame(rows)
        .select(
            "id", pl.col("at").str.to_datetime(time_zone="UTC", time_unit="us").dt.truncate("1h").alias("window_start")
        )
        .group_by("id", "window_start")
        .agg(pl.len().cast(pl.Int64).alias("n"))
        .sort("id", "window_start")
    )
    assert given.rows() == expected.rows()
