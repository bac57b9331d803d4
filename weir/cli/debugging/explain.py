"""`weir explain`: where a row of a table came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape

from state_ops.counts import agrees, counted
from state_ops.printable import on_one_line
from weir.cli.console import Json, Name, out, print_json, prints, waiting
from weir.cli.debugging.showing import Spark, show_difference, show_rows, slice_in_words, value_in_words
from weir.cli.shell import completion
from weir.loading import find
from weir.replay.explain import Certainty, Explained
from weir.replay.explain import explain as explained
from weir.replay.tracing import Contribution, Trace

_MORE = "--limit N shows as many as you say, --json all."
_COLORS = {Certainty.KNOWN: "green", Certainty.INFERRED: "yellow", Certainty.UNKNOWN: "bold red"}


@prints(Explained)
def explain(
    pipeline: Name,
    table: Annotated[str, typer.Argument(help="The table.", metavar="TABLE", autocompletion=completion.tables)],
    row: Annotated[
        str, typer.Option("--row", metavar="WHERE", help="The row: a condition on columns of the table, as SQL.")
    ],
    spark: Spark = False,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="The number of rows of each kind to show.")] = 20,
    json: Json = False,
) -> None:
    """Tell where a row of a table came from: epoch, slice, files and rows, state before and after, and code; through
    windows, joins and earlier stages.

    The epoch is played again, as by `weir debug`, and of earlier ones the rows are read that made the key's state, as far as they are retained. Each statement says whether it is known, inferred or unknown.
    """
    definition, settings = find(pipeline)
    with waiting("looking for the row") as say:
        seen = explained(definition, settings, table, row, spark=spark, say=say)
    if json:
        print_json(seen)
        return
    _show(seen, limit)


def _show(seen: Explained, limit: int) -> None:
    values = ", ".join(
        f"{escape(on_one_line(name))}={value_in_words(value)}" for name, value in seen.row.values.items()
    )
    out.print(f"[bold]{escape(seen.table)}[/]: {values}")
    _show_statements([(statement.certainty, statement.what) for statement in seen.statements], limit)
    newest = seen.trace.contributions[-1:] if seen.trace is not None else ()
    own = [each for each in newest if each.epoch == seen.origin.epoch]
    for contribution in own:
        assert seen.trace is not None
        _show_contribution(seen.trace, contribution, limit)
    if seen.played is not None:
        show_rows(f"state before epoch {seen.played.epoch}", seen.played.before, limit)
        show_rows(f"state after epoch {seen.played.epoch}", seen.played.after, limit)
        for difference in seen.played.differences:
            show_difference(difference, limit)
    if seen.trace is not None:
        _show_earlier(seen.trace, seen.trace.contributions[: len(seen.trace.contributions) - len(own)], limit)
        _show_before(seen.trace.before, limit)
    elif seen.played is not None:
        for name, rows in seen.played.inputs.items():
            show_rows(f"rows in of {name}, of the whole subtask", rows, limit)


def _show_statements(statements: Sequence[tuple[Certainty, str]], limit: int) -> None:
    """Print all that is known or inferred, and so many statements of what is not known."""
    unknown = 0
    for certainty, what in statements:
        unknown += certainty is Certainty.UNKNOWN
        if certainty is not Certainty.UNKNOWN or unknown <= limit:
            out.print(f"[{_COLORS[certainty]}]{certainty.value:<8}[/]  {escape(on_one_line(what))}")
    if unknown > limit:
        out.print(
            f"... and {counted(unknown - limit, 'thing')} more that {agrees(unknown - limit, 'is', 'are')} unknown; {_MORE}"
        )


def _show_contribution(trace: Trace, contribution: Contribution, most: int) -> None:
    key = ", ".join(f"{name}={value_in_words(value)}" for name, value in trace.key.items())
    show_rows(f"{trace.stage}, {key}: rows in of epoch {contribution.epoch}", contribution.rows, most)
    for name, recorded in contribution.slices.items():
        out.print(escape(f"  slice of {name}: {slice_in_words(recorded)}"))


def _show_earlier(trace: Trace, contributions: Sequence[Contribution], most: int) -> int:
    """Print the newest rows that epochs gave to a key, newest epoch first, and how many there are besides; returns how
    many were printed."""
    shown = 0
    left = list(contributions)
    while left and shown < most:
        contribution = left.pop()
        _show_contribution(trace, contribution, most - shown)
        shown += min(contribution.rows.height, most - shown)
    if left:
        rows = sum(contribution.rows.height for contribution in left)
        epochs = f"{counted(len(left), 'earlier epoch')} of {trace.stage}"
        out.print(f"... and {counted(rows, 'row')} of {escape(epochs)}; {_MORE}")
    return shown


def _show_before(traces: Sequence[Trace], most: int) -> None:
    """Print the rows that the stages before had: so many of all keys of a stage together."""
    left, untold = dict.fromkeys((trace.stage for trace in traces), most), dict[str, int]()
    for trace in traces:
        if left[trace.stage] <= 0 and most:
            untold[trace.stage] = untold.get(trace.stage, 0) + 1
            continue
        _show_statements([(Certainty.UNKNOWN, f"{trace.stage}: {what}") for what in trace.unknown], most)
        left[trace.stage] -= _show_earlier(trace, trace.contributions, left[trace.stage])
        _show_before(trace.before, most)
    for stage, keys in untold.items():
        out.print(f"... and {counted(keys, 'key')} more of {escape(stage)}; {_MORE}")
