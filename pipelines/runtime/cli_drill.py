"""`weir drill`: whether a pipeline would come back, and how fast."""

from __future__ import annotations

import typer
from rich.markup import escape

from pipelines.runtime import drill as drills
from pipelines.runtime.console import Json, Name, out, print_json, waiting
from pipelines.runtime.drill import Drilled
from pipelines.runtime.loading import find


def drill(pipeline: Name, json: Json = False) -> None:
    """Restore the newest checkpoint on scratch, play its epoch again and compare the state: does the pipeline come back, and how fast?

    Production is only read; a coordinator may go on. Exit code 1 if it would not come back, or misses an objective of the settings.
    """
    found, settings = find(pipeline)
    with waiting("restoring on scratch, and replaying an epoch"):
        done = drills.drill(found, settings)
    missed = done.missed(settings)
    if json:
        print_json({**done.to_dict(), "missed": missed})
    else:
        _show(done, missed)
    if done.problems or missed:
        raise typer.Exit(1)


def _show(done: Drilled, missed: list[str]) -> None:
    restored = done.restored
    if restored is not None:
        out.print(
            f"Checkpoint {done.checkpoint} was restored in {done.restore_seconds:.1f} s: {restored.bytes_fetched:,} bytes, "
            f"{restored.files} files, every digest."
        )
    if done.replay is not None:
        out.print(
            f"Its epoch was replayed from checkpoint {done.replay.parent} in {done.replay.seconds:.1f} s: {done.replay.rows:,} rows; "
            f"{done.replay.entries:,} entries of state compared."
        )
    elif done.not_replayed:
        out.print(f"[yellow]not replayed[/]  {escape(done.not_replayed)}")
    for problem in done.problems:
        out.print(f"[bold red]problem[/]  {escape(problem)}")
    for one in missed:
        out.print(f"[bold red]missed[/]  {escape(one)}")
    took = done.recovery_seconds
    said = "It does not come back as it was" if took is None else f"Recovery takes {took:.1f} s"
    if took is not None and done.replay is None:
        said += ", the restore alone"
    waits = f"; the oldest input that no checkpoint holds has waited for {done.loss_seconds:.0f} s"
    out.print(f"{said}{waits if done.loss_seconds else ''}.")
