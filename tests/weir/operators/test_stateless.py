"""Stages without a key against Polars: a function, a select, a union, and what they hand on to stages with state."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from state_ops.errors import InputError, PipelineError, StageError
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir import (
    Pipeline,
    State,
    agg,
    aggregate,
    delta,
    expect,
    files,
    select,
    side,
    stage,
    testing,
    union,
    window,
)
from weir.execution.in_process import InMemoryExecutor
from weir.operations.plan import plan
from weir.run.run import RunOptions, run

START = datetime(2026, 1, 1, tzinfo=UTC)
COLUMNS = pa.schema(
    [("key", pa.int64()), ("at", pa.timestamp("us", tz="UTC")), ("text", pa.string()), ("price", pa.int64())]
)
SHOP, WEB = (files(f"{{landing}}/{name}/*.parquet", name=name, event_time="at") for name in ("shop", "web"))


def rows(seed: int, number: int) -> pl.DataFrame:
    chance = random.Random(seed)
    return pl.DataFrame(
        {
            "key": [chance.randrange(20) for _ in range(number)],
            "at": sorted(START + timedelta(seconds=chance.uniform(0, 600)) for _ in range(number)),
            "text": [chance.choice(["Tea", "soap", None]) for _ in range(number)],
            "price": [chance.choice([None, *range(100)]) for _ in range(number)],
        },
        schema={"key": pl.Int64, "at": pl.Datetime("us", "UTC"), "text": pl.String, "price": pl.Int64},
    )


def cheap(frame: pl.DataFrame) -> pl.DataFrame:
    """What `pipeline` makes of the rows of a shop."""
    return frame.filter(pl.col("price") < 50).select(
        "key", "at", pl.col("text").str.to_lowercase(), (pl.col("price") * 2).alias("price")
    )


def pipeline() -> Pipeline:
    chosen = select("chosen", SHOP, "key", "at", "lower(text) AS text", "price * 2 AS price", where="price < 50")

    @stage("marked", source=WEB, key=None)
    def marked(rows: pl.DataFrame, epoch) -> pl.DataFrame:
        """Rows of the web whose price is known."""
        return rows.filter(pl.col("price").is_not_null())

    both = union("both", chosen, marked, sink=delta.append("both"))
    counted = aggregate("counted", both, key="key", rows=agg.count(), price=agg.sum("price"), sink=delta.append("sums"))
    return Pipeline("union", (chosen, marked, both, counted))


def expected(shop: pl.DataFrame, web: pl.DataFrame) -> pl.DataFrame:
    return pl.concat([cheap(shop), web.filter(pl.col("price").is_not_null())])


def sums(of: pl.DataFrame) -> pl.DataFrame:
    return of.group_by("key").agg(pl.len().alias("rows").cast(pl.Int64), pl.col("price").sum()).sort("key")


def newest(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.unique("key", keep="last", maintain_order=True).select("key", "rows", "price").sort("key")


def slices(frame: pl.DataFrame, chance: random.Random, number: int) -> list[pl.DataFrame]:
    ends = sorted(chance.randrange(len(frame) + 1) for _ in range(number - 1))
    return [frame[begin:end] for begin, end in zip([0, *ends], [*ends, len(frame)], strict=True)]


SAME = ["key", "at", "text", "price"]


def test_a_window_behind_a_union_closes_by_the_slower_input():
    both = union("both", SHOP, WEB)
    counted = window("counted", both, key="key", on="at", every="10s", n=agg.count(), sink=delta.append("counted"))
    ran = testing.run_pipeline(Pipeline("union", (both, counted)), schema={"shop": COLUMNS, "web": COLUMNS})

    def row(second: int) -> list[dict]:
        return [{"key": 1, "at": START + timedelta(seconds=second), "text": None, "price": 1}]

    ran.epoch({"shop": row(1), "web": row(2)})
    ran.epoch({"shop": row(50)})
    assert ran.tables["counted"].is_empty(), "the web may still bring rows of the first seconds"
    ran.epoch({"web": row(25)})
    assert ran.tables["counted"]["n"].to_list() == [2]
    ran.epoch(drain=True)
    assert ran.tables["counted"]["n"].sum() == 4


@pytest.mark.parametrize(
    "made", ["date_format(at, 'yyyy-MM-dd')", "unix_micros(at) * 2", "timestamp_micros(unix_micros(at) * 2)"]
)
def test_what_sql_makes_in_place_of_the_event_time_moves_no_watermark(made):
    anew = select("anew", SHOP, "key", "at AS since", f"{made} AS at")
    counts = window("counts", anew, key="key", on="since", every="1m", n=agg.count(), sink=delta.append("counts"))
    run = testing.run_pipeline(Pipeline("p", (anew, counts)), schema=COLUMNS)
    for minute in (0, 1):
        run.epoch([{"key": 1, "at": START + timedelta(minutes=minute), "text": None, "price": 1}])
        assert run.stages["anew"].watermark == START + timedelta(minutes=minute)
    run.epoch(drain=True)
    assert run.tables["counts"]["n"].to_list() == [1, 1]


@pytest.mark.parametrize("trials", sampled([4, 10]))
def test_slices_do_not_matter_to_what_follows_a_select(trials):
    chosen = select("chosen", SHOP, "key", "at", "price + 1 AS price", where="price IS NOT NULL")
    counted = window("counted", chosen, key="key", on="at", every="1m", total=agg.sum("price"))
    out = select("out", counted, "key", "window_start", "total * 2 AS double", sink=delta.append("out"))
    testing.assert_slicing_does_not_matter(
        Pipeline("selected", (chosen, counted, out)), rows(3, 200).to_dicts(), schema=COLUMNS, trials=trials
    )


def site_of(root: Path, pipeline: Pipeline, **options: str) -> Site:
    site = Site(root, {"WEIR_SPARK__PARALLELISM": "2", "WEIR_EPOCH__MAX_FILES": "2", **options}, pipeline, __name__)
    for source in pipeline.sources:
        (site.landing / source.name).mkdir(parents=True)
    return site


def land(site: Site, source: str, parts: list[pl.DataFrame], first: int = 0) -> None:
    for number, part in enumerate(parts, first):
        part.write_parquet(site.landing / source / f"{number:03}.parquet")


def table(site: Site, name: str) -> pl.DataFrame:
    return pl.read_delta(str(site.storage / "tables" / name))


def test_a_stateless_pipeline_goes_on_with_another_parallelism_and_keeps_no_state(tmp_path):
    chance, shop, web = random.Random(5), rows(5, 200), rows(6, 200)
    site = site_of(tmp_path, pipeline(), WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS="0")
    for name, frame in (("shop", shop), ("web", web)):
        land(site, name, slices(frame[:100], chance, 4))
    asked = RunOptions(until_caught_up=True)
    list(run(site.pipeline, site.settings, asked, InMemoryExecutor(5)))
    assert not [finding for finding in plan(site.pipeline, site.settings).findings if finding.verdict.stops]
    site.options["WEIR_SPARK__PARALLELISM"] = "3"
    for name, frame in (("shop", shop), ("web", web)):
        land(site, name, slices(frame[100:], chance, 4), first=4)
    reports = list(run(site.pipeline, site.settings, asked, InMemoryExecutor(5)))
    assert table(site, "both").select(SAME).sort(SAME).equals(expected(shop, web).sort(SAME))
    stats = reports[-1].checkpoint.operators
    assert (stats["chosen"].parallelism, stats["chosen"].bytes_total, stats["chosen"].has_state) == (3, 0, False)
    stored = {file.relative_to(site.storage / "state").parts[0] for file in (site.storage / "state").rglob("*")}
    assert stored == {"counted"}
    dropped = sum(report.checkpoint.operators["chosen"].rows_dropped for report in reports)
    assert dropped > 0, "what the where drops is counted"
    site.assert_no_orphans()


def test_a_gate_sets_rows_aside_in_front_of_a_stateless_stage(tmp_path):
    priced = expect("ExpectColumnValuesToNotBeNull", column="price", on_failure="quarantine", quarantine_at_most=1.0)

    @stage("marked", source=WEB, key=None, sink=delta.append("marked"), gate=priced)
    def marked(rows: pl.DataFrame, epoch) -> pl.DataFrame:
        return rows.with_columns(pl.col("text").fill_null("?"))

    web = rows(7, 100)
    site = site_of(tmp_path, Pipeline("gated", (marked,)))
    land(site, "web", [web])
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    good = web.filter(pl.col("price").is_not_null()).with_columns(pl.col("text").fill_null("?"))
    assert table(site, "marked").select(SAME).sort(SAME).equals(good.sort(SAME))
    assert len(table(site, "marked_quarantine")) == len(web) - len(good) > 0


@stage("nothing", source=WEB, key=None)
def nothing(rows: pl.DataFrame, epoch) -> None:
    """Hands out no rows."""


class Count(State):
    """Of a key."""

    n: int = 0


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (lambda: stage("s", source=WEB, key=[], state=Count), "The stage s has no key"),
        (lambda: stage("s", source=WEB, key="key"), "The stage s has no state"),
        (lambda: stage("s", source=WEB, key=None, ttl="1d")(nothing.function), "stateless, and ttl= needs"),
        (lambda: stage("s", source=WEB, key=None, order_by="at")(nothing.function), "stateless, and order_by= needs"),
        (lambda: stage("s", source=WEB, key=None, state=Count)(nothing.function), "stateless, and state= needs"),
        (lambda: select("s", WEB, gate=expect("ExpectTableRowCountToBeBetween", of="state")), "a gate on its state"),
        (lambda: select("s", WEB, "key", sink=delta.upsert("t", key="key")), "says nothing of s, which has none"),
        (lambda: select("s", WEB, " "), "' ' is no column"),
        (lambda: union("s", WEB), "fewer than two"),
        (lambda: union("s", WEB, side(SHOP, time="at")), "looks at no time='at'"),
    ],
)
def test_what_a_stage_without_a_key_cannot_be_asked_is_refused_where_it_is_defined(define, message):
    with pytest.raises(PipelineError) as error:
        define()
    assert message in str(error.value)


def test_columns_that_differ_are_named_before_the_first_row():
    both = union("both", SHOP, select("few", WEB, "key", "at", "price AS text"))
    with pytest.raises(PipelineError, match="the stage few has no 'price', has 'text' as int64, not string"):
        testing.run_pipeline(
            Pipeline("union", (both.inputs[1].origin, both)),
            [{"shop": rows(1, 3), "web": rows(2, 3)}],
            schema={"shop": COLUMNS, "web": COLUMNS},
        )


@pytest.mark.parametrize(
    ("columns", "kind", "message"),
    [
        (("key", "lenght AS l"), PipelineError, "The SQL of s names 'lenght', which is no column"),
        (("100 / price AS share",), InputError, "Spark cannot evaluate the SQL of s"),
        (("uuid() AS id",), PipelineError, "The SQL of s is not evaluated without Spark"),
    ],
)
def test_sql_that_fails_says_which(columns, kind, message):
    ran = testing.run(select("s", SHOP, *columns), schema=COLUMNS)
    with pytest.raises(kind, match=message.replace("(", r"\(")):
        ran.epoch([{"key": 1, "at": START, "text": None, "price": 0}])


def test_a_function_that_raises_is_told_with_its_trace():
    @stage("broken", source=WEB, key=None)
    def broken(rows: pl.DataFrame, epoch) -> pl.DataFrame:
        return rows if not len(rows) else rows.select("absent")

    with pytest.raises(StageError, match="The function of the stage broken raised ColumnNotFoundError"):
        testing.run(broken, schema=COLUMNS).epoch([{"key": 1, "at": START, "text": None, "price": 0}])


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_names_with_dots_and_backquotes_pass_through_spark(tmp_path):
    """Whoever evaluates the SQL: Spark alone rounds."""
    columns = ("`a.b` AS `x.y`", "upper(`c``d`) AS `e.f`")
    here, there = (
        select(name, SHOP, *columns, more) for name, more in (("here", "v * 1 AS v"), ("there", "round(v) AS v"))
    )
    sums = [
        aggregate(f"{of.uid}_sums", of, key="x.y", n=agg.count(), v=agg.sum("v"), sink=delta.append(of.uid))
        for of in (here, there)
    ]
    alone = aggregate(
        "alone", SHOP, key="a.b", n=agg.count(), v=agg.sum("v"), where="round(v) >= 0", sink=delta.append("alone")
    )
    site = site_of(
        tmp_path,
        Pipeline("names", (here, there, *sums, alone, select("ones", SHOP, "1 AS one", sink=delta.append("ones")))),
    )
    given = pl.DataFrame({"a.b": [1, 2, 1], "c`d": ["q", "r", "s"], "v": [1, 2, 3], "at": [START] * 3})
    land(site, "shop", [given])
    site.run(drain=True)
    for name in ("here", "there", "alone"):
        assert sorted(table(site, name).drop("epoch").rows()) == [(1, 2, 4), (2, 1, 2)]
    assert table(site, "ones").rows() == [(1,)] * 3, "it reads no column"
