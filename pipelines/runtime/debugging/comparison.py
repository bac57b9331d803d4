"""What an epoch that was played again did otherwise than it did then: rows, and entries of state."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from pipelines.runtime.inspection.value_text import as_json
from state_ops.backends.base import Backend
from state_ops.schema import descriptors
from state_ops.snapshots.rescale import first_key

STATE = "state"
_DIGITS = 10  # of floats, whose last digits depend on the order in which rows arrive
_TIMERS = (descriptors.EVENT_TIMERS, descriptors.PROCESSING_TIMERS)


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
    """How rows differ, in any order, floats but for their last digits; None: they do not."""
    then, now = list(recorded.iter_rows(named=True)), list(replayed.iter_rows(named=True))
    first, second = _without(then, now), _without(now, then)
    return Difference(of, tuple(first), tuple(second)) if first or second else None


def _without(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that are not among the others, as often as they are there."""
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


def differing_groups(first: Backend | None, second: Backend | None, groups: range) -> list[int]:
    """The key groups in which two states of a subtask have other entries."""
    return [group for group in groups if not _same(_entries(first, group), _entries(second, group))]


def _same(first: Iterator[tuple[bytes, bytes]], second: Iterator[tuple[bytes, bytes]]) -> bool:
    for entry, other in itertools.zip_longest(first, second):
        if entry != other and (entry is None or other is None or not _same_timer(entry, other)):
            return False
    return True


def _same_timer(entry: tuple[bytes, bytes], other: tuple[bytes, bytes]) -> bool:
    """Whether it is the same timer: its value says in whose barrier it did not fire, which is over."""
    return entry[0] == other[0] and entry[0][2] in _TIMERS  # behind the key group


def _entries(backend: Backend | None, group: int) -> Iterator[tuple[bytes, bytes]]:
    return iter(()) if backend is None else backend.scan(first_key(group), first_key(group + 1))
