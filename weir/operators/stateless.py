"""A stage without a key: rows in, rows out, of one input or of several, and nothing is remembered."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from state_ops.arrow import frames
from state_ops.schema.state_schema import StateSchema
from weir.definition import Epoch, Stage
from weir.operators.base import MAIN, Shapes, check_storable
from weir.operators.functions.function import TRIAL, called, fitted, handed_out, known_outputs, trying
from weir.operators.joins.sides import SIDE

_NOTHING = StateSchema(())


def stateless_shapes(stage: Stage, rows: pa.Schema) -> Shapes:
    """Return the schemas of a stage without a key; its function, if it has one, is tried on an empty table."""
    if stage.function is None:
        output = pa.schema([field for field in rows if field.name != SIDE])
        check_storable(output, f"stage {stage.uid}", "Cast it in its SQL, or in a transform")
        return Shapes(pa.schema([]), _NOTHING, {MAIN: output})
    none = Shapes(pa.schema([]), _NOTHING, {})
    outputs: dict[str, pa.Schema] = {}
    with trying(stage):
        for name, table in StatelessOperator(stage, none, TRIAL).process(rows.empty_table()):
            fitted(stage, table, outputs.setdefault(name, table.schema), of=name)
    return Shapes(pa.schema([]), _NOTHING, known_outputs(stage, outputs))


class StatelessOperator:
    """The operator of a stage without a key. It works on each batch by itself, and nothing waits for a barrier."""

    def __init__(self, stage: Stage, shapes: Shapes, epoch: Epoch) -> None:
        self._stage, self._shapes, self._epoch = stage, shapes, epoch
        self._convert = frames.converter(stage.function) if stage.function is not None else None
        self.rows_late = self.rows_deferred = 0
        self.closed_upto: int | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        if self._convert is None:
            yield MAIN, rows.drop_columns([SIDE]) if SIDE in rows.column_names else rows
            return
        assert self._stage.function is not None
        parts = called(self._stage, self._epoch, self._stage.function, self._convert, rows)
        yield from handed_out(self._stage, parts, self._shapes)

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        return iter(())

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        return iter(())
