"""The `State` class that a pipeline's author writes, and how its annotations become the fields of a `StateSchema`."""

from __future__ import annotations

import copy
import inspect
import sys
import types
import typing
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, ClassVar, dataclass_transform

import pyarrow as pa

from state_ops.arrow.types import SUPPORTED, from_pairs
from state_ops.errors import PipelineError
from state_ops.schema.annotations import field_of, meaning_of, nested_state, shown
from state_ops.schema.descriptors import EMPTY, Collection, checked, collection, marked
from state_ops.schema.state_schema import Field, StateSchema

Timestamp = Annotated[datetime, pa.timestamp("us", tz="UTC")]
"""An instant, microseconds since the epoch, UTC. A plain `datetime` annotation means the same."""


@dataclass_transform(kw_only_default=True)
class State:
    """The base class of typed state. The subclass's annotations are the fields of one row per key.

    - A class attribute is the field's default. `X | None` is nullable and defaults to None. Any other field without a
      default gets the zero of its type (0, 0.0, "", b"", False, 1970-01-01, [], {}) for a key that is new.
    - A field that is added to a class whose state is stored needs a default, or `| None`: older rows read as that.
    - `list[int]`, `dict[str, float]` and other state classes are fields too, read and written as a whole.
    - `recent: ListOf[Ride]` and `spent: MapOf[str, float]` declare a list and a map of each key. They are no fields of
      the row but entries of their own; an instance has them as a Python list and dict.
    - `legs: Annotated[int, "Flown so far."] = 0` describes a field.
    - A subclass of a state class adds to its base's fields.

    Instances take keywords, compare by value and refuse names that are not fields.

    Raises:
        PipelineError: An annotation cannot be resolved or stored. It is raised when the class is defined, and names the
            class and the field.

    Example:
        >>> from weir import ListOf, MapOf, State, Timestamp
        >>> class Rider(State):
        ...     rides: int = 0
        ...     last: Timestamp | None = None
        ...     recent: ListOf[str]
        ...     spent: MapOf[str, float]
        >>> Rider(rides=2, recent=["home"])
        Rider(rides=2, last=None, recent=['home'], spent={})
        >>> Rider().last is None
        True
    """

    __weir_schema__: ClassVar[StateSchema] = StateSchema(())
    __weir_collections__: ClassVar[tuple[Collection, ...]] = ()
    __weir_nested__: ClassVar[dict[str, type[State]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The frame that runs the class statement: without it a class in a function body could not name local types.
        hints = _own_annotations(cls, sys._getframe(1))
        fields = {f.name: f for base in reversed(cls.__mro__[1:]) for f in _fields_of(base)}
        collections = {
            declared.name: declared for base in reversed(cls.__mro__[1:]) for declared in _collections_of(base)
        }
        for name, hint in hints.items():
            if typing.get_origin(hint) is ClassVar or hint is ClassVar:
                continue
            if hasattr(State, name):
                raise _refusal(cls, name, f"the name {name} is taken by State itself")
            if (kind := marked(hint)) is not None:
                collections[name] = _collection(cls, name, kind, typing.get_args(typing.get_args(hint)[0]))
                continue
            fields[name] = _field(cls, name, hint)
        nested = {name: nested_state(hint) for name, hint in hints.items()}
        cls.__weir_nested__ = {
            **cls.__weir_nested__,
            **{name: declared for name, declared in nested.items() if declared is not None},
        }
        for name, f in fields.items():
            # A base's field without annotation here may still get a new default: class Late(Base): legs = 1
            if name not in hints and cls.__dict__.get(name, f.default) is not f.default:
                fields[name] = replace(f, default=cls.__dict__[name], required=False)
        try:
            cls.__weir_schema__ = StateSchema(tuple(fields.values()))
            cls.__weir_collections__ = checked(tuple(collections.values()), tuple(fields))
        except PipelineError as error:
            raise PipelineError(f"{cls.__qualname__}: {error.what}", where=_place(cls), next=error.next) from None
        for f in cls.__weir_schema__.fields:
            inner = cls.__weir_nested__.get(f.name)
            setattr(cls, f.name, inner(**f.default) if inner and f.default is not None else f.default)

    def __init__(self, **values: Any) -> None:
        defaults = {f.name: getattr(type(self), f.name) for f in self.__weir_schema__.fields}
        defaults |= {declared.name: EMPTY[declared.kind]() for declared in self.__weir_collections__}
        unknown = values.keys() - defaults.keys()
        if unknown:
            raise _unknown(type(self), min(unknown))
        # Copies, since a list or dict that two instances share would change in both.
        self.__dict__.update(copy.deepcopy(defaults))
        types = {f.name: f.type for f in self.__weir_schema__.fields}
        for name, given in values.items():
            value = from_pairs(types[name], given) if name in types else given
            nested = self.__weir_nested__.get(name)
            self.__dict__[name] = nested(**value) if nested and isinstance(value, dict) else value

    def __setattr__(self, name: str, value: Any) -> None:
        # A misspelt field would otherwise be lost without a word when the row is stored.
        if name not in self.__dict__ and not hasattr(type(self), name):
            raise _unknown(type(self), name)
        super().__setattr__(name, value)

    def as_dict(self) -> dict[str, Any]:
        """Field names to values, in the order of the schema; then lists and maps."""
        return {name: _plain(getattr(self, name)) for name in _names(type(self))}

    def __eq__(self, other: object) -> bool:
        return self.as_dict() == other.as_dict() if type(other) is type(self) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable, compared by value

    def __repr__(self) -> str:
        return (
            f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in _names(type(self)))})"
        )


