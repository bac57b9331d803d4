"""A Delta table to which rows are appended: what a branch writes, and where rows are set aside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from state_ops.errors import PipelineError
from weir.definition.sink import Capabilities, Publisher, Sink, SinkOpening
from weir.definition.source import ADD, FIX

APPEND = "append"  # as checkpoints record it
_LISTS = ("key", "order_by", "partition_by")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSink(Sink):
    """A Delta table to which rows are appended, and that only Weir writes.

    Attributes:
        name: The table's name, and its directory below the pipeline's `tables/`.
        event_time: The timestamp or date column by which its rows belong to a day. None: the window's start, or the
            source's event time.
        partition_by: Columns of which each file has one value, and readers skip files by it.
        evolve: Columns that rows have and the table has not are refused ("fix") or added to it ("add").
        at: Where it lies instead: a directory or a URI, with {placeholders} from the configuration. It may be there
            already.
        descriptions: By column, what it is, for people. They count for nothing else.
    """

    event_time: str | None = None
    partition_by: tuple[str, ...] = ()
    at: str | None = None
    evolve: str = FIX
    descriptions: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.evolve not in (FIX, ADD):
            raise PipelineError(
                f"evolve={self.evolve!r} is no policy.", where=f"table {self.name}", next=f'Say "{FIX}" or "{ADD}".'
            )

    @property
    def stays(self) -> None:
        return None

    @property
    def capabilities(self) -> Capabilities:
        return self._table(takes_files=True)

    def _table(self, **more: Any) -> Capabilities:
        return Capabilities(
            has_versions=True,
            partition_by=self.partition_by,
            evolves=self.evolve == ADD,
            event_time=self.event_time,
            at=self.at,
            descriptions=self.descriptions,
            **more,
        )

    def publishes_by(self, resolve: Callable[[str], str]) -> dict[str, Any]:  # noqa: ARG002
        return self._recorded(APPEND)

    def open(self, opening: SinkOpening) -> Publisher:
        assert opening.table is not None, "a definition knows no publisher of its own"
        return opening.table(self, opening)

    def _recorded(self, by: str, where: str | None = None) -> dict[str, Any]:
        facts: dict[str, Any] = {name: list(getattr(self, name, ())) for name in _LISTS}
        facts |= {"where": where, "at": self.at, "evolve": self.evolve if self.evolve != FIX else None}
        return {"as": by, **{name: value for name, value in facts.items() if value}}
