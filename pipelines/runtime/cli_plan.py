"""`weir plan`: today's code and configuration against a checkpoint, before a run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from pipelines.runtime.console import Json, Name, out, print_json, waiting
from pipelines.runtime.loading import find
from pipelines.runtime.state_fit import Verdict
from pipelines.runtime.state_plan import StatePlan
from pipelines.runtime.state_plan import plan as planned
from state_ops.errors import ConfigurationError

_COLORS = {
    Verdict.COMPATIBLE: "green",
    Verdict.MIGRATES: "cyan",
    Verdict.LOSES: "bold yellow",
    Verdict.FLAG: "yellow",
    Verdict.REFUSED: "bold red",
    Verdict.UNKNOWN: "dim",
}


def plan(
    pipeline: Name,
    checkpoint: Annotated[int | None, typer.Option(help="The checkpoint; by default the newest.")] = None,
    savepoint: Annotated[str | None, typer.Option(help="The savepoint of this name instead.")] = None,
    json: Json = False,
) -> None:
    """What a run with today's code and configuration would make of the state: what fits, what migrates, what is refused.

    Changes nothing, and starts Spark only for stages with a transform. Exit code 0: a run would start; 1: something is refused or
    needs a flag; 2: wrong usage or configuration.
    """
    if checkpoint is not None and savepoint is not None:
        raise ConfigurationError("Both a checkpoint and a savepoint are given.", next="Give one of them.")
    found, settings = find(pipeline)
    if any(stage.transform for stage in found.stages):
        what = "comparing; stages with a transform need Spark to know their columns"
    else:
        what = "comparing"
    with waiting(what):
        decided = planned(found, settings, checkpoint if savepoint is None else savepoint)
    if json:
        print_json(decided.to_dict())
    else:
        _show(decided)
    if decided.stops:
        raise typer.Exit(1)


def _show(decided: StatePlan) -> None:
    if decided.checkpoint is None:
        out.print(f"{escape(decided.pipeline)} has no checkpoint yet: everything starts empty.")
    else:
        when = f"{decided.checkpoint.completed_at:%Y-%m-%d %H:%M:%S}"
        out.print(f"{escape(decided.pipeline)} as it is now, against checkpoint {decided.checkpoint.id} of {when}.")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for one in decided.findings:
        color = _COLORS[one.verdict]
        table.add_row(f"[{color}]{one.verdict}[/]", one.kind, escape(one.name), one.aspect, escape(one.what))
    if decided.findings:
        out.print(table)
    for sample in decided.samples:
        if sample.problem is None:
            out.print(
                f"Tried: {sample.rows:,} rows of {escape(sample.stage)}, subtask {sample.subtask}, read with today's schema."
            )
    for one in decided.findings:
        if one.next is not None:
            out.print(f"[{_COLORS[one.verdict]}]{escape(one.name)}[/]: {escape(one.next)}")
    if decided.stops:
        out.print(f"`weir run {escape(decided.pipeline)}` would be refused; nothing was changed.")
