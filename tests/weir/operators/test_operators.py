from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal

from state_ops.errors import InputError, PipelineError, StageError
from state_ops.keyed.keyed_state import GROUP
from weir import (
    Epoch,
    Pipeline,
    Stage,
    State,
    Timestamp,
    ValueState,
    agg,
    aggregate,
    deduplicate,
    delta,
    files,
    join,
    select,
    stage,
    testing,
    top_n,
    union,
    window,
)
from weir.definition import LATE, MAIN, FileSource, Progress
from weir.operators.functions.function import trial_of
from weir.operators.shapes import shapes

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
EVENTS = files("x/*.parquet", event_time="at")


class Total(State):
    rows: int = 0
    amount: float = 0.0
    last: float | None = None


def at(minutes: float, key: str = "a", **other: object) -> dict:
    return {"k": key, "at": NOON + timedelta(minutes=minutes), **other}


# -- a stage's function


def _polars(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    before = state.lag(rows, last="v")
    totals = state.fold(rows, rows=agg.count(), amount=agg.sum("v"))
    assert isinstance(rows, pl.DataFrame) and isinstance(before, pl.DataFrame) and isinstance(totals, pl.DataFrame)
    return rows.with_columns(before=before["last"])


def _pandas(rows: pd.DataFrame, state: ValueState, epoch: Epoch) -> pd.DataFrame:
    before = state.lag(rows, last="v")
    totals = state.fold(rows, rows=agg.count(), amount=agg.sum("v"))
    assert isinstance(rows, pd.DataFrame) and isinstance(before, pd.DataFrame) and isinstance(totals, pd.DataFrame)
    return rows.assign(before=before["last"])


def _arrow(rows: pa.Table, state: ValueState, epoch: Epoch) -> pa.Table:
    before = state.lag(rows, last="v")
    totals = state.fold(rows, rows=agg.count(), amount=agg.sum("v"))
    assert isinstance(rows, pa.Table) and isinstance(before, pa.Table) and isinstance(totals, pa.Table)
    return rows.append_column("before", before["last"])


@pytest.mark.parametrize("function", [_polars, _pandas, _arrow])
def test_a_function_gets_and_may_return_the_frame_that_it_is_annotated_with(function):
    framed = stage("framed", source=files("x/*.parquet"), key="k", state=Total, order_by=["n"])(function)
    run = testing.run(framed, parallelism=2, batch_rows=2)
    rows = [{"k": key, "n": n, "v": None if n == 1 else n / 2} for n in range(4) for key in ("a", "é")]
    first, second = run.epoch(rows[:4]), run.epoch(rows[4:])
    assert first.schema == second.schema == {"k": pl.String, "n": pl.Int64, "v": pl.Float64, "before": pl.Float64}
    output = pl.concat([first, second]).sort("k", "n")
    assert output["before"].to_list() == [None, 0.0, None, 1.0] * 2
    assert {key: value.as_dict() for key, value in run.state.items()} == {
        key: {"rows": 4, "amount": 2.5, "last": 1.5} for key in ("a", "é")
    }


def test_pandas_columns_keep_their_types_whatever_a_batch_holds():
    def same(rows: pd.DataFrame, state: ValueState, epoch: Epoch) -> pd.DataFrame:
        return rows.assign(more=rows["int"] + 1, no=~rows["bool"])

    columns = {
        "k": pa.array(["a", "b"]),
        "int": pa.array([2**63 - 2, None], pa.int64()),
        "small": pa.array([None, 1], pa.int8()),
        "bool": pa.array([None, True]),
        "text": pa.array([None, "é"]),
        "raw": pa.array([b"\xff", None]),
        "day": pa.array([date(2024, 5, 1), None]),
        "at": pa.array([NOON, None], pa.timestamp("us", tz="UTC")),
        "price": pa.array([None, Decimal("1.25")], pa.decimal128(9, 2)),
    }
    rows = pa.table(columns)
    expected = pl.from_arrow(rows).with_columns(more=pl.col("int") + 1, no=~pl.col("bool"))
    for batch_rows in (1, 2):
        output = testing.run(_stage(same), batch_rows=batch_rows).epoch(rows)
        assert_frame_equal(output, expected)


def _stage(function: Callable, **arguments: object) -> Stage:
    return stage("tried", source=files("x/*.parquet"), key="k", state=Total, **arguments)(function)


def test_a_function_may_hand_out_nothing():
    def silent(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
        state.fold(rows, rows=agg.count())

    run = testing.run(_stage(silent))
    assert run.epoch([{"k": "a"}]).is_empty()
    assert run.state["a"].rows == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda rows: rows.with_columns(extra=1), "extra is new"),
        (lambda rows: rows.drop("v"), "v is missing"),
        (lambda rows: rows.with_columns(v=pl.lit("x")), "does not fit int64: conversion from `str`"),
        (len, "not int"),
    ],
)
def test_other_columns_than_for_an_empty_input_are_refused(given, message):
    def fickle(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return given(rows) if len(rows) else rows

    with pytest.raises(StageError, match=message):
        testing.run(_stage(fickle)).epoch([{"k": "a", "v": 1}])


def test_columns_in_another_order_and_narrower_types_are_fitted():
    def loose(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows.select(pl.col("v").cast(pl.Int8), "k") if len(rows) else rows

    out = testing.run(_stage(loose)).epoch([{"k": "a", "v": 1}])
    assert out.schema == {"k": pl.String, "v": pl.Int64}


def test_an_output_column_without_a_type_is_refused_before_the_first_row():
    def untyped(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows.with_columns(x=None)

    with pytest.raises(PipelineError, match="'x' cannot be told"):
        shapes(_stage(untyped), pa.schema([("k", pa.string())]))


NO_DELTA = {
    "float16": (pl.lit(1.5, pl.Float16), "x' is halffloat.*", "as Float32"),
    "duration": (pl.duration(days=1), r"x' is duration\[us\]", "number of microseconds"),
    "time": (pl.time(12), r"x' is time64\[ns\]", "as text"),
    "deep": (
        pl.struct(span=pl.duration(days=1)).implode(),
        r"x' is list.*for the duration\[us\] in it",
        "microseconds",
    ),
}


@pytest.mark.parametrize("kind", NO_DELTA)
def test_an_output_column_that_delta_cannot_have_is_refused_before_the_first_row(kind):
    value, message, remedy = NO_DELTA[kind]

    def odd(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows.select("k").with_columns(x=value)

    with pytest.raises(PipelineError, match=message) as raised:
        shapes(_stage(odd), pa.schema([("k", pa.string())]))
    assert raised.value.where == "stage tried"
    assert remedy in raised.value.next


def test_unsigned_numbers_and_fixed_sizes_are_stored_as_their_canonical_types():
    def odd(rows: pa.Table, state: ValueState, epoch: Epoch) -> pa.Table:
        kinds = {"u": pa.uint64(), "b": pa.binary(4), "f": pa.list_(pa.uint8(), 2)}
        columns = {name: pa.nulls(len(rows), kind) for name, kind in kinds.items()}
        return pa.table({"k": rows["k"], **columns})

    output = shapes(_stage(odd), pa.schema([("k", pa.string())])).outputs[MAIN]
    assert output.types == [pa.string(), pa.int64(), pa.binary(), pa.list_(pa.int16())]


def test_the_authors_own_error_carries_his_traceback_and_the_keys():
    def wrong(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows if rows.is_empty() else rows.select("nothing_of_that_name")

    with pytest.raises(StageError, match="ColumnNotFoundError") as raised:
        testing.run(_stage(wrong)).epoch([{"k": "a"}])
    assert "'k': 'a'" in str(raised.value.where)
    assert "in wrong" in raised.value.traceback
    assert "/function.py" not in raised.value.traceback


SCHEMA = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("v", pa.float64()), ("s", pa.string())])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: _stage(_polars, order_by=["when"]), "no column 'when'"),
        (lambda: stage("b", source=EVENTS, key="id", state=Total)(_polars), "no column 'id'"),
        (lambda: stage("b", source=EVENTS, key="v", state=Total)(_polars), "'v' is double, which cannot be a key"),
        (lambda: stage("b", source=EVENTS, key="last", state=Total)(_polars), "'last' is a key column of b"),
        (lambda: window("b", EVENTS, key="k", every="1h", on="s", n=agg.count()), "'s' is string, not a timestamp"),
        (lambda: window("b", EVENTS, key="k", every="1h", on="at", n=agg.sum("w")), "has no column 'w'"),
        (lambda: window("b", EVENTS, key="k", every="1h", on="at", n=agg.mean("s")), "that column is string"),
        (lambda: window("b", EVENTS, key="window_end", every="1h", on="at", n=agg.count()), "'window_end' is a key"),
    ],
)
def test_a_stage_that_does_not_fit_its_input_is_refused_before_the_first_row(broken, message):
    rows = SCHEMA.append(pa.field("last", pa.string())).append(pa.field("window_end", pa.int64()))
    with pytest.raises(PipelineError, match=message):
        shapes(broken(), rows)


