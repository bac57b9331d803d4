"""The state that a stage keeps per key beside its typed row: lists and maps, declared in the `State` class, and timers.

    class Rider(State):
        rides: int = 0
        recent: ListOf[Ride]            # Ride: another State class, or a type that a field can have
        spent: MapOf[str, float]        # by keys of any key type

Each kind of state has a number of its own behind the key group, and each list and map a tag behind that:

    key group  uint16, big endian
    kind       uint8, of the constants here
    tag        4 bytes, lists and maps only: blake2b of the field's name. It depends on nothing else, so that two
               branches of
               one pipeline never give one tag to two fields
    ...        value: the key columns; list: these and the element's number; map: these and the map's key;
               timers: see `state_ops.keyed.timers`
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import pyarrow as pa

from state_ops.arrow.types import type_name, type_named
from state_ops.errors import PipelineError
from state_ops.schema import evolution
from state_ops.schema.key_codec import check_key_type
from state_ops.schema.state_schema import TOUCHED, Field, StateSchema

VALUE_STATE, WINDOW_STATE = 1, 2
LIST_STATE, LIST_ENDS, MAP_STATE = 3, 4, 5
EVENT_TIMERS, PROCESSING_TIMERS = 6, 7
EVENT_TIMERS_OF_KEY, PROCESSING_TIMERS_OF_KEY = 8, 9
WINDOW_VALUES = 10

GROUP = "__weir_group"

LIST, MAP = "list", "map"

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

ListOf = Annotated[list[T], "weir", LIST]
"""Elements in the order in which they were appended, each an entry of its own in the backend."""

MapOf = Annotated[dict[K, V], "weir", MAP]
"""Values by map key, each an entry of its own in the backend."""

EMPTY = {LIST: list, MAP: dict}
"""The value in an instance of a State class for a key without elements."""


@dataclass(frozen=True, slots=True)
class Collection:
    """A list or map of each key.

    Attributes:
        kind: "list" or "map".
        key: Type of a map's keys.
        schema: One element's or value's row.
        row: The State class of an element or value; None where they are plain values, in one field of the collection's
            name.
    """

    name: str
    kind: str
    key: pa.DataType | None
    schema: StateSchema
    row: Any

    @property
    def key_column(self) -> str:
        """The column of a map's keys, in frames given and returned."""
        return f"{self.name}_key"

    @property
    def tag(self) -> int:
        """The tag as an int32; its order-preserving bytes are the tag in keys."""
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=4).digest(), "big") - (1 << 31)

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of an element or value, without a hidden one."""
        return tuple(field for field in self.schema.fields if field.name != TOUCHED)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its elements."""
        names = tuple(field.name for field in self.fields)
        return (self.key_column, *names) if self.kind == MAP else names

    def __str__(self) -> str:
        """Describe the collection for people."""
        return self.kind if self.key is None else f"map by {type_name(self.key)}"

    def to_json(self) -> dict[str, Any]:
        """Return the collection as a checkpoint records it, under its name."""
        return {
            "kind": self.kind,
            "key": None if self.key is None else type_name(self.key),
            "schema": self.schema.to_json(),
            "schemas": evolution.recorded(self.schema),
        }

    @classmethod
    def from_json(cls, name: str, raw: Mapping[str, Any]) -> Collection:
        """Return the collection of a checkpoint's record, which does not tell what an element is in Python."""
        key = type_named(raw["key"]) if raw["key"] else None
        return cls(name, raw["kind"], key, evolution.from_record(raw["schemas"]), None)


def marked(hint: Any) -> str | None:
    """Return "list" or "map" for an annotation made by ListOf or MapOf, else None."""
    extras: tuple[Any, ...] = getattr(hint, "__metadata__", ())
    return extras[-1] if len(extras) == 2 and extras[0] == "weir" else None


def collection(name: str, kind: str, key: pa.DataType | None, element: StateSchema | Field, row: Any) -> Collection:
    """Return a declared list or map. Raises PipelineError for a key type that cannot be one, or for names that
    clash."""
    if key is not None:
        check_key_type(f"{name}_key", key)
    schema = element if isinstance(element, StateSchema) else StateSchema((element,))
    declared = Collection(name, kind, key, schema, row)
    if len(set(declared.columns)) < len(declared.columns):
        raise PipelineError(
            f"The values of the map {name!r} have a field {declared.key_column!r}, which is the column of its keys.",
            next="Rename the field.",
        )
    return declared


def checked(collections: tuple[Collection, ...], fields: tuple[str, ...]) -> tuple[Collection, ...]:
    """Raise PipelineError for a name that is a field's too, or for two names with one tag.

    They would share their entries.
    """
    by_tag: dict[int, str] = {}
    for declared in collections:
        if declared.name in fields:
            raise PipelineError(
                f"{declared.name!r} is both a field and a {declared.kind}.", next="Rename one of the two."
            )
        other = by_tag.setdefault(declared.tag, declared.name)
        if other != declared.name:
            raise PipelineError(
                f"The names {other!r} and {declared.name!r} have the same hash.", next="Rename one of them."
            )
    return collections


def collections_of(state: type) -> tuple[Collection, ...]:
    """Return the lists and maps of a `State` subclass, in the order of their definition."""
    return getattr(state, "__weir_collections__", ())
