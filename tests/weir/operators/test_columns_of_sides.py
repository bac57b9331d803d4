"""Operators of which each input makes its columns first, against a select in front of each."""

from __future__ import annotations

import json
import random

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from state_ops.errors import InputError, PipelineError
from tests.tools.sampling import sampled
from tests.weir.operators.test_changes import CHANGES
from tests.weir.operators.test_stateless import COLUMNS, SHOP, WEB, land, rows, site_of, slices, table
from weir import Pipeline, agg, aggregate, as_of, delta, join, lookup, select, side, testing, union
from weir.definition import Stage
from weir.execution import exchange
from weir.execution.direct_read import narrowed
from weir.execution.executor import Landed
from weir.execution.in_process import InMemoryExecutor
from weir.execution.spark.spark_executor import SparkExecutor
from weir.operations.plan import plan
from weir.run.run import RunOptions, run

OF_SHOP = ["key % 5 AS id", "at", "lower(text) AS text", "price * 2 AS price"]
OF_WEB = ["key % 5 AS other", "at", "price + 1 AS price"]
WHERE = "price < 90"
KINDS = ["join", "kept", "semi", "as_of", "union"]


def of(kind: str, uid: str, left, right) -> Stage:
    """An operator of each kind over the columns that `OF_SHOP` and `OF_WEB` make."""
    on, sink = {"id": "other"}, delta.append(uid)
    if kind == "as_of":
        return as_of(uid, left, right, on=on, tolerance="1m", lateness="1h", sink=sink)
    if kind == "kept":
        return join(uid, left, right, on=on, ttl=None, sink=sink)
    if kind == "union":
        return union(uid, left, right, sink=sink)
    how = "semi" if kind == "semi" else "full"
    return join(uid, left, right, on=on, within=("-5s", "9s"), how=how, lateness="1h", sink=sink)


def pair(kind: str) -> tuple[Stage, ...]:
    """The operator with its columns, and behind selects that make them."""
    of_web = ["key % 5 AS id", "at", "lower(text) AS text", "price + 1 AS price"] if kind == "union" else OF_WEB
    left, right = select("left", SHOP, *OF_SHOP, where=WHERE), select("right", WEB, *of_web)
    alone = of(kind, "alone", side(SHOP, select=OF_SHOP, where=WHERE), side(WEB, select=of_web))
    return alone, left, right, of(kind, "behind", left, right)


def cut(seed: int, number: int) -> list[dict[str, pl.DataFrame]]:
    chance = random.Random(seed)
    parts = zip(slices(rows(seed, 90), chance, number), slices(rows(seed + 1, 70), chance, number), strict=True)
    return [{"shop": of_shop, "web": of_web} for of_shop, of_web in parts]


def alike(first: pl.DataFrame, second: pl.DataFrame) -> bool:
    return len(first) > 0 and first.sort(first.columns).equals(second.select(first.columns).sort(first.columns))


@pytest.mark.parametrize("kind", KINDS)
def test_each_side_makes_its_columns_as_a_select_in_front_of_it(kind):
    given = cut(len(kind), 5)
    ran = testing.run_pipeline(
        Pipeline("sides", pair(kind)), given, schema={"shop": COLUMNS, "web": COLUMNS}, parallelism=3, batch_rows=7,
        drain=True,
    )  # fmt: skip
    assert alike(ran.tables["alone"], ran.tables["behind"])


def test_pairs_of_made_columns_are_duckdbs():
    given = cut(21, 4)
    alone = of("kept", "alone", side(SHOP, select=OF_SHOP, where=WHERE), side(WEB, select=OF_WEB))
    ran = testing.run_pipeline(
        Pipeline("sides", (alone,)), given, schema={"shop": COLUMNS, "web": COLUMNS}, parallelism=2
    )
    with duckdb.connect() as db:
        for name in ("shop", "web"):
            db.register(name, pl.concat([part[name] for part in given]).to_arrow())
        truth = db.sql(
            "SELECT s.key % 5 AS id, s.at, lower(s.text) AS text, s.price * 2 AS price, w.at AS at_right,"
            " w.price + 1 AS price_right FROM shop s JOIN web w ON s.key % 5 = w.key % 5 WHERE s.price < 90"
        ).pl()
    shown = ran.tables["alone"]
    assert shown.columns == truth.columns and shown.height == truth.height > 0
    assert shown.with_columns(pl.col("at", "at_right").dt.epoch("us")).sort(shown.columns).rows() == (
        truth.with_columns(pl.col("at", "at_right").dt.epoch("us")).sort(shown.columns).rows()
    )


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("way", sampled([exchange.DIRECT, exchange.CUT, exchange.FILES, exchange.ROWS], 2))
def test_rows_of_both_sides_have_their_columns_whichever_way_they_reach_their_subtasks(tmp_path, monkeypatch, way):
    alone, *_ = pair("join")
    options = {"DIRECT_READ_MB": "0", "EXCHANGE": "rows" if way == exchange.ROWS else "blocks"}
    if way == exchange.CUT:  # what Spark alone evaluates
        extra = [*OF_SHOP, "sha1(text) AS digest"]
        alone = of("join", "alone", side(SHOP, select=extra, where=WHERE), side(WEB, select=OF_WEB))
    settings = {} if way == exchange.DIRECT else {f"WEIR_SPARK__{name}": value for name, value in options.items()}
    monkeypatch.setattr(SparkExecutor, "_is_staged", lambda *_: False)
    site = site_of(tmp_path, Pipeline("sides", (alone,)), **settings)
    given = cut(5, 3)
    for name in ("shop", "web"):
        land(site, name, [part[name] for part in given])
    reports = site.run(drain=True)
    assert way in {report.checkpoint.operators["alone"].exchange for report in reports}
    expected = testing.run_pipeline(
        Pipeline("sides", pair("join")), given, schema={"shop": COLUMNS, "web": COLUMNS}, drain=True
    ).tables["alone"]
    assert alike(expected, table(site, "alone"))


