"""`weir debug`: one stage's part of an epoch, played again in this process."""

from __future__ import annotations

import pdb
from typing import Annotated

import typer
from rich.markup import escape

from pipelines.cli.console import Json, Name, err, out, print_json, waiting
from pipelines.cli.debugging.showing import code_in_words, show_difference, show_rows, slice_in_words
from pipelines.cli.shell import completion
from pipelines.loading import find
from pipelines.runtime.debugging import played
from pipelines.runtime.debugging.played import Played


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
            help="The stage's uid, where several could be meant.",
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
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="How many rows of each kind are shown.")] = 20,
    json: Json = False,
) -> None:
    """Play one stage's part of an epoch again, without Spark: rows in, state before and after, rows out, and whether they are what the epoch made.

    Nothing is written to the pipeline's storage, and a coordinator may go on. Only state of the subtasks that are played is fetched. Exit code 1 if something is otherwise than it was.
    """
    definition, settings = find(pipeline)
    debugger = pdb.Pdb if stop else None
    if stop:
        seen = played.debug(definition, settings, epoch, stage=stage, key=key or None, subtask=subtask, stop=debugger)
    else:
        with waiting("playing the epoch again"):
            seen = played.debug(definition, settings, epoch, stage=stage, key=key or None, subtask=subtask)
    if json:
        print_json(seen.to_dict())
    else:
        _show(seen, limit)
    if not seen.is_same:
        raise typer.Exit(1)


def _show(seen: Played, limit: int) -> None:
    which = "" if seen.key is None else f", key {', '.join(f'{name}={value}' for name, value in seen.key.items())}"
    subtasks = ", ".join(map(str, seen.subtasks))
    begun = "from nothing" if seen.parent is None else f"from checkpoint {seen.parent}"
    out.print(
        escape(
            f"Epoch {seen.epoch} of {seen.pipeline}, stage {seen.stage}{which}: subtask {subtasks} played again {begun} in"
            f" {sum(seen.seconds.values()):.1f} s; {seen.fetched / 1e6:,.1f} MB of state fetched."
        )
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
    for difference in seen.differences:
        show_difference(difference, limit)
    if seen.is_same:
        compared = " and ".join(["state", *(f"rows of {name}" for name in seen.published)])
        out.print(f"It is what the epoch made: {escape(compared)} are the same.")
    elif seen.code_changed:
        out.print("The stage's code has changed since, which may be why.")
    elif seen.code_changed is False:
        out.print(
            "The stage's code is the same: look for what depends on the clock, on chance or on something outside, for an "
            "edit of the state, or for code of Weir that has changed."
        )
