"""Operators whose columns are made by SQL first, against Polars and against a select in front of them."""

from __future__ import annotations

import json
import random

import polars as pl
import pytest

from state_ops.errors import InputError, PipelineError
from tests.tools.sampling import sampled
from tests.weir.operators.test_changes import CHANGES
from tests.weir.operators.test_stateless import COLUMNS, SHOP, land, rows, site_of, slices, table
from weir import (
    Pipeline,
    State,
    agg,
    aggregate,
    deduplicate,
    delta,
    desc,
    expect,
    select,
    stage,
    testing,
    top_n,
    window,
)
from weir.definition import Stage, column_lineage
from weir.execution import exchange
from weir.execution.direct_read import narrowed
from weir.execution.executor import Landed
from weir.execution.in_process import InMemoryExecutor
from weir.operations.plan import plan
from weir.run.run import RunOptions, run

SQL = [
    "key % 5 AS key",
    "timestamp_micros(unix_micros(at) + 3600000000) AS at",
    "lower(text) AS text",
    "price * 2 AS price",
]
WHERE = "price < 90"


class Sum(State):
    """Of one key."""

    total: int = 0


def of(kind: str, uid: str, source, **more) -> Stage:
    """An operator of each kind over the columns that `SQL` makes."""
    more = {"key": "key", "sink": delta.append(uid), **more}
    totals = {"rows": agg.count(), "total": agg.sum("price"), "texts": agg.count_distinct("text")}
    if kind == "aggregate":
        return aggregate(uid, source, **more, **totals)
    if kind == "window":
        return window(uid, source, on="at", every="1m", size="2m", lateness="1h", **more, **totals)
    if kind == "sessions":
        return window(uid, source, on="at", gap="9s", lateness="1h", **more, total=agg.sum("price"))
    if kind == "deduplicate":
        return deduplicate(uid, source, on="at", order_by=["at", "price"], ttl="1m", **more)
    if kind == "top_n":
        by = ["price", "at"]
        return top_n(uid, source, by=by, n=2, **{**more, "sink": delta.upsert(uid, key=["key", "rank_number"])})
    if kind == "per key":

        def summed(key, rows: list[dict], state, epoch) -> list[dict]:
            total = state.get().total + sum(row["price"] for row in rows)
            state.update(Sum(total=total))
            return [{"key": key, "total": total}] if rows else []

        shape = {"key": int, "total": int}
        return stage(uid, source=source, state=Sum, per_key=True, output=shape, order_by="price", **more)(summed)

    def handed_on(rows: pl.DataFrame, epoch) -> pl.DataFrame:
        return rows.select("key", "price")

    return stage(uid, source=source, **{**more, "key": None})(handed_on)


