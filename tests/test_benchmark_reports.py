"""Each recorded page of a benchmark is what its figures say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import epoch_profile, harness
from benchmarks.asynchronous import report
from benchmarks.nexmark import beside
from benchmarks.storage import incremental

PAGES = {
    "asynchronous": report.page,
    "epoch-profile": epoch_profile.report,
    "incremental": incremental.report,
    "incremental-100mb": incremental.report,
    "nexmark": beside.page,
    "restore": lambda figures: harness.render("restore", **figures),
    "stall": report.page,
}


@pytest.mark.parametrize("name", PAGES)
def test_recorded_pages_are_what_their_figures_say(name: str):
    figures: Any = json.loads((harness.RESULTS / f"{name}.json").read_text())
    assert PAGES[name](figures) == (harness.RESULTS / f"{name}.md").read_text()


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
