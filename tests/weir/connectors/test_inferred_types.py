"""Types that a file has by itself: no digit is lost, headers are rows, and what is no format's file is said as that."""

from __future__ import annotations

import gzip
import io
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from state_ops.errors import InputError
from weir.connectors.formats import json_types, texts
from weir.connectors.formats.decoding import decode, infer

LONG = 11898508762506083287


def by_itself(format: str, data: bytes, name: str = "/landing/a", **options: Any) -> tuple[pa.Schema, list[Any]]:
    """The types and rows of a file for which no schema is declared; no row is bad."""
    schema = infer(format, options, io.BytesIO(data), name)
    rows, bad = of_inferred(format, data, schema, name, **options)
    assert not bad
    return schema, rows


def of_inferred(
    format: str, data: bytes, schema: pa.Schema, name: str = "/landing/a", **options: Any
) -> tuple[list[Any], list[tuple[int, str]]]:
    batches = list(decode(format, options, io.BytesIO(data), schema, name, keeps_digits=True))
    bad = [(row.number, row.reason) for batch in batches for row in batch.rejected]
    return [row for batch in batches for row in batch.rows.to_pylist()], bad


@pytest.mark.parametrize(
    "numbers",
    [[str(LONG), str(LONG + 1)], ["9007199254740993", "0.5"], ["123456789012345678.90"], ["1e400", "1"], ["1e-400"],
     ["18446744073709551615", "1"], ["999999999999999.99"], ["0." + "1" * 40], ["100000000000000000000"]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_numbers_of_csv_that_float64_would_shorten_stay_text(numbers: list[str], ending: str):
    data = "\n".join(["n", *numbers, ""]).encode()
    schema, rows = by_itself("csv", gzip.compress(data) if ending else data, "a.csv" + ending)
    assert schema.field("n").type == pa.string() and [row["n"] for row in rows] == numbers


@pytest.mark.parametrize("numbers", [["0.1", "1"], ["1e3", "2"], ["0.50000000000000000000"], ["100000000000000000000", "0.5"],
                                     ["0.30000000000000004"], ["0.10000000000000001"], ["NaN", "1"]], ids=str)  # fmt: skip
def test_numbers_that_float64_holds_are_float64(numbers: list[str]):
    schema, rows = by_itself("csv", "\n".join(["n", *numbers, ""]).encode())
    assert schema.field("n").type == pa.float64() and [row["n"] for row in rows[1:]] == [float(n) for n in numbers[1:]]


def test_a_plus_and_leading_zeros_are_whole_numbers_as_ever():
    assert by_itself("csv", b"n\n+5\n007\n")[1] == [{"n": 5}, {"n": 7}]


@given(st.lists(st.decimals(allow_nan=False, allow_infinity=False) | st.floats(allow_nan=False).map(repr), min_size=1))
@example([Decimal("9007199254740993"), Decimal("0.5")])
def test_any_number_of_csv_keeps_its_digits(numbers: list[Any]):
    written = [str(number) for number in numbers]
    _, rows = by_itself("csv", "\n".join(["n", *written, ""]).encode())
    for row, text in zip(rows, written, strict=True):
        value = row["n"]
        assert value == text or texts.keeps_digits(text) or Decimal(value) == Decimal(text)
        if not isinstance(value, str) and "n" not in text:
            assert float(value) == float(text)


@pytest.mark.parametrize("line", ['{{"v":{}}}', '{{"v":{{"w":{}}}}}', '{{"v":[1,{}]}}', '{{"v":[{{"w":{}}}]}}'])
def test_whole_numbers_of_json_beyond_int64_are_decimals(line: str):
    data = "\n".join(line.format(number) for number in (LONG, LONG + 1, 1)).encode()
    schema, rows = by_itself("json", data)
    assert str(LONG) in str(rows[0]) and str(LONG + 1) in str(rows[1])
    assert "decimal128(38, 0)" in str(schema)


@pytest.mark.parametrize("number", [2**63, 10**19, 10**25, -(2**70)])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_whole_numbers_beyond_int64_are_decimals_wherever_blocks_are_cut(number: int, block: int):
    """Float64 holds these with all their digits, and other ids beside them not."""
    data = b'{"n": %d}\n{"n": 1}\n{bad\n' % number
    assert infer("json", {}, io.BytesIO(data), "f", block) == pa.schema([("n", pa.decimal128(38, 0))])


@pytest.mark.parametrize("number", ["1e-9223372036854775809", "-1.5e99999999999999999999"])
def test_a_number_of_json_with_an_exponent_that_nobody_can_hold_makes_a_bad_row(number: str):
    data = b'{"n": 18446744073709551617}\n{"n": %s}\n' % number.encode()
    for schema in (infer("json", {}, io.BytesIO(data), "f"), pa.schema([("n", pa.decimal128(38, 2))])):
        rows, bad = of_inferred("json", data, schema)
        assert [row["n"] for row in rows] == [18446744073709551617]
        assert bad == [(2, "it has a number that is too long")]


@pytest.mark.parametrize(
    "lines",
    [['{"v":9007199254740993}', '{"v":0.5}'], ['{"v":0.5}', '{"v":9007199254740993}'],
     ['{"v":0.5}', f'{{"v":{LONG}}}'], ['{"v":12345678901234567.89}'], ['{"v":1e400}'], [f'{{"v":{"1" * 39}}}'],
     ['{"o":{"v":[0.5,999999999999999.99]}}']],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("bad", [[], ["no json"]])
@pytest.mark.parametrize("far", [0, 3000], ids=["near", "in another block"])
def test_numbers_of_json_that_no_type_holds_are_refused_by_field(lines: list[str], bad: list[str], far: int):
    data = "\n".join([lines[0], *bad, *['{"x":"' + "y" * 100 + '"}'] * far, *lines[1:]]).encode()
    with pytest.raises(InputError, match=r"in the field '(o\.v\[\]|v)'") as refused:
        infer("json", {}, io.BytesIO(data), "/landing/a.json")
    assert refused.value.where == "/landing/a.json" and "schema=" in str(refused.value.next)


@given(
    st.lists(
        st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.just(2**53 + 1), min_size=1
    )
)
def test_any_number_of_json_keeps_its_digits_or_is_refused(numbers: list[Any]):
    data = "".join(f'{{"v":{json.dumps(number)}}}\n' for number in numbers).encode()
    try:
        _, rows = by_itself("json", data)
    except InputError as refused:
        assert "'v'" in refused.what
        return
    assert [row["v"] for row in rows] == numbers


@pytest.mark.parametrize("number", ["9007199254740993", str(LONG), "12345678901234567.89", "1e400"])
def test_later_numbers_that_an_inferred_float64_would_shorten_are_bad_and_a_declared_one_rounds_them(number: str):
    schema = pa.schema([("v", pa.float64())])
    for format, data in (
        ("csv", f"v\n0.5\n{number}\n2.5\n"),
        ("json", f'{{"v":0.5}}\n{{"v":{number}}}\n{{"v":2.5}}\n'),
    ):
        rows, [(line, reason)] = of_inferred(format, data.encode(), schema)
        assert [row["v"] for row in rows] == [0.5, 2.5]
        assert line == (3 if format == "csv" else 2) and "'v' has more digits than double" in reason
        batches = list(decode(format, {}, io.BytesIO(data.encode()), schema, "a"))
        declared = [row["v"] for batch in batches for row in batch.rows.to_pylist()]
        assert declared == ([0.5, 2.5] if number == "1e400" else [0.5, float(number), 2.5])
        assert sum(len(batch.rejected) for batch in batches) == (number == "1e400")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "+1e39", "3.4028236e38"])
@pytest.mark.parametrize("beside", ["1", "Infinity"])
def test_a_number_beyond_its_type_is_a_bad_row_of_csv_whatever_is_beside_it(number: str, beside: str):
    """And no infinity, which people write as a word."""
    schema = pa.schema([("v", pa.float32())])
    batches = list(decode("csv", {}, io.BytesIO(f"v\n{beside}\n{number}\n".encode()), schema, "a"))
    assert [row["v"] for batch in batches for row in batch.rows.to_pylist()] == [float(beside)]
    assert [row.number for batch in batches for row in batch.rejected] == [3]


def test_fields_that_are_empty_objects_have_no_column_and_the_others_are_read():
    schema, rows = by_itself("json", b'{"a":{},"b":[{}],"c":{"d":[{}],"e":1},"f":1}\n{"f":2}\n')
    assert schema == pa.schema([("c", pa.struct([("e", pa.int64())])), ("f", pa.int64())])
    assert rows == [{"c": {"e": 1}, "f": 1}, {"c": None, "f": 2}]
    assert by_itself("json", b'{"a":{}}\n{"a":{"b":1}}\n')[0].field("a").type == pa.struct([("b", pa.int64())])
    with pytest.raises(InputError, match="no field with a value"):
        infer("json", {}, io.BytesIO(b"{}\n{}\n"), "a")


@pytest.mark.parametrize("data", [b'[{"a":1},\n{"a":2}]\n', b'\n [{"a":1}]', b"[\n", b'{\n"a": 1\n}\n', b"[" * 100_000])
def test_a_json_document_is_no_lines_and_is_said_as_that(data: bytes):
    for call in (
        lambda: infer("json", {}, io.BytesIO(data), "a"),
        lambda: of_inferred("json", data, pa.schema([("a", pa.int64())])),
    ):
        with pytest.raises(InputError, match="JSON lines") as refused:
            call()
        assert "jq" in str(refused.value.next)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize("schema", [None, pa.schema([("a", pa.int64())])])
def test_lines_in_another_encoding_are_named_and_not_all_bad(encoding: str, schema: pa.Schema | None):
    data = '{"a":1}\n{"a":2}\n'.encode(encoding)
    with pytest.raises(InputError, match="UTF-16 or UTF-32") as refused:
        infer("json", {}, io.BytesIO(data), "a") if schema is None else of_inferred("json", data, schema)
    assert "encoding=" in str(refused.value.next)
    options = {"encoding": encoding}
    columns = infer("json", options, io.BytesIO(data), "a")
    assert [row for batch in decode("json", options, io.BytesIO(data), columns, "a") for row in batch.rows.to_pylist()] == [
        {"a": 1}, {"a": 2},
    ]  # fmt: skip
    with pytest.raises(InputError, match="its line 1 is bad: it is no UTF-8"):
        infer("json", {}, io.BytesIO('{"é":1}'.encode("latin-1")), "a")


def test_a_line_that_is_an_array_before_others_is_one_bad_row():
    for end in ("\n", "", "\n\n"):
        rows, bad = of_inferred("json", f'[1]\n{{"a":1}}{end}'.encode(), pa.schema([("a", pa.int64())]))
        assert rows == [{"a": 1}] and bad == [(1, "it is no JSON object")]
    assert of_inferred("json", b"\n", pa.schema([("a", pa.int64())])) == ([], [])


def test_fields_without_an_end_are_refused_and_no_line_costs_what_others_have():
    with pytest.raises(InputError, match="more than 10000 fields"):
        infer("json", {}, io.BytesIO(b"".join(b'{"f%d":1}%99s\n' % (n, b"") for n in range(20_000))), "a")
    with pytest.raises(InputError, match="more than 10000 fields"):
        infer("json", {}, io.BytesIO(json.dumps({"l": [{f"f{n}": 1} for n in range(20_000)]}).encode()), "a")
    assert json_types._MOST_FIELDS == 10_000


# CSV


@pytest.mark.parametrize(
    "value",
    ['{"b":' * 70 + "1" + "}" * 70, "[" * 5000 + "]" * 5000, '{"b":1,"b":2}', "9" * 5000, "1e-99999999999999999999"],
    ids=lambda value: value[:10],
)
def test_a_field_that_only_a_bad_line_has_is_not_left_out_of_it(value: str):
    data = f'{{"a":1}}\n{{"a":2,"odd":{value}}}\n'.encode()
    with pytest.raises(InputError, match="line 2: ") as error:
        infer("json", {}, io.BytesIO(data), "/landing/a")
    assert "schema=" in error.value.next
    also = data + b'{"odd":"x"}\n'
    rows, bad = of_inferred("json", also, infer("json", {}, io.BytesIO(also), "/landing/a"))
    assert [row["a"] for row in rows] == [1, None] and [number for number, _ in bad] == [2]


def test_a_column_of_empty_texts_is_text():
    assert by_itself("csv", b'n,note\n1,""\n2,""\n')[0].field("note").type == pa.string()
    assert by_itself("csv", b'n,note\n1,""\n2,5\n')[0].field("note").type == pa.int64()


def test_columns_without_a_name_are_called_as_spark_calls_them():
    schema, rows = by_itself("csv", b",b,\n1,2,3\n")
    assert schema.names == ["_c0", "b", "_c2"] and rows == [{"_c0": 1, "b": 2, "_c2": 3}]
    recorded = pa.schema([("", pa.int64()), ("b", pa.int64())])
    assert of_inferred("csv", b",b\n1,2\n", recorded)[0] == [{"": 1, "b": 2}], "a name that an earlier release recorded"


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b'"h1"x,"h2"', "text stands behind a closing quote"),
        (b'"h1" ,h2', "text stands behind a closing quote"),
        (b'"h1,h2', "a quote is not closed"),
        ("né,h2".encode("cp1252"), "no UTF-8, so give the source its encoding="),
        ("h1,h2".encode("utf-16"), "no UTF-8, so give the source its encoding="),
        (b",".join(b"c%d" % n for n in range(10_001)), "10001 columns, more than 10000"),
    ],
)
def test_a_header_is_read_by_the_rules_of_rows(header: bytes, problem: str):
    for schema in (None, pa.schema([("h1", pa.string())])):
        with pytest.raises(InputError, match=problem) as refused:
            infer("csv", {}, io.BytesIO(header + b"\nv1,v2\n"), "/landing/a.csv") if schema is None else of_inferred(
                "csv", header + b"\nv1,v2\n", schema, "/landing/a.csv"
            )
        assert refused.value.where == "/landing/a.csv" and "line 1" in refused.value.what


