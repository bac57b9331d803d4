"""Delta tables whose rows replace others: their definitions. `publishers` is imported when one of them is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weir.definition.delta_sink import DeltaSink
from weir.definition.sink import Capabilities, Publisher, SinkOpening
from weir.definition.source import FIX

UPSERT, PARTITIONS, WHERE = "upsert", "partitions", "where"  # as checkpoints record them


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
