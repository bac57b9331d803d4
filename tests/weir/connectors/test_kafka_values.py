"""Messages whose values, keys or timestamps no row can have: each is set aside alone, by its offset."""

from __future__ import annotations

import io
import json

import fastavro
import pyarrow as pa
import pytest

from weir.connectors.kafka import reading

NOW = 1_767_225_600_000  # 2026-01-01 in milliseconds, as CreateTime is
BOM = b"\xef\xbb\xbf"
ID = pa.schema([("id", pa.int64())])


class Message:
    """What a client hands out."""

    def __init__(self, offset: int, value: bytes | None, moment: tuple[int, int] = (1, NOW)) -> None:
        self._offset, self._value, self._moment = offset, value, moment

    def value(self) -> bytes | None:
        return self._value

    def key(self) -> None:
        return None

    def offset(self) -> int:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return self._moment


def decoded(messages: list[Message], columns: pa.Schema = ID, tombstones: str = reading.REJECT):
    decode = reading.decoder("json", columns, False, {})
    extra = {"timestamp": "ts", "offset": "off"}
    return reading.RowDecoder(decode, columns, extra, "string", tombstones).rows(messages)


@pytest.mark.parametrize("moment", [NOW * 1_000, NOW * 1_000_000, 253_402_300_800_000, -62_135_596_800_001, -(1 << 63)])
def test_a_timestamp_outside_of_the_years_of_a_table_is_a_bad_row_by_its_offset(moment):
    given = [Message(7, b'{"id": 1}'), Message(9, b'{"id": 2}', (1, moment)), Message(12, b'{"id": 3}', (2, NOW + 5))]
    batch = decoded(given)
    assert batch.rows["off"].to_pylist() == [7, 12]
    assert batch.rows["ts"].cast(pa.int64()).to_pylist() == [NOW * 1000, (NOW + 5) * 1000]
    (bad,) = batch.rejected
    assert bad.number == 9 and str(moment) in bad.reason and bad.raw == '{"id": 2}'


@pytest.mark.parametrize("moment", [(0, 0), (0, -1), (1, -1), (2, -1)])
def test_a_message_without_a_timestamp_has_none(moment):
    batch = decoded([Message(1, b'{"id": 1}', moment)])
    assert (batch.rows["ts"].to_pylist(), batch.rejected) == ([None], ())


def test_a_tombstone_that_is_kept_may_have_a_bad_timestamp(tmp_path):
    given = [Message(1, None), Message(2, None, (1, NOW * 1000)), Message(3, b'{"id": 3}')]
    batch = decoded(given, tombstones=reading.KEEP)
    assert batch.rows.select(["id", "off"]).to_pylist() == [{"id": None, "off": 1}, {"id": 3, "off": 3}]
    assert [row.number for row in batch.rejected] == [2]


def test_a_mark_of_the_byte_order_is_none_of_a_message_however_bunches_are_cut():
    decode = reading.decoder("json", ID, False, {})
    values = [BOM + b'{"id": 1}', b'{"id": 2}', BOM + b'{\n"id": 3}', BOM + BOM + b'{"id": 4}', BOM]
    together, reasons = decode(values)
    assert together.to_pylist() == [{"id": 1}, {"id": 2}, {"id": 3}] and set(reasons) == {3, 4}
    for at, value in enumerate(values):
        alone, why = decode([value])
        assert (alone.num_rows, set(why)) == ((0, {0}) if at in reasons else (1, set()))


def test_a_value_of_a_schema_registry_that_is_read_as_json_says_so():
    _, reasons = reading.decoder("json", ID, False, {})([b'\x00\x00\x00\x00\x0c{"id": 1}'])
    assert "number of a schema in a registry (12)" in reasons[0]


def encoded(type: object, value: object) -> bytes:
    data = io.BytesIO()
    schema = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}, {"name": "p", "type": type}]}
    fastavro.schemaless_writer(data, fastavro.parse_schema(schema), {"id": 1, "p": value})
    return data.getvalue()


MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}
CASES = {
    "a decimal with more digits": (MONEY, "bytes", [(123).to_bytes(4), (12345678).to_bytes(4), (999).to_bytes(4)]),
    "a decimal with one digit more": (MONEY, "bytes", [(9999).to_bytes(4), (10000).to_bytes(4), (1).to_bytes(4)]),
    "an int of 40 bits": ("int", "long", [1, 1 << 40, 3]),
    "a list with such an int": (
        {"type": "array", "items": "int"}, {"type": "array", "items": "long"}, [[1], [2, 1 << 40], []],
    ),
    "a date after the year 9999": ({"type": "int", "logicalType": "date"}, "int", [0, 2_932_897, 5]),
    "a far timestamp": ({"type": "long", "logicalType": "timestamp-micros"}, "long", [0, 1 << 62, 5]),
    "a far timestamp in milliseconds": ({"type": "long", "logicalType": "timestamp-millis"}, "long", [0, 1 << 62, 5]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_value_that_its_type_cannot_hold_is_bad_and_no_other_one(case):
    type, written, values = CASES[case]
    schema = json.dumps(
        {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}, {"name": "p", "type": type}]}
    )
    sent = [encoded(written, value) for value in values]
    table, reasons = reading.decoder("avro", schema, False, {})([b"\x02", *sent])
    good = reading._fit(table, reasons)
    assert (good[0].num_rows, set(good[1])) == (2, {0, 2})
