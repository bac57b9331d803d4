"""A stage that hands on its rows, of one input or of several."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from state_ops.schema.state_schema import StateSchema
from weir.definition import MAIN, Shapes, Stage
from weir.operators.base import check_storable
from weir.operators.sides import SIDE


def unchanged_shapes(stage: Stage, rows: pa.Schema) -> Shapes:
    """Return the schemas of a stage that hands on its rows."""
    output = pa.schema([field for field in rows if field.name != SIDE])
    check_storable(output, f"stage {stage.uid}", "Cast it in its SQL, or in a transform")
    return Shapes(pa.schema([]), StateSchema(()), {MAIN: output})


class UnchangedOperator:
    """Hands on each batch by itself. Nothing waits for a barrier."""

    rows_late = rows_deferred = 0
    closed_upto: int | None = None
    due: int | None = None
    swept: str | None = None
    has_timers: bool | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        yield MAIN, rows.drop_columns([SIDE]) if SIDE in rows.column_names else rows

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        return iter(())

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        return iter(())
