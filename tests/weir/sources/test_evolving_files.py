"""Columns that come and widen while a pipeline runs: read from where they appear, in tables too, and back again."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import fastavro
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from state_ops.errors import InputError, PipelineError, WeirError
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir import Epoch, Pipeline, State, ValueState, delta, files, stage
from weir.execution.in_process import InMemoryExecutor
from weir.operations import forks, plan, promotion
from weir.run import maintenance
from weir.run.run import RunOptions, run


class Count(State):
    """Of one key."""

    rows: int = 0


def of(source: Any, sink: Any) -> Pipeline:
    @stage("all", source=source, key="id", state=Count, sink=sink)
    def everything(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows

    return Pipeline("evolving", (everything,), max_parallelism=4)


SOURCE = files("{landing}/*.parquet", evolve="add")
SINK = delta.append("rows", evolve="add")


def site_of(root: Path, source: Any = SOURCE, sink: Any = SINK) -> Site:
    options = {"WEIR_SPARK__PARALLELISM": "2", "WEIR_CHECKPOINTS__NUM_RETAINED": "9"}
    site_there = Site(root, options, of(source, sink), __name__)
    site_there.landing.mkdir(parents=True)
    return site_there


def epochs(site: Site) -> list[Any]:
    return list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), executor=InMemoryExecutor()))


def put(site: Site, name: str, **columns: Any) -> None:
    pq.write_table(pa.table(columns), site.landing / f"{name}.parquet")


def rows(site: Site, *columns: str) -> list[tuple[Any, ...]]:
    """As any reader of Delta sees them: columns that a file lacks are null."""
    return sorted(pl.read_delta(str(site.storage / "tables" / "rows")).select(columns).rows(), key=repr)


def test_a_new_column_is_read_from_where_it_appears_and_the_table_gains_it(tmp_path):
    site = site_of(tmp_path)
    put(site, "1", id=["a", "b"], n=pa.array([1, 2], pa.int32()))
    (first,) = epochs(site)
    put(site, "2", id=["c"], n=pa.array([3], pa.int32()), city=["Bern"])
    put(site, "3", id=["d"], n=pa.array([4], pa.int32()))  # old and new in one slice
    (finding,) = [f for f in plan.plan(site.pipeline, site.settings).findings if f.kind == "source"]
    assert (finding.verdict.value, finding.what) == ("migrates", "city (string) is new")
    epochs(site)
    assert rows(site, "id", "n", "city") == [("a", 1, None), ("b", 2, None), ("c", 3, "Bern"), ("d", 4, None)]

    maintenance.rewind(site.pipeline, site.settings, int(first.checkpoint.id))
    assert rows(site, "id", "n") == [("a", 1), ("b", 2)]
    epochs(site)
    assert rows(site, "id", "n", "city") == [("a", 1, None), ("b", 2, None), ("c", 3, "Bern"), ("d", 4, None)]


def test_types_widen_in_what_is_read_and_are_refused_by_the_table(tmp_path):
    site = site_of(tmp_path)
    put(site, "1", id=["a"], n=pa.array([1], pa.int32()))
    epochs(site)
    put(site, "2", id=["b"], n=pa.array([1 << 40], pa.int64()))
    with pytest.raises(PipelineError, match="n was int32, is int64"):
        epochs(site)

    fresh = site_of(tmp_path / "fresh")
    put(fresh, "1", id=["a"], n=pa.array([1], pa.int32()), x=pa.array([0.5], pa.float32()))
    put(fresh, "2", id=["b"], n=pa.array([1 << 40], pa.int64()), x=pa.array([0.25], pa.float64()))
    put(fresh, "3", id=["c"], n=pa.array([3], pa.int32()), x=pa.array([1.5], pa.float32()))
    epochs(fresh)
    assert rows(fresh, "id", "n", "x") == [("a", 1, 0.5), ("b", 1 << 40, 0.25), ("c", 3, 1.5)]


@pytest.mark.parametrize("format", ["avro", "json"])
def test_types_of_decoded_files_widen_as_those_of_parquet(tmp_path, format):
    """Avro says its types; a text of JSON is a date, or a moment."""
    site = site_of(tmp_path, files("{landing}/*", format=format, evolve="add"))
    narrow, wide = ("int", "long") if format == "avro" else ("date", "moment")
    cases = [
        ("1", narrow, 1, "2026-01-02"),
        ("2", wide, 1 << 40, "2026-01-03T04:05:06Z"),
        ("3", narrow, 3, "2026-01-04"),
    ]
    for name, type, number, text in cases:
        if format == "json":
            (site.landing / name).write_text(f'{{"id":"{name}","n":"{text}"}}\n')
            continue
        schema = {
            "type": "record",
            "name": "R",
            "fields": [{"name": "id", "type": "string"}, {"name": "n", "type": type}],
        }
        with (site.landing / name).open("wb") as file:
            fastavro.writer(file, fastavro.parse_schema(schema), [{"id": name, "n": number}])
    epochs(site)
    moments = [
        datetime(2026, 1, 2, tzinfo=UTC),
        datetime(2026, 1, 3, 4, 5, 6, tzinfo=UTC),
        datetime(2026, 1, 4, tzinfo=UTC),
    ]
    expected = [1, 1 << 40, 3] if format == "avro" else moments
    assert [n for _, n in rows(site, "id", "n")] == expected


def test_a_widened_key_is_refused_because_it_would_hash_differently(tmp_path):
    site = site_of(tmp_path)
    put(site, "1", id=pa.array([1], pa.int32()), n=[1])
    epochs(site)
    put(site, "2", id=pa.array([2], pa.int64()), n=[1])
    with pytest.raises(PipelineError, match=r"key.*int"):
        epochs(site)


def test_other_changes_of_type_are_refused_by_name(tmp_path):
    site = site_of(tmp_path)
    put(site, "1", id=["a"], n=[1])
    epochs(site)
    put(site, "2", id=["a"], n=["one"])
    with pytest.raises(
        InputError, match=r"The column 'n' of the input file 2\.parquet is string; earlier files have int64"
    ):
        epochs(site)


def test_without_evolve_new_columns_are_reported_and_tables_keep_theirs(tmp_path):
    site = site_of(tmp_path, replace(SOURCE, evolve="fix"), replace(SINK, evolve="fix"))
    put(site, "1", id=["a"], n=[1])
    epochs(site)
    put(site, "2", id=["b"], n=[2], city=["Bern"])
    epochs(site)
    assert rows(site, "id", "n") == [("a", 1), ("b", 2)] and "city" not in site.table("rows").columns
    reading = replace(site, pipeline=of(SOURCE, replace(SINK, evolve="fix")))
    put(site, "3", id=["c"], n=[3], city=["Chur"])
    with pytest.raises(PipelineError, match=r"The output for the table rows changed: city is new") as refused:
        epochs(reading)
    assert 'evolve="add"' in refused.value.next


def test_csv_gains_columns_too(tmp_path):
    site = site_of(tmp_path, files("{landing}/*.csv", format="csv", evolve="add"))
    (site.landing / "1.csv").write_text("id,n\na,1\n")
    epochs(site)
    (site.landing / "2.csv").write_text("id,n,city\nb,2,Bern\n")
    (site.landing / "3.csv").write_text("id\nc\n")
    epochs(site)
    assert rows(site, "id", "n", "city") == [("a", 1, None), ("b", 2, "Bern"), ("c", None, None)]


# -- the commit that adds columns


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        ('{"id": "a", "m": {"x": 1}}', '{"id": "b", "m": {"x": 2, "y": 3}}', "m.y"),
        ('{"id": "a", "m": [{"x": 1}]}', '{"id": "b", "m": [{"y": 3}]}', "m.y"),
        ('{"id": "a", "m": {"in": {"x": 1}}}', '{"id": "b", "m": {"in": {"x": 2, "y": 3}}}', "m.in.y"),
    ],
)
def test_a_field_that_comes_within_a_column_is_refused_by_its_path_and_not_left_out(tmp_path, before, after, path):
    site = site_of(tmp_path, files("{landing}/*.json", format="json", evolve="add"))
    (site.landing / "1.json").write_text(before + "\n")
    (site.landing / "2.json").write_text(after + "\n")
    with pytest.raises(InputError, match=rf"The input file 2\.json has a field '{path}'"):
        epochs(site)


def cut_off(*asked: Any, **options: Any) -> None:
    raise OSError("cut off")


def versions(site: Site) -> list[tuple[str, str | None]]:
    """The entries of the table's log, oldest first: what they did, and for which checkpoint."""
    history = DeltaTable(str(site.storage / "tables" / "rows")).history()
    return [(entry["operation"], entry.get("weir.checkpoint")) for entry in reversed(history)]


