"""JSON schemas of results, from their own types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from state_ops.facts import Facts, Row, abouts, members

_SIMPLE = {
    NoneType: "null", bool: "boolean", int: "integer", float: "number", str: "string", datetime: "string",
}  # fmt: skip


def json_schema(kind: Any, title: str) -> dict[str, Any]:
    """Return the JSON schema of a type that results are made of. A result has all keys that are described, and no
    other."""
    defined: dict[str, Any] = {}
    is_result = isinstance(kind, type) and (issubclass(kind, Facts) or is_typeddict(kind))
    described = _object(kind, defined) if is_result else _schema(kind, defined)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **({"$defs": defined} if defined else {}),
        **described,
        "title": title,
    }


def _schema(kind: Any, defined: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(each, defined) for each in arguments]}
    if origin is tuple and arguments[-1:] != (...,):
        parts = [_schema(part, defined) for part in arguments]
        return {"maxItems": len(parts), "minItems": len(parts), "prefixItems": parts, "type": "array"}
    if hasattr(origin, "__supertype__"):  # a NewType
        return _schema(origin.__supertype__, defined)
    if origin in _SIMPLE:
        return {"type": _SIMPLE[origin]}
    if origin is Any or hasattr(origin, "to_json"):  # of what a checkpoint records
        return {}
    if issubclass(origin, Enum | PurePath):
        return {"type": "string"}
    if issubclass(origin, Mapping) and not is_typeddict(origin):
        return {"additionalProperties": _schema(arguments[1], defined) or True, "type": "object"}
    if issubclass(origin, Sequence):
        return {"items": _schema(arguments[0], defined), "type": "array"}
    if hasattr(origin, "to_dicts"):  # a frame
        return _schema(list[Row], defined)
    if hasattr(origin, "shown_as"):
        return _schema(_type_of(origin, origin.shown_as), defined)
    if origin.__name__ not in defined:
        defined[origin.__name__] = {}  # it may have results of its own type
        defined[origin.__name__] = _object(origin, defined)
    return {"$ref": f"#/$defs/{origin.__name__}"}


def _type_of(kind: type, attribute: str) -> Any:
    """Return the type of a field or property."""
    of = getattr(kind, attribute)
    return get_type_hints(of.fget)["return"] if isinstance(of, property) else get_type_hints(kind)[attribute]


def _object(of: type, defined: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a result, or of a TypedDict. One that is not total has other keys, too."""
    if is_typeddict(of):
        about = abouts(of)
        listed = [(name, kind, about.get(name, "")) for name, kind in get_type_hints(of).items()]
    else:
        listed = [(member.name, member.type, member.about) for member in members(of)]
    properties = {}
    for name, kind, text in listed:
        described = _schema(kind, defined)
        title = {} if "$ref" in described else {"title": name.replace("_", " ").title()}
        properties[name] = described | ({"description": text} if text else {}) | title
    return {
        "additionalProperties": not getattr(of, "__total__", True),
        "description": " ".join((of.__doc__ or "").partition("\n\n")[0].split()),
        "properties": properties,
        "required": [name for name in properties if name in getattr(of, "__required_keys__", properties)],
        "title": of.__name__,
        "type": "object",
    }
