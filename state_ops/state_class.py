"""The `State` class that a pipeline's author writes, and how its annotations become the fields of a `StateSchema`."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from datetime import datetime
from typing import Annotated, Any, ClassVar, dataclass_transform

import pyarrow as pa

from state_ops.errors import PipelineError
from state_ops.kinds import EMPTY, Collection, checked, collection, marked
from state_ops.schema import Field, StateSchema
from state_ops.value_types import PYTHON_TYPES, SUPPORTED, python_type, type_name, zero_of

Timestamp = Annotated[datetime, pa.timestamp("us", tz="UTC")]
"""An instant, microseconds since the epoch, UTC. A plain `datetime` annotation means the same."""


@dataclass_transform(kw_only_default=True)
class State:
    """Base class of typed state: the subclass's annotations are the fields of one row per key.

        class Aircraft(State):
            legs: int = 0
            last_dest: str | None = None

    A class attribute is the default. `X | None` is nullable and defaults to None; any other field without a default gets
    the zero of its type (0, 0.0, "", b"", False, 1970-01-01). A subclass of a state class adds to its base's fields.

    Instances take keywords, compare by value and refuse names that are not fields. Raises PipelineError, naming class and
    field, where an annotation cannot be resolved or stored: when the class is defined, not when the pipeline runs.

    `recent: ListOf[Ride]` and `spent: MapOf[str, float]` declare a list and a map of each key, which are no fields of the row
    but entries of their own; an instance has them as a Python list and dict.
    """

    __weir_schema__: ClassVar[StateSchema] = StateSchema(())
    __weir_collections__: ClassVar[tuple[Collection, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The frame that runs the class statement: without it a class in a function body could not name local types.
        hints = _own_annotations(cls, sys._getframe(1))
        fields = {f.name: f for base in reversed(cls.__mro__[1:]) for f in _fields_of(base)}
        collections = {one.name: one for base in reversed(cls.__mro__[1:]) for one in _collections_of(base)}
        for name, hint in hints.items():
            if typing.get_origin(hint) is ClassVar or hint is ClassVar:
                continue
            if hasattr(State, name):
                raise _refusal(cls, name, f"the name {name} is taken by State itself")
            if (kind := marked(hint)) is not None:
                collections[name] = _collection(cls, name, kind, typing.get_args(typing.get_args(hint)[0]))
                continue
            fields[name] = _field(cls, name, hint)
        for name, f in fields.items():
            # A base's field without annotation here may still get a new default: class Late(Base): legs = 1
            if name not in hints and cls.__dict__.get(name, f.default) is not f.default:
                fields[name] = Field(name, f.type, f.nullable, cls.__dict__[name])
        try:
            cls.__weir_schema__ = StateSchema(tuple(fields.values()))
            cls.__weir_collections__ = checked(tuple(collections.values()), tuple(fields))
        except PipelineError as error:
            raise PipelineError(f"{cls.__qualname__}: {error.what}", where=_place(cls), next=error.next) from None
        for f in cls.__weir_schema__.fields:
            setattr(cls, f.name, f.default)

    def __init__(self, **values: Any) -> None:
        defaults = {f.name: f.default for f in self.__weir_schema__.fields}
        defaults |= {one.name: EMPTY[one.kind]() for one in self.__weir_collections__}
        unknown = values.keys() - defaults.keys()
        if unknown:
            raise _unknown(type(self), min(unknown))
        self.__dict__.update(defaults, **values)

    def __setattr__(self, name: str, value: Any) -> None:
        # A misspelt field would otherwise be lost without a word when the row is stored.
        if name not in self.__dict__ and not hasattr(type(self), name):
            raise _unknown(type(self), name)
        super().__setattr__(name, value)

    def as_dict(self) -> dict[str, Any]:
        """Field names to values, in the order of the schema; then lists and maps."""
        return {name: getattr(self, name) for name in _names(type(self))}

    def __eq__(self, other: object) -> bool:
        return self.as_dict() == other.as_dict() if type(other) is type(self) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable, compared by value

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{k}={v!r}' for k, v in self.as_dict().items())})"


def _fields_of(base: type) -> tuple[Field, ...]:
    return base.__dict__["__weir_schema__"].fields if "__weir_schema__" in base.__dict__ else ()


def _names(cls: type[State]) -> list[str]:
    return [f.name for f in cls.__weir_schema__.fields] + [one.name for one in cls.__weir_collections__]


def _collections_of(base: type) -> tuple[Collection, ...]:
    return base.__dict__.get("__weir_collections__", ())


def _collection(cls: type, name: str, kind: str, hints: tuple[Any, ...]) -> Collection:
    """What `name: ListOf[...]` or `name: MapOf[..., ...]` declares."""
    if name in cls.__dict__:
        raise _refusal(cls, name, "a list or map begins empty and takes no default")
    *keys, hint = hints
    key = None
    for one in keys:
        key, nullable = _resolve(cls, name, one)
        if nullable:
            raise _refusal(cls, name, f"{_show(one)} cannot be the key of a map, since a null is no key")
    try:
        if isinstance(hint, type) and issubclass(hint, State):
            if hint.__weir_collections__:
                raise _refusal(cls, name, f"{_show(hint)} has lists or maps itself, and they cannot be nested")
            return collection(name, kind, key, StateSchema.of(hint), hint)
        return collection(name, kind, key, _field(cls, name, hint), None)
    except PipelineError as error:
        raise PipelineError(f"{cls.__qualname__}.{name}: {error.what}", where=_place(cls), next=error.next) from None


def _own_annotations(cls: type, frame: types.FrameType) -> dict[str, Any]:
    """The class's own annotations, resolved; its bases' were resolved where those were defined."""
    own = inspect.get_annotations(cls)
    module = vars(sys.modules.get(cls.__module__, types.ModuleType("missing")))
    hints: dict[str, Any] = {}
    for name, annotation in own.items():
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
    arrow, nullable = _resolve(cls, name, hint)
    if name in cls.__dict__:
        default = cls.__dict__[name]
        if default is None and not nullable:
            raise _refusal(cls, name, "its default is None but its type is not nullable: add `| None`")
    else:
        default = None if nullable else zero_of(arrow)
    return Field(name, arrow, nullable, default)


def _resolve(cls: type, name: str, hint: Any) -> tuple[pa.DataType, bool]:
    """An annotation's Arrow type and nullability."""
    if typing.get_origin(hint) is Annotated:
        python, *extras = typing.get_args(hint)
        arrow = next((extra for extra in extras if isinstance(extra, pa.DataType)), None)
        if arrow is None:
            return _resolve(cls, name, python)
        bare, nullable = _without_none(python)
        if type_name(arrow) is None or python_type(arrow) is not bare:
            raise _refusal(cls, name, f"{_show(hint)} cannot be stored")
        return arrow, nullable
    bare, nullable = _without_none(hint)
    if nullable:
        return _resolve(cls, name, bare)[0], True
    if bare not in PYTHON_TYPES:
        raise _refusal(cls, name, f"the type {_show(hint)} cannot be stored")
    return PYTHON_TYPES[bare], False


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        if len(rest) == 1:
            return rest[0], True
    return hint, False


def _show(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _place(cls: type) -> str:
    return f"class {cls.__qualname__} in {cls.__module__}"


def _refusal(cls: type, name: str, why: str) -> PipelineError:
    return PipelineError(f"{cls.__qualname__}.{name}: {why}.", where=_place(cls), next=f"Supported: {SUPPORTED}.")


def _unknown(cls: type[State], name: str) -> PipelineError:
    fields = ", ".join(_names(cls))
    return PipelineError(
        f"{cls.__qualname__} has no field {name!r}.", where=_place(cls), next=f"Its fields are: {fields or 'none'}."
    )
