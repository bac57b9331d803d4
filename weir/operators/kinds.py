"""The operators that there are: Weir's, and those that other packages add by an entry point of the group
`weir.operators`, whose value is a class that derives from `OperatorKind`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from weir.definition import OperatorKind
from weir.operators.aggregation import Aggregation
from weir.operators.deduplication import Deduplication
from weir.operators.joins import AsOf, Join
from weir.operators.lookups import Lookup
from weir.operators.top_n import TopN
from weir.operators.windows import CalendarWindow, SessionWindow, Window

GROUP = "weir.operators"
_OWN: tuple[type[OperatorKind], ...] = (
    Window,
    CalendarWindow,
    SessionWindow,
    Aggregation,
    Deduplication,
    Join,
    AsOf,
    TopN,
    Lookup,
)


@functools.cache
def of_others() -> tuple[type[OperatorKind], ...]:
    return tuple(point.load() for point in entry_points(group=GROUP))


def kind_of(meaning: Mapping[str, Any]) -> type[OperatorKind] | None:
    """Return the kind of operator whose meaning a checkpoint has recorded; None: no package here has it."""
    kinds = of_others() if "operator" in meaning else _OWN
    return next((kind for kind in kinds if kind.recognizes(meaning)), None)


def shown(meaning: Mapping[str, Any] | None) -> str:
    """Return a recorded meaning in words."""
    if meaning is None:
        return "none"
    kind = kind_of(meaning)
    return OperatorKind.shown(meaning) if kind is None else kind.shown(meaning)


def indexes_keys(meaning: Mapping[str, Any] | None) -> bool:
    """Return whether state of a recorded meaning has an index of its keys by the moment at which they are forgotten."""
    operator = of_meaning(meaning)
    return operator is not None and operator.indexes_keys


def of_meaning(meaning: Mapping[str, Any] | None) -> OperatorKind | None:
    """Return the operator of a recorded meaning, as far as reading its state needs it; None: its state is a row per
    key, which its schema says."""
    kind = None if meaning is None else kind_of(meaning)
    return None if kind is None or meaning is None else kind.of_meaning(meaning)
