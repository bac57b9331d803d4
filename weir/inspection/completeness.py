"""Up to which event time a stage has handed out every row, and which event times have other rows than before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import (
    EPOCH,
    PROMOTION,
    REWIND,
    TAKEN_BACK,
    TAKEN_BEFORE,
    TAKEN_END,
    TAKEN_START,
    TAKES_BACK,
    Checkpoint,
    taken_back,
)
from weir.definition import Stage
from weir.definition.sink import Sink
from weir.operators import watermarks

Rows = Mapping[CheckpointId, Checkpoint]


@dataclass(frozen=True, slots=True)
class ExchangedTimes:
    """Event times whose rows a rewind or a promotion has exchanged, in microseconds since 1970 UTC.

    Attributes:
        by: The rewind or the promotion, which need not be retained.
        start: None: from the first one on.
        end: Without it. None: all that follow, of which not all may be there again.
    """

    by: CheckpointId
    start: int | None
    end: int | None


def complete_until(stage: Stage, row: Checkpoint, rows: Rows) -> int | None:
    """Up to which event time a checkpoint has every row that a stage hands out, in microseconds since 1970 UTC.

    Rows that come later than that are late. Windows, timers and joins hand out what the watermark has passed one epoch
    after it: their stage's watermark may rest on rows of the very epoch.

    Args:
        rows: The retained checkpoints.

    Returns:
        The time, or None: the stage has no event time, or only the next epoch tells.
    """
    if not watermarks.holds_back(stage):
        return row.watermarks.get(stage.uid)
    parent = rows.get(row.parent_id) if row.parent_id is not None else None
    if parent is None:
        return None
    if row.kind == REWIND:
        return complete_until(stage, parent, rows)
    if row.kind != EPOCH or stage.uid not in parent.watermarks:
        return None
    return parent.watermarks[stage.uid] - stage.operator.behind


def changes(stage: Stage, sink: Sink, rows: Rows, since: CheckpointId) -> list[ExchangedTimes]:
    """Return what rewinds and promotions after a checkpoint have exchanged of a sink's rows, oldest first."""
    changed = [change for change in _pruned(rows.values()) if change.by > since and change.by not in rows]
    for row in sorted(rows.values(), key=lambda row: row.id):
        if row.id <= since or row.kind not in TAKES_BACK:
            continue
        link = row.sinks.get(sink.name)
        if row.kind == PROMOTION and link is not None and link.column is not None:
            changed.append(ExchangedTimes(row.id, link.start, link.end))
            continue
        parent = rows.get(row.parent_id) if row.parent_id is not None else None
        until = complete_until(stage, parent, rows) if parent is not None else None
        changed.append(ExchangedTimes(row.id, until, None))
        for left in rows.values():  # ranges that were promoted, and are not any more
            link = left.sinks.get(sink.name)
            is_left = left.kind == PROMOTION and (row.parent_id or 0) < left.id < row.id
            if is_left and link is not None and link.column is not None:
                changed.append(ExchangedTimes(row.id, link.start, link.end))
    return sorted(changed, key=lambda change: change.by)


def _pruned(rows: Collection[Checkpoint]) -> list[ExchangedTimes]:
    """Return what later checkpoints tell of rewinds and promotions, which may be pruned: of the newest ranges their
    bounds, of all others no more than that they were."""
    records = [recorded for row in rows if (recorded := taken_back(row))]
    changed: dict[int, tuple[int | None, int | None]] = {recorded[TAKEN_BEFORE]: (None, None) for recorded in records}
    changed |= {recorded[TAKEN_BACK]: (recorded.get(TAKEN_START), recorded.get(TAKEN_END)) for recorded in records}
    return [ExchangedTimes(CheckpointId(by), *bounds) for by, bounds in changed.items()]
