"""Records inside a checkpoint's row, which copies keep as they were written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One record of a checkpoint's row.

    A record of an earlier release lacks the fields that came later, and they have their defaults here. A record of a
    later release may have more than is known here. Copies keep both as they are, if they are made with `updated`.

    Attributes:
        names: The fields that the record has, in its order.
        unknown: By name, what this release does not know.
    """

    names: tuple[str, ...]
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        known = cls.__dataclass_fields__.keys() - _ABOUT
        recorded = {name: raw[name] for name in known & raw.keys()}
        unknown = {name: raw[name] for name in raw.keys() - known}
        return cls(**recorded, names=tuple(raw), unknown=unknown)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON, without the fields that a record of an earlier release lacks."""
        return {name: self.unknown[name] if name in self.unknown else getattr(self, name) for name in self.names}

    def updated(self, **changes: Any) -> Self:
        """Return a copy that records these values of these fields."""
        return replace(self, **changes, names=tuple(dict.fromkeys((*self.names, *changes))))


_ABOUT = {field.name for field in fields(Recorded)}
