"""Columns whose names have dots, beside a struct whose fields have the same paths."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recovery.harness import Site
from weir import Pipeline, agg, aggregate, deduplicate, delta, files, join, select, window
from weir.connectors.delta.statistics import statistics
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

START = datetime(2026, 1, 1, tzinfo=UTC)


def source(name: str = "a"):
    return files(f"{{landing}}/{name}/*.parquet", name=name, event_time="meta.at")


SINK = delta.append("t")
STAGES = {
    "window": window("s", source(), key="meta.k", on="meta.at", every="1h", n=agg.count(), sink=SINK),
    "aggregate": aggregate("s", source(), key="meta.k", n=agg.sum("meta.v", where="`meta.v` > 1"), sink=SINK),
    "select": select("s", source(), "*", where="`meta.v` > 1 AND meta.v < 0", sink=SINK),
    "deduplicate": deduplicate("s", source(), key="meta.k", sink=SINK),
    "join": join("s", source(), source("b"), on="meta.k", within=("-1h", "1h"), sink=SINK),
    "upsert": select("s", source(), "*", sink=delta.upsert("t", key="meta.k", order_by="meta.at")),
    "upsert of numbers": select("s", source(), "*", sink=delta.upsert("t", key="meta.v", order_by="meta.at")),
    "partitions": select("s", source(), "*", sink=delta.append("t", partition_by=["meta.k"])),
}


def table(rows: list[tuple[int, str, int, int]]) -> pa.Table:
    """Rows of an id, a key, an hour and a value, beside a struct that has other values under the same paths."""
    ids, keys, hours, values = map(list, zip(*rows, strict=True))
    times = pa.array([START + timedelta(hours=hour) for hour in hours], pa.timestamp("us", "UTC"))
    inner = pa.array([{"at": 7, "k": "~", "v": -1} for _ in rows])
    return pa.table({"meta": inner, "id": ids, "meta.k": keys, "meta.at": times, "meta.v": values})


def land(site: Site, name: str, number: int, rows: pa.Table) -> None:
    (site.landing / name).mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, site.landing / name / f"{number}.parquet")


@pytest.mark.parametrize("name", STAGES)
def test_a_column_with_a_dot_is_never_the_field_of_a_struct(tmp_path: Path, name: str):
    pipeline = Pipeline("dots", (STAGES[name],))
    site = Site(tmp_path, {"WEIR_EPOCH__MAX_FILES": "1"}, pipeline, "x")
    land(site, "a", 1, table([(1, "x", 0, 1), (2, "y", 1, 2), (3, "x", 2, 5)]))
    land(site, "a", 2, table([(4, "x", 20, 1), (5, "z", 20, 9)]))
    land(site, "b", 1, table([(9, "x", 1, 9)]))
    reports = list(run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    read = pl.read_delta(str(site.storage / "tables" / "t"))
    ids = sorted(read["id"].to_list()) if "id" in read.columns else []
    match name:
        case "window":
            assert sorted(read["meta.k"].to_list()) == ["x", "x", "y"] and read["n"].sum() == 3
        case "aggregate":
            newest = read.sort("epoch").unique("meta.k", keep="last").sort("meta.k")
            assert newest["n"].to_list() == [5, 2, 9]
        case "select":
            assert ids == [2, 3, 5]
        case "deduplicate":
            assert ids == [1, 2, 5]
        case "join":
            assert ids == [1, 3]
        case "upsert":
            assert ids == [2, 4, 5]
        case "upsert of numbers":
            assert ids == [2, 3, 4, 5]
        case "partitions":
            assert ids == [1, 2, 3, 4, 5]
    newest = reports[-1].checkpoint.offsets["a"]["newest"]
    assert newest == int((START + timedelta(hours=20)).timestamp() * 1_000_000)


def test_statistics_of_a_column_with_a_dot_are_its_own(tmp_path: Path):
    pq.write_table(table([(1, "x", 0, 1), (2, "y", 1, 2)]), tmp_path / "f.parquet")
    told = json.loads(statistics(pq.read_metadata(tmp_path / "f.parquet")))
    assert told["minValues"] == {"id": 1, "meta.k": "x", "meta.v": 1}
    assert told["maxValues"] == {"id": 2, "meta.k": "y", "meta.v": 2}
