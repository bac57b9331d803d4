"""Each kind of value in a file beside each type that a source may declare: the value, a bad row, or a refusal by name."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import InputError, PipelineError
from tests.weir.sources.test_hostile_parquet import read as read_parquet
from weir.connectors.formats.decoding import UnforeseenInputError, decode

Kind = tuple[Any, Any, pa.DataType]
"""A type of Avro, a value of it as Arrow has it, and the type that it has in Arrow."""

LEAVES: dict[str, Kind] = {
    "boolean": ("boolean", True, pa.bool_()),
    "int": ("int", 7, pa.int32()),
    "long": ("long", 1 << 40, pa.int64()),
    "double": ("double", 0.125, pa.float64()),
    "bytes": ("bytes", b"\xff\x01", pa.binary()),
    "text": ("string", "x", pa.string()),
    "digits": ("string", "0x7", pa.string()),
    "enum": ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", pa.string()),
    "fixed": ({"type": "fixed", "name": "F", "size": 2}, b"\xffb", pa.binary()),
    "decimal": (
        {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3}, Decimal("7.125"), pa.decimal128(9, 3),
    ),
    "date": ({"type": "int", "logicalType": "date"}, date(2024, 1, 2), pa.date32()),
    "time": ({"type": "long", "logicalType": "time-micros"}, time(1, 2), pa.time64("us")),
    "moment": (
        {"type": "long", "logicalType": "timestamp-micros"}, datetime(2024, 1, 2, 3, tzinfo=UTC),
        pa.timestamp("us", "UTC"),
    ),
}  # fmt: skip


def _list(kind: Kind) -> Kind:
    return {"type": "array", "items": kind[0]}, [kind[1], kind[1]], pa.list_(kind[2])


def _map(kind: Kind) -> Kind:
    return {"type": "map", "values": kind[0]}, [("k", kind[1])], pa.map_(pa.string(), kind[2])


def _record(kind: Kind, *names: str) -> Kind:
    names = names or ("x",)
    fields = [{"name": name, "type": kind[0]} for name in names]
    type = {"type": "record", "name": f"R{next(COUNT)}", "fields": fields}
    return type, dict.fromkeys(names, kind[1]), pa.struct([(name, kind[2]) for name in names])


COUNT = iter(range(1_000))
SHAPES = {"list": _list, "map": _map, "record": _record}
KINDS = dict(LEAVES)
for leaf, (shape, of) in product(("long", "enum", "moment"), SHAPES.items()):
    KINDS[f"{shape} of {leaf}"] = of(LEAVES[leaf])
for (outer, of), (inner, within) in product(SHAPES.items(), SHAPES.items()):
    KINDS[f"{outer} of {inner}"] = of(within(LEAVES["long"]))
KINDS["list of pairs"] = _list(_record(LEAVES["text"], "key", "value"))
KINDS["list of other pairs"] = _list(_record(LEAVES["text"], "value", "key"))
KINDS["empty list"] = (_list(LEAVES["long"])[0], [], pa.list_(pa.int64()))
KINDS["empty map"] = (_map(LEAVES["long"])[0], [], pa.map_(pa.string(), pa.int64()))
DECLARED = {str(type): type for _, _, type in KINDS.values()} | {
    str(type): type for type in (pa.int8(), pa.float32(), pa.decimal128(9, 2))
}


def _plain(value: Any) -> Any:
    """A value as writers of Avro and JSON take it: an object for a map."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        is_map = any(isinstance(part, tuple) for part in value)
        return {name: _plain(part) for name, part in value} if is_map else list(map(_plain, value))
    return value


def avro(kind: Kind) -> bytes:
    fields = [{"name": "n", "type": "long"}, {"name": "v", "type": ["null", kind[0]]}]
    value = {} if pa.types.is_map(kind[2]) and not kind[1] else _plain(kind[1])
    rows = [{"n": 0, "v": value}, {"n": 1, "v": None}, {"n": 2, "v": value}]
    schema = fastavro.parse_schema({"type": "record", "name": "Top", "fields": fields})
    fastavro.writer(file := io.BytesIO(), schema, rows)
    return file.getvalue()


def lines(kind: Kind) -> bytes:
    value = {} if pa.types.is_map(kind[2]) and not kind[1] else _plain(kind[1])
    rows = [{"n": 0, "v": value}, {"n": 1, "v": None}, {"n": 2, "v": value}]

    def other(value: Any) -> Any:
        return value.decode("latin-1") if isinstance(value, bytes) else str(value)

    return b"".join(json.dumps(row, default=other).encode() + b"\n" for row in rows)


