"""An operator of somebody else, in one module: the first row of each key whose value reaches a limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pyarrow as pa

from weir import Operator, OperatorKind, PipelineError, Shapes, Stage, State, Subtask


class Reached(State):
    reached: bool = False


@dataclass(frozen=True, slots=True)
class Threshold(OperatorKind):
    """The first row of each key in which `column` is `limit` or more, by the stage's `order_by`."""

    kind: ClassVar[str] = "threshold"
    rules: ClassVar[str] = "limits"

    column: str
    limit: int

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        if self.column not in rows.names:
            raise PipelineError(
                f"The input of {stage.uid} has no column {self.column!r}.",
                where=f"stage {stage.uid}",
                next=f"Its columns are: {', '.join(rows.names)}.",
            )
        return Shapes.of(keys, Reached, rows)

    def build(self, subtask: Subtask) -> Operator:
        return Running(self, subtask)

    def meaning(self) -> dict[str, Any]:
        return {**(OperatorKind.meaning(self) or {}), "column": self.column, "limit": self.limit}

    @property
    def acts_on_rows_alone(self) -> bool:
        return True


class Running:
    """One subtask in one epoch."""

    rows_late = rows_deferred = 0
    closed_upto: int | None = None
    due: int | None = None
    swept: str | None = None
    has_timers: bool | None = None

    def __init__(self, rule: Threshold, subtask: Subtask) -> None:
        self._rule, self._by, self._rows = rule, subtask.by, subtask.rows()
        self._output = subtask.shapes.outputs["main"]

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        frame = pl.DataFrame(pl.from_arrow(rows.select([*self._by, self._rule.column]))).with_row_index("place")
        first = frame.filter(pl.col(self._rule.column) >= self._rule.limit).unique(self._by, keep="first")
        _, seen = self._rows.get(first.select(self._by))
        new = first.filter(~pl.Series(seen, dtype=pl.Boolean)).sort("place")
        if len(new):
            reached = pl.DataFrame({"reached": np.ones(len(new), bool)})
            self._rows.put(new.select(self._by), reached, np.ones(len(new), bool))
            yield "main", rows.take(new["place"].to_numpy()).select(self._output.names)

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        self._rows.barrier()
        return iter(())

    pause = barrier
