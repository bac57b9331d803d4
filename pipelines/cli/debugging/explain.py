"""`weir explain`: where a row of a table came from."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from pipelines.cli.console import Json, Name, out, print_json, waiting
from pipelines.cli.debugging.showing import Spark, show_difference, show_rows, slice_in_words, value_in_words
from pipelines.cli.shell import completion
from pipelines.loading import find
from pipelines.runtime.debugging.explain import Certainty, Explained
from pipelines.runtime.debugging.explain import explain as explained
from pipelines.runtime.debugging.tracing import Trace

_COLORS = {Certainty.KNOWN: "green", Certainty.INFERRED: "yellow", Certainty.UNKNOWN: "bold red"}


def explain(
    pipeline: Name,
    table: Annotated[str, typer.Argument(help="The table.", metavar="TABLE", autocompletion=completion.tables)],
    row: Annotated[
        str, typer.Option("--row", metavar="WHERE", help="Which row: a condition on columns of the table, as SQL.")
    ],
    spark: Spark = False,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="How many rows of each kind are shown.")] = 20,
    json: Json = False,
) -> None:
    """Where a row of a table came from: epoch, slice, files and rows, state before and after, code; through windows, joins and stages before.

    The epoch is played again, as by `weir debug`, and of earlier ones the rows are read that made the key's state, as far as they are retained. Each statement says whether it is known, inferred or unknown.
    """
    definition, settings = find(pipeline)
    with waiting("looking for the row") as say:
        seen = explained(definition, settings, table, row, spark=spark, say=say)
    if json:
        print_json(seen.to_dict())
        return
    _show(seen, limit)


def _show(seen: Explained, limit: int) -> None:
    values = ", ".join(f"{escape(name)}={value_in_words(value)}" for name, value in seen.row.values.items())
    out.print(f"[bold]{escape(seen.table)}[/]: {values}")
    for statement in seen.statements:
        color = _COLORS[statement.certainty]
        out.print(f"[{color}]{statement.certainty.value:<8}[/]  {escape(statement.what)}")
    if seen.played is not None:
        show_rows(f"state before epoch {seen.played.epoch}", seen.played.before, limit)
        show_rows(f"state after epoch {seen.played.epoch}", seen.played.after, limit)
        for difference in seen.played.differences:
            show_difference(difference, limit)
    if seen.trace is not None:
        _show_trace(seen.trace, limit)
    elif seen.played is not None:
        for name, rows in seen.played.inputs.items():
            show_rows(f"rows in of {name}, of the whole subtask", rows, limit)


def _show_trace(trace: Trace, limit: int) -> None:
    key = ", ".join(f"{name}={value}" for name, value in trace.key.items())
    for contribution in trace.contributions:
        show_rows(f"{trace.stage}, {key}: rows in of epoch {contribution.epoch}", contribution.rows, limit)
        for name, recorded in contribution.slices.items():
            out.print(escape(f"  slice of {name}: {slice_in_words(recorded)}"))
    for before in trace.before:
        for what in before.unknown:
            out.print(f"[{_COLORS[Certainty.UNKNOWN]}]unknown [/]  {escape(f'{before.stage}: {what}')}")
        _show_trace(before, limit)
