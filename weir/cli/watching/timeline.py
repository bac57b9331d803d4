"""The events of a pipeline in their order, from all that its storage remembers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from state_ops.coordination.lease import DIED
from state_ops.counts import counted
from state_ops.facts import Facts
from state_ops.records.checkpoint import EDIT, EPOCH, FORK, POSITIONS, PROMOTION, REWIND, SEEK, START, Checkpoint
from state_ops.records.pins import BRANCH
from state_ops.records.restores import Restored
from weir.cli.watching.figures import EpochFigures, ago, size
from weir.cli.watching.pipeline_look import PipelineLook
from weir.cli.watching.problems import DRILL, LOOK, NOTE, WRONG, kind_of

_LATE_SECONDS = 60.0
_MOST = 200
_KINDS = {
    START: "started from another checkpoint",
    REWIND: "rewound",
    EDIT: "state edited by hand",
    SEEK: "a source was set to another position",
    FORK: "a branch began",
    PROMOTION: "a branch was promoted",
}


@dataclass(frozen=True, slots=True)
class Event(Facts):
    """One thing that happened.

    Attributes:
        kind: In a word or two.
        severity: WRONG, LOOK or NOTE, as problems have it.
    """

    at: datetime
    kind: str
    what: str
    severity: str = NOTE


def events(
    look: PipelineLook, epochs: Sequence[EpochFigures], restores: Sequence[Restored], since: datetime | None = None
) -> list[Event]:
    """Return what happened, the newest first.

    Args:
        epochs: Those that are known, oldest first.
        restores: All that are recorded.
        since: Leave out what was before; None: nothing, as far as the newest events go back.
    """
    begin = since or datetime.min.replace(tzinfo=UTC)
    listed = [
        *_checkpoints(look.retained),
        *_other_code(look.retained),
        *_restarts(epochs),
        *_failures(look),
        *_restored(restores),
        *_notes(look),
        *_results(look),
        *_published(look),
    ]
    return sorted((event for event in listed if event.at >= begin), key=lambda event: event.at, reverse=True)[:_MOST]


def _checkpoints(retained: Sequence[Checkpoint]) -> Iterator[Event]:
    for row in retained:
        if row.kind not in (EPOCH, POSITIONS):
            what = (
                f"checkpoint {row.id} of {row.parent_id or 'nothing'}: {_KINDS.get(row.kind, row.kind)} ({row.reason})"
            )
            yield Event(row.completed_at, row.kind, what, LOOK)
        warned = [
            f"{verdict['title']} of {uid} ({verdict['unexpected']:,} of {counted(verdict['rows'], 'row')})"
            for uid, stats in row.operators.items()
            for verdict in stats.gates
            if not verdict["passed"]
        ]
        if warned:
            yield Event(row.completed_at, "gate warned", f"epoch {row.id}: {'; '.join(warned)}", LOOK)
        if row.rows_quarantined:
            what = f"epoch {row.id} set {counted(row.rows_quarantined, 'row')} aside"
            yield Event(row.completed_at, "quarantine", what, LOOK)


def _other_code(retained: Sequence[Checkpoint]) -> Iterator[Event]:
    """Yield the epochs whose stages have other code than the retained epoch before them had."""
    made = [row for row in retained if row.kind == EPOCH]
    for before, row in itertools.pairwise(made):
        then = {uid: stats.code for uid, stats in before.operators.items()}
        now = {uid: stats.code for uid, stats in row.operators.items()}
        changed = [
            uid for uid in then.keys() & now.keys() if None not in (then[uid], now[uid]) and then[uid] != now[uid]
        ]
        parts = {"other code in": changed, "new:": now.keys() - then.keys(), "gone:": then.keys() - now.keys()}
        said = [f"{how} {', '.join(sorted(uids))}" for how, uids in parts.items() if uids]
        if said:
            yield Event(row.triggered_at, "code", f"epoch {row.id}, after epoch {before.id}: {'; '.join(said)}", LOOK)


def _restarts(epochs: Sequence[EpochFigures]) -> Iterator[Event]:
    for before, epoch in itertools.pairwise(epochs):
        if epoch.generation != before.generation:
            passed = (epoch.triggered_at - before.completed_at).total_seconds()
            run = f", run {epoch.run_id}" if epoch.run_id else ""
            what = (
                f"generation {epoch.generation} goes on after generation {before.generation}, {ago(max(0.0, passed))}"
                f" after its last epoch{run}"
            )
            yield Event(epoch.triggered_at, "restart", what)


def _failures(look: PipelineLook) -> Iterator[Event]:
    holder = look.holder
    if holder is not None and look.alive is False and not holder.stopped:
        who = f"generation {holder.generation}, process {holder.pid} on {holder.host}"
        yield Event(look.at, f"run {DIED}", f"{who} has ended without a word; nobody has taken over until now", WRONG)
    for failure in look.holder.failures if look.holder is not None else ():
        who = f"generation {failure.get('generation')}, process {failure.get('pid')} on {failure.get('host')}"
        if failure.get("how") == DIED:
            what = f"{who} had ended without a word; its successor found that now"
        else:
            what = ": ".join(filter(None, (who, failure.get("error"), failure.get("message"))))
        yield Event(datetime.fromisoformat(failure["when"]), f"run {failure.get('how')}", what, WRONG)


def _restored(restores: Sequence[Restored]) -> Iterator[Event]:
    for row in restores:
        took = ago((row.fetch_ms + row.check_ms) / 1000)
        whole = "whole" if row.valid else f"damaged: {row.problem}"
        what = f"checkpoint {row.checkpoint_id} is {whole}; {size(row.bytes_fetched)} fetched, {took}, on {row.host}"
        kind = row.purpose if row.purpose == DRILL else f"restore ({row.purpose})"
        yield Event(row.restored_at, kind, what, NOTE if row.valid else WRONG)


def _notes(look: PipelineLook) -> Iterator[Event]:
    for pin in look.pins:
        kind = "branch" if pin.kind == BRANCH else "savepoint"
        yield Event(pin.created_at, kind, f"{pin.name} names checkpoint {pin.checkpoint_id}")
    if look.hold is not None:
        what = f"epoch {look.hold.epoch}: {look.hold.message.splitlines()[0]}"
        yield Event(datetime.fromisoformat(look.hold.when), "held", what, WRONG)
    if look.suspended is not None:
        what = f"{look.suspended.how} by a person: {look.suspended.why}"
        yield Event(datetime.fromisoformat(look.suspended.when), "suspended", what, LOOK)


def _results(look: PipelineLook) -> Iterator[Event]:
    for checked in look.checked:
        damage = f"{counted(checked.damaged, 'damaged thing')} found" if checked.damaged else "nothing damaged"
        what = (
            f"{kind_of(checked)}: {damage}, {checked.intact} of {counted(checked.checkpoints, 'checkpoint')} can be restored;"
            f" {ago(checked.seconds)}, on {checked.host}"
        )
        yield Event(checked.at, "checked", what, WRONG if checked.damaged else NOTE)
    drilled = look.drilled
    if drilled is not None:
        comes = "comes back as it was" if drilled.comes_back else "would not come back as it was"
        late = "" if drilled.in_time or not drilled.comes_back else ", later than its objectives allow"
        what = f"checkpoint {drilled.checkpoint} {comes}{late}; {ago(drilled.seconds)}, on {drilled.host}"
        severity = WRONG if not drilled.comes_back else NOTE if drilled.in_time else LOOK
        yield Event(drilled.at, "drilled", what, severity)


def _published(look: PipelineLook) -> Iterator[Event]:
    committed = {row.id: row.completed_at for row in look.retained}
    for row in look.publications:
        late = (row.published_at - committed.get(row.checkpoint_id, row.published_at)).total_seconds()
        if late > _LATE_SECONDS:
            what = f"epoch {row.checkpoint_id} came to {row.sink} {ago(late)} after its commit"
            yield Event(row.published_at, "published late", what, LOOK)
