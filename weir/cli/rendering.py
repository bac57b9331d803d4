"""State, its history and its differences, printed on a terminal, and the same facts for `--json`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, TypedDict

import pyarrow as pa
from rich.markup import escape

from state_ops.arrow import frames
from state_ops.counts import counted
from state_ops.facts import Row
from state_ops.printable import on_one_line
from state_ops.value_text import _inner, text_of
from weir.cli.console import err, out, print_table
from weir.inspection.comparison.states import StateDifference
from weir.inspection.export import limited
from weir.inspection.state_reader import StateChange

_WIDTH, _NARROW = 60, 20


def show(schema: pa.Schema, tables: Iterable[pa.Table], most: int | None, also: str = "") -> None:
    """Print rows as a table, with wide values shortened.

    Args:
        most: How many rows to print at most; None prints all.
        also: What else of the command has more of them.
    """
    rows = [
        row
        for table in limited(tables, None if most is None else most + 1)
        for row in zip(*_values(table), strict=True)
    ]
    print_table(
        ([short(value) for value in row] for row in rows[:most]),
        [escape(field.name) for field in schema],
        right=[escape(field.name) for field in schema if _is_number(field.type)],
    )
    if most is not None and len(rows) > most:
        err.print(f"... and more; --format json, parquet or arrow has all rows{also}.")


def _values(table: pa.Table) -> list[list[Any]]:
    return [frames.python_values(column) for column in table.columns]


def _is_number(type: pa.DataType) -> bool:
    return any(of(type) for of in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal))


def short(value: Any, width: int = _WIDTH) -> str:
    """Return a value as text of at most `width` characters, escaped for rich."""
    text = on_one_line(text_of(value))
    return escape(text if len(text) <= width else text[: width - 3] + "...")


class HistoryChange(TypedDict):
    """One change of a key's state.

    Attributes:
        checkpoint: The first retained one that has it so.
        changed_in: The first and the last epoch that may have changed it; null: it may be of any epoch before.
        epochs_carried: Epochs whose rows waited for the stage before.
        value: The rows of the key; none: it has no state any more.
    """

    checkpoint: int
    parent: int | None
    completed_at: datetime
    trigger: str
    reason: str
    run_id: str | None
    changed_in: tuple[int | None, int]
    epochs_carried: list[int]
    slice: dict[str, Any]
    offsets: dict[str, Any]
    delta_versions: dict[str, int]
    value: list[Row]


def history_facts(change: StateChange) -> HistoryChange:
    """Return a change of a key, JSON-ready."""
    row = change.checkpoint
    return {
        "checkpoint": row.id,
        "parent": row.parent_id,
        "completed_at": row.completed_at,
        "trigger": row.trigger,
        "reason": row.reason,
        "run_id": row.run_id,
        "changed_in": (change.since, row.id),
        "epochs_carried": list(change.carried),
        "slice": row.slice,
        "offsets": row.offsets,
        "delta_versions": change.versions,
        "value": change.rows,
    }


def show_history(changes: list[StateChange]) -> None:
    """Print one line for each change: the value, then when and by what it came to be. The value takes the width that
    the other columns leave."""
    titles = ("value", "checkpoint", "parent", "completed", "trigger", "run", "read", "published as")
    lines = [_line(change) for change in changes]
    taken = sum(2 + max(map(len, column)) for column in zip(titles[1:], *lines, strict=True))
    width = max(_NARROW, out.width - taken - 2)
    cells = [(short(_value(change), width), *line) for change, line in zip(changes, lines, strict=True)]
    print_table(cells, titles, right=("checkpoint", "parent"))


def _value(change: StateChange) -> str:
    rows = [", ".join(f"{name}={_inner(value)}" for name, value in row.items()) for row in change.rows]
    return "; ".join(rows) or "gone"


def _line(change: StateChange) -> tuple[str, ...]:
    row = change.checkpoint
    return (
        str(row.id),
        str(row.parent_id or "-"),
        row.completed_at.strftime("%Y-%m-%d %H:%M:%S"),
        row.trigger,
        short(row.run_id or "-", 12),
        short(_read(change)),
        short(", ".join(f"{name} v{version}" for name, version in change.versions.items()) or "-"),
    )


def _read(change: StateChange) -> str:
    """Return what the epoch that changed the key read, or the range of pruned checkpoints in which that epoch lies."""
    row = change.checkpoint
    if change.since is None:
        return f"changed at or before {row.id}; earlier ones are pruned"
    if not change.exact:
        return f"changed somewhere in {change.since}..{row.id}; those between are pruned"
    parts = []
    for name, part in row.slice.items():
        files = [file["name"] for file in part["files"]]
        if files:
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            parts.append(f"{name}: {counted(part['rows'], 'row')} of {files[0]}{more}")
    carried = [f"rows that waited since {', '.join(map(str, change.carried))}"] if change.carried else []
    return "; ".join(carried + parts) or "nothing"


def show_difference(difference: StateDifference, sample: list[dict[str, Any]]) -> None:
    """Print how many rows differ, in what the schemas differ, and some rows with one line for each field."""
    counts = ", ".join(f"{number:,} {change}" for change, number in difference.counts.items())
    out.print(f"checkpoint {difference.first} to {difference.second}: {counts}")
    for names, which in ((difference.gone, difference.first), (difference.new, difference.second)):
        if names:
            out.print(f"only checkpoint {which} has: {escape(', '.join(names))}")
    for name, (was, now) in difference.retyped.items():
        out.print(escape(f"{name} was {was}, is {now}"))
    if not sample:
        return
    cells: list[tuple[str, ...]] = []
    for row in sample:
        old, new = row["old"] or {}, row["new"] or {}
        fields = row["fields"] if row["fields"] is not None else list(old or new)
        for number, name in enumerate(fields or [""]):
            whose = (row["change"], short(" / ".join(map(text_of, row["key"].values())))) if number == 0 else ("", "")
            cells.append((*whose, escape(name), short(old.get(name)), short(new.get(name))))
    print_table(cells, ("change", "key", "field", "old", "new"))
    if sum(difference.counts.values()) > len(sample):
        err.print("... and more; --format json, parquet or arrow has all, --limit N as many as you say.")