KINDS = ["aggregate", "window", "sessions", "deduplicate", "top_n", "per key", "function"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_makes_its_columns_as_a_select_in_front_of_it(kind):
    chosen = select("chosen", SHOP, *SQL, where=WHERE)
    alone, behind = of(kind, "alone", SHOP, select=SQL, where=WHERE), of(kind, "behind", chosen)
    pipeline = Pipeline("columns", (alone, chosen, behind))
    given = slices(rows(len(kind), 120), random.Random(kind), 6)
    ran = testing.run_pipeline(pipeline, given, schema=COLUMNS, parallelism=3, batch_rows=7, drain=True)
    first, second = (ran.tables[name].select(sorted(ran.tables[name].columns)) for name in ("alone", "behind"))
    assert len(first) and first.sort(first.columns).equals(second.sort(second.columns))


def test_sums_of_made_columns_are_what_polars_says_however_the_input_is_cut():
    summed = of("aggregate", "summed", SHOP, select=SQL, where=WHERE)
    given = rows(7, 200)
    ran = testing.run_pipeline(
        Pipeline("columns", (summed,)), slices(given, random.Random(7), 5), schema=COLUMNS, parallelism=2
    )
    newest = ran.tables["summed"].sort("epoch").group_by("key", maintain_order=True).last().sort("key")
    expected = (
        given.filter(pl.col("price") < 90)
        .group_by(pl.col("key") % 5)
        .agg(
            rows=pl.len(),
            total=(pl.col("price") * 2).sum(),
            texts=pl.col("text").str.to_lowercase().drop_nulls().n_unique(),
        )
        .sort("key")
    )
    assert newest.drop("epoch").rows() == expected.rows()
    windows = of("window", "windows", SHOP, select=SQL, where=WHERE)
    testing.assert_slicing_does_not_matter(windows, given.to_dicts(), schema=COLUMNS, trials=3)


def test_it_goes_on_through_barriers_that_do_not_wait_and_with_another_parallelism(tmp_path):
    """What waits behind a barrier has its columns already, and they are not made twice."""
    chosen = select("chosen", SHOP, "*")
    counted = aggregate(
        "counted",
        chosen,
        select=["key + 1 AS key", "price"],
        key="key",
        total=agg.sum("price"),
        sink=delta.append("it"),
    )
    site = site_of(tmp_path, Pipeline("columns", (chosen, counted)), WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS="0")
    given, chance = rows(8, 200), random.Random(8)
    land(site, "shop", slices(given[:100], chance, 4))
    asked = RunOptions(until_caught_up=True)
    reports = list(run(site.pipeline, site.settings, asked, InMemoryExecutor(5)))
    assert any(report.checkpoint.operators["counted"].waiting for report in reports), "rows were left"
    assert not [finding for finding in plan(site.pipeline, site.settings).findings if finding.verdict.stops]
    site.options["WEIR_SPARK__PARALLELISM"] = "3"
    land(site, "shop", slices(given[100:], chance, 4), first=4)
    list(run(site.pipeline, site.settings, asked, InMemoryExecutor(5)))
    newest = table(site, "it").sort("epoch").group_by("key", maintain_order=True).last().sort("key")
    expected = given.group_by(pl.col("key") + 1).agg(pl.col("price").sum()).sort("key")
    assert newest.select("key", "total").rows() == expected.rows()


@pytest.mark.usefixtures("spark")
def test_what_only_spark_evaluates_is_made_by_spark(tmp_path):
    summed = [
        aggregate(
            uid,
            SHOP,
            select=["`key` AS `k.1`", price],
            where="key > 1",
            key="k.1",
            v=agg.sum("v"),
            sink=delta.append(uid),
        )
        for uid, price in (("here", "price * 1 AS v"), ("there", "round(price) AS v"))
    ]
    site = site_of(tmp_path, Pipeline("columns", tuple(summed)))
    given = rows(9, 60)
    land(site, "shop", [given])
    site.run(drain=True)
    expected = given.filter(pl.col("key") > 1).group_by("key").agg(pl.col("price").sum()).sort("key").rows()
    assert sorted(table(site, "here").drop("epoch").rows()) == expected
    assert sorted(table(site, "there").drop("epoch").rows()) == expected


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("way", "options"),
    sampled(
        [
            (exchange.ROWS, {"DIRECT_READ_MB": "0", "EXCHANGE": "rows"}),
            (exchange.FILES, {"DIRECT_READ_MB": "0", "EXCHANGE": "blocks"}),
            (exchange.CUT, {"EXCHANGE": "blocks", "CONF": json.dumps({"spark.sql.files.openCostInBytes": "4194304"})}),
        ]
    ),
)
def test_rows_have_their_columns_whichever_way_they_reach_their_subtasks(tmp_path, monkeypatch, way, options):
    chosen = select("chosen", SHOP, "*")
    alone, behind = (of("window", uid, source, select=SQL, where=WHERE) for uid, source in (("w", SHOP), ("b", chosen)))
    made = {"select": [*SQL, "'made' AS made"], "where": WHERE}
    unique = deduplicate("u", SHOP, key="key", order_by=["at", "price"], sink=delta.append("u"), **made)
    settings = {f"WEIR_SPARK__{name}": value for name, value in options.items()}
    site = site_of(tmp_path, Pipeline("columns", (chosen, alone, behind, unique)), **settings)
    given = rows(11, 120)
    land(site, "shop", slices(given, random.Random(11), 3))
    chose, ways = exchange.chosen, []
    monkeypatch.setattr(exchange, "chosen", lambda *args, **more: ways.append(chose(*args, **more)) or ways[-1])
    site.run(drain=True)
    assert way in ways
    ran = testing.run_pipeline(Pipeline("columns", (alone, unique)), [given], schema=COLUMNS, drain=True)
    for name, table_of in (("w", "w"), ("b", "w"), ("u", "u")):
        expected = ran.tables[table_of]
        assert table(site, name).select(expected.columns).sort(expected.columns).equals(expected.sort(expected.columns))


def test_no_more_is_read_than_the_columns_are_made_of():
    made = aggregate("made", SHOP, select=["key", "price + 1 AS price"], where="text = 'Tea'", key="key", n=agg.count())
    landed = Landed(COLUMNS, reader=None, files=())  # type: ignore[arg-type]
    assert narrowed(made, made.inputs[0], landed).schema.names == ["key", "text", "price"]


def looks(rows: pl.DataFrame, epoch) -> pl.DataFrame:
    return rows


def test_changes_are_taken_back_only_where_the_columns_say_them():
    source = select("named", CHANGES)
    taking = aggregate("it", source, select=["k", "v * 2 AS v", "_change_type"], key="k", n=agg.count(), v=agg.sum("v"))
    assert taking.inputs[0].keeps_changes
    with pytest.raises(PipelineError, match="its columns leave that one out"):
        aggregate("it", source, select=["k", "v"], key="k", n=agg.count())
    with pytest.raises(PipelineError, match="its columns leave that one out") as refused:
        stage("it", source=source, key=None, select="k", accepts_changes=True)(looks)
    assert "accepts_changes" not in refused.value.next and "Keep _change_type among them" in refused.value.next
    with pytest.raises(PipelineError, match="whose rows are changes"):
        aggregate("it", source, select="*", key="k", order_by="v", highest=agg.last("v"))
    newest = "_change_type IN ('insert', 'update_postimage')"
    assert aggregate("it", source, select=["k", "v"], where=newest, key="k", highest=agg.max("v"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"select": [1]}, "1 is no column of it"),
        ({"select": ["key", " "]}, "' ' is no column of it"),
        ({"select": agg.count()}, "is no column of it"),
        ({"select": ["key"], "transform": lambda rows: rows}, "has a transform, which makes columns of its own"),
        (
            {"select": ["key"], "gate": expect("ExpectColumnValuesToNotBeNull", column="key", on_failure="quarantine")},
            "columns of its own",
        ),
    ],
)
def test_columns_that_cannot_be_made_are_refused_where_they_are_defined(more, message):
    with pytest.raises(PipelineError, match=message):
        deduplicate("it", SHOP, key="key", **more)