def _plain(value: Any) -> Any:
    """Return the value with nested states as dicts, as frames have them."""
    if isinstance(value, State):
        return value.as_dict()
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, dict) else value


def _fields_of(base: type) -> tuple[Field, ...]:
    return base.__dict__["__weir_schema__"].fields if "__weir_schema__" in base.__dict__ else ()


def _names(cls: type[State]) -> list[str]:
    return [f.name for f in cls.__weir_schema__.fields] + [declared.name for declared in cls.__weir_collections__]


def _collections_of(base: type) -> tuple[Collection, ...]:
    collections: tuple[Collection, ...] = base.__dict__.get("__weir_collections__", ())
    return collections


def _collection(cls: type, name: str, kind: str, hints: tuple[Any, ...]) -> Collection:
    """Return the collection that `name: ListOf[...]` or `name: MapOf[..., ...]` declares."""
    if name in cls.__dict__:
        raise _refusal(cls, name, "a list or map begins empty and takes no default")
    *keys, hint = hints
    key = None
    for of_key in keys:
        key, nullable = _resolve(cls, name, of_key)
        if nullable:
            raise _refusal(cls, name, f"{shown(of_key)} cannot be the key of a map, since a null is no key")
    try:
        if isinstance(hint, type) and issubclass(hint, State):
            if hint.__weir_collections__:
                raise _refusal(cls, name, f"{shown(hint)} has lists or maps itself, and they cannot be nested")
            return collection(name, kind, key, StateSchema.of(hint), hint)
        return collection(name, kind, key, _field(cls, name, hint), None)
    except PipelineError as error:
        raise PipelineError(f"{cls.__qualname__}.{name}: {error.what}", where=_place(cls), next=error.next) from None


def _own_annotations(cls: type, frame: types.FrameType) -> dict[str, Any]:
    """Return the class's own annotations, resolved; its bases' were resolved where those were defined."""
    annotations = inspect.get_annotations(cls)
    module = vars(sys.modules.get(cls.__module__, types.ModuleType("missing")))
    hints: dict[str, Any] = {}
    for name, annotation in annotations.items():
        holder = type(cls.__name__, (), {"__annotations__": {name: annotation}})
        try:
            hints |= typing.get_type_hints(holder, {**frame.f_globals, **module}, frame.f_locals, include_extras=True)
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            raise PipelineError(
                f"{cls.__qualname__}.{name}: the annotation {annotation!r} cannot be resolved: {error}.",
                where=_place(cls),
                next="Import its names at run time (not under TYPE_CHECKING), above the class; supported: " + SUPPORTED,
            ) from error
    return hints


def _field(cls: type, name: str, hint: Any) -> Field:
    try:
        return field_of(name, hint, cls.__dict__.get(name, ...))
    except ValueError as error:
        raise _refusal(cls, name, str(error)) from None


def _resolve(cls: type, name: str, hint: Any) -> tuple[pa.DataType, bool]:
    """Return an annotation's Arrow type and nullability."""
    try:
        meant = meaning_of(hint)
    except ValueError as error:
        raise _refusal(cls, name, str(error)) from None
    return meant.type, meant.nullable


def _place(cls: type) -> str:
    return f"class {cls.__qualname__} in {cls.__module__}"


def _refusal(cls: type, name: str, why: str) -> PipelineError:
    return PipelineError(f"{cls.__qualname__}.{name}: {why}.", where=_place(cls), next=f"Supported: {SUPPORTED}.")


def _unknown(cls: type[State], name: str) -> PipelineError:
    fields = ", ".join(_names(cls))
    return PipelineError(
        f"{cls.__qualname__} has no field {name!r}.", where=_place(cls), next=f"Its fields are: {fields or 'none'}."
    )