# -- windows


def hourly(source: FileSource | Stage = EVENTS, *, lateness: str = "0s", **aggregates) -> Stage:
    return window(
        "hourly", source, key="k", every="1h", on="at", lateness=lateness, **(aggregates or {"n": agg.count()})
    )


def test_a_row_is_late_by_the_epochs_before_its_own():
    run = testing.run(hourly(), batch_rows=1)
    assert run.epoch([at(200), at(0)])["n"].sum() == 1  # not late: nothing had been seen when the epoch began
    assert run.late.is_empty()
    assert run.epoch([at(0)]).is_empty()
    assert len(run.late) == 1


def test_rows_without_event_time_decline_the_epoch():
    run = testing.run(hourly())
    run.epoch([at(0)])
    with pytest.raises(InputError, match="1 row has no event time in 'at'"):
        run.epoch([at(1), {"k": "a", "at": None}])
    assert run.open_windows["n"].to_list() == [1]


def test_events_before_1970_have_windows_too():
    run = testing.run(hourly())
    old = datetime(1969, 12, 31, 22, 30, tzinfo=UTC)
    run.epoch([{"k": "a", "at": old}, {"k": "a", "at": old + timedelta(minutes=89)}])
    assert run.watermark == old + timedelta(minutes=89)
    assert run.epoch([{"k": "a", "at": datetime(1970, 1, 1, tzinfo=UTC)}])["window_end"].to_list() == [
        datetime(1970, 1, 1, tzinfo=UTC)
    ]
    run.epoch([], drain=True)
    assert run.watermark == datetime(1970, 1, 1, 1, tzinfo=UTC)


