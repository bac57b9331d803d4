"""The Arrow types of an Avro schema, for files and messages alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from state_ops.arrow.nested import elements_type
from weir.connectors.formats.spelling import respelled

_SIMPLE = {
    "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(), "double": pa.float64(),
    "bytes": pa.binary(), "string": pa.string(),
}  # fmt: skip
_READ_AS = {"int": "long"}  # they are written alike, and of an int with more than 32 bits Polars takes the lowest ones
_LOGICAL = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "timestamp-nanos"): pa.timestamp("ns", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
    ("long", "local-timestamp-nanos"): pa.timestamp("ns"),
}

_MOST_COLUMNS = 10_000
_DEEPEST = 64
_LARGEST = 64 << 20  # bytes of a fixed value
_DIGITS, _MOST_DIGITS = 38, 76  # of a column, and of what Arrow can hold


WRITABLE = (
    "Write records of values, arrays, maps and records, each at most optional: no other unions, and no records in "
    "themselves."
)
"""What a person does about a type that no column can have."""


class NoSchemaError(Exception):
    """A text is no schema of Avro."""


class UnreadSchemaError(Exception):
    """A schema has a type that no column can have; the message is that, with its field.

    Attributes:
        path: The names of the fields in which it stands, the outermost first.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"the field {'.'.join(self.path)!r} is {self.args[0]}" if self.path else str(self.args[0])


@dataclass(frozen=True, slots=True)
class AvroColumn:
    """A field of a schema, or a part of one.

    Attributes:
        read_as: The schema that Polars reads it by; None: nothing is written of it.
        type: What it is in Arrow.
        symbols: Of an enum.
        parts: Of what it is made.
        is_decimal: It is read as bytes, big-endian, which are the digits of a decimal.
    """

    read_as: Any
    type: pa.DataType
    symbols: tuple[str, ...] | None = None
    parts: tuple[AvroColumn, ...] = ()
    is_decimal: bool = False


