"""Results as JSON: a name of its own, objects by name, entries in place of a field, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jsonschema
import pytest

from state_ops.facts import FLAT, HIDDEN, By, Facts, Flat, Named, fact, members
from weir.cli.schemas.json_schema import json_schema


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Place:
    shown_as: ClassVar = "id"

    id: int
    secret: str = "not shown"


@dataclass(frozen=True, slots=True)
class Part(Facts):
    """A part.

    Attributes:
        name: Its own.
        size, weight: Of the part alone, which is
            said on two lines.
    """

    name: Annotated[str, HIDDEN]
    size: int
    weight: int | None


@dataclass(frozen=True, slots=True)
class Whole(Facts):
    """All of it.

    Attributes:
        at: Where it is.
        inner: The parts of the parts.
    """

    at: Place
    origin: Annotated[str, Named("from")]
    parts: Annotated[tuple[Part, ...], By("name")]
    others: Annotated[tuple[Part, ...], By("name", "elsewhere")]
    counts: Annotated[dict[str, int] | None, Flat(("added", "removed"))]
    pair: Annotated[tuple[int, int], Flat(("first", "second"))]
    largest: Annotated[Part | None, FLAT]
    colour: Colour
    made_at: datetime
    file: Path
    rows: list[dict[str, Any]]
    inner: tuple[Whole, ...] = ()

    @property
    @fact
    def double(self) -> Annotated[int, Named("twice")]:
        """Twice as many."""
        return 2 * len(self.parts)

    @property
    def unseen(self) -> int:
        return 0


NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
DOCUMENT = {
    "at": 7,
    "from": "a",
    "parts": {"left": {"size": 1, "weight": None}},
    "elsewhere": {},
    "added": 3,
    "removed": 4,
    "first": 5,
    "second": 6,
    "size": 8,
    "weight": 9,
    "colour": "red",
    "made_at": "2026-05-01T12:00:00+00:00",
    "file": "/tmp/page",
    "rows": [{"x": b"1"}],
    "inner": [],
    "twice": 2,
}


def whole(**other: Any) -> Whole:
    given = {
        "at": Place(7), "origin": "a", "parts": (Part("left", 1, None),), "others": (), "counts": {"added": 3, "removed": 4},
        "pair": (5, 6), "largest": Part("large", 8, 9), "colour": Colour.RED, "made_at": NOW, "file": Path("/tmp/page"),
        "rows": [{"x": b"1"}],
    }  # fmt: skip
    return Whole(**(given | other))


def test_the_json_of_a_result_has_its_fields_as_their_annotations_say():
    assert whole().to_dict() == DOCUMENT
    assert whole(inner=(whole(),)).to_dict()["inner"] == [DOCUMENT]


def test_entries_of_what_is_none_are_null():
    shown = whole(counts=None, largest=None).to_dict()
    assert [shown[name] for name in ("added", "removed", "size", "weight")] == [None] * 4


def test_a_schema_takes_what_is_printed_and_nothing_else():
    schema = json_schema(Whole, "whole")
    valid = jsonschema.Draft202012Validator(schema)
    printed = whole(rows=[{"x": 1}], counts=None, inner=(whole(rows=[]),)).to_dict()
    valid.validate(printed)
    for wrong in ({**printed, "more": 1}, {**printed, "at": "7"}, {name: printed[name] for name in list(printed)[1:]}):
        with pytest.raises(jsonschema.ValidationError):
            valid.validate(wrong)


def test_what_a_docstring_says_of_an_attribute_is_what_a_schema_says():
    about = {member.name: member.about for member in members(Whole)}
    assert (about["at"], about["twice"], about["from"]) == ("Where it is.", "Twice as many.", "")
    assert about["weight"] == about["size"] == "Of the part alone, which is said on two lines."
    assert json_schema(list[Part], "parts")["$defs"]["Part"]["description"] == "A part."
