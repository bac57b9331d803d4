"""Rows of any values at the limits of their types, for every kind of table: declined before the commit, or published."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state_ops.errors import InputError, PipelineError
from tests.recovery.harness import Site
from tests.weir.gates.test_refused_rows import days, head, not_utf8, ran
from weir import Epoch, Pipeline, Stage, delta, files, select, stage

DAYS, FAR = [0, -719_162, 2_932_896], [2_932_897, -719_163, 2**31 - 1, -(2**31)]
MICROS, FAR_MICROS = [0, -62_135_596_800_000_000, 253_402_300_799_999_999], [2**63 - 1, -(2**63)]
TEXTS = ["", "a", "a\0b", "\n", "/", "%2F", "é😀", "x" * 3_000, " ", "a=b", "..", "\\", "'", "\U0010ffff" * 40, None]


def lists(*values: object) -> st.SearchStrategy[list]:
    return st.lists(st.sampled_from(values), min_size=3, max_size=3)


def moments(values: list[int]) -> pa.Array:
    return pa.array(values, pa.int64()).cast(pa.timestamp("us", "UTC"))


COLUMNS = {
    "text": lists(*TEXTS).map(lambda values: pa.array(values, pa.string())),
    "bytes for text": lists(b"a", b"\xff", b"\xed\xa0\x80", b"ok").map(lambda values: not_utf8(*values)),
    "date": (lists(*DAYS) | lists(*DAYS, *FAR)).map(lambda values: days(*values)),
    "time": (lists(*MICROS) | lists(*MICROS, *FAR_MICROS)).map(moments),
    "int": lists(0, -(2**63), 2**63 - 1, None).map(lambda values: pa.array(values, pa.int64())),
    "bool": lists(True, False, None).map(lambda values: pa.array(values, pa.bool_())),
    "float": lists(-0.0, float("nan"), float("inf"), 5e-324, None).map(lambda values: pa.array(values, pa.float64())),
    "decimal": lists(Decimal("9" * 38), None).map(lambda values: pa.array(values, pa.decimal128(38, 0))),
    "list": lists([], None, [None], [date.max]).map(lambda values: pa.array(values, pa.list_(pa.date32()))),
    "struct": lists(*DAYS, *FAR).map(lambda values: pa.StructArray.from_arrays([days(*values)], ["day"])),
}  # fmt: skip
SINKS = {
    "append": delta.append("t"),
    "partitions": delta.append("t", partition_by=("p",)),
    "upsert": delta.upsert("t", key="p", order_by="n"),
    "replace": delta.replace("t", by="p"),
    "where": delta.replace("t", where="n >= 0"),
}


def made(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
    """A day that is too far where there are so many rows."""
    return rows.with_columns(made=pl.when(pl.len() < 3).then(2_932_897).otherwise(0).cast(pl.Int32).cast(pl.Date))


def stage_of(sink: str, on_bad: str, has_function: bool) -> Stage:
    source = files("{landing}/*.parquet", name="landing", on_bad=on_bad)
    if has_function:
        return stage("s", source=source, key=None, sink=SINKS[sink])(made)
    return select("s", source, "*", sink=SINKS[sink])


@pytest.mark.parametrize("sink", SINKS)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_declined_before_the_commit_or_published(tmp_path_factory, sink, data):
    on_bad = data.draw(st.sampled_from(["fail", "quarantine"]))
    part = data.draw(st.sampled_from(["text", "date", "int", "bool", "bytes for text"]))
    kind = data.draw(st.sampled_from(sorted(COLUMNS)))
    root: Path = tmp_path_factory.mktemp("limits")
    of = stage_of(sink, on_bad, data.draw(st.booleans()))
    site = Site(root, {"WEIR_SPARK__PARALLELISM": "2"}, Pipeline("p", (of,), max_parallelism=8), "here")
    site.landing.mkdir(parents=True)
    rows = pa.table({"n": [1, 2, 3], "p": data.draw(COLUMNS[part]), "v": data.draw(COLUMNS[kind])})
    pq.write_table(rows, site.landing / "a.parquet")
    try:
        ran(site)
    except (InputError, PipelineError):
        assert head(site) is None, "it was committed, and can go nowhere"
        return
    published = DeltaTable(str(site.storage / "tables/t")).to_pyarrow_table()
    published.validate(full=True)
    aside = site.storage / "tables/s_quarantine"
    if sink != "upsert":
        set_aside = DeltaTable(str(aside)).to_pyarrow_table().num_rows if aside.exists() else 0
        assert published.num_rows + set_aside == 3
