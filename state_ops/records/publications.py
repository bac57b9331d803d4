"""Publications, and which committed checkpoints' rows a sink lacks, as far as the registry knows.

The registry records a publication after the sink has it, so a checkpoint that is listed here may be in its sink
already. A checkpoint that a rewind has abandoned is not listed: nobody publishes it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import Checkpoint, abandoned
from state_ops.records.sink_link import SinkLink

_MOST_LACKING = 50  # ids that a link keeps: newer ones are the ones that somebody can still rewind to


@dataclass(frozen=True, slots=True)
class Publication:
    """One checkpoint's output became visible in one sink: in a table as this Delta version, else in another kind of
    sink.

    Attributes:
        ms: How long the publishing took, in milliseconds.
    """

    checkpoint_id: CheckpointId
    sink: str
    delta_version: int | None
    files: int
    rows: int
    published_at: datetime
    ms: float
    digest: str | None = field(default=None, compare=False)


def unpublished(
    checkpoints: Sequence[Checkpoint], publications: Sequence[Publication]
) -> dict[str, tuple[CheckpointId, ...]]:
    """Return, by sink, the ids of the checkpoints whose rows it lacks, oldest first; no entry for a sink that has all.

    Args:
        checkpoints: All that are retained.
        publications: All that the registry records.
    """
    recorded = {(row.checkpoint_id, row.sink) for row in publications}
    left = abandoned(checkpoints)
    lacking: dict[str, tuple[CheckpointId, ...]] = {}
    for row in sorted(checkpoints, key=lambda row: row.id):
        for sink, link in row.sinks.items():
            if link.id == row.id and row.id not in left and (row.id, sink) not in recorded:
                lacking[sink] = (*lacking.get(sink, ()), row.id)
    return lacking


def before_first(checkpoints: Sequence[Checkpoint], sink: str, lacking: Sequence[CheckpointId]) -> CheckpointId | None:
    """Return the checkpoint that a sink has for certain: the one that was published before the first that it lacks.

    Args:
        lacking: What `unpublished` says of the sink; at least one.
    """
    return next(row.sinks[sink].before for row in checkpoints if row.id == lacking[0])


def never_published(head: Checkpoint, to: Checkpoint) -> Mapping[str, CheckpointId]:
    """Return, by sink, the newest checkpoint up to `to` whose rows the sink never got because a rewind took it back."""
    newest = {sink: to.published(sink) for sink in head.sinks}
    return {sink: id for sink, id in newest.items() if id is not None and id in head.sinks[sink].lacks}


def lacks(link: SinkLink, ids: Sequence[CheckpointId]) -> SinkLink:
    """Return a link of a rewind that also records which abandoned checkpoints a sink never got."""
    if not ids:
        return link
    return link.updated(lacks=sorted({*link.lacks, *ids})[-_MOST_LACKING:])
