"""Joins, as-of joins too, where pipelines are forked, promoted, backfilled, rewound, rescaled, stopped between checkpoints that do not
wait, and delivered otherwise than exactly once: always what DuckDB says of the input."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.errors import WeirError
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir import Pipeline, agg, aggregate, as_of, deduplicate, delta, files, join
from weir import kafka as kafka_api
from weir.epoch import steps
from weir.execution.executor import Executor
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.operations import branch_diff, forks, promotion
from weir.operations.backfill import backfill
from weir.operators.joins import AsOf
from weir.run import maintenance
from weir.run.run import RunOptions, run

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")
ORDERS = pa.schema([("seq", pa.int64()), ("id", pa.int64()), ("at", TIME), ("what", pa.string())])
PAYMENTS = pa.schema([("order", pa.int64()), ("paid_at", TIME), ("price", pa.int64())])
SCHEMAS = {"orders": ORDERS, "payments": PAYMENTS}
PAYMENTS_POLARS = {"order": pl.Int64, "paid_at": pl.Datetime("us", "UTC"), "price": pl.Int64}
ORDERS_HERE = files("{landing}/orders/*.parquet", name="orders", event_time="at")
PAYMENTS_HERE = files("{landing}/payments/*.parquet", name="payments", event_time="paid_at")
WITHIN, LATENESS = ("-2h", "5h"), timedelta(hours=1)  # of days that are a file and an epoch each
HOWS = ("left", "full", "inner", "as_of")
HERE = InMemoryExecutor()


def pipeline_of(how: str, orders=ORDERS_HERE, payments=PAYMENTS_HERE, **more) -> Pipeline:
    """A stage before a join, the join, and stages behind it."""
    unique = deduplicate("unique", orders, key="seq", on="at", ttl="30d")
    sinks = {
        "sink": delta.append("paid", event_time="at" if how == "full" else None),
        "late": delta.append("paid_late"),
    }
    if how == "as_of":
        paid = as_of("paid", unique, payments, on={"id": "order"}, lateness=LATENESS, **sinks)
    else:
        paid = join(
            "paid", unique, payments, on={"id": "order"}, within=WITHIN, how=how, lateness=LATENESS, **sinks
        )  # fmt: skip
    sums = aggregate("sums", paid, key="id", n=agg.count(), price=agg.sum("price"), sink=delta.append("sums"))
    return Pipeline("shop", (unique, paid, sums), max_parallelism=6, **more)


def day(number: int) -> datetime:
    return FIRST + timedelta(days=number - 1)


def rows_of(number: int, source: str, price: int = 1) -> list[dict]:
    """A day's rows, the last of which are of the next day: each file brings event time past its end."""
    chance = random.Random(f"{number} {source}")
    times = sorted(day(number) + timedelta(hours=chance.uniform(0, 24)) for _ in range(40))
    keys = [chance.randrange(12) for _ in times]
    if source == "payments":
        return [
            {"order": key, "paid_at": at, "price": price * chance.randrange(9)}
            for key, at in zip(keys, times, strict=True)
        ]
    return [
        {"seq": 1000 * number + place, "id": key, "at": at, "what": chance.choice("ab")}
        for place, (key, at) in enumerate(zip(keys, times, strict=True))
    ]


