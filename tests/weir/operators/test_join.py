"""Joins against DuckDB: every way to join, rows out of order, slices of random size, and what state keeps."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.backends.base import BEYOND
from state_ops.backends.memory import MemoryBackend
from state_ops.errors import InputError, PipelineError
from state_ops.keyed.forget import ForgottenKey, copy_without
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from weir import Pipeline, agg, aggregate, as_of, deduplicate, delta, expect, files, join, side, testing, window
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.operations.plan import plan
from weir.operators.joins import JOINS
from weir.run.run import RunOptions, run
from weir.testing.rows import GivenSource

START = datetime(2026, 1, 1, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")
ORDERS = pa.schema([("id", pa.int64()), ("at", TIME), ("what", pa.string()), ("price", pa.float64())])
PAYMENTS = pa.schema([("order", pa.int64()), ("paid_at", TIME), ("price", pa.float64())])
SCHEMAS = {"orders": ORDERS, "payments": PAYMENTS}


def sources(lateness_by_time: bool = True) -> tuple:
    timed = {"event_time": "at"} if lateness_by_time else {}
    timed_right = {"event_time": "paid_at"} if lateness_by_time else {}
    return (
        files("orders/*.parquet", name="orders", **timed),
        files("payments/*.parquet", name="payments", **timed_right),
    )


def paid(how: str = "inner", within=("-10s", "30s"), lateness="0s", **more) -> Pipeline:
    orders, payments = sources()
    joined = join(
        "paid",
        orders,
        payments,
        on={"id": "order"},
        within=within,
        how=how,
        lateness=lateness,
        sink=delta.append("paid"),
        **more,
    )
    return Pipeline("shop", stages=[joined])


def rows(seed: int, number: int, keys: int, seconds: int = 600) -> dict[str, pl.DataFrame]:
    chance = random.Random(seed)
    moments = [[START + timedelta(seconds=chance.uniform(0, seconds)) for _ in range(number)] for _ in range(2)]
    orders = pl.DataFrame(
        {
            "id": [chance.randrange(keys) for _ in range(number)],
            "at": moments[0],
            "what": [chance.choice(["tea", "soap", None]) for _ in range(number)],
            "price": [chance.choice([1.5, 2.0, None]) for _ in range(number)],
        }
    ).sort("at")
    payments = pl.DataFrame(
        {
            "order": [chance.randrange(keys) for _ in range(number)],
            "paid_at": moments[1],
            "price": [chance.uniform(0, 9) for _ in range(number)],
        }
    ).sort("paid_at")
    return {"orders": orders, "payments": payments}


CONDITION = "o.id = p.order AND p.paid_at BETWEEN o.at - INTERVAL 10 SECOND AND o.at + INTERVAL 30 SECOND"
SQL = {
    **{
        how: "SELECT coalesce(o.id, p.order) AS id, o.at, o.what, o.price, p.paid_at, p.price AS price_right"
        f" FROM orders o {how} JOIN payments p ON {CONDITION}"
        for how in ("inner", "left", "right", "full")
    },
    "semi": f"SELECT o.id, o.at, o.what, o.price FROM orders o SEMI JOIN payments p ON {CONDITION}",
    "anti": f"SELECT o.id, o.at, o.what, o.price FROM orders o ANTI JOIN payments p ON {CONDITION}",
}


def truth(how: str, given: dict[str, pl.DataFrame]) -> list[tuple]:
    orders, payments = given["orders"], given["payments"]  # noqa: F841 - DuckDB reads them by their names
    with duckdb.connect() as db:
        db.sql("SET TimeZone = 'UTC'")
        return comparable(db.sql(SQL[how].replace("p.order", 'p."order"')).pl())


def comparable(frame: pl.DataFrame) -> list[tuple]:
    return sorted(frame.with_columns(pl.col(pl.Datetime).dt.epoch("us")).rows(), key=str)


def cut(frame: pl.DataFrame, parts: int, chance: random.Random) -> list[pl.DataFrame]:
    ends = sorted(chance.randrange(len(frame) + 1) for _ in range(parts - 1))
    return [
        frame[start:end].sample(fraction=1, shuffle=True, seed=chance.randrange(1 << 30))
        for start, end in zip([0, *ends], [*ends, len(frame)], strict=True)
    ]


def played(pipeline: Pipeline, slices: list[dict[str, pl.DataFrame]], **options) -> testing.PipelineRun:
    run = testing.run_pipeline(pipeline, (), schema=SCHEMAS, **options)
    run.handed = [run.epoch(some)["paid"] for some in slices] + [run.epoch(drain=True)["paid"]]
    return run


@pytest.mark.parametrize("seed", sampled(range(3)))
@pytest.mark.parametrize("how", sampled(JOINS, lambda how: how in ("left", "full", "anti")))
def test_a_join_is_duckdbs_whatever_the_slices_are(how, seed):
    chance = random.Random(seed)
    given = rows(seed, 300, chance.choice([5, 40, 300]))
    cuts = [cut(given[name], 6, chance) for name in ("orders", "payments")]
    slices = [dict(zip(("orders", "payments"), some, strict=True)) for some in zip(*cuts, strict=True)]
    # One side may be far ahead of the other: a row is late by the slower one.
    run = played(
        paid(how, lateness="10m"), slices, parallelism=chance.choice([1, 2, 3]), batch_rows=chance.choice([7, 10**6])
    )
    assert comparable(pl.concat(run.handed)) == truth(how, given)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def order(id: int | None, seconds: float, what: str = "tea") -> dict:
    return {"id": id, "at": at(seconds), "what": what, "price": 1.0}


def payment(id: int | None, seconds: float) -> dict:
    return {"order": id, "paid_at": at(seconds), "price": 2.0}


def ids(frame: pl.DataFrame) -> list[int]:
    return sorted(frame["id"].to_list())


def stored(run: testing.PipelineRun) -> int:
    """How many rows either side has in state."""
    return sum(row.left_rows + row.right_rows for row in run.states["paid"].values())


def test_rows_that_come_behind_the_slower_inputs_watermark_are_late_and_counted():
    run = testing.run_pipeline(paid(), schema=SCHEMAS)
    run.epoch({"orders": [order(1, 100)], "payments": [payment(9, 50)]})  # the watermark: 50
    out = run.epoch({"orders": [order(2, 49.9), order(3, 50)], "payments": [payment(2, 60), payment(3, 60)]})
    assert ids(out["paid"]) == [3]
    assert sum(ack.rows_late for ack in run.stages["paid"].acks) == 1


@pytest.mark.parametrize("how", sampled(["full", "semi", "inner"]))
def test_late_rows_of_either_side_go_to_the_late_table_and_all_others_are_joined(how):
    chance, given = random.Random(11), rows(11, 200, 20)
    order_of = {name: sorted(range(200), key=lambda row: row + chance.uniform(0, 60)) for name in given}
    slices = [
        {name: frame[order_of[name][start : start + 25]] for name, frame in given.items()}
        for start in range(0, 200, 25)
    ]
    run = played(paid(how, lateness="5s", late=delta.append("paid_late")), slices, parallelism=2)
    newest, on_time, late = {name: START - timedelta(days=1) for name in given}, {name: [] for name in given}, []
    for some in slices:
        watermark = min(newest.values()) - timedelta(seconds=5)
        for side_, name, time_ in (("left", "orders", "at"), ("right", "payments", "paid_at")):
            old = some[name].filter(pl.col(time_) < watermark)
            on_time[name].append(some[name].filter(pl.col(time_) >= watermark))
            nulls = (None,) * (2 if side_ == "left" else 3)
            late += [
                (row[0], side_, row[1], *row[1:], *nulls)
                if side_ == "left"
                else (row[0], side_, row[1], *nulls, *row[1:])
                for row in old.rows()
            ]
            newest[name] = max(newest[name], some[name][time_].max())
    assert {row[1] for row in late} == {"left", "right"}, "the test says nothing without late rows of both"
    assert comparable(run.tables["paid_late"]) == comparable(
        pl.DataFrame(late, run.tables["paid_late"].schema, orient="row")
    )
    columns = ["id", "side", "event_time", "at", "what", "price", "paid_at", "price_right"]
    assert run.tables["paid_late"].columns == columns
    assert comparable(pl.concat(run.handed)) == truth(how, {name: pl.concat(parts) for name, parts in on_time.items()})


def test_a_late_table_that_cannot_be_is_refused():
    with pytest.raises(PipelineError, match="no row of it is late"):
        paid(within=None, ttl=None, late=delta.append("paid_late"))
    with pytest.raises(PipelineError, match="no row of it is late"):
        paid(within=None, ttl=None, lateness="5s")
    sided = {**SCHEMAS, "payments": PAYMENTS.append(pa.field("side", pa.string()))}
    pipeline = paid(late=delta.append("paid_late"))
    with pytest.raises(PipelineError, match="would have two columns 'side'"):
        testing.run_pipeline(pipeline, [{"orders": [order(1, 0)]}], schema=sided)


def test_a_table_of_a_join_belongs_to_days_by_a_time_that_each_of_its_rows_has():
    columns = pa.schema([("id", pa.int64()), ("at", TIME), ("paid_at", TIME)])
    by_how = {how: paid(how, late=delta.append("paid_late")).event_time_of("paid", columns) for how in JOINS}
    assert by_how == {"inner": "at", "left": "at", "semi": "at", "anti": "at", "right": "paid_at", "full": None}
    late_columns = columns.append(pa.field("event_time", TIME))
    assert paid("full", late=delta.append("paid_late")).event_time_of("paid_late", late_columns) == "event_time"


def test_a_row_goes_once_no_partner_can_come_and_no_sooner():
    run = testing.run_pipeline(paid(), schema=SCHEMAS)
    run.epoch({"orders": [order(1, 100)], "payments": [payment(1, 130)]})
    run.epoch({"orders": [order(2, 130)]})  # the watermark: 130, until when payments of the first order may come
    assert ids(run.epoch({"payments": [payment(1, 130), payment(7, 131)]})["paid"]) == [1]
    run.epoch({"orders": [order(3, 131)]})
    assert 1 not in run.states["paid"] or run.states["paid"][1].left_rows == 0
    run.epoch({"orders": [order(5, 10_000)], "payments": [payment(5, 10_000)]})
    assert stored(run) == 2, "what is older than the watermark and the bounds has gone"
    run.epoch(drain=True)
    assert stored(run) == 0 and not run.states["paid"]


@pytest.mark.long
def test_state_stays_as_large_as_the_bounds_however_long_the_input_is():
    run, sizes = testing.run_pipeline(paid("full"), schema=SCHEMAS, parallelism=2), []
    for minute in range(30):
        seconds = [60 * minute + second for second in range(60)]
        some = {"orders": [order(s % 7, s) for s in seconds], "payments": [payment(s % 5, s + 0.5) for s in seconds]}
        run.epoch(some)
        sizes.append(stored(run))
    assert max(sizes[3:]) <= max(sizes[:3]) + 10


@pytest.mark.parametrize(("how", "wanted"), [("inner", [1, 1, 2]), ("semi", [1, 2])])
def test_without_bounds_rows_wait_for_their_ttl_by_processing_time(how, wanted):
    orders, payments = sources(False)
    joined = join("paid", orders, payments, on={"id": "order"}, ttl="10m", how=how, sink=delta.append("paid"))
    run = testing.run_pipeline(Pipeline("shop", (joined,)), schema=SCHEMAS)
    run.epoch({"orders": [order(1, 0), order(2, 0), order(3, 0)], "payments": [payment(1, 5)]}, now=at(0))
    run.epoch({"payments": [payment(1, 900), payment(2, 900)]}, now=at(599))
    run.epoch({"payments": [payment(1, 0), payment(3, 0)]}, now=at(600))  # by now the orders have gone
    assert ids(run.tables["paid"]) == wanted
    run.epoch({}, now=at(599 + 600))
    run.epoch({}, now=at(600 + 600))
    assert stored(run) == 0 and not run.states["paid"]


def test_without_end_each_row_finds_all_that_ever_came():
    orders, payments = sources(False)
    joined = join("paid", orders, payments, on={"id": "order"}, ttl=None, sink=delta.append("paid"))
    run = testing.run_pipeline(Pipeline("shop", (joined,)), schema=SCHEMAS)
    given = rows(3, 200, 9)
    chance = random.Random(3)
    for some in zip(cut(given["orders"], 4, chance), cut(given["payments"], 4, chance), strict=True):
        run.epoch(dict(zip(("orders", "payments"), some, strict=True)))
    assert len(run.tables["paid"]) == given["orders"].join(given["payments"], left_on="id", right_on="order").height


def test_a_stage_may_be_joined_with_what_it_reads_and_a_join_with_a_join():
    orders, payments = sources()
    unique = deduplicate("unique", orders, key="id", on="at", ttl="1d")
    first = join("first", unique, orders, on="id", within=("0s", "60s"), sink=delta.append("first"))
    second = join(
        "second",
        side(first, time="at_right"),
        payments,
        on={"id": "order"},
        within=("0s", "60s"),
        suffix="_paid",
        sink=delta.append("second"),
    )
    run = testing.run_pipeline(Pipeline("shop", (unique, first, second)), schema=SCHEMAS)
    run.epoch({"orders": [order(1, 0), order(1, 5), order(2, 6)], "payments": [payment(1, 7)]})
    run.epoch({"orders": [order(1, 20)], "payments": [payment(1, 30), payment(2, 31)]})
    run.epoch(drain=True)
    pairs = [(1, 0), (1, 5), (2, 6), (1, 20)]
    assert sorted(run.tables["first"].select("id", "at_right").rows()) == sorted((id, at(s)) for id, s in pairs)
    partners = [
        (id, p) for id, s in pairs for order_id, p in ((1, 7), (1, 30), (2, 31)) if id == order_id and 0 <= p - s <= 60
    ]
    assert sorted(run.tables["second"].select("id", "paid_at").rows()) == sorted((id, at(p)) for id, p in partners)


@pytest.mark.parametrize("trials", sampled([2, 6]))
def test_what_a_window_reads_from_a_join_is_never_late_and_comes_as_soon_as_it_can(trials):
    orders, payments = sources()
    joined = join("paid", orders, payments, on={"id": "order"}, within=("-30s", "30s"), how="left")
    counted = window("counted", joined, key="what", on="at", every="10s", n=agg.count(), sink=delta.append("counted"))
    pipeline = Pipeline("shop", (joined, counted))
    given = rows(11, 120, 20)
    testing.assert_slicing_does_not_matter(
        pipeline, {**given, "orders": given["orders"].drop_nulls("what")}, trials=trials
    )
    run = testing.run_pipeline(pipeline, schema=SCHEMAS)
    run.epoch({"orders": [order(1, 0), order(1, 100)], "payments": [payment(1, 10), payment(1, 100)]})
    # The join may still hand out rows from 30 s before its watermark on, and none before.
    assert run.tables["counted"]["window_end"].to_list() == [at(10)]


def test_an_input_that_is_quiet_for_long_holds_nothing_back():
    run = testing.run_pipeline(paid("left"), schema=SCHEMAS)
    run.epoch({"orders": [order(1, 0)], "payments": [payment(8, 0)]}, now=at(0))
    run.epoch({"orders": [order(2, 1000)]}, now=at(1))
    assert ids(run.tables["paid"]) == []
    run.epoch({"orders": [order(3, 1001)]}, now=at(301))  # five minutes without a payment
    assert ids(run.tables["paid"]) == [1]
    run.epoch({"payments": [payment(2, 1002)]}, now=at(302))
    assert ids(run.tables["paid"]) == [1, 2]


def test_rows_without_a_key_fail_the_epoch_or_are_dropped_and_counted():
    run = testing.run_pipeline(paid(), schema=SCHEMAS)
    with pytest.raises(InputError, match="1 row of a batch has no 'id'"):
        run.epoch({"orders": [order(None, 0)], "payments": [payment(1, 0)]})
    dropping = testing.run_pipeline(paid("full", null_keys="drop"), schema=SCHEMAS)
    dropping.epoch({"orders": [order(None, 0), order(1, 0)], "payments": [payment(None, 0)]})
    assert sum(ack.rows_null_key for ack in dropping.stages["paid"].acks) == 2


def test_a_column_of_the_right_side_may_be_called_like_a_key_of_the_left():
    bills = pa.schema([("bill", pa.int64()), ("id", pa.string()), ("at", TIME)])
    joined = join(
        "paid", sources()[0], files("bills/*", name="bills"), on={"id": "bill"}, ttl=None, sink=delta.append("paid")
    )
    run = testing.run_pipeline(Pipeline("shop", (joined,)), schema={"orders": ORDERS, "bills": bills})
    run.epoch({"orders": [order(1, 0), order(2, 0)], "bills": [{"bill": 1, "id": "b7", "at": at(3)}]})
    run.epoch({"bills": [{"bill": 2, "id": "b8", "at": None}]})
    kept = run.tables["paid"].select("id", "id_right", "at", "at_right")
    assert sorted(kept.rows()) == [(1, "b7", at(0), at(3)), (2, "b8", at(0), None)]


@pytest.mark.long
def test_one_key_with_very_many_partners_comes_some_at_a_time(monkeypatch):
    monkeypatch.setattr("weir.operators.joins.join.READ_ROWS", 7)
    monkeypatch.setattr("weir.operators.joins.join._PAIRS", 5)
    monkeypatch.setattr("weir.operators.joins.join.EVICTED", 3)
    given = rows(5, 60, 2, seconds=60)
    for how in JOINS:
        run = played(paid(how, lateness="10m"), [given])
        assert comparable(pl.concat(run.handed)) == truth(how, given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"how": "outer"}, "how='outer' is no way to join"),
        ({"within": None}, "does not say for how long its rows wait"),
        ({"within": ("30s", "-10s")}, "is no stretch of time"),
        ({"within": "5m"}, "within='5m' is no stretch of time.*\\n.*\\n.*from when to when"),
        ({"within": timedelta(minutes=5)}, "is no stretch of time"),
        ({"within": ("0s",)}, "is no stretch of time"),
        ({"within": (timedelta(0), timedelta.max)}, "is too long"),
        ({"within": (-timedelta(days=40_000), timedelta(0))}, "is too long"),
        ({"ttl": "1d"}, "says within=, by which rows are forgotten, and ttl="),
        ({"within": None, "ttl": None, "how": "left"}, "hands out rows that have no partner"),
    ],
)
def test_what_makes_no_join_is_refused_where_it_is_defined(change, message):
    with pytest.raises(PipelineError, match=message):
        paid(**change)


def test_columns_that_do_not_fit_are_refused_before_the_first_row():
    wrong = {**SCHEMAS, "payments": PAYMENTS.set(0, pa.field("order", pa.string()))}
    with pytest.raises(
        PipelineError, match="The key 'id' of paid is int64 in the source orders, and 'order' is string"
    ):
        testing.run_pipeline(paid(), [{"orders": [order(1, 0)]}], schema=wrong)
    missing = {**SCHEMAS, "payments": pa.schema([("paid_at", TIME)])}
    with pytest.raises(PipelineError, match="the source payments, has no column 'order'"):
        testing.run_pipeline(paid(), [{"orders": [order(1, 0)]}], schema=missing)
    with pytest.raises(PipelineError, match="The source payments has had no row yet"):
        testing.run_pipeline(paid(), [{"orders": [order(1, 0)]}], schema={"orders": ORDERS})


def test_stages_before_a_join_leave_no_rows_behind():
    orders, payments = sources()
    unique = deduplicate("unique", orders, key="id")
    totals = aggregate("totals", unique, key="id", n=agg.count())
    behind = aggregate("behind", unique, key="id", n=agg.count())
    joined = join("paid", totals, payments, on={"id": "order"}, ttl=None, sink=delta.append("paid"))
    pipeline = Pipeline("shop", (unique, totals, behind, joined))
    must = [stage.uid for stage in pipeline.stages if pipeline.must_finish(stage)]
    assert sorted(must) == ["paid", "totals", "unique"]


def test_all_that_a_join_keeps_of_a_key_is_found_when_the_key_is_forgotten():
    run = testing.run_pipeline(paid(), schema=SCHEMAS)
    run.epoch({"orders": [order(1, 0), order(2, 0), order(1, 1)], "payments": [payment(1, 2), payment(2, 2)]})
    for _, backend in run.stages["paid"].backends():
        key = ForgottenKey.of([pa.array([1])], run.pipeline.max_parallelism)
        assert len(list(key.entries(backend))) == 1 + 3 + 3, "its numbers, its rows, and when they go"
        left = MemoryBackend()
        assert copy_without(backend, left, key) == 7
        assert len(list(left.scan(b"", BEYOND))) == 1 + 2 + 2


@pytest.mark.parametrize("keys", [("0_id", "1_id"), ("1_id", "order"), ("0_id", "order")])
def test_a_key_that_is_called_like_a_column_on_its_way_comes_once(keys):
    left = pa.schema([(keys[0], pa.int64()), ("at", TIME)])
    right = pa.schema([(keys[1], pa.int64()), ("note", pa.string())])
    joined = join(
        "paid",
        files("orders/*", name="orders"),
        files("notes/*", name="notes"),
        on=dict([keys]),
        ttl=None,
        sink=delta.append("paid"),
    )
    run = testing.run_pipeline(Pipeline("shop", (joined,)), schema={"orders": left, "notes": right})
    run.epoch({"orders": [{keys[0]: 1, "at": at(0)}], "notes": [{keys[1]: 1, "note": "a"}]})
    assert run.tables["paid"].columns == [keys[0], "at", "note"] and run.tables["paid"].rows() == [(1, at(0), "a")]


ORDERS_HERE = files("{landing}/orders/*.parquet", name="orders", event_time="at")
PAYMENTS_HERE = files("{landing}/payments/*.parquet", name="payments", event_time="paid_at")


def site_of(root: Path, pipeline: Pipeline, **options: str) -> Site:
    site = Site(root, {"WEIR_SPARK__PARALLELISM": "2", **options}, pipeline, __name__)
    for name in ("orders", "payments"):
        (site.landing / name).mkdir(parents=True)
    return site


def land(site: Site, source: str, number: int, rows: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, SCHEMAS[source]), site.landing / source / f"{number}.parquet")


def ran(site: Site) -> list:
    return list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def table(site: Site, name: str) -> pl.DataFrame:
    return pl.read_delta(str(site.storage / "tables" / name))


@pytest.mark.parametrize("made", ["within", "ttl", "as_of"])
@pytest.mark.parametrize("key", sampled(["left", "right_rows", "left_key", "row", "matched", "until"], 3))
def test_a_key_may_be_called_like_what_state_has_of_either_side(key, made, tmp_path):
    options = {"within": {"within": ("0s", "1h")}, "ttl": {"ttl": "1d"}, "as_of": {}}[made]
    make = as_of if made == "as_of" else join
    joined = make("paid", ORDERS_HERE, PAYMENTS_HERE, on={key: "order"}, sink=delta.append("paid"), **options)
    site = site_of(tmp_path, Pipeline("shop", (joined,), max_parallelism=4))
    land(site, "payments", 1, [payment(1, 0), payment(2, 5)])
    orders = pa.Table.from_pylist([order(1, 0), order(2, 5)], ORDERS).rename_columns({"id": key})
    pq.write_table(orders, site.landing / "orders" / "1.parquet")
    ran(site)
    handed_out = table(site, "paid").select(key, "paid_at").sort(key).rows()
    assert handed_out == [(1, at(0)), (2, at(5))][: 1 if made == "as_of" else 2], "the second fact waits"
    (row,) = state_reader.get(site.pipeline, site.settings, "paid", ["2"])
    (kept,) = row["left_" if key in ("left", "right_rows") else "left"]
    assert row[key] == 2 and kept["row"]["at"] == at(5)
    tried = testing.run_pipeline(site.pipeline, [{"orders": orders}], schema={"payments": PAYMENTS})
    assert sorted(tried.states["paid"]) == [1, 2]


def test_rows_that_a_join_hands_out_later_are_not_late_behind_it_where_its_job_alone_tells_event_times(monkeypatch):
    planned = GivenSource.plan
    monkeypatch.setattr(GivenSource, "plan", lambda *given: replace(planned(*given), newest=None))
    orders, payments = sources()
    joined = join("paid", orders, payments, on={"id": "order"}, within=("-30s", "30s"), how="left")
    counted = window("counted", joined, key="what", on="at", every="10s", n=agg.count(), sink=delta.append("counted"))
    run = testing.run_pipeline(Pipeline("shop", (joined, counted)), schema=SCHEMAS)
    for part in range(4):
        seconds = [100 * part + 20 * place for place in range(5)]
        some = [order(1000 + second, second) for second in seconds]
        run.epoch({"orders": some, "payments": [payment(1, 100 * part + 99)]})
        assert sum(ack.rows_late for ack in run.stages["counted"].acks) == 0
    run.epoch(drain=True)
    assert run.tables["counted"]["n"].sum() == 20


@pytest.mark.long
def test_the_time_to_live_may_change_and_holds_for_rows_that_come_then(tmp_path):
    def kept(ttl: timedelta | None) -> Pipeline:
        return Pipeline(
            "shop",
            (
                join(
                    "paid",
                    ORDERS_HERE,
                    PAYMENTS_HERE,
                    on={"id": "order"},
                    ttl=ttl,
                    how="semi",
                    sink=delta.append("paid"),
                ),
            ),
        )

    site = site_of(tmp_path, kept(timedelta(seconds=1)))
    land(site, "payments", 0, [payment(99, 0)])
    for number, ttl in enumerate([None, timedelta(days=1), timedelta(seconds=1)]):
        site = replace(site, pipeline=kept(ttl))
        assert not [finding for finding in plan(site.pipeline, site.settings).findings if finding.verdict.stops]
        land(site, "orders", number, [order(1, number, str(ttl)), order(number + 2, number)])
        ran(site)
    time.sleep(1.1)
    site = replace(site, pipeline=kept(None))
    land(site, "payments", 1, [payment(id, 9) for id in (1, 2, 3, 4)])
    ran(site)
    assert ids(table(site, "paid")) == [1, 1, 2, 3], "those that had a second have gone"
    land(site, "payments", 2, [payment(1, 10)])
    land(site, "orders", 9, [order(1, 11)])
    ran(site)
    assert ids(table(site, "paid")) == [1, 1, 1, 2, 3]


def test_sides_that_have_changed_places_are_noticed_also_where_their_columns_are_the_same(tmp_path):
    def moves(swapped: bool = False, **more) -> Pipeline:
        both = [files(f"{{landing}}/{name}/*.parquet", name=name, event_time="at") for name in ("orders", "payments")]
        left, right = reversed(both) if swapped else both
        return Pipeline(
            "shop", (join("paid", left, right, on="id", within=("0s", "9s"), sink=delta.append("paid"), **more),)
        )

    def refused(pipeline: Pipeline) -> list[str]:
        return [finding.what for finding in plan(pipeline, site.settings).findings if finding.verdict.stops]

    site = site_of(tmp_path, moves())
    for name in ("orders", "payments"):
        pq.write_table(pa.Table.from_pylist([{"id": 1, "at": at(0)}]), site.landing / name / "0.parquet")
    ran(site)
    assert not refused(moves())
    assert refused(moves(swapped=True)) == [
        "the source payments was the right side, and is the left one, while state has rows of each side",
        "the source orders was the left side, and is the right one, while state has rows of each side",
    ]
    suffixed = "the right side's column at was handed out as at_right, and would now be as at_paid"
    assert suffixed in refused(moves(suffix="_paid"))
    with pytest.raises(PipelineError, match="was the right side, and is the left one"):
        pq.write_table(pa.Table.from_pylist([{"id": 1, "at": at(1)}]), site.landing / "orders" / "1.parquet")
        ran(replace(site, pipeline=moves(swapped=True)))


def test_an_input_without_rows_is_known_by_the_columns_that_its_source_says(tmp_path):
    declared = {"id": pa.int64(), "at": TIME}
    orders = files("{landing}/orders/*.csv", name="orders", event_time="at", format="csv", schema=declared)
    unique = deduplicate("unique", orders, key="id")
    twice = deduplicate("twice", unique, key="id")
    joined = join("paid", twice, PAYMENTS_HERE, on={"id": "order"}, within=("-30s", "30s"), sink=delta.append("paid"))
    site = site_of(tmp_path, Pipeline("shop", (unique, twice, joined)))
    land(site, "payments", 0, [payment(1, 0)])
    ran(site)
    pl.DataFrame({"id": [1], "at": ["2026-01-01T00:00:01Z"]}).write_csv(site.landing / "orders" / "0.csv")
    ran(site)
    assert table(site, "paid").select("id", "at", "paid_at").rows() == [(1, at(1), at(0))]


def test_columns_that_come_on_one_side_are_null_in_rows_from_before_and_take_no_name(tmp_path):
    orders, payments = (replace(source, evolve="add") for source in (ORDERS_HERE, PAYMENTS_HERE))
    sink = delta.append("paid", evolve="add")
    joined = join("paid", orders, payments, on={"id": "order"}, within=("-30s", "30s"), how="full", sink=sink)
    site = site_of(tmp_path, Pipeline("shop", (joined,)))

    def put(number: int, order: dict, payment: dict) -> None:
        for name, row in (("orders", order), ("payments", payment)):
            pq.write_table(pa.Table.from_pylist([row]), site.landing / name / f"{number}.parquet")

    put(0, {"id": 1, "at": at(0), "b": "x"}, {"order": 9, "paid_at": at(0)})
    ran(site)
    put(1, {"id": 2, "a": 7, "at": at(1), "b": "y"}, {"order": 1, "paid_at": at(2), "z": [1]})
    ran(site)
    put(2, {"id": 3, "at": at(3), "a": 8, "b": None}, {"order": 2, "paid_at": at(3), "z": None})
    ran(site)
    wanted = [(1, "x", None, [1]), (2, "y", 7, None)]
    assert sorted(table(site, "paid").select("id", "b", "a", "z").rows(), key=str) == wanted
    put(3, {"id": 1, "at": at(4), "z": [4]}, {"order": 1, "paid_at": at(5), "z": [5]})
    what = "the right side's column z was handed out as z, and would now be as z_right"
    assert what in [finding.what for finding in plan(site.pipeline, site.settings).findings if finding.verdict.stops]
    with pytest.raises(PipelineError, match=what):
        ran(site)
    assert sorted(table(site, "paid").select("id", "b", "a", "z").rows(), key=str) == wanted


@pytest.mark.parametrize("whose", ["both", "one", "itself"])
def test_bad_rows_of_each_side_go_to_a_table_of_their_own(tmp_path, whose):
    columns = {"orders": {"id": pa.int64(), "at": TIME}, "payments": {"order": pa.int64(), "paid_at": TIME}}
    left, right = (
        files(
            f"{{landing}}/{name}/*.json", name=name, format="json", schema=schema,
            on_bad="quarantine" if whose == "both" or name == "orders" else "fail",
        )
        for name, schema in columns.items()
    )  # fmt: skip
    on = {"id": "order"} if whose != "itself" else "id"
    joined = join("paid", left, right if whose != "itself" else left, on=on, ttl=None, sink=delta.append("paid"))
    site = site_of(tmp_path, Pipeline("shop", (joined,)))
    for number, bad in enumerate(["", "no json\n"]):
        orders = f'{{"id": {number}, "at": "2026-01-01T00:00:00Z"}}\n{bad}'
        payments = f'{{"order": {number}, "paid_at": "2026-01-01T00:00:00Z"}}\n{bad if whose == "both" else ""}{bad}'
        (site.landing / "orders" / f"{number}.json").write_text(orders)
        if whose == "both" or whose == "one":
            (site.landing / "payments" / f"{number}.json").write_text(
                payments if whose == "both" else payments.replace(bad, "") if bad else payments
            )
        (report,) = ran(site)
        assert not [finding for finding in plan(site.pipeline, site.settings).findings if finding.verdict.stops]
    wanted = {"both": {"orders": 1, "payments": 2}, "one": {"orders": 1}, "itself": {"orders": 1}}[whose]
    tables = {path.name for path in (site.storage / "tables").iterdir()}
    assert tables == {"paid", *(f"paid_{name}_quarantine" for name in wanted)}
    for name, count in wanted.items():
        aside = table(site, f"paid_{name}_quarantine")
        assert aside["_weir_raw"].to_list() == ["no json"] * count and set(aside["_weir_file"]) == {"1.json"}
    assert report.checkpoint.operators["paid"].rows_quarantined == sum(wanted.values())
    assert ids(table(site, "paid")) == [0, 1]


def test_rows_that_another_stages_gate_sets_aside_are_none_that_a_join_has_dropped(tmp_path):
    gate = expect(
        "ExpectColumnValuesToBeBetween", column="price", min_value=0, on_failure="quarantine", quarantine_at_most=0.9
    )
    unique = deduplicate("unique", ORDERS_HERE, key="id", sink=delta.append("unique"), gate=gate)
    left = side(ORDERS_HERE, where="id <> 3")
    joined = join("paid", left, PAYMENTS_HERE, on={"id": "order"}, ttl=None, sink=delta.append("paid"))
    site = site_of(tmp_path, Pipeline("shop", (unique, joined)))
    land(site, "orders", 0, [{**order(1, 0), "price": -1.0}, order(2, 0), order(3, 0)])
    land(site, "payments", 0, [payment(1, 0), payment(2, 0)])
    (report,) = ran(site)
    figures = report.checkpoint.operators["paid"]
    assert (figures.rows_in, figures.rows_dropped, ids(table(site, "paid"))) == (3, 1, [2])
