from __future__ import annotations

import random
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from state_ops.errors import DamageError, PipelineError, StageError
from state_ops.schema.row_codec import decode_rows, encode_rows
from state_ops.schema.state_schema import StateSchema


def _integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


VALUES: dict[pa.DataType, st.SearchStrategy] = {
    pa.int8(): _integers(8),
    pa.int16(): _integers(16),
    pa.int32(): _integers(32),
    pa.int64(): _integers(64),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=40),
    pa.binary(): st.binary(max_size=40),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", tz="UTC"): st.datetimes(timezones=st.just(UTC)),
    pa.decimal128(38, 4): st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: Decimal(f"{n}e-4")),
    pa.decimal128(5, 2): st.integers(-99999, 99999).map(lambda n: Decimal(f"{n}e-2")),
}


SMALL = StateSchema.build(
    [
        ("n", pa.int32(), False, 0),
        ("s", pa.string(), True, None),
        ("b", pa.bool_(), False, False),
        ("at", pa.timestamp("us", tz="UTC"), True, None),
        ("raw", pa.binary(), True, None),
        ("d", pa.date32(), False, None),
        ("price", pa.decimal128(10, 2), True, None),
    ]
)


def _small(n=1, s="é", b=True, at=datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), raw=b"\0", d=date(1970, 1, 2), price=None):
    row = {"n": n, "s": s, "b": b, "at": at, "raw": raw, "d": d, "price": price}
    return pa.Table.from_pylist([row], SMALL.arrow)


def test_bytes_behind_a_null_in_a_list_leave_no_trace():
    offsets = pa.py_buffer(np.array([0, 1, 4, 5], np.int32))
    hidden = pa.Array.from_buffers(pa.string(), 3, [pa.py_buffer(b"\x05"), offsets, pa.py_buffer(b"axyzb")])
    schema = StateSchema.build([("l", pa.list_(pa.string()), True, None)])
    behind = pa.table({"l": pa.ListArray.from_arrays([0, 2, 3], hidden)})
    plain = pa.table({"l": [["a", None], ["b"]]})
    assert encode_rows(schema, behind) == encode_rows(schema, plain)
    assert decode_rows(schema, encode_rows(schema, behind)).to_pylist() == plain.to_pylist()


def test_many_rows_of_many_lengths():
    rng = random.Random(5)
    texts = [rng.choice([None, "", "x" * rng.randint(0, 300), "Ω" * rng.randint(0, 30)]) for _ in range(20_000)]
    texts[77] = "long" * 50_000
    schema = StateSchema.build(
        [("a", pa.string(), True, None), ("i", pa.int64(), False, 0), ("b", pa.string(), True, None)]
    )
    table = pa.table({"a": texts, "i": range(20_000), "b": texts[::-1]}, schema=schema.arrow).slice(3, 19_000)
    assert decode_rows(schema, encode_rows(schema, table)).equals(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns("s"), "'s' is missing"),
        (lambda t: t.append_column("s", t["s"]), "'s' is there twice"),
        (lambda t: t.append_column("z", t["s"]), "'z' is not a field"),
        (lambda t: t.set_column(0, "n", t["n"].cast(pa.int64())), "'n' is int64 but the state declares int32"),
        (lambda t: t.set_column(1, "s", t["s"].cast(pa.large_string())), "'s' is large_string"),
    ],
)
def test_columns_that_do_not_fit_are_named(change, message):
    with pytest.raises(PipelineError, match=message):
        encode_rows(SMALL, change(_small()))


def test_a_null_where_none_may_be_is_the_stages_error():
    with pytest.raises(StageError, match="'n' is not nullable"):
        encode_rows(SMALL, _small(n=None))


def test_another_schema_or_format_is_damage():
    other = StateSchema.build([(f.name, f.type, f.nullable, 1 if f.name == "n" else f.default) for f in SMALL.fields])
    value = encode_rows(SMALL, _small())[0]
    with pytest.raises(DamageError, match="another schema"):
        decode_rows(other, [value])
    with pytest.raises(DamageError, match="format version"):
        decode_rows(SMALL, [b"\x02" + value[1:]])


def test_every_value_cut_short_or_too_long_is_damage():
    value = encode_rows(SMALL, _small())[0]
    for size in range(len(value)):
        with pytest.raises(DamageError, match="cut short"):
            decode_rows(SMALL, [value, value[:size], value])
    with pytest.raises(DamageError, match="after its last field"):
        decode_rows(SMALL, [value, value + b"\0"])


@pytest.mark.parametrize(
    ("offset", "byte", "message"),
    [
        (9, 0x41, "null in 'n', which is not nullable"),
        (9, 0xC0, "damaged null bitmap"),
        (9, 0x48, "bytes behind the null in 'at'"),
        (14, 0xFF, "cut short in 's'"),
        (17, 0xFF, "cut short in 's'"),
        (14, 0x01, "no string in 's'"),
        (18, 0x02, "neither true nor false"),
        (51, 0xFF, "no string in 's'"),
    ],
)
def test_an_altered_value_is_damage_with_its_field(offset, byte, message):
    value = bytearray(encode_rows(SMALL, _small())[0])
    value[offset] = byte
    with pytest.raises(DamageError, match=message):
        decode_rows(SMALL, [bytes(value)])