@pytest.mark.parametrize("sink", [SINK, delta.upsert("rows", "id", evolve="add")], ids=["append", "upsert"])
def test_columns_come_with_the_rows_or_not_at_all(tmp_path, monkeypatch, sink):
    site = site_of(tmp_path, sink=sink)
    put(site, "1", id=["a"], n=[1])
    epochs(site)
    put(site, "2", id=["b"], n=[2], city=["Bern"], at=pa.array([5], pa.timestamp("us")), more=[{"x": 1}])
    with monkeypatch.context() as patched:
        patched.setattr("weir.connectors.delta.table_commit._put_after", cut_off)
        with pytest.raises(WeirError):
            epochs(site)
    assert rows(site, "id", "n") == [("a", 1)] and set(site.table("rows").columns) == {"id", "n"}
    put(site, "3", id=["c"], n=[3], city=["Chur"])
    put(site, "4", id=["d"], n=[4], zip=[4])
    site.options["WEIR_EPOCH__MAX_FILES"] = "1"
    epochs(site)
    assert rows(site, "id", "n", "city") == [("a", 1, None), ("b", 2, "Bern"), ("c", 3, "Chur"), ("d", 4, None)]
    assert rows(site, "zip") == [(4,), (None,), (None,), (None,)]
    writes = [("WRITE", str(number)) for number in (1, 2, 3, 4)]
    assert [entry for entry in versions(site) if entry[1] is not None] == writes
    assert "ADD COLUMN" not in dict(versions(site))


