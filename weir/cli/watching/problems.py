"""Problems of a pipeline, from the facts of a look: the problem, the next step, and the page that says more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypedDict

from state_ops.coordination import restore_progress
from state_ops.coordination.gate_hold import GATE
from state_ops.coordination.lease import FAILED, Lease
from state_ops.coordination.results import Checked
from state_ops.counts import agrees, counted
from state_ops.errors import DISK_FULL, WeirError, page_about, plainly
from state_ops.facts import Facts
from state_ops.moments import to_the_second
from state_ops.records.checkpoint import EPOCH, ROWS_LOST
from weir.cli.watching.figures import EpochFigures, ago, number_waiting, restarts, size, waiting
from weir.cli.watching.pipeline_look import PipelineLook

WRONG, LOOK, NOTE = "wrong", "look", "note"
"""Somebody has to act; somebody should look; it is good to know."""

_ORDER = (WRONG, LOOK, NOTE)
_OVERDUE_INTERVALS, _OVERDUE_SECONDS = 5, 300.0
_SLOW_EPOCHS = 3
_FLAPPING, _FLAPPING_WITHIN = 5, timedelta(minutes=30)
_LARGE, _GROWN_WITHIN = 1_000_000_000, timedelta(days=1)
_HOLDS = "docs/how-to/gates.md"
_DIED, _HANGS = "docs/playbooks/worker-died.md", "docs/playbooks/coordinator-hung.md"
_DAMAGED, _DRILLS = "docs/playbooks/corrupt-checkpoint.md", "docs/how-to/restore.md"
DRILL = "drill"
"""The purpose of a drill's restore."""
_BY_ERROR = {"InputError": "docs/playbooks/wrong-input.md", "DamageError": _DAMAGED, GATE: _HOLDS}


@dataclass(frozen=True, slots=True)
class Problem(Facts):
    """One thing that is wrong, or good to know.

    Attributes:
        severity: WRONG, LOOK or NOTE.
        next: What a person does now; empty: nothing.
        page: The page about it, in the project; None: there is none.
    """

    severity: str
    what: str
    next: str = ""
    page: str | None = None


def unreadable(error: Exception) -> Problem:
    """Return the problem that a pipeline cannot be read, which says nothing of how the pipeline is."""
    if isinstance(error, WeirError):
        where = f" ({error.where})" if error.where else ""
        return Problem(WRONG, f"cannot be read: {error.what}{where}", error.next or "", _page_of(error))
    return Problem(
        WRONG, f"cannot be read: {plainly(error)}", "Look at the storage; it is tried again.", page_about(error)
    )


def _page_of(error: WeirError) -> str | None:
    if error.exit_code != 1:  # a mistake in code or settings, which says itself what to do
        return None
    name = type(error).__name__
    return _BY_ERROR.get(name, page_about(error) if name in ("TransientError", "DiskFullError") else None)


def problems(name: str, look: PipelineLook, epochs: Sequence[EpochFigures]) -> list[Problem]:
    """Return what is wrong with a pipeline, the worst first.

    Args:
        name: As commands take it.
        epochs: Those that are known, oldest first.
    """
    listed = [
        *_holds(look),
        *_who_runs(name, look),
        *_epochs(name, look, epochs),
        *_storage(name, look, epochs),
        *_results(name, look),
    ]
    return sorted(listed, key=lambda problem: _ORDER.index(problem.severity))


def _holds(look: PipelineLook) -> Iterator[Problem]:
    if look.hold is not None:
        first, _, rest = look.hold.message.partition("\n")
        advice = rest.partition("next:")[2].strip().replace("\n", " ")
        since = f"held since {to_the_second(look.hold.when)}: " if look.hold.when else "held: "
        yield Problem(
            WRONG,
            since + first,
            advice or "Repair what it names, and start a run.",
            _BY_ERROR.get(look.hold.error, _HOLDS),
        )
    for name, place in look.missing.items():
        yield Problem(WRONG, f"the directory of source {name} does not exist: {place}", "Bring it back, or correct it.")
    for name, arrivals in look.arrived.items():
        if arrivals.problem is not None:
            page = "docs/playbooks/kafka.md" if "afka" in arrivals.problem else "docs/playbooks/storage-down.md"
            yield Problem(LOOK, f"nobody can tell what waits in source {name}: {arrivals.problem}", "", page)
    for name in sorted(look.ahead):
        what = f"source {name} is its max_ahead before slower ones: it waits for them, unless they are idle"
        yield Problem(NOTE, what, "", "docs/how-to/sources.md")


