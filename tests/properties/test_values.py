"""State rows of any type, nested at random: they come back, and their bytes are those that the format's description
says."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state_ops.errors import DamageError
from state_ops.schema.row_codec import decode_rows, encode_rows
from state_ops.schema.state_schema import StateSchema

# Raw values as Arrow stores them, so that each of a type's values is tried: nanoseconds, dates that Python has none
# for.
_RAW = {
    "b": [pa.int8()],
    "h": [pa.int16()],
    "i": [pa.int32(), pa.date32(), pa.time32("ms"), pa.time32("s")],
    "q": [
        pa.int64(),
        pa.date64(),
        pa.time64("us"),
        pa.time64("ns"),
        pa.timestamp("s"),
        pa.timestamp("ns", tz="Europe/Berlin"),
        pa.timestamp("us", tz="UTC"),
        pa.duration("ms"),
    ],
    "B": [pa.uint8()],
    "H": [pa.uint16()],
    "I": [pa.uint32()],
    "Q": [pa.uint64()],
    "e": [pa.float16()],
    "f": [pa.float32()],
    "d": [pa.float64()],
}
_CODES = {type: code for code, types in _RAW.items() for type in types}
_BINARY = {pa.string(), pa.large_string(), pa.binary(), pa.large_binary()}
_FIXED = [pa.binary(3), pa.decimal32(7, 2), pa.decimal64(18, 0), pa.decimal128(30, 5), pa.decimal256(70, 9)]
_LEAVES = [*_CODES, *sorted(_BINARY, key=str), *_FIXED, pa.bool_(), pa.null(), pa.month_day_nano_interval()]


def _field(draw: Any, name: str, type: pa.DataType) -> pa.Field:
    return pa.field(name, type, pa.types.is_null(type) or draw(st.booleans()))


@st.composite
def _nested(draw: Any, inner: st.SearchStrategy[pa.DataType]) -> pa.DataType:
    kind = draw(st.sampled_from(["list", "large_list", "fixed_size_list", "struct", "map"]))
    if kind == "struct":
        return pa.struct([_field(draw, f"f{i}", type) for i, type in enumerate(draw(st.lists(inner, max_size=4)))])
    element = _field(draw, "item", draw(inner))
    if kind == "map":
        key = draw(inner.filter(lambda type: not pa.types.is_null(type)))
        return pa.map_(key, element.with_name("value"))
    if kind == "fixed_size_list":
        return pa.list_(element, draw(st.integers(0, 3)))
    return pa.list_(element) if kind == "list" else pa.large_list(element)


TYPES = st.recursive(st.sampled_from(_LEAVES), _nested, max_leaves=6)


def _values(type: pa.DataType, nullable: bool) -> st.SearchStrategy[Any]:
    """Values as plain Python: raw integers, bytes, lists, tuples of a struct's fields, pairs of a map; None."""
    if nullable:
        return st.none() | _values(type, False)
    if type in _CODES:
        code = _CODES[type]
        if code in "efd":
            return st.floats(width={"e": 16, "f": 32, "d": 64}[code], allow_nan=False)
        bits = 8 * struct.calcsize(code)
        low, high = (0, 2**bits - 1) if code.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return st.sampled_from([low, high]) | st.integers(low, high)
    if type in _BINARY:
        return st.text(max_size=9).map(str.encode) if "string" in str(type) else st.binary(max_size=9)
    if pa.types.is_decimal(type):
        return st.integers(-(10**type.precision) + 1, 10**type.precision - 1)
    if pa.types.is_boolean(type):
        return st.booleans()
    if pa.types.is_fixed_size_binary(type):
        return st.binary(min_size=type.byte_width, max_size=type.byte_width)
    if pa.types.is_interval(type):
        return st.tuples(_values(pa.int32(), False), _values(pa.int32(), False), _values(pa.int64(), False))
    if pa.types.is_null(type):
        return st.none()
    if pa.types.is_struct(type):
        return st.tuples(*(_values(field.type, field.nullable) for field in type))
    if pa.types.is_map(type):
        pair = st.tuples(_values(type.key_type, False), _values(type.item_type, type.item_field.nullable))
        return st.lists(pair, max_size=3)
    element = _values(type.value_type, type.value_field.nullable)
    size = type.list_size if pa.types.is_fixed_size_list(type) else None
    return st.lists(element, min_size=size or 0, max_size=3 if size is None else size)


