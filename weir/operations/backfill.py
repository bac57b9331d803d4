"""Stateful backfill: replay a range of event time with today's code and input on a branch, and promote the result.

    newest checkpoint before the range -> fork -> replay, gates and all -> diff -> promote, at once or when approved

The pipeline goes on meanwhile, and is not touched before the promotion. The branch is named after its range, so that
two backfills never work on the same range. If a replay was cut off, the next call continues it. If its input or code
has changed since, the next call begins it anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from state_ops import extras
from state_ops.counts import agrees, counted
from state_ops.errors import ConfigurationError, WeirError
from state_ops.facts import Facts
from state_ops.logs import Logger
from state_ops.moments import from_micros, to_micros
from state_ops.records.checkpoint import Checkpoint, abandoned, before, event_time, to_begin_from, untold_sources
from state_ops.records.pins import BRANCH
from state_ops.storage.storage import Storage
from weir.connectors.delta.replace_where import Range
from weir.definition import Pipeline
from weir.definition.fingerprint import fingerprint
from weir.epoch.model import EpochReport
from weir.execution.executor import Executor
from weir.operations import branch_diff, forks, promotion
from weir.operations.branch_diff import BranchDiff
from weir.operations.promotion import PromotionPlan
from weir.ownership.ownership import raise_if_busy
from weir.ownership.pipeline_storage import open_storage, readers
from weir.restore.rewind import listed
from weir.run import run as runtime
from weir.run.run import RunOptions
from weir.settings.configuration import BackfillSettings, PartitionSettings, Settings

log = Logger("weir.backfill")

SINCE: Final = "since"
RANGE: Final = forks.RANGE
REPLAYING, WAITING = "replaying", "waiting"
_PREFIX = "backfill-"
_HOUR = "%Y%m%dT%H"


@dataclass(frozen=True, slots=True)
class Backfilled(Facts):
    """The outcome of a backfill.

    Attributes:
        base: The checkpoint from which it was replayed.
        resumed: Whether an earlier try was continued.
        epochs: How many epochs this call replayed.
        promoted: The promotion's checkpoint. None: the backfill waits for approval, or nothing differed, so there was
            nothing to promote.
        note: In words, why the base is an earlier checkpoint than one would expect, and which sources had been read
            past the range by then; None if there is neither.
    """

    branch: str
    base: int
    resumed: bool
    epochs: int
    difference: BranchDiff
    promoted: Checkpoint | None
    note: str | None = None


def branch_name(start: datetime, end: datetime) -> str:
    """Return the branch's name for the backfill of a range of whole hours in UTC: backfill-20260103T00-20260106T00."""
    return f"{_PREFIX}{start.astimezone(UTC):{_HOUR}}-{end.astimezone(UTC):{_HOUR}}"


def epoch_line(report: EpochReport) -> str:
    """Return an epoch of the replay, as a line for people."""
    return f"epoch {report.checkpoint.id} on the branch: {counted(report.checkpoint.rows_read, 'row')}"


def range_of(name: str) -> tuple[datetime, datetime] | None:
    """Return the range of a backfill's branch; None if the name is not of a backfill."""
    first, _, second = name.removeprefix(_PREFIX).partition("-")
    try:
        start, end = (datetime.strptime(text, _HOUR).replace(tzinfo=UTC) for text in (first, second))
    except ValueError:
        return None
    return (start, end) if name.startswith(_PREFIX) else None


