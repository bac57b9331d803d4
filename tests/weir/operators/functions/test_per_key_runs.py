"""Stages with per-key functions in whole runs: what a checkpoint records of their caches, and the same on Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from state_ops.errors import ConfigurationError
from state_ops.keyed.per_key.state_cache import CacheFigures
from tests.tools.reading import state_at, table_at
from weir import Epoch, KeyState, Pipeline, Stage, State, ValueState, delta, files, stage
from weir.execution.in_process import InMemoryExecutor
from weir.loading import load_pipeline
from weir.run import maintenance
from weir.run.run import RunOptions, open_storage, run
from weir.settings.configuration import Settings

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
COLUMNS = {"k": pa.string(), "v": pa.int64(), "before": pa.int64()}


class Total(State):
    rows: int = 0
    amount: int = 0
    last: int | None = None


def _dicts(key: str, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:
    total, out = state.get(), []
    for row in rows:
        out.append({"k": key, "v": row["v"], "before": total.last})
        total.rows, total.amount, total.last = total.rows + 1, total.amount + row["v"], row["v"]
    state.update(total)
    return out


def a_pipeline(tmp_path: Path, totals: Stage, caches: dict[str, Any], **state: Any) -> tuple[Pipeline, Settings]:
    landing = tmp_path / "landing"
    landing.mkdir()
    for number in range(3):
        pq.write_table(
            pa.Table.from_pylist([{"k": f"u{user}", "v": number, "at": NOON} for user in range(8)]),
            landing / f"{number}.parquet",
        )
    configured = {
        "storage": {"root": str(tmp_path / "storage")},
        "local": {"work_dir": str(tmp_path / "work")},
        "epoch": {"max_files": 1},
        "state": {"caches": caches, **state},
        "pipelines": {"totals": {"object": "x:y", "params": {"landing": str(landing)}}},
    }
    return Pipeline("totals", (totals,), max_parallelism=16), Settings.model_validate(configured)


def landed(function: Any, **options: Any) -> Stage:
    source = files("{landing}/*.parquet", event_time="at")
    return stage("totals", source=source, key="k", state=Total, per_key=True, sink=delta.append("out"), **options)(
        function
    )


def test_each_checkpoint_records_and_logs_what_the_cache_did(tmp_path: Path) -> None:
    pipeline, configured = a_pipeline(tmp_path, landed(_dicts, output=COLUMNS), {"totals": {"l1": 100}})
    with capture_logs() as lines:
        reports = list(run(pipeline, configured, RunOptions(until_caught_up=True), InMemoryExecutor()))
    figures = [CacheFigures(**report.checkpoint.operators["totals"].cache) for report in reports]
    assert figures == [CacheFigures(misses=8, flushed=8), *[CacheFigures(l1_hits=8, flushed=8)] * 2]
    totals = [CacheFigures(**report.checkpoint.operators["totals"].cache_totals) for report in reports]
    assert totals == [figures[0], figures[0] + figures[1], figures[0] + figures[1] + figures[2]]
    logged = [line for line in lines if line["event"] == "state cache"]
    assert [(line["checkpoint"], line["l1_hits"], line["misses"]) for line in logged] == [
        (1, 0, 8),
        (2, 8, 0),
        (3, 8, 0),
    ]
    storage, registry = open_storage(pipeline, configured)
    assert table_at(storage, "out")["before"].null_count() == 8
    found_state = state_at(storage, registry, reports[-1].checkpoint, pipeline.stages[0])
    assert {key[0]: value["amount"] for key, value in found_state.items()} == {f"u{user}": 3 for user in range(8)}


def test_with_no_memory_for_them_between_epochs_caches_begin_empty(tmp_path: Path) -> None:
    caches = {"totals": {"l1": 100}}
    pipeline, configured = a_pipeline(tmp_path, landed(_dicts, output=COLUMNS), caches, warm_mb=0)
    reports = run(pipeline, configured, RunOptions(until_caught_up=True), InMemoryExecutor())
    figures = [CacheFigures(**report.checkpoint.operators["totals"].cache) for report in reports]
    assert figures == [CacheFigures(misses=8, flushed=8)] * 3


def test_without_a_cache_nothing_is_recorded(tmp_path: Path) -> None:
    pipeline, configured = a_pipeline(tmp_path, landed(_dicts, output=COLUMNS), {})
    (report, *_) = run(pipeline, configured, RunOptions(until_caught_up=True), InMemoryExecutor())
    assert report.checkpoint.operators["totals"].cache is None
    assert report.checkpoint.operators["totals"].cache_totals is None


@pytest.mark.parametrize("options", [{"per_key": False}, {"ttl": "1h"}])
def test_a_cache_for_a_stage_that_cannot_have_one_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    def vectorised(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows

    source = files("{landing}/*.parquet", event_time="at")
    totals = (
        landed(_dicts, output=COLUMNS, **options)
        if options.get("per_key", True)
        else stage("totals", source=source, key="k", state=Total)(vectorised)
    )
    pipeline, configured = a_pipeline(tmp_path, totals, {"totals": {"l1": 100}})
    with pytest.raises(ConfigurationError, match="state cache is configured for the stage totals"):
        list(run(pipeline, configured, RunOptions(until_caught_up=True), InMemoryExecutor()))


FLIGHTS, SMALL = {"object": "pipelines.flights:pipeline"}, {"object": "tests.recovery.small:pipeline"}


def configuration(cached: str, **pipelines: dict[str, str]) -> Settings:
    return Settings.model_validate({"state": {"caches": {cached: {"l1": 100}}}, "pipelines": pipelines})


def test_a_cache_for_a_stage_that_no_pipeline_has_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the stage 'acounts', which no pipeline has") as refused:
        load_pipeline("small", configuration("acounts", small=SMALL, flights=FLIGHTS))
    assert refused.value.where == "state.caches.acounts"
    assert "accounts (small); aircraft_rotation, airport_hourly (flights)" in refused.value.next


@pytest.mark.parametrize(
    ("cached", "other"),
    [
        ("accounts", FLIGHTS),
        ("aircraft_rotation", FLIGHTS),
        ("unknown", {"object": "there_is_no_such_module:pipeline"}),
    ],
)
def test_a_cache_may_be_for_a_stage_of_another_pipeline(cached: str, other: dict[str, str]) -> None:
    assert load_pipeline("small", configuration(cached, small=SMALL, flights=other)).name == "small"


@pytest.mark.usefixtures("spark")
def test_on_spark(tmp_path: Path) -> None:
    pipeline, configured = a_pipeline(tmp_path, landed(_dicts, output=COLUMNS), {"totals": {"l1": 2, "l2": 2}})
    reports = list(run(pipeline, configured, RunOptions(until_caught_up=True)))
    storage, registry = open_storage(pipeline, configured)
    found_state = state_at(storage, registry, reports[-1].checkpoint, pipeline.stages[0])
    assert {key[0]: value["rows"] for key, value in found_state.items()} == {f"u{user}": 3 for user in range(8)}
    figures = sum((CacheFigures(**report.checkpoint.operators["totals"].cache) for report in reports), CacheFigures())
    assert figures.l1_hits + figures.l2_hits + figures.misses == 24
    assert figures.evicted + figures.flushed == 24


@pytest.mark.parametrize("cache", [{"l1": 100}, {"l1": 2, "l2": 100}], ids=["one layer", "two layers"])
def test_a_cache_gives_nothing_stale_of_key_groups_that_move_away_and_come_back(tmp_path: Path, cache: dict) -> None:
    """Nor after a rewind in between: each state is what plain sums over the files give."""
    pipeline, configured = a_pipeline(tmp_path, landed(_dicts, output=COLUMNS), {"totals": cache})
    retained = configured.checkpoints.model_copy(update={"num_retained": 50})
    configured = configured.model_copy(update={"checkpoints": retained})
    files_read, hits = 3, 0
    for subtasks, back in [(2, None), (3, None), (2, None), (3, 4), (2, None), (1, 5), (2, None)]:
        of_subtasks = configured.spark.model_copy(update={"parallelism": subtasks})
        now = configured.model_copy(update={"spark": of_subtasks})
        if back is not None:
            maintenance.rewind(pipeline, now, back)
        part = [{"k": f"u{user}", "v": files_read, "at": NOON} for user in range(files_read % 3, 8)]
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "landing" / f"{files_read:02}.parquet")
        files_read += 1
        for report in run(pipeline, now, RunOptions(until_caught_up=True), InMemoryExecutor()):
            hits += CacheFigures(**report.checkpoint.operators["totals"].cache).hit_rate > 0
        given = pl.read_parquet(tmp_path / "landing" / "*.parquet").group_by("k").agg(pl.len(), pl.col("v").sum())
        storage, registry = open_storage(pipeline, now)
        kept = state_at(storage, registry, registry.head(), pipeline.stages[0])
        assert sorted((key[0], row["rows"], row["amount"]) for key, row in kept.items()) == sorted(given.rows())
    assert hits, "what an epoch leaves serves the next one"
