"""Each recorded page of a benchmark is what its figures say."""

from __future__ import annotations

import json
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from benchmarks import epoch_profile, harness
from benchmarks.asynchronous import report
from benchmarks.nexmark import beside
from benchmarks.state import report as of_state
from benchmarks.state.workload import Slices, Workload, expected, verify
from benchmarks.storage import incremental

PAGES = {
    "asynchronous": report.page,
    "epoch-profile": epoch_profile.report,
    "incremental": incremental.report,
    "incremental-100mb": incremental.report,
    "nexmark": beside.page,
    "restore": lambda figures: harness.render("restore", **figures),
}


@pytest.mark.parametrize("name", PAGES)
def test_recorded_pages_are_what_their_figures_say(name: str):
    figures: Any = json.loads((harness.RESULTS / f"{name}.json").read_text())
    assert PAGES[name](figures) == (harness.RESULTS / f"{name}.md").read_text()


@pytest.mark.parametrize("name", ["per-key", "state", "state-flat", "state-spark"])
def test_recorded_comparisons_are_what_their_figures_say(name: str):
    page = (harness.RESULTS / f"{name}.md").read_text()
    assert of_state.page(harness.RESULTS / name) == page, f"`python -m benchmarks.state.report --from-json .../{name}`"


@pytest.mark.parametrize("operator", ["window", "session", "deduplicate"])
def test_each_row_of_a_result_by_event_time_counts_as_often_as_it_is_there(tmp_path, operator):
    small, slices = Workload(operator, 100, epochs=2, events=200, operator=operator), Slices(2, 200)
    truth, output = expected(tmp_path, small, slices), tmp_path / "output.parquet"
    bounds = [name for name in ("window_start", "window_end") if name in pq.read_schema(truth).names]
    moments = ", ".join(f"make_timestamp({name}) AS {name}" for name in bounds)
    replaced = f"REPLACE ({moments})" if bounds else ""
    duckdb.sql(f"COPY (SELECT * {replaced} FROM '{truth}') TO '{output}' (FORMAT parquet)")
    rows = pq.read_metadata(truth).num_rows
    assert verify(tmp_path, small, slices, [str(output)]) == {"keys": rows, "differing": 0}
    assert verify(tmp_path, small, slices, [str(output)] * 2) == {"keys": rows, "differing": rows}


def test_a_log_goes_on_where_an_interrupted_run_was(tmp_path):
    log = harness.Log(tmp_path / "scratch" / "log.jsonl", ("name", "repetition"))
    log.add({"name": "a", "repetition": 0, "error": "died"})
    log.add({"name": "b", "repetition": 0, "error": ""})
    assert not log.has(name="a", repetition=0)
    log.add({"name": "a", "repetition": 0, "error": ""})
    with (tmp_path / "scratch" / "log.jsonl").open("a") as file:
        file.write('{"name": "b", "repet')
    assert [row["name"] for row in log.rows()] == ["a", "b"]
    assert log.has(name="a", repetition=0)
    assert not log.has(name="b", repetition=1)
    assert harness.Log(tmp_path / "scratch" / "log.jsonl", ("name",), again=True).rows() == []


def test_a_measurement_in_a_fresh_process_comes_back():
    assert harness.in_fresh_process(harness.sum_up, 4) == 6