def base_of(pipeline: Pipeline, settings: Settings, start: datetime) -> tuple[Checkpoint, str | None]:
    """Return the newest retained checkpoint that has read no row of `start` or later. Where this is not certain, the
    one before it.

    Returns:
        The checkpoint, and a note in words, or None. The note says why this is not the newest checkpoint that seems to
        lie before the range, or that it may have read rows of the range.

    Raises:
        WeirError: No checkpoint lies before the range. The message says how far each source had been read.
    """
    _, registry = open_storage(pipeline, settings)
    completed = registry.checkpoints()
    left = abandoned(completed)
    line = [row for row in completed if row.id not in left]
    by, begins = pipeline.days, to_micros(start)
    earlier = before(line, begins, by)
    if earlier:
        base = to_begin_from(earlier, by)[0]
        untold = untold_sources(earlier[-1], by)
        notes = [_unsure(earlier[-1], base, untold)] if untold else []
        return base, "; ".join([*notes, *_read_ahead(pipeline, base, begins)]) or None
    oldest = next((row for row in line if event_time(row, by) is not None), None)
    if oldest is None:
        raise WeirError(
            f"No retained checkpoint of {pipeline.title} goes by event time.",
            where=f"{len(line)} checkpoints",
            next="A backfill needs a source with event_time=, and a checkpoint from before the range.",
        )
    reached = {name: to for name in sorted(by.sources) if (to := _reached(oldest, name)) is not None}
    advice = "Choose a later range."
    if len(by.sources) > 1 and reached:
        furthest = max(reached, key=lambda name: reached[name])
        rest = ", ".join(f'"{name}"' for name in sorted(by.sources - {furthest}))
        advice = (
            f"If {furthest} runs ahead, as a table of dimensions that is loaded first does, let days go by the others, "
            f"by which checkpoints are then kept too: Pipeline(..., days_by=({rest},)). Else choose a later range."
        )
    raise WeirError(
        f"No retained checkpoint of {pipeline.title} lies before {start:%Y-%m-%d %H:%M}: the oldest, {oldest.id}, has "
        f"read {' and '.join(f'{name} to {from_micros(to):%Y-%m-%d %H:%M}' for name, to in reached.items())}.",
        where=f"days go by the event times of {', '.join(sorted(by.sources))}",
        next=f"{advice} `weir fork {pipeline.title} --name NAME --from {oldest.id}` replays from that checkpoint on. "
        "To reach further back from now on: pipelines.<name>.backfill.keep, or savepoints.",
    )


def _reached(checkpoint: Checkpoint, source: str) -> int | None:
    newest: int | None = (checkpoint.offsets.get(source) or {}).get("newest")
    return newest


def _read_ahead(pipeline: Pipeline, base: Checkpoint, begins: int) -> list[str]:
    """Name the sources that a backfill's base has read into its range or past it: those rows are not read again."""
    return [
        f"{source.name} had been read to {from_micros(to):%Y-%m-%d %H:%M} by checkpoint {base.id}, and what was read "
        "of it by then is not read again"
        for source in pipeline.sources
        if source.name not in pipeline.days.sources and (to := _reached(base, source.name)) is not None and to >= begins
    ]


def _unsure(newest: Checkpoint, base: Checkpoint, sources: Sequence[str]) -> str:
    return (
        f"it begins from checkpoint {base.id}, since checkpoint {newest.id} may have seen rows of the range: files of "
        f"{', '.join(sources)} have no statistics, and "
        "of rows in them nobody has told the event time (left out by where or for a null key, or read by an earlier "
        "release)"
    )