def _is_same(value: Any, got: Any, type: pa.DataType) -> bool:
    """Return whether what was read is what was written: the same number, moment or text, the same parts by name."""
    if value is None or got is None:
        return value is got
    if isinstance(value, dict) or (isinstance(got, dict) and isinstance(value, list)):  # objects of JSON: maps, records
        before = dict(value)
        after = dict(got)
        return all(after[name] is None or _is_same(before[name], after[name], type) for name in after)
    if isinstance(value, list):
        if isinstance(got, list) and got and isinstance(got[0], dict) and isinstance(value[0], tuple):
            got = [(entry["key"], entry["value"]) for entry in got]
        return len(value) == len(got) and all(_is_same(one, other, type) for one, other in zip(value, got, strict=True))
    if isinstance(value, tuple):
        return all(_is_same(one, other, type) for one, other in zip(value, got, strict=True))
    if isinstance(got, str | bytes):  # everything may be read as text
        plain = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        text = got.decode("latin-1") if isinstance(got, bytes) else got
        return text.lower()[:8] == plain.lower()[:8]
    if isinstance(value, date) and not isinstance(value, datetime) and isinstance(got, datetime):
        return got == datetime(value.year, value.month, value.day, tzinfo=UTC)
    return bool(value == got) and isinstance(value, bool) == isinstance(got, bool)


def _decoded(format: str, data: bytes, declared: pa.DataType) -> tuple[dict[int, Any], dict[int, str]]:
    schema = pa.schema([("n", pa.int64()), ("v", declared)])
    batches = list(decode(format, {}, io.BytesIO(data), schema, f"1.{format}"))
    for batch in batches:
        batch.rows.validate(full=True)
    rows = [row for batch in batches for row in batch.rows.to_pylist()]
    bad = {rejected.number - 1: rejected.reason for batch in batches for rejected in batch.rejected}
    return {row["n"]: row["v"] for row in rows}, bad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("format", "write"), [("avro", avro), ("json", lines)])
def test_a_value_is_itself_a_bad_row_or_refused_by_name_whatever_type_is_declared(
    format: str, write: Callable[[Kind], bytes], kind: str
):
    data, value = write(KINDS[kind]), KINDS[kind][1]
    for declared in DECLARED.values():
        try:
            rows, bad = _decoded(format, data, declared)
        except PipelineError:  # JSON has no times of day
            assert format == "json" and "time64" in str(declared)
            continue
        except InputError as error:
            assert not isinstance(error, UnforeseenInputError), declared
            assert f"1.{format}" in str(error) and "'v" in str(error) and "is not read as" in str(error)
            continue
        assert rows[1] is None and sorted([*rows, *bad]) == [0, 1, 2], declared
        assert all("the field 'v" in reason for reason in bad.values())
        assert all(_is_same(value, rows[row], declared) for row in (0, 2) if row in rows), (declared, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_parquet_is_itself_or_refused_with_both_types(kind: str, tmp_path: Path):
    _, value, stored = KINDS[kind]
    table = pa.table({"n": [0, 1, 2], "v": pa.array([value, None, value], stored)})
    pq.write_table(table, tmp_path / "1.parquet")
    for declared in DECLARED.values():
        try:
            rows = read_parquet(tmp_path, pa.schema([("n", pa.int64()), ("v", declared)]))
        except InputError as error:
            assert not isinstance(error, UnforeseenInputError)
            assert all(part in str(error) for part in ("1.parquet", "'v'", str(declared)))
        else:
            assert rows.column("v").to_pylist() == table.column("v").to_pylist()


@pytest.mark.parametrize(
    ("type", "value", "declared"),
    [
        ("double", 0.125, pa.decimal128(9, 2)),
        ("double", 1e300, pa.float32()),
        ("string", "0x7", pa.int64()),
        ("string", "1", pa.bool_()),
    ],
    ids=str,
)
def test_a_value_of_avro_that_another_type_would_change_is_a_bad_row(type: Any, value: Any, declared: pa.DataType):
    for kind in ((type, value, declared), *(of((type, value, declared)) for of in SHAPES.values())):
        rows, bad = _decoded("avro", avro(kind), kind[2])
        assert rows == {1: None} and list(bad) == [0, 2]


def test_a_map_of_avro_is_no_list_of_pairs_with_other_names():
    pairs = pa.struct([("value", pa.string()), ("key", pa.string())])
    rows, bad = _decoded("avro", avro(_map(LEAVES["text"])), pa.list_(pairs))
    assert rows == {1: None} and list(bad) == [0, 2]


def test_whole_numbers_of_avro_are_decimals_that_have_a_place_for_them():
    data = avro(("long", 1 << 40, pa.int64()))
    assert _decoded("avro", data, pa.decimal128(15, 2))[0][0] == 1 << 40
    assert list(_decoded("avro", data, pa.decimal128(9, 2))[1]) == [0, 2]
