"""Each query of Nexmark that has a pipeline hands out what DuckDB says, however its input is sliced."""

from __future__ import annotations

import ast
import importlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.nexmark import truth
from benchmarks.nexmark.compare import compare
from benchmarks.nexmark.content import schema_of
from benchmarks.nexmark.generate import Options as Events
from benchmarks.nexmark.generate import generate
from benchmarks.nexmark.run import Options, available, run_query
from configs.settings import PROJECT
from pipelines.runtime.definition import Source
from pipelines.runtime.execution import direct_read
from pipelines.runtime.execution.in_process import InMemoryExecutor
from tests.nexmark.house import AUCTION, BID, PERSON, write
from tests.tools.sampling import sampled

_SCHEMAS = {"person": PERSON, "auction": AUCTION, "bid": BID}


def needs_spark(query: str) -> bool:
    pipeline = importlib.import_module(f"benchmarks.nexmark.queries.{query}").pipeline
    lanes = [lane for stage in pipeline.stages for lane in stage.lanes]
    return any(lane.transform is not None for lane in lanes) or any(
        isinstance(lane.input, Source) and direct_read.spark_alone(lane, _SCHEMAS[lane.input.name]) for lane in lanes
    )


ON_SPARK = [query for query in available() if needs_spark(query)]
IN_PROCESS = [query for query in available() if not needs_spark(query)]


@pytest.mark.parametrize("query", available())
def test_a_query_is_short_and_imports_what_authors_import(query):
    text = (PROJECT / "benchmarks" / "nexmark" / "queries" / f"{query}.py").read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [getattr(node, "module", None) for node in imports] == ["pipelines.api"]
    assert len(text.splitlines()) <= 40


class House:
    """An input, and the truths of queries over it."""

    def __init__(self, root: Path, events: Events) -> None:
        self.root, self.input = root, root / "input"
        generate(events, self.input)
        truth.write(self.input, root / "truths", available())

    def assert_equal(self, query: str, out: Path) -> None:
        result = compare(self.root / "truths" / f"{query}.parquet", out / f"{query}.parquet")
        assert result.equal, (query, str(result), result.examples)
        assert result.rows > 0, f"{query} hands out nothing of this input, so nothing was compared"


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> House:
    return House(tmp_path_factory.mktemp("nexmark"), Events(20_000, files=6))


@pytest.mark.parametrize("query", IN_PROCESS)
def test_a_query_hands_out_what_duckdb_says(house, tmp_path, query):
    measured = run_query(query, house.input, tmp_path / "out", tmp_path / "work", Options(files=2), InMemoryExecutor())
    house.assert_equal(query, tmp_path / "out")
    assert (measured.late, measured.epochs) == (0, 4)


def test_rows_that_come_too_late_are_counted(tmp_path):
    generate(Events(4_000, files=8, rate=20, out_of_order=150), tmp_path / "input")
    work, options = tmp_path / "work", Options(files=1)
    assert run_query("q11", tmp_path / "input", tmp_path / "out", work, options, InMemoryExecutor()).late > 0


def test_a_query_of_an_input_without_rows_hands_out_its_columns(tmp_path):
    source = write(tmp_path / "input")
    measured = run_query("q18", source, tmp_path / "out", tmp_path / "work", executor=InMemoryExecutor())
    assert measured.rows == 0
    assert pq.read_schema(tmp_path / "out" / "q18.parquet").equals(schema_of("q18"))


@pytest.mark.parametrize("query", sampled(ON_SPARK, keep=lambda query: query == "q16"))
def test_a_query_with_a_transform_hands_out_what_duckdb_says(spark, house, tmp_path, query):
    measured = run_query(query, house.input, tmp_path / "out", tmp_path / "work", Options(files=3))
    house.assert_equal(query, tmp_path / "out")
    assert (measured.late, measured.epochs) == (0, 3)


@pytest.mark.long
@pytest.mark.parametrize("parallelism", [1, 2, 5])
@pytest.mark.parametrize("seed", range(2))
def test_slices_and_subtasks_change_nothing(spark, tmp_path, parallelism, seed):
    draw = random.Random(f"{parallelism} {seed}")
    events = Events(60_000, seed=draw.randrange(1000), files=draw.randint(3, 30), rate=draw.choice([2, 50, 1_000]))
    house = House(tmp_path, events)
    for query in available():
        options = Options(parallelism, files=draw.randint(1, 8))
        executor = None if needs_spark(query) or draw.random() < 0.3 else InMemoryExecutor(draw.choice([500, 65_536]))
        measured = run_query(query, house.input, tmp_path / "out", tmp_path / "work", options, executor)
        house.assert_equal(query, tmp_path / "out")
        assert measured.late == 0


@pytest.mark.long
@pytest.mark.parametrize("query", ["q9", "q11", "q16", "q18", "q19"])  # a query takes a minute or more
def test_a_run_that_is_killed_again_and_again_hands_out_each_row_once(tmp_path, query):
    house, draw, kills = House(tmp_path, Events(200_000, files=40)), random.Random(query), 0
    words = ["--input", house.input, "--out", tmp_path / "out", "--work", tmp_path / "work", "--queries", query]
    command = [sys.executable, "-m", "benchmarks.nexmark.run", *map(str, words), "--files", "2"]
    checkpoints = tmp_path / "work" / "storage" / query / "registry" / "checkpoints" / "_delta_log"
    while True:
        process = subprocess.Popen(command, cwd=PROJECT, start_new_session=True, stdout=subprocess.PIPE, text=True)
        if kills == 3:
            said, _ = process.communicate(timeout=300)
            break
        enough = _entries(checkpoints) + draw.randint(1, 4)
        while process.poll() is None and _entries(checkpoints) < enough:
            time.sleep(0.02)
        time.sleep(draw.random() * 0.5)
        assert process.poll() is None, "the run has ended before it was killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
    assert process.returncode == 0, said
    house.assert_equal(query, tmp_path / "out")


def _entries(log: Path) -> int:
    return len(list(log.glob("*.json"))) if log.exists() else 0
