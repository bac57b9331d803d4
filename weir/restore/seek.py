"""Seek: a source is read on from somewhere else, while state and tables stay as they are.

    1 2 3 4              4 is the newest
    1 2 3 4 5            5 = 4 with another position of one source. The commit of its row decides
    1 2 3 4 5 6          6 reads from there

What lies between is never read, or is read once more: rows that are read twice count twice, unless what they change is
the same again. A rewind is what takes state and tables back too. Watermarks do not go back, so rows of long ago are
late where lateness matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any

from state_ops.errors import ConfigurationError
from state_ops.facts import HIDDEN, Facts, Named, fact
from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import SEEK, Checkpoint
from weir.definition import Pipeline
from weir.definition.source import Position
from weir.ownership.derived_checkpoint import commit, unchanged
from weir.ownership.ownership import Ownership
from weir.ownership.pipeline_storage import open_storage, readers
from weir.settings.configuration import Settings
from weir.sources.reader import SourceReader


@dataclass(frozen=True, slots=True)
class SeekPlan(Facts):
    """The consequences of a seek.

    Attributes:
        head: The newest checkpoint.
        source: The source's name.
        was: Its position now.
        then: Its position afterwards.
        waits: How many rows wait behind that; None: nobody knows.
        checkpoint: The seek's own; None: a dry run.
    """

    head: Checkpoint
    source: str
    was: Annotated[Position | None, HIDDEN]
    then: Annotated[dict[str, Any], HIDDEN]
    waits: int | None
    checkpoint: CheckpointId | None = None

    @property
    @fact
    def from_at(self) -> Annotated[Position | None, Named("from")]:
        """The position up to which it has been read; null: nowhere."""
        return self.was["at"] if self.was is not None else None

    @property
    @fact
    def to(self) -> Position:
        """The position from which it goes on."""
        at: Position = self.then["at"]
        return at


def plan(pipeline: Pipeline, settings: Settings, source: str, to: str | datetime | Position) -> SeekPlan:
    """Return the plan of a seek. It only reads.

    Args:
        to: "earliest", "latest", a time, or a position as the connector says it.

    Raises:
        ConfigurationError: There is no such source, it cannot be sought, or the pipeline has no checkpoint.
    """
    _, registry = open_storage(pipeline, settings)
    sources = readers(pipeline, settings)
    if source not in sources:
        raise ConfigurationError(
            f"{pipeline.title} has no source {source!r}.", next=f"Its sources: {', '.join(sources)}."
        )
    return _planned(pipeline, sources[source], registry.head(), to)


def _planned(
    pipeline: Pipeline, reader: SourceReader, head: Checkpoint | None, to: str | datetime | Position
) -> SeekPlan:
    if head is None:
        raise ConfigurationError(
            f"{pipeline.title} has no checkpoint yet.",
            next="Say where it begins in its code: start=... of the source.",
        )
    name = reader.source.name
    was = head.offsets.get(name)
    then = reader.sought(was, to)
    return SeekPlan(head, name, was, then, reader.lag(then).rows)


def carry_out(owner: Ownership, source: str, to: str | datetime | Position, reason: str = "") -> Checkpoint:
    """Commit the checkpoint with the other position, as the owner; returns it. Raises as `plan`."""
    context = owner.context
    decided = _planned(context.pipeline, context.readers[source], context.registry.head(), to)
    head = decided.head
    base = replace(head, offsets={**head.offsets, source: decided.then})
    what = f"{source} is read from {to if isinstance(to, str) else decided.then['at']}"
    return commit(
        context, base, owner.begin(head), unchanged(context, head), kind=SEEK, what=what, reason=reason,
        head=head, parent=head.id,
    )  # fmt: skip
