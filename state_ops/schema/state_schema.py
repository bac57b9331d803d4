"""The schema of one key's state row: its fields, their Arrow types and defaults. `state_class` makes one of a class.

A schema's id is the hash of its canonical JSON, so two branches of one pipeline never allocate the same id for
different schemas, and the same class yields the same id on every machine and in every process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from state_ops.arrow.types import (
    SUPPORTED,
    canonical_value,
    stored_type,
    type_from_json,
    type_name,
    type_to_json,
    unknown_zone,
    value_from_json,
    value_to_json,
    zero_of,
)
from state_ops.errors import DamageError, PipelineError


@dataclass(frozen=True, slots=True)
class Part:
    """Something inside a field, as rows that are older than it read it: its default, and the names that it had before.

    Attributes:
        path: From the field down, ("street",) of a struct's field, ("item", "street") in a list's elements, ("value",
            "street") in a map's values.
        required: As of `Field`.
    """

    path: tuple[str, ...]
    default: Any
    renamed: tuple[str, ...] = ()
    required: bool = False


def below(name: str, parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts of something that itself is a part of this name."""
    return tuple(replace(part, path=(name, *part.path)) for part in parts)


TOUCHED = "__weir_touched"
"""The one hidden field: when a row with a time to live was last touched (see `ttl`)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One column of a state row.

    The last four attributes say nothing of how a row is stored, so they count neither for equality nor for the
    schema's id.

    Attributes:
        default: What a key without a row, or a row older than the field, reads as.
        renamed: Names that it had before.
        parts: What there is to know of its parts.
        required: Its author gave no default, so that `default` is nothing but the zero of its type.
        description: What its author says of it, for people.
    """

    name: str
    type: pa.DataType
    nullable: bool
    default: Any
    renamed: tuple[str, ...] = field(default=(), compare=False)
    parts: tuple[Part, ...] = field(default=(), compare=False)
    required: bool = field(default=False, compare=False)
    description: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class StateSchema:
    """The fields of one state, in the order of their definition. Immutable, hashable, picklable.

    Raises PipelineError, naming the field, for a type that state cannot hold, a bad name or a default that does not
    fit.

    Attributes:
        older: The schemas that it came from, oldest first, which rows in state may still have; they are read as rows of
            this one (see `evolution`). They do not count for its equality or id either.
    """

    fields: tuple[Field, ...]
    older: tuple[StateSchema, ...] = field(default=(), compare=False, repr=False)
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
        """Return the schema of a `State` subclass: its fields, without lists and maps. PipelineError for anything else,
        or for one that declares nothing."""
        schema = getattr(state, "__weir_schema__", None) if isinstance(state, type) else None
        if not isinstance(schema, StateSchema):
            raise PipelineError(
                f"{state!r} is not a state class.", next="Pass a subclass of State: class Totals(State): count: int = 0"
            )
        if not schema.fields and not getattr(state, "__weir_collections__", ()):
            raise PipelineError(
                f"The state {state.__qualname__} has no fields.",
                where=f"class {state.__qualname__} in {state.__module__}",
                next="Annotate at least one: count: int = 0",
            )
        return schema

    @classmethod
    def build(cls, fields: Iterable[tuple[str, pa.DataType, bool, Any]]) -> StateSchema:
        """Return a schema from (name, Arrow type, nullable, default); a default of None means the zero where not
        nullable."""
        return cls(
            tuple(
                Field(name, type, nullable, _zero(type) if default is None and not nullable else default)
                for name, type, nullable, default in fields
            )
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the row, with the fields themselves, as if the row were one struct of them."""
        return tuple(
            part
            for f in self.fields
            for part in (Part((f.name,), f.default, f.renamed, f.required), *below(f.name, f.parts))
        )

    def reading(self, older: Sequence[StateSchema]) -> StateSchema:
        """Return this schema as one that also reads rows that were written with these older schemas, oldest first."""
        return replace(self, older=tuple(replace(schema, older=()) for schema in older))

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
                "type": type_to_json(f.type),
                "nullable": f.nullable,
                "default": value_to_json(f.type, f.default),
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
                type = type_from_json(entry["type"])
                if not isinstance(entry["nullable"], bool) or not isinstance(entry["name"], str):
                    raise ValueError(f"field {entry['name']!r} of type {entry['type']!r}")
                default = value_from_json(type, entry["default"])
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
        """Return the changes from this one to `newer`, one sentence a field and change; empty if they are the same."""
        old, new = {f.name: f for f in self.fields}, {f.name: f for f in newer.fields}
        names = {was: f.name for f in newer.fields for was in f.renamed if was in old and not {f.name} & old.keys()}
        names = {was: name for was, name in names.items() if was not in new}
        changes = [f"field {was} is called {name} now" for was, name in names.items()]
        old = {names.get(name, name): f for name, f in old.items()}
        for name, a in old.items():
            if (b := new.get(name)) is None:
                changes.append(f"field {name} ({type_name(a.type)}) was removed")
                continue
            if a.type != b.type:
                changes.append(f"field {name} changed its type from {type_name(a.type)} to {type_name(b.type)}")
            if a.nullable != b.nullable:
                changes.append(f"field {name} became {'nullable' if b.nullable else 'not nullable'}")
            # A type change rewrites the default too; that is one change, not two.
            if a.type == b.type and value_to_json(a.type, a.default) != value_to_json(b.type, b.default):
                changes.append(f"field {name} changed its default from {a.default!r} to {b.default!r}")
        for name, b in new.items():
            if name not in old:
                nullable = "nullable" if b.nullable else f"default {b.default!r}"
                changes.append(f"field {name} ({type_name(b.type)}, {nullable}) was added")
        before, after = [name for name in old if name in new], [name for name in new if name in old]
        if before != after:
            changes.append(f"the order of the fields changed from {', '.join(before)} to {', '.join(after)}")
        return changes


def _zero(type: pa.DataType) -> Any:
    return None if type_name(stored_type(type)) is None else zero_of(stored_type(type))  # refused by name in _checked


def _checked(f: Field) -> Field:
    """Return the field with its default as Arrow would give it back, or PipelineError."""
    if not isinstance(f.name, str) or not f.name or (f.name.startswith("_") and f.name != TOUCHED):
        raise PipelineError(
            f"The state field name {f.name!r} is refused.",
            next="Use a name that is not empty and does not begin with _.",
        )
    type = stored_type(f.type)
    if type_name(type) is None:
        raise PipelineError(
            f"The state field {f.name!r} has the type {f.type}, which cannot be stored.",
            next=f"Supported: {SUPPORTED}.",
        )
    zone = unknown_zone(type)
    if zone is not None:
        raise PipelineError(
            f"The state field {f.name!r} has the type {type_name(type)}, and there is no time zone {zone!r}.",
            next="Use a zone of the tz database (Europe/Berlin), an offset (+05:30), or UTC.",
        )
    if pa.types.is_null(type) and not f.nullable:
        raise PipelineError(f"The state field {f.name!r} can only be null, but is not nullable.", next="Add `| None`.")
    try:
        default = canonical_value(type, f.default, bool(f.nullable))
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        raise PipelineError(
            f"The default {f.default!r} of the state field {f.name!r} does not fit {type_name(type)}: {error}.",
            next="Give a default of the field's type.",
        ) from error
    return replace(f, type=type, nullable=bool(f.nullable), default=default)