def test_a_column_that_is_not_there_is_named_before_the_first_row():
    for sql, message in ((["kee AS key"], "names 'kee', which is no column"), (["price"], "has no column 'key'")):
        made = aggregate("it", SHOP, select=sql, key="key", n=agg.count())
        with pytest.raises(PipelineError, match=message):
            testing.run(made, schema=COLUMNS).epoch([{"key": 1, "at": None, "text": "", "price": 1}])


def test_ranks_are_not_final_at_the_time_of_their_events_unless_another_is_made_of_it():
    options = {"key": "key", "by": "price", "n": 1, "until": "at"}
    for plain in ((), "*", ["key", "price", "at"]):
        with pytest.raises(PipelineError, match="would lose rows"):
            top_n("it", SHOP, select=plain, **options)
    assert top_n("it", SHOP, select=["key", "price", "timestamp_micros(unix_micros(at) + 3600000000) AS at"], **options)


@pytest.mark.parametrize("column", ["at", "closes"])
def test_the_watermark_goes_by_the_sources_event_time_whatever_a_made_column_is_called(column):
    """The end of the hour of a row is later than all rows of the hour, of which the next epoch has more."""
    end = f"timestamp_micros(unix_micros(at) DIV 3600000000 * 3600000000 + 3600000000) AS {column}"
    columns = ["key % 2 AS key", "price", end]
    best = top_n(
        "best", SHOP, select=columns, key="key", by=desc("price"), n=1, until=column, ties=False,
        sink=delta.append("best"), late=delta.append("late"),
    )  # fmt: skip
    given = rows(5, 60).drop_nulls("price").unique("price", keep="first", maintain_order=True)
    ran = testing.run_pipeline(
        Pipeline("columns", (best,)), slices(given, random.Random(5), 4), schema=COLUMNS, drain=True
    )
    highest = given.group_by(pl.col("key") % 2).agg(pl.col("price").max()).sort("key")
    assert ran.tables["best"].select("key", "price").sort("key").rows() == highest.rows()
    assert not ran.tables["late"].height
    renamed = ["key % 2 AS key", "price", "at AS closes"]
    for until, select_ in (("closes", renamed), ("closes", ["*", "at closes"]), ("at", ["* EXCEPT (text)"])):
        with pytest.raises(PipelineError, match="would lose rows"):
            top_n("it", SHOP, select=select_, key="key", by="price", n=1, until=until)


@pytest.mark.parametrize(
    ("columns", "name", "before", "seen_as"),
    [
        ((), "a", "a", "a"),
        (("a", "b"), "a", "a", "a"),
        ((" `a` AS b", "c as a"), "a", "c", "b"),
        (("a + 1 AS a", "b"), "a", None, None),
        (("*", "a AS b"), "a", "a", "a"),
        (("* EXCEPT (a)", "a + 1 AS a"), "a", None, None),
        (("* EXCEPT (a)", "lower(a) a", "a c"), "a", None, "c"),
        (("`b c` AS `a b`",), "a b", "b c", None),
        (("b",), "a", None, None),
    ],
)
def test_which_made_columns_are_those_of_the_input(columns, name, before, seen_as):
    assert column_lineage.before(columns, name) == before
    assert column_lineage.seen_as(columns, name) == seen_as


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ((), True),
        (("a", "* "), True),
        (("*EXCEPT (a, b)",), True),
        (("* except (a, `_Change_Type`)",), False),
        (("* EXCEPT (_change_type)", "lower(a) AS _change_type"), True),
        (("* EXCEPT (my_change_type)",), True),
        (("a AS `_change_type`",), True),
        (("_change_type AS what", "my_change_type"), False),
    ],
)
def test_which_made_columns_say_what_became_of_a_row(columns, kept):
    assert column_lineage.has(columns, "_change_type") == kept


@pytest.mark.parametrize(
    ("sql", "advice"),
    [("price AS key", 'where="price IS NOT NULL", or null_keys'), ("price + 1 AS key", ": null_keys")],
)
def test_what_is_advised_for_a_null_key_is_about_the_columns_that_a_where_sees(sql, advice):
    made = aggregate("made", SHOP, select=[sql], key="key", n=agg.count())
    with pytest.raises(InputError, match="has no 'key'") as refused:
        testing.run(made, schema=COLUMNS).epoch([{"key": 1, "at": None, "text": "", "price": None}])
    assert advice in refused.value.next
