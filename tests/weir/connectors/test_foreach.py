"""A function as a sink, in whole runs."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from state_ops.errors import PipelineError, StageError
from tests.recovery.harness import Site
from weir import Pipeline, agg, aggregate, foreach, generator
from weir.execution.in_process import InMemoryExecutor
from weir.restore import rewind
from weir.run.run import RunOptions, run

calls: list[tuple[int, list[dict[str, Any]]]] = []
failing: list[int] = []
schemas: list[pa.Schema] = []


def pause() -> None:
    """What a test puts in place of it takes time."""


def hand_over(rows: pa.Table, checkpoint: int) -> None:
    pause()
    schemas.append(rows.schema)
    if checkpoint in failing:
        failing.remove(checkpoint)
        raise ValueError("the hook is away")
    calls.append((checkpoint, rows.to_pylist()))


def site_of(root: Path, delivery: str = "at_least_once") -> Site:
    source = generator(end=60, keys=3, seed=1)
    sums = aggregate("sums", source, key="key", n=agg.count(), sink=foreach(hand_over))
    pipeline = Pipeline("hooked", (sums,), max_parallelism=4, delivery=delivery)
    return Site(root, {"WEIR_EPOCH__MAX_ROWS": "20", "WEIR_CHECKPOINTS__NUM_RETAINED": "5"}, pipeline, __name__)


def epochs(site: Site) -> list[Any]:
    return list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=InMemoryExecutor()))


@pytest.fixture(autouse=True)
def fresh():
    for memory in (calls, failing, schemas):
        memory.clear()


def test_it_gets_each_epochs_rows_in_order(tmp_path):
    site = site_of(tmp_path)
    assert len(epochs(site)) == 3
    assert [id for id, _ in calls] == [1, 2, 3]
    assert sum(row["n"] for row in calls[-1][1]) == 60
    obstacles = rewind.plan(site.pipeline, site.settings, 1).obstacles
    assert any("what hand_over has done with them cannot be taken back" in obstacle for obstacle in obstacles)


def test_what_it_raises_ends_the_run_and_the_next_one_calls_it_again(tmp_path):
    site = site_of(tmp_path)
    failing.append(2)
    with pytest.raises(StageError, match="The function of the sink hand_over failed: ValueError: the hook is away"):
        epochs(site)
    epochs(site)
    newest = {row["key"]: row["n"] for _, rows in calls for row in rows}
    assert sum(newest.values()) == 60, "state has each row once"


@pytest.mark.long
def test_a_slow_one_is_called_once_at_a_time_and_in_order_over_restarts(tmp_path, monkeypatch):
    busy, begun = threading.Lock(), list[float]()

    def slow() -> None:
        assert busy.acquire(blocking=False), "it is not called beside itself"
        begun.append(time.monotonic())
        time.sleep(0.2)
        busy.release()
        if len(begun) in (2, 4):
            raise ValueError("the hook is away")

    monkeypatch.setattr(sys.modules[__name__], "pause", slow)
    site = site_of(tmp_path)
    for _ in range(2):
        with pytest.raises(StageError, match="the hook is away"):
            epochs(site)
    epochs(site)
    ids = [id for id, _ in calls]
    assert ids == sorted(set(ids)) and len(begun) == len(calls) + 2
    counts = [row["n"] for _, rows in calls for row in rows if row["key"] == 0]
    assert counts == sorted(counts), "a key's rows come in the order of its epochs"
    assert sum({row["key"]: row["n"] for _, rows in calls for row in rows}.values()) == 60


def test_rows_have_the_types_that_the_stage_hands_out(tmp_path):
    site = site_of(tmp_path)
    epochs(site)
    assert schemas[0] == schemas[-1] == pa.schema([("key", pa.int64()), ("n", pa.int64()), ("epoch", pa.int64())])


def test_exactly_once_is_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"hand_over \(foreach\) has no transactions"):
        site_of(tmp_path, "exactly_once")
