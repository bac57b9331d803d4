"""What is on storage is read for ever: the bytes of rows and keys of every type, as they once were written."""

from __future__ import annotations

import json

from state_ops.schema.key_codec import decode_keys
from state_ops.schema.row_codec import decode_rows, encode_rows
from state_ops.schema.state_schema import StateSchema
from tests.golden import make_values


def _lines(name: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (make_values.HERE / name).read_text().split()]


def test_rows_of_every_type_have_the_golden_bytes_and_are_read_from_them():
    schema, table = make_values.rows()
    golden = _lines("values.hex")
    assert encode_rows(schema, table) == golden
    assert decode_rows(schema, golden).equals(table)


def test_the_golden_schema_is_read_and_has_the_id_in_the_rows():
    text = (make_values.HERE / "schema.json").read_text()
    schema = StateSchema.from_json(text)
    assert schema == make_values.rows()[0]
    assert json.loads(schema.to_json()) == json.loads(text)
    assert {value[1:9] for value in _lines("values.hex")} == {schema.schema_id}


def test_keys_of_every_type_have_the_golden_bytes_and_are_read_from_them():
    golden = _lines("keys.hex")
    assert make_values.keys() == golden
    types = [type for type, _ in make_values.KEYS]
    _, columns = decode_keys(golden[-3:], types)
    assert [column.to_pylist() for column in columns] == [values for _, values in make_values.KEYS]
