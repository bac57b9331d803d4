"""Rows that no table, or not their sink, could take: declined before the commit by file, row and column, or set aside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from state_ops.errors import InputError, RefusedError
from tests.recovery.harness import Site
from weir import (
    Epoch,
    Pipeline,
    Stage,
    agg,
    aggregate,
    delta,
    expect,
    files,
    select,
    stage,
    union,
)
from weir.connectors.delta.statistics import statistics
from weir.definition import ROW
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, open_storage, run

FAR = 2_932_897  # days since 1970: 10000-01-01
FAIL = files("{landing}/*.parquet", name="landing")
ASIDE = files("{landing}/*.parquet", name="landing", on_bad="quarantine")


def not_utf8(*values: bytes) -> pa.StringArray:
    """Bytes in a column of text, as writers that do not check put them there."""
    ends = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(values)))


def days(*values: int) -> pa.Array:
    return pa.array(values, pa.int32()).cast(pa.date32())


NESTED = pa.ListArray.from_arrays(pa.array([0, 1, 1, 2], pa.int32()), not_utf8(b"a", b"\xff"))
BAD = {
    "date": (days(0, 1, FAR), "is 10000-01-01"),
    "time": (pa.array([0, 1, 2**62]).cast(pa.timestamp("us", "UTC")), "outside of the years 1 to 9999"),
    "text": (not_utf8(b"a", b"b", b"c\xff"), "is not UTF-8"),
    "list": (NESTED, "is not UTF-8"),
    "struct": (pa.StructArray.from_arrays([days(0, 1, FAR)], ["day"]), "is 10000-01-01"),
}


def site_of(root: Path, stages: tuple[Stage, ...], **columns: object) -> Site:
    site = Site(root, {"WEIR_SPARK__PARALLELISM": "2"}, Pipeline("p", stages, max_parallelism=8), "here")
    site.landing.mkdir(parents=True)
    pq.write_table(pa.table({"n": [1, 2, 3], **columns}), site.landing / "a.parquet")
    return site


def ran(site: Site) -> None:
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def head(site: Site) -> object:
    return open_storage(site.pipeline, site.settings)[1].head()


def table(site: Site, name: str) -> list[dict]:
    return DeltaTable(str(site.storage / "tables" / name)).to_pyarrow_table().to_pylist()


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize(
    "sink", [delta.append("t"), delta.upsert("t", key="n", order_by="n")], ids=["append", "upsert"]
)
def test_a_value_that_no_table_holds_declines_its_epoch_by_file_row_and_column(tmp_path, kind, sink):
    values, problem = BAD[kind]
    site = site_of(tmp_path, (select("s", FAIL, "*", sink=sink),), v=values)
    with pytest.raises(InputError) as refused:
        ran(site)
    assert problem in str(refused.value) and "'v" in str(refused.value)
    assert "a.parquet, row 2" in str(refused.value) and head(site) is None
    (site.landing / "a.parquet").unlink()
    pq.write_table(pa.table({"n": [1], "v": values[:1]}), site.landing / "b.parquet")
    ran(site)
    assert len(table(site, "t")) == 1


@pytest.mark.parametrize("kind", BAD)
def test_such_a_row_is_set_aside_where_the_source_says_so(tmp_path, kind):
    values, problem = BAD[kind]
    site = site_of(tmp_path, (select("s", ASIDE, "*", sink=delta.append("t")),), v=values)
    ran(site)
    assert sorted(row["n"] for row in table(site, "t")) == [1, 2]
    (row,) = table(site, "s_quarantine")
    assert (row["n"], row["v"], row["_weir_file"], row[ROW], row["_weir_gate"]) == (3, None, "a.parquet", 2, "on_bad")
    assert problem in row["_weir_reason"]


def shouting(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
    return rows.with_columns(u=pl.col("v").str.to_uppercase())


def far(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
    return rows.with_columns(day=pl.when(pl.col("n") == 2).then(FAR).otherwise(0).cast(pl.Int32).cast(pl.Date))


def stage_of(function: Callable, source: object, **more) -> Stage:
    return stage("s", source=source, key=None, sink=delta.append("t"), **more)(function)


def test_a_text_that_is_not_utf8_reaches_no_function(tmp_path):
    texts = not_utf8(b"a", b"b\xff", b"c")
    with pytest.raises(InputError, match="is not UTF-8"):
        ran(site_of(tmp_path / "fail", (stage_of(shouting, FAIL),), v=texts))
    aside = site_of(tmp_path / "aside", (stage_of(shouting, ASIDE),), v=texts)
    ran(aside)
    assert sorted(row["u"] for row in table(aside, "t")) == ["A", "C"]


def test_what_a_function_makes_is_refused_and_nobody_knows_of_which_row(tmp_path):
    with pytest.raises(RefusedError, match="'day' is 10000-01-01") as refused:
        ran(site_of(tmp_path / "fail", (stage_of(far, FAIL),)))
    assert "stage s, epoch 1" in str(refused.value) and "sink t" in str(refused.value)
    site = site_of(tmp_path / "aside", (stage_of(far, ASIDE),))
    with pytest.raises(RefusedError, match="no row of a source is known to be its cause"):
        ran(site)
    assert head(site) is None


def test_a_stage_that_says_where_its_rows_come_from_has_them_set_aside(tmp_path):
    gate = expect("ExpectColumnValuesToNotBeNull", column="n", on_failure="quarantine")
    site = site_of(tmp_path, (stage_of(far, ASIDE, gate=gate),))
    ran(site)
    assert sorted(row["n"] for row in table(site, "t")) == [1, 3]
    assert [(row["n"], row[ROW]) for row in table(site, "s_quarantine")] == [(2, 1)]


@pytest.mark.parametrize(
    "sink", [delta.upsert("t", key="v", order_by="n"), delta.replace("t", where="v = 'a'")], ids=["key", "where"]
)
def test_rows_that_break_what_a_table_promises_are_set_aside_too(tmp_path, sink):
    site = site_of(tmp_path, (select("s", ASIDE, "n", "v", where="n > 1", sink=sink),), v=["a", None, "a"])
    ran(site)
    assert [row["n"] for row in table(site, "t")] == [3]
    assert [row[ROW] for row in table(site, "s_quarantine")] == [1]


def test_a_union_sets_rows_of_each_of_its_sources_aside(tmp_path):
    other = replace(ASIDE, pattern="{landing}/other/*.parquet", name="other")
    site = site_of(tmp_path, (union("s", ASIDE, other, sink=delta.append("t")),), v=days(0, FAR, 1))
    (site.landing / "other").mkdir()
    pq.write_table(pa.table({"n": [4, 5], "v": days(FAR, 2)}), site.landing / "other" / "b.parquet")
    ran(site)
    assert sorted(row["n"] for row in table(site, "t")) == [1, 3, 5]
    assert [row["n"] for row in table(site, "s_landing_quarantine")] == [2]
    assert [row["n"] for row in table(site, "s_other_quarantine")] == [4]


def test_of_several_sources_only_those_that_say_so_have_rows_set_aside(tmp_path):
    other = replace(FAIL, pattern="{landing}/other/*.parquet", name="other")
    sink = delta.upsert("t", key="v", order_by="n")
    site = site_of(tmp_path, (union("s", ASIDE, other, sink=sink),), v=["a", None, "b"])
    (site.landing / "other").mkdir()
    pq.write_table(pa.table({"n": [4, 5], "v": ["c", None]}), site.landing / "other" / "b.parquet")
    with pytest.raises(RefusedError, match=r"source other, b\.parquet, row 1") as refused:
        ran(site)
    assert "cannot set it aside" not in str(refused.value) and head(site) is None
    pq.write_table(pa.table({"n": [4, 5], "v": ["c", "d"]}), site.landing / "other" / "b.parquet")
    ran(site)
    assert sorted(row["v"] for row in table(site, "t")) == ["a", "b", "c", "d"]
    assert [(row["n"], row[ROW]) for row in table(site, "s_landing_quarantine")] == [(2, 1)]


def test_a_bad_row_of_the_input_is_found_behind_an_aggregate(tmp_path):
    stages = (aggregate("s", ASIDE, key="n", last=agg.max("v"), sink=delta.append("t")),)
    site = site_of(tmp_path, stages, v=days(0, FAR, 1))
    ran(site)
    assert {row["n"]: row["last"] for row in table(site, "t")} == {1: date(1970, 1, 1), 3: date(1970, 1, 2)}
    with pytest.raises(InputError):
        ran(
            site_of(
                tmp_path / "fail",
                (aggregate("s", FAIL, key="v", n=agg.count(), sink=delta.append("t")),),
                v=days(0, FAR, 1),
            )
        )


@pytest.mark.parametrize("kind", BAD)
def test_statistics_take_any_value(tmp_path, kind):
    pq.write_table(pa.table({"n": [1, 2, 3], "v": BAD[kind][0]}), tmp_path / "a.parquet")
    assert '"numRecords":3' in statistics(pq.read_metadata(tmp_path / "a.parquet")).replace(" ", "")
