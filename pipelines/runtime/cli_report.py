"""`weir report`: pages about a pipeline's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pipelines.runtime import data_docs
from pipelines.runtime.console import Json, Name, out, print_json
from pipelines.runtime.loading import find


def report(
    pipeline: Name,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where to; by default below local.work_dir.")
    ] = None,
    json: Json = False,
) -> None:
    """Make Great Expectations' Data Docs: all gates and restore expectations, asked of the newest rows, state and figures."""
    found, settings = find(pipeline)
    made = data_docs.build(found, settings, to)
    if json:
        print_json(made.to_dict())
        return
    for verdict in made.verdicts:
        out.print(
            f"{'passed' if verdict.passed else '[bold red]failed[/]'}  {verdict.of} {verdict.stage}  {escape(str(verdict))}"
        )
    for said in made.left_out:
        out.print(f"left out  {escape(said)}")
    out.print(f"{len(made.verdicts)} expectations, {sum(not one.passed for one in made.verdicts)} failed: {made.index}")
