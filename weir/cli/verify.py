"""The commands that prove and report: `plan`, `drill`, `report`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from state_ops.counts import counted
from state_ops.errors import ConfigurationError
from weir.cli.console import (
    AtCheckpoint,
    AtSavepoint,
    Json,
    Name,
    answer,
    out,
    print_json,
    print_table,
    prints,
    waiting,
)
from weir.definition import Verdict
from weir.gates import data_docs
from weir.inspection.state_reader import one_of
from weir.loading import find
from weir.operations import drill as drills
from weir.operations.drill import Drilled
from weir.operations.plan import StatePlan
from weir.operations.plan import plan as planned
from weir.settings.configuration import load


@prints(Drilled)
def drill(pipeline: Name, json: Json = False) -> None:
    """Restore the newest checkpoint on scratch, play its epoch again and compare the state: does the pipeline come back, and how fast?

    Production is only read; a coordinator may go on. Exit code 1 if it would not come back, or misses an objective of the settings.
    """
    definition, settings = find(pipeline)
    with waiting("restoring on scratch, and replaying an epoch"):
        done = drills.drill(definition, settings)
    if json:
        print_json(done)
    else:
        _show_drill(done)
    if done.problems or done.missed:
        raise typer.Exit(1)


def _show_drill(done: Drilled) -> None:
    restored = done.restored
    if restored is not None:
        out.print(
            f"Checkpoint {done.checkpoint} was restored in {done.restore_seconds:.1f} s: {restored.bytes_fetched:,}"
            f" bytes, {counted(restored.files, 'file')}, every digest."
        )
    if done.replay is not None:
        out.print(
            f"Its epoch was replayed from checkpoint {done.replay.parent} in {done.replay.seconds:.1f} s:"
            f" {counted(done.replay.rows, 'row')}; {counted(done.replay.entries, 'entry')} of state compared."
        )
    elif done.not_replayed:
        out.print(f"[yellow]not replayed[/]  {escape(done.not_replayed)}")
    for problem in done.problems:
        out.print(f"[bold red]problem[/]  {escape(problem)}")
    for objective in done.missed:
        out.print(f"[bold red]missed[/]  {escape(objective)}")
    took = done.recovery_seconds
    verdict = "It does not come back as it was" if took is None else f"Recovery takes {took:.1f} s"
    if took is not None and done.replay is None:
        verdict += ", the restore alone"
    waits = f"; the oldest input that no checkpoint holds has waited for {done.loss_seconds:.0f} s"
    out.print(f"{verdict}{waits if done.loss_seconds else ''}.")


_COLORS = {
    Verdict.COMPATIBLE: "green",
    Verdict.MIGRATES: "cyan",
    Verdict.LOSES: "bold yellow",
    Verdict.FLAG: "yellow",
    Verdict.REFUSED: "bold red",
    Verdict.UNKNOWN: "dim",
}


@prints(StatePlan)
def plan(
    pipeline: Name,
    checkpoint: AtCheckpoint = None,
    savepoint: AtSavepoint = None,
    json: Json = False,
) -> None:
    """Tell what a run with today's code and configuration would make of the state: what fits, what migrates, what is
    refused.

    Changes nothing, and starts Spark only for stages with a transform. Exit code 0: a run would start; 1: something is refused or
    needs a flag; 2: wrong usage or configuration.
    """
    at = one_of(checkpoint, savepoint)
    definition, settings = find(pipeline)
    spark = any(input.transform for stage in definition.stages for input in stage.inputs)
    with waiting(f"comparing{'; stages with a transform need Spark to know their columns' if spark else ''}"):
        decided = planned(definition, settings, at)
    if json:
        print_json(decided)
    else:
        _show_plan(decided)
    if decided.stops:
        raise typer.Exit(1)


def _show_plan(decided: StatePlan) -> None:
    if decided.checkpoint is None:
        out.print(f"{escape(decided.pipeline)} has no checkpoint yet: everything starts empty.")
    else:
        when = f"{decided.checkpoint.completed_at:%Y-%m-%d %H:%M:%S}"
        out.print(f"{escape(decided.pipeline)} as it is now, against checkpoint {decided.checkpoint.id} of {when}.")
    if decided.findings:
        print_table(
            (_colored(fit.verdict, fit.verdict), fit.kind, escape(fit.name), fit.aspect, escape(fit.what))
            for fit in decided.findings
        )
    for sample in decided.samples:
        if sample.problem is None:
            out.print(
                f"Tried: {counted(sample.rows, 'row')} of {escape(sample.stage)}, subtask "
                f"{sample.subtask}, read with today's"
                " schema."
            )
    for uid, why in decided.where.items():
        if why is not None:
            out.print(f"Spark evaluates the where of {escape(uid)}, so its rows go through it: {escape(why)}.")
    for fit in decided.findings:
        if fit.next is not None:
            out.print(f"{_colored(fit.verdict, escape(fit.name))}: {escape(fit.next)}")
    if decided.other_code and decided.checkpoint is not None:
        which = f"than when checkpoint {decided.checkpoint.id} was made"
        out.print(f"The code of {escape(', '.join(decided.other_code))} is another {which}.")
    if decided.stops:
        out.print(f"`weir run {escape(decided.pipeline)}` would be refused; nothing was changed.")
    else:
        out.print(f"A run would start: `weir run {escape(decided.pipeline)}`. Nothing was changed.")


def _colored(verdict: Verdict, text: str) -> str:
    return f"[{_COLORS[verdict]}]{text}[/]"


@prints("weir.cli.watching.report:Incident", data_docs.DataDocs)
def report(
    pipeline: Name,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="The directory for the Data Docs; by default below local.work_dir."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one page about an incident to this file instead."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="With --html: the time from which on the page reports; 90m, 6h, 2d, or a time such as 2026-05-01T03:00Z."
        ),
    ] = None,
    last: Annotated[
        int, typer.Option(help="With --html: the largest number of epochs to show, the newest ones.", min=1, max=1000)
    ] = 100,
    json: Json = False,
) -> None:
    """Make Great Expectations' Data Docs: all gates and restore expectations, asked of the newest rows, state and figures.

    With --html FILE make one page about an incident instead, to be read anywhere and passed on: what is wrong and what to do, what
    happened when, and plots of the last epochs. It is read from storage alone, and nothing is written but the file.
    """
    if html is not None:
        if to is not None:
            raise ConfigurationError("--to is for Data Docs, and --html makes a page.", next="Give one of them.")
        _incident(pipeline, html, since, last, json)
        return
    if since is not None:
        raise ConfigurationError("--since is for the page that --html makes.", next="Add --html FILE.")
    definition, settings = find(pipeline)
    with waiting("asking the gates"):
        docs = data_docs.build(definition, settings, to)
    failed = sum(not verdict.passed for verdict in docs.verdicts)
    answer(
        json,
        docs,
        *(
            f"{'passed' if verdict.passed else '[bold red]failed[/]'}  {verdict.of} {verdict.stage} "
            f" {escape(str(verdict))}"
            for verdict in docs.verdicts
        ),
        *(f"left out  {escape(reason)}" for reason in docs.left_out),
        f"{len(docs.verdicts)} expectations, {failed} failed: {docs.index}",
    )


def _incident(pipeline: str, file: Path, since: str | None, last: int, json: bool) -> None:
    """Write the page of `weir report --html`."""
    from weir.cli.watching import report as incidents

    begin = None if since is None else incidents.moment(since, datetime.now(UTC))
    with waiting("reading storage, and drawing"):
        incident = incidents.incident(pipeline, load(), last, begin)
        text = incidents.page(incident)
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"The page cannot be written: {error.strerror or error}.", where=str(file), next="Name a file elsewhere."
        ) from error
    wrong = [problem.what for problem in incident.problems] or ["nothing is wrong that storage tells of"]
    answer(
        json,
        replace(incident, file=file),
        *(escape(what) for what in wrong),
        f"{counted(len(incident.epochs), 'epoch')}, {counted(len(incident.events), 'event')}: {escape(str(file))}",
    )
