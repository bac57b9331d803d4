"""Rows of two sides are compared value by value, whatever their columns are called."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tests.recovery import small
from weir.inspection.comparison.tables import OURS, THEIRS, TableDiff, compared_rows
from weir.inspection.database import database, load


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> TableDiff:
    first, second = pa.table(ours), pa.table(theirs)
    with database() as connection:
        load(connection, OURS, [first], first.schema)
        load(connection, THEIRS, [second], second.schema)
        return compared_rows(connection, small.pipeline, "booked", first.schema, second.schema)


def differs(type: pa.DataType, was: Any, now: Any, other: pa.DataType | None = None) -> bool:
    sides = ({"id": ["k"], "value": pa.array([value], of)} for value, of in ((was, type), (now, other or type)))
    return not compared(*sides).same


def test_columns_may_have_the_names_that_the_comparison_uses_itself():
    names = ["turn", "place", "day", "less", "more", "column_0", "change"]
    ours = {"id": ["k1", "k2"], **{name: ["a", "b"] for name in names}}
    theirs = {"id": ["k1", "k2"], **{name: ["a", "c"] for name in names}}
    compared_now = compared(ours, theirs)
    assert compared_now.counts == {"added": 0, "removed": 0, "changed": 1}
    was, now = compared_now.sample
    assert (was.pop("change"), now.pop("change")) == ("was", "is")
    assert list(was.values()) == ["k2", *"b" * len(names)] and list(now.values()) == ["k2", *"c" * len(names)]
    assert {*names} - {*was} == {"change"} and "change (of the table)" in was


def test_rows_that_have_no_column_in_common_all_differ():
    renamed = compared({"id": ["k1", "k2"]}, {"key": ["k1"]})
    assert renamed.counts == {"added": 1, "removed": 2, "changed": 0} and not renamed.same
    assert renamed.columns == "only the pipeline has id; only the branch has key"


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (-math.nan, math.nan),
        (-0.0, 0.0),
        (0.1 + 0.2, 0.3),
        (12345678.75, math.nextafter(12345678.75, 0)),  # a half of the ninth digit, from both sides
    ],
)
def test_floats_that_sums_in_another_order_make_are_the_same(was, now):
    assert not differs(pa.float64(), was, now)


def test_other_values_differ():
    assert differs(pa.float64(), math.nan, None) and differs(pa.float64(), 1.00000001, 1.0)
    assert differs(pa.int64(), 2**53, 2**53 + 1) and differs(pa.binary(), b"\xff\x00", b"\xff\x01")
    assert differs(pa.list_(pa.int64()), [1, None], [1]) and differs(pa.list_(pa.int64()), [], None)
    assert differs(pa.struct([("a", pa.int64())]), {"a": None}, None) and differs(pa.timestamp("ns", "UTC"), 1, 2)


def test_decimals_of_another_scale_are_compared_by_what_they_are_worth():
    narrow, wide = pa.decimal128(10, 2), pa.decimal128(38, 20)
    assert not differs(narrow, Decimal("1.10"), Decimal("1.1"), wide)
    assert differs(narrow, Decimal("1.10"), Decimal("1.11"), wide)
    assert differs(pa.int64(), 2**62, Decimal(1), wide) and not differs(pa.int64(), 100, Decimal(100), wide)
