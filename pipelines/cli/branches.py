"""The commands for branches: `fork`, `forks`, `diff`, `promote`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from rich.markup import escape
from rich.table import Table

from pipelines.cli.console import Json, Name, confirm, moment, out, print_json, waiting
from pipelines.loading import find
from pipelines.runtime.epoch.model import EpochReport
from pipelines.runtime.operations import backfill as backfills
from pipelines.runtime.operations import branch_diff, promotion
from pipelines.runtime.operations import forks as branches
from pipelines.runtime.operations.branch_diff import BranchDiff
from pipelines.runtime.operations.forks import Fork
from pipelines.runtime.operations.promotion import PromotionPlan
from pipelines.runtime.ownership.pipeline_storage import open_storage
from state_ops.errors import ConfigurationError

_DAYS = ["%Y-%m-%d", "%Y-%m-%dT%H", "%Y-%m-%dT%H:%M"]

Branch = Annotated[str, typer.Argument(help="The branch's name.", metavar="BRANCH")]


def fork(
    pipeline: Name,
    name: Annotated[str | None, typer.Option(help="Make a branch of this name.")] = None,
    origin: Annotated[
        str | None,
        typer.Option("--from", help="The checkpoint, by number or a savepoint's name; by default the newest."),
    ] = None,
    drop: Annotated[str | None, typer.Option(help="Remove the branch of this name with all that it has.")] = None,
    reason: Annotated[str, typer.Option(help="Why, for who reads the list.")] = "",
    json: Json = False,
) -> None:
    """Make a branch of a pipeline from one of its checkpoints: its state, without copying it, in tables of its own.

    The branch is PIPELINE@NAME in every command: `weir run flights@fix --until-caught-up` lets it read what the pipeline has read, with the
    code of this checkout. The pipeline goes on, and is not touched before `weir promote`. `weir forks` lists branches.
    """
    if (name is None) == (drop is None):
        raise ConfigurationError(
            "Say what to do.",
            next=f"`weir fork {pipeline} --name NAME [--from N]` or `--drop NAME`; `weir forks {pipeline}` lists.",
        )
    found, settings = find(pipeline)
    with waiting("waiting for the coordinator's next barrier"):
        if name is not None:
            at = None if origin is None else moment(origin, open_storage(found, settings)[1])
            made = branches.fork(found, settings, name, at, reason)
        else:
            assert drop is not None
            made = branches.drop(found, settings, drop)
    if json:
        print_json(made.to_dict())
    elif name is not None:
        _told(pipeline, made)
    else:
        out.print(f"The branch {escape(made.branch.name)} is gone, and what only it kept of {pipeline}.")


def _told(pipeline: str, made: Fork) -> None:
    size = made.head.bytes_total if made.head is not None else 0
    files = sum(made.behind.values())
    out.print(
        f"{pipeline}@{escape(made.branch.name)} is forked from checkpoint {made.base}: {size:,} bytes of state, none of them copied.\n"
        f"{files:,} files were read since. Next: weir run {pipeline}@{escape(made.branch.name)} --until-caught-up"
    )


def forks(pipeline: Name, json: Json = False) -> None:
    """The branches of a pipeline, oldest first."""
    found, settings = find(pipeline)
    known = branches.forks(found, settings)
    if json:
        print_json([one.to_dict() for one in known])
        return
    if not known:
        out.print(f"{pipeline} has no branch: weir fork {pipeline} --name NAME")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("name", "from", "forked", "checkpoint", "own bytes", "files behind", "reason"):
        table.add_column(
            title, justify="right" if title in ("from", "checkpoint", "own bytes", "files behind") else "left"
        )
    for one in known:
        own = one.head.totals["bytes_new"] if one.head is not None else 0
        table.add_row(
            escape(one.branch.name),
            str(one.base),
            one.created_at.strftime("%Y-%m-%d %H:%M:%S"),
            str(one.head.id) if one.head is not None else "not finished",
            f"{own:,}",
            f"{sum(one.behind.values()):,}",
            escape(one.reason),
        )
    out.print(table)


def diff(
    pipeline: Name,
    branch: Branch,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Do not read the stages' state.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Also write it to this file, as Markdown.")
    ] = None,
    json: Json = False,
) -> None:
    """In what a branch differs from its pipeline: rows since the fork, by table and day, and the stages' state, with samples.

    Reads alone; both may be running. Exit code 0 whether something differs or not.
    """
    found, settings = find(pipeline)
    with waiting("comparing"):
        compared = branch_diff.diff(found, settings, branch, states=not tables_only)
    if report is not None:
        report.write_text(compared.to_markdown() + "\n")
    if json:
        print_json(compared.to_dict())
        return
    _show(compared)
    if report is not None:
        out.print(f"With samples: {report}")


def _show(found: BranchDiff) -> None:
    out.print(
        f"{found.pipeline} at checkpoint {found.head}, {found.pipeline}@{escape(found.branch)} at {found.tip}, forked from {found.base}."
    )
    for name, count in found.behind.items():
        if count:
            out.print(
                f"[yellow]behind[/]  {count:,} files of {name} that the branch has still to read; it differs by those too"
            )
    for taken in found.taken_back:
        out.print(f"[yellow]taken back[/]  {escape(str(taken))}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", "rows", "of the branch", "added", "removed", "changed"):
        table.add_column(title, justify="right" if title else "left")
    for one in found.tables:
        table.add_row(
            f"table {one.table}",
            f"{one.rows[0]:,}",
            f"{one.rows[1]:,}",
            *(f"{count:,}" for count in one.counts.values()),
        )
        for day, counts in one.days.items() if any(one.days) else ():
            table.add_row(f"  {day}", "", "", *(f"{count:,}" for count in counts.values()))
    for state in found.states:
        if state.counts is None:
            table.add_row(f"state of {state.stage}", escape(state.why))
        else:
            table.add_row(f"state of {state.stage}", "", "", *(f"{count:,}" for count in state.counts.values()))
    out.print(table)
    for sentence in found.left_out():
        out.print(escape(sentence))


def backfill(
    pipeline: Name,
    start: Annotated[
        datetime, typer.Option("--from", formats=_DAYS, help="The first day, or hour, of event time, in UTC.")
    ],
    end: Annotated[datetime, typer.Option("--to", formats=_DAYS, help="The end, which is not part of it.")],
    replaces: Annotated[
        str | None, typer.Option(help="since: state and all rows since the range began; range: its rows alone.")
    ] = None,
    promote: Annotated[bool, typer.Option("--promote", help="Promote at once what the gates let through.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write what differs to this file, as Markdown.")
    ] = None,
    json: Json = False,
) -> None:
    """Replay a range of event time with today's code and input on a branch, from the newest checkpoint before it, and show what differs.

    Without --promote it waits then: `weir promote PIPELINE BRANCH` approves it. The pipeline goes on meanwhile.
    """
    found, settings = find(pipeline)
    configured = settings.pipelines[found.name].backfill
    meant = replaces or (configured.replaces if configured is not None else backfills.SINCE)

    def told(epoch: EpochReport) -> None:
        if not json:
            out.print(backfills.said(epoch))

    done = backfills.backfill(
        found,
        settings,
        start.replace(tzinfo=UTC),
        end.replace(tzinfo=UTC),
        replaces=cast(Literal["since", "range"], meant),
        promote=promote,
        told=told,
    )
    if report is not None:
        report.write_text(done.difference.to_markdown() + "\n")
    if json:
        print_json(done.to_dict())
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
            f"It waits. To approve: weir promote {pipeline} {done.branch}; to give it up: weir fork {pipeline} --drop {done.branch}"
        )


def promote(
    pipeline: Name,
    branch: Branch,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="In spite of the obstacles that are shown. Others that come up meanwhile end it, with nothing changed.",
        ),
    ] = False,
    reason: Annotated[str, typer.Option(help="Why, for who reads the list of checkpoints.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    json: Json = False,
) -> None:
    """Make a branch's state and rows the pipeline's, instead of what it made of the same input since the fork.

    The branch catches up first; then a running coordinator is stopped at its barrier, and not started again: the next run has to have the
    branch's code. `weir rewind` to the checkpoint before takes it back.
    """
    found, settings = find(pipeline)
    plan = backfills.plan(found, settings, branch)
    if not json:
        _show_plan(pipeline, plan)
    if dry_run:
        if json:
            print_json({**plan.to_dict(), "checkpoint": None})
        return
    accepted = plan.obstacles if force else ()
    promotion.check(plan, pipeline, accepted)
    confirm("promote", yes=yes, json=json)
    with waiting("catching up, then promoting"):
        does = backfills.approve if backfills.range_of(branch) is not None else promotion.promote
        done = does(found, settings, branch, accepted=accepted, reason=reason)
    if json:
        print_json({**plan.to_dict(), "checkpoint": done.id})
        return
    out.print(
        f"{escape(pipeline)} is at checkpoint {done.id}, {escape(done.reason)}. `weir run {pipeline}` goes on from there; "
        f"to take it back: weir rewind {pipeline} --to {plan.head.id}"
    )


def _show_plan(pipeline: str, plan: PromotionPlan) -> None:
    out.print(
        f"{pipeline} is at checkpoint {plan.head.id}; {pipeline}@{escape(plan.branch)}, forked from {plan.base.id}, is at {plan.tip.id}."
    )
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, count in plan.behind.items():
        table.add_row("source", name, f"{count:,} files are to be read by the branch first" if count else "caught up")
    for one in plan.tables:
        table.add_row("table", one.table, f"{one.rows_removed:,} rows go, {one.rows_added:,} rows of the branch come")
    out.print(table)
    for obstacle in plan.obstacles:
        out.print(f"[yellow]obstacle[/]  {escape(obstacle)}")