@dataclass
class Shop:
    """A site whose every day is a file of each source, and an epoch."""

    site: Site

    @classmethod
    def at(cls, root: Path, pipeline: Pipeline, **options: str) -> Shop:
        kept = {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_CHECKPOINTS__NUM_RETAINED": "20", "WEIR_SPARK__PARALLELISM": "2"}
        shop = cls(Site(root, {**kept, **options}, pipeline, "tests.recovery.test_joins"))
        for name in SCHEMAS:
            (shop.site.landing / name).mkdir(parents=True)
        return shop

    @property
    def how(self) -> str:
        joined = self.site.pipeline.stage("paid").operator
        return "as_of" if isinstance(joined, AsOf) else joined.how

    def land(self, *days: int, price: int = 1) -> None:
        for number in days:
            for source, schema in SCHEMAS.items():
                folder = self.site.landing / source
                pq.write_table(pa.Table.from_pylist(rows_of(number, source, price), schema), folder / f".{number}")
                (folder / f".{number}").rename(folder / f"{number:05}.parquet")

    def run(self, *days: int, drain: bool = False, executor: Executor | None = HERE) -> list:
        """Land days and run until they are read."""
        self.land(*days)
        options = RunOptions(until_caught_up=True, drain=drain)
        return list(run(self.site.pipeline, self.site.settings, options, executor))

    def with_options(self, **options: str) -> Shop:
        return Shop(replace(self.site, options={**self.site.options, **options}))

    def table(self, name: str) -> pl.DataFrame:
        return pl.read_delta(str(self.site.storage / "tables" / name))

    def given(self) -> dict[str, pl.DataFrame]:
        return {name: pl.read_parquet(str(self.site.landing / name / "*.parquet")) for name in SCHEMAS}

    def assert_joined(self, drained: bool = False) -> None:
        """The join's table, what is behind it, and the state are those of all that has landed."""
        assert_joined(self, self.given(), drained)


def watermark_of(given: dict[str, pl.DataFrame]) -> datetime:
    return min(given["orders"]["at"].max(), given["payments"]["paid_at"].max()) - LATENESS


def expected(how: str, given: dict[str, pl.DataFrame], drained: bool) -> pl.DataFrame:
    """What a join has handed out: all pairs, and of rows without a partner those that the watermark has passed."""
    orders, payments = given["orders"], given["payments"]  # noqa: F841 - DuckDB reads them by their names
    with duckdb.connect() as db:
        db.sql("SET TimeZone = 'UTC'")
        if how == "as_of":
            facts = db.sql("""
                SELECT o.id, o.seq, o.at, o.what, p.paid_at, p.price
                FROM orders o ASOF LEFT JOIN payments p ON o.id = p."order" AND o.at >= p.paid_at
            """).pl()
            return facts if drained else facts.filter(pl.col("at") < watermark_of(given))
        joined = db.sql(f"""
            SELECT coalesce(o.id, p."order") AS id, o.seq, o.at, o.what, p.paid_at, p.price
            FROM orders o {how} JOIN payments p
            ON o.id = p."order" AND p.paid_at BETWEEN o.at - INTERVAL 2 HOUR AND o.at + INTERVAL 5 HOUR
        """).pl()
    if drained:
        return joined
    watermark = watermark_of(given)
    gone_left = pl.col("at") + timedelta(hours=5) < watermark
    gone_right = pl.col("paid_at") + timedelta(hours=2) < watermark
    paired = pl.col("seq").is_not_null() & pl.col("paid_at").is_not_null()
    return joined.filter(paired | (pl.col("paid_at").is_null() & gone_left) | (pl.col("seq").is_null() & gone_right))


def comparable(frame: pl.DataFrame) -> list[tuple]:
    return sorted(frame.with_columns(pl.col(pl.Datetime).dt.epoch("us")).rows(), key=str)


def assert_joined(shop: Shop, given: dict[str, pl.DataFrame], drained: bool = False, late: int = 0) -> None:
    wanted = expected(shop.how, given, drained)
    table = shop.table("paid")
    assert comparable(table.select(wanted.columns)) == comparable(wanted)
    has_late = (shop.site.storage / "tables" / "paid_late" / "_delta_log").exists()
    assert (len(shop.table("paid_late")) if has_late else 0) == late
    sums = wanted.group_by("id").agg(n=pl.len(), price=pl.col("price").sum())
    state = pl.concat(map(pl.DataFrame, state_reader.scan(shop.site.pipeline, shop.site.settings, "sums")))
    assert comparable(state.select("id", "n", "price")) == comparable(sums.select("id", "n", "price"))
    newest = shop.table("sums").sort("epoch").unique("id", keep="last").select("id", "n", "price")
    assert comparable(newest) == comparable(sums.select("id", "n", "price"))
    kept = sum(table.num_rows for table in state_reader.scan(shop.site.pipeline, shop.site.settings, "paid"))
    versions = given["payments"]["order"].n_unique() if shop.how == "as_of" else 0  # the newest of each key holds
    assert not drained or kept == versions, "a drained join keeps no rows"


# -- forks, promotions, backfills


@pytest.mark.parametrize("how", sampled(("inner", "left", "as_of"), keep=0))
def test_a_branch_of_a_join_is_what_production_is_and_its_promotion_what_a_replay_gives(tmp_path, how):
    shop = Shop.at(tmp_path, pipeline_of(how))
    history = shop.run(1, 2, 3, 4)
    shop.assert_joined()
    base = history[1].checkpoint.id
    forks.fork(shop.site.pipeline, shop.site.settings, "same", int(base), "to see")
    branch = replace(shop.site, pipeline=forks.branched(shop.site.pipeline, shop.site.settings, "same"))
    options = RunOptions(until_caught_up=True)
    list(run(branch.pipeline, shop.site.settings, options, InMemoryExecutor()))
    assert branch_diff.diff(shop.site.pipeline, shop.site.settings, "same").same
    forks.drop(shop.site.pipeline, shop.site.settings, "same")
    shop.land(3, price=100)  # corrected: files of the same names
    forks.fork(shop.site.pipeline, shop.site.settings, "fix", int(base), "corrected")
    fixed = forks.branched(shop.site.pipeline, shop.site.settings, "fix")
    list(run(fixed, shop.site.settings, options, InMemoryExecutor()))
    difference = branch_diff.diff(shop.site.pipeline, shop.site.settings, "fix")
    assert not difference.same
    promotion.promote(shop.site.pipeline, shop.site.settings, "fix", executor=InMemoryExecutor())
    shop.assert_joined()
    shop.run(5)
    shop.assert_joined()
    shop.run(drain=True)
    shop.assert_joined(drained=True)


@pytest.mark.parametrize("replaces", sampled(["since", "range"], keep=0))
@pytest.mark.parametrize("how", sampled(("inner", "as_of")))
def test_a_backfill_of_a_join_is_what_a_replay_of_corrected_input_gives(tmp_path, how, replaces):
    unique = replace(pipeline_of(how).stage("unique"))
    paid = replace(pipeline_of(how).stage("paid"))
    pipeline = pipeline_of(how) if replaces == "since" else Pipeline("shop", (unique, paid), max_parallelism=6)
    shop = Shop.at(tmp_path, pipeline)
    shop.run(1, 2, 3, 4)
    shop.run(5)
    shop.land(3, price=100)
    done = backfill(
        shop.site.pipeline, shop.site.settings, day(3), day(4), replaces=replaces, promote=True,
        executor=InMemoryExecutor(),
    )  # fmt: skip
    assert done.promoted is not None
    if replaces == "since":
        shop.assert_joined()
        shop.run(6, drain=True)
        shop.assert_joined(drained=True)
        return
    wanted, table = (
        expected(how, shop.given(), False),
        shop.table("paid").select("id", "seq", "at", "what", "paid_at", "price"),
    )
    within = pl.col("at").is_between(day(3), day(4), closed="left")
    assert comparable(table.filter(within)) == comparable(wanted.filter(within))
    shop.land(3)  # outside of the range all is as it was
    wanted = expected(how, shop.given(), False)
    assert comparable(table.filter(~within)) == comparable(wanted.filter(~within))


# -- rewinds, seeks


@pytest.mark.parametrize("how", sampled(HOWS))
def test_a_rewind_of_a_join_takes_its_table_back_and_goes_on(tmp_path, how):
    shop = Shop.at(tmp_path, pipeline_of(how))
    history = shop.run(1, 2, 3)
    shop.run(drain=True)
    shop.assert_joined(drained=True)
    maintenance.rewind(shop.site.pipeline, shop.site.settings, int(history[0].checkpoint.id))
    first = {name: pl.read_parquet(shop.site.landing / name / "00001.parquet") for name in SCHEMAS}
    assert_joined(shop, first)
    shop.run()
    shop.assert_joined()
    shop.run(4, drain=True)
    shop.assert_joined(drained=True)


# -- other numbers of subtasks, checkpoints that do not wait


@pytest.mark.parametrize("how", ["full", "as_of"])
@pytest.mark.parametrize("parallelisms", sampled([[2, 5, 1, 3], [1, 6, 2, 6]], keep=0))
def test_rows_that_wait_for_partners_are_where_their_subtask_looks_for_them(tmp_path, parallelisms, how):
    shop = Shop.at(tmp_path, pipeline_of(how))
    for number, parallelism in enumerate(parallelisms, 1):
        shop.with_options(WEIR_SPARK__PARALLELISM=str(parallelism)).run(number)
        shop.assert_joined()
    shop.with_options(WEIR_SPARK__PARALLELISM="4").run(drain=True)
    shop.assert_joined(drained=True)


@pytest.mark.parametrize("how", sampled(HOWS, keep=0))
def test_behind_a_join_rows_may_wait_and_before_it_and_in_it_none_does(tmp_path, how):
    pipeline = pipeline_of(how)
    shop = Shop.at(tmp_path, pipeline, WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS="0")
    history = shop.run(1, 2, 3, executor=InMemoryExecutor(batch_rows=7))
    waiting = [report.checkpoint.operators for report in history]
    assert any(operators["sums"].waiting for operators in waiting), "nothing has waited anywhere"
    assert not any(operators[uid].waiting for operators in waiting for uid in ("unique", "paid"))
    shop.run(4, executor=InMemoryExecutor(batch_rows=7))
    shop.assert_joined()
    shop.run(drain=True)
    shop.assert_joined(drained=True)


# -- Kafka as one side


def sent(number: int) -> list[bytes]:
    return [json.dumps({**row, "paid_at": row["paid_at"].isoformat()}).encode() for row in rows_of(number, "payments")]


@pytest.mark.long
def test_a_topic_is_joined_with_files_and_what_is_sought_again_is_joined_again_or_late(tmp_path, kafka):
    topic = kafka.create()
    payments = kafka_api(
        topic, servers=kafka.servers, name="payments", event_time="paid_at", schema=PAYMENTS, start="earliest"
    )
    shop = Shop.at(tmp_path, pipeline_of("full", payments=payments))
    history = []
    for number in (1, 2, 3):
        kafka.send(topic, sent(number))
        history += shop.run(number)
        shop.assert_joined()
    given = shop.given()
    after_two = next(
        row.checkpoint.offsets["payments"] for row in history if row.checkpoint.offsets["payments"]["rows"] == 80
    )
    maintenance.seek(shop.site.pipeline, shop.site.settings, "payments", after_two["at"])
    again = pl.DataFrame(rows_of(3, "payments"), PAYMENTS_POLARS)
    on_time = again.filter(pl.col("paid_at") >= watermark_of(given))
    assert 0 < len(on_time) < len(again)
    shop.run()
    twice = {**given, "payments": pl.concat([given["payments"], on_time])}
    assert_joined(shop, twice, late=len(again) - len(on_time))
    assert set(shop.table("paid_late")["side"]) == {"right"}
    kafka.send(topic, sent(4))
    shop.run(4, drain=True)
    day_four = {name: pl.read_parquet(shop.site.landing / name / "00004.parquet") for name in SCHEMAS}
    whole = {name: pl.concat([twice[name], day_four[name]]) for name in SCHEMAS}
    assert_joined(shop, whole, drained=True, late=len(again) - len(on_time))


# -- delivered before the commit, or at most once


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> type[InMemoryExecutor] | Callable[[], None]:
    """What makes a run's executor; None is the one that a run makes by itself."""
    if request.param == "spark":
        request.getfixturevalue("spark")
        return lambda: None
    return InMemoryExecutor


IN_MEMORY_AND_ON_SPARK = pytest.mark.parametrize("executor", sampled(["memory", "spark"], keep=0), indirect=True)


@IN_MEMORY_AND_ON_SPARK
def test_an_epoch_of_a_join_whose_commit_fails_is_delivered_twice_and_kept_once(tmp_path, executor, monkeypatch):
    shop = Shop.at(tmp_path, pipeline_of("full", delivery="at_least_once"))
    shop.run(1, executor=executor())
    first = shop.table("paid")
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "commit", cut_off)
        with pytest.raises(WeirError):
            shop.run(2, executor=executor())
    wanted = expected("full", shop.given(), False)
    assert comparable(shop.table("paid").select(wanted.columns)) == comparable(wanted), (
        "the rows came before the commit"
    )
    second = [row for row in comparable(wanted) if row not in comparable(first.select(wanted.columns))]
    shop.run(3, executor=executor())
    table = comparable(shop.table("paid").select(wanted.columns))
    assert Counter(table) == Counter(comparable(expected("full", shop.given(), False))) + Counter(second)
    shop.run(drain=True, executor=executor())
    sums = expected("full", shop.given(), True).group_by("id").agg(n=pl.len())
    twice = Counter(row[0] for row in second)
    state = pl.concat(map(pl.DataFrame, state_reader.scan(shop.site.pipeline, shop.site.settings, "sums")))
    assert dict(state.select("id", "n").rows()) == dict(sums.rows()), (twice, "state has each row once")


@IN_MEMORY_AND_ON_SPARK
def test_an_epoch_of_a_join_that_is_delivered_at_most_once_and_fails_was_never_there(tmp_path, executor, monkeypatch):
    shop = Shop.at(tmp_path, pipeline_of("full", delivery="at_most_once"))
    shop.run(1, executor=executor())
    ran = steps.completed
    with monkeypatch.context() as patched:
        patched.setattr(steps, "completed", cut_off)
        with pytest.raises(WeirError):
            shop.run(2, executor=executor())
    assert steps.completed is ran
    shop.run(3, executor=executor())
    read = {
        name: pl.concat([pl.read_parquet(shop.site.landing / name / f"0000{number}.parquet") for number in (1, 3)])
        for name in SCHEMAS
    }
    assert_joined(shop, read)
    shop.run(drain=True, executor=executor())
    assert_joined(shop, read, drained=True)


def cut_off(*asked, **options):
    raise OSError("cut off")