def _who_runs(name: str, look: PipelineLook) -> Iterator[Problem]:
    holder, waits = look.holder, number_waiting(look.arrived)
    if look.suspended is not None:
        yield Problem(
            NOTE,
            f"{look.suspended.how} by a person at {to_the_second(look.suspended.when)} ({look.suspended.why})",
            f"weir resume {name}",
        )
    if holder is not None and look.alive is False and not holder.stopped:
        yield Problem(
            WRONG,
            f"its coordinator died: process {holder.pid} on {holder.host}, generation {holder.generation}",
            f"weir run {name}, which takes over from checkpoint {look.head.id if look.head else 'none'}",
            _DIED,
        )
    elif holder is not None and look.hangs:
        yield Problem(
            WRONG,
            f"its heart has not beaten for {ago(look.silent_seconds)}, though process {holder.pid} on {holder.host} exists",
            f"weir stop {name} says whether it hangs, and what to kill",
            _HANGS,
        )
    elif holder is not None and look.alive is False and holder.outcome == FAILED:
        yield Problem(
            WRONG, f"the last run failed{_message(holder)}", f"weir run {name}, once that is mended", _page(holder)
        )
    elif look.alive is False and waits and look.suspended is None and look.hold is None:
        yield Problem(
            LOOK,
            f"nobody runs it, and {_waits(look)}",
            f"weir run {name}; with Dagster: is its daemon up, and the sensor on?",
            "docs/playbooks/dagster-lost.md",
        )
    for fetch in look.restoring[:1]:
        progress = restore_progress.described(list(look.restoring))
        yield Problem(NOTE, f"state is being fetched for {fetch.purpose}: {progress}")


def _waits(look: PipelineLook) -> str:
    return f"{waiting(look.arrived)} {agrees(number_waiting(look.arrived), 'waits', 'wait')}"


def _message(holder: Lease) -> str:
    last = last_failure(holder)
    return (
        f" at {to_the_second(last['when'])}: {last['error']}: {last['message']}" if last and last.get("message") else ""
    )


def _page(holder: Lease) -> str | None:
    last = last_failure(holder)
    if last is None:
        return None
    if any(text in (last.get("message") or "") for text in ("No space left", "os error 28", "quota")):
        return DISK_FULL
    return _BY_ERROR.get(last.get("error") or "")


class Failure(TypedDict, total=False):
    """The unwanted end of a coordinator, as a lease has it. Other releases may write more.

    Attributes:
        how: failed: by an error; interrupted: by a signal; died: without a word.
    """

    how: str
    when: str
    run_id: str | None
    generation: int
    error: str | None
    message: str | None


def last_failure(holder: Lease | None) -> Failure | None:
    """Return the newest unwanted end of a coordinator, as `lease.failure` gives it; None if none is known."""
    return holder.failures[-1] if holder is not None and holder.failures else None


def _epochs(name: str, look: PipelineLook, epochs: Sequence[EpochFigures]) -> Iterator[Problem]:
    newest = [epoch for epoch in epochs if epoch.kind == EPOCH]
    age = (look.at - newest[-1].completed_at).total_seconds() if newest else None
    limit = max(_OVERDUE_SECONDS, _OVERDUE_INTERVALS * look.interval)
    if look.alive and number_waiting(look.arrived) and age is not None and age > limit and look.hold is None:
        yield Problem(
            WRONG,
            f"no epoch for {ago(age)}, though {_waits(look)} and a coordinator lives",
            f"weir stop {name} says within seconds whether it hangs",
            _HANGS,
        )
    slow = newest[-_SLOW_EPOCHS:]
    if look.alive and len(slow) == _SLOW_EPOCHS and all(epoch.seconds > look.interval for epoch in slow):
        bound = f"; most of the time goes to {slow[-1].bottleneck}" if slow[-1].bottleneck else ""
        yield Problem(
            LOOK,
            f"epochs take longer ({slow[-1].seconds:.1f} s) than the interval of {look.interval:g} s{bound}",
            "Scale, or give it a longer interval.",
            "docs/playbooks/scale.md",
        )
    recent = [epoch for epoch in epochs if look.at - epoch.completed_at <= _FLAPPING_WITHIN]
    changes = restarts(recent, look)
    if changes > _FLAPPING:
        yield Problem(
            LOOK,
            f"{counted(changes, 'coordinator')} in {ago(_FLAPPING_WITHIN.total_seconds())}",
            "How did the last runs end? Do two schedulers run it?",
            _DIED,
        )
    lost = look.head.totals.get(ROWS_LOST, 0) if look.head is not None else 0
    if lost:
        yield Problem(
            NOTE, f"{counted(lost, 'row')} lost with epochs that failed (at most once)", "", "docs/how-to/delivery.md"
        )