def backfill(
    pipeline: Pipeline,
    settings: Settings,
    start: datetime,
    end: datetime,
    *,
    replaces: Literal["since", "range"] = "since",
    promote: bool = False,
    executor: Executor | None = None,
    on_epoch: Callable[[EpochReport], None] | None = None,
) -> Backfilled:
    """Replay event times from `start` up to and without `end`. If asked to, promote the result where something differs.

    Args:
        replaces: "since" replaces state and all rows since the range began; "range" replaces the rows of the range
            alone.
        on_epoch: Called with the report of each replayed epoch.

    Raises:
        WeirError: No checkpoint lies before the range, another backfill overlaps it, or a gate holds the replay. The
            pipeline is unchanged. Once the cause is mended, the same call continues from there.
    """
    if replaces not in (SINCE, RANGE):  # a misspelled value must not replace more than was meant
        raise ConfigurationError(f"{replaces!r} is nothing that a backfill replaces.", next="Say since or range.")
    _check_bounds(start, end)
    extras.check("duckdb", "A backfill, which compares its rows with the pipeline's,")
    if replaces == RANGE:  # a replay may take hours, so what no promotion could replace is refused before it
        for sink in pipeline.tables:
            promotion.check_keeps_ranges(sink.name, sink)
    name = branch_name(start, end)
    branches = {branch.branch.name: branch for branch in forks.forks(pipeline, settings)}
    _check_overlap(pipeline, branches, name, start, end)
    code = fingerprint(pipeline)
    resumed = name in branches and branches[name].head is not None
    if resumed and (why := _outdated(pipeline, settings, name, replaces, code)) is not None:
        log.info("a backfill begins anew", branch=name, reason=why)
        forks.drop(pipeline, settings, name)
        resumed = False
    if not resumed:
        # A fork that was cut off is finished from where it was begun.
        at, unsure = None, None
        if name not in branches or branches[name].head is not None:
            base, unsure = base_of(pipeline, settings, start)
            at = int(base.id)
        if unsure is not None:
            log.warning("what a backfill begins from", branch=name, note=unsure)
        only = Range(to_micros(start), to_micros(end)) if replaces == RANGE else None
        forks.fork(pipeline, settings, name, at, f"{start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}", only=only)
    here = forks.branched(pipeline, settings, name)
    source, _ = open_storage(here, settings)
    if resumed:
        unsure = _noted(source).get("unsure")
    note = {"replaces": replaces, "unsure": unsure, "code": code}
    _note(source, {**note, "state": REPLAYING})
    epochs = 0
    options = RunOptions(until_caught_up=True, reason=f"backfill of {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}")
    for report in runtime.run(here, settings, options, executor):
        epochs += 1
        if on_epoch is not None:
            on_epoch(report)
    difference = branch_diff.diff(pipeline, settings, name)
    _note(source, {**note, "state": WAITING})
    promoted = None
    if difference.same:
        forks.drop(pipeline, settings, name)
    elif promote:
        promoted = approve(pipeline, settings, name, executor=executor)
    return Backfilled(name, difference.base, resumed, epochs, difference, promoted, unsure)


def plan(pipeline: Pipeline, settings: Settings, name: str) -> PromotionPlan:
    """Return the plan of promoting a branch now, as `promotion.plan` does.

    If the branch is a backfill's, input that was corrected since the replay is an obstacle too.
    """
    decided = promotion.plan(pipeline, settings, name)
    corrected = tuple(_corrected(pipeline, settings, name)) if range_of(name) is not None else ()
    return replace(decided, obstacles=(*decided.obstacles, *corrected), corrected=corrected)


def approve(
    pipeline: Pipeline,
    settings: Settings,
    name: str,
    *,
    executor: Executor | None = None,
    accepted: Collection[str] = (),
    reason: str = "",
) -> Checkpoint:
    """Promote a backfill that waits, then drop its branch, of which nothing is needed any more.

    Args:
        accepted: The obstacles of its `plan` that are accepted, as `promote` takes them.

    Raises:
        WeirError: There are other obstacles, or the replay has not come to its end.
    """
    source, _ = open_storage(forks.branched(pipeline, settings, name), settings)
    if _noted(source).get("state") != WAITING:
        raise WeirError(
            f"The backfill {name} of {pipeline.title} has not been replayed to its end, so there is nothing to "
            "approve.",
            next="Ask for the same range again: weir backfill goes on where it was cut off.",
        )
    done = promotion.promote(
        pipeline, settings, name, executor=executor, accepted=accepted, reason=reason, planner=plan
    )
    forks.drop(pipeline, settings, name)
    return done


def step(configured: PartitionSettings) -> timedelta:
    """Return the length of a partition."""
    return timedelta(hours=1 if configured.every == "hour" else 24)


