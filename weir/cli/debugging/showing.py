"""Rows and slices of a replayed epoch, printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import polars as pl
import typer
from rich.markup import escape

from state_ops.counts import counted
from state_ops.printable import on_one_line
from weir.cli.console import out, print_table
from weir.cli.rendering import short
from weir.inspection.comparison.rows import Difference

_FILES = 5
Spark = Annotated[
    bool,
    typer.Option("--spark", help="Let Spark evaluate what Python cannot: a transform, and some conditions."),
]


def show_rows(title: str, rows: pl.DataFrame, most: int) -> None:
    """Print rows below a title that says how many there are."""
    out.print(f"[bold]{escape(title)}[/]: {counted(rows.height, 'row')}")
    if rows.height:
        numbers = [escape(name) for name, kind in rows.schema.items() if kind.is_numeric()]
        cells = ([short(value) for value in row] for row in rows.head(most).iter_rows())
        print_table(cells, [escape(name) for name in rows.columns], right=numbers)
    if rows.height > most:
        out.print(f"... and {rows.height - most:,} more; --limit N shows as many as you say, --json all.")


def show_difference(difference: Difference, most: int) -> None:
    """Print the rows that only the epoch made, and those that only the replay makes."""
    name = "state" if difference.of == "state" else f"rows of {difference.of}"
    for which, rows in (("then", difference.recorded), ("now", difference.replayed)):
        for row in rows[:most]:
            values = ", ".join(f"{escape(column)}={value_in_words(value)}" for column, value in row.items())
            out.print(f"[bold red]differs[/]  {escape(name)}, {which}: {values}")
        if len(rows) > most:
            out.print(f"[bold red]differs[/]  {escape(name)}, {which}: {len(rows) - most:,} more; --json has all.")


def value_in_words(value: Any) -> str:
    """Return a value as text outside of a table's column, where null is a word."""
    return "null" if value is None else short(value)


def slice_in_words(recorded: Mapping[str, Any]) -> str:
    """Return the slice of a source as text, from what a checkpoint records of it."""
    files = [on_one_line(file["name"]) for file in recorded["files"]]
    named = ", ".join(files[:_FILES]) + (f" and {len(files) - _FILES:,} more" if len(files) > _FILES else "")
    return f"{counted(recorded['rows'], 'row')}" + (f" of {named}" if named else "")


def code_in_words(then: str | None, now: str) -> str:
    """Say whether the code is that of the epoch."""
    if then is None:
        return f"code {now} now; which it was then is not recorded, by a release before this one"
    return f"code {now}, as it was then" if then == now else f"code {now}, changed since: it was {then} then"