def _array(type: pa.DataType, values: list[Any]) -> pa.Array:
    """An Arrow array of such values, built child by child, so that no conversion comes in between."""
    mask = pa.array([value is None for value in values], pa.bool_())
    nulls = mask.to_pylist()
    if type in _CODES and _CODES[type] not in "efd":
        integer = pa.int64() if _CODES[type].islower() else pa.uint64()
        width = {"b": pa.int8(), "h": pa.int16(), "i": pa.int32(), "q": pa.int64()}.get(_CODES[type], type)
        return pa.array(values, integer).cast(width).view(type)
    if pa.types.is_struct(type):
        children = [
            _array(field.type, [_hidden(field) if value is None else value[i] for value in values])
            for i, field in enumerate(type)
        ]
        valid = pa.array([not null for null in nulls], pa.bool_()).buffers()[1]
        return pa.Array.from_buffers(type, len(values), [valid if any(nulls) else None], children=children)
    if pa.types.is_map(type):
        pairs = [pair for value in values for pair in value or []]
        keys, items = _array(type.key_type, [k for k, _ in pairs]), _array(type.item_type, [v for _, v in pairs])
        entries = pa.StructArray.from_arrays([keys, items], fields=[type.key_field, type.item_field])
        return _lists(type, values, entries, pa.int32())
    if pa.types.is_fixed_size_list(type):
        field = type.value_field
        flat = [element for value in values for element in (value or ([_hidden(field)] * type.list_size))]
        valid = pa.array([not null for null in nulls], pa.bool_()).buffers()[1]
        children = [_array(field.type, flat)]
        return pa.Array.from_buffers(type, len(values), [valid if any(nulls) else None], children=children)
    if pa.types.is_list(type) or pa.types.is_large_list(type):
        flat = [element for value in values for element in value or []]
        offsets = pa.int64() if pa.types.is_large_list(type) else pa.int32()
        return _lists(type, values, _array(type.value_type, flat), offsets)
    if pa.types.is_decimal(type):
        width = type.bit_width // 8
        raw = b"".join((value or 0).to_bytes(width, "little", signed=True) for value in values)
        valid = pa.array([not null for null in nulls], pa.bool_()).buffers()[1]
        return pa.Array.from_buffers(type, len(values), [valid if any(nulls) else None, pa.py_buffer(raw)])
    if pa.types.is_interval(type):
        return pa.array([None if value is None else pa.MonthDayNano(value) for value in values], type)
    if type in _BINARY:
        large = pa.large_binary() if "large" in str(type) else pa.binary()
        return pa.array(values, large).view(type)
    return pa.array(values, type)


def _hidden(field: pa.Field) -> Any:
    """What stands behind a null: any value will do."""
    value = {
        "struct": lambda: tuple(_hidden(part) for part in field.type),
        "map": list,
        "list": list,
        "large_list": list,
    }
    for kind, make in value.items():
        if getattr(pa.types, f"is_{kind}")(field.type):
            return make()
    if pa.types.is_fixed_size_list(field.type):
        return [_hidden(field.type.value_field)] * field.type.list_size
    if field.type in _BINARY:
        return b"hidden"
    if pa.types.is_fixed_size_binary(field.type):
        return b"hid"
    if pa.types.is_interval(field.type):
        return (1, 2, 3)
    return None if pa.types.is_null(field.type) else True if pa.types.is_boolean(field.type) else 7


def _lists(type: pa.DataType, values: list[Any], inner: pa.Array, offset: pa.DataType) -> pa.Array:
    ends = [0]
    for value in values:
        ends.append(ends[-1] + len(value or []))
    valid = pa.array([value is not None for value in values], pa.bool_()).buffers()[1]
    buffers = [valid if None in values else None, pa.array(ends, offset).buffers()[1]]
    return pa.Array.from_buffers(type, len(values), buffers, children=[inner])


# The format once more, value by value, as `codec` and `nested` describe it.


def _bitmap(nulls: list[bool]) -> bytes:
    return bytes(sum(null << i for i, null in enumerate(nulls[at : at + 8])) for at in range(0, len(nulls), 8))


