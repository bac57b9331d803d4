"""The difference of a few rows in memory, such as those of one epoch that was played again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from state_ops.facts import Facts
from state_ops.value_text import as_json
from weir.inspection.comparison.floats import rounded

STATE = "state"


@dataclass(frozen=True, slots=True)
class Difference(Facts):
    """Rows that only one of the two has.

    Attributes:
        of: "state", or the name of an output.
        recorded: What the epoch made then.
        replayed: What it makes now.
    """

    of: str
    recorded: tuple[dict[str, Any], ...]
    replayed: tuple[dict[str, Any], ...]


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


def alike(rows: pl.DataFrame, values: Mapping[str, Any]) -> pl.DataFrame | None:
    """Return the rows with these values, of the columns that both have; None: there are no such columns."""
    names = [name for name in values if name in rows.columns]
    wanted = canonical_text({name: values[name] for name in names})
    same = [canonical_text(row) == wanted for row in rows.select(names).iter_rows(named=True)]
    return rows.filter(pl.Series(same, dtype=pl.Boolean)) if names else None


def canonical_text(row: Mapping[str, Any]) -> str:
    """Return the text that rows have in common which count as equal."""
    return as_json(rounded(dict(row)), sort_keys=True)
