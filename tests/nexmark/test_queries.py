"""Each query of Nexmark that has a pipeline hands out what DuckDB says, however its input is sliced."""

from __future__ import annotations

import ast
import random

import pyarrow.parquet as pq
import pytest

from benchmarks.nexmark import truth
from benchmarks.nexmark.content import schema_of
from benchmarks.nexmark.generate import Options as Events
from benchmarks.nexmark.generate import generate
from benchmarks.nexmark.run import Options, available, run_query
from tests.nexmark.generated import House
from tests.nexmark.house import write
from tests.tools.sampling import sampled
from weir.execution.in_process import InMemoryExecutor
from weir.settings.configuration import PROJECT


@pytest.mark.parametrize("query", available())
def test_a_query_is_short_and_imports_what_authors_import(query):
    text = (PROJECT / "benchmarks" / "nexmark" / "queries" / f"{query}.py").read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [getattr(node, "module", None) for node in imports] == ["weir"]
    assert len(text.splitlines()) <= 40


@pytest.mark.parametrize("query", truth.QUERIES)
def test_columns_have_the_names_the_order_and_the_types_of_the_suite(tmp_path, query):
    truth.write(write(tmp_path / "input"), tmp_path / "out", [query])
    schema = pq.read_schema(tmp_path / "out" / f"{query}.parquet")
    assert list(zip(schema.names, schema.types, strict=True)) == [
        (field.name, field.type) for field in schema_of(query)
    ]


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> House:
    return House(tmp_path_factory.mktemp("nexmark"), Events(20_000, files=6))


@pytest.mark.parametrize("query", sampled(available(), lambda query: query in ("q4", "q5", "q7", "q9", "q11", "q12")))
def test_a_query_hands_out_what_duckdb_says(house, tmp_path, query):
    measured = run_query(query, house.input, tmp_path / "out", tmp_path / "work", Options(files=2), InMemoryExecutor())
    house.assert_equal(query, tmp_path / "out")
    assert measured.late == 0
    # By processing time a window may be due between two slices, and an epoch without rows closes it.
    assert measured.epochs == 4 or (query == "q12" and measured.epochs > 4)


def test_rows_that_come_too_late_are_counted(tmp_path):
    generate(Events(4_000, files=8, rate=20, out_of_order=150), tmp_path / "input")
    work, options = tmp_path / "work", Options(files=1)
    assert run_query("q11", tmp_path / "input", tmp_path / "out", work, options, InMemoryExecutor()).late > 0


def test_a_query_of_an_input_without_rows_hands_out_its_columns(tmp_path):
    source = write(tmp_path / "input")
    measured = run_query("q18", source, tmp_path / "out", tmp_path / "work", executor=InMemoryExecutor())
    assert measured.rows == 0
    assert pq.read_schema(tmp_path / "out" / "q18.parquet").equals(schema_of("q18"))


@pytest.mark.parametrize("query", sampled(["q16", "q15", "q17"]))
def test_a_query_on_spark_hands_out_what_duckdb_says(spark, house, tmp_path, query):
    measured = run_query(query, house.input, tmp_path / "out", tmp_path / "work", Options(files=3))
    house.assert_equal(query, tmp_path / "out")
    assert (measured.late, measured.epochs) == (0, 3)


@pytest.mark.long
@pytest.mark.parametrize(("parallelism", "seed"), [(1, 0), (2, 1), (5, 0)])
def test_slices_and_subtasks_change_nothing(spark, tmp_path, parallelism, seed):
    draw = random.Random(f"{parallelism} {seed}")
    events = Events(60_000, seed=draw.randrange(1000), files=draw.randint(3, 30), rate=draw.choice([2, 50, 1_000]))
    house = House(tmp_path, events)
    for query in available():
        options = Options(parallelism, files=draw.randint(1, 8))
        executor = None if draw.random() < 0.3 else InMemoryExecutor(draw.choice([500, 65_536]))
        measured = run_query(query, house.input, tmp_path / "out", tmp_path / "work", options, executor)
        house.assert_equal(query, tmp_path / "out")
        assert measured.late == 0
