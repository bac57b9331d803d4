"""`weir debug`: one stage's part of an epoch, played again in this process."""

from __future__ import annotations

import pdb
from functools import partial
from typing import Annotated

import typer
from rich.markup import escape

from weir.cli.console import Json, Name, err, out, print_json, prints, waiting
from weir.cli.debugging.showing import Spark, code_in_words, show_difference, show_rows, slice_in_words
from weir.cli.shell import completion
from weir.loading import find
from weir.replay import stage_replay
from weir.replay.replay import Playing
from weir.replay.stage_replay import Played


@prints(Played)
def debug(
    pipeline: Name,
    epoch: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="The epoch, which is its checkpoint's number.",
            autocompletion=completion.checkpoints,
        ),
    ],
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="The stage's uid, if several could be meant.",
            autocompletion=completion.stages,
        ),
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option("--key", help="The key; once for each key column, in order. Plays its subtask.")
    ] = None,
    subtask: Annotated[int | None, typer.Option(metavar="S", help="Play this subtask; by default all.")] = None,
    stop: Annotated[
        bool, typer.Option("--pdb", help="Stop in the stage's function where it gets the key, and where it raises.")
    ] = False,
    spark: Spark = False,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="The number of rows of each kind to show.")] = 20,
    json: Json = False,
) -> None:
    """Play one stage's part of an epoch again, without Spark: rows in, state before and after, rows out, and whether they are what the epoch made.

    Nothing is written to the pipeline's storage, and a coordinator may go on. Only state of the subtasks that are played is fetched. Exit code 1 if something is otherwise than it was.
    """
    definition, settings = find(pipeline)
    asked = partial(stage_replay.debug, epoch=epoch, stage=stage, key=key or None, subtask=subtask)
    if stop:
        seen = asked(Playing(definition, settings, spark), stop=pdb.Pdb)
    else:
        with waiting("playing the epoch again") as say:
            seen = asked(Playing(definition, settings, spark, say))
    if json:
        print_json(seen)
    else:
        _show(seen, limit)
    if not seen.is_same:
        raise typer.Exit(1)


def _show(seen: Played, limit: int) -> None:
    subtasks = ", ".join(map(str, seen.subtasks))
    begun = "from nothing" if seen.parent is None else f"from checkpoint {seen.parent}"
    out.print(f"[bold {'green' if seen.is_same else 'red'}]{escape(seen.verdict)}[/]")
    for difference in seen.differences:
        show_difference(difference, limit)
    if not seen.is_same:
        out.print(_why(seen.code_changed))
    out.print(
        f"Subtask {subtasks} played again {begun} in {sum(seen.seconds.values()):.1f} s, with"
        f" {seen.fetched / 1e6:,.1f} MB of state."
    )
    out.print(escape(code_in_words(seen.code_then, seen.code_now)))
    for name, recorded in seen.slices.items():
        out.print(escape(f"slice of {name}: {slice_in_words(recorded)}"))
    for name, rows in seen.inputs.items():
        show_rows(f"rows in of {name}", rows, limit)
    show_rows("state before", seen.before, limit)
    show_rows("state after", seen.after, limit)
    for name, rows in seen.outputs.items():
        show_rows("rows out" if name == "main" else f"rows out of {name}", rows, limit)
    for note in seen.notes:
        err.print(escape(note))


def _why(code_changed: bool | None) -> str:
    """Return what may have made a replayed epoch differ from the original."""
    if code_changed:
        return "The stage's code has changed since, which may be why."
    code = "The stage's code is the same" if code_changed is False else "Which code it ran is not recorded"
    return (
        f"{code}: look for what depends on the clock, on chance or on something outside, for an edit of the state, or for"
        " code of Weir that has changed."
    )
