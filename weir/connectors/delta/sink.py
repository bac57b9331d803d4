"""Delta tables as sinks: their definitions. `publishers` is imported when one of them is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from state_ops.errors import PipelineError
from weir.connectors.sink import Capabilities, Publisher, Sink, SinkOpening
from weir.connectors.source import ADD, FIX

APPEND, UPSERT, PARTITIONS, WHERE = "append", "upsert", "partitions", "where"  # as checkpoints record them
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
        from weir.connectors.delta.publishers import AppendPublisher

        return AppendPublisher.of(self, opening)

    def _recorded(self, by: str, where: str | None = None) -> dict[str, Any]:
        facts: dict[str, Any] = {name: list(getattr(self, name, ())) for name in _LISTS}
        facts |= {"where": where, "at": self.at, "evolve": self.evolve if self.evolve != FIX else None}
        return {"as": by, **{name: value for name, value in facts.items() if value}}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpsertSink(DeltaSink):
    """A Delta table with one row per key: the newest.

    Attributes:
        key: Columns that are null in no row.
        order_by: By which the newest row of a key is found within an epoch. None are needed where the key contains the
            stage's: then it is the one that was handed out last.
    """

    key: tuple[str, ...]
    order_by: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "delta"

    @property
    def capabilities(self) -> Capabilities:
        return self._table(newest_of=self.key, newest_by=self.order_by)

    def publishes_by(self, resolve: Callable[[str], str]) -> dict[str, Any]:  # noqa: ARG002
        return self._recorded(UPSERT)

    def open(self, opening: SinkOpening) -> Publisher:
        from weir.connectors.delta.publishers import UpsertPublisher

        return UpsertPublisher.of(self, opening)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceSink(DeltaSink):
    """A Delta table with the newest rows: an epoch's replace the partitions that they have, or what a condition keeps.

    Attributes:
        where: The condition, which every row satisfies. None: partitions are replaced.
    """

    where: str | None = None

    @property
    def kind(self) -> str:
        return "delta"

    @property
    def capabilities(self) -> Capabilities:
        return self._table(takes_files=True, replaces=True, replaces_where=self.where)

    def publishes_by(self, resolve: Callable[[str], str]) -> dict[str, Any]:  # noqa: ARG002
        return self._recorded(PARTITIONS if self.where is None else WHERE, self.where)

    def open(self, opening: SinkOpening) -> Publisher:
        from weir.connectors.delta.publishers import ReplacePublisher

        return ReplacePublisher.of(self, opening)


def recorded_table(name: str, how: Mapping[str, Any]) -> DeltaSink:
    """Return the sink of a table as a checkpoint has recorded it.

    Args:
        how: What `publishes_by` returned then.

    Raises:
        KeyError: It is of no kind that is known here.
    """
    common: dict[str, Any] = {
        "name": name,
        "at": how.get("at"),
        "partition_by": tuple(how.get("partition_by", ())),
        "evolve": how.get("evolve", FIX),
    }
    if how["as"] == UPSERT:
        return UpsertSink(**common, key=tuple(how["key"]), order_by=tuple(how.get("order_by", ())))
    if how["as"] in (PARTITIONS, WHERE):
        return ReplaceSink(**common, where=how.get("where"))
    return DeltaSink(**common)
