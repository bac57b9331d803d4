"""A checkpoint's record of a sink: where the sink's chain of published checkpoints stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from state_ops.ids import CheckpointId
from state_ops.records.recorded import Recorded


@dataclass(frozen=True, slots=True)
class SinkLink(Recorded):
    """A checkpoint's record of one sink, stored under the sink's name.

    Attributes:
        id: The newest checkpoint, up to the one that has the record, with output for the sink.
        before: The one before that; None: there was none.
        kind: Of a sink that is no table, what it is; its rows are staged below `outputs/`. None: a table.
        taken: Pairs of ids: the rows after the first and up to the second were taken back from a sink that is no table,
            and do not come again.
        delivered: Whether its rows were there before the commit, because they are delivered at least once.
        to: Of a rewind or a promotion, the checkpoint whose rows are the newest that stay; None: no rows stay.
        at: The Delta version on which that was decided.
        column, start, end: Of the promotion of a range instead, the column of its event time and its bounds, in
            microseconds since 1970 UTC.
        branch: The id of the branch that was promoted.
        lacks: Checkpoints that a rewind took back before their rows were published: the sink never got them.
        how: How its rows are to be published, whatever the code says by then (`weir.sinks.recorded_sink`);
            None: as the code says.
    """

    id: CheckpointId
    before: CheckpointId | None
    kind: str | None = None
    taken: list[list[int]] = field(default_factory=list)
    delivered: bool = False
    to: CheckpointId | None = None
    at: int = 0
    column: str | None = None
    start: int = 0
    end: int = 0
    branch: str | None = None
    lacks: list[int] = field(default_factory=list)
    how: dict[str, Any] | None = None
    names: tuple[str, ...] = field(default=("id", "before"), kw_only=True)

    @property
    def takes_back(self) -> bool:
        """True if rows after `to` were taken back from the sink with this very record."""
        return "to" in self.names

    def following(self, parent: SinkLink | None) -> SinkLink:
        """Return the link with what the sink's whole chain keeps from its parent's link."""
        kept = {name: getattr(parent, name) for name in ("taken", "lacks") if parent is not None}
        return self.updated(**{name: ids for name, ids in kept.items() if ids})