def test_the_newest_event_time_may_be_1970_itself():
    run = testing.run(hourly(), batch_rows=1)
    run.epoch([{"k": "a", "at": datetime(1970, 1, 1, tzinfo=UTC) - timedelta(minutes=m)} for m in (0, 30)])
    assert run.acks[0].newest == (0,)


def test_windows_of_a_source_without_event_time_would_never_close():
    with pytest.raises(PipelineError, match="Nothing would ever close the windows of b"):
        window("b", files("x/*.parquet"), key="k", every="1h", on="at", n=agg.count())


@pytest.mark.parametrize(
    ("type", "values", "total"),
    [
        (pa.int8(), [127, 127], 254),
        (pa.int32(), [2**31 - 1, 2**31 - 1], 2**32 - 2),
        (pa.uint32(), [2**32 - 1, 2**32 - 1], 2**33 - 2),
        (pa.float32(), [2.0**24, 1.0], 2.0**24 + 1),
        (pa.bool_(), [True, True], 2),
    ],
)
def test_sums_are_wider_than_what_is_summed(type, values, total):
    class Wide(State):
        total: Annotated[float, pa.float64()] = 0.0

    def summed(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
        state.fold(rows, total=agg.sum("v"))

    rows = pa.table({"k": ["a", "a"], "at": [NOON, NOON], "v": pa.array(values, type)})
    rows = rows.set_column(1, "at", rows["at"].cast(pa.timestamp("us", tz="UTC")))
    run = testing.run(hourly(total=agg.sum("v")))
    assert run.epoch(rows, drain=True)["total"].to_list() == [total]
    wide = stage("wide", source=EVENTS, key="k", state=Wide)(summed)
    run = testing.run(wide)
    run.epoch(rows)
    assert run.state["a"].total == total


def test_windows_of_windows_keep_the_columns_of_their_late_rows():
    first = hourly(v=agg.sum("v"))
    daily = window(
        "daily", first, key="k", every="1d", on="window_start", v=agg.sum("v"), ends=agg.max("window_end"),
        late=delta.append("daily_late"),
    )  # fmt: skip
    run = testing.run(daily)
    hour = {"k": "a", "window_start": NOON, "window_end": NOON + timedelta(hours=1), "v": 1.5}
    run.epoch([hour, {**hour, "window_start": NOON + timedelta(hours=1), "window_end": NOON + timedelta(hours=2)}])
    fired = run.epoch([], drain=True)
    assert fired["v"].to_list() == [3.0]
    assert fired["ends"].to_list() == [NOON + timedelta(hours=2)]
    assert fired["window_end"].to_list() == [NOON.replace(hour=0) + timedelta(days=1)]
    run.epoch([hour])
    assert run.late.to_dicts() == [hour]


@pytest.mark.parametrize(
    ("type", "value"),
    [
        (pa.map_(pa.string(), pa.int64()), [("x", 1)]),
        (pa.time64("us"), time(12, 30)),
        (pa.month_day_nano_interval(), (1, 2, 3)),
        (pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.date32()))])), [{"m": [("x", date(2024, 5, 1))]}]),
    ],
    ids=str,
)
def test_late_rows_come_out_as_they_came_whatever_their_types(type, value):
    rows = pa.schema([("k", pa.string()), ("odd", type), ("at", pa.timestamp("us", tz="UTC"))])
    fixed = shapes(hourly(), rows)
    noon = int(NOON.timestamp() * 10**6)
    progress = Progress(noon, noon, False)
    operator = hourly().operator.build(replace(trial_of(hourly(), fixed), progress=progress, groups=range(128)))
    moments = [NOON - timedelta(hours=2), NOON, NOON - timedelta(hours=1)]
    batch = pa.table(
        [pa.array(["a"] * 3), pa.array([value, None, value], type), pa.array(moments, rows.field("at").type)],
        schema=rows,
    )
    ((output, late),) = operator.process(batch.append_column(GROUP, pa.array([7] * 3, pa.int32())))
    assert (output, operator.rows_late) == (LATE, 2)
    assert late.equals(batch.take([0, 2]))
    assert late.schema.equals(fixed.outputs[LATE])


