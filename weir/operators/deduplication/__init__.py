"""Deduplication: the definition. `running` has what works on rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from state_ops.records.acks import Ack
from state_ops.records.operator_stats import OperatorStats
from weir.definition import Finding, Operator, OperatorKind, Shapes, Stage, Subtask
from weir.definition.sink import Sink
from weir.operators.forgotten import EXPIRES, keys_forgotten_otherwise

SEEN = "first_seen"


@dataclass(frozen=True, slots=True)
class Deduplication(OperatorKind):
    """The first row of each key.

    Attributes:
        ttl: Microseconds after which a key is forgotten. None: never.
        on: The column whose event time that goes by. None: by processing time.
        late: The table that gets rows that are too old to tell.
    """

    kind: ClassVar[str] = "deduplicate"
    rules: ClassVar[str] = "rules of what is a duplicate"
    slot: ClassVar[str] = "deduplication"

    ttl: int | None
    on: str | None
    late: Sink | None = field()

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        from weir.operators.deduplication.running import deduplication_shapes

        return deduplication_shapes(stage, self, rows, keys)

    def build(self, subtask: Subtask) -> Operator:
        from weir.operators.deduplication.running import DeduplicationOperator

        return DeduplicationOperator(self, subtask)

    @property
    def time_column(self) -> str | None:
        return self.on

    @property
    def forgets(self) -> int | None:
        return self.ttl

    @property
    def indexes_keys(self) -> bool:
        return True

    def meaning(self) -> dict[str, Any]:
        return {"on": self.on}  # each key's state says when it ends: another ttl holds for new ones

    @classmethod
    def recognizes(cls, meaning: Mapping[str, Any]) -> bool:
        return meaning.keys() == {"on"}

    @classmethod
    def of_meaning(cls, meaning: Mapping[str, Any]) -> Deduplication:
        return cls(None, meaning["on"], None)

    @classmethod
    def shown(cls, meaning: Mapping[str, Any]) -> str:
        return f"the key, by event time in {meaning['on']}" if meaning["on"] else "the key, by the time of arrival"

    def changed(self, stage: Stage, recorded: OperatorStats, shapes: Shapes) -> Iterator[Finding]:
        late = ", and rows that are further than that behind the watermark are late" if self.on is not None else ""
        yield from keys_forgotten_otherwise(stage, recorded, late)

    def rows_duplicate(self, acks: Iterable[Ack]) -> int:
        return sum(ack.rows_in - ack.rows_out - ack.rows_late for ack in acks)

    def clocked_state(self, stage: Stage) -> tuple[str, ...]:
        return (SEEN, EXPIRES) if self.on is None else ()
