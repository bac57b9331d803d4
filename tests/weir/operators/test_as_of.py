"""As-of joins against DuckDB and Polars: rows out of order, slices of random size, and what state keeps."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from state_ops.errors import InputError, PipelineError
from tests.tools.sampling import sampled
from tests.weir.operators.test_join import comparable, cut, ran, site_of, table
from weir import Pipeline, agg, as_of, delta, files, side, testing, window
from weir.operations.plan import plan
from weir.operators.joins import as_of as operator

START = datetime(2026, 1, 1, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")
SCHEMAS = {
    "payments": pa.schema([("id", pa.int64()), ("at", TIME), ("amount", pa.int64())]),
    "rates": pa.schema([("of", pa.int64()), ("since", TIME), ("rate", pa.int64())]),
}
PAYMENTS = files("{landing}/orders/*.parquet", name="payments", event_time="at")
RATES = files("{landing}/payments/*.parquet", name="rates", event_time="since")


def pipeline(**more) -> Pipeline:
    rated = as_of("rated", PAYMENTS, RATES, on={"id": "of"}, sink=delta.append("rated"), **more)
    return Pipeline("shop", (rated,))


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def payment(id: int, seconds: float, amount: int = 1) -> dict:
    return {"id": id, "at": at(seconds), "amount": amount}


def rate(of: int, seconds: float, rate: int = 1) -> dict:
    return {"of": of, "since": at(seconds), "rate": rate}


def rows(seed: int, number: int, keys: int, seconds: int = 600) -> dict[str, pl.DataFrame]:
    """Rates have times of their own, and some are those of payments."""
    chance = random.Random(seed)
    times = chance.sample(range(seconds * 1000), number)
    rates = [rate(chance.randrange(keys), time / 1000, place) for place, time in enumerate(times)]
    moments = [chance.choice([time / 1000, chance.uniform(0, seconds)]) for time in times]
    payments = [payment(chance.randrange(keys), moment, place) for place, moment in enumerate(moments)]
    return {
        "payments": pl.from_arrow(pa.Table.from_pylist(payments, SCHEMAS["payments"])).sort("at"),
        "rates": pl.from_arrow(pa.Table.from_pylist(rates, SCHEMAS["rates"])).sort("since"),
    }


def truth(how: str, given: dict[str, pl.DataFrame], tolerance: timedelta | None = None) -> list[tuple]:
    payments, rates = given["payments"], given["rates"]
    if tolerance is not None:
        joined = payments.join_asof(
            rates.with_columns(kept=pl.col("since")),
            left_on="at",
            right_on="kept",
            by_left="id",
            by_right="of",
            tolerance=tolerance,
            check_sortedness=False,
        )
        joined = joined.select("id", "at", "amount", "since", "rate")
        return comparable(joined.filter(pl.col("since").is_not_null()) if how == "inner" else joined)
    with duckdb.connect() as db:
        db.sql("SET TimeZone = 'UTC'")
        sql = f"FROM payments p ASOF {how} JOIN rates r ON p.id = r.of AND p.at >= r.since"
        return comparable(db.sql(f"SELECT p.id, p.at, p.amount, r.since, r.rate {sql}").pl())


@pytest.mark.parametrize("seed", sampled(range(8)))
def test_it_is_duckdbs_and_polars_whatever_the_slices_are(seed, monkeypatch):
    chance = random.Random(seed)
    monkeypatch.setattr(operator, "EVICTED", chance.choice([1, 3, 17, 50_000]))
    monkeypatch.setattr(operator, "READ_ROWS", chance.choice([1, 5, 100_000]))
    how, keys = chance.choice(["left", "inner"]), chance.choice([1, 5, 40])
    tolerance = chance.choice([None, timedelta(seconds=chance.choice([0, 2, 60]))])
    given, parts = rows(seed, 150, keys), chance.randint(1, 9)
    asked = pipeline(how=how, tolerance=tolerance, lateness="10m")
    run = testing.run_pipeline(
        asked, parallelism=chance.randint(1, 4), batch_rows=chance.choice([1, 7, 1000]), schema=SCHEMAS
    )
    for slices in zip(*(cut(frame, parts, chance) for frame in given.values()), strict=True):
        run.epoch(dict(zip(given, slices, strict=True)))
    run.epoch(drain=True)
    assert comparable(run.tables["rated"]) == truth(how, given, tolerance)
    assert sum(ack.rows_late for ack in run.stages["rated"].acks) == 0


@pytest.mark.parametrize("seed", sampled([1, 0, 2, 3]))
def test_what_is_forgotten_is_missed_by_nobody(seed, monkeypatch):
    """Rows in order of time, epoch by epoch: the watermark follows, and state keeps what facts to come may need."""
    chance = random.Random(seed)
    monkeypatch.setattr(operator, "EVICTED", chance.choice([2, 5, 50_000]))
    given, tolerance = rows(seed, 300, 4, 3000), [None, timedelta(seconds=100)][seed % 2]
    run = testing.run_pipeline(pipeline(tolerance=tolerance), parallelism=2, schema=SCHEMAS)
    ends = [at(100 * number) for number in range(1, 31)]
    most = 0
    for begin, end in zip([at(0), *ends], ends, strict=False):
        run.epoch(
            {
                "payments": given["payments"].filter(pl.col("at").is_between(begin, end, closed="left")),
                "rates": given["rates"].filter(pl.col("since").is_between(begin, end, closed="left")),
            }
        )
        kept = run.stages["rated"].state.values()
        most = max(most, sum(state.right_rows for state in kept))
        assert sum(len(state.right) for state in kept) == sum(state.right_rows for state in kept)
    assert most < 40, "of 300 versions those of the last hundred seconds, and one for each of four keys"
    run.epoch(drain=True)
    assert comparable(run.tables["rated"]) == truth("left", given, tolerance)


@pytest.mark.parametrize("trials", sampled([2, 4]))
def test_slicing_does_not_matter_also_where_versions_have_one_time(trials):
    chance = random.Random(1)
    given = {
        "payments": [payment(chance.randrange(3), chance.randrange(20), number) for number in range(60)],
        "rates": [rate(chance.randrange(3), chance.randrange(20), number % 11) for number in range(60)],
    }
    asked = pipeline(lateness="1m", tolerance="5s")
    testing.assert_slicing_does_not_matter(asked, given, schema=SCHEMAS, trials=trials)
    with pytest.raises(PipelineError, match="wait for no version"):
        testing.assert_slicing_does_not_matter(pipeline(wait=False), given, schema=SCHEMAS)


def test_a_fact_comes_once_no_version_can_come_for_it_and_no_sooner():
    run = testing.run_pipeline(pipeline(), schema=SCHEMAS)
    assert run.epoch({"payments": [payment(1, 10)], "rates": [rate(1, 5, 50)]})["rated"].height == 0
    assert run.epoch({"payments": [payment(2, 30)], "rates": [rate(1, 10, 60)]})["rated"].height == 0, "another may"
    (row,) = run.epoch({"payments": [payment(2, 31)], "rates": [rate(2, 11)]})["rated"].to_dicts()
    assert (row["id"], row["rate"], row["since"]) == (1, 60, at(10)), "a version holds from its time on"


def test_without_waiting_a_fact_comes_in_its_epoch_with_what_has_come():
    run = testing.run_pipeline(pipeline(wait=False), schema=SCHEMAS)
    first = run.epoch({"payments": [payment(1, 10), payment(2, 10)], "rates": [rate(1, 5, 50)]})["rated"]
    assert sorted(first.select("id", "rate").rows()) == [(1, 50), (2, None)]
    second = run.epoch({"payments": [payment(1, 10), payment(1, 70)], "rates": [rate(1, 10, 60), rate(1, 80, 70)]})
    assert sorted(second["rated"].select("at", "rate").rows()) == [(at(10), 60), (at(70), 60)]
    third = run.epoch({"payments": [payment(1, 90)], "rates": []})["rated"]
    assert third["rate"].to_list() == [70]
    assert run.stages["rated"].state[1].right_rows == 1, "facts to come are not older than 80"
    assert run.epoch(drain=True)["rated"].height == 0


def test_late_facts_are_counted_and_a_late_version_holds_for_facts_to_come(tmp_path):
    run = testing.run_pipeline(pipeline(late=delta.append("late")), schema=SCHEMAS)
    run.epoch({"payments": [payment(9, 100)], "rates": [rate(9, 100)]})
    out = run.epoch({"payments": [payment(1, 50), payment(1, 150)], "rates": [rate(1, 40, 7), rate(9, 200)]})
    assert out["late"].select("side", "at", "since").rows() == [("left", at(50), None), ("right", None, at(40))]
    assert sum(ack.rows_late for ack in run.stages["rated"].acks) == 2
    out = run.epoch({"payments": [payment(9, 300)], "rates": [rate(1, 30, 6), rate(9, 300)]})
    assert out["rated"].filter(pl.col("id") == 1).select("at", "rate").rows() == [(at(150), 7)]
    assert run.stages["rated"].state[1].right_rows == 1, "the older of two late ones is of no use"


@pytest.mark.long
def test_a_window_behind_it_finds_no_row_late():
    rated = as_of("rated", PAYMENTS, RATES, on={"id": "of"}, lateness="2s")
    sums = window("sums", rated, key="id", on="at", every="10s", n=agg.count(), sink=delta.append("sums"))
    given = rows(3, 200, 4)
    run = testing.run_pipeline(Pipeline("shop", (rated, sums)), parallelism=2, schema=SCHEMAS)
    for number in range(12):
        begin, end = at(50 * number), at(50 * number + 50)
        run.epoch(
            {
                "payments": given["payments"].filter(pl.col("at").is_between(begin, end, closed="left")),
                "rates": given["rates"].filter(pl.col("since").is_between(begin, end, closed="left")),
            }
        )
        assert sum(ack.rows_late for stage in run.stages.values() for ack in stage.acks) == 0
    run.epoch(drain=True)
    assert run.tables["sums"]["n"].sum() == 200


def test_definitions_that_make_no_sense_are_refused():
    for changes in ({"how": "full"}, {"tolerance": "soon"}, {"on": {"at": "of"}}, {"on": {"id": "since"}}, {"on": []}):
        with pytest.raises(PipelineError):
            as_of("rated", PAYMENTS, RATES, **{"on": {"id": "of"}, **changes})
    with pytest.raises(PipelineError, match="Nothing would ever say which version holds"):
        as_of("rated", PAYMENTS, files("x/*.parquet"), on="id")
    renamed = as_of("rated", side(PAYMENTS, time="paid"), RATES, on={"id": "of"})
    with pytest.raises(PipelineError, match="has no column 'paid'"):
        testing.run_pipeline(Pipeline("shop", (renamed,)), [{"payments": [payment(1, 1)]}], schema=SCHEMAS)


def test_a_version_without_a_time_is_told_as_one_of_this_stage():
    run = testing.run_pipeline(pipeline(), schema=SCHEMAS)
    with pytest.raises(InputError, match=r"1 row has no event time in 'since'.\n  where: as_of rated"):
        run.epoch({"rates": [{**rate(1, 0), "since": None}]})


def test_what_its_state_means_may_not_change_and_another_parallelism_goes_on(tmp_path):
    site, given = site_of(tmp_path, pipeline(tolerance="1m")), rows(5, 60, 4)
    for number, parallelism in enumerate(("2", "3", "1")):
        site = replace(site, options={**site.options, "WEIR_SPARK__PARALLELISM": parallelism})
        for directory, name, time in (("orders", "payments", "at"), ("payments", "rates", "since")):
            some = given[name].filter(pl.col(time).is_between(at(200 * number), at(200 * number + 200), closed="left"))
            some.write_parquet(site.landing / directory / f"{number}.parquet")
        ran(site)
    for changes in ({"tolerance": "2m"}, {"how": "inner", "tolerance": "1m"}, {}):
        assert plan(pipeline(**changes), site.settings).stops
    for changes in ({"wait": False}, {"lateness": "5m"}):
        assert not plan(pipeline(tolerance="1m", **changes), site.settings).stops
    late = [{"id": 9, "at": at(1000), "amount": 0}], [{"of": 9, "since": at(1000), "rate": 0}]
    for directory, some, schema in zip(("orders", "payments"), late, SCHEMAS.values(), strict=True):
        pl.from_arrow(pa.Table.from_pylist(some, schema)).write_parquet(site.landing / directory / "3.parquet")
    ran(site)
    assert comparable(table(site, "rated")) == truth("left", given, timedelta(minutes=1))