def test_late_rows_that_delta_cannot_take_are_refused_where_there_is_a_table_for_them():
    rows = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("odd", pa.time64("us"))])
    windows = window("hourly", EVENTS, key="k", every="1h", on="at", n=agg.count(), late=delta.append("late"))
    with pytest.raises(PipelineError, match="'odd' is time64") as raised:
        shapes(windows, rows)
    assert raised.value.where == "window hourly, late=late"
    assert shapes(hourly(), rows).outputs.keys() == {MAIN, LATE}


def test_a_windows_column_that_delta_cannot_have_is_refused():
    rows = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("odd", pa.duration("us"))])
    with pytest.raises(PipelineError, match=r"'longest' (is|has the type) duration\[us\]") as raised:
        shapes(hourly(longest=agg.max("odd")), rows)
    assert raised.value.where == "window hourly"
    assert "transform=" in raised.value.next


def test_event_times_without_a_zone_are_taken_as_utc():
    run = testing.run(hourly())
    fired = run.epoch([{"k": "a", "at": NOON.replace(tzinfo=None)}], drain=True)
    assert fired["window_start"].to_list() == [NOON]
    assert shapes(hourly(), pa.schema([("k", pa.string()), ("at", pa.timestamp("us"))])).outputs.keys() == {MAIN, LATE}


