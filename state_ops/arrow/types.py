"""The Arrow types that a state field can have: their names, as a schema's JSON has them, and their Python values.

The names are ours, so that an Arrow release that words a type anew changes no schema id.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from state_ops.arrow.columns import is_list

SUPPORTED = (
    "int, float, str, bytes, bool, datetime (or Timestamp), date, time, timedelta, list[...] and dict[..., ...] of "
    "such, a State class, any of them `| None`, or Annotated[int, pa.int32()] with an Arrow type: integers, floats, "
    "decimals, bool, strings, binaries, dates, times, timestamps, durations, lists, maps and structs"
)

# Every datetime fits in these, so Arrow is not asked; see `_is_exact`.
_MICROSECONDS = (pa.timestamp("us"), pa.timestamp("us", tz="UTC"))

_SIMPLE: dict[str, pa.DataType] = {
    **{str(type): type for type in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{str(type): type for type in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())},
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
    "large_string": pa.large_string(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "date32": pa.date32(),
    "date64": pa.date64(),
    "time32[s]": pa.time32("s"),
    "time32[ms]": pa.time32("ms"),
    "time64[us]": pa.time64("us"),
    "time64[ns]": pa.time64("ns"),
    **{f"duration[{unit}]": pa.duration(unit) for unit in ("s", "ms", "us", "ns")},
    "month_day_nano_interval": pa.month_day_nano_interval(),
    "null": pa.null(),
}
_VIEWED = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
_NAMES = {arrow: name for name, arrow in _SIMPLE.items()}
_DECIMAL = re.compile(r"decimal(32|64|128|256)\((\d+), (-?\d+)\)")
_DECIMALS = {32: pa.decimal32, 64: pa.decimal64, 128: pa.decimal128, 256: pa.decimal256}
_OFFSET = re.compile(r"([+-]\d\d):?(\d\d)?")
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=(.+))?\]")
_FIXED_BINARY = re.compile(r"fixed_size_binary\[(\d+)\]")

PYTHON_TYPES: dict[type, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    bool: pa.bool_(),
    datetime: pa.timestamp("us", tz="UTC"),
    date: pa.date32(),
    time: pa.time64("us"),
    timedelta: pa.duration("us"),
}


# Types


def stored_type(type: pa.DataType) -> pa.DataType:
    """Return the type that values of `type` are stored as: dictionaries, run ends and views as what they stand for,
    maps unsorted, `Z` as UTC, offsets as +HH:MM."""
    if pa.types.is_timestamp(type) and type.tz:
        return pa.timestamp(type.unit, tz=_stored_zone(type.tz))
    if pa.types.is_dictionary(type) or pa.types.is_run_end_encoded(type):
        return stored_type(type.value_type)
    if pa.types.is_list_view(type) or pa.types.is_large_list_view(type):
        type = (pa.list_ if pa.types.is_list_view(type) else pa.large_list)(type.value_field)
    return mapped(_VIEWED.get(type, type), stored_type)


def _stored_zone(zone: str) -> str:
    if zone in ("Z", "z"):
        return "UTC"
    offset = _OFFSET.fullmatch(zone)
    return f"{offset[1]}:{offset[2] or '00'}" if offset else zone


def unknown_zone(type: pa.DataType) -> str | None:
    """Return the time zone of a type, or of a part of it, that no library here knows; None if all are known."""
    if pa.types.is_timestamp(type) and type.tz:
        try:
            pa.lib.string_to_tzinfo(type.tz)
        except Exception:  # each library that may be installed for it has an error of its own
            return str(type.tz)
    return next((zone for part in parts(type) if (zone := unknown_zone(part.type)) is not None), None)


def unknown_to_polars(type: pa.DataType) -> pa.DataType | None:
    """Return the type, or the part of it, of which Polars has no equal, so that it ends the process' work with a panic;
    None: there is none."""
    if pa.types.is_interval(type) or pa.types.is_decimal256(type) or (pa.types.is_decimal(type) and type.scale < 0):
        return type
    return next((strange for part in parts(type) if (strange := unknown_to_polars(part.type)) is not None), None)


def parts(type: pa.DataType) -> list[pa.Field]:
    """Return the fields of a struct, the key and value of a map, the element of a list; none of any other type."""
    if pa.types.is_struct(type):
        return list(type)
    if pa.types.is_map(type):
        return [type.key_field, type.item_field]
    if is_list(type) or pa.types.is_fixed_size_list(type):
        return [type.value_field]
    return []


def with_parts(type: pa.DataType, fields: list[pa.Field]) -> pa.DataType:
    """Return a struct, map or list like `type`, of these fields."""
    if pa.types.is_struct(type):
        return pa.struct(fields)
    if pa.types.is_map(type):
        return pa.map_(fields[0].type, fields[1])
    if pa.types.is_fixed_size_list(type):
        return pa.list_(fields[0], type.list_size)
    return pa.large_list(fields[0]) if pa.types.is_large_list(type) else pa.list_(fields[0])


def mapped(type: pa.DataType, change: Callable[[pa.DataType], pa.DataType], *, loose: bool = False) -> pa.DataType:
    """Return the type with the type of each of its parts changed.

    Args:
        type: Any type. One without parts stays what it is.
        change: Gives the new type of a part.
        loose: Whether every part becomes nullable, but for a map's keys.
    """
    names = ("key", "value") if pa.types.is_map(type) else ("item",)
    fields = [
        pa.field(part.name if pa.types.is_struct(type) else names[at], change(part.type), loose or part.nullable)
        for at, part in enumerate(parts(type))
    ]
    return with_parts(type, fields) if fields else type


def without_nullability(type: pa.DataType) -> pa.DataType:
    """Return the type with every part nullable: what two types are compared by where the values themselves are checked
    for nulls."""
    return mapped(type, without_nullability, loose=True)


# Names


def type_name(type: pa.DataType) -> str | None:
    """Weir's own name of an Arrow type, for people; None where no field can have that type."""
    if pa.types.is_struct(type):
        names = [type_name(field.type) for field in type]
        if None in names or len(set(type.names)) != len(names):
            return None
        described = [f"{f.name}: {n}{'' if f.nullable else ' not null'}" for f, n in zip(type, names, strict=True)]
        return f"struct<{', '.join(described)}>"
    if pa.types.is_map(type):
        key, value = type_name(type.key_type), type_name(type.item_type)
        return f"map<{key}, {value}{'' if type.item_field.nullable else ' not null'}>" if key and value else None
    if fields := parts(type):
        name = type_name(fields[0].type)
        size = f", {type.list_size}" if pa.types.is_fixed_size_list(type) else ""
        kind = "large_list" if pa.types.is_large_list(type) else "fixed_size_list" if size else "list"
        return f"{kind}<{name}{'' if fields[0].nullable else ' not null'}{size}>" if name else None
    if pa.types.is_decimal(type):
        return f"decimal{type.bit_width}({type.precision}, {type.scale})"
    if pa.types.is_timestamp(type):
        return f"timestamp[{type.unit}, tz={type.tz}]" if type.tz else f"timestamp[{type.unit}]"
    if pa.types.is_fixed_size_binary(type) and type.byte_width:
        return f"fixed_size_binary[{type.byte_width}]"
    return _NAMES.get(type)


