"""The report of the comparison beside peers: what it links is there, and what was not measured is named."""

from __future__ import annotations

import json
import re

import duckdb
import pyarrow.parquet as pq
import pytest

from benchmarks.state import report
from benchmarks.state.measure import Measurement
from benchmarks.state.workload import Slices, Workload, expected, verify

RESULTS = report.RESULTS.parent
RECORDED = ("per-key", "state", "state-flat", "state-spark")


def measured(workload: str, row: str, steady: float = 1000.0, **others) -> Measurement:
    return Measurement(workload, row, 0, 10, 100, steady, steady / 2, epoch_ms=[100.0], keys=7, **others)


def written(tmp_path, *ones: Measurement) -> str:
    report.write(list(ones), tmp_path / "found", "this test")
    return (tmp_path / "found.md").read_text()


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_pages_are_what_their_figures_say(name):
    text = (RESULTS / f"{name}.md").read_text()
    assert report.page(RESULTS / name) == text, f"run `python -m benchmarks.state.report --from-json .../{name}`"
    assert all((RESULTS / linked).exists() for linked in re.findall(r"!\[.*\]\((.*)\)", text))


def test_a_page_made_anew_keeps_the_machine_that_measured(tmp_path):
    written(tmp_path, measured("uniform-1m", "weir-aggregate"))
    facts = json.loads((tmp_path / "found.json").read_text())
    (tmp_path / "found.json").write_text(json.dumps({**facts, "machine": "64 cores"}))
    report.main(from_json=tmp_path / "found")
    assert "64 cores. Made by `this test`" in (tmp_path / "found.md").read_text()
    assert json.loads((tmp_path / "found.json").read_text())["machine"] == "64 cores"


def test_without_peers_there_is_no_verdict_and_no_plot(tmp_path):
    page = written(
        tmp_path, measured("flat-1m", "weir-aggregate"), measured("flat-20m", "weir-aggregate", error="died")
    )
    assert "| peer |" not in page
    assert "![" not in page
    assert not (tmp_path / "found.png").exists()
    assert "| 1,000,000 |" in page
    assert "Not measured: 5,000,000 keys; 20,000,000 keys.\n" in page
    assert "\n\n\n" not in page


def test_rows_without_a_measurement_are_named_beside_those_that_failed(tmp_path):
    ours, peer = measured("uniform-20m", "weir-aggregate"), measured("uniform-20m", "spark-changelog", 250.0)
    page = written(tmp_path, ours, peer, measured("uniform-20m", "flink-sql", error="out of memory"))
    assert "| (a) Spark's own aggregation | 2.5 x, reaching for 5 | 4.0 to 4.0 x | 1 rows | yes |" in page
    assert "| PyFlink SQL, no output | - | | | | | out of memory |" in page
    unmeasured = re.findall(r"^Not measured: (.*)\.$", page, flags=re.MULTILINE)
    assert len(unmeasured) == 1
    assert unmeasured[0].split("; ") == [
        "Weir, `@stage` with `state.fold`",
        "Weir, `aggregate`, blocks through Spark's shuffle",
        "Weir, `aggregate`, rows through Spark's shuffle",
        "Spark aggregation, changelog off, Parquet",
        "PyFlink SQL, mini-batches, no output",
    ]
    assert "![Events per second](found.png)" in page
    assert (tmp_path / "found.png").exists()


def test_a_page_says_what_the_processes_took_of_workloads_by_event_time(tmp_path):
    page = written(tmp_path, measured("window-1m", "weir-aggregate", cpu=2.5), measured("window-1m", "spark-changelog"))
    assert "## Tumbling windows of 10 s, 1,000,000 keys" in page
    assert "CPU seconds of all processes for a million events: Weir, `aggregate` 2.50." in page


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
