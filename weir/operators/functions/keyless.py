"""A function of a stage without a key: it works on each batch by itself, and nothing is remembered."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from state_ops.arrow import frames
from state_ops.schema.state_schema import StateSchema
from weir.definition import Shapes, Stage, Subtask
from weir.operators.functions import Function
from weir.operators.functions.function import called, fitted, handed_out, known_outputs, trial_of, trying

_NO_KEY, _NOTHING = pa.schema([]), StateSchema(())


def keyless_shapes(stage: Stage, function: Function, rows: pa.Schema) -> Shapes:
    """Return the schemas of a stage without a key, whose function is tried on an empty table."""
    outputs: dict[str, pa.Schema] = {}
    with trying(stage):
        trial = KeylessOperator(function, trial_of(stage, Shapes(_NO_KEY, _NOTHING, {})))
        for name, table in trial.process(rows.empty_table()):
            fitted(stage, table, outputs.setdefault(name, table.schema), of=name)
    return Shapes(_NO_KEY, _NOTHING, known_outputs(stage, outputs))


class KeylessOperator:
    """A function over batches. Nothing waits for a barrier."""

    def __init__(self, function: Function, subtask: Subtask) -> None:
        self._stage, self._shapes, self._epoch = subtask.stage, subtask.shapes, subtask.epoch
        self._function, self._convert = function.function, frames.converter(function.function)
        self.rows_late = self.rows_deferred = 0
        self.closed_upto: int | None = None
        self.due: int | None = None
        self.swept: str | None = None
        self.has_timers: bool | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        parts = called(self._stage, self._epoch, self._function, self._convert, rows)
        yield from handed_out(self._stage, parts, self._shapes)

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        return iter(())

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        return iter(())
