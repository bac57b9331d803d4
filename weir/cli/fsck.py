"""`weir fsck`: what is wrong with what a pipeline has stored, and its repair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from rich.markup import escape

from state_ops.coordination import lease, requests
from state_ops.coordination.requests import Request
from state_ops.counts import agrees, counted
from state_ops.errors import ConfigurationError
from state_ops.facts import FLAT, Facts
from state_ops.fsck.findings import Finding, Report, Severity
from state_ops.fsck.objects import ExpectedFile
from state_ops.fsck.repair import RepairPlan, plan_repair
from weir.cli.console import Json, Name, Yes, answer, out, prints, proceeds, waiting
from weir.definition import Pipeline
from weir.loading import find
from weir.ownership.ownership import claimed
from weir.ownership.pipeline_storage import open_storage
from weir.run import fsck as checks
from weir.run import maintenance
from weir.settings.configuration import Settings

_SHOWN = 20
_COLOURS = {Severity.DAMAGE: "bold red", Severity.LEFTOVER: "yellow", Severity.FOREIGN: "cyan"}


@dataclass(frozen=True, slots=True)
class Checked(Facts):
    """The findings of fsck, and what was done about them.

    Attributes:
        plan: The repairs; None: nobody has asked for them.
        repaired: The repairs were made, and what was found is what is left.
    """

    report: Annotated[Report, FLAT]
    plan: RepairPlan | None
    repaired: bool


@prints(Checked)
def fsck(
    pipeline: Name,
    quick: Annotated[bool, typer.Option("--quick", help="Compare sizes only; read no contents.")] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Show the repairs, then make them: files that nothing live references are deleted."
        ),
    ] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Check all that a pipeline has stored: registry, snapshots, published tables. Exit code 1 if something is damaged.

    Reads only, unless --repair is given, but for a note of the result, which `weir metrics` shows. May run beside a coordinator, which
    then does the repairing itself.
    """
    definition, settings = find(pipeline)
    with waiting("comparing what is there with what is recorded") as say:
        report = checks.examine_and_note(definition, settings, quick=quick, reading=partial(_saying, say))
    plan = plan_repair(report) if repair else None
    planned = plan if plan is not None and not plan.empty else None
    if proceeds(
        lambda: _show(report, plan),
        Checked(report, plan, repaired=False),
        ask="repair",
        dry_run=planned is None or (json and not yes),
        yes=yes,
        json=json,
    ):
        assert planned is not None
        report = _carry_out(definition, settings, report, planned)
        answer(json, Checked(report, plan, repaired=True), f"\nRepaired. {_summary(report)}")
    elif planned is not None:
        raise ConfigurationError("Nothing was repaired.", next="Read the plan, then give --yes beside --json.")
    if report.damage:
        raise typer.Exit(1)


def _carry_out(pipeline: Pipeline, settings: Settings, report: Report, plan: RepairPlan) -> Report:
    """Have the plan carried out by the pipeline's owner, and return a report of what is left.

    A running coordinator owns the pipeline and is asked; without one this command claims it.
    """
    storage, _ = open_storage(pipeline, settings)
    clock = time.monotonic()
    with waiting("repairing"):
        if lease.watch(storage):
            request = Request(requests.REPAIR, reason="weir fsck --repair")
            maintenance.asked(pipeline, settings, request, lambda _: None, settings.checkpoints.timeout_seconds)
        else:
            with claimed(pipeline, settings) as owner:
                checks.repair(owner.context, plan)
        left = checks.left(report, checks.examine(pipeline, settings, quick=True), storage)
        checks.note(pipeline, settings, left, time.monotonic() - clock)
        return left


def _saying(say: Callable[[str], None], files: Sequence[ExpectedFile]) -> Iterator[ExpectedFile]:
    """Yield the files, and say how many of their bytes were read."""
    total, read = sum(file.bytes for file in files), 0
    for file in files:
        say(f"reading, {read / 1e6:,.0f} of {total / 1e6:,.0f} MB")
        yield file
        read += file.bytes


# -- for people


def _show(report: Report, plan: RepairPlan | None) -> None:
    for kind in dict.fromkeys(finding.kind for finding in report.findings):
        group = [finding for finding in report.findings if finding.kind is kind]
        first = group[0]
        size = sum(finding.bytes for finding in group)
        colour = _COLOURS[first.severity]
        out.print(f"[{colour}]{kind}[/] ({first.severity}): {len(group):,}" + (f", {size:,} bytes" if size else ""))
        for finding in group[:_SHOWN]:
            out.print(f"  {_line(finding)}")
        if len(group) > _SHOWN:
            out.print(f"  ... and {len(group) - _SHOWN:,} more; --json has all")
        out.print(f"  next: {escape(first.next)}\n")
    harmed = [checkpoint for checkpoint in report.checkpoints if not checkpoint.intact]
    if harmed:
        intact = [
            f"{checkpoint.id}" + (f" ({', '.join(checkpoint.names)})" if checkpoint.names else "")
            for checkpoint in report.checkpoints
            if checkpoint.intact
        ]
        out.print(
            f"Not restorable: checkpoint {', '.join(str(checkpoint.id) for checkpoint in harmed)}. "
            + (f"Intact: {escape(', '.join(intact))}." if intact else "No retained checkpoint is intact.")
            + "\n"
        )
    out.print(_summary(report))
    if plan is not None:
        _show_plan(plan)


def _line(finding: Finding) -> str:
    path = f"{finding.path}: " if finding.path else ""
    return escape(f"{path}{finding.what}")


def _summary(report: Report) -> str:
    counts = {severity: sum(finding.severity is severity for finding in report.findings) for severity in Severity}
    verdict = "damaged" if counts[Severity.DAMAGE] else "whole"
    how = "sizes only" if report.quick else f"{report.read:,} bytes read"
    return (
        f"{verdict}: {counts[Severity.DAMAGE]} damaged, {counts[Severity.LEFTOVER]} left over,"
        f" {counts[Severity.FOREIGN]} foreign; {counted(len(report.checkpoints), 'checkpoint')}, "
        f"{counted(report.files, 'file')},"
        f" {report.bytes:,} bytes ({how})"
    )


def _show_plan(plan: RepairPlan) -> None:
    out.print("\n[bold]plan[/]")
    if plan.refused is not None:
        out.print(f"  nothing: {escape(plan.refused)}")
        return
    _show_part("publish or record", plan.publish)
    _show_part("drop the rows of", plan.drop)
    _show_part("delete", plan.delete)
    if plan.empty:
        out.print("  nothing to do")
    else:
        out.print(
            f"  {counted(len(plan.delete), 'file')}, {plan.bytes:,} bytes go; no retained checkpoint, "
            f"running restore or table"
            " names them"
        )
    if plan.beyond:
        out.print(
            f"  {counted(len(plan.beyond), 'damaged thing', 'stays', 'stay')} as "
            f"{agrees(len(plan.beyond), 'it is', 'they are')}: no repair can undo that"
        )


def _show_part(title: str, findings: Iterable[Finding]) -> None:
    listed = list(findings)
    for finding in listed[:_SHOWN]:
        checkpoint = f" (checkpoint {', '.join(str(id) for id in finding.checkpoints)})" if finding.checkpoints else ""
        out.print(f"  {title}: {escape(finding.path or '')}{checkpoint}")
    if len(listed) > _SHOWN:
        out.print(f"  {title}: ... and {len(listed) - _SHOWN:,} more; --json has all")
