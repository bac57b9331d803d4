"""The parts of a checkpoint: values that go from the keyed tasks through the coordinator into the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, ClassVar

from state_ops.days import Days
from state_ops.facts import Facts, Named
from state_ops.ids import CheckpointId, Generation
from state_ops.records.operator_stats import NOTHING, OperatorStats
from state_ops.records.sink_link import SinkLink

FORMAT_VERSION = 1
WITH_WAITING = 2  # rows wait in front of a stage: a release that does not know this would lose them
WITH_PARTS = 3  # a snapshot has several databases: a release that does not know this would not find them
WITH_PROMOTION = 4  # rows come and others go at once: a release that does not know this would only append
WITH_SINKS = 5  # rows are staged for sinks that are no tables: a release that does not know this would look for tables
WITH_ARCHIVE = 6  # input is kept: a release that does not know this would delete it
NEWEST_FORMAT = WITH_ARCHIVE

EPOCH, START, REWIND, EDIT = "checkpoint", "start", "rewind", "edit"  # kinds of checkpoints
FORK, PROMOTION, SEEK, POSITIONS = "fork", "promotion", "seek", "positions"
STARTED, FORKED = "started", "forked"  # in totals: how the chain began, see `began`
RANGE_START, RANGE_END = "range_start", "range_end"
TAKEN_BACK = "taken_back"  # in totals: the newest rewind or promotion, see `taken_back`
TAKEN_BEFORE, TAKEN_START, TAKEN_END = "taken_before", "taken_start", "taken_end"
TAKEN = (TAKEN_BACK, TAKEN_BEFORE, TAKEN_START, TAKEN_END)
ROWS_AHEAD = "rows_ahead"  # in totals: rows that positions are past, and that the next epoch is to apply
ROWS_LOST = "rows_lost"  # in totals: such rows whose epoch failed, so that no other has applied them
ROWS_QUARANTINED = "rows_quarantined"  # in totals: rows that gates have set aside, or that could not be decoded
EDITED = "edited"  # in totals: the newest edit that the state goes back to
REWRITTEN = "rewritten"  # in totals: the edit that has rewritten this checkpoint; its sums are those of before
TAKES_BACK = (REWIND, PROMOTION)  # what lies between their parent and them is abandoned


@dataclass(frozen=True, slots=True)
class Checkpoint(Facts):
    """A completed checkpoint: one row of `registry/checkpoints`. Immutable.

    Attributes:
        offsets: By source, its position after this epoch.
        slice: By source, what this epoch read.
        watermarks: By stage, microseconds since 1970 UTC.
        operators: By stage uid, what is recorded of the stage.
        kind: `checkpoint` is an epoch's. `start` begins a pipeline from another one's savepoint. `rewind` goes back to
            its parent, and what lies between is abandoned. `edit` changes one stage's state by hand. `seek` has
            another position of one source. `positions` has those behind what the next epoch is about to apply, where
            rows are delivered at most once. `fork` is the first of a branch. `promotion` has a branch's state and rows
            instead of what followed its parent.
        sinks: By sink, where its chain of published checkpoints stands.
        inputs: By source, the columns of its files.
        totals: Sums over the whole chain, and how the chain began (`began`).
        ms: Milliseconds by phase.
        lineage: The newest spans of ids that were completed one after the other, as [generation, first, last]; see
            `spans_with`.
        digest: The digest of the row, as the registry writes it; None before that, and in rows of older releases.
        weir_version: The version of Weir that wrote the row; None before that, and in rows of older releases.
    """

    shown_as: ClassVar = "id"

    id: CheckpointId
    parent_id: Annotated[CheckpointId | None, Named("parent")]
    kind: str
    generation: Generation
    commit_id: str
    triggered_at: datetime
    completed_at: datetime
    epoch_now: datetime
    trigger: str
    reason: str
    offsets: dict[str, Any]
    slice: dict[str, Any]
    watermarks: dict[str, int]
    operators: dict[str, OperatorStats]
    sinks: dict[str, SinkLink]
    inputs: dict[str, Any]
    ms: Annotated[dict[str, float], Named("durations_ms")]
    totals: dict[str, int]
    files: int
    bytes_total: int
    bytes_new: int
    run_id: str | None = None
    format_version: int = FORMAT_VERSION
    lineage: list[list[int]] = field(default_factory=list)
    digest: str | None = field(default=None, compare=False)
    weir_version: str | None = field(default=None, compare=False)

    @property
    def rows_read(self) -> int:
        """The number of rows that this epoch read from all sources."""
        return sum(int(part["rows"]) for part in self.slice.values())

    @property
    def rows_quarantined(self) -> int:
        """The number of source rows that this epoch set aside: bad rows, and rows that gates excluded."""
        return sum(
            part.get("bad_rows", 0) + sum(map(len, part.get("excluded", {}).values())) for part in self.slice.values()
        )

    @property
    def stages_with_state(self) -> list[str]:
        """The uids of the stages that have state."""
        return [uid for uid, stats in self.operators.items() if stats.has_state]

    def published(self, sink: str) -> CheckpointId | None:
        """Return the newest checkpoint up to this one that has output for a sink; None if there is none."""
        link = self.sinks.get(sink)
        return link.id if link is not None else None


def stats_of(checkpoint: Checkpoint | None, uid: str) -> OperatorStats:
    """Return the statistics that a checkpoint records of an operator; `NOTHING` if either of them is missing."""
    return checkpoint.operators.get(uid, NOTHING) if checkpoint else NOTHING


def began(parent: Checkpoint | None) -> dict[str, int]:
    """Return the entries about the chain's beginning that the totals of a checkpoint after `parent` carry on.

    Every row of a chain repeats it, because the first checkpoint of a chain is pruned one day, and files beside the
    registry may be left from a command that was cut off.

    Returns:
        `started` is the id of the `start` with which the chain began. A branch has `forked`, its pipeline's newest
        checkpoint at that moment, and `range_start` and `range_end`, in microseconds since 1970 UTC: the rows that it
        is to replace, or twice 0 for all since its base. Empty: the chain began with an epoch or an edit, or in an
        earlier release.
    """
    if parent is None:
        return {}
    return {name: parent.totals[name] for name in (STARTED, FORKED, RANGE_START, RANGE_END) if name in parent.totals}


def taken_back(parent: Checkpoint | None) -> dict[str, int]:
    """Return the entries about the newest rewind or promotion that the totals of a checkpoint after `parent` carry on.

    The row of that rewind or promotion is pruned one day.

    Returns:
        `taken_back` is its id, `taken_before` that of the one before it, 0: there was none. Of the promotion of a range
        `taken_start` and `taken_end` are its bounds, in microseconds since 1970 UTC. Empty: there was none, or it is of
        an earlier release.
    """
    if parent is None:
        return {}
    carried = {name: parent.totals[name] for name in TAKEN if name in parent.totals}
    if parent.kind not in TAKES_BACK:
        return carried
    changed = [link for link in parent.sinks.values() if link.id == parent.id]
    bounds = {}
    if changed and all(link.column is not None for link in changed):
        bounds = {TAKEN_START: min(link.start for link in changed), TAKEN_END: max(link.end for link in changed)}
    return {TAKEN_BACK: int(parent.id), TAKEN_BEFORE: carried.get(TAKEN_BACK, 0), **bounds}


def rows_lost(checkpoint: Checkpoint | None) -> int:
    """Return the number of rows that were read up to this checkpoint and that no epoch applied.

    Such rows exist only where delivery is at most once.
    """
    return sum(checkpoint.totals.get(name, 0) for name in (ROWS_LOST, ROWS_AHEAD)) if checkpoint is not None else 0


def abandoned(checkpoints: Sequence[Checkpoint]) -> dict[CheckpointId, CheckpointId]:
    """Return the checkpoints that rewinds and promotions have left behind, each with the newest rewind or promotion
    that did so."""
    left: dict[CheckpointId, CheckpointId] = {}
    for rewind in sorted(checkpoints, key=lambda row: row.id, reverse=True):
        if rewind.kind in TAKES_BACK and rewind.id not in left:
            left |= {
                row.id: rewind.id
                for row in checkpoints
                if (rewind.parent_id or 0) < row.id < rewind.id and row.id not in left
            }
    return left


def event_time(checkpoint: Checkpoint, by: Days) -> int | None:
    """Return the newest event time of the rows that a checkpoint has read, in microseconds since 1970 UTC; None if it
    has read none with an event time.

    It is known from the statistics of the files, else from what the subtasks have seen of rows, and from the stages'
    watermarks.
    """
    positions = [position for name, position in checkpoint.offsets.items() if name in by.sources]
    read = [position.get("newest") for position in positions]
    behind = by.lateness if any(_UNTOLD not in position for position in positions) else 0
    reached = [watermark + behind for uid, watermark in checkpoint.watermarks.items() if uid in by.stages]
    return max([*(time for time in read if time is not None), *reached], default=None)


_UNTOLD = "untold"


def told_times(position: dict[str, Any], newest: Sequence[int | None], *, untold: bool) -> dict[str, Any]:
    """Return a source's position with the newest of these event times, in microseconds since 1970 UTC.

    Args:
        untold: Whether the event times of some rows up to here are not known, so that these may be newer.
    """
    return {**position, "newest": max((time for time in newest if time is not None), default=None), _UNTOLD: untold}


def is_untold(position: dict[str, Any] | None) -> bool:
    """Return whether a source's position may lie behind the newest event time of the rows that were read.

    Earlier releases recorded only the statistics of files.
    """
    if position is None:
        return False
    return bool(position.get(_UNTOLD, position.get("files", 0) > 0 and position.get("newest") is None))


def untold_sources(checkpoint: Checkpoint, by: Days) -> list[str]:
    """Return those sources of which a checkpoint may have read newer rows than `event_time` says."""
    return sorted(name for name, position in checkpoint.offsets.items() if name in by.sources and is_untold(position))


def format_with(format_version: int, sinks: Mapping[str, SinkLink]) -> int:
    """Return the oldest format that tells whoever reads a checkpoint of one format also what its `sinks` are."""
    return max(format_version, WITH_SINKS) if any(link.kind for link in sinks.values()) else format_version


def before(checkpoints: Sequence[Checkpoint], moment: int, by: Days) -> list[Checkpoint]:
    """Return the checkpoints that seem to have read no row of this event time or a later one, in their order.

    Positions alone are none of them: they are past rows that only the next epoch has applied.
    """
    epochs = [row for row in checkpoints if row.kind != POSITIONS]
    return [row for row in epochs if (seen := event_time(row, by)) is not None and seen < moment]


def to_begin_from(earlier: Sequence[Checkpoint], by: Days) -> Sequence[Checkpoint]:
    """Return the newest of the `earlier` checkpoints, after the one before it if the newest may have read later rows.

    A backfill begins from the first checkpoint returned. `earlier` is what `before` returns, oldest first.

    Rows whose event time is not known were read beside others that end just before the moment, so a backfill begins
    from the first of the two. Both are to be retained: else the next look would take that one for the newest, and go
    back further.
    """
    return earlier[-2:] if untold_sources(earlier[-1], by) else earlier[-1:]


_SPANS = 100


def spans_with(parent: Checkpoint | None, generation: Generation, id: CheckpointId) -> list[list[int]]:
    """Return the lineage of a checkpoint that continues `parent`. It is bounded: spans older than the newest hundred
    are forgotten.

    The lineage of a first checkpoint begins with a span of no generation, so that epochs below its id that zombies
    stage are known to be abandoned.
    """
    spans = [list(span) for span in parent.lineage] if parent else [[0, 0, 0]]
    if spans and spans[-1][0] == generation and spans[-1][2] == id - 1:
        spans[-1][2] = id
    else:
        spans.append([generation, id, id])
    return spans[-_SPANS:]


def is_abandoned(head: Checkpoint | None, generation: Generation, epoch: CheckpointId) -> bool:
    """Return whether an epoch of a fenced generation has no checkpoint and never will; False if that is not known.

    That is so above the head, and below it where the head's lineage shows a gap or another generation: then the epoch
    was declined, or a zombie staged it.
    """
    if head is None or epoch > head.id:
        return True
    if not head.lineage or epoch < head.lineage[0][1]:
        return False
    return not any(owner == generation and first <= epoch <= last for owner, first, last in head.lineage)
