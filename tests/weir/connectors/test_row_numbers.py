"""Each row of a batch has the number by which people find it: the line of a file, or the row of an Avro file."""

from __future__ import annotations

import io

import fastavro
import pyarrow as pa
import pytest

from weir.connectors.formats.decoding import decode

LINE = pa.schema([("line", pa.int64()), ("text", pa.string())])
JSON = b'{"line": 1}\n\n{"line": 3}\r\n  \n{bad\n{"line": 6, "text": "x"}\n\r\n{"line": 8}\n{"line": "x"}\n{"line": 10}'
PLAIN_JSON = b'{"line": 1}\n{"line": 2, "text": "x"}\r\n{"line": 3}\n'
CSV = b'line,text\n2,a\n\n4,"b"\nx,c\n6,"d, d"\n7\n8,"e"\n'
PLAIN_CSV = b"line,text\n2,a\n\n\n5,b\r\n6,c\n"
MULTILINE_CSV = b'line,text\n2,"a\nb\r\nc"\n5,d\n6,"e\n\n"\nx,f\n10,g\n'
CASES = {
    "json": ("json", {}, JSON), "json without bad lines": ("json", {}, PLAIN_JSON), "csv": ("csv", {}, CSV),
    "csv without bad lines": ("csv", {}, PLAIN_CSV), "csv of several lines": ("csv", {"multiline": True}, MULTILINE_CSV),
}  # fmt: skip


@pytest.mark.parametrize("block", [16, 40, 1 << 20])
@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_number_of_its_line(case, block):
    form, options, data = CASES[case]
    seen, bad = 0, set[int]()
    for batch in decode(form, options, io.BytesIO(data), LINE, "f", block):
        assert batch.numbers is not None
        assert list(batch.numbers()) == batch.rows["line"].to_pylist()
        seen += batch.rows.num_rows
        bad |= {row.number for row in batch.rejected}
    assert seen >= 3 and bad == {"json": {5, 9}, "csv": {5, 7}, "csv of several lines": {9}}.get(case, set())


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_row_of_avro_has_its_number_in_the_file(block):
    schema = {
        "type": "record", "name": "R",
        "fields": [{"name": "line", "type": "long"}, {"name": "text", "type": {"type": "long", "logicalType": "timestamp-millis"}}],
    }  # fmt: skip
    data = io.BytesIO()
    fastavro.writer(data, fastavro.parse_schema(schema), [{"line": n, "text": n} for n in range(1, 8)], sync_interval=1)
    wanted = pa.schema([("line", pa.int64()), ("text", pa.timestamp("us", "UTC"))])
    numbers = []
    for batch in decode("avro", {}, io.BytesIO(data.getvalue()), wanted, "f", block):
        assert batch.numbers is not None
        assert list(batch.numbers()) == batch.rows["line"].to_pylist()
        numbers += batch.numbers()
    assert numbers == [1, 2, 3, 4, 5, 6, 7]
