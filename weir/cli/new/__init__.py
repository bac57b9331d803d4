"""`weir new`: begins a pipeline."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from weir.cli.console import out
from weir.cli.new.scaffold import SINKS, SOURCES, begin

app = typer.Typer(
    name="new", help="Begin a pipeline of your own, with its test and its settings.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """Keep `pipeline` a command of its own, for others to come beside it."""


@app.command()
def pipeline(
    name: Annotated[str, typer.Argument(help="The pipeline's name, by which its storage is found.")],
    source: Annotated[str, typer.Option(help=f"The source of its rows: {', '.join(SOURCES)}.")] = "parquet",
    sink: Annotated[str, typer.Option(help=f"The sink of its rows: {', '.join(SINKS)}.")] = "append",
    package: Annotated[
        str | None, typer.Option(help="The pipeline's package; by default that of [tool.weir] in pyproject.toml.")
    ] = None,
) -> None:
    """Write a pipeline, its test and its settings, all of which work at once and are yours to change.

    Nothing that is there is overwritten. The settings are added to the file that WEIR_ENV or WEIR_CONFIG chooses, configs/dev.yaml by default.
    """
    for path in begin(name, source, sink, package):
        out.print(f"[green]wrote[/]  {escape(path)}")
    if "kafka" in (source, sink):
        topics = [name] * (source == "kafka") + [f"{name}-results"] * (sink == "kafka")
        out.print(
            f"A broker to try it on: python -m weir.local.kafka_broker {' '.join(topics)}, in a terminal of its own"
        )
    out.print(f"Next: weir plan {name}, python -m pytest tests/test_{name}.py, weir run {name} --until-caught-up")
