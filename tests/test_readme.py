"""The README's pipeline and its unit test are run as they stand there, and so is what it sends its readers to."""

from __future__ import annotations

import json
import re
import sys
import types
from datetime import UTC, datetime
from pathlib import Path

from weir import testing

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"


def test_the_readmes_pipeline_passes_the_readmes_test(monkeypatch):
    code, test = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    module = types.ModuleType("readme_example")
    monkeypatch.setitem(sys.modules, "readme_example", module)
    exec(compile(code, "README.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "pipelines.visits", module)
    exec(compile(test, "README.md", "exec"), module.__dict__)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()


def test_the_example_is_about_thirty_lines():
    code = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[0]
    assert sum(bool(line.strip()) and not line.startswith("#") for line in code.splitlines()) <= 35


def test_the_example_without_a_function_counts_by_the_hour():
    code = re.findall(r"```python\n(.*?)```", (DOCS / "reference" / "operators.md").read_text(), flags=re.DOTALL)[0]
    example: dict = {}
    exec(compile(code, "README.md", "exec"), example)
    assert [stage.uid for stage in example["pipeline"].stages] == ["hourly"]
    run = testing.run(example["hourly"])
    nine, eleven = (datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (9, 11))
    run.epoch([{"device": "a", "at": nine, "value": 1.0}, {"device": "a", "at": nine, "value": 3.0}])
    closed = run.epoch([{"device": "b", "at": eleven, "value": 0.0}])
    assert closed.select("device", "window_start", "readings", "mean").rows() == [("a", nine, 2, 2.0)]


def test_links_lead_somewhere():
    for page in (README, DOCS / "README.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), target


def test_every_page_of_the_documentation_is_listed():
    listed = (DOCS / "README.md").read_text()
    for page in sorted(
        page for folder in (".", "coming-from", "how-to", "reference") for page in DOCS.glob(f"{folder}/*.md")
    ):
        assert page == DOCS / "README.md" or f"({page.relative_to(DOCS)})" in listed, page


def test_the_figures_beside_spark_and_flink_are_those_that_were_measured():
    page = (DOCS / "concepts.md").read_text()
    text = page.split("**Beside Spark's own stateful streaming and Flink**")[1].split("\n\n")[0]
    benchmarks = README.parent / "benchmarks"
    results = (benchmarks / "results" / "state.md").read_text()
    speeds = re.findall(r"\d[\d,]*,\d{3}(?! events,)", text)
    measured = re.findall(r"\d\.\d", text)
    assert len(speeds) == 2 and len(measured) == 7
    assert all(f"| {speed} (" in results for speed in speeds)
    assert all(f"| {times} x |" in results for times in measured)
    quoted = next(line for line in README.read_text().split("- **") if line.startswith("Speed")).split("\n\n")[0]
    assert re.findall(r"\d[\d,]*,\d{3}", quoted) == speeds[:1]
    assert re.findall(r"\d\.\d", quoted) == measured[:2]


def test_the_table_beside_spark_is_what_was_measured():
    page = (DOCS / "concepts.md").read_text()
    summary = json.loads((README.parent / "benchmarks" / "results" / "state-spark.json").read_text())["summary"]
    shown = re.findall(r"^\| [a-z].* \| (\d\.\d) \| (\d\.\d) \|$", page, flags=re.MULTILINE)
    steady = [
        [summary[workload][row]["steady"] for row in ("weir-aggregate", "weir-blocks", "spark-changelog")]
        for workload in ("uniform-1m", "zipf-1m", "window-1m", "session-1m", "deduplicate-1m")
    ]
    assert shown == [(f"{direct / spark:.1f}", f"{blocks / spark:.1f}") for direct, blocks, spark in steady]
