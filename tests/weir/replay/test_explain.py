"""Where a row came from: the rows that are named are those of the input files that made it, as SQL over these says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from state_ops.errors import ConfigurationError, WeirError
from tests.recovery import shop as shops
from tests.recovery import small, test_upserts
from tests.recovery.shop import Shop
from tests.recovery.small import Bank
from tests.tools.stages import altered
from tests.weir.replay.test_debug import RETAINED, bank_of, digests
from tests.weir.rides import Rides
from weir import (
    Epoch,
    Pipeline,
    ValueState,
    agg,
    aggregate,
    debugging,
    delta,
    expect,
    files,
    join,
    kafka,
    select,
    stage,
    union,
    window,
)
from weir.debugging import Certainty, Explained
from weir.inspection import state_reader
from weir.operations import forks


def explain(of, table: str, row: str) -> Explained:
    return debugging.explain(of.site.pipeline, table, row, settings=of.site.settings)


def said(seen: Explained, certainty: Certainty) -> str:
    return "\n".join(statement.what for statement in seen.statements if statement.certainty is certainty)


def origins(seen: Explained) -> set[tuple[str, int]]:
    """File and number of all input rows."""
    assert seen.trace is not None
    rows = [contribution.rows.select("_file", "_row") for contribution in seen.trace.contributions]
    return set(pl.concat(rows).rows())


def in_files(folder: Path, condition: str) -> set[tuple[str, int]]:
    query = f"SELECT filename, file_row_number FROM read_parquet('{folder}/*.parquet', file_row_number=true, filename=true) WHERE {condition}"  # fmt: skip
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return {(Path(name).name, number) for name, number in connection.execute(query).fetchall()}


def test_a_row_of_an_append_table_comes_from_its_epoch(tmp_path):
    bank = bank_of(tmp_path, small.pipeline, 1, 2, 3)
    before = digests(bank.site.storage)
    seen = explain(bank, "booked", "id = 'k3' AND amount = 2")
    assert (seen.row.values, seen.row.matches) == ({"id": "k3", "at": 3, "amount": 2}, 1)
    assert (seen.origin.epoch, seen.origin.recorded, seen.stage) == (2, True, "accounts")
    assert seen.played.is_same and seen.played.before["total"].to_list() == [1]
    assert origins(seen) == {("00001.parquet", 3), ("00002.parquet", 3)}, "all that made its key's state"
    assert "hands out this row" in said(seen, Certainty.KNOWN)
    assert re.search(r"version \d+ of the table published rows of epoch 2", said(seen, Certainty.KNOWN))
    assert not said(seen, Certainty.UNKNOWN)
    assert digests(bank.site.storage) == before


def test_a_window_comes_from_the_rows_within_its_bounds(rides_run):
    table = pl.read_delta(str(rides_run.site.storage / "tables" / "hourly"))
    row = table.filter(rider="r0").sort("window_start", "city").row(-1, named=True)
    condition = f"rider = '{row['rider']}' AND city = '{row['city']}'"
    start = row["window_start"].strftime("%Y-%m-%d %H:%M:%S")
    seen = explain(rides_run, "hourly", f"{condition} AND window_start = TIMESTAMP '{start}'")
    assert seen.row.values == row
    assert origins(seen) == in_files(
        rides_run.site.landing, f"{condition} AND \"at\" >= '{row['window_start']}' AND \"at\" < '{row['window_end']}'"
    )
    assert len(origins(seen)) == row["n"]
    assert "within the window" in said(seen, Certainty.INFERRED), "the key has had state since before epoch 4"
    assert "hands out this row" in said(seen, Certainty.KNOWN)


def test_a_session_comes_from_all_rows_since_it_began(rides_run):
    table = pl.read_delta(str(rides_run.site.storage / "tables" / "trips"))
    row = table.filter(rider="r0-1").sort("window_start").row(-1, named=True)
    start = row["window_start"].strftime("%Y-%m-%d %H:%M:%S")
    seen = explain(rides_run, "trips", f"rider = 'r0-1' AND window_start = TIMESTAMP '{start}'")
    expected = in_files(
        rides_run.site.landing,
        f"rider = 'r0-1' AND \"at\" >= '{row['window_start']}' AND \"at\" < '{row['window_end']}'",
    )
    assert origins(seen) <= expected and seen.played is not None
    assert (origins(seen) == expected) or said(seen, Certainty.UNKNOWN)


def test_what_is_not_retained_is_said_to_be_unknown(rides_run):
    table = pl.read_delta(str(rides_run.site.storage / "tables" / "rides"))
    old = table.filter(pl.col("ride") < 3000, pl.col("ride") > 2000).row(0, named=True)
    seen = explain(rides_run, "rides", f"ride = {old['ride']}")
    assert (seen.origin.epoch, seen.origin.recorded, seen.played) == (2, False, None)
    assert "epoch 2" in said(seen, Certainty.INFERRED) and "not retained" in said(seen, Certainty.UNKNOWN)
    newer = table.filter(pl.col("ride") > 8000, pl.col("rider") == "r0").row(0, named=True)
    seen = explain(rides_run, "rides", f"ride = {newer['ride']}")
    assert seen.played is not None and "there may be more" in said(seen, Certainty.INFERRED)
    assert "the epochs 2 to 4" in said(seen, Certainty.UNKNOWN)


def test_a_joined_row_comes_from_the_rows_of_both_sides_through_the_stage_before(tmp_path):
    shop = Shop.at(tmp_path, shops.pipeline_of("inner"))
    for day in (1, 2):
        shop.run(day)
    row = shop.table("paid").sort("seq").row(-1, named=True)
    seen = explain(shop, "paid", f"seq = {row['seq']} AND price = {row['price']}")
    assert seen.row.values["id"] == row["id"]
    joined = pl.concat([contribution.rows for contribution in seen.trace.contributions], how="diagonal_relaxed")
    assert set(joined["_input"]) == {"unique", "payments"}
    payments = joined.filter(pl.col("_input") == "payments")
    assert set(payments.select("_file", "_row").rows()) == in_files(
        shop.site.landing / "payments", f'"order" = {row["id"]}'
    )
    orders = {(name, number) for trace in seen.trace.before for contribution in trace.contributions
              for name, number in contribution.rows.select("_file", "_row").rows()}  # fmt: skip
    assert orders <= in_files(shop.site.landing / "orders", f"id = {row['id']}") and orders
    assert "of both sides" in said(seen, Certainty.KNOWN) + said(seen, Certainty.INFERRED)


def test_a_row_is_traced_through_stages_without_a_key(tmp_path):
    landing = small.SOURCE
    more = select("more", landing, "id", "amount + 1 AS amount", where="amount > 0")
    same = select("same", landing, "id", "amount")
    both = union("both", more, same)
    sums = aggregate("sums", both, key="id", total=agg.sum("amount"), sink=delta.append("sums"))
    bank = bank_of(tmp_path, Pipeline("small", (more, same, both, sums), max_parallelism=8), 1, 2)
    seen = explain(bank, "sums", "id = 'k3' AND total = 8")
    (united,) = seen.trace.before
    assert united.stage == "both" and [source.stage for source in united.before] == ["more", "same"]
    for source, amounts in zip(united.before, ([2, 3], [1, 2]), strict=True):
        rows = pl.concat([contribution.rows for contribution in source.contributions])
        assert rows["id"].to_list() == ["k3", "k3"] and rows["amount"].to_list() == amounts
        assert rows.select("_file", "_row").rows() == [("00001.parquet", 3), ("00002.parquet", 3)]
    assert not said(seen, Certainty.UNKNOWN)


@pytest.mark.parametrize(
    ("columns", "condition"),
    [(("amount AS at", "`at` AS amount"), "amount = 2"), (("*",), '"at" = 2'), (("amount + 0L AS at", "amount"), None)],
)
def test_a_row_is_traced_by_the_columns_that_a_select_has_renamed(tmp_path, columns, condition):
    first = select("first", small.SOURCE, "at", "amount")
    second = select("second", first, *columns)
    sums = aggregate("sums", second, key="at", n=agg.count(), sink=delta.append("sums"))
    bank = bank_of(tmp_path, Pipeline("small", (first, second, sums), max_parallelism=8), 1, 2, 3)
    seen = explain(bank, "sums", "at = 2")
    (renaming,) = seen.trace.before
    rows = pl.concat(
        contribution.rows for trace in renaming.before for contribution in trace.contributions
    ) if renaming.before else None  # fmt: skip
    assert (rows is None) == (condition is None)
    if condition is None:
        assert renaming.unknown == ("rows of first: second makes at of other columns",)
    else:
        assert set(rows.select("_file", "_row").rows()) == in_files(bank.site.landing, condition)


@pytest.mark.parametrize(
    ("columns", "key", "is_traced"),
    [
        (["id AS who", "total"], "who", True),
        (["*", "total + 0L AS who"], "id", True),
        (["regexp_extract(id, '^(.*)', 1) AS id", "total"], "id", False),
    ],
)
@pytest.mark.parametrize("before", ["with a key", "without a key"])
def test_a_row_is_traced_through_the_columns_that_a_stage_makes_first(tmp_path, before, columns, key, is_traced):
    first = select("first", small.SOURCE, "id", "amount AS total")
    if before == "with a key":
        first = aggregate("first", small.SOURCE, key="id", total=agg.sum("amount"))
    last = aggregate("last", first, select=columns, key=key, n=agg.count(), sink=delta.append("last"))
    bank = bank_of(tmp_path, Pipeline("small", (first, last), max_parallelism=8), 1, 2)
    seen = explain(bank, "last", f"{key} = 'k3' AND n = 2")
    assert [contribution.rows.height for contribution in seen.trace.contributions] == [1, 1]
    traced = [contribution.rows for trace in seen.trace.before for contribution in trace.contributions]
    places = [rows.select("_file", "_row").rows() for rows in traced]
    assert places == ([[("00001.parquet", 3)], [("00002.parquet", 3)]] if is_traced else [])
    assert bool(seen.trace.unknown) != is_traced
    assert "2 input rows with the key came in the epochs 1, 2: these are all" in said(seen, Certainty.KNOWN)


def test_what_is_known_of_a_row_is_said_although_its_key_cannot_be_followed(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise WeirError("The storage takes no hold.", where="here", next="Ask for the right to write it.")

    bank = Bank.at(tmp_path, **RETAINED)
    bank.epochs(1, 2)
    monkeypatch.setattr(state_reader, "history", refused)
    seen = explain(bank, "booked", "id = 'k3'")
    assert seen.trace is None and seen.played is not None and seen.origin.epoch is not None
    assert "which rows made the key's state: The storage takes no hold." in said(seen, Certainty.UNKNOWN)


def as_texts(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
    return rows.with_columns(pl.col("at").cast(pl.String))


def test_a_row_whose_key_column_is_of_another_type_before_is_not_traced_there(tmp_path):
    first = select("first", small.SOURCE, "at", "amount")
    texts = stage("texts", source=first, key=None)(as_texts)
    sums = aggregate("sums", texts, key="at", total=agg.sum("amount"), sink=delta.append("sums"))
    bank = bank_of(tmp_path, Pipeline("small", (first, texts, sums), max_parallelism=8), 1)
    (before,) = explain(bank, "sums", "at = '3'").trace.before
    unknown = "rows of first in epoch 1: its at is of another type there"
    assert (before.stage, before.contributions, before.unknown) == ("texts", (), (unknown,))


def test_both_sides_of_a_stage_that_is_joined_with_itself_are_traced(tmp_path):
    bank = Bank(Bank.at(tmp_path, **RETAINED).site)
    bank.site.landing.mkdir(parents=True)
    rows = pa.table({"id": ["a", "b"], "other": ["b", "a"], "n": [1, 2]})
    pq.write_table(rows, bank.site.landing / "1.parquet")
    plain = select("plain", small.SOURCE, "id", "other", "n")
    pairs = join("pairs", plain, plain, on={"id": "other"}, ttl="1d", sink=delta.append("pairs"))
    bank = Bank(replace(bank.site, pipeline=Pipeline("small", (plain, pairs), max_parallelism=8)))
    bank.epochs()
    seen = explain(bank, "pairs", "id = 'a'")
    assert [before.contributions[0].rows["n"].to_list() for before in seen.trace.before] == [[1], [2]]


@pytest.mark.parametrize(("key", "why"), [(None, "a null is no key"), ("much", "'much' is no int64")])
def test_what_a_function_hands_out_for_a_key_need_be_none(tmp_path, key, why):
    def hands_out(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
        return rows.select("id", "at", amount=pl.lit(key, pl.String))

    by_amount = altered(small.accounts, key=("amount",), function=hands_out)
    bank = bank_of(tmp_path, Pipeline("small", (by_amount,), max_parallelism=8), 1, 2)
    seen = explain(bank, "booked", "id = 'k3'")
    assert f"the row's key: {why}" in said(seen, Certainty.UNKNOWN) and "of its subtask is shown" in said(
        seen, Certainty.UNKNOWN
    )
    assert seen.trace is None and "k3" in seen.played.rows["id"].to_list()


@pytest.mark.parametrize(
    "keys",
    [
        pa.array([b"a", b"\x00\xff"]),
        pa.array([False, True]),
        pa.array([datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)]),
        pa.array([Decimal("1.50"), Decimal("22.75")]),
    ],
    ids=["bytes", "booleans", "times", "decimals"],
)
def test_a_key_that_is_no_text_is_found_again(tmp_path, keys):
    bank = Bank(Bank.at(tmp_path, **RETAINED).site)
    bank.site.landing.mkdir(parents=True)
    for number in (1, 2):
        rows = pa.table({"id": keys, "at": [number, number], "amount": [1, 2]})
        pq.write_table(rows, bank.site.landing / f"{number}.parquet")
        bank.epochs()
    seen = explain(bank, "booked", "amount = 2 AND at = 2")
    assert (seen.origin.epoch, seen.row.values["id"]) == (2, keys[1].as_py())
    assert origins(seen) == {("1.parquet", 1), ("2.parquet", 1)}
    assert not said(seen, Certainty.UNKNOWN)


def test_a_row_of_an_upsert_comes_from_the_newest_epoch_that_had_its_key(tmp_path):
    bank = bank_of(tmp_path, test_upserts.pipeline, 1, 2)
    seen = explain(bank, "totals", "id = 'only-1-0'")
    assert (seen.origin.epoch, seen.origin.recorded) == (1, True), "the file may be of a later one"
    assert explain(bank, "totals", "id = 'k3'").origin.epoch == 2


def test_a_row_that_somebody_has_rewritten_is_found_by_its_values(tmp_path):
    bank = bank_of(tmp_path, small.pipeline, 1, 2)
    DeltaTable(str(bank.site.storage / "tables" / "booked")).optimize.compact()
    seen = explain(bank, "booked", "id = 'k3' AND amount = 2")
    assert (seen.origin.epoch, seen.origin.recorded) == (2, False)
    assert "epoch 2" in said(seen, Certainty.INFERRED) and seen.played.is_same


def test_a_late_row_says_why_it_was_late_and_a_bad_line_where_it_stood(tmp_path):
    schema = {"id": pa.string(), "at": pa.timestamp("us", "UTC")}
    source = files("{landing}/*.csv", format="csv", schema=schema, event_time="at", name="landing", on_bad="quarantine")
    late = delta.append("hours_late")
    hours = window(
        "hours",
        source,
        key="id",
        on="at",
        every="1h",
        lateness="10m",
        n=agg.count(),
        sink=delta.append("hours"),
        late=late,
    )
    site = Rides(tmp_path / "site", Pipeline("rides", (hours,), max_parallelism=8))
    site.site.landing.mkdir(parents=True)
    for number, lines in enumerate((["a,2026-01-01T09:10:00Z", "a,2026-01-01T12:10:00Z"],
                                    ["a,2026-01-01T12:20:00Z", "a,2026-01-01T09:20:00Z", "a,yesterday"]), 1):  # fmt: skip
        (site.site.landing / f"{number}.csv").write_text("\n".join(["id,at", *lines, ""]))
        site.epochs(0)
    seen = explain(site, "hours_late", "id = 'a'")
    assert "hours had the watermark 2026-01-01 12:00:00+00:00 before epoch 2" in said(seen, Certainty.KNOWN)
    (contribution,) = seen.trace.contributions
    assert contribution.rows.select("_file", "_row").rows() == [("2.csv", 1)], "not the other rows of its key"
    seen = explain(site, "hours_quarantine", "_weir_row > 0")
    assert (seen.played, seen.trace) == (None, None)
    assert "line or offset 4 of 2.csv" in said(seen, Certainty.KNOWN) and not said(seen, Certainty.UNKNOWN)


def hands_on(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Every column, also that by which a row is set aside."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows


def test_a_row_that_a_gate_has_set_aside_says_so_and_no_rows_are_said_to_have_made_it(tmp_path):
    strict = expect("ExpectColumnValuesToBeBetween", column="at", max_value=8, on_failure="quarantine")
    gated = altered(small.accounts, function=hands_on, gates=(strict,))
    bank = bank_of(tmp_path, Pipeline("small", (gated,), max_parallelism=8), 1, 2)
    seen = explain(bank, "accounts_quarantine", "amount = 2")
    assert (seen.played, seen.trace) == (None, None)
    assert f"{strict.title} has set it aside, row 9 of 00002.parquet" in said(seen, Certainty.KNOWN)
    assert not said(seen, Certainty.UNKNOWN)


@pytest.mark.parametrize(("side", "came_from"), [("left", "unique"), ("right", "payments")])
def test_a_late_row_of_a_join_comes_from_the_input_of_its_side(tmp_path, side, came_from):
    shop = Shop.at(tmp_path, shops.pipeline_of("inner"))
    for day in (1, 2):
        shop.run(day)
    for source, schema in shops.SCHEMAS.items():
        rows = [{**row, "seq": row.get("seq", 0) + 7000} for row in shops.rows_of(1, source)]
        pq.write_table(pa.Table.from_pylist(rows, schema), shop.site.landing / source / "00003.parquet")
    shop.run()
    seen = explain(shop, "paid_late", f"side = '{side}'")
    (contribution,) = seen.trace.contributions
    row, late = contribution.rows.row(0, named=True), seen.row.values
    assert contribution.rows.height == 1 and row["_input"] == came_from
    assert (row["id"], row["at"]) == (late["id"], late["at"]) if side == "left" else row["order"] == late["id"]


def test_what_is_no_table_or_no_row_says_what_there_is(tmp_path):
    bank = bank_of(tmp_path, small.pipeline, 1)
    for table, row, what in (
        ("nowhere", "id = 'k3'", "no table 'nowhere'"),
        ("booked", "id = 'nobody'", "No row of booked"),
        ("booked", "name = 'k3'", "no condition"),
    ):
        with pytest.raises(ConfigurationError, match=what) as refused:
            explain(bank, table, row)
        assert "booked" in str(refused.value) or "id" in str(refused.value)


def test_the_command_says_what_is_known_of_a_branch_too(tmp_path, weir):
    bank = bank_of(tmp_path, small.pipeline, 1, 2)
    forks.fork(small.pipeline, bank.site.settings, "fix", 1)
    Bank(replace(bank.site, pipeline=forks.branched(small.pipeline, bank.site.settings, "fix"))).epochs()
    shown = weir(bank.site, "explain", "small@fix", "booked", "--row", "id = 'k3'")
    assert shown.code == 0 and "known" in shown.out and "00002.parquet" in shown.out
    facts = json.loads(weir(bank.site, "explain", "small", "booked", "--row", "id = 'k3' AND amount = 2", "--json").out)
    assert facts["epoch"] == 2 and facts["played"]["after"][0]["total"] == 3
    assert {statement["certainty"] for statement in facts["statements"]} <= {"known", "inferred"}


def test_a_row_of_kafka_says_topic_partition_and_offset(request, tmp_path):
    topics = request.getfixturevalue("kafka")  # `kafka` is what authors import
    topic = topics.create(partitions=2)
    for partition in (0, 1):
        rows = [{"id": f"k{number}", "n": 10 * partition + number} for number in range(3)]
        topics.send(topic, [json.dumps(row).encode() for row in rows], partition)
    schema = {"id": pa.string(), "n": pa.int64()}
    clicks = kafka(topic, name="clicks", servers=topics.servers, schema=schema)
    sums = aggregate("sums", clicks, key="id", total=agg.sum("n"), sink=delta.append("totals"))
    bank = Bank(replace(Bank.at(tmp_path, **RETAINED).site, pipeline=Pipeline("small", (sums,), max_parallelism=8)))
    bank.epochs()
    seen = explain(bank, "totals", "id = 'k2'")
    assert seen.row.values["total"] == 14
    places = [place for contribution in seen.trace.contributions for place in contribution.rows["_place"]]
    assert sorted(places) == [f"topic {topic}, partition {at}, offset 2" for at in (0, 1)]


def test_of_a_running_total_the_epochs_rows_come_first_and_so_many_earlier_ones(tmp_path, weir):
    bank = bank_of(tmp_path, small.pipeline, *range(1, 9))
    condition = "id = 'k3' AND amount = 8"
    shown = weir(bank.site, "explain", "small", "booked", "--row", condition, "--limit", "2").out.splitlines()
    rows_in = [line for line in shown if "rows in of epoch" in line]
    assert [line.partition("epoch ")[2] for line in rows_in] == ["8: 1 row", "7: 1 row", "6: 1 row"]
    assert shown.index(rows_in[0]) < min(number for number, line in enumerate(shown) if line.startswith("state"))
    assert "... and 5 rows of 5 earlier epochs of accounts; --limit N shows as many as you say, --json all." in shown
    told = json.loads(weir(bank.site, "explain", "small", "booked", "--row", condition, "--json").out)
    assert [each["epoch"] for each in told["trace"]["contributions"]] == list(range(1, 9))
