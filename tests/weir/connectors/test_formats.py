"""CSV and JSON lines to rows: bad rows are told by line and reason, all others are kept, and values are Spark's."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from state_ops.errors import InputError, PipelineError, TransientError
from tests.tools.sampling import sampled
from weir import files
from weir.connectors.formats import texts
from weir.connectors.formats.decoding import check_schema, decode, infer
from weir.connectors.kafka import reading

AT = pa.timestamp("us", tz="UTC")
TWO = pa.schema([("a", pa.int64()), ("b", pa.string())])
Rows = list[dict[str, Any]]
Bad = list[tuple[int, str, str | None]]


def read(
    format: str, data: bytes, schema: pa.Schema, block: int = 1 << 20, name: str = "f", **options: Any
) -> tuple[Rows, Bad]:
    """The rows, and the bad ones, of a file."""
    rows, bad = Rows(), Bad()
    for batch in decode(format, options, io.BytesIO(data), schema, name, block):
        assert batch.rows.schema == schema
        rows += batch.rows.to_pylist()
        bad += [(row.number, row.reason, row.raw) for row in batch.rejected]
    return rows, bad


def columns_of(format: str, data: bytes, **options: Any) -> dict[str, pa.DataType]:
    schema = infer(format, options, io.BytesIO(data), "f", 64)
    return dict(zip(schema.names, schema.types, strict=True))


def test_bad_rows_of_csv_are_told_by_line_and_reason_and_the_others_are_kept():
    data = b'a,b\n1,x\n\n2,"y"\n"3",""\n4,\n+5,z\n0x5,q\n1,2,3\nz\n"6"x,q\n7,"q\n8,b"c\n9,\xff\n'
    rows, bad = read("csv", data, TWO)
    assert rows == [
        {"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3, "b": ""}, {"a": 4, "b": None}, {"a": 5, "b": "z"},
        {"a": 8, "b": 'b"c'},
    ]  # fmt: skip
    assert bad == [
        (8, "column 'a' is no int64", "0x5,q"),
        (9, "it has 3 values for 2 columns", "1,2,3"),
        (10, "it has 1 value for 2 columns", "z"),
        (11, "text stands behind a closing quote", '"6"x,q'),
        (12, "a quote is not closed (multiline=True reads values of several lines)", '7,"q'),
        (14, "it is no UTF-8", "9,�"),
    ]


@pytest.mark.parametrize(
    "line", [b"0x5,q", b"1,2,3", b"z", b'"6"x,q', b'7,"q', b"9,\xff", b'7,"q\n8"', b"1.0,x", b'"7",x"",y']
)
def test_a_bad_line_of_csv_is_noticed_where_it_is_the_only_strange_one(line: bytes):
    rows, bad = read("csv", b"a,b\n1,x\n" + line + b"\n2,y\n", TWO)
    assert [row["a"] for row in rows] == [1, 2]
    assert [number for number, *_ in bad] == list(range(3, 4 + line.count(b"\n")))


@pytest.mark.parametrize(
    "line",
    [b"null", b"[]", b'{"a":5}{"a":6}', b'{"a":5', b'{"a":5.0}', b'{"b":"\xff"}', b'{"a":5}}', b'{"b":5}', b'{"a":[]}'],
)
def test_a_bad_line_of_json_is_noticed_where_it_is_the_only_strange_one(line: bytes):
    rows, bad = read("json", b'{"a":1}\n' + line + b'\n{"a":2}\n', TWO)
    assert [row["a"] for row in rows] == [1, 2]
    assert [(number, raw) for number, _, raw in bad] == [(2, line.decode(errors="replace"))]


@pytest.mark.parametrize("more", [b"", b"no json\n"])
def test_a_carriage_return_ends_a_line_of_json_whatever_is_beside_it(more: bytes):
    data = b'{"a": 1,\r"b": "x"}\n{"a": 2, "b": "y"}\n' * 2 + more
    rows, bad = read("json", data, TWO)
    assert [row["a"] for row in rows] == [2, 2]
    assert [number for number, *_ in bad] == [1, 2, 4, 5, *([7] if more else [])]


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_byte_order_mark_within_a_file_is_a_value_wherever_blocks_are_cut(block: int):
    data = "k\n\ufeff\n\ufeffx\n\ufeff\n".encode()
    rows, bad = read("csv", data, pa.schema([("k", pa.string())]), block)
    assert rows == [{"k": "\ufeff"}, {"k": "\ufeffx"}, {"k": "\ufeff"}] and not bad


def test_a_quoted_value_of_several_lines_is_bad_unless_it_is_expected():
    rows, bad = read("csv", b'a,b\n1,"x\ny"\n2,z\n', TWO)
    assert rows == [{"a": 2, "b": "z"}]
    assert [number for number, *_ in bad] == [2, 3]


def test_a_quote_that_is_never_closed_ends_a_file_of_multiline_values():
    rows = []
    with pytest.raises(InputError, match="a quote that opens in the row at line 3 is not closed"):
        for batch in decode("csv", {"multiline": True}, io.BytesIO(b'a,b\n1,x\n2,"y\n3,z\n'), TWO, "f", 4):
            rows += batch.rows.to_pylist()
    assert rows == [{"a": 1, "b": "x"}]


def test_columns_are_taken_by_name_and_others_are_left_out():
    assert read("csv", b"z,b,a\n7,x,1\n", TWO) == ([{"a": 1, "b": "x"}], [])
    with pytest.raises(InputError, match="lacks columns: 'b'"):
        read("csv", b"a,c\n1,x\n", TWO)
    with pytest.raises(InputError, match="names columns that the schema lacks: 'z'"):
        read("csv", b"a,b,z\n1,x,2\n", TWO, extra="fail")
    with pytest.raises(InputError, match="names columns twice: 'a'"):
        read("csv", b"a,b,a\n1,x,2\n", TWO)
    assert read("csv", b"1;x\n", TWO, header=False, delimiter=";") == ([{"a": 1, "b": "x"}], [])
    assert read("csv", b"", TWO) == ([], [])
    assert read("csv", b"a,b\n", TWO) == ([], [])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16"])
def test_text_of_other_encodings(encoding: str):
    data = "a,b\n1,é\n".encode(encoding)
    assert read("csv", data, TWO, encoding="utf-8" if "8" in encoding else encoding)[0] == [{"a": 1, "b": "é"}]


@pytest.mark.parametrize(
    ("ending", "compressed"),
    [
        (".gz", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", lambda data: pa.compress(data, "zstd", asbytes=True)),
    ],
)
def test_compression_goes_by_name(ending: str, compressed: Any):
    data = b"a,b\n1,x\n2,y\n"
    assert read("csv", compressed(data), TWO, name="f.csv" + ending)[0] == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with pytest.raises(InputError, match="damaged"):
        read("csv", compressed(data)[:-8], TWO, name="f.csv" + ending)


def test_what_cannot_be_decompressed_is_named():
    with pytest.raises(InputError, match=r"\.snappy"):
        read("csv", b"", TWO, name="f.csv.snappy")


class _Broken(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:  # noqa: ARG002
        raise OSError("the disk is gone")


@pytest.mark.parametrize("name", ["f.csv", "f.csv.gz", "f.csv.xz"])
def test_storage_that_fails_is_no_damage(name: str):
    with pytest.raises(TransientError, match="the disk is gone"):
        list(decode("csv", {}, _Broken(), TWO, name))


def test_bad_lines_of_json_are_told_by_line_and_reason_and_the_others_are_kept():
    data = (
        b'{"a":1,"b":"x"}\n\n null\n{"a":"1"}\n{"a":1,"a":2}\n {"a":3,"c":[{}]} \n{"a":1}{"a":2}\n[1]\n{"b":"\xff"}\n{"b":5}\n'
        b'{"b":"\\ud800"}\n{"a":9223372036854775808}\n{"a":1.0}\n{"b":"a\tb"}\n{\n}'
    )
    rows, bad = read("json", data, TWO)
    assert rows == [{"a": 1, "b": "x"}, {"a": 3, "b": None}]
    assert [(number, reason) for number, reason, _ in bad] == [
        (3, "it is no JSON object"),
        (4, "the field 'a' is no int64"),
        (5, "the field 'a' is given twice"),
        (7, "it is no JSON: Extra data at character 8"),
        (8, "it is no JSON object"),
        (9, "it is no UTF-8"),
        (10, "the field 'b' is no string"),
        (11, "it is no UTF-8"),
        (12, "the field 'a' is no int64"),
        (13, "the field 'a' is no int64"),
        (14, "it is no JSON: Invalid control character at at character 8"),
        (15, "it is no JSON: Expecting property name enclosed in double quotes at character 2"),
        (16, "it is no JSON: Expecting value at character 1"),
    ]


def test_one_bad_line_among_many_costs_no_other():
    lines = [json.dumps({"a": number, "b": "x" * (number % 7)}) for number in range(5000)]
    lines[3333] = '{"a": "3333"}'
    rows, bad = read("json", "\n".join(lines).encode(), TWO)
    assert [row["a"] for row in rows] == [number for number in range(5000) if number != 3333]
    assert bad == [(3334, "the field 'a' is no int64", '{"a": "3333"}')]


@pytest.mark.parametrize("deep", [100, 1_000_000])
def test_values_that_are_nested_without_an_end_end_no_process(deep: int):
    lines = b'{"a":1}\n{"z":' + b"[" * deep + b"]" * deep + b'}\n{"a":2,"b":"x"}\n'
    with pytest.raises(InputError, match="a field that cannot be read in line 2: it is nested too deep"):
        infer("json", {}, io.BytesIO(lines), "f")
    rows, bad = read("json", lines, TWO)
    assert [row["a"] for row in rows] == [1, None, 2] and not bad, "declared columns lack it"
    nested = b'{"a":1}\n{"a":' + b'{"a":' * deep + b"1" + b"}" * deep + b"}\n"
    rows, bad = read("json", nested, TWO)
    assert [row["a"] for row in rows] == [1] and [number for number, *_ in bad] == [2]


_UNREAD = {"deep": "[" * 2000 + "]" * 2000, "long": "9" * 6000, "exponent": "1e99999999999999999999"}


@pytest.mark.parametrize("value", _UNREAD.values(), ids=_UNREAD)
def test_a_field_that_nobody_reads_is_judged_alike_beside_a_bad_line_and_without(value: str):
    schema, line = pa.schema([("n", pa.int64())]), b'{"n": 1, "unread": %s}\n' % value.encode()
    alone, _ = read("json", line, schema)
    assert len(alone) == ("e" not in value)
    for beside in (b'{"n": 2}\n', b'{"n": no}\n', b'{"n": "x"}\n'):
        for data in (line + beside, beside + line):
            assert [row for row in read("json", data, schema)[0] if row["n"] == 1] == alone


def test_extra_fields_of_json_go_by_policy():
    data = b'{"a":1,"b":"x","c":1}\n{"a":2}\n'
    assert read("json", data, TWO)[0] == [{"a": 1, "b": "x"}, {"a": 2, "b": None}]
    rows, bad = read("json", data, TWO, extra="fail")
    assert rows == [{"a": 2, "b": None}]
    assert bad == [(1, "the field 'c' is not in the schema", '{"a":1,"b":"x","c":1}')]


NESTED = pa.schema(
    [
        ("f", pa.float64()), ("t", AT), ("d", pa.decimal128(10, 2)), ("y", pa.date32()), ("x", pa.binary()),
        ("m", pa.map_(pa.string(), pa.list_(pa.int32()))), ("l", pa.list_(pa.struct([("t", AT)]))),
    ]
)  # fmt: skip


@pytest.mark.parametrize("with_map", [True, False])
def test_nested_values_and_what_json_has_no_type_for(with_map: bool):
    schema = NESTED if with_map else NESTED.remove(5)
    data = b"""{"f":NaN}
        {"f":"-Infinity","t":"2024-01-02","d":1.25,"y":"2024-02-29","x":"AQID","m":{"a":[1,null]}}
        {"l":[{"t":"2024-01-01T00:00:00.123456789+01:00"},null,{}],"d":"12","t":"2024-01-02 03:04:05"}
        {"f":1e400}
        {"d":1.255}
        {"f":Inf}
        {"t":""}
        {"t":1700000000}
        {"y":"2024-02-30"}
        {"x":"a"}
        {"m":{"a":1},"d":"1_0"}
    """
    rows, bad = read("json", data, schema)
    none = dict.fromkeys(schema.names)
    assert math.isnan(rows[0]["f"])
    first = {**none, "f": -math.inf, "t": datetime(2024, 1, 2, tzinfo=UTC), "d": Decimal("1.25")}
    first |= {"y": date(2024, 2, 29), "x": b"\x01\x02\x03"} | ({"m": [("a", [1, None])]} if with_map else {})
    assert rows[1] == first
    second = {**none, "t": datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC), "d": Decimal("12.00")}
    assert rows[2] == {**second, "l": [{"t": datetime(2023, 12, 31, 23, 0, 0, 123456, UTC)}, None, {"t": None}]}
    assert [number for number, *_ in bad] == list(range(4, 12)) and len(rows) == 3


def test_the_types_of_columns_are_those_that_all_values_have():
    data = b"a,b,c,d,e,f,g\n1,true,2024-01-01,2024-01-01T00:00:00Z,,1.5,x\n2,FALSE,2024-01-01,2024-01-01,,1,1\n1,2\n"
    assert columns_of("csv", data) == {
        "a": pa.int64(), "b": pa.bool_(), "c": pa.date32(), "d": AT, "e": pa.string(), "f": pa.float64(),
        "g": pa.string(),
    }  # fmt: skip
    assert columns_of("csv", b"1,x\n", header=False) == {"_c0": pa.int64(), "_c1": pa.string()}


@pytest.mark.parametrize("more", [b"", b"null\n{,\n"])
def test_the_types_of_fields_are_those_that_all_lines_have(more: bytes):
    data = (
        b'{"a":1,"b":{"c":"2024-01-01"},"l":["2024-01-01T00:00:00","2024-01-01"],"n":null}\n'
        b'{"a":1.5,"z":[],"b":{"d":true}}\n{"s":"2024-01-01"}\n{"s":"x"}\n'
    )
    assert columns_of("json", data + more) == {
        "a": pa.float64(), "b": pa.struct([("c", pa.date32()), ("d", pa.bool_())]), "l": pa.list_(AT), "n": pa.string(),
        "z": pa.list_(pa.string()), "s": pa.string(),
    }  # fmt: skip


def test_formats_options_and_types_that_there_are_not():
    with pytest.raises(PipelineError, match="no format 'xml'"):
        read("xml", b"", TWO)
    with pytest.raises(PipelineError, match="no option 'sep'"):
        read("csv", b"", TWO, sep=";")
    with pytest.raises(PipelineError, match="delimiter="):
        read("csv", b"", TWO, delimiter="||")
    for wrong in ({"extra": "refuse"}, {"encoding": "utf-9"}, {"encoding": "hex"}, {"header": "no"}, {"null": (None,)},
                  {"delimiter": 1}, {"multiline": 1}):  # fmt: skip
        with pytest.raises(PipelineError, match="can have") as refused:
            files("{landing}/*.csv", format="csv", **wrong)
        assert next(iter(wrong)) in refused.value.what and refused.value.next
    assert read("csv", b"a,b\n1,NA\n2,N\n", TWO, null="NA") == ([{"a": 1, "b": None}, {"a": 2, "b": "N"}], [])
    with pytest.raises(PipelineError, match="no values of the type list"):
        check_schema("csv", pa.schema([("a", pa.list_(pa.int64()))]))
    check_schema("json", NESTED)


VALUES = st.text(st.sampled_from("ab1 ,;\"'\\\t-é"), max_size=6)


@given(
    st.lists(st.tuples(*[st.text(st.sampled_from('a1,"\n\r'), max_size=5)] * 2), max_size=9),
    st.sampled_from([1, 5, 30, 1 << 16]),
)
def test_values_of_several_lines_are_read_as_the_csv_module_wrote_them(rows: list[tuple[str, str]], block: int):
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerows([("a", "b"), *rows])
    schema = pa.schema([("a", pa.string()), ("b", pa.string())])
    got, bad = read("csv", text.getvalue().encode(), schema, block, multiline=True)
    assert not bad
    assert [(row["a"] or "", row["b"] or "") for row in got] == rows


@given(st.text(st.sampled_from('a1,"\n\r'), max_size=40), st.sampled_from([3, 7, 1 << 16]))
@example('"a\n1"', 3)
@example('"\r"a', 3)
@example('"\r\r"', 3)
def test_any_csv_is_read_or_told_line_by_line(text: str, block: int):
    """Each line that has values is a row or a bad one, and lines are read as if there were no others."""
    schema = pa.schema([("a", pa.string()), ("b", pa.int64())])
    got, bad = read("csv", text.encode(), schema, block, header=False)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    expected, refused = Rows(), []
    for number, line in enumerate(lines, 1):
        if line:
            try:
                a, b = next(csv.reader([line], strict=True))
                empty = line.startswith(",")
                expected.append({"a": a if a or not empty else None, "b": int(b) if b else None})
            except (csv.Error, ValueError):
                refused.append(number)
    assert got == expected
    assert [number for number, *_ in bad] == refused


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3)
    | st.sampled_from(["2024-01-02", "2024-01-02T03:04:05.5Z", "1.25"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from("abtd"), values, max_size=3),
    max_leaves=5,
)  # fmt: skip
FIELDS = pa.schema(
    [
        ("a", pa.int64()),
        ("b", pa.struct([("a", pa.list_(pa.float64())), ("t", AT)])),
        ("d", pa.decimal128(8, 2)),
        ("t", AT),
    ]
)


@example([{"a": []}, {"d": 1000000}, {}], False)
@given(st.lists(st.dictionaries(st.sampled_from("abtd"), JSON, max_size=4), max_size=8), st.booleans())
def test_a_line_of_json_is_read_alike_among_others_and_alone(values: list[Any], spaced: bool):
    separators = (", ", " : ") if spaced else (",", ":")
    lines = [json.dumps(value, separators=separators).encode() for value in values]
    alone = [read("json", line, FIELDS) for line in lines]
    rows, bad = read("json", b"\n".join(lines), FIELDS)
    assert rows == [row for got, _ in alone for row in got]
    assert [number for number, *_ in bad] == [number for number, (_, refused) in enumerate(alone, 1) if refused]
    for value, (got, _) in zip(values, alone, strict=True):
        if got:
            assert got[0]["a"] == value.get("a") and not isinstance(value.get("a"), bool | float)


@settings(max_examples=40)
@given(st.lists(st.one_of(
    st.text(st.sampled_from("0123456789+-.eEZT: xInfaN"), max_size=12),
    st.decimals(allow_nan=False, allow_infinity=False).map(str), st.datetimes().map(str), st.dates().map(str),
    st.datetimes(timezones=st.timezones()).map(lambda moment: moment.isoformat()), st.floats().map(repr),
    st.integers(-(2**66), 2**66).map(str),
), max_size=8))  # fmt: skip
@pytest.mark.parametrize(
    "type", [pa.int8(), pa.int64(), pa.float32(), pa.float64(), pa.decimal128(12, 3), pa.date32(), AT, pa.bool_()], ids=str
)  # fmt: skip
def test_a_text_is_converted_alike_among_others_alone_and_by_python(type: pa.DataType, given_texts: list[str]):
    values, lost = texts.converted(pa.array(given_texts, pa.string()), type)
    for at, text in enumerate(given_texts):
        [value], bad = texts.converted(pa.array([text]), type)
        assert (at in lost) == bool(len(bad))
        assert repr(values[at].as_py()) == repr(value.as_py())
        if text and type != pa.bool_():
            # As a column takes it: a decimal has no negative zero.
            by_python = pa.scalar(texts.value(text, type), type).as_py()
            assert repr(by_python) == repr(value.as_py()) or str(by_python) == str(value.as_py())


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), st.dates(), VALUES
        )
    )
)
def test_typed_csv_is_read_as_duckdb_reads_it(tmp_path_factory, rows: list[tuple[Any, ...]]):
    file = tmp_path_factory.getbasetemp() / "typed.csv"
    with file.open("w", newline="") as opened:
        csv.writer(opened, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).writerows([("i", "f", "d", "s"), *rows])
    schema = pa.schema([("i", pa.int64()), ("f", pa.float64()), ("d", pa.date32()), ("s", pa.string())])
    got, bad = read("csv", file.read_bytes(), schema)
    columns = "{'i': 'BIGINT', 'f': 'DOUBLE', 'd': 'DATE', 's': 'VARCHAR'}"
    other = duckdb.sql(
        f"select * from read_csv('{file}', header=true, columns={columns}, quote='\"', escape='\"', delim=',', "
        "allow_quoted_nulls=false)"
    ).fetchall()
    assert [tuple(row.values()) for row in got] == other
    assert not bad


# Beside Spark

INTS = ["5", "+5", "-5", " 5", "5 ", "05", "5.0", "1e3", "0x10", "2147483647", "2147483648", "-0", "1_0", "5L", ""]
FLOATS = [
    "5",
    "NaN",
    "Inf",
    "-Inf",
    "inf",
    "nan",
    "Infinity",
    "-Infinity",
    "1e400",
    "1e-400",
    ".5",
    "5.",
    "-.5e+3",
    "x",
]
DECIMALS = ["1", "1.2", "-1.20", "1.200", "12345678.99", "123456789", "1e2", "1E-2", "+.5", "5.", "x", "", "1e9"]
DATES = ["2024-01-02", "2024-02-30", "0001-01-01", "9999-12-31", "1582-10-10", "2024-1-2", "x", ""]
TIMES = [
    "2024-01-02", "2024-01-02 03:04:05", "2024-01-02T03:04:05Z", "2024-01-02T03:04:05.123456789Z", "x", "",
    "2024-01-02T03:04:05.1+02:00", "2024-01-02T03:04:05+0200", "2024-01-02T03:04:05-02", "2024-01-02T03:04",
    "2024-01-02T03", "2024-01-02T24:00:00", "2024-01-02T23:59:60", "2024-01-02T03:04:05+18:00", "1700000000",
    "2024-01-02T03:04:05+18:30", "2024-01-02T03:04:05+25:00", "2024-01-02T03Z", "2024-01-02T03:04Z", "9999-12-31T23:59:59.999999Z",
    "1969-12-31T23:59:59.9999999Z", "1582-10-10T00:00:00Z",
]  # fmt: skip
BOOLEANS = ["true", "TRUE", "tRue", "false", "1", "t", "yes", " true", ""]
STRANGE = {"2024-1-2", " 5", "5 ", "+.5", "1.200", "5L", "0x10"}  # not all that Spark takes is taken


@pytest.mark.parametrize(
    ("type", "sql", "written"),
    sampled(
        [
            (pa.int32(), "int", INTS), (pa.float64(), "double", FLOATS), (pa.decimal128(10, 2), "decimal(10,2)", DECIMALS),
            (AT, "timestamp", TIMES), (pa.date32(), "date", DATES), (pa.float32(), "float", FLOATS),
            (pa.bool_(), "boolean", BOOLEANS),
        ],
        4,
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_values_are_those_that_spark_reads(tmp_path: Path, spark: Any, type: pa.DataType, sql: str, written: list[str]):
    """Of CSV and of JSON: what is read is what Spark reads, and what Spark refuses is refused."""
    schema = pa.schema([("n", pa.int64()), ("v", type)])
    quoted = not pa.types.is_floating(type) and not pa.types.is_integer(type) and not pa.types.is_boolean(type)
    cases = {
        "csv": "n,v\n" + "".join(f"{at},{text}\n" for at, text in enumerate(written)),
        "json": "".join(
            f'{{"n":{at},"v":{json.dumps(text) if quoted else text or "null"}}}\n' for at, text in enumerate(written)
        ),
    }
    for format, text in cases.items():
        file = tmp_path / f"f.{format}"
        file.write_text(text)
        reader = spark.read.schema(f"n bigint, v {sql}, bad string").option("columnNameOfCorruptRecord", "bad")
        frame = (reader.option("header", True).csv if format == "csv" else reader.json)(str(file)).cache()
        expected = {row["n"]: row for row in frame.selectExpr("n", "v", "bad").toArrow().to_pylist()}
        rows, bad = read(format, file.read_bytes(), schema)
        for row in rows:
            assert expected[row["n"]]["bad"] is None, row
            assert repr(expected[row["n"]]["v"]) == repr(row["v"]) or expected[row["n"]]["v"] == row["v"], row
        first = 2 if format == "csv" else 1
        refused = {written[number - first] for number, *_ in bad}
        strict = {text for at, text in enumerate(written) if expected.get(at, {"bad": ""})["bad"] is not None}
        assert len(rows) + len(bad) == len(written) and strict <= refused | {""}
        assert refused - strict <= STRANGE | {"1e400"}


def test_structure_is_that_which_spark_reads(tmp_path: Path, spark: Any):
    file = tmp_path / "f.csv"
    file.write_text('a,b\n1,"x ""y"""\n2,\n3,"p\nq"\n4,"r,s"\n5,b"c\n')
    reader = spark.read.schema("a bigint, b string").options(header=True, escape='"', multiLine=True)
    assert read("csv", file.read_bytes(), TWO, multiline=True) == (
        [row.asDict() for row in reader.csv(str(file)).collect()], []
    )  # fmt: skip
    file = tmp_path / "f.json"
    file.write_text('{"a":1,"s":{"x":[1,null]},"c":2}\n\n{"s":{}}\n{"a":null,"s":{"x":[],"y":1}}\n')
    schema = pa.schema([("a", pa.int64()), ("s", pa.struct([("x", pa.list_(pa.int32()))]))])
    rows = spark.read.schema("a bigint, s struct<x: array<int>>").json(str(file)).toArrow().to_pylist()
    assert read("json", file.read_bytes(), schema) == (rows, [])


@pytest.mark.parametrize(
    "value",
    [b"null", b"[]", b"1", b'"x"', b"", b"  ", b"{} null {}", b"{}null{}", b"{null}", b"{}\rnull\r{}", b"\0",
     b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b'{"a":[' * 50_000 + b"]}" * 50_000, b"[" * 1_000_000],
    ids=lambda value: str(value[:12]),
)  # fmt: skip
def test_no_value_of_a_message_ends_the_process(value: bytes):
    decoder = reading.decoder("json", TWO, False, {})
    for around in ([], [b'{"a":7}']):
        rows, reasons = decoder([*around, value, *around])
        assert rows.column("a").to_pylist() == [7] * 2 * len(around) and list(reasons) == [len(around)]


def test_an_array_that_is_longer_than_a_line_may_be_is_refused_as_an_array():
    data = b"\xef\xbb\xbf [" + b'{"a":1},' * (9 << 20) + b'{"a":1}]'
    for call in (lambda: read("json", data, TWO), lambda: infer("json", {}, io.BytesIO(data), "f")):
        with pytest.raises(InputError, match="is a JSON array"):
            call()
    with pytest.raises(InputError, match="has more than 64 MiB"):
        read("json", b'{"a":1}' + data, TWO)
