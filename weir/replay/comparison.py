"""The difference between a replayed epoch and the epoch: rows, and entries of state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from state_ops.backends.base import Backend
from state_ops.rows.time_index import MOMENTS
from state_ops.schema import descriptors
from state_ops.snapshots.rescale import first_key
from state_ops.value_text import as_json

STATE = "state"
_DIGITS = 10  # of floats, whose last digits depend on the order in which rows arrive
_TIMERS = (descriptors.EVENT_TIMERS, descriptors.PROCESSING_TIMERS)
HIDDEN = {
    **dict.fromkeys((*_TIMERS, descriptors.EVENT_TIMERS_OF_KEY, descriptors.PROCESSING_TIMERS_OF_KEY), "a timer"),
    MOMENTS: "when it is due",
    descriptors.WINDOW_VALUES: "distinct values",
}
"""By their kind, entries of a key's state that no row shows."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Rows that only one of the two has.

    Attributes:
        of: "state", or the name of an output.
        recorded: What the epoch made then.
        replayed: What it makes now.
    """

    of: str
    recorded: tuple[dict[str, Any], ...]
    replayed: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"of": self.of, "recorded": list(self.recorded), "replayed": list(self.replayed)}


def difference(of: str, recorded: pl.DataFrame, replayed: pl.DataFrame) -> Difference | None:
    """Return how rows differ, in any order, floats but for their last digits; None: they do not."""
    then, now = list(recorded.iter_rows(named=True)), list(replayed.iter_rows(named=True))
    first, second = _without(then, now), _without(now, then)
    return Difference(of, tuple(first), tuple(second)) if first or second else None


def _without(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that are not among the others, as often as they are there."""
    left, only = Counter(map(canonical_text, others)), []
    for row in rows:
        text = canonical_text(row)
        if left[text]:
            left[text] -= 1
        else:
            only.append(row)
    return only


def canonical_text(row: Mapping[str, Any]) -> str:
    return as_json(_rounded(dict(row)), sort_keys=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    if isinstance(value, dict):
        return {str(name): _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def differing_keys(first: Backend | None, second: Backend | None, groups: range) -> Iterator[bytes]:
    """Yield the keys of the entries of which only one of two states of a subtask has any, or another value, in their
    order.

    Bytes are compared, so that of equal entries nothing is decoded.
    """
    entries, others = _entries(first, groups), _entries(second, groups)
    entry, other = next(entries, None), next(others, None)
    while entry is not None or other is not None:
        if entry == other:
            entry, other = next(entries, None), next(others, None)
        elif other is None or (entry is not None and entry[0] < other[0]):
            assert entry is not None
            yield entry[0]
            entry = next(entries, None)
        elif entry is None or other[0] < entry[0]:
            yield other[0]
            other = next(others, None)
        else:
            if entry[0][2] not in _TIMERS:  # its value says in whose barrier it did not fire, which is over
                yield entry[0]
            entry, other = next(entries, None), next(others, None)


def _entries(backend: Backend | None, groups: range) -> Iterator[tuple[bytes, bytes]]:
    return iter(()) if backend is None else backend.scan(first_key(groups.start), first_key(groups.stop))
