"""Running aggregates, one row a touched key and epoch."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from state_ops.arrow import frames
from state_ops.errors import InputError, PipelineError
from state_ops.rows import key_aggregation
from state_ops.rows.row_store import RowStore
from state_ops.rows.spill import Spill
from tests.tools.sampling import sampled
from weir import Stage, agg, aggregate, delta, files, testing, window
from weir.operators.aggregation import running as aggregation
from weir.operators.shapes import shapes

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
EVENTS = files("x/*.parquet", event_time="at")


def totals(**arguments) -> Stage:
    return aggregate("totals", EVENTS, key="k", sink=delta.append("totals"), **arguments)


def rows(*given: tuple) -> pa.Table:
    names = {"k": pa.string(), "at": pa.timestamp("us", tz="UTC"), "v": pa.int64()}
    columns = list(zip(*given, strict=True)) or [[]] * 3
    moments = [NOON + timedelta(minutes=minute) for minute in columns[1]]
    typed = zip((columns[0], moments, columns[2]), names.values(), strict=True)
    return pa.table([pa.array(values, type) for values, type in typed], names=list(names))


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_first_and_last_are_by_the_order_columns_of_all_input(batch_rows):
    first_and_last = totals(opened=agg.first("v"), closed=agg.last("v"), order_by=["at"])
    run = testing.run(first_and_last, batch_rows=batch_rows)
    run.epoch(rows(("a", 3, 30), ("a", 5, 50), ("a", 9, None)))
    run.epoch(rows(("a", 4, 40), ("a", 1, None)))
    assert run.epoch(rows(("a", 2, 20)))[["opened", "closed"]].rows() == [(20, 50)]  # rows without a value do not count
    assert run.epoch(rows(("a", 2, 10), ("a", 5, 51)))[["opened", "closed"]].rows() == [(10, 51)]  # ties: by the value
    assert run.epoch(rows(("b", 0, None)))[["opened", "closed"]].rows() == [(None, None)]
    assert run.state["a"].closed__by1 == NOON + timedelta(minutes=5)


def test_an_order_of_several_columns_and_types():
    last = totals(last=agg.last("v"), order_by=["d", "s", "b"])
    given = [
        {"k": "a", "d": date(2024, 1, 1), "s": "z", "b": True, "v": 1},
        {"k": "a", "d": date(2024, 1, 2), "s": "é", "b": False, "v": 2},
        {"k": "a", "d": date(2024, 1, 2), "s": "é", "b": True, "v": 0},
        {"k": "a", "d": date(2024, 1, 2), "s": "a", "b": True, "v": 4},
        {"k": "a", "d": None, "s": "zz", "b": True, "v": 5},
    ]
    run = testing.run(last, batch_rows=1)
    for turn in (given[2:], given[:2]):
        out = run.epoch(pl.DataFrame(turn, schema={"k": str, "d": pl.Date, "s": str, "b": bool, "v": int}))
    assert out["last"].to_list() == [0]


def test_sums_of_decimals_are_exact_and_of_38_digits():
    values = pa.array([Decimal("0.10"), Decimal("9999999.99"), None], pa.decimal128(9, 2))
    run = testing.run(totals(total=agg.sum("v"), low=agg.min("v"), mean=agg.mean("v")), batch_rows=1)
    table = pa.table({"k": ["a"] * 3, "v": values})
    run.epoch(table)
    out = run.epoch(table)
    assert out["total"].to_list() == [Decimal("20000000.18")]
    assert out.schema["total"] == pl.Decimal(38, 2)
    assert (out["low"].to_list(), out["mean"].to_list()) == ([Decimal("0.10")], [pytest.approx(5000000.045)])


BIG = Decimal(10) ** 37 * 6


@pytest.mark.parametrize(
    ("type", "values"),
    [
        (pa.int64(), [2**62, 2**62]),
        (pa.int64(), [-(2**63), -1]),
        (pa.decimal128(38, 0), [BIG, BIG]),
        (pa.decimal128(38, 0), [BIG] * 6),  # which is more than 128 bits hold: they would wrap around to fewer digits
        (pa.decimal128(38, 4), [-BIG / 10**4] * 6),
    ],
)
@pytest.mark.parametrize("batch_rows", [1, 100])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_sum_that_does_not_fit_is_refused_and_changes_nothing(type, values, batch_rows, epochs):
    run = testing.run(totals(n=agg.count(), total=agg.sum("v")), batch_rows=batch_rows)
    run.epoch(pa.table({"k": ["b"], "v": pa.array(values[:1], type)}))
    with pytest.raises(InputError, match="The sum 'total' has become larger than"):
        for part in [values] if epochs == 1 else [[value] for value in values]:
            run.epoch(pa.table({"k": ["a"] * len(part), "v": pa.array(part, type)}))
    assert run.state["b"].n == 1


@pytest.mark.parametrize("batch_rows", [1, 100])
def test_sums_that_pass_through_what_does_not_fit_are_right(batch_rows):
    run = testing.run(totals(total=agg.sum("v")), batch_rows=batch_rows)
    values = [2**63 - 1, 2**63 - 1, -(2**63), -(2**63), 5]
    assert run.epoch(pa.table({"k": ["a"] * 5, "v": values}))["total"].to_list() == [3]


def test_min_and_max_of_every_kind_that_has_an_order():
    columns = {
        "s": (pa.string(), ["b", "é", None, ""]),
        "d": (pa.date32(), [date(2024, 1, 2), None, date(1, 1, 1), date(9999, 1, 1)]),
        "t": (pa.timestamp("us", tz="UTC"), [NOON, None, NOON - timedelta(days=1), NOON]),
        "b": (pa.bool_(), [True, None, False, True]),
        "raw": (pa.binary(), [b"\xff", b"", None, b"a"]),
        "f": (pa.float64(), [1.5, None, -2.5, 0.0]),
    }
    extremes = totals(**{f"{kind}_{c}": getattr(agg, kind)(c) for c in columns for kind in ("min", "max")})
    run = testing.run(extremes, batch_rows=1)
    table = pa.table({"k": ["a"] * 4, **{name: pa.array(values, type) for name, (type, values) in columns.items()}})
    run.epoch(table.slice(0, 2))
    row = run.epoch(table.slice(2)).to_dicts()[0]
    for name, (_, values) in columns.items():
        present = [value for value in values if value is not None]
        assert (row[f"min_{name}"], row[f"max_{name}"]) == (min(present), max(present)), name


NESTED = {  # in order
    pa.list_(pa.int64()): [[1, 9], [1, 10], [2], [3, 0]],
    pa.struct([("a", pa.int64()), ("b", pa.string())]): [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}],
    pa.map_(pa.string(), pa.int64()): [[("a", 5), ("b", 1)], [("b", 1)], [("c", 0)]],
    pa.list_(pa.struct([("a", pa.int64())])): [[{"a": 1}], [{"a": 2}], [{"a": 2}, {"a": 0}]],
}


@pytest.mark.parametrize(("type", "values"), sampled(NESTED.items(), 2), ids=str)
@pytest.mark.parametrize("operator", sampled(["aggregate", "window", "session"]))
def test_first_and_last_of_lists_maps_and_structs_and_by_them(operator, type, values):
    number = len(values)
    table = pa.table(
        {
            "k": ["a"] * number,
            "at": pa.array([NOON] * number, pa.timestamp("us", tz="UTC")),
            "v": pa.array(values, type),
            "n": list(range(number)),
        }
    ).take([*range(1, number), 0])
    wanted = {"opened": agg.first("v"), "closed": agg.last("v"), "least": agg.first("n"), "most": agg.last("n")}
    span = {"window": {"every": "1h"}, "session": {"gap": "1h"}}
    stages = {
        "aggregate": lambda by: totals(order_by=by, **wanted),
        "window": lambda by: window("totals", EVENTS, key="k", on="at", order_by=by, **span[operator], **wanted),
    }["aggregate" if operator == "aggregate" else "window"]
    expected = frames.from_arrow(pa.table({"v": pa.array([values[0], values[-1]], type)}))["v"].to_list()
    for by in (["v"], ["k", "v"], ["k"]):  # the last: of rows that tie, by the value
        for step in (1, 2, number):
            run = testing.run(stages(by), schema=table.schema, batch_rows=1)
            outs = [run.epoch(table.slice(start, step)) for start in range(0, number, step)]
            out = outs[-1] if operator == "aggregate" else run.epoch(drain=True)
            assert [out["opened"].to_list(), out["closed"].to_list()] == [expected[:1], expected[1:]], (by, step)
            assert out[["least", "most"]].rows() == [(0, number - 1)]


@pytest.mark.parametrize("type", NESTED, ids=str)
@pytest.mark.parametrize("kind", ["min", "max"])
@pytest.mark.parametrize("session", [True, False])
def test_what_has_no_order_has_no_min_and_max(session, kind, type):
    asked = {"x": getattr(agg, kind)("v")}
    summed = window("totals", EVENTS, key="k", on="at", gap="1h", **asked) if session else totals(**asked)
    schema = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("v", type)])
    with pytest.raises(PipelineError, match=rf"x = {kind}\('v'\), but that column is .*, which has no order"):
        shapes(summed, schema)


@pytest.mark.parametrize("limit", sampled([20, 2]), ids=["each range fits", "not even a range fits"])
def test_more_keys_than_fit_into_memory_go_to_state_in_parts(monkeypatch, limit):
    monkeypatch.setattr(aggregation, "_PARTIAL_ROWS", limit)
    monkeypatch.setattr(key_aggregation, "_WAITING_BYTES", 0)
    monkeypatch.setattr(key_aggregation, "_PART_BYTES", 100)
    monkeypatch.setattr(aggregation, "_OUT_ROWS", 7)
    merge, sizes = key_aggregation.merged, []
    monkeypatch.setattr(key_aggregation, "merged", lambda *given: (sizes.append(len(given[2])), merge(*given))[1])
    run = testing.run(totals(n=agg.count(), total=agg.sum("v"), last=agg.last("v"), order_by="at"), batch_rows=9)
    given = rows(*((str(i * 7 % 50), i, i) for i in range(150)))
    for turn in (1, 2):
        out = run.epoch(given)
        assert sorted(out["k"]) == sorted({str(i) for i in range(50)})
        assert set(out["n"]) == {3 * turn}
        assert out["total"].sum() == sum(range(150)) * turn
        assert min(out["last"]) >= 100
    assert max(sizes) <= 5


def test_a_key_whose_rows_do_not_fit_into_memory_is_read_once(monkeypatch):
    monkeypatch.setattr(aggregation, "_PARTIAL_ROWS", 40)
    monkeypatch.setattr(key_aggregation, "_WAITING_BYTES", 0)
    asked: list[str] = []
    get = RowStore.get
    monkeypatch.setattr(RowStore, "get", lambda self, keys: (asked.extend(keys["k"]), get(self, keys))[1])
    added: list[int] = []
    add = Spill.add
    monkeypatch.setattr(Spill, "add", lambda self, rows: (added.append(len(rows)), add(self, rows))[1])
    run = testing.run(totals(n=agg.count(), last=agg.last("v"), order_by="at"), batch_rows=9)
    for turn in (1, 2):
        del asked[:], added[:]
        out = run.epoch(rows(*((str(i % 70), i, i) for i in range(140))))
        assert sum(added) > max(added) >= 20, "several times"
        assert sorted(asked) == sorted({str(i) for i in range(70)})
        assert set(out["n"]) == {2 * turn}
        assert sorted(out["last"]) == list(range(70, 140))


def test_a_range_that_does_not_fit_goes_to_state_piece_by_piece(monkeypatch):
    monkeypatch.setattr(aggregation, "_PARTIAL_ROWS", 4)
    monkeypatch.setattr(key_aggregation, "_WAITING_BYTES", 0)
    sizes: list[int] = []
    combined = key_aggregation.combined
    monkeypatch.setattr(
        key_aggregation, "combined", lambda *given: (sizes.append(sum(map(len, given[1]))), combined(*given))[1]
    )
    run = testing.run(totals(n=agg.count()), batch_rows=3)
    out = run.epoch(rows(*((str(i), i, i) for i in range(200))))
    assert sorted(out["k"]) == sorted(map(str, range(200))) and set(out["n"]) == {1}
    assert max(sizes) <= 7, "what gathers, and a batch"


def test_what_does_not_fit_into_memory_leaves_nothing_on_the_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(aggregation, "_PARTIAL_ROWS", 20)
    monkeypatch.setattr(key_aggregation, "_WAITING_BYTES", 0)
    left: list[list[Path]] = []
    barrier = aggregation.AggregationOperator.barrier

    def looked(self):
        directory = self._fold._spill._directory
        left.append(list(directory.iterdir()))
        yield from barrier(self)
        assert not directory.exists()

    monkeypatch.setattr(aggregation.AggregationOperator, "barrier", looked)
    testing.run(totals(n=agg.count()), batch_rows=9).epoch(rows(*((str(i), i, i) for i in range(150))))
    assert len(left) == 1 and len(left[0]) > 16


def test_a_fold_goes_to_state_in_parts_and_hands_out_every_key_once(monkeypatch):
    monkeypatch.setattr(key_aggregation, "_PART_BYTES", 100)
    run = testing.run(totals(n=agg.count(), total=agg.sum("v")))
    for turn in (1, 2):
        out = run.epoch(rows(*((str(i), i, i) for i in range(50))))
        assert sorted(out.rows()) == sorted((str(i), turn, turn * i, turn) for i in range(50))


def test_composite_keys_and_null_keys_by_policy():
    counts = aggregate("totals", EVENTS, key=["a", "b"], n=agg.count(), null_keys="drop")
    run = testing.run(counts, parallelism=2)
    out = run.epoch([{"a": "x", "b": 1}, {"a": "x", "b": 2}, {"a": None, "b": 1}, {"a": "x", "b": 1}])
    assert sorted(out.rows()) == [("x", 1, 2, 1), ("x", 2, 1, 1)]
    assert sum(ack.rows_null_key for ack in run.acks) == 1
    with pytest.raises(InputError, match="has no 'a'"):
        testing.run(aggregate("totals", EVENTS, key="a", n=agg.count())).epoch([{"a": None}, {"a": "x"}])


SCHEMA = pa.schema([("k", pa.string()), ("v__values", pa.string()), ("at", pa.timestamp("us")), ("v", pa.float64()), ("epoch", pa.int64()),
                    ("l", pa.time64("us"))])  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: totals(), "aggregates nothing"),
        (lambda: totals(epoch=agg.count()), "'epoch', which is taken"),
        (lambda: totals(k=agg.count()), "'k', which is taken"),
        (lambda: totals(n=3), "n=3 is no aggregate"),
        (lambda: totals(v=agg.first("v")), "needs an order"),
        (lambda: aggregate("totals", EVENTS, key="epoch", n=agg.count()), "'epoch' is a key column"),
        (lambda: aggregate("totals", EVENTS, key="v", n=agg.count()), "cannot be a key"),
        (lambda: totals(v=agg.first("v"), order_by=["when"]), "no column 'when'"),
        (lambda: totals(t=agg.sum("w")), "no column 'w'"),
        (lambda: totals(t=agg.sum("at")), r"that column is timestamp[^$]*Take it of numbers"),
        (lambda: totals(t=agg.max("l")), "'t' is time64"),
        (lambda: totals(n=agg.count(where=" ")), "has no condition"),
        (lambda: totals(n=agg.approx_distinct("l")), "n = approx_distinct.'l'., but that column is time64"),
        (lambda: totals(n=agg.approx_quantile("k", 0.5)), "that column is string"),
        (lambda: totals(n=agg.approx_quantile("v", 95)), "approx_quantile.'v', 95. is no share"),
        (lambda: totals(n=agg.count_distinct("l")), "n = count_distinct.'l'., but that column is time64"),
        (lambda: totals(n=agg.count_distinct("v"), n__values=agg.count()), "'n__values' is both a field and a map"),
        (
            lambda: aggregate("totals", EVENTS, key="v__values", v=agg.count_distinct("v")),
            "'v__values' is a key column",
        ),
        (lambda: totals(n=agg.count(where="w > 1")), "n = count.where='w > 1'., but .* no column"),
        (lambda: totals(n=agg.count(where="rand() < 0.5")), "rand"),
        (lambda: totals(n=agg.count(where="at + v")), "at [+] v"),
        (lambda: totals(n=agg.sum("v", where="v > percentile(v, 0.5)")), "sum.'v', where='v > percentile"),
    ],
)
def test_an_aggregate_that_does_not_fit_is_refused_before_the_first_row(broken, message):
    with pytest.raises(PipelineError, match=message):
        shapes(broken(), SCHEMA)


def test_a_row_counts_where_the_condition_is_true_and_what_it_fails_over_declines_the_epoch():
    conditions = {
        "n": agg.count(where="v > 1"),
        "total": agg.sum("v", where="10 / v > 2 OR v IS NULL"),
        "newest": agg.last("v", where="at < TIMESTAMP '2024-05-01 12:03:00'"),
        "always": agg.count(where="1 = 1"),
    }
    run = testing.run(totals(order_by=["at"], **conditions), batch_rows=2)
    assert run.epoch(rows(("a", 0, 1), ("a", 1, 2), ("a", 2, None), ("a", 4, 9))).rows() == [("a", 2, 3, 2, 4, 1)]
    assert run.epoch(rows(("b", 0, None))).rows() == [("b", 0, 0, None, 1, 2)]
    with pytest.raises(
        InputError, match=r"total = sum\('v', where='10 / v > 2 OR v IS NULL'\) fails over a row: .*ZERO"
    ):
        run.epoch(rows(("a", 2, 0)))
    upper = testing.run(totals(n=agg.count(where="upper(k) = 'A'")))
    with pytest.raises(InputError, match="met a row that it cannot tell of"):
        upper.epoch(rows(("ß", 0, 1)))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([0.0, -0.0, float("nan"), -float("nan"), None, float("inf"), 1e-300, 0.1, 0.1], pa.float64()),
        pa.array([0.0, -0.0, 0.1, 0.1, None, 16777216.0], pa.float32()),
        pa.array([-128, 127, 0, 0, None], pa.int8()),
        pa.array([True, None, False, True]),
        pa.array(["", "a", "A", "a\0", None, "a", "é", "e\u0301"]),
        pa.array([b"", b"\0", b"\0\0", None]),
        pa.array([date(1, 1, 1), date(2024, 1, 1), None, date(1, 1, 1)]),
        pa.array([NOON, NOON + timedelta(microseconds=1), None, NOON], pa.timestamp("us", tz="UTC")),
        pa.array([Decimal("0.00"), Decimal("-0.00"), Decimal("9" * 36 + ".99"), None], pa.decimal128(38, 2)),
    ],
    ids=lambda values: str(values.type),
)
@pytest.mark.parametrize("batch_rows", [1, 100])
def test_values_are_distinct_as_in_sql(values, batch_rows):
    given = pa.table({"k": ["a"] * len(values), "v": values})
    half = len(values) // 2
    run = testing.run(totals(n=agg.count_distinct("v")), batch_rows=batch_rows, schema=given.schema)
    for part in (given[:half], given[half:], given[:half]):
        run.epoch(part)
    expected = duckdb.sql("SELECT count(DISTINCT v) FROM given").fetchall()
    assert [(run.state["a"].n,)] == [(len(run.state["a"].n__values),)] == expected


@pytest.mark.parametrize("changes", [False, True])
def test_sketches_are_compared_by_what_they_estimate_of_distinct_values(changes):
    sketches = totals(about=agg.approx_distinct("v"), half=agg.approx_quantile("v", 0.5), changes=changes)
    given = rows(*(("a", i, i * 7919 % 5003) for i in range(1500)))
    testing.assert_slicing_does_not_matter(sketches, given, trials=2)


def test_an_aggregate_may_have_the_name_of_what_it_reads_and_read_the_key():
    run = testing.run(totals(v=agg.sum("v"), top=agg.max("v"), same=agg.min("k"), m=agg.first("k"), order_by=["v"]))
    assert run.epoch(rows(("a", 0, 1), ("a", 0, 2))).rows() == [("a", 3, 2, "a", "a", 1)]
