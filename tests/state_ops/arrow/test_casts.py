from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal

import numpy as np
import polars as pl
import pytest

from state_ops.arrow.casts import cast
from state_ops.errors import StageError

US, NS, MS = pl.Datetime("us", "UTC"), pl.Datetime("ns", "UTC"), pl.Datetime("ms", "UTC")
MAP = pl.Map(pl.String, pl.Float64)
MIDNIGHT = datetime(2024, 1, 1)


def cast_to(given: pl.Series, type) -> list:
    return cast(given, type, "state.put", "stage tried").to_list()


@pytest.mark.parametrize(
    "given, type, kept",
    [
        (pl.Series([2.0, None, -0.0]), pl.Int64, [2, None, 0]),
        (pl.Series([Decimal("2.00")]), pl.Int8, [2]),
        (pl.Series([True, None]), pl.Int64, [1, None]),
        (pl.Series([1, 0]), pl.Boolean, [True, False]),
        (pl.Series([2**53 + 1]), pl.Float64, [2.0**53]),
        (
            pl.Series([0.1, float("inf"), float("nan")]),
            pl.Float32,
            [float(np.float32(0.1)), float("inf"), float("nan")],
        ),
        (pl.Series([0.1 + 0.2, 12.3]), pl.Decimal(5, 2), [Decimal("0.30"), Decimal("12.30")]),
        (pl.Series([Decimal("1.990")]), pl.Decimal(5, 2), [Decimal("1.99")]),
        (pl.Series([7]), pl.Decimal(5, 2), [Decimal("7.00")]),
        (pl.Series(["a"], dtype=pl.Categorical), pl.String, ["a"]),
        (pl.Series([b"a"]), pl.String, ["a"]),
        (pl.Series([MIDNIGHT]), pl.Date, [date(2024, 1, 1)]),
        (pl.Series([None], dtype=pl.Float64), pl.String, [None]),
        (pl.Series([], dtype=pl.String), pl.Int64, []),
        (pl.Series([[2.0], [], None]), pl.List(pl.Int64), [[2], [], None]),
        (pl.Series([{"a": 2.0}, None]), pl.Struct({"a": pl.Int64}), [{"a": 2}, None]),
    ],
)
def test_what_a_type_holds_goes_in(given, type, kept):
    assert str(cast_to(given, type)) == str(kept)


def test_a_sum_of_a_thousand_amounts_is_an_amount():
    amounts = np.random.default_rng(0).integers(1, 10_000, (100, 1_000)) / 100
    sums = [sum(row.tolist()) for row in amounts]
    assert cast_to(pl.Series(sums), pl.Decimal(18, 2)) == [Decimal(f"{number:.2f}") for number in sums]


def test_nanoseconds_are_cut_to_microseconds():
    assert cast(pl.Series([-1, 1_999], dtype=NS), US, "", "").to_physical().to_list() == [-1, 1]
    assert cast(pl.Series([1_000_001], dtype=NS), MS, "", "").to_physical().to_list() == [1]
    assert cast_to(pl.Series([1_999], dtype=pl.Duration("ns")), pl.Duration("us")) == [timedelta(microseconds=1)]


@pytest.mark.parametrize(
    "given, type, message",
    [
        (pl.Series([2.0, 1.7, 1.8]), pl.Int64, "1.7 would become 1"),
        (pl.Series([Decimal("1.75")]), pl.Int64, "would become 1"),
        (pl.Series([2**40]), pl.Int32, "conversion from `i64` to `i32` failed"),
        (pl.Series([float("nan")]), pl.Int64, "conversion from `f64` to `i64` failed"),
        (pl.Series([2]), pl.Boolean, "2 would become True"),
        (pl.Series([0.5]), pl.Boolean, "0.5 would become True"),
        (pl.Series([1e300]), pl.Float32, "would become inf"),
        (pl.Series([1.999]), pl.Decimal(5, 2), "1.999 would become"),
        (pl.Series([Decimal("1.999")]), pl.Decimal(5, 2), "would become"),
        (pl.Series([None, "12"]), pl.Int64, "'12' is String"),
        (pl.Series([5]), pl.String, "5 is Int64"),
        (pl.Series([10**18], dtype=pl.Datetime("us")), pl.Int64, "'33658-09-27 01:46:40.000000' is Datetime"),
        (
            pl.Series([10**18], dtype=pl.Datetime("us")),
            pl.Date,
            "'33658-09-27 01:46:40.000000' would become '33658-09-27'",
        ),
        (pl.Series([2**30], dtype=pl.Int32).cast(pl.Date), pl.Int64, "is Date"),
        (pl.Series([2**30], dtype=pl.Int32).cast(pl.Date), US, "state.put: "),
        (pl.Series([2**62], dtype=pl.Datetime("ms")), US, "state.put: "),
        (pl.Series([{"a": 1, "b": 2}]), pl.Struct({"a": pl.Int64}), "same number of fields"),
        (pl.Series([5]), US, "5 is Int64"),
        (pl.Series([datetime(2024, 1, 1, 23)]), pl.Date, "would become"),
        (pl.Series([1_001], dtype=US), MS, "would become"),
        (pl.Series([[2.0], [1.9]]), pl.List(pl.Int64), "1.9 would become 1"),
        (pl.Series([[1.0, 1.9]]), pl.Array(pl.Int64, 2), "1.9 would become 1"),
        (pl.Series([{"a": [1.9]}]), pl.Struct({"a": pl.List(pl.Int64)}), "1.9 would become 1"),
        (pl.Series([[{"key": "a", "value": 1.9}]]).cast(MAP), pl.Map(pl.String, pl.Int64), "1.9 would become 1"),
        (pl.Series([[{"key": "a", "value": 1.9}]]), pl.Map(pl.String, pl.Int64), "1.9 would become 1"),
    ],
)
def test_what_a_type_would_change_is_refused_with_the_value(given, type, message):
    with pytest.raises(StageError) as raised:
        cast_to(given, type)
    assert str(raised.value).startswith("state.put: ") and message in str(raised.value)
    assert raised.value.where == "stage tried"
