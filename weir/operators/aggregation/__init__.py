"""Running aggregates: the definition. `running` has what works on rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from state_ops.records.operator_stats import OperatorStats
from state_ops.rows.aggregates import Agg
from state_ops.rows.changes.retractions import ROWS
from state_ops.schema import evolution
from weir.definition import MAIN, Input, Operator, OperatorKind, Shapes, Source, Stage, Subtask
from weir.definition.change_feed import CHANGE_TYPE, COMMIT_TIME, EPOCH, VERSION
from weir.definition.column_lineage import before
from weir.operators import aggregate_columns


@dataclass(frozen=True, slots=True)
class Aggregation(OperatorKind):
    """Running aggregates per key, by output column; first and last by their `order_by`.

    Attributes:
        changes: What is handed out says by `_change_type` what became of a key's row.
    """

    kind: ClassVar[str] = "aggregate"
    rules: ClassVar[str] = "aggregates"
    slot: ClassVar[str] = "aggregation"

    aggregates: tuple[tuple[str, Agg], ...] = field()
    changes: bool = False

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        from weir.operators.aggregation.running import aggregation_shapes

        return aggregation_shapes(stage, self, rows, keys)

    def build(self, subtask: Subtask) -> Operator:
        from weir.operators.aggregation.running import AggregationOperator

        return AggregationOperator(self, subtask)

    def meaning(self) -> dict[str, Any]:
        return {"aggregates": aggregate_columns.recorded(self.aggregates)}

    @classmethod
    def recognizes(cls, meaning: Mapping[str, Any]) -> bool:
        return meaning.keys() == {"aggregates"}

    @classmethod
    def shown(cls, meaning: Mapping[str, Any]) -> str:
        return aggregate_columns.shown(meaning["aggregates"])

    @property
    def acts_on_rows_alone(self) -> bool:
        return True

    def hands_out_changes(self, stage: Stage, output: str) -> bool:
        return output == MAIN and self.changes

    def no_changes(self, stage: Stage, input: Input) -> str | None:
        whys = (agg.irrevocable(name) for name, agg in self.aggregates)
        return next(filter(None, whys), None) or self._by_time(stage, input)

    def _by_time(self, stage: Stage, input: Input) -> str | None:
        """Return why a row cannot be taken back that has another value than what takes it back; None where none has."""
        read = [("its key", column) for column in stage.key]
        read += [(f"{name} = {agg}", column) for name, agg in self.aggregates for column in agg.columns]
        for what, column in read if input.transform is None else ():
            given = before(input.columns, column)
            if given is not None and _says_when(input.origin, given):
                return f"{what} goes by {column}, which says when a change was: what takes a row back has another one"
        return None

    @property
    def takes_back(self) -> bool:
        return True

    def remembered(self, stage: Stage, recorded: OperatorStats, changes: bool) -> frozenset[str] | None:
        if not recorded.has_state or ROWS not in evolution.from_record(recorded.schema_history).arrow.names:
            return None
        return frozenset({*stage.key, *aggregate_columns.columns_read(self.aggregates), CHANGE_TYPE})

    @property
    def moments_of_changes(self) -> frozenset[str]:
        return frozenset({EPOCH} if self.changes else ())

    def mixes_rows(self) -> str:
        return "hands out aggregates, which come from many rows"

    def reads(self, stage: Stage) -> frozenset[str]:
        return frozenset({*stage.key, *stage.order_by, *aggregate_columns.columns_read(self.aggregates)})

    def clocked_output(self, stage: Stage) -> tuple[str, ...]:
        return (EPOCH,)

    @property
    def newest_by(self) -> str:
        return EPOCH

    def lineage(
        self, stage: Stage, columns: Sequence[str], inputs: Sequence[Sequence[str]], output: str
    ) -> dict[str, list[tuple[int, str]]]:
        if output != MAIN:
            return OperatorKind.lineage(self, stage, columns, inputs, output)
        return aggregate_columns.lineage(stage.key, self.aggregates, inputs[0], {})

    def texts(self) -> dict[str, str]:
        return aggregate_columns.texts(self.aggregates)


def _says_when(origin: Source | Stage, column: str) -> bool:
    """Return whether a column of changes is the time of the change, and not a part of the row."""
    if isinstance(origin, Source):
        return origin.hands_out_changes and column in (VERSION, COMMIT_TIME)
    if not origin.operator.hands_on:
        return column in origin.operator.moments_of_changes
    given = [(input.origin, before(input.columns, column)) for input in origin.inputs if input.transform is None]
    return any(name is not None and _says_when(of, name) for of, name in given)