class AvroSchema:
    """A writer's schema, read."""

    def __init__(self) -> None:
        self._named = dict[str, Any]()
        self._open = list[str]()
        self._names = self._count = self._depth = 0

    def columns(self, text: bytes | str) -> dict[str, AvroColumn]:
        """Return the columns of a record's schema.

        Raises:
            NoSchemaError: It is not Avro's.
            UnreadSchemaError: It has a type that no column can have.
        """
        try:
            schema = json.loads(text)
            if not (isinstance(schema, dict) and schema.get("type") == "record"):
                raise self._unread(schema)
            self._name(schema, name := _full(schema, ""))
            self._open.append(name)
            return self._fields(schema, name.rpartition(".")[0])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise NoSchemaError(str(error)) from error

    def _name(self, schema: Mapping[str, Any], name: str) -> None:
        """Let a named type be found by its full name, and by its aliases."""
        space = name.rpartition(".")[0]
        self._named[name] = schema
        for alias in schema.get("aliases", ()):
            self._named.setdefault(_full({"name": alias}, space), schema)

    def _fields(self, schema: Mapping[str, Any], space: str) -> dict[str, AvroColumn]:
        fields = dict[str, AvroColumn]()
        for field in schema["fields"]:
            name = field["name"]
            if not isinstance(name, str) or name in fields or not name.encode():
                raise ValueError("fields have names of their own")
            try:
                fields[name] = self._column(field["type"], space)
            except UnreadSchemaError as error:
                error.path.insert(0, name)
                raise
        return fields

    def _column(self, schema: Any, space: str) -> AvroColumn:
        """Return the column of a type; of one that is mentioned twice there are two, so both count."""
        self._count, self._depth = self._count + 1, self._depth + 1
        if self._count > _MOST_COLUMNS or self._depth > _DEEPEST:
            raise UnreadSchemaError(f"one of more than {_MOST_COLUMNS} parts, or is nested deeper than {_DEEPEST}")
        column = self._typed(schema, space)
        self._depth -= 1
        return column

    def _typed(self, schema: Any, space: str) -> AvroColumn:
        if isinstance(schema, list):
            return self._optional(schema, space)
        if isinstance(schema, str):
            if schema in _SIMPLE:
                return AvroColumn(_READ_AS.get(schema, schema), _SIMPLE[schema])
            if schema == "null":
                return AvroColumn(None, pa.null())
            return self._by_name(schema, space)
        kind = schema["type"]
        if kind in ("record", "error", "enum", "fixed"):
            return self._with_name(schema, space)
        if kind == "array":
            part = self._column(schema["items"], space)
            if part.read_as is None:
                raise self._unread(schema)
            return AvroColumn({"type": "array", "items": part.read_as}, pa.list_(part.type), parts=(part,))
        if kind == "map":
            part = self._column(schema["values"], space)
            if part.read_as is None:
                raise self._unread(schema)
            entry = self._polars_record([("key", "string"), ("value", part.read_as)])
            return AvroColumn({"type": "array", "items": entry}, pa.map_(pa.string(), part.type), parts=(part,))
        if isinstance(kind, dict | list):
            return self._column(kind, space)
        return self._logical(schema, kind, space)

    def _logical(self, schema: Mapping[str, Any], kind: str, space: str) -> AvroColumn:
        plain = self._column(kind, space)
        logical = schema.get("logicalType")
        if logical == "decimal" and kind == "bytes":
            return _decimal("bytes", schema)
        type = _LOGICAL.get((kind, str(logical)))
        if type is None:
            return plain
        return AvroColumn(_READ_AS.get(kind, kind), type)

    def _with_name(self, schema: Mapping[str, Any], space: str) -> AvroColumn:
        name = _full(schema, space)
        space = name.rpartition(".")[0]
        self._name(schema, name)
        if schema["type"] == "enum":
            if not all(isinstance(symbol, str) and symbol.encode() for symbol in schema["symbols"]):
                raise ValueError("symbols of an enum are texts")
            return AvroColumn(_READ_AS["int"], pa.string(), tuple(schema["symbols"]))
        if schema["type"] == "fixed":
            if type(schema["size"]) is not int or not 0 < schema["size"] <= _LARGEST:
                raise self._unread(schema)
            read_as = {"type": "fixed", "name": self._new_name(), "size": schema["size"]}
            is_decimal = schema.get("logicalType") == "decimal"
            return _decimal(read_as, schema) if is_decimal else AvroColumn(read_as, pa.binary())
        if name in self._open:
            raise self._unread(name)
        self._open.append(name)
        parts = self._fields(schema, space)
        self._open.pop()
        if not any(part.read_as is not None for part in parts.values()):
            raise self._unread(schema)
        read_as = self._polars_record(
            [(name, part.read_as) for name, part in parts.items() if part.read_as is not None]
        )
        return AvroColumn(
            read_as, pa.struct([(name, part.type) for name, part in parts.items()]), parts=tuple(parts.values())
        )

    def _by_name(self, name: str, space: str) -> AvroColumn:
        full = name if "." in name or not space else f"{space}.{name}"
        schema = self._named.get(full, self._named.get(name))
        if schema is None:
            raise self._unread(name)
        return self._with_name(schema, full.rpartition(".")[0])

    def _optional(self, schema: Sequence[Any], space: str) -> AvroColumn:
        others = [part for part in schema if part != "null"]
        if len(schema) != 2 or len(others) != 1:
            raise self._unread(schema)
        column = self._column(others[0], space)
        return replace(column, read_as=[column.read_as if part != "null" else "null" for part in schema])

    def _polars_record(self, fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        return {
            "type": "record",
            "name": self._new_name(),
            "fields": [{"name": name, "type": read_as} for name, read_as in fields],
        }

    def _new_name(self) -> str:
        self._names += 1
        return f"r{self._names}"

    def _unread(self, schema: Any) -> UnreadSchemaError:
        return UnreadSchemaError(json.dumps(schema)[:200])


def _full(schema: Mapping[str, Any], space: str) -> str:
    name = str(schema["name"])
    space = schema.get("namespace", space)
    return name if "." in name or not space else f"{space}.{name}"


def _decimal(read_as: Any, schema: Mapping[str, Any]) -> AvroColumn:
    """Return a decimal, whose digits are read as bytes. One of more digits than a column can have is `decimal256`: a
    declared column may hold its values. One whose scale makes no sense is bytes, as Avro's specification says."""
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if type(scale) is not int or not 0 <= scale <= _MOST_DIGITS:
        return AvroColumn(read_as, pa.binary())
    if type(precision) is not int or not max(scale, 1) <= precision <= _MOST_DIGITS:
        precision = _MOST_DIGITS
    kind = pa.decimal128 if precision <= _DIGITS else pa.decimal256
    return AvroColumn(read_as, kind(precision, scale), is_decimal=True)


def mistaken(stored: pa.DataType, wanted: pa.DataType, path: str) -> str | None:
    """Return why Arrow would read a field as another value or none at all, as a clause with the field's path; None
    where a value stays itself or is found not to fit.

    Args:
        stored: The field's canonical type in a file.
        wanted: The canonical type as which it is read.
        path: The field's names from the outermost on.
    """
    if pa.types.is_struct(stored) and pa.types.is_struct(wanted):
        here, names = [field.name for field in stored], [field.name for field in wanted]
        if (other := respelled(names, here)) is not None:
            return f"the field '{path}.{other[1]}' differs from '{path}.{other[0]}' by capitals alone"
        pairs = [(stored.field(name).type, wanted.field(name).type, f"{path}.{name}") for name in names if name in here]
    elif are_alike(stored, wanted):
        within, as_which = elements_type(stored).type, elements_type(wanted).type
        is_map = pa.types.is_map(stored)
        pairs = [(within.field(1).type, as_which.field(1).type, path) if is_map else (within, as_which, path)]
    else:
        is_other = {_kind(stored), _kind(wanted)} in _OTHERS or (
            pa.types.is_timestamp(stored) and (pa.types.is_date(wanted) or pa.types.is_time(wanted))
        )
        return f"the field {path!r} is {stored}, which is not read as {wanted}" if is_other else None
    return next(filter(None, (mistaken(*pair) for pair in pairs)), None)


def are_alike(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether the elements of one type can be those of another: of two lists, of two maps, and of a map as a
    list of its pairs, which are called `key` and `value`."""
    if pa.types.is_map(stored) and pa.types.is_list(wanted):
        pair = wanted.value_type
        return pa.types.is_struct(pair) and [field.name for field in pair] == ["key", "value"]
    return any(is_kind(stored) and is_kind(wanted) for is_kind in (pa.types.is_list, pa.types.is_map))


_OTHERS: tuple[set[str | None], ...] = ({"number", "truth"}, {"number", "time"}, {"truth", "time"})
"""Kinds of values that Arrow makes of each other, and that mean something else then."""


def _kind(type: pa.DataType) -> str | None:
    if pa.types.is_boolean(type):
        return "truth"
    if pa.types.is_temporal(type):
        return "time"
    is_number = pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_decimal(type)
    return "number" if is_number else None
