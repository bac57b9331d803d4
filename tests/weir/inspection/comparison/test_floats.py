"""Floats count as equal by their first nine digits, in SQL as in Python, also those in lists and structs."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from weir.inspection.comparison.floats import rounded, rounded_column
from weir.inspection.database import database, load

PARTS = pa.struct([("name", pa.string()), ("sums", pa.list_(pa.float64()))])


def in_sql(values: list[Any], type: pa.DataType) -> list[Any]:
    table = pa.table({"value": pa.array(values, type)})
    with database() as connection:
        load(connection, "given", [table], table.schema)
        return [row[0] for row in connection.execute(f"SELECT {rounded_column('value', type)} FROM given").fetchall()]


@pytest.mark.parametrize(
    "type, was, now, is_same",
    [
        (pa.float64(), 0.1 + 0.2, 0.3, True),
        (pa.float64(), 0.31, 0.3, False),
        (pa.float64(), 1.000000005, math.nextafter(1.000000005, 0), True),
        (pa.float64(), math.nan, -math.nan, True),
        (pa.float64(), 0.0, -0.0, True),
        (pa.float64(), 1e300, 1.000001e300, False),
        (pa.float64(), None, 0.0, False),
        (pa.list_(pa.float64()), [0.1 + 0.2, None], [0.3, None], True),
        (pa.list_(pa.float64()), [0.1], [0.1, 0.1], False),
        (pa.list_(PARTS), [{"name": "a", "sums": [0.1 + 0.2]}], [{"name": "a", "sums": [0.3]}], True),
        (pa.list_(PARTS), [{"name": "a", "sums": [0.3]}], [{"name": "b", "sums": [0.3]}], False),
        (PARTS, {"name": "a", "sums": None}, {"name": "a", "sums": []}, False),
        (PARTS, None, {"name": None, "sums": None}, False),
        (pa.int64(), 1 << 60, (1 << 60) + 1, False),
    ],
)
def test_only_the_last_digits_of_floats_are_no_difference(type, was, now, is_same):
    first, second = in_sql([was, now], type)
    assert (first == second) == is_same
    assert (rounded(was) == rounded(now)) == is_same