def type_named(name: str) -> pa.DataType | None:
    """Return the inverse of `type_name` for types without parts; None for a name that it never gives."""
    if decimal := _DECIMAL.fullmatch(name):
        try:
            return _DECIMALS[int(decimal[1])](int(decimal[2]), int(decimal[3]))
        except ValueError:
            return None
    if timestamp := _TIMESTAMP.fullmatch(name):
        return pa.timestamp(timestamp[1], tz=timestamp[2])
    if (binary := _FIXED_BINARY.fullmatch(name)) and int(binary[1]):
        return pa.binary(int(binary[1]))
    return _SIMPLE.get(name)


def type_to_json(type: pa.DataType) -> Any:
    """Return a type as JSON: its name, or for lists, maps and structs an object of their parts."""
    if pa.types.is_struct(type):
        return {"struct": [{"name": f.name, "type": type_to_json(f.type), "nullable": f.nullable} for f in parts(type)]}
    if pa.types.is_map(type):
        key, value = type_to_json(type.key_type), type_to_json(type.item_type)
        return {"map": {"key": key, "value": value, "nullable": type.item_field.nullable}}
    if fields := parts(type):
        element: dict[str, Any] = {"type": type_to_json(fields[0].type), "nullable": fields[0].nullable}
        if pa.types.is_fixed_size_list(type):
            return {"fixed_size_list": {**element, "size": type.list_size}}
        return {"large_list" if pa.types.is_large_list(type) else "list": element}
    return type_name(type)


