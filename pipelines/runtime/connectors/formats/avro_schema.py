"""What the types of an Avro schema are in Arrow, for files and messages alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

_SIMPLE = {
    "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(), "double": pa.float64(),
    "bytes": pa.binary(), "string": pa.string(),
}  # fmt: skip
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


WRITABLE = (
    "Write records of values, arrays, maps and records, each at most optional: no other unions, and no records in "
    "themselves."
)
"""What a person does about a type that no column can have."""


class NoSchemaError(Exception):
    """A text is no schema of Avro."""


class UnreadSchemaError(Exception):
    """A schema has a type that no column can have; the message is that."""


@dataclass(frozen=True, slots=True)
class AvroColumn:
    """A field of a schema, or a part of one.

    Attributes:
        read_as: The schema that Polars reads it by; None: nothing is written of it.
        type: What it is in Arrow.
        symbols: Of an enum.
        parts: Of what it is made.
    """

    read_as: Any
    type: pa.DataType
    symbols: tuple[str, ...] | None = None
    parts: tuple[AvroColumn, ...] = ()


class AvroSchema:
    """A writer's schema, read."""

    def __init__(self) -> None:
        self._named = dict[str, Any]()
        self._open = list[str]()
        self._names = 0

    def columns(self, text: bytes | str) -> dict[str, AvroColumn]:
        """The columns of a record's schema.

        Raises:
            NoSchemaError: It is not Avro's.
            UnreadSchemaError: It has a type that no column can have.
        """
        try:
            schema = json.loads(text)
            if not (isinstance(schema, dict) and schema.get("type") == "record"):
                raise self._unread(schema)
            return {field["name"]: self._column(field["type"], "") for field in self._record(schema, "")}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise NoSchemaError(str(error)) from error

    def _record(self, schema: Mapping[str, Any], space: str) -> Sequence[Mapping[str, Any]]:
        self._named[_full(schema, space)] = schema
        fields: Sequence[Mapping[str, Any]] = schema["fields"]
        return fields

    def _column(self, schema: Any, space: str) -> AvroColumn:
        if isinstance(schema, list):
            return self._optional(schema, space)
        if isinstance(schema, str):
            if schema in _SIMPLE:
                return AvroColumn(schema, _SIMPLE[schema])
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
            return _decimal({"type": "bytes"}, schema)
        type = _LOGICAL.get((kind, str(logical)))
        if type is None:
            return plain
        return AvroColumn(kind, type)

    def _with_name(self, schema: Mapping[str, Any], space: str) -> AvroColumn:
        name = _full(schema, space)
        space = name.rpartition(".")[0]
        self._named[name] = schema
        if schema["type"] == "enum":
            return AvroColumn("int", pa.string(), tuple(schema["symbols"]))
        if schema["type"] == "fixed":
            read_as = {"type": "fixed", "name": self._new_name(), "size": schema["size"]}
            is_decimal = schema.get("logicalType") == "decimal"
            return _decimal(read_as, schema) if is_decimal else AvroColumn(read_as, pa.binary())
        if name in self._open:
            raise self._unread(name)
        self._open.append(name)
        parts = {field["name"]: self._column(field["type"], space) for field in schema["fields"]}
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
        return self._with_name(schema, space)

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


def _decimal(read_as: Mapping[str, Any], schema: Mapping[str, Any]) -> AvroColumn:
    precision, scale = int(schema["precision"]), int(schema.get("scale", 0))
    facts = {"logicalType": "decimal", "precision": precision, "scale": scale}
    return AvroColumn({**read_as, **facts}, pa.decimal128(precision, scale))