def _fixed(type: pa.DataType, value: Any) -> bytes:
    if type in _BINARY or pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_map(type):
        return struct.pack("<I", len(value or []))
    if type in _CODES:
        return struct.pack("<" + _CODES[type], 0 if value is None else value)
    if pa.types.is_decimal(type):
        return (value or 0).to_bytes(type.bit_width // 8, "little", signed=True)
    if pa.types.is_fixed_size_binary(type):
        return value or bytes(type.byte_width)
    if pa.types.is_interval(type):
        return struct.pack("<iiq", *(value or (0, 0, 0)))
    return bytes([bool(value)]) if pa.types.is_boolean(type) else b""


def _block(type: pa.DataType, values: list[Any]) -> bytes:
    nulls = _bitmap([value is None for value in values])
    if pa.types.is_struct(type):
        columns = [[None if value is None else value[i] for value in values] for i in range(type.num_fields)]
        return nulls + b"".join(_block(field.type, column) for field, column in zip(type, columns, strict=True))
    fixed = b"" if pa.types.is_fixed_size_list(type) else b"".join(_fixed(type, value) for value in values)
    return nulls + fixed + _variable(type, [element for value in values for element in _elements(type, value)])


def _elements(type: pa.DataType, value: Any) -> Any:
    return (value or []) if type in _BINARY or (pa.types.is_nested(type) and not pa.types.is_struct(type)) else []


def _variable(type: pa.DataType, elements: list[Any]) -> bytes:
    if type in _BINARY:
        return bytes(elements)
    if pa.types.is_map(type):
        return _block(pa.struct([type.key_field, type.item_field]), elements)
    return _block(type.value_type, elements) if pa.types.is_nested(type) else b""


def _slots(type: pa.DataType, value: Any) -> list[tuple[pa.DataType, Any]]:
    slots = [(type, value)]
    if pa.types.is_struct(type):
        for i, field in enumerate(type):
            slots += _slots(field.type, None if value is None else value[i])
    return slots


def described(schema: StateSchema, row: list[Any]) -> bytes:
    """A row's bytes, from the description of the format."""
    slots = [slot for f, value in zip(schema.fields, row, strict=True) for slot in _slots(f.type, value)]
    parts = [b"\1", schema.schema_id, _bitmap([value is None for _, value in slots])]
    plain = [(type, value) for type, value in slots if not pa.types.is_struct(type)]
    parts += [b"" if pa.types.is_fixed_size_list(type) else _fixed(type, value) for type, value in plain]
    parts += [_variable(type, list(_elements(type, value))) for type, value in plain]
    return b"".join(parts)


@st.composite
def tables(draw: Any) -> tuple[StateSchema, list[list[Any]], pa.Table]:
    """A random schema, rows of it, and the same as a table: sliced and in chunks."""
    types = draw(st.lists(TYPES, min_size=1, max_size=4))
    fields = [_field(draw, f"c{i}", type) for i, type in enumerate(types)]
    schema = StateSchema.build([(field.name, field.type, field.nullable, None) for field in fields])
    rows = draw(st.integers(0, 7))
    columns = [draw(st.lists(_values(f.type, f.nullable), min_size=rows, max_size=rows)) for f in fields]
    table = pa.table([_array(f.type, column) for f, column in zip(fields, columns, strict=True)], schema.arrow)
    start, cut = draw(st.integers(0, rows)), draw(st.integers(0, rows))
    table = pa.concat_tables([table.slice(0, cut), table.slice(cut)]).slice(start)
    return schema, [list(row) for row in zip(*columns, strict=True)][start:], table


@given(tables())
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_rows_of_any_type_have_the_described_bytes_and_come_back(case):
    schema, rows, table = case
    values = encode_rows(schema, table)
    assert values == [described(schema, row) for row in rows]
    again = decode_rows(schema, values)
    for column in again.columns:
        column.validate()
    assert again.schema.equals(schema.arrow)
    assert again.equals(table)
    assert encode_rows(schema, again) == values, "how Arrow happens to hold the rows leaves no trace"
    assert StateSchema.from_json(schema.to_json()) == schema


@given(tables(), st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_a_byte_changed_or_cut_is_another_sound_row_or_damage(case, data):
    schema, _, table = case
    values = encode_rows(schema, table)
    if not values:
        return
    value = bytearray(data.draw(st.sampled_from(values)))
    with pytest.raises(DamageError):
        decode_rows(schema, [*values, bytes(value[: data.draw(st.integers(0, len(value) - 1))])])
    value[data.draw(st.integers(0, len(value) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode_rows(schema, [bytes(value)])
    except DamageError:
        return
    assert encode_rows(schema, decoded) == [bytes(value)]