def test_only_what_a_side_is_made_of_is_read_and_kept(tmp_path):
    alone, *_ = pair("kept")
    site = site_of(tmp_path, Pipeline("sides", (alone,)))
    for name, parts in (("shop", slices(rows(1, 40), random.Random(1), 2)), ("web", [rows(2, 40)])):
        land(site, name, parts)
    asked = RunOptions(until_caught_up=True)
    (*_, last) = run(site.pipeline, site.settings, asked, InMemoryExecutor())
    of_right = json.loads(last.checkpoint.operators["alone"].collections["right"]["schema"])
    (row,) = (field["type"]["struct"] for field in of_right["fields"] if field["name"] == "row")
    assert [column["name"] for column in row] == ["at", "price"]
    landed = Landed(COLUMNS, reader=None, files=())  # type: ignore[arg-type]
    assert narrowed(alone, alone.inputs[1], landed).schema.names == ["key", "at", "price"]
    assert not [finding for finding in plan(site.pipeline, site.settings).findings if finding.verdict.stops]


@pytest.mark.parametrize("broadcast", [True, False])
def test_a_lookup_makes_its_columns_first(tmp_path, broadcast):
    names = pl.DataFrame({"id": [0, 1, 3], "name": ["zero", "one", "three"]})
    found = lookup(
        "found", SHOP, select=["key % 5 AS id", "price"], where=WHERE, table="{landing}/names.parquet", on="id",
        broadcast=broadcast, sink=delta.append("found"),
    )  # fmt: skip
    site = site_of(tmp_path, Pipeline("sides", (found,)))
    names.write_parquet(site.landing / "names.parquet")
    given = rows(4, 80)
    land(site, "shop", slices(given, random.Random(4), 3))
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(7)))
    expected = given.filter(pl.col("price") < 90).select(pl.col("key") % 5, "price").rename({"key": "id"})
    assert alike(expected.join(names, on="id", how="left"), table(site, "found"))


def test_a_union_hands_on_changes_only_where_a_side_keeps_what_became_of_a_row():
    source, other = select("named", CHANGES), select("more", CHANGES)
    both = union("both", source, other)
    assert both.hands_out_changes
    kept = union("both", side(source, select=["k", "v", "_change_type"]), side(other, select="*"))
    assert kept.hands_out_changes
    newest = "_change_type IN ('insert', 'update_postimage')"
    sides = [side(given, select=["k", "v"], where=newest) for given in (source, other)]
    assert not union("both", *sides).hands_out_changes
    assert aggregate("it", union("both", *sides), key="k", highest=agg.max("v"))
    with pytest.raises(PipelineError, match="its columns leave that one out"):
        union("both", side(source, select=["k", "v"]), other)


def test_a_join_reads_changes_where_a_side_says_which_rows_are_meant():
    source, newest = select("named", CHANGES), "_change_type IN ('insert', 'update_postimage')"
    with pytest.raises(PipelineError, match="what it made of a row cannot be taken back"):
        join("it", source, SHOP, on={"k": "key"}, ttl=None)
    assert join("it", side(source, select=["k", "v"], where=newest), SHOP, on={"k": "key"}, ttl=None).has_state


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"select": [1]}, "1 is no column of it"),
        ({"select": ["key"], "transform": lambda rows: rows}, "has a transform, which makes columns of its own"),
    ],
)
def test_columns_that_cannot_be_made_are_refused_where_they_are_defined(given, message):
    with pytest.raises(PipelineError, match=message):
        join("it", side(SHOP, **given), WEB, on="key", ttl=None)
    if "transform" not in given:
        with pytest.raises(PipelineError, match=message):
            lookup("it", SHOP, table="t", on="key", **given)


def test_a_column_that_is_not_there_is_named_before_the_first_row():
    joined = join("it", side(SHOP, select=["kee AS key"]), WEB, on="key", ttl=None, sink=delta.append("it"))
    with pytest.raises(PipelineError, match="names 'kee', which is no column"):
        testing.run_pipeline(Pipeline("sides", (joined,)), cut(1, 1), schema={"shop": COLUMNS, "web": COLUMNS})


@pytest.mark.parametrize(
    ("made", "advice"),
    [
        ({"select": ["price AS other", "at"]}, 'where="price IS NOT NULL", or null_keys'),
        ({"select": ["price + 1 AS other", "at"]}, ": null_keys"),
        ({}, 'where="other IS NOT NULL", or null_keys'),
    ],
)
def test_a_key_that_is_missing_is_told_by_the_input_that_lacks_it(made, advice):
    joined = join(
        "it", side(SHOP, select=["key AS id"]), side(WEB, **made), on={"id": "other"}, ttl=None, sink=delta.append("it")
    )
    given = rows(1, 30).with_columns(pl.lit(1, pl.Int64).alias("other"))
    lacking = given.with_columns(pl.lit(None, pl.Int64).alias("price"), pl.lit(None, pl.Int64).alias("other"))
    columns = COLUMNS.append(pa.field("other", pa.int64()))
    with pytest.raises(InputError, match="have no 'other', which is a key of it in the source web") as refused:
        testing.run_pipeline(
            Pipeline("sides", (joined,)), [{"shop": given, "web": lacking}], schema={"shop": columns, "web": columns}
        )
    assert advice in str(refused.value)


def test_errors_about_a_stage_with_several_inputs_say_the_sql_of_each():
    joined = join("it", side(SHOP, select=["key"], where=WHERE), side(WEB, select="*"), on="key", ttl=None)
    assert joined.sql_written == f"'key', where={WHERE!r}, '*'"
