"""Writes tests/golden/values-format-1: rows with a field of every type, and keys of every key type, as state has them.

Run once when a format is new: `python -m tests.golden.make_values`. The files are never written again; what a released
Weir has stored must be read for ever, and the tests compare byte by byte.
"""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from state_ops.schema.key_codec import encode_keys
from state_ops.schema.key_groups import key_groups
from state_ops.schema.row_codec import encode_rows
from state_ops.schema.state_schema import StateSchema

HERE = Path(__file__).parent / "values-format-1"

_STRUCT = pa.struct([pa.field("a", pa.int16(), False), ("b", pa.struct([("c", pa.string())]))])
FIELDS: list[tuple[pa.DataType, Any, Any]] = [
    (pa.int8(), -1, 127),
    (pa.int16(), -2, 32767),
    (pa.int32(), -3, 2**31 - 1),
    (pa.int64(), -4, 2**63 - 1),
    (pa.uint8(), 1, 255),
    (pa.uint16(), 2, 65535),
    (pa.uint32(), 3, 2**32 - 1),
    (pa.uint64(), 4, 2**64 - 1),
    (pa.float16(), 1.5, -0.0),
    (pa.float32(), 0.1, float("inf")),
    (pa.float64(), 0.1, -1e300),
    (pa.bool_(), True, False),
    (pa.string(), "é", ""),
    (pa.large_string(), "漢", "\0"),
    (pa.binary(), b"\0\1", b""),
    (pa.large_binary(), b"\xff", b"x"),
    (pa.binary(3), b"abc", b"\0\0\0"),
    (pa.date32(), date(1970, 1, 2), date(1900, 1, 1)),
    (pa.date64(), date(1970, 1, 2), date(1900, 1, 1)),
    (pa.time32("s"), time(0, 0, 1), time(23, 59, 59)),
    (pa.time32("ms"), time(0, 0, 1), time(23, 59, 59)),
    (pa.time64("us"), time(0, 0, 0, 1), time(23, 59, 59, 999999)),
    (pa.time64("ns"), time(0, 0, 0, 1), time(23, 59, 59, 999999)),
    (pa.timestamp("s"), datetime(1970, 1, 1, 0, 0, 1), datetime(2024, 1, 1)),
    (
        pa.timestamp("ms", tz="Europe/Berlin"),
        datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        datetime(2024, 1, 1, tzinfo=UTC),
    ),
    (pa.timestamp("us", tz="UTC"), datetime(1969, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=UTC)),
    (pa.timestamp("ns"), datetime(1970, 1, 1, 0, 0, 1), datetime(2024, 1, 1)),
    (pa.duration("s"), timedelta(1), timedelta(-1)),
    (pa.duration("us"), timedelta(0, 1), timedelta(0, 0, -1)),
    (pa.decimal32(7, 2), Decimal("1.25"), Decimal("-99999.99")),
    (pa.decimal64(18, 0), Decimal(1), Decimal(-(10**18) + 1)),
    (pa.decimal128(38, 4), Decimal("1.5"), Decimal("-1e-4")),
    (pa.decimal256(76, 0), Decimal(10**75), Decimal(-1)),
    (pa.month_day_nano_interval(), (1, 2, 3), (-1, 0, 2**40)),
    (pa.null(), None, None),
    (pa.list_(pa.int32()), [1, None, 3], []),
    (pa.large_list(pa.string()), ["a", None, "", "ü"], ["b"]),
    (pa.list_(pa.bool_(), 2), [True, None], [False, False]),
    (pa.map_(pa.string(), pa.float64()), [("b", 1.0), ("a", None)], []),
    (_STRUCT, {"a": 1, "b": {"c": "x"}}, {"a": -1, "b": None}),
    (pa.list_(_STRUCT), [{"a": 1, "b": {"c": "x"}}, None, {"a": 2, "b": None}], [None]),
    (pa.list_(pa.list_(pa.map_(pa.int8(), pa.list_(pa.binary())))), [[[(1, [b"z", None])], None], None, []], [[]]),
]


def rows() -> tuple[StateSchema, pa.Table]:
    """Four rows: two of values, one of nulls, and the first once more, so that lists of several rows follow one
    another."""
    fields = [(f"f{i:02}", type, True, None) for i, (type, _, _) in enumerate(FIELDS)]
    schema = StateSchema.build([("id", pa.int64(), False, None), *fields])
    columns = [pa.array([first, two, None, first], type) for type, first, two in FIELDS]
    return schema, pa.table([pa.array([1, 2, 3, 4]), *columns], schema=schema.arrow)


KEYS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [-128, 0, 127]),
    (pa.int16(), [-(2**15), 0, 2**15 - 1]),
    (pa.int32(), [-(2**31), 0, 2**31 - 1]),
    (pa.int64(), [-(2**63), 0, 2**63 - 1]),
    (pa.bool_(), [False, True, True]),
    (pa.string(), ["", "a\0b", "漢😀"]),
    (pa.binary(), [b"", b"\0\xff", b"x" * 40]),
    (pa.date32(), [date(1900, 1, 1), date(1970, 1, 1), date(2024, 2, 29)]),
    (pa.timestamp("us", tz="UTC"), [datetime(y, 1, 1, tzinfo=UTC) for y in (1900, 1970, 2024)]),
    (pa.decimal128(18, 2), [Decimal("-1.25"), Decimal(0), Decimal("1.25")]),
    (pa.decimal128(38, 0), [Decimal(-(10**37)), Decimal(0), Decimal(10**37)]),
]


def keys() -> list[bytes]:
    """Three keys for each type alone, and three of them all together."""
    columns = [pa.array(values, type) for type, values in KEYS]
    keys = []
    for composite in [*([column] for column in columns), columns]:
        keys += encode_keys(composite, key_groups(composite, 128).astype(np.uint16), 1)
    return keys


if __name__ == "__main__":
    schema, table = rows()
    HERE.mkdir(exist_ok=True)
    (HERE / "schema.json").write_text(json.dumps(json.loads(schema.to_json()), indent=1, ensure_ascii=False) + "\n")
    (HERE / "values.hex").write_text("".join(value.hex() + "\n" for value in encode_rows(schema, table)))
    (HERE / "keys.hex").write_text("".join(key.hex() + "\n" for key in keys()))