def newest(configured: BackfillSettings, now: datetime) -> tuple[datetime, datetime]:
    """Return the range of the newest whole days, or hours, at a moment."""
    end = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    if configured.every == "day":
        end = end.replace(hour=0)
    return end - configured.last * step(configured), end


def _check_bounds(start: datetime, end: datetime) -> None:
    for moment in (start, end):
        if moment.tzinfo is None or moment.minute or moment.second or moment.microsecond:
            raise ConfigurationError(
                f"{moment} is no whole hour in UTC.", where="the range", next="Say e.g. 2026-01-03."
            )
    if not start < end:
        raise ConfigurationError(
            f"{start} to {end} is no range.", next="The end comes after the start, and is not part of it."
        )


def _check_overlap(
    pipeline: Pipeline, branches: dict[str, forks.Fork], name_of_this: str, start: datetime, end: datetime
) -> None:
    for name in branches:
        other = range_of(name)
        if name != name_of_this and other is not None and other[0] < end and start < other[1]:
            raise WeirError(
                f"Another backfill of {pipeline.title} overlaps this range: {name}.",
                next=f"Promote it, `weir promote {pipeline.title} {name}`, or drop it, `weir fork {pipeline.title} "
                f"--drop {name}`; "
                "then ask again.",
            )


def _outdated(pipeline: Pipeline, settings: Settings, name: str, replaces: str, code: str) -> str | None:
    """Why an earlier try of the same range is not continued, in words; None if it is continued.

    Args:
        code: Today's fingerprint.

    Raises:
        BusyError: The earlier try is running.
    """
    here = forks.branched(pipeline, settings, name)
    source, registry = open_storage(here, settings)
    raise_if_busy(here, source)
    note = _noted(source)
    if note.get("state") == WAITING:
        return "it had been replayed, and was asked for again"
    tip = registry.head()
    if tip is not None and (forks.range_of(source, tip) is not None) != (replaces == RANGE):
        return "it is to replace something else"
    if note.get("code") != code:
        return "the pipeline's code or definition is not the one that it was begun with"
    read = _replayed(pipeline, settings, name)
    if read is None:
        return "what it was forked from is gone"
    for source_name, reader in readers(here, settings).items():
        gone = reader.again(*(positions.get(source_name) for positions in read))[1]
        if gone:
            return f"{gone[0]} has changed since it was replayed"
    return None


def _replayed(pipeline: Pipeline, settings: Settings, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return by source the positions between which a backfill's branch has read; None if its base is gone."""
    _, trunk = open_storage(pipeline, settings)
    tip = open_storage(forks.branched(pipeline, settings, name), settings)[1].head()
    pin = trunk.pinned(BRANCH, name)
    base = next((row for row in trunk.checkpoints() if pin is not None and row.commit_id == pin.commit_id), None)
    return None if base is None or tip is None else (base.offsets, tip.offsets)


def _corrected(pipeline: Pipeline, settings: Settings, name: str) -> Iterator[str]:
    """Return in words which input was corrected since a backfill's branch read it.

    The branch's rows are those of before.
    """
    here = forks.branched(pipeline, settings, name)
    then, now = _replayed(pipeline, settings, name) or ({}, {})
    for source_name, reader in readers(here, settings).items():
        changed = reader.changed(then.get(source_name), now.get(source_name))
        if changed:
            versions = [(file.size, file.mtime_ns) if file is not None else None for file in changed.values()]
            files = listed(list(changed), versions)
            yield (
                f"{counted(len(changed), reader.piece, 'has', 'have')} changed, or "
                f"{agrees(len(changed), 'is', 'are')} gone, since the backfill {name} of {pipeline.title} "
                f"read them: {files}"
            )


def _note(source: Storage, note: dict[str, Any]) -> None:
    source.put_bytes(forks.NOTE, json.dumps(note).encode())


def _noted(source: Storage) -> dict[str, Any]:
    """Return the note that a branch's backfill has left beside its registry. It is empty if there is none yet."""
    raw = source.read_bytes(forks.NOTE)
    return json.loads(raw) if raw else {}
