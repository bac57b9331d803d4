"""`weir seek`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from json import dumps, loads
from typing import Annotated, Any

from state_ops.counts import counted
from state_ops.errors import ConfigurationError
from weir.definition.source import EARLIEST, LATEST
from weir.operations.operation import Argument, Done, Here, Option, Plan, Reason, Steps, operation
from weir.restore import seek as seeking
from weir.restore.seek import SeekPlan
from weir.run import maintenance


@operation(SeekPlan, plans=True, asks=True)
def seek(
    here: Here,
    source: Annotated[str, Argument("The source's name.", metavar="SOURCE")],
    to: Annotated[
        str,
        Option("earliest, latest, a time (2026-05-01T12:00Z), or a position in JSON as `weir checkpoints` shows it."),
    ],
    reason: Reason = "",
) -> Steps:
    """Read a source on from another position. State and tables stay as they are.

    Rows that are read twice count twice, and rows that are passed over are never read. The seek is a checkpoint of its
    own, which a rewind takes back. No coordinator may be running.
    """
    meant = _sought(to)
    with here.waiting("asking the source"):
        plan = seeking.plan(here.pipeline, here.settings, source, meant)
    was = dumps(plan.was["at"]) if plan.was is not None else "nowhere"
    waits = "" if plan.waits is None else f"; {counted(plan.waits, 'row', 'waits', 'wait')} behind that"
    yield Plan(plan, [f"{source} is read to {was}. It goes on from {dumps(plan.then['at'])}{waits}."], ask="seek")
    with here.waiting("seeking"):
        done = maintenance.seek(here.pipeline, here.settings, source, meant, reason)
    is_at = f"{here.name} is at checkpoint {done.id}: {done.reason}. `weir run {here.name}` goes on from there."
    yield Done(replace(plan, checkpoint=done.id), [is_at])


def _sought(to: str) -> str | datetime | dict[str, Any]:
    if to in (EARLIEST, LATEST):
        return to
    try:
        if to.startswith("{"):
            position: dict[str, Any] = loads(to)
            return position
        moment = datetime.fromisoformat(to)
    except ValueError as error:
        raise ConfigurationError(
            f"--to {to!r} is no place in a source.",
            next="Say earliest, latest, a time such as 2026-05-01T12:00Z, or a position in JSON.",
        ) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
