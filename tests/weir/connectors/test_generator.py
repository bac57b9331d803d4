"""The generator: the same rows however they are cut, and the distributions that it promises."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.errors import InputError, PipelineError
from tests.recovery.harness import Site
from weir import Pipeline, agg, aggregate, delta, generator, kafka, postgres
from weir.connectors.generator import FIRST, GeneratorSource, _Generator
from weir.definition.source import Limits, Opening, Part
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from weir.testing import SourceContract, SourceSystem

OPENING = Opening("a pipeline", str, {})
LARGE = Limits(1000, 1 << 40, 1 << 50)


def rows(source: GeneratorSource, limits: Limits = LARGE) -> pl.DataFrame:
    connector = source.open(OPENING)
    position, tables = connector.begin("earliest"), []
    while (planned := connector.plan(position, limits)).parts:
        tables += [batch.rows for part in planned.parts for batch in connector.read(part)]
        position = planned.position
    return pl.DataFrame(pa.concat_tables(tables))


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 4000), st.integers(32, 100_000))
def test_rows_are_the_same_however_they_are_cut(parts: int, most: int, size: int):
    source = GeneratorSource(end=10_000, keys=50, skew=1.1, late=0.2, seed=7)
    if min(most, size // 32) < 100:
        source = GeneratorSource(end=300, keys=50, skew=1.1, late=0.2, seed=7)
    assert rows(source, Limits(parts, most, size)).equals(rows(source))


def test_a_pipeline_may_begin_at_a_row(tmp_path):
    source = generator(start={"next": 7}, end=10, keys=2)
    counts = aggregate("counts", source, key="key", rows=agg.count(), sink=delta.append("counts"))
    pipeline = Pipeline("from_there", (counts,), max_parallelism=8)
    site = Site(tmp_path, {}, pipeline, __name__)
    (report,) = run(pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor())
    assert report.checkpoint.rows_read == 3
    assert report.checkpoint.offsets["generator"]["at"] == {"next": 10}


def test_definitions_that_begin_at_the_same_position_are_the_same():
    at = {"topics": {"clicks": {"id": "a", "offsets": {"0": 5}}}}
    kafkas = [
        kafka("clicks", servers="here", schema={"id": pa.int64()}, start=json.loads(json.dumps(at))) for _ in "ab"
    ]
    queries = [postgres("SELECT 1 AS tx", cursor="tx", start={"at": "7"}) for _ in "ab"]
    assert len({*kafkas}) == len({*queries}) == 1 and kafkas[0].start == at
    assert pickle.loads(pickle.dumps(kafkas[0])) == kafkas[1]


def test_rows_stay_what_they_are():
    """Whoever has read rows reads the same ones with every later version."""
    got = rows(GeneratorSource(end=4, keys=10, skew=0.5, late=0.5, lateness=1_000_000, seed=3))
    assert got.with_columns((pl.col("event_time") - FIRST).dt.total_microseconds()).rows() == [
        (0, 5, 0, 0.517851312865837),
        (1, 0, -488506, 0.4200735520732246),
        (2, 1, -229068, 0.14090861505779317),
        (3, 3, 3000, 0.953311179765387),
    ]


def test_keys_are_as_frequent_as_the_skew_says():
    for skew in (0.0, 0.7, 1.0, 1.5):
        got = rows(GeneratorSource(end=200_000, keys=20, skew=skew))
        counts = np.bincount(got["key"].to_numpy(), minlength=20)
        assert len(counts) == 20 and counts.min() > 0
        edges = np.arange(1, 22, dtype=float)
        cumulative = np.log(edges) if skew == 1 else (edges ** (1 - skew) - 1) / (1 - skew)
        expected = 200_000 * np.diff(cumulative) / cumulative[-1]
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())


def test_late_rows_are_as_many_and_as_late_as_said():
    got = rows(GeneratorSource(end=100_000, rate=100, late=0.25, lateness=5_000_000))
    nominal = pl.Series(
        [FIRST + timedelta(milliseconds=10) * number for number in range(100_000)], dtype=got["event_time"].dtype
    )
    late = nominal - got["event_time"]
    assert 0.24 < (late > timedelta(0)).mean() < 0.26
    assert late.min() == timedelta(0) and timedelta(seconds=4.9) < late.max() <= timedelta(seconds=5)


def test_another_seed_gives_other_rows():
    first, other = (rows(GeneratorSource(end=1000, seed=seed)) for seed in (1, 2))
    assert first["seq"].equals(other["seq"]) and (first["key"] == other["key"]).mean() < 0.1


def test_paced_rows_come_with_the_clock():
    now = 0
    source = GeneratorSource(rate=10, paced=True, first=datetime(1970, 1, 1, tzinfo=UTC), end=25)
    connector = _Generator(source, lambda: now)
    now = -1
    assert connector.plan({"next": 0}, LARGE).parts == ()
    now = 999_999
    planned = connector.plan({"next": 0}, LARGE)
    assert (planned.position, planned.limited, planned.ends) == ({"next": 10}, False, {"0": True})
    assert connector.lag({"next": 4}).rows == 6
    now = 1_000_000
    assert connector.begin("latest") == {"next": 11}
    now = 60_000_000
    assert connector.plan({"next": 10}, LARGE).position == {"next": 25}


def test_it_begins_where_it_is_told():
    connector = GeneratorSource(rate=10, end=100).open(OPENING)
    assert connector.begin("earliest") == {"next": 0}
    assert connector.begin("latest") == {"next": 100}
    assert connector.begin(FIRST + timedelta(seconds=2, milliseconds=1)) == {"next": 21}
    assert connector.begin(FIRST - timedelta(days=1)) == {"next": 0}
    assert connector.begin({"next": 5}) == {"next": 5}
    for start in ("latest", "yesterday"):
        with pytest.raises(PipelineError, match="start"):
            GeneratorSource().open(OPENING).begin(start)


def test_a_generator_without_end_is_always_behind():
    connector = GeneratorSource().open(OPENING)
    planned = connector.plan({"next": 5}, Limits(1, 10, 1 << 30))
    assert planned.limited and planned.ends == {"0": False} and planned.position == {"next": 15}
    assert connector.lag({"next": 0}).rows is None


def test_a_part_of_another_definition_is_refused():
    (part,) = GeneratorSource(end=5).open(OPENING).plan({"next": 0}, LARGE).parts
    again = Part(part.name, part.partition, part.place)
    other = GeneratorSource(end=5, seed=1).open(OPENING)
    for use in (lambda: other.verify([again]), lambda: list(other.read(again))):
        with pytest.raises(InputError, match="defined anew"):
            use()
    GeneratorSource(end=500).open(OPENING).verify([again])  # a later end makes no other rows


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0},
        {"keys": 0},
        {"skew": -1},
        {"late": 1.5},
        {"lateness": -1},
        {"end": -1},
        {"first": datetime(2026, 1, 1)},
        {"event_time": None},
        {"seed": -1},
    ],
)
def test_arguments_that_do_not_fit_are_named(wrong):
    with pytest.raises(PipelineError, match=next(iter(wrong))):
        GeneratorSource(**wrong)


class GeneratorSystem(SourceSystem):
    number = "seq"

    def __init__(self) -> None:
        self._end = 0

    @property
    def source(self) -> GeneratorSource:
        return GeneratorSource(end=self._end, late=0.1, seed=5)

    def append(self, count: int) -> None:
        self._end += count


class TestGenerator(SourceContract):
    @pytest.fixture
    def system(self) -> GeneratorSystem:
        return GeneratorSystem()
