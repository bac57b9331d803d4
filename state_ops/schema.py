"""What one key's state row looks like: its fields, their Arrow types and defaults. `state_class` makes one of a class.

A schema's id is the hash of its canonical JSON, so two branches of one pipeline never allocate the same id for different
schemas, and the same class yields the same id on every machine and in every process.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

from state_ops.errors import DamageError, PipelineError

SUPPORTED = (
    "int, float, str, bytes, bool, datetime (or Timestamp), date, any of them `| None`, or Annotated[int, pa.int32()] with "
    "an Arrow type among int8..int64, float32, float64, bool, string, binary, timestamp[us] (no zone or UTC), date32, "
    "decimal128"
)

# The names of the canonical JSON are ours, so that an Arrow release that words a type anew changes no schema id.
_TYPES: dict[str, pa.DataType] = {
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "timestamp[us]": pa.timestamp("us"),
    "timestamp[us, tz=UTC]": pa.timestamp("us", tz="UTC"),
    "date32": pa.date32(),
}
_NAMES = {arrow: name for name, arrow in _TYPES.items()}
_DECIMAL = re.compile(r"decimal128\((\d+), (-?\d+)\)")

PYTHON_TYPES: dict[type, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    bool: pa.bool_(),
    datetime: pa.timestamp("us", tz="UTC"),
    date: pa.date32(),
}


def type_name(type: pa.DataType) -> str | None:
    """Weir's own name of an Arrow type, as it stands in a schema's JSON; None where no field can have that type."""
    if pa.types.is_decimal128(type):
        return f"decimal128({type.precision}, {type.scale})"
    return _NAMES.get(type)


def type_named(name: str) -> pa.DataType | None:
    """The inverse of `type_name`; None for a name that it never gives."""
    if decimal := _DECIMAL.fullmatch(name):
        try:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        except ValueError:
            return None
    return _TYPES.get(name)


@dataclass(frozen=True, slots=True)
class Field:
    """One column of a state row. `default` is what a key without a row, or a row older than the field, reads as."""

    name: str
    type: pa.DataType
    nullable: bool
    default: Any


@dataclass(frozen=True, slots=True)
class StateSchema:
    """The fields of one state, in the order of their definition. Immutable, hashable, picklable.

    Raises PipelineError, naming the field, for a type that state cannot hold, a bad name or a default that does not fit.
    """

    fields: tuple[Field, ...]
    _id: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(_checked(f) for f in self.fields))
        names = [f.name for f in self.fields]
        for name in names:
            if names.count(name) > 1:
                raise PipelineError(f"The state field {name!r} is defined twice.", next="Rename one of the two.")
        object.__setattr__(self, "_id", hashlib.blake2b(self.to_json().encode(), digest_size=8).digest())

    def __hash__(self) -> int:
        return hash(self._id)

    @classmethod
    def of(cls, state: type) -> StateSchema:
        """The schema of a `State` subclass. Raises PipelineError for anything else, or for one without fields."""
        found = getattr(state, "__weir_schema__", None) if isinstance(state, type) else None
        if not isinstance(found, StateSchema):
            raise PipelineError(
                f"{state!r} is not a state class.", next="Pass a subclass of State: class Totals(State): count: int = 0"
            )
        if not found.fields:
            raise PipelineError(
                f"The state {state.__qualname__} has no fields.",
                where=f"class {state.__qualname__} in {state.__module__}",
                next="Annotate at least one: count: int = 0",
            )
        return found

    @classmethod
    def build(cls, fields: Iterable[tuple[str, pa.DataType, bool, Any]]) -> StateSchema:
        """A schema from (name, Arrow type, nullable, default); a default of None means the zero where not nullable."""
        return cls(
            tuple(
                Field(name, type, nullable, zero_of(type) if default is None and not nullable else default)
                for name, type, nullable, default in fields
            )
        )

    @property
    def schema_id(self) -> bytes:
        """8 bytes: blake2b of `to_json()`."""
        return self._id

    @property
    def arrow(self) -> pa.Schema:
        """The Arrow schema of a table of such rows."""
        return pa.schema([pa.field(f.name, f.type, f.nullable) for f in self.fields])

    def to_json(self) -> str:
        """Canonical JSON: the same schema always gives the same text."""
        fields = [
            {
                "name": f.name,
                "type": type_name(f.type),
                "nullable": f.nullable,
                "default": _default_to_json(f.type, f.default),
            }
            for f in self.fields
        ]
        return json.dumps({"fields": fields}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> StateSchema:
        """Read what `to_json` wrote. Raises DamageError for anything else."""
        try:
            fields = []
            for entry in json.loads(text)["fields"]:
                type = type_named(entry["type"])
                if type is None or not isinstance(entry["nullable"], bool) or not isinstance(entry["name"], str):
                    raise ValueError(f"field {entry['name']!r} of type {entry['type']!r}")
                default = _default_from_json(type, entry["default"])
                fields.append(Field(entry["name"], type, entry["nullable"], default))
            return cls(tuple(fields))
        except (
            ValueError,
            TypeError,
            KeyError,
            ArithmeticError,
            AttributeError,
            pa.ArrowException,
            PipelineError,
        ) as error:
            raise DamageError(
                f"A stored state schema cannot be read: {error}",
                where=text[:200] if isinstance(text, str) else repr(text[:200]),
                next="Restore the registry, or read it with the Weir version that wrote it.",
            ) from error

    def differences(self, newer: StateSchema) -> list[str]:
        """What changed from this schema to `newer`, one sentence a field and change; empty if they are the same."""
        old, new = {f.name: f for f in self.fields}, {f.name: f for f in newer.fields}
        said = []
        for name, a in old.items():
            if (b := new.get(name)) is None:
                said.append(f"field {name} ({type_name(a.type)}) was removed")
                continue
            if a.type != b.type:
                said.append(f"field {name} changed its type from {type_name(a.type)} to {type_name(b.type)}")
            if a.nullable != b.nullable:
                said.append(f"field {name} became {'nullable' if b.nullable else 'not nullable'}")
            # A type change rewrites the default too; that is one change, not two.
            if a.type == b.type and _default_to_json(a.type, a.default) != _default_to_json(b.type, b.default):
                said.append(f"field {name} changed its default from {a.default!r} to {b.default!r}")
        for name, b in new.items():
            if name not in old:
                nullable = "nullable" if b.nullable else f"default {b.default!r}"
                said.append(f"field {name} ({type_name(b.type)}, {nullable}) was added")
        before, after = [name for name in old if name in new], [name for name in new if name in old]
        if before != after:
            said.append(f"the order of the fields changed from {', '.join(before)} to {', '.join(after)}")
        return said


def python_type(arrow: pa.DataType) -> type:
    """The Python type of a field's default."""
    if pa.types.is_decimal(arrow):
        return Decimal
    if pa.types.is_integer(arrow):
        return int
    if pa.types.is_floating(arrow):
        return float
    if pa.types.is_timestamp(arrow):
        return datetime
    return next(python for python, type in PYTHON_TYPES.items() if type == arrow)