@pytest.mark.parametrize("encoding", ["utf-8-sig", "cp1252", "utf-16", "utf-16-le", "latin-1"])
def test_headers_of_other_encodings(encoding: str):
    name = "utf-8" if encoding == "utf-8-sig" else encoding
    schema, rows = by_itself("csv", 'é,"b ""c"", d"\n1,ü\n'.encode(encoding), encoding=name)
    assert schema.names == ["é", 'b "c", d'] and rows == [{"é": 1, 'b "c", d': "ü"}]


def test_a_name_of_the_header_may_be_what_is_null_in_rows_and_be_long():
    assert by_itself("csv", b"NA,b\n1,NA\n", null="NA")[1] == [{"NA": 1, "b": None}]
    long = "x" * 200_000
    assert by_itself("csv", f"{long},b\n1,2\n".encode())[0].names == [long, "b"]


def test_the_first_line_for_excel_is_no_header():
    assert by_itself("csv", b"sep=;\na;b\n1;2\n", delimiter=";")[1] == [{"a": 1, "b": 2}]
    with pytest.raises(InputError, match="sep=;") as refused:
        by_itself("csv", b"sep=;\na;b\n1;2\n")
    assert "delimiter=';'" in str(refused.value.next)


def test_columns_without_a_header_are_counted_in_the_first_row_that_is_one():
    schema = infer("csv", {"header": False}, io.BytesIO(b'"a"b,2,3\n1,5\n'), "a")
    assert schema.names == ["_c0", "_c1"]
