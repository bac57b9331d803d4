from __future__ import annotations

import random
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_ops.errors import DamageError, PipelineError, StageError
from state_ops.schema.row_codec import SCHEMA_ID, decode_rows, encode_rows
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


@st.composite
def tables(draw) -> tuple[StateSchema, pa.Table]:
    """A random schema and a table of it: sliced, in chunks, its columns in another order."""
    types = draw(st.lists(st.tuples(st.sampled_from(list(VALUES)), st.booleans()), min_size=1, max_size=18))
    schema = StateSchema.build([(f"f{i}", type, nullable, None) for i, (type, nullable) in enumerate(types)])
    rows = draw(st.integers(0, 9))
    columns = {}
    for f in schema.fields:
        value = st.none() | VALUES[f.type] if f.nullable else VALUES[f.type]
        columns[f.name] = pa.array(draw(st.lists(value, min_size=rows, max_size=rows)), f.type)
    table = pa.table(dict(sorted(columns.items(), reverse=True)))
    start = draw(st.integers(0, rows))
    cut = draw(st.integers(0, rows))
    return schema, pa.concat_tables([table.slice(0, cut), table.slice(cut)]).slice(start)


@given(tables())
@settings(max_examples=200)
def test_rows_come_back_as_they_went(case):
    schema, table = case
    values = encode_rows(schema, table)
    assert len(values) == table.num_rows
    again = decode_rows(schema, values)
    again.validate(full=True)
    assert again.schema.equals(schema.arrow)
    assert again.to_pylist() == table.select(again.column_names).to_pylist()
    # Canonical: how Arrow happens to hold the rows leaves no trace in the bytes.
    assert encode_rows(schema, again) == values
    for batch in table.to_batches():
        assert encode_rows(schema, batch) == [values.pop(0) for _ in range(batch.num_rows)]


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


def test_golden_bytes():
    # State on storage has this format: a change needs a new FORMAT_VERSION and code that still reads this one.
    assert encode_rows(SMALL, _small())[0].hex() == "".join(
        [
            "01",  # format version
            "1fba2d340d01cddc",  # schema id
            "40",  # nulls: price
            "01000000",  # n
            "02000000",  # length of s
            "01",  # b
            "40420f0000000000",  # at
            "01000000",  # length of raw
            "01000000",  # d
            "00" * 16,  # price
            "c3a9",  # s
            "00",  # raw
        ]
    )


def test_values_name_their_schema():
    assert encode_rows(SMALL, _small())[0][SCHEMA_ID] == SMALL.schema_id


def test_bytes_behind_a_null_leave_no_trace():
    type, n = pa.string(), pa.int32()
    hidden = pa.Array.from_buffers(
        type,
        2,
        [pa.py_buffer(b"\x01"), pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0])), pa.py_buffer(b"abc")],
    )
    number = pa.Array.from_buffers(n, 2, [pa.py_buffer(b"\x01"), pa.py_buffer(b"\x07\0\0\0\x08\0\0\0")])
    schema = StateSchema.build([("s", type, True, None), ("n", n, True, None)])
    plain = pa.table({"s": pa.array(["a", None], type), "n": pa.array([7, None], n)})
    assert encode_rows(schema, pa.table({"s": hidden, "n": number})) == encode_rows(schema, plain)


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


def test_no_rows():
    assert encode_rows(SMALL, SMALL.arrow.empty_table()) == []
    assert decode_rows(SMALL, []).equals(SMALL.arrow.empty_table())


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


@given(st.integers(0, 53), st.integers(1, 255), st.binary(max_size=80))
@settings(max_examples=300)
def test_any_byte_flipped_is_another_sound_row_or_damage(offset, mask, noise):
    value = bytearray(encode_rows(SMALL, _small(price=Decimal("1.25")))[0])
    value[offset] ^= mask
    for bad in (bytes(value), noise, bytes(value[:9]) + noise):
        try:
            table = decode_rows(SMALL, [bad])
        except DamageError:
            continue
        table.validate(full=True)
        assert encode_rows(SMALL, table) == [bad]