def zero_of(arrow: pa.DataType) -> Any:
    """The default of a field that is given none and cannot be null."""
    if type_name(arrow) is None:
        return None  # refused by name in _checked
    if pa.types.is_timestamp(arrow):
        return datetime(1970, 1, 1, tzinfo=UTC if arrow.tz else None)
    if pa.types.is_date32(arrow):
        return date(1970, 1, 1)
    return python_type(arrow)()


def _checked(f: Field) -> Field:
    """The field with its default as Arrow would give it back, or PipelineError."""
    if not isinstance(f.name, str) or not f.name or f.name.startswith("_"):
        raise PipelineError(
            f"The state field name {f.name!r} is refused.",
            next="Use a name that is not empty and does not begin with _.",
        )
    if type_name(f.type) is None:
        raise PipelineError(
            f"The state field {f.name!r} has the type {f.type}, which cannot be stored.",
            next=f"Supported: {SUPPORTED}.",
        )
    if f.default is None and f.nullable:
        return Field(f.name, f.type, True, None)
    try:
        # Arrow would take True for 1 and "a" for b"a": a default must be of the field's own Python type.
        want, given = python_type(f.type), type(f.default)
        if given is not want and not (want is float and given is int) and not (want is Decimal and given is int):
            raise ValueError(f"it is a {given.__name__}, not a {want.__name__}")
        default = _canonical(f.type, f.default)
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        raise PipelineError(
            f"The default {f.default!r} of the state field {f.name!r} does not fit {type_name(f.type)}: {error}.",
            next="Give a default of the field's type.",
        ) from error
    return Field(f.name, f.type, bool(f.nullable), default)


def _canonical(arrow: pa.DataType, value: Any) -> Any:
    if pa.types.is_timestamp(arrow):
        if (value.tzinfo is None) != (arrow.tz is None):
            raise ValueError("it has no time zone" if arrow.tz else "it has a time zone")
        # Arrow's own answer depends on which zone library is installed; schemas must compare equal everywhere.
        return value.astimezone(UTC) if arrow.tz else value
    value = pa.scalar(value, arrow).as_py()
    # One NaN object, since only identity makes NaN equal to itself.
    return math.nan if isinstance(value, float) and math.isnan(value) else value


def _default_to_json(arrow: pa.DataType, default: Any) -> Any:
    if default is None or isinstance(default, (bool, int, str)):
        return default
    if isinstance(default, bytes):
        return default.hex()
    if isinstance(default, (float, Decimal)):
        return str(default)  # text, since JSON knows no NaN, no infinity and no exact decimal
    return pa.scalar(default, arrow).value  # microseconds or days since 1970


def _default_from_json(arrow: pa.DataType, default: Any) -> Any:
    if default is None:
        return None
    python = python_type(arrow)
    if python is bytes:
        return bytes.fromhex(default)
    if python in (float, Decimal):
        return python(default)
    if python is date or (python is datetime and arrow.tz is None):
        return pa.scalar(default, arrow).as_py()
    if python is datetime:
        return pa.scalar(default, pa.timestamp("us")).as_py().replace(tzinfo=UTC)
    return default