# -- keys and values of every kind

EVERY_KEY = {
    "int8": (pa.int8(), [-128, 0, 127]),
    "int16": (pa.int16(), [-(2**15), 7, 2**15 - 1]),
    "int32": (pa.int32(), [-(2**31), 7, 2**31 - 1]),
    "int64": (pa.int64(), [-(2**63), 7, 2**63 - 1]),
    "bool": (pa.bool_(), [True, False]),
    "unicode": (pa.string(), ["", "a", "a\0b", "Ä", "日本語", "🛫", "\U0010ffff", "x" * 70_000]),
    "binary": (pa.binary(), [b"", b"\x00", b"\x00\xff", b"\xff\x00\x00", bytes(range(256)) * 9]),
    "date": (pa.date32(), [date(1, 1, 1), date(1970, 1, 1), date(9999, 12, 31)]),
    "timestamp": (pa.timestamp("us", tz="UTC"), [datetime(1, 1, 1, tzinfo=UTC), NOON]),
    "decimal": (pa.decimal128(9, 2), [Decimal("-1.25"), Decimal("0.00"), Decimal("9999999.99")]),
    "wide decimal": (pa.decimal128(38, 0), [Decimal(-(10**37)), Decimal(0), Decimal(10**37)]),
}


def counting(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
    state.fold(rows, rows=agg.count())


@pytest.mark.parametrize("kind", EVERY_KEY)
def test_keys_of_every_type_find_their_state_again(kind):
    type, values = EVERY_KEY[kind]
    run = testing.run(_stage(counting), parallelism=3, batch_rows=4)
    expected: Counter = Counter()
    for turn in range(2):
        keys = [value for i, value in enumerate(values * 2) for _ in range(i % 3 + turn)]
        run.epoch(pa.table({"k": pa.array(keys, type)}))
        expected += Counter(keys)
    assert {key: total.rows for key, total in run.state.items()} == dict(expected)


def test_composite_keys_of_mixed_types_find_their_state_again():
    kinds = ("unicode", "int16", "binary", "timestamp", "decimal")
    names = [f"k{i}" for i in range(len(kinds))]
    types = [EVERY_KEY[kind][0] for kind in kinds]
    keys = [tuple(EVERY_KEY[kind][1][(i // 2**j) % 2] for j, kind in enumerate(kinds)) for i in range(32)]
    mixed = stage("mixed", source=files("x/*.parquet"), key=names, state=Total)(counting)
    run = testing.run(mixed, parallelism=4, batch_rows=5)
    columns = {name: pa.array([key[i] for key in keys], types[i]) for i, name in enumerate(names)}
    run.epoch(pa.table(columns))
    run.epoch(pa.table(columns).slice(16))
    assert {key: total.rows for key, total in run.state.items()} == {key: 1 + (i >= 16) for i, key in enumerate(keys)}


def test_one_key_takes_all_rows_on_one_of_many_subtasks():
    run = testing.run(_stage(_polars, order_by=["n"]), parallelism=8, batch_rows=100)
    out = run.epoch([{"k": "hot", "n": n, "v": float(n)} for n in range(1000)])
    assert out["before"].to_list() == [None, *map(float, range(999))]
    assert sorted(ack.rows_in for ack in run.acks) == [0] * 7 + [1000]
    assert run.state["hot"].as_dict() == {"rows": 1000, "amount": 499_500.0, "last": 999.0}


def test_empty_epochs_keep_state_and_upload_nothing():
    run = testing.run(_stage(counting), parallelism=2)
    run.epoch([{"k": "a"}])
    named = {file.path for ack in run.acks for file in ack.files}
    for _ in range(3):
        run.epoch([])
        assert {file.path for ack in run.acks for file in ack.files} == named
        assert not any(file.new for ack in run.acks for file in ack.files)
    run.epoch([{"k": "a"}])
    assert run.state["a"].rows == 2


@pytest.mark.long
def test_values_of_ten_megabytes():
    class Blob(State):
        text: str = ""
        raw: bytes | None = None

    def kept(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        before = state.get(rows)
        state.put(rows)
        return rows.select("k", before=before["text"].str.len_bytes())

    blobs = stage("blobs", source=files("x/*.parquet"), key="k", state=Blob)(kept)
    run = testing.run(blobs)
    big = 10 << 20
    out = run.epoch(
        [{"k": "a", "text": "ö" * (big // 2), "raw": b"\x00" * big}, {"k": "b", "text": "small", "raw": None}]
    )
    assert sorted(out["before"]) == [0, 0]
    out = run.epoch([{"k": "a", "text": "x" * big, "raw": b"\xff" * big}])
    assert out["before"].to_list() == [big]
    assert (run.state["a"].text == "x" * big, run.state["a"].raw == b"\xff" * big) == (True, True)
    assert run.state["b"] == Blob(text="small")


def test_a_column_without_a_zone_and_the_state_made_from_it_go_together():
    class Seen(State):
        at: Timestamp | None = None

    def gaps(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows.select("k", gap=(rows["at"] - state.lag(rows, at="at")["at"]).dt.total_minutes())

    per_key = stage("gaps", source=files("x/*.parquet"), key="k", state=Seen, order_by=["at"])(gaps)
    run = testing.run(per_key)
    run.epoch(pa.table({"k": ["a"], "at": pa.array([datetime(2026, 1, 1, 9)], pa.timestamp("ns"))}))
    assert run.epoch(pa.table({"k": ["a"], "at": pa.array([datetime(2026, 1, 1, 10)], pa.timestamp("ns"))}))[
        "gap"
    ].to_list() == [60]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"ID": pa.int64()}, "'id' and 'ID'"),
        ({"s": pa.struct([("x", pa.int64()), ("X", pa.int64())])}, "'s.x' and 's.X'"),
        ({"l": pa.list_(pa.struct([("x", pa.int64()), ("X", pa.int64())]))}, "'l.item.x' and 'l.item.X'"),
    ],
    ids=["a column", "a struct", "a list of structs"],
)
def test_output_columns_that_differ_in_capital_letters_alone_are_refused_by_name(columns, named):
    def doubled(rows: pa.Table, state: ValueState, epoch: Epoch) -> pa.Table:
        for name, kind in columns.items():
            rows = rows.append_column(name, pa.nulls(rows.num_rows, kind))
        return rows

    doubling = stage("s", source=EVENTS, key="id", state=Total, sink=delta.append("t"))(doubled)
    rows = pa.schema([("id", pa.string()), ("v", pa.int64())])
    with pytest.raises(PipelineError, match=named):
        shapes(doubling, rows)
    handed_on = shapes(replace(doubling, sink=None), rows).outputs["main"]
    assert handed_on.names == ["id", "v", *columns], "only a table takes them for one"


# -- types that Polars does not have


STRANGE = [
    pa.decimal256(50, 2), pa.decimal128(5, -2), pa.month_day_nano_interval(), pa.list_(pa.decimal256(50, 2)),
    pa.struct([("part", pa.month_day_nano_interval())]),
]  # fmt: skip
WORKED_BY_POLARS = {
    "in a frame": stage("strange", source=EVENTS, key="k", state=Total)(_polars),
    "as an order": stage("strange", source=EVENTS, key="k", state=Total, order_by="v")(_arrow),
    "as a key": stage("strange", source=EVENTS, key="v", state=Total)(_arrow),
    "of what comes first": deduplicate("strange", EVENTS, key="k", order_by="v"),
    "among the first rows": top_n("strange", EVENTS, key="k", by="at", n=1),
    "of an aggregate": aggregate("strange", EVENTS, key="k", most=agg.max("v")),
    "of the last value": aggregate("strange", EVENTS, key="k", order_by="at", last=agg.last("v")),
    "of the order of values": aggregate("strange", EVENTS, key="k", order_by="v", last=agg.last("k")),
    "of a window": window("strange", EVENTS, key="k", every="1h", on="at", least=agg.min("v")),
}


@pytest.mark.parametrize("type", STRANGE, ids=str)
@pytest.mark.parametrize("use", WORKED_BY_POLARS)
def test_a_type_that_polars_does_not_have_is_refused_before_the_first_row(use, type):
    """It would end a task with a panic, at the first row that comes."""
    columns = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC")), ("v", type)])
    with pytest.raises(PipelineError, match=r"'v'\)? ?.*is .*(has no|cannot be a key|no aggregate takes)"):
        shapes(WORKED_BY_POLARS[use], columns)


def test_a_function_that_takes_arrow_is_given_any_type():
    @stage("any", source=EVENTS, key="k", state=Total)
    def counted(rows: pa.Table, state: ValueState, epoch: Epoch) -> pa.Table:
        state.fold(rows.select(["k"]), rows=agg.count())
        return rows.append_column("digits", rows["v"].cast(pa.string())).drop_columns(["v"])

    rows = pa.table({"k": ["a", "a"], "v": pa.array([Decimal(10**40), None], pa.decimal256(50, 0))})
    run = testing.run(counted)
    assert run.epoch(rows)["digits"].to_list() == [str(10**40), None]


@pytest.mark.parametrize("name", ["__weir_at", "__weir_group", "__weir_side"])
def test_columns_of_weirs_own_names_are_refused_instead_of_taken_for_its_own(name):
    both = {source: files(f"{source}/*.parquet", name=source, event_time="at") for source in "lr"}
    columns = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC")), ("v", pa.int64()), (name, pa.int64())])
    stages = [
        top_n("it", both["l"], key="k", by="v", n=1),
        aggregate("it", both["l"], key="k", total=agg.sum(name)),
        select("it", both["l"], "k", name),
        union("it", *both.values()),
        join("it", *both.values(), on="k", within=("0s", "1h")),
    ]
    for it in stages:
        with pytest.raises(PipelineError, match=f"it has a column '{name}', and names that begin with __weir_"):
            testing.run_pipeline(Pipeline("p", (it,)), [{"l": columns.empty_table()}], schema=columns)


def test_what_is_handed_out_has_no_names_of_weirs_own_and_no_patterns_as_keys_of_a_table():
    def renaming(name: str, sink=None) -> Stage:
        @stage("it", source=EVENTS, key=None, sink=sink)
        def it(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
            return rows.with_columns(pl.col("v").alias(name))

        return it

    columns = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC")), ("v", pa.int64())])
    with pytest.raises(PipelineError, match="What it hands out has a column '__weir_group', and names"):
        shapes(renaming("__weir_group", delta.upsert("t", key="__weir_group", order_by="at")), columns)
    with pytest.raises(PipelineError, match=r"A column is called '\*', .*\n  where: stage it, sink t"):
        shapes(renaming("*", delta.upsert("t", key="*", order_by="at")), columns)
    assert shapes(renaming("*", delta.append("t")), columns).outputs["main"].names == ["k", "at", "v", "*"]


@pytest.mark.parametrize("name", ["*", "", "^v.*$"])
def test_columns_whose_names_polars_takes_for_patterns_are_refused_where_it_works_with_them(name):
    columns = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC")), ("v", pa.int64()), (name, pa.int64())])
    for it in (
        top_n("it", EVENTS, key="k", by="v", n=1),
        aggregate("it", EVENTS, key=name, n=agg.count()),
        aggregate("it", EVENTS, key="k", total=agg.sum(name)),
        window("it", EVENTS, key="k", on="at", every="1h", last=agg.last("v"), order_by=name),
    ):
        with pytest.raises(PipelineError, match="takes for a pattern of names"):
            shapes(it, columns)
    untouched = testing.run(deduplicate("it", EVENTS, key="k", order_by=name), schema=columns)
    rows = [{"k": "a", "at": NOON, "v": v, name: -v} for v in (1, 2)]
    assert untouched.epoch(pa.Table.from_pylist(rows, columns))["v"].to_list() == [2]