def type_from_json(raw: Any) -> pa.DataType:
    """Return the inverse of `type_to_json`. Raises ValueError, KeyError or TypeError for anything else."""
    if isinstance(raw, str):
        if (named := type_named(raw)) is None:
            raise ValueError(f"no type is named {raw!r}")
        return named
    ((kind, body),) = raw.items()
    if kind == "struct":
        return pa.struct([pa.field(f["name"], type_from_json(f["type"]), _flag(f["nullable"])) for f in body])
    if kind == "map":
        value = pa.field("value", type_from_json(body["value"]), _flag(body["nullable"]))
        return pa.map_(type_from_json(body["key"]), value)
    element = pa.field("item", type_from_json(body["type"]), _flag(body["nullable"]))
    if kind == "fixed_size_list":
        return pa.list_(element, body["size"])
    return {"list": pa.list_, "large_list": pa.large_list}[kind](element)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


# Values


_PYTHON: tuple[tuple[Callable[[pa.DataType], bool], Any], ...] = (
    (pa.types.is_decimal, Decimal),
    (pa.types.is_integer, int),
    (pa.types.is_floating, float),
    (pa.types.is_timestamp, datetime),
    (pa.types.is_date, date),
    (pa.types.is_time, time),
    (pa.types.is_duration, timedelta),
    (pa.types.is_boolean, bool),
    (pa.types.is_string, str),
    (pa.types.is_large_string, str),
    (pa.types.is_binary, bytes),
    (pa.types.is_large_binary, bytes),
    (pa.types.is_fixed_size_binary, bytes),
    (pa.types.is_interval, pa.MonthDayNano),
    (pa.types.is_null, None),
    (pa.types.is_map, dict),
    (pa.types.is_struct, dict),
)


def python_type(type: pa.DataType) -> Any:
    """Return the Python type of a field's default."""
    return next((python for is_kind, python in _PYTHON if is_kind(type)), list)


def zero_of(type: pa.DataType) -> Any:
    """Return the default of a field that is given none and cannot be null: 0, "", 1970-01-01, empty; a struct of
    such."""
    if pa.types.is_timestamp(type):
        return datetime(1970, 1, 1, tzinfo=UTC if type.tz else None)
    if pa.types.is_date(type):
        return date(1970, 1, 1)
    if pa.types.is_fixed_size_binary(type):
        return bytes(type.byte_width)
    if pa.types.is_interval(type):
        return pa.MonthDayNano([0, 0, 0])
    if pa.types.is_struct(type):
        return {field.name: None if field.nullable else zero_of(field.type) for field in type}
    if pa.types.is_fixed_size_list(type):
        element = type.value_field
        return [None if element.nullable else zero_of(element.type)] * type.list_size
    python = python_type(type)
    return None if python is None else python()


def canonical_value(type: pa.DataType, value: Any, nullable: bool = False) -> Any:
    """Return the value of a default as Arrow would give it back, lists, maps and structs by their parts.

    Raises ValueError, TypeError, OverflowError or ArrowException where it does not fit the type.
    """
    if value is None:
        if not nullable:
            raise ValueError("it holds a None where none may be")
        return None
    if hasattr(value, "as_dict"):  # a nested State
        value = value.as_dict()
    # Arrow would take True for 1 and "a" for b"a": a default must be of the field's own Python type.
    want, given = python_type(type), value.__class__
    if given is not want and not (given is int and want in (float, Decimal)) and not (given is tuple and want is list):
        raise ValueError(f"it is a {given.__name__}, not a {'None' if want is None else want.__name__}")
    if pa.types.is_struct(type):
        if extra := value.keys() - set(type.names):
            raise ValueError(f"it has no field {min(extra)!r}")
        whole = {**zero_of(type), **value}
        return {field.name: canonical_value(field.type, whole[field.name], field.nullable) for field in type}
    if pa.types.is_map(type):
        item = type.item_field
        return {
            canonical_value(type.key_type, k): canonical_value(item.type, v, item.nullable) for k, v in value.items()
        }
    if fields := parts(type):
        if pa.types.is_fixed_size_list(type) and len(value) != type.list_size:
            raise ValueError(f"it has {len(value)} elements, not {type.list_size}")
        return [canonical_value(fields[0].type, element, fields[0].nullable) for element in value]
    if pa.types.is_timestamp(type):
        if (value.tzinfo is None) != (type.tz is None):
            raise ValueError("it has no time zone" if type.tz else "it has a time zone")
        if type not in _MICROSECONDS:
            pa.scalar(value, type)
        # Arrow's own answer depends on which zone library is installed; schemas must compare equal everywhere.
        return value.astimezone(UTC) if type.tz else value
    if pa.types.is_interval(type) or pa.types.is_duration(type):
        pa.scalar(value, type)
        return value
    if _is_exact(type, value):
        return value
    value = pa.scalar(value, type).as_py()
    # One NaN object, since only identity makes NaN equal to itself.
    return math.nan if isinstance(value, float) and math.isnan(value) else value