@pytest.mark.long
def test_all_readers_see_the_columns(tmp_path, spark):
    """Through a Delta checkpoint too, of the table's properties and comments nothing is lost."""
    site = site_of(tmp_path)
    put(site, "1", id=["a"], n=[1])
    epochs(site)
    table = str(site.storage / "tables" / "rows")
    DeltaTable(table).alter.set_table_name("rows of all")
    DeltaTable(table).alter.set_table_properties({"delta.logRetentionDuration": "interval 90 days"})
    before = DeltaTable(table)
    put(site, "2", id=["b"], n=[2], city=["Bern"], at=pa.array([5], pa.timestamp("us")), more=[{"x": 1}])
    epochs(site)
    expected = [("a", 1, None, None), ("b", 2, "Bern", 1)]
    for checkpointed in (False, True):
        if checkpointed:
            DeltaTable(table).create_checkpoint()
            put(site, "3", id=["c"], n=[3])
            epochs(site)
            expected.append(("c", 3, None, None))
        assert rows(site, "id", "n", "city") == [row[:3] for row in expected]
        frame = spark.read.format("delta").load(table).selectExpr("id", "n", "city", "more.x").orderBy("id")
        assert list(map(tuple, frame.collect())) == expected
        query = "SELECT id, n, city, more.x FROM rows ORDER BY id"
        dataset = DeltaTable(
            table
        ).to_pyarrow_dataset()  # as DuckDB's own extension, which is not here, it reads the log
        assert duckdb.connect().register("rows", dataset).sql(query).fetchall() == expected
    after = DeltaTable(table)
    assert after.metadata().configuration == before.metadata().configuration
    assert (after.metadata().id, after.metadata().name) == (before.metadata().id, "rows of all")


@pytest.mark.parametrize("sink", sampled([SINK, delta.upsert("rows", "id", evolve="add")]), ids=["append", "upsert"])
def test_a_promotion_brings_the_columns_of_its_rows(tmp_path, sink):
    """The branch has read further than the fork, and so has the pipeline, whose function drops the column."""
    site = site_of(tmp_path, sink=sink)
    put(site, "1", id=["a"], n=[1])
    epochs(site)
    narrow = replace(site, pipeline=of(replace(SOURCE, evolve="fix"), replace(sink, evolve="fix")))
    put(site, "2", id=["b"], n=[2], city=["Bern"])
    epochs(narrow)
    put(site, "3", id=["c"], n=[3])
    epochs(narrow)
    forks.fork(site.pipeline, site.settings, "fix", 1)
    epochs(replace(site, pipeline=forks.branched(site.pipeline, site.settings, "fix")))
    assert "city" not in site.table("rows").columns
    promotion.promote(site.pipeline, site.settings, "fix", executor=InMemoryExecutor())
    assert rows(site, "id", "n", "city") == [("a", 1, None), ("b", 2, "Bern"), ("c", 3, None)]
    assert versions(site)[-1] == ("WRITE", "4")
