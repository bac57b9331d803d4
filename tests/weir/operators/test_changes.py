"""Rows that are changes: which operators take them, and which refuse them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from state_ops.errors import InputError, PipelineError
from state_ops.records.operator_stats import OperatorStats
from state_ops.rows import key_aggregation
from state_ops.storage.storage import Storage
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from tests.weir.driven import Driven
from weir import (
    Epoch,
    Pipeline,
    Stage,
    State,
    ValueState,
    agg,
    aggregate,
    deduplicate,
    delta,
    desc,
    files,
    join,
    kafka,
    postgres,
    select,
    stage,
    testing,
    top_n,
    union,
    window,
)
from weir.operators.aggregation import running as aggregation
from weir.operators.compatibility import fit, meaning, stored_keys
from weir.operators.shapes import shapes
from weir.sinks.open_sinks import Sinks

CHANGES = delta.table("x/users", name="users", event_time="at", changes=True)
OTHERS = files("x/*.parquet", event_time="at")
ROWS = pa.schema(
    [("k", pa.string()), ("at", pa.timestamp("us", "UTC")), ("v", pa.int64()), ("_change_type", pa.string())]
)


class Nothing(State):
    """Of nobody."""

    rows: int = 0


def function(source, **arguments) -> Stage:
    @stage("it", source=source, key="k", state=Nothing, **arguments)
    def it(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows

    return it


REFUSED: dict[str, tuple[Callable[..., Stage], str]] = {
    "function": (function, "its function may not look at that column"),
    "last": (
        lambda source, **more: aggregate("it", source, key="k", order_by="at", of=agg.last("v", where="v > 1"), **more),
        "of = last('v', where='v > 1') does not keep what would be left without a row",
    ),
    "first": (
        lambda source, **more: aggregate("it", source, key="k", order_by="at", of=agg.first("v"), **more),
        "of = first('v') does not keep what would be left without a row",
    ),
    "sketch": (
        lambda source, **more: aggregate("it", source, key="k", n=agg.approx_quantile("v", 0.5), **more),
        "n = approx_quantile('v', 0.5) keeps a sketch, out of which no value can be taken",
    ),
    "window": (
        lambda source, **more: window("it", source, key="k", on="at", every="1h", n=agg.count(), **more),
        "what it made of a row cannot be taken back",
    ),
    "session": (
        lambda source, **more: window("it", source, key="k", on="at", gap="1h", n=agg.count(), **more),
        "what it made of a row cannot be taken back",
    ),
    "deduplicate": (lambda source, **more: deduplicate("it", source, key="k", **more), "cannot be taken back"),
}


@pytest.mark.parametrize("of", REFUSED)
def test_what_cannot_take_rows_back_refuses_changes_where_it_is_defined(of):
    operator, why = REFUSED[of]
    with pytest.raises(PipelineError, match="it cannot read users, whose rows are changes") as refused:
        operator(CHANGES)
    assert why in refused.value.what and "transform=" in refused.value.next
    assert ("accepts_changes=True" in refused.value.next) == (of == "function")


@pytest.mark.parametrize("of", REFUSED)
def test_what_a_transform_leaves_is_judged_by_its_columns(of):
    operator, _ = REFUSED[of]
    plain = operator(CHANGES, transform=lambda rows: rows)
    assert shapes(plain, pa.schema([field for field in ROWS if field.name != "_change_type"]))
    with pytest.raises(PipelineError, match="it cannot read users, whose rows are changes"):
        shapes(plain, ROWS)


@pytest.mark.parametrize("summed", [agg.sum("v"), agg.mean("v", where="v > 1")])
def test_floats_cannot_be_taken_back(summed):
    floats = ROWS.set(2, pa.field("v", pa.float64()))
    with pytest.raises(PipelineError, match=r"x = .*adds floats, from which no number") as refused:
        shapes(aggregate("it", CHANGES, key="k", x=summed), floats)
    assert "Cast v to a decimal" in refused.value.next
    assert shapes(aggregate("it", OTHERS, key="k", x=summed), floats.remove(3))


def test_a_table_whose_rows_are_replaced_takes_no_changes(tmp_path):
    counts = partial(aggregate, "counts", OTHERS, key="k", n=agg.count(), sink=delta.replace("counts", by="k"))
    counts()
    counts(changes=True, sink=delta.upsert("counts", "k"))
    with pytest.raises(PipelineError, match="The rows of an epoch would replace those of the table counts") as refused:
        counts(changes=True)
    assert "delta.upsert applies changes" in refused.value.next
    replaced = function(OTHERS, sink=delta.replace("it", where="v > 1"))
    site = Site(tmp_path, {}, Pipeline("p", (replaced,)), __name__)
    with Sinks(site.pipeline, site.settings, Storage(str(tmp_path))) as sinks:
        sinks.check(replaced.sink, ROWS.remove(3))
        with pytest.raises(PipelineError, match="would replace those of the table it"):
            sinks.check(replaced.sink, ROWS)


def test_changes_reach_a_sink_with_a_key_by_subtasks_that_have_all_rows_of_one():
    counts = partial(aggregate, "counts", OTHERS, key="k", n=agg.count())
    for sink in (postgres.sink("t", key="n", connection="c"), kafka.sink("t", servers="x:1", key="n")):
        counts(sink=sink)
        with pytest.raises(PipelineError, match=r"The key of the sink t \(n\) does not contain that of counts"):
            counts(sink=sink, changes=True)
        with pytest.raises(PipelineError, match="says nothing of it, which has none"):
            select("it", counts(changes=True), sink=sink)
    counts(sink=postgres.sink("t", key=["k", "n"], connection="c"), changes=True)
    counts(sink=kafka.sink("t", servers="x:1"), changes=True)


def test_rows_that_may_be_lost_are_not_taken_back():
    counts = aggregate("counts", select("all", CHANGES), key="k", n=agg.count())
    stages = (counts.inputs[0].origin, counts)
    for delivery in ("exactly_once", "at_least_once"):
        Pipeline("p", stages, delivery=delivery)
    with pytest.raises(PipelineError, match="counts takes rows of users back, and of an epoch that is lost"):
        Pipeline("p", stages, delivery="at_most_once")
    Pipeline("p", (aggregate("counts", OTHERS, key="k", n=agg.count(), changes=True),), delivery="at_most_once")


def test_what_became_of_a_row_is_no_key():
    counts = aggregate("counts", CHANGES, key=["k", "_change_type"], n=agg.count())
    with pytest.raises(PipelineError, match="the name of the column that says what became of a row"):
        shapes(counts, ROWS)


def test_what_became_of_a_row_is_said_in_text():
    with pytest.raises(PipelineError, match="_change_type is int64"):
        shapes(aggregate("it", OTHERS, key="k", n=agg.count()), ROWS.set(3, pa.field("_change_type", pa.int64())))
    with pytest.raises(PipelineError, match="does not say whether changes"):
        aggregate("it", OTHERS, key="k", changes=agg.count())


def test_a_join_refuses_changes_on_either_side():
    for left, right in ((CHANGES, OTHERS), (OTHERS, CHANGES)):
        with pytest.raises(PipelineError, match="it cannot read users, whose rows are changes"):
            join("it", left, right, on="k", within=("0s", "1h"))


def test_a_select_hands_changes_on_or_says_what_they_mean():
    assert select("it", CHANGES).hands_out_changes and select("it", CHANGES, "k", "_change_type").hands_out_changes
    assert union("it", select("a", CHANGES), select("b", CHANGES, "*")).hands_out_changes
    for kept in ("* EXCEPT (v)", "`_change_type`", "lower(kind) AS _change_type"):
        assert select("it", CHANGES, kept).hands_out_changes
    for columns in ("* EXCEPT (_change_type)", "_change_type = 'insert' AS is_new"):
        assert not select("it", CHANGES, columns).hands_out_changes
    newest = select("it", CHANGES, "k", "v", where="_change_type IN ('insert', 'update_postimage')")
    assert not newest.hands_out_changes and deduplicate("after", newest, key="k")
    with pytest.raises(PipelineError, match="it cannot read users, whose rows are changes") as refused:
        select("it", CHANGES, "k", "v")
    assert "its columns leave that one out" in refused.value.what


def test_a_function_that_looks_at_the_column_takes_changes():
    accepting = function(CHANGES, accepts_changes=True)
    assert not accepting.hands_out_changes and shapes(accepting, ROWS).outputs["main"] == ROWS
    with pytest.raises(PipelineError, match="after cannot read it, whose rows are changes"):
        shapes(deduplicate("after", accepting, key="k"), ROWS)


def test_changes_that_a_function_makes_are_handed_on_and_aggregated():
    @stage("made", source=OTHERS, key=None)
    def made(rows: pl.DataFrame, epoch) -> pl.DataFrame:
        came = rows.with_columns(_change_type=pl.lit("insert"))
        gone = rows.filter(pl.col("v") < 0).with_columns(_change_type=pl.lit("delete"))
        return pl.concat([came, gone])

    some, others = select("some", made, where="v < 5"), select("others", made, "k", "v", "_change_type", where="v >= 5")
    both = union("both", some, others)
    counts = aggregate("counts", both, key="k", n=agg.count(), total=agg.sum("v"), sink=delta.append("counts"))
    run = testing.run_pipeline(Pipeline("p", (made, some, others, both, counts)))
    handed = run.epoch([{"k": "a", "v": value} for value in (1, -1, 7)])["counts"]
    assert handed.select("k", "n", "total").rows() == [("a", 2, 8)]


def changes_of(given: list[tuple[str, int | None, str]]) -> pa.Table:
    """Rows of a key, a value, and what became of them."""
    k, v, kinds = zip(*given, strict=True) if given else ((), (), ())
    return pa.table(
        {"k": pa.array(k, pa.string()), "v": pa.array(v, pa.int64()), "_change_type": pa.array(kinds, pa.string())}
    )


def replayed(content: Counter[tuple], rows: pl.DataFrame) -> None:
    """Apply changes to rows that are there, each of which is to be taken back only while it is."""
    for row in rows.drop("epoch").rows(named=True):
        kind = row.pop("_change_type")
        if kind in ("insert", "update_postimage"):
            content[tuple(row.values())] += 1
        else:
            assert content[tuple(row.values())] > 0, f"{row} is taken back, and was not there"
            content[tuple(row.values())] -= 1


def test_an_aggregate_says_what_became_of_each_key():
    totals = aggregate("totals", OTHERS, key="k", n=agg.count(where="v > 0"), total=agg.sum("v"), changes=True)
    run = testing.run(totals, parallelism=2, batch_rows=2)
    assert totals.hands_out_changes

    def epoch(*given: tuple[str, int]) -> list[tuple]:
        return run.epoch([{"k": k, "v": v} for k, v in given]).sort("k", maintain_order=True).rows()

    assert epoch(("a", 1), ("b", 2), ("a", 3)) == [("a", 2, 4, 1, "insert"), ("b", 1, 2, 1, "insert")]
    assert epoch(("b", 0), ("c", 0)) == [("c", 0, 0, 2, "insert")], "nothing has changed in b"
    assert epoch(("a", 5), ("b", -2)) == [
        ("a", 2, 4, 3, "update_preimage"),
        ("a", 3, 9, 3, "update_postimage"),
        ("b", 1, 2, 3, "update_preimage"),
        ("b", 1, 0, 3, "update_postimage"),
    ]
    assert epoch() == []


def test_rows_are_taken_back_from_counts_and_exact_sums():
    def totals_of(changes: bool) -> Stage:
        return aggregate(
            "sums", OTHERS, key="k", n=agg.count(), some=agg.count(where="v > 1"), total=agg.sum("v"), mean=agg.mean("v"),
            changes=changes,
        )  # fmt: skip

    changed, plain = testing.run(totals_of(True)), testing.run(totals_of(False))
    first = changes_of(
        [("a", 1, "insert"), ("a", 7, "insert"), ("b", None, "insert"), ("c", 2, "insert"), ("c", 2, "delete")]
    )
    second = changes_of([("a", 7, "update_preimage"), ("a", 2, "update_postimage"), ("b", None, "delete")])
    assert sorted(changed.epoch(first).rows()) == [("a", 2, 1, 8, 4.0, 1, "insert"), ("b", 1, 0, 0, None, 1, "insert")]
    assert sorted(plain.epoch(first).rows())[1:] == [("b", 1, 0, 0, None, 1), ("c", 0, 0, 0, None, 1)]
    assert sorted(changed.epoch(second).rows()) == [
        ("a", 2, 1, 3, 1.5, 2, "update_postimage"),
        ("a", 2, 1, 8, 4.0, 2, "update_preimage"),
        ("b", 1, 0, 0, None, 2, "delete"),
    ]
    assert sorted(plain.epoch(second).rows()) == [("a", 2, 1, 3, 1.5, 2), ("b", 0, 0, 0, None, 2)]
    assert set(changed.state) == set(plain.state) == {"a"}, "of the others nothing is left"


def test_sums_and_means_of_large_numbers_lose_nothing():
    sums = aggregate(
        "sums", OTHERS, key="k", total=agg.sum("d"), mean=agg.mean("v"), dmean=agg.mean("d"), n=agg.sum("b")
    )
    run = testing.run(sums)
    large, small = 2**63 - 1, Decimal("0.01")

    def epoch(*given: tuple) -> list[tuple]:
        rows = [{"k": "a", "v": v, "d": d, "b": b, "_change_type": kind} for v, d, b, kind in given]
        return run.epoch(rows).rows()

    most = Decimal(10) ** 35
    assert epoch(
        (large, most, True, "insert"),
        (large, -most, True, "insert"),
        (1, small, True, "insert"),
        (large, small, None, "insert"),
    )
    taken = [
        (large, most, True, "delete"),
        (large, -most, True, "update_preimage"),
        (large, small, None, "delete"),
    ]
    assert epoch(*taken) == [("a", small, 1.0, 0.01, 1, 2)]
    with pytest.raises(InputError, match="larger than int64"):
        testing.run(aggregate("sums", OTHERS, key="k", total=agg.sum("v"))).epoch(
            changes_of([("a", large, "insert"), ("a", large, "insert")])
        )


def over_times_of_changes() -> dict[str, Callable[[], Stage]]:
    counts = aggregate("counts", OTHERS, key="k", n=agg.count(), changes=True)
    named, computed = (
        select(uid, counts, "n", sql, "_change_type") for uid, sql in (("a", "epoch AS e"), ("b", "-epoch AS e"))
    )
    to_it = partial(aggregate, "it", key="n")
    return {
        "total = sum('epoch') goes by epoch": lambda: to_it(counts, total=agg.sum("epoch")),
        "newest = max('epoch', where='n > 1') goes by epoch": lambda: to_it(counts, newest=agg.max("epoch", where="n > 1")),
        "its key goes by epoch": lambda: aggregate("it", counts, key="epoch", n=agg.count()),
        "mean = mean('e') goes by e": lambda: to_it(named, mean=agg.mean("e")),
        "epochs = count_distinct('e') goes by e": lambda: to_it(union("u", computed, named), epochs=agg.count_distinct("e")),
        "last = max('x') goes by x": lambda: to_it(counts, select=["n", "epoch x", "_change_type"], last=agg.max("x")),
        "v = sum('_commit_version') goes by _commit_version": lambda: to_it(CHANGES, v=agg.sum("_commit_version")),
        "at = min('_commit_timestamp') goes by": lambda: to_it(CHANGES, at=agg.min("_commit_timestamp")),
    }  # fmt: skip


@pytest.mark.parametrize("why", over_times_of_changes())
def test_when_a_change_was_is_not_taken_back_with_the_row(why):
    """The old image of a row, and the row that is deleted, have the time of that change, and not the one of the row."""
    with pytest.raises(PipelineError, match="whose rows are changes") as refused:
        over_times_of_changes()[why]()
    assert why in refused.value.what and "says when a change was" in refused.value.what


def test_when_a_row_came_may_be_counted_and_left_out():
    counts = aggregate("counts", OTHERS, key="k", n=agg.count(), changes=True)
    plain = aggregate("plain", OTHERS, key="k", n=agg.count())
    aggregate("it", plain, key="n", newest=agg.max("epoch"))
    aggregate("it", counts, key="n", keys=agg.count())
    newest = "_change_type IN ('insert', 'update_postimage')"
    aggregate("it", counts, key="n", select=["n", "epoch"], where=newest, newest=agg.max("epoch"))
    aggregate("it", select("a", counts, "n", "n AS epoch", "_change_type"), key="epoch", total=agg.sum("epoch"))


def test_a_row_that_never_came_is_not_taken_back():
    run = testing.run(aggregate("it", OTHERS, key="k", n=agg.count()))
    run.epoch(changes_of([("a", 1, "insert")]))
    with pytest.raises(InputError, match="More rows with k='b' are taken back than came") as refused:
        run.epoch(changes_of([("a", 1, "delete"), ("b", 1, "delete"), ("b", 1, "update_preimage"), ("b", 1, "insert")]))
    assert "from their beginning" in refused.value.next
    with pytest.raises(InputError, match="has _change_type 'upsert'"):
        run.epoch(changes_of([("a", 1, "upsert")]))
    with pytest.raises(InputError, match="has _change_type None"):
        run.epoch(changes_of([("a", 1, None)]))


def test_a_key_is_judged_by_all_of_its_rows_of_an_epoch_in_any_order(monkeypatch):
    monkeypatch.setattr(aggregation, "_PARTIAL_ROWS", 1)
    monkeypatch.setattr(key_aggregation, "_WAITING_BYTES", 0)
    run = testing.run(aggregate("it", OTHERS, key="k", n=agg.count(), changes=True), batch_rows=1)
    rows = [("a", 1, "delete"), ("b", 1, "insert"), ("a", 1, "update_preimage"), ("a", 1, "insert"), ("a", 1, "insert")]
    assert run.epoch(changes_of(rows)).rows() == [("b", 1, 1, "insert")]
    assert run.epoch(changes_of([("b", 1, "delete"), *rows])).is_empty()


@pytest.mark.parametrize("changes", sampled([True, False]))
def test_a_key_is_judged_once_all_of_its_epochs_rows_have_come(changes):
    """A checkpoint that overtakes rows may part what takes a row back from the row."""
    stage = aggregate("it", OTHERS, key="k", n=agg.count(), total=agg.sum("v"), mean=agg.mean("v"), changes=changes)
    chance, there, content = random.Random(5), list[tuple[str, int]](), Counter[tuple]()
    driven, newest = Driven(stage, changes_of([]).schema), dict[str, tuple]()
    for _ in range(60):
        given, chosen = [], chance.sample(there, len(there) // 2)
        for row in chosen:
            there.remove(row)
            given.append((*row, "delete"))
        for _ in range(chance.randrange(6)):
            row = (chance.choice("abc"), chance.randrange(-3, 9))
            given.append((*row, "insert"))
            if chance.random() < 0.6:
                given.append((*row, "delete"))
            else:
                there.append(row)
        chance.shuffle(given)
        cuts = sorted(chance.randrange(len(given) + 1) for _ in range(2))
        for part, (begin, end) in enumerate(pairwise([0, *cuts, len(given)])):
            out = driven.epoch(changes_of(given[begin:end]), pause=part < len(cuts))
            if changes:
                replayed(content, out)
            newest |= {k: (k, n, total, mean) for k, n, total, mean, _ in ([] if changes else out.rows())}
        sums = {k: [v for other, v in there if other == k] for k, _ in there}
        expected = sorted((k, len(of), sum(of), sum(of) / len(of)) for k, of in sums.items())
        assert sorted(row for row in (+content if changes else newest.values()) if row[1]) == expected
    with pytest.raises(InputError, match="More rows with k='d' are taken back than came"):
        driven.epoch(changes_of([("d", 1, "delete")]))


UPSTREAM = "SELECT k, count(*) AS n, coalesce(sum(v), 0)::BIGINT AS total FROM events GROUP BY k"
CHAINED = """
    SELECT n, count(*) AS keys, sum(total)::BIGINT AS total, count(*) FILTER (total > 20) AS large, avg(total)::DOUBLE AS mean
    FROM ({upstream}) WHERE total % 5 <> 0 GROUP BY n
