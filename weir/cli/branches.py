"""The commands for branches: `forks`, `diff`, `backfill`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from rich.markup import escape

from state_ops.errors import ConfigurationError
from weir.cli.console import (
    Json,
    Name,
    answer,
    out,
    print_json,
    print_table,
    prints,
    waiting,
)
from weir.cli.shell import completion
from weir.epoch.model import EpochReport
from weir.loading import find
from weir.operations import backfill as backfills
from weir.operations import branch_diff
from weir.operations import forks as branches
from weir.operations.backfill import Backfilled
from weir.operations.branch_diff import BranchDiff
from weir.operations.forks import Fork
from weir.sources.positions import in_words

_DAYS = ["%Y-%m-%d", "%Y-%m-%dT%H", "%Y-%m-%dT%H:%M"]

Branch = Annotated[str, typer.Argument(help="The branch's name.", metavar="BRANCH", autocompletion=completion.branches)]


@prints(list[Fork])
def forks(pipeline: Name, json: Json = False) -> None:
    """List the branches of a pipeline, oldest first."""
    definition, settings = find(pipeline)
    with waiting("reading the branches"):
        forked = branches.forks(definition, settings)
    if json or not forked:
        answer(
            json,
            forked,
            escape(f"{pipeline} has no branch: weir fork {pipeline} --name NAME"),
        )
        return
    print_table(
        (
            (
                escape(fork.branch.name),
                str(fork.base),
                fork.created_at.strftime("%Y-%m-%d %H:%M:%S"),
                str(fork.head.id) if fork.head is not None else "not finished",
                f"{fork.bytes_own:,}" if fork.bytes_own is not None else "",
                escape(in_words(fork.behind.values())),
                escape(fork.reason),
            )
            for fork in forked
        ),
        ("name", "from", "forked", "checkpoint", "own bytes", "behind", "reason"),
        right=("from", "checkpoint", "own bytes", "behind"),
    )


@prints(BranchDiff)
def diff(
    pipeline: Name,
    branch: Branch,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Do not read the stages' state.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Also write it to this file, as Markdown.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare a branch with its pipeline: rows since the fork by table and day, and the state of stages, with samples.

    Reads alone; both may be running. Exit code 0 whether something differs or not.
    """
    _check(report)
    definition, settings = find(pipeline)
    with waiting("comparing"):
        compared = branch_diff.diff(definition, settings, branch, states=not tables_only)
    if report is not None:
        report.write_text(compared.to_markdown() + "\n", "utf-8")
    if json:
        print_json(compared)
        return
    _show(compared)
    if report is not None:
        out.print(escape(f"With samples: {report}"))


def _check(report: Path | None) -> None:
    """Raise ConfigurationError, before anything is compared, where --report names a file in no directory."""
    if report is not None and not report.absolute().parent.is_dir():
        raise ConfigurationError(f"--report {report}: there is no such directory.", next="Make it, or name another.")


def _show(difference: BranchDiff) -> None:
    out.print(
        escape(
            f"{difference.pipeline} at checkpoint {difference.head}, {difference.pipeline}@{difference.branch}"
            f" at {difference.tip}, forked from {difference.base}."
        )
    )
    for name, arrived in difference.behind.items():
        if arrived.waiting:
            out.print(
                f"[yellow]behind[/]  {escape(f'{arrived} of {name}')} that the branch has still to read; "
                "it differs by those too"
            )
    for taken in difference.taken_back:
        out.print(f"[yellow]taken back[/]  {escape(str(taken))}")
    rows: list[tuple[str, ...]] = []
    for table in difference.tables:
        rows.append((escape(f"table {table.table}"), *map(_number, table.rows), *map(_number, table.counts.values())))
        days = table.days.items() if any(table.days) else ()
        rows += [(escape(f"  {day}"), "", "", *map(_number, counts.values())) for day, counts in days]
    for state in difference.states:
        numbers = (escape(state.why),) if state.counts is None else ("", "", *map(_number, state.counts.values()))
        rows.append((escape(f"state of {state.stage}"), *numbers))
    numbers = ("rows", "of the branch", "added", "removed", "changed")
    print_table(rows, ("", *numbers), right=numbers)
    for table in difference.tables:
        if table.columns:
            out.print(escape(f"table {table.table}: {table.columns}"))
    for state in difference.states:
        if state.counts is not None and state.why:
            out.print(escape(f"state of {state.stage}: {state.why}"))
    for sentence in difference.left_out():
        out.print(escape(sentence))


def _number(value: int) -> str:
    return f"{value:,}"


@prints(Backfilled)
def backfill(
    pipeline: Name,
    start: Annotated[
        datetime,
        typer.Option("--from", formats=_DAYS, help="The first day, or hour, of the range of event time, in UTC."),
    ],
    end: Annotated[datetime, typer.Option("--to", formats=_DAYS, help="The end of the range, exclusive.")],
    replaces: Annotated[
        str | None, typer.Option(help="since: state and all rows since the range began; range: its rows alone.")
    ] = None,
    promote: Annotated[bool, typer.Option("--promote", help="Promote at once, if the gates pass.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the differences to this file, as Markdown.")
    ] = None,
    json: Json = False,
) -> None:
    """Replay a range of event time with today's code and input on a branch, from the newest checkpoint before it, and show what differs.

    Without --promote it waits then: `weir promote PIPELINE BRANCH` approves it. The pipeline goes on meanwhile.
    """
    _check(report)
    definition, settings = find(pipeline)
    configured = settings.pipelines[definition.name].backfill
    meant = replaces or (configured.replaces if configured is not None else backfills.SINCE)

    with waiting("replaying the range, then comparing") as say:

        def on_epoch(epoch: EpochReport) -> None:
            say(f"replaying the range, then comparing; {backfills.epoch_line(epoch)}")
            if not json:
                out.print(backfills.epoch_line(epoch))

        done = backfills.backfill(
            definition,
            settings,
            start.replace(tzinfo=UTC),
            end.replace(tzinfo=UTC),
            replaces=cast(Literal["since", "range"], meant),
            promote=promote,
            on_epoch=on_epoch,
        )
    if report is not None:
        report.write_text(done.difference.to_markdown() + "\n", "utf-8")
    if json:
        print_json(done)
        return
    _show(done.difference)
    if done.note is not None:
        out.print(f"[yellow]note[/]  {escape(done.note)}.")
    if done.promoted is not None:
        out.print(f"{escape(pipeline)} is at checkpoint {done.promoted.id}, {escape(done.promoted.reason)}.")
    elif done.difference.same:
        out.print("Nothing differs, so there is nothing to promote.")
    else:
        out.print(
            escape(
                f"It waits. To approve: weir promote {pipeline} {done.branch}; to give it up: weir fork {pipeline} "
                f"--drop {done.branch}"
            )
        )