def _storage(name: str, look: PipelineLook, epochs: Sequence[EpochFigures]) -> Iterator[Problem]:
    behind = {sink: id for id, sink in reversed(look.unpublished)}  # with the oldest checkpoint that it lacks
    if behind and look.alive is False:
        died = look.holder is not None and not look.holder.stopped  # then its successor publishes them, as ever
        yield Problem(
            LOOK if died else WRONG,
            f"committed rows are missing in {'; '.join(_lacking(look, sink, id) for sink, id in sorted(behind.items()))}",
            f"weir run {name} publishes them first, or names what stops it",
            None if died else "docs/playbooks/rows-refused.md",
        )
    if look.restored is not None and not look.restored.valid:
        yield Problem(
            WRONG,
            f"the last restore ({look.restored.purpose}, {_minute(look.restored.restored_at)}) found checkpoint"
            f" {look.restored.checkpoint_id} damaged: {look.restored.problem}",
            f"weir fsck {name}",
            _DAMAGED,
        )
    day = [epoch for epoch in epochs if look.at - epoch.completed_at <= _GROWN_WITHIN]
    if day and day[-1].bytes_total > _LARGE and day[-1].bytes_total > 2 * day[0].bytes_total:
        yield Problem(
            LOOK,
            f"the state has grown from {size(day[0].bytes_total)} to {size(day[-1].bytes_total)} since"
            f" {_minute(day[0].completed_at)}",
            "A ttl, or a watermark that stands still?",
            "docs/playbooks/state-too-large.md",
        )


def _lacking(look: PipelineLook, sink: str, since: int) -> str:
    refused = look.refused.get(sink)
    why = f": {refused.why}" if refused is not None else ""
    return f"{sink} since checkpoint {since}{why}"


def _results(name: str, look: PipelineLook) -> Iterator[Problem]:
    """Return the problems that the last checks and the last drill have found. Damaged objects that a drill found are
    said of its restore."""
    worst = max(look.checked, key=lambda checked: checked.damaged, default=None)
    if worst is not None and worst.damaged:
        yield Problem(
            WRONG,
            f"the last {kind_of(worst)} ({_minute(worst.at)}, on {worst.host}) found {counted(worst.damaged, 'damaged thing')};"
            f" {worst.intact} of {counted(worst.checkpoints, 'checkpoint')} can be restored",
            f"weir fsck {name} names each{' with --quick' if worst.quick else ''}, and what to do; once it finds none, this goes",
            _DAMAGED,
        )
    drilled = look.drilled
    if drilled is None:
        return
    when = f"the last drill ({_minute(drilled.at)}, on {drilled.host})"
    if not drilled.comes_back:
        if look.restored is None or look.restored.valid or look.restored.purpose != DRILL:
            what = f"by {when} checkpoint {drilled.checkpoint} would not come back as it was"
            yield Problem(
                WRONG, what, f"weir drill {name} says what is wrong, weir fsck {name} whether objects are", _DRILLS
            )
    elif not drilled.in_time:
        took = "" if drilled.recovery_seconds is None else f" after {ago(drilled.recovery_seconds)}"
        what = f"by {when} it comes back{took}, and misses its objectives"
        yield Problem(LOOK, what, f"weir drill {name} says which", _DRILLS)


def kind_of(checked: Checked) -> str:
    """Return which check it was, in words."""
    return "quick check" if checked.quick else "check of contents"


def _minute(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"
