"""Reads the annotations of a state class: an Arrow type, whether it can be null, and the value that older rows get."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pyarrow as pa

from state_ops.arrow.types import PYTHON_TYPES, parts, python_type, stored_type, type_name, unknown_to_polars, zero_of
from state_ops.schema.state_schema import Field, Part, StateSchema, below


@dataclass(frozen=True, slots=True)
class Renamed:
    """The names that a field had before."""

    names: tuple[str, ...]


def renamed_from(*names: str) -> Renamed:
    """Declare the earlier names of a field of a state class, so that rows that are stored keep its values.

    The declaration can go as soon as one checkpoint was completed with it.

    Args:
        *names: The field's earlier names.

    Example:
        >>> from typing import Annotated
        >>> from weir import State, renamed_from
        >>> class Aircraft(State):
        ...     flights: Annotated[int, renamed_from("legs")] = 0
        >>> Aircraft(flights=3)
        Aircraft(flights=3)
    """
    return Renamed(names)


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a field's annotation.

    Attributes:
        default: The default of a field to which its author gives none.
        renamed, parts, required, description: As of `Field`.
    """

    type: pa.DataType
    nullable: bool = False
    default: Any = None
    renamed: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    required: bool = True
    description: str = ""


def meaning_of(hint: Any) -> Meaning:
    """Return the meaning of an annotation. Raises ValueError, which names the part, if a part cannot be stored."""
    if typing.get_origin(hint) is Annotated:
        python, *extras = typing.get_args(hint)
        renamed = tuple(name for extra in extras if isinstance(extra, Renamed) for name in extra.names)
        arrow = next((extra for extra in extras if isinstance(extra, pa.DataType)), None)
        meaning = meaning_of(python) if arrow is None else _annotated(hint, python, arrow)
        description = next((extra for extra in extras if isinstance(extra, str)), meaning.description)
        return replace(meaning, renamed=(*meaning.renamed, *renamed), description=description)
    bare, nullable = _without_none(hint)
    if nullable:
        return replace(meaning_of(bare), nullable=True, default=None, required=False)
    if isinstance(schema := getattr(hint, "__weir_schema__", None), StateSchema):
        return _struct(hint, schema)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        element = meaning_of(args[0])
        type = pa.list_(pa.field("item", element.type, element.nullable))
        return Meaning(type, default=[], parts=below("item", element.parts))
    if origin is dict:
        key, value = meaning_of(args[0]), meaning_of(args[1])
        if key.nullable:
            raise ValueError(f"the keys of {shown(hint)} cannot be None")
        type = pa.map_(key.type, pa.field("value", value.type, value.nullable))
        return Meaning(type, default={}, parts=(*below("key", key.parts), *below("value", value.parts)))
    if hint not in PYTHON_TYPES:
        raise ValueError(f"the type {shown(hint)} cannot be stored")
    type = PYTHON_TYPES[hint]
    return Meaning(type, default=zero_of(type))


def field_of(name: str, hint: Any, default: Any) -> Field:
    """Return the field of an annotation and its default, `...` where there is none. Raises ValueError as
    `meaning_of`."""
    meant = meaning_of(hint)
    required = default is ... and meant.required
    if default is ...:
        default = meant.default
    elif default is None and not meant.nullable:
        raise ValueError("its default is None but its type is not nullable: add `| None`")
    if (kind := _strange_to_frames(meant.type)) is not None:
        raise ValueError(f"no frame can hold {kind} and all its values for a stage's function")
    return Field(name, meant.type, meant.nullable, default, meant.renamed, meant.parts, required, meant.description)


def nested_state(hint: Any) -> Any:
    """Return the state class that an annotation is, perhaps `| None`; None of any other annotation."""
    bare, _ = _without_none(typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint)
    return bare if isinstance(getattr(bare, "__weir_schema__", None), StateSchema) else None


def _annotated(hint: Any, python: Any, arrow: pa.DataType) -> Meaning:
    bare, nullable = _without_none(python)
    type = stored_type(arrow)
    if type_name(type) is None or (typing.get_origin(bare) or bare) is not python_type(type):
        raise ValueError(f"{shown(hint)} cannot be stored")
    return Meaning(type, nullable, None if nullable else zero_of(type), required=not nullable)


def _struct(cls: type, schema: StateSchema) -> Meaning:
    if not schema.fields:
        raise ValueError(f"the class {shown(cls)} has no fields")
    if getattr(cls, "__weir_collections__", ()):
        raise ValueError(f"the class {shown(cls)} has lists or maps of its own, and they cannot be nested")
    return Meaning(
        pa.struct(list(schema.arrow)),
        default={f.name: f.default for f in schema.fields},
        parts=schema.parts,
        required=any(f.required for f in schema.fields),
    )


def _strange_to_frames(type: pa.DataType) -> pa.DataType | None:
    """Return the type, or the part of it, that the frames of a stage's function have no equal of: Polars has none, or
    `frames` makes it one of fewer values (unsigned numbers become signed, timestamps and durations microseconds)."""
    if (strange := unknown_to_polars(type)) is not None or pa.types.is_uint64(type) or _is_nanos(type):
        return strange or type
    return next((strange for part in parts(type) if (strange := _strange_to_frames(part.type)) is not None), None)


def _is_nanos(type: pa.DataType) -> bool:
    return (pa.types.is_timestamp(type) or pa.types.is_duration(type)) and bool(type.unit == "ns")


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        if len(rest) == 1:
            return rest[0], True
    return hint, False


def shown(hint: Any) -> str:
    """Return an annotation as an author wrote it."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