def _is_exact(type: pa.DataType, value: Any) -> bool:
    """Return whether Arrow is sure to hand a value back as it is, for the types that most fields have.

    Arrow itself is not asked: at the first value that it converts it imports pandas, for a third of a second.
    """
    if value.__class__ is int and pa.types.is_signed_integer(type):
        return bool(-(1 << type.bit_width - 1) <= value < 1 << type.bit_width - 1)
    if value.__class__ is str and pa.types.is_string(type):
        return bool(value.isascii())
    return value.__class__ is bool or (value.__class__ is float and pa.types.is_float64(type) and math.isfinite(value))


def from_pairs(type: pa.DataType, value: Any) -> Any:
    """Return a value as Arrow gives it to Python, with its maps as dicts, where Arrow has lists of pairs."""
    if not isinstance(value, list | dict):
        return value
    if pa.types.is_map(type):
        pairs = value.items() if isinstance(value, dict) else value
        return {from_pairs(type.key_type, k): from_pairs(type.item_type, v) for k, v in pairs}
    if pa.types.is_struct(type) and isinstance(value, dict):
        types = {field.name: field.type for field in type}
        return {name: from_pairs(types[name], element) if name in types else element for name, element in value.items()}
    fields = parts(type)
    return [from_pairs(fields[0].type, element) for element in value] if fields and isinstance(value, list) else value


def value_to_json(type: pa.DataType, value: Any) -> Any:
    """Return a canonical value as JSON."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (float, Decimal)):
        return str(value)  # text, since JSON knows no NaN, no infinity and no exact decimal
    if pa.types.is_struct(type):
        return {field.name: value_to_json(field.type, value[field.name]) for field in type}
    if pa.types.is_map(type):
        return [[value_to_json(type.key_type, k), value_to_json(type.item_type, v)] for k, v in value.items()]
    if fields := parts(type):
        return [value_to_json(fields[0].type, element) for element in value]
    if pa.types.is_interval(type):
        return list(value)
    if type in _MICROSECONDS:
        return (value - datetime.fromtimestamp(0, UTC).replace(tzinfo=value.tzinfo)) // timedelta(microseconds=1)
    return pa.scalar(value, type).value  # an integer of the type's unit, since 1970 or midnight


def value_from_json(type: pa.DataType, raw: Any) -> Any:
    """Return the inverse of `value_to_json`."""
    if raw is None:
        return None
    if pa.types.is_struct(type):
        return {field.name: value_from_json(field.type, raw[field.name]) for field in type}
    if pa.types.is_map(type):
        return {value_from_json(type.key_type, k): value_from_json(type.item_type, v) for k, v in raw}
    if fields := parts(type):
        return [value_from_json(fields[0].type, element) for element in raw]
    python = python_type(type)
    if python is bytes:
        return bytes.fromhex(raw)
    if python in (float, Decimal):
        return python(raw)
    if pa.types.is_interval(type):
        return pa.MonthDayNano(raw)
    if python is datetime:
        # Through microseconds: of nanoseconds Arrow would make a pandas value, where there is pandas.
        moment = pa.scalar(raw, pa.timestamp(type.unit)).cast(pa.timestamp("us")).as_py()
        return moment.replace(tzinfo=UTC) if type.tz else moment
    if python is timedelta:
        return pa.scalar(raw, type).cast(pa.duration("us")).as_py()
    return pa.scalar(raw, type).as_py() if python in (date, time) else raw
