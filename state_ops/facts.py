"""Results that programs read: `--json` prints their fields, and `weir schema` describes them.

    @dataclass(frozen=True, slots=True)
    class Kept(Facts):
        \"\"\"The keys that a stage keeps.

        Attributes:
            total: Of all subtasks.
        \"\"\"

        checkpoint: Checkpoint                                   "checkpoint": 7, by its `shown_as`
        total: int                                               "total": 12
        entries: Annotated[dict[int, int], Named("subtasks")]    "subtasks": {"0": 5, "1": 7}
        tables: Annotated[tuple[Table, ...], By("name")]         "tables": {"visits": {...}}
        schema: Annotated[StateSchema, HIDDEN]

The names in JSON are a public interface: none goes or changes its meaning without a line in the changelog.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from itertools import takewhile
from operator import attrgetter, itemgetter
from pathlib import PurePath
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

Row = dict[str, Any]
"""A row of a table, or of state: by column, its value."""

F = TypeVar("F", bound=Callable[..., Any])


class Named(NamedTuple):
    """Of an annotation: the name of a field in JSON."""

    name: str


class By(NamedTuple):
    """Of an annotation: several results are an object in JSON, by this attribute of each."""

    attribute: str
    name: str | None = None


class Flat(NamedTuple):
    """Of an annotation: the entries of a field stand in its place, each null where the field is None.

    Attributes:
        keys: The names of the entries, where the field is a dict, or a tuple of this order; otherwise it is a result.
    """

    keys: tuple[str, ...] = ()


class Hidden(NamedTuple):
    """Of an annotation: the field is left out."""


HIDDEN, FLAT = Hidden(), Flat()


class Facts:
    """A result, which is a dataclass. Its JSON has its fields, and the properties that are marked with `fact`."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result in JSON's types, but for the values of rows, which are Python's."""
        of: type = type(self)
        return {member.name: in_json_types(member.get(self)) for member in members(of)}


def fact(get: F) -> F:
    """Mark a property as a part of the JSON: `@property` stands above, `@fact` below."""
    get.is_fact = True  # type: ignore[attr-defined]
    return get


class Member(NamedTuple):
    """An entry of the JSON of a result.

    Attributes:
        type: Of its value.
        get: Takes the value from a result.
        about: Its meaning, as the docstring of the class or of the property says it.
    """

    name: str
    type: Any
    get: Callable[[Any], Any]
    about: str


@cache
def members(of: type) -> tuple[Member, ...]:
    """Return what the JSON of a result has, in its order."""
    hints, about = get_type_hints(of, include_extras=True), abouts(of)
    listed = [(field.name, hints[field.name], about.get(field.name, "")) for field in dataclasses.fields(of)]
    for name, shown in inspect.getmembers_static(of, lambda each: hasattr(getattr(each, "fget", None), "is_fact")):
        hint = get_type_hints(shown.fget, include_extras=True)["return"]
        listed.append((name, hint, " ".join((shown.fget.__doc__ or "").split())))
    return tuple(member for each in listed for member in _members(*each))


def abouts(of: type) -> dict[str, str]:
    """Return what the docstring of a class says of its attributes, by name."""
    _, _, section = (inspect.getdoc(of) or "").partition("Attributes:\n")
    listed = "\n".join(takewhile(lambda line: not line or line.startswith(" "), section.splitlines()))
    entries = re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def _members(attribute: str, hint: Any, about: str) -> Iterator[Member]:
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    value = attrgetter(attribute)
    match marks:
        case []:
            yield Member(attribute, kind, value, about)
        case [Named(name)]:
            yield Member(name, kind, value, about)
        case [By(key, other)]:
            by_key = GenericAlias(dict, (str, get_args(kind)[0]))
            yield Member(
                other or attribute, by_key, lambda result: {getattr(each, key): each for each in value(result)}, about
            )
        case [Flat(keys)]:
            is_optional = type(None) in get_args(kind)
            of = next(each for each in get_args(kind) if each is not type(None)) if is_optional else kind
            places = range(len(keys)) if get_origin(of) is tuple else keys
            entries = [
                Member(key, get_args(of)[-1], itemgetter(place), about) for key, place in zip(keys, places, strict=True)
            ]
            for member in entries or members(of):
                yield _flattened(member, value, is_optional)


def _flattened(member: Member, outer: Callable[[Any], Any], is_optional: bool) -> Member:
    def get(result: Any) -> Any:
        value = outer(result)
        return None if value is None else member.get(value)

    return member._replace(get=get, type=member.type | None if is_optional else member.type)


def in_json_types(value: Any) -> Any:
    """Return a value of a result in JSON's types. Values of rows stay as they are."""
    if hasattr(value, "shown_as"):
        return getattr(value, value.shown_as)
    if isinstance(value, Facts):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: in_json_types(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [in_json_types(each) for each in value]
    for method in ("to_dicts", "to_json", "isoformat"):  # of a frame, of what a checkpoint records, of a moment
        if hasattr(value, method):
            return getattr(value, method)()
    return str(value) if isinstance(value, PurePath) else value
