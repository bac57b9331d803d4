"""Avro beside fastavro, which is another decoder: all types that are read, codecs, damage, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_ops.errors import InputError, PipelineError
from weir.connectors.formats.avro import bounds
from weir.connectors.formats.avro.avro_schema import AvroSchema
from weir.connectors.formats.decoding import decode, infer
from weir.connectors.kafka import reading

ENUM = {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
POINT = {"type": "record", "name": "Point", "fields": [{"name": "x", "type": "int"}, {"name": "n", "type": "null"}]}


def written(type: Any, values: list[Any], codec: str = "null", interval: int = 16000) -> bytes:
    """A file with one field, v."""
    file = io.BytesIO()
    schema = {"type": "record", "name": "Top", "namespace": "of.tests", "fields": [{"name": "v", "type": type}]}
    fastavro.writer(file, fastavro.parse_schema(schema), [{"v": value} for value in values], codec, interval)
    return file.getvalue()


def read(
    data: bytes, schema: pa.Schema | None = None, block: int = 1 << 20
) -> tuple[pa.DataType, list[Any], list[Any]]:
    schema = infer("avro", {}, io.BytesIO(data), "f.avro") if schema is None else schema
    batches = list(decode("avro", {}, io.BytesIO(data), schema, "f.avro", block))
    rows = [row["v"] for batch in batches for row in batch.rows.to_pylist()]
    return schema.field("v").type, rows, [(row.number, row.reason) for batch in batches for row in batch.rejected]


def messages(type: Any, values: list[Any]) -> tuple[pa.DataType, list[Any]]:
    """The same values, each in a message of its own."""
    schema = {"type": "record", "name": "Top", "namespace": "of.tests", "fields": [{"name": "v", "type": type}]}
    sent = []
    for value in values:
        fastavro.schemaless_writer(message := io.BytesIO(), fastavro.parse_schema(schema), {"v": value})
        sent.append(message.getvalue())
    rows, reasons = reading.decoder("avro", json.dumps(schema), False, {})(sent)
    assert not reasons and rows.schema == reading.columns_of("avro", json.dumps(schema))
    return rows.schema.field("v").type, rows.column("v").to_pylist()


@pytest.mark.parametrize(
    ("type", "values", "expected"),
    [
        ("int", [1, -(2**31), 2**31 - 1], pa.int32()),
        (["long", "null"], [None, -(2**63), 2**63 - 1], pa.int64()),
        ("float", [1.5, math.inf], pa.float32()),
        (["null", "double"], [None, -0.0, 1e300], pa.float64()),
        (["null", "boolean"], [True, None, False], pa.bool_()),
        (["null", "string"], ["", "é", None], pa.string()),
        (["null", "bytes"], [b"", b"\x00", None], pa.binary()),
        (["null", {"type": "fixed", "name": "F", "size": 2}], [b"ab", None], pa.binary()),
        (["null", ENUM], ["A", None, "B"], pa.string()),
        (["null", {"type": "array", "items": ["null", "int"]}], [[1, None], [], None], pa.list_(pa.int32())),
        ({"type": "map", "values": ["null", ENUM]}, [{"a": "A", "b": None}, {}], pa.map_(pa.string(), pa.string())),
        (["null", {"type": "map", "values": {"type": "map", "values": POINT}}], [{"a": {"b": {"x": 1, "n": None}}}, None],
         pa.map_(pa.string(), pa.map_(pa.string(), pa.struct([("x", pa.int32()), ("n", pa.null())])))),
        (["null", POINT], [{"x": 1, "n": None}, None], pa.struct([("x", pa.int32()), ("n", pa.null())])),
        (["null", {"type": "int", "logicalType": "date"}], [date(1, 1, 1), None], pa.date32()),
        ({"type": "long", "logicalType": "timestamp-millis"}, [datetime(1969, 12, 31, 23, 59, 59, 999000, UTC)], pa.timestamp("us", "UTC")),
        (["null", {"type": "long", "logicalType": "timestamp-micros"}], [datetime(9999, 1, 1, tzinfo=UTC), None], pa.timestamp("us", "UTC")),
        (["null", DECIMAL], [Decimal("-1.25"), None, Decimal("99999999.99")], pa.decimal128(10, 2)),
        ({"type": "fixed", "name": "D", "size": 6, "logicalType": "decimal", "precision": 10, "scale": 2}, [Decimal("-1.25")], pa.decimal128(10, 2)),
        ({"type": "long", "logicalType": "time-micros"}, [time(1, 2, 3, 4)], pa.time64("ns")),
    ],
    ids=str,
)  # fmt: skip
def test_every_type_is_read_as_it_was_written(type: Any, values: list[Any], expected: pa.DataType | None):
    got, rows, bad = read(written(type, values))
    assert got == (expected or pa.null()) and not bad
    as_written = [
        list(value.items()) if isinstance(value, dict) and pa.types.is_map(got) else value for value in values
    ]
    assert str(rows).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc") == str(as_written) or repr(
        rows
    ) == repr([nested(value, got) for value in values])
    assert messages(type, values) == (got, rows), "a message of the same schema has the same types and values"


def nested(value: Any, type: pa.DataType) -> Any:
    """A value as Arrow hands it out."""
    if isinstance(value, dict) and pa.types.is_map(type):
        return [(key, nested(item, type.item_type)) for key, item in value.items()]
    return value


def test_local_and_finer_times_are_in_microseconds():
    local = written({"type": "long", "logicalType": "local-timestamp-micros"}, [datetime(2024, 1, 2, 3)])
    assert (
        messages({"type": "long", "logicalType": "local-timestamp-micros"}, [datetime(2024, 1, 2, 3)])
        == read(local)[:2]
    )
    assert read(local)[:2] == (pa.timestamp("us", "UTC"), [datetime(2024, 1, 2, 3, tzinfo=UTC)])
    fine = written({"type": "long", "logicalType": "timestamp-nanos"}, [-1])
    assert read(fine)[:2] == (pa.timestamp("us", "UTC"), [datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)])
    assert messages({"type": "long", "logicalType": "timestamp-nanos"}, [-1]) == read(fine)[:2]


@pytest.mark.parametrize(
    "type",
    [["int", "string"], {"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]},
     {"type": "array", "items": "null"}],
    ids=str,
)  # fmt: skip
def test_what_no_column_can_have_is_refused_in_files_and_messages_alike(type: Any):
    schema = json.dumps({"type": "record", "name": "Top", "fields": [{"name": "v", "type": type}]})
    with pytest.raises(PipelineError, match="type for which there is no column"):
        reading.columns_of("avro", schema)
    with pytest.raises(InputError, match="type that cannot be read"):
        read(written(type, []))


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz"])
@pytest.mark.parametrize("block", [1, 200, 1 << 20])
def test_blocks_and_codecs(codec: str, block: int):
    values = list(range(1000))
    assert read(written("int", values, codec, 100), block=block)[1] == values


def test_snappy_and_zstandard():
    """fastavro lacks libraries for these, so the blocks are packed here."""
    import zlib

    plain = written("string", ["a" * 100])
    head, body = plain[: plain.index(b"\xc8\x01a") - 3], b"\xc8\x01" + b"a" * 100
    sync = plain[-16:]
    for codec, packed in (
        (b"snappy", pa.compress(body, "snappy", asbytes=True) + zlib.crc32(body).to_bytes(4, "big")),
        (b"zstandard", pa.compress(body, "zstd", asbytes=True)),
    ):
        named = head.replace(b"\x14avro.codec\x08null", b"\x14avro.codec" + bytes([2 * len(codec)]) + codec)
        assert named != head
        assert read(named + b"\x02" + bytes([2 * len(packed)]) + packed + sync)[1] == ["a" * 100]
        with pytest.raises(InputError, match="damaged"):
            read(named + b"\x02" + bytes([2 * len(packed)]) + packed[:-1] + b"\x00" + sync)


def test_damage_is_told_by_row_and_what_is_before_it_is_read():
    data = written("int", list(range(1000)), interval=100)
    rows = []
    with pytest.raises(InputError, match="damaged"):
        for batch in decode("avro", {}, io.BytesIO(data[:-30]), pa.schema([("v", pa.int32())]), "f", 1):
            rows += batch.rows.column("v").to_pylist()
    assert rows and rows == list(range(len(rows)))
    for broken in (b"", b"Obj", b"Obj\x02" + data[4:], data[:40], data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(InputError, match="damaged"):
            read(broken)


@given(st.integers(0, 400), st.integers(0, 255))
def test_any_byte_may_be_another_one(at: int, byte: int):
    """Nothing but an InputError comes of it."""
    data = bytearray(written(["null", {"type": "array", "items": "string"}], [["a", "bc"], None] * 20))
    data[at % len(data)] = byte
    with contextlib.suppress(InputError):
        read(bytes(data), pa.schema([("v", pa.list_(pa.string()))]))


@pytest.mark.parametrize("type", [["int", "string"], ["null", "int", "string"], {"type": "record", "name": "R", "fields": [
    {"name": "next", "type": ["null", "R"]}]}], ids=str)  # fmt: skip
def test_what_no_column_can_be_is_refused(type: Any):
    with pytest.raises(InputError, match="type that cannot be read"):
        read(written(type, []))


def test_rows_that_do_not_fit_a_declared_type_are_bad():
    data = written("long", [1, 2**40, 3, 2**33])
    narrow = pa.schema([("v", pa.int32())])
    assert read(data, narrow)[1:] == ([1, 3], [(2, "the field 'v' is no int32"), (4, "the field 'v' is no int32")])
    wide = pa.schema([("v", pa.int64())])
    assert read(written("int", [1]), wide)[:2] == (pa.int64(), [1])
    with pytest.raises(InputError, match="no field 'w'"):
        read(data, pa.schema([("w", pa.int64())]))


@pytest.mark.parametrize(
    ("type", "value", "wanted"),
    [
        ("long", 10, pa.bool_()),
        ("double", 0.5, pa.bool_()),
        ("boolean", True, pa.int64()),
        ("boolean", True, pa.decimal128(5, 2)),
        ("long", 1_700_000_000_000, pa.timestamp("us", "UTC")),
        ("int", 20_000, pa.date32()),
        ({"type": "long", "logicalType": "timestamp-micros"}, datetime(2024, 1, 1, 7, tzinfo=UTC), pa.date32()),
        ({"type": "long", "logicalType": "timestamp-micros"}, datetime(2024, 1, 1, 7, tzinfo=UTC), pa.int64()),
        ({"type": "int", "logicalType": "date"}, date(2024, 1, 1), pa.int32()),
    ],
    ids=str,
)
def test_a_field_that_would_be_read_as_another_value_is_refused_wherever_it_stands(type: Any, value: Any, wanted: Any):
    record = {"type": "record", "name": "R", "fields": [{"name": "x", "type": type}]}
    for of, path, values, schema in (
        (type, "v", value, wanted),
        (record, r"v\.x", {"x": value}, pa.struct([("x", wanted)])),
        ({"type": "array", "items": type}, "v", [value], pa.list_(wanted)),
        ({"type": "map", "values": type}, "v", {"k": value}, pa.map_(pa.string(), wanted)),
    ):
        with pytest.raises(InputError, match=f"the field '{path}' is .*, which is not read as"):
            read(written(of, [values]), pa.schema([("v", schema)]))


def test_a_field_within_a_record_in_other_capitals_is_refused_and_not_null():
    record = {"type": "record", "name": "R", "fields": [{"name": "X", "type": "long"}]}
    for of, value, wanted in (
        (record, {"X": 1}, pa.struct([("x", pa.int64())])),
        ({"type": "array", "items": record}, [{"X": 1}], pa.list_(pa.struct([("x", pa.int64())]))),
    ):
        with pytest.raises(InputError, match=r"'v\.X' differs from 'v\.x' by capitals alone"):
            read(written(of, [value]), pa.schema([("v", wanted)]))


LEAVES = st.sampled_from([
    ("int", st.integers(-(2**31), 2**31 - 1)), ("long", st.integers(-(2**63), 2**63 - 1)), ("string", st.text(max_size=3)),
    ("double", st.floats(allow_nan=False)), ("boolean", st.booleans()), ("bytes", st.binary(max_size=3)),
])  # fmt: skip


def _wrapped(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = inner.map(lambda of: ({"type": "array", "items": of[0]}, st.lists(of[1], max_size=3)))
    maps = inner.map(
        lambda of: ({"type": "map", "values": of[0]}, st.dictionaries(st.text(max_size=2), of[1], max_size=3))
    )
    optional = LEAVES.map(lambda of: (["null", of[0]], st.none() | of[1]))
    return lists | maps | optional


@given(st.recursive(LEAVES, _wrapped, max_leaves=3), st.data())
def test_nested_values_are_read_as_fastavro_reads_them(of: Any, data: Any):
    type, values = of
    rows = data.draw(st.lists(values, max_size=5))
    file = written(type, rows)
    expected = [row["v"] for row in fastavro.reader(io.BytesIO(file))]  # type: ignore[index, call-overload]
    got, restored, bad = read(file)
    assert not bad
    assert restored == [_as_arrow(value, got) for value in expected]


def _as_arrow(value: Any, type: pa.DataType) -> Any:
    if value is not None and pa.types.is_map(type):
        return [(key, _as_arrow(item, type.item_type)) for key, item in value.items()]
    if value is not None and pa.types.is_list(type):
        return [_as_arrow(item, type.value_type) for item in value]
    return value


def forged(type: Any, plain: Any, values: list[Any]) -> bytes:
    """A file whose header says a type, and whose values are written as another one."""
    data = written(plain, values)
    schema = {"type": "record", "name": "Top", "namespace": "of.tests", "fields": [{"name": "v", "type": type}]}
    after = json.dumps(schema).encode()
    start = data.index(b"avro.schema") + len(b"avro.schema")
    size = start
    while data[size] & 0x80:
        size += 1
    end = data.index(b"\x14avro.codec") if data.index(b"\x14avro.codec") > start else data.index(b"\0", size)
    number, head = len(after) << 1, bytearray()
    while number > 0x7F:
        head.append(number & 0x7F | 0x80)
        number >>= 7
    return data[:start] + bytes([*head, number]) + after + data[end:]


def two(value: int) -> bytes:
    return value.to_bytes(12, "big", signed=True)


@pytest.mark.parametrize("nested", [False, True])
def test_decimals_with_more_digits_than_their_type_are_bad_rows(nested: bool):
    price: Any = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}
    plain: Any = "bytes"
    values: list[Any] = [two(123), two(12345678), two(-999), b"\x7f" + bytes(20), b""]
    if nested:
        price, plain = {"type": "array", "items": price}, {"type": "array", "items": plain}
        values = [[value] for value in values]
    type, rows, bad = read(forged(price, plain, values))
    got = [row[0] if nested else row for row in rows]
    assert got == [Decimal("1.23"), Decimal("-9.99")] and "decimal128(4, 2)" in str(type)
    assert [row for row, _ in bad] == [2, 4, 5] and "123456.78" in bad[0][1]


@pytest.mark.parametrize(
    ("type", "plain"),
    [
        ({"type": "bytes", "logicalType": "decimal", "precision": 64, "scale": 4}, "bytes"),
        ({"type": "bytes", "logicalType": "decimal", "scale": 4}, "bytes"),
        (
            {"type": "fixed", "name": "F", "size": 40, "logicalType": "decimal", "precision": 95, "scale": 4},
            {"type": "fixed", "name": "F", "size": 40},
        ),
    ],
    ids=["64", "none", "fixed"],
)
def test_decimals_that_no_column_has_are_read_as_a_declared_one(type: Any, plain: Any):
    values = [number.to_bytes(40, "big", signed=True) for number in (125000, -32500, 10**30, 10**70, -1, 2**300)]
    data = forged(type, plain, values)
    declared = pa.schema([("v", pa.decimal128(20, 4))])
    _, rows, bad = read(data, declared)
    assert rows == [Decimal("12.5000"), Decimal("-3.2500"), Decimal("-0.0001")]
    assert [row for row, _ in bad] == [3, 4, 6]
    with pytest.raises(InputError, match=r"The field 'v' of an Avro file is decimal256"):
        read(data)


def test_moments_that_no_table_has_are_bad_rows():
    for type, plain, values in (
        ({"type": "long", "logicalType": "timestamp-millis"}, "long", [0, 2**62, -(2**63), 253402300800000]),
        ({"type": "long", "logicalType": "timestamp-micros"}, "long", [0, 2**62, -(2**63), 253402300800000000]),
        ({"type": "int", "logicalType": "date"}, "int", [0, 2**31 - 1, -(2**31), 2932897]),
        ({"type": "long", "logicalType": "time-micros"}, "long", [0, 2**62, -1, 86_400_000_000]),
        ({"type": "int", "logicalType": "time-millis"}, "int", [0, 2**31 - 1, -1, 86_400_000]),
    ):
        _, rows, bad = read(forged(type, plain, values))
        assert len(rows) == 1 and [row for row, _ in bad] == [2, 3, 4], type


def test_named_types_are_found_by_full_name_namespace_and_alias():
    kind = {"type": "enum", "name": "Kind", "aliases": ["Sort"], "symbols": ["A", "B"]}
    other = {"type": "enum", "name": "Kind", "namespace": "elsewhere", "symbols": ["X", "Y"]}
    fields = [
        {"name": "a", "type": kind}, {"name": "b", "type": "of.tests.Kind"}, {"name": "c", "type": "Kind"},
        {"name": "d", "type": other}, {"name": "e", "type": "elsewhere.Kind"}, {"name": "f", "type": "of.tests.Sort"},
    ]  # fmt: skip
    plain = {"type": "record", "name": "R", "fields": [{"name": name, "type": "int"} for name in "abcdef"]}
    type = {"type": "record", "name": "R", "fields": fields}
    _, rows, _ = read(forged(type, plain, [dict.fromkeys("abcdef", 1)]))
    assert rows == [{"a": "B", "b": "B", "c": "B", "d": "Y", "e": "Y", "f": "B"}]


@pytest.mark.parametrize(
    "type",
    ["int", {"type": "int", "logicalType": "date"}, {"type": "int", "logicalType": "time-millis"}, ENUM],
    ids=["int", "date", "time", "enum"],
)
@pytest.mark.parametrize("far", [2**40, 2**32, -(2**33) + 1, 2**31])
def test_an_int_with_more_than_32_bits_is_not_cut_to_some_of_them(type: Any, far: int):
    many, plain = {"type": "array", "items": type}, {"type": "array", "items": "long"}
    assert len(read(forged(many, plain, [[0, 1]]))[1]) == 1
    with pytest.raises(InputError, match="the rows from 1 on are no rows"):
        read(forged(many, plain, [[0], [1, far]]))


def test_a_list_beside_one_with_a_moment_that_is_too_far_is_a_row():
    type = {"type": "array", "items": ["null", {"type": "long", "logicalType": "timestamp-millis"}]}
    plain = {"type": "array", "items": ["null", "long"]}
    _, rows, bad = read(forged(type, plain, [[1, None], [2**61], []]))
    assert rows == [[datetime(1970, 1, 1, 0, 0, 0, 1000, UTC), None], []] and [row for row, _ in bad] == [2]


def test_a_type_that_no_column_has_is_told_with_its_field():
    inner = {"type": "record", "name": "R", "fields": [{"name": "u", "type": ["int", "string"]}]}
    with pytest.raises(InputError, match=r"the field 'v\.u' is \[\"int\", \"string\"\]"):
        read(written(inner, []))


def test_many_small_blocks_of_enums_with_long_symbols_are_read():
    data = written({"type": "enum", "name": "E", "symbols": ["A" * 100]}, [])
    block = b"\xa0\x9c\1" * 2 + bytes(10_000) + data[-16:]  # 10,000 rows in 10,000 bytes
    rows = pa.schema([("v", pa.string())])
    batches = list(decode("avro", {}, io.BytesIO(data + block * 400), rows, "f.avro"))
    assert sum(batch.rows.num_rows for batch in batches) == 4_000_000
    assert max(batch.rows.nbytes for batch in batches) < bounds.TOGETHER


LIST = {"type": "array", "items": "int"}
TEXTS = {"type": "map", "values": "string"}
RECORD = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "double"}, {"name": "l", "type": LIST}]}


@pytest.mark.parametrize(
    ("type", "value", "items"),
    [
        (LIST, [1, 2, 300], 3 * 12),
        (["null", LIST], None, 0),
        ({"type": "array", "items": LIST}, [[1], [], [1, 2]], 3 * 56 + 3 * 12),
        (TEXTS, {"a": "b", "c": "d"}, 2 * 80),
        ({"type": "array", "items": ["null", RECORD]}, [{"x": 1.5, "l": [7, -7]}, None], 2 * 68 + 2 * 12),
        ({"type": "record", "name": "P", "fields": [{"name": "f", "type": "float"}, {"name": "l", "type": LIST}]},
         {"f": 1.5, "l": [1 << 30]}, 12),
    ],
)  # fmt: skip
def test_items_of_lists_and_maps_are_weighed_by_their_number(type: Any, value: Any, items: int):
    schema = {"type": "record", "name": "T", "fields": [{"name": "v", "type": type}]}
    column = AvroSchema().columns(json.dumps(schema))["v"]
    fastavro.schemaless_writer(row := io.BytesIO(), fastavro.parse_schema(schema), {"v": value})
    for is_read in (True, False):
        assert bounds.Items([(column, is_read)], 1 << 20).of(3, row.getvalue() * 3) == 3 * items * is_read


def test_a_block_that_takes_too_much_is_refused_with_its_row_and_a_large_one_that_does_not_is_read(monkeypatch):
    monkeypatch.setattr(bounds, "MOST", 1 << 20)
    data = written({"type": "array", "items": LIST}, [[[]], [[1] * 100_000], [[1]]], interval=1)
    with pytest.raises(InputError, match="the rows from 2 on cannot be read: a block of 1 rows takes more than 1 MiB"):
        read(data)
    assert read(written({"type": "array", "items": "string"}, [["x" * 100_000]]))[1] == [["x" * 100_000]]
