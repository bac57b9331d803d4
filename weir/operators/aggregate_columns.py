"""Aggregates among an operator's columns: as checkpoints record them, and as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from state_ops.rows.aggregates import Agg
from weir.definition.column_lineage import read_by

Aggregates = Sequence[tuple[str, Agg]]


def recorded(aggregates: Aggregates) -> list[list[Any]]:
    """Return aggregates as checkpoints record them: of each its name, kind, column and options."""
    return [[name, agg.kind, agg.column, *_options(agg)] for name, agg in aggregates]


def _options(agg: Agg) -> list[Any]:
    """Return an aggregate's options beside its column, as far as it has any: order, condition, share."""
    if agg.share is not None:
        return [list(agg.order_by), agg.where, agg.share]
    if agg.where is not None:
        return [list(agg.order_by), agg.where]
    return [list(agg.order_by)] if agg.order_by else []


def of_record(listed: Sequence[Sequence[Any]]) -> tuple[tuple[str, Agg], ...]:
    """Return the aggregates that a checkpoint recorded, as far as reading their state needs them."""
    return tuple(
        (name, Agg(kind, column, tuple(by[0]) if by else (), share=by[2] if len(by) > 2 else None))
        for name, kind, column, *by in listed
    )


def shown(listed: Sequence[Sequence[Any]]) -> str:
    """Return recorded aggregates in words."""
    return ", ".join(_shown(*aggregate) for aggregate in listed)


def _shown(
    name: str,
    kind: str,
    column: str | None,
    order_by: Sequence[str] = (),
    where: str | None = None,
    share: float | None = None,
) -> str:
    by = f" by {', '.join(order_by)}" if order_by else ""
    condition = f" where {where}" if where else ""
    return f"{name} = {kind}({column or ''}{'' if share is None else f', {share}'}{by}){condition}"


def texts(aggregates: Aggregates) -> dict[str, str]:
    """Return by column how an aggregate makes it, in words."""
    return {name: _in_words(agg) for name, agg in aggregates}


def _in_words(agg: Agg) -> str:
    share = "" if agg.share is None else f" ({agg.share:g})"
    which = "" if agg.where is None else f" where {agg.where}"
    return f"{agg.kind.replace('_', ' ').capitalize()}{share} of {agg.column or 'rows'}{which}."


def lineage(
    key: Sequence[str], aggregates: Aggregates, input: Sequence[str], beside: Mapping[str, str]
) -> dict[str, list[tuple[int, str]]]:
    """Return by column the columns of the only input from which it is made.

    Args:
        beside: By other columns, the column of the input that each is made of.
    """
    origins = {name: [name] for name in key} | {name: [of] for name, of in beside.items()}
    for name, agg in aggregates:
        origins[name] = list(dict.fromkeys([*agg.columns, *read_by(agg.where or "", input)]))
    return {name: [(0, column) for column in columns] for name, columns in origins.items()}


def columns_read(aggregates: Aggregates) -> set[str]:
    """Return the columns of the input that aggregates look at."""
    return {name for _, agg in aggregates for name in agg.names}