"""


def chained(changes: bool, source: Any = OTHERS, where: str = "total % 5 <> 0", **more: Any) -> Pipeline:
    """How many keys have been seen how often, of those whose total is no multiple of five: a key comes and goes."""
    counts = aggregate(
        "counts", source, key="k", n=agg.count(), total=agg.sum("v"), changes=True, sink=delta.append("counts")
    )
    by_count = aggregate(
        "by_count",
        counts,
        key="n",
        where=where,
        **more,
        keys=agg.count(),
        total=agg.sum("total"),
        large=agg.count(where="total > 20"),
        mean=agg.mean("total"),
        changes=changes,
        sink=delta.append("by_count"),
    )
    return Pipeline("chained", (counts, by_count), max_parallelism=16)


def events(draw: random.Random, rows: int) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "k": [f"k{draw.randrange(12)}" for _ in range(rows)],
            "v": [draw.choice([draw.randrange(-9, 9), None]) for _ in range(rows)],
        },
        schema={"k": pl.String, "v": pl.Int64},
    )


def truth(so_far: pl.DataFrame) -> dict[str, list[tuple]]:
    """What DuckDB makes of all events, by table."""
    with duckdb.connect() as connection:
        connection.register("events", so_far.to_arrow())
        queries = {"counts": UPSTREAM, "by_count": CHAINED.format(upstream=UPSTREAM)}
        return {table: connection.execute(query).fetchall() for table, query in queries.items()}


@pytest.mark.parametrize("seed", sampled(range(15), lambda seed: seed == 1))
def test_changes_of_an_aggregate_are_aggregated_as_duckdb_says(seed, monkeypatch):
    draw = random.Random(seed)
    if seed % 2:  # partials that are merged one after the other
        monkeypatch.setattr(aggregation, "_PARTIAL_ROWS", 1)
        monkeypatch.setattr(key_aggregation, "_WAITING_BYTES", 0)
    run = testing.run_pipeline(
        chained(True),
        parallelism=draw.randint(1, 4),
        batch_rows=draw.choice([1, 3] if seed % 2 else [1, 3, 1000]),
        schema={"k": pa.string(), "v": pa.int64()},
    )
    so_far, content = events(draw, 0), {"counts": Counter(), "by_count": Counter()}
    for _ in range(draw.randint(2, 7)):
        fresh = events(draw, draw.randrange(25))
        so_far = pl.concat([so_far, fresh])
        for table, rows in run.epoch(fresh).items():
            if rows.width:
                replayed(content[table], rows)
        expected = truth(so_far)
        for table, rows in expected.items():
            assert sorted((+content[table]).elements()) == sorted(rows), table
        assert {key: state.key__rows for key, state in run.states["by_count"].items()} == {
            row[0]: row[1] for row in expected["by_count"]
        }
    run.close()


@pytest.mark.parametrize("changes", sampled([True, False]))
def test_how_the_input_is_cut_does_not_matter_to_what_is_left_in_the_end(changes):
    draw = random.Random(5)
    testing.assert_slicing_does_not_matter(chained(changes), events(draw, 80), trials=4)


@pytest.mark.long
def test_what_stages_without_a_key_hand_on_of_changes_is_compared_by_what_is_left():
    counts = aggregate("counts", OTHERS, key="k", n=agg.count(), total=agg.sum("v"), changes=True)
    even = select("even", counts, where="n % 2 = 0", sink=delta.append("even"))
    both = union("both", even, select("odd", counts, where="n % 2 = 1"), sink=delta.append("both"))
    again = aggregate("again", both, key="n", keys=agg.count(), total=agg.sum("total"), sink=delta.append("again"))
    pipeline = Pipeline("kept", (counts, even, both.inputs[1].origin, both, again))
    testing.assert_slicing_does_not_matter(pipeline, events(random.Random(3), 40), trials=3)


def test_ranks_that_change_are_aggregated():
    draw = random.Random(9)
    highest = top_n("highest", OTHERS, key="k", by=[desc("v"), "id"], n=2)
    of_ranks = aggregate("of_ranks", highest, key="rank_number", n=agg.count(), total=agg.sum("v"), changes=True)
    pipeline = Pipeline("ranked", (highest, replace(of_ranks, sink=delta.upsert("of_ranks", "rank_number"))))
    run = testing.run_pipeline(pipeline, parallelism=2, batch_rows=5)
    so_far, content = pl.DataFrame(), Counter[tuple]()
    for epoch in range(5):
        fresh = events(draw, 20).with_columns(pl.int_range(20).alias("id") + epoch * 20).drop_nulls()
        so_far = pl.concat([so_far, fresh]) if epoch else fresh
        replayed(content, run.epoch(fresh)["of_ranks"])
        query = """SELECT rank, count(*), sum(v)::BIGINT FROM
            (SELECT v, row_number() OVER (PARTITION BY k ORDER BY v DESC, id) AS rank FROM so_far) WHERE rank < 3 GROUP BY rank"""
        assert sorted((+content).elements()) == sorted(duckdb.sql(query).fetchall())


@pytest.mark.long
def test_slicing_compares_what_is_left_of_changes():
    @stage("forgetful", source=OTHERS, key="k", state=Nothing)
    def forgetful(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        """Say each time how many rows a key has, and never take back what was said before."""
        state.fold(rows, rows=agg.count())
        keys = rows.select("k").unique()
        return keys.with_columns(state.get(keys)["rows"], pl.lit("insert").alias("_change_type"))

    with pytest.raises(AssertionError, match="forgetful depends on how its input is sliced"):
        testing.assert_slicing_does_not_matter(forgetful, events(random.Random(1), 40))


def test_whether_rows_are_taken_back_is_part_of_what_state_means():
    of = aggregate("it", OTHERS, key="k", n=agg.count(), total=agg.sum("v"))
    pipeline = Pipeline("p", (of,))
    shaped = {taken: shapes(of, ROWS if taken else ROWS.remove(3)) for taken in (True, False)}
    for was in (True, False):
        fixed = shaped[was]
        recorded = OperatorStats(
            keys=stored_keys(fixed),
            window=meaning(of),
            schema=fixed.state.to_json(),
            max_parallelism=pipeline.max_parallelism,
        )
        assert not fit(of, fixed, recorded, pipeline).problems
        problems = fit(of, shaped[not was], recorded, pipeline).problems
        kinds = ["rows none of which takes others back", "changes"]
        assert f"its input was {kinds[was]}, is {kinds[not was]}" in problems


def test_a_mean_of_booleans_takes_rows_back():
    clicks = files("{landing}/*.parquet", name="clicks", event_time="at")
    late = aggregate("late", clicks, key="k", late=agg.max("late"), one=agg.max("one"), changes=True)
    share = aggregate(
        "share", late, key="one", share=agg.mean("late"), number=agg.sum("late"), sink=delta.append("share")
    )
    run = testing.run_pipeline(Pipeline("p", (late, share)))
    first = [{"k": key, "one": 1, "late": key == "x", "at": datetime(2026, 1, 1, tzinfo=UTC)} for key in "xyz"]
    assert run.epoch(first)["share"].select("share", "number").rows() == [(1 / 3, 1)]
    again = [{**first[1], "late": True}]
    assert run.epoch(again)["share"].select("share", "number").rows() == [(2 / 3, 2)]
