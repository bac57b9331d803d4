"""Running aggregates: at each barrier, one row with the current values for every key that the epoch touched.

Batches are reduced to a row a key as they come; state is read and written once an epoch and key, at the barrier. What
does not fit into memory until then waits on the local disk (`state_ops.rows.spill`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.runtime.definition import Aggregation, Stage
from pipelines.runtime.operators.base import MAIN, Shapes, check_storable, refuse_clash, state_of, values_of
from pipelines.runtime.operators.filtered_rows import FilteredRows
from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.ids import CheckpointId
from state_ops.keyed.keyed_state import GROUP, VALUE_STATE
from state_ops.rows import key_aggregation
from state_ops.rows.distinct_values import DistinctValues
from state_ops.rows.resident_table import Residence
from state_ops.rows.row_store import Rows
from state_ops.rows.spill import Spill

EPOCH = "epoch"
_PARTIAL_ROWS = 500_000
_OUT_ROWS = 100_000


class AggregationOperator:
    """State: one value row per key, the fields of the aggregates; of `count_distinct`, the values as a map."""

    def __init__(
        self,
        stage: Stage,
        aggregation: Aggregation,
        shapes: Shapes,
        backend: Backend,
        epoch: CheckpointId,
        residence: Residence,
    ) -> None:
        self._stage, self._shapes = stage, shapes
        self._rows = Rows(backend, shapes.state, shapes.keys, VALUE_STATE, residence)
        self._epoch, self._where = epoch, f"aggregate {stage.uid}"
        self._by = [GROUP, *stage.key]
        self._filtered = FilteredRows(aggregation.aggregates, self._by, self._where)
        self._aggregates = self._filtered.aggregates
        self._distinct = DistinctValues(self._aggregates, shapes.collections, backend, shapes.keys)
        self._partials = key_aggregation.Partials(self._aggregates, self._by, self._where, _PARTIAL_ROWS)
        self._spill = Spill(residence.target, residence.groups)
        self.rows_late = self.rows_deferred = 0
        self.closed_upto: int | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        self._partials.add(self._filtered.frame(rows))
        if self._partials.full:
            self._spill.add(self._partials.take())
        return iter(())

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        if len(self._partials):
            rest = self._partials.take()
            if not len(self._spill):
                yield from self._handed_out([rest])
            else:
                self._spill.add(rest)
        for gathered in self._spill.take():
            yield from self._handed_out(gathered)
        self._distinct.barrier()
        self._rows.barrier()

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        return self.barrier()  # the current values of what this checkpoint has seen

    def _handed_out(self, gathered: list[pl.DataFrame]) -> Iterator[tuple[str, pa.Table]]:
        """All partials of some keys merged into state, and the rows of these keys. Too many for memory go there one
        after the other; their keys are read once more, to be handed out once."""
        if len(gathered) == 1 or not key_aggregation.have_gathered(gathered, _PARTIAL_ROWS, 1):
            for keys, rows in self._fold(key_aggregation.combined(self._aggregates, gathered, self._by, self._where)):
                yield from self._out(keys, rows)
            return
        touched = pl.concat([keys for some in gathered for keys, _ in self._fold(some)]).unique()
        for part in touched.iter_slices(_OUT_ROWS):
            yield from self._out(part, self._rows.get(part)[0])

    def _fold(self, gathered: pl.DataFrame) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
        """Merge partials into state, part by part: the keys, and their new rows."""
        for fresh in key_aggregation.parts(gathered, self._by):
            keys = fresh.select(self._by)
            old, _ = self._rows.get(keys)
            fresh = self._distinct.counted(fresh)
            new = key_aggregation.merged(self._aggregates, old, fresh, self._where)
            self._rows.put(keys, new, np.ones(len(new), bool), ascending=True)
            yield keys, new

    def _out(self, keys: pl.DataFrame, rows: pl.DataFrame) -> Iterator[tuple[str, pa.Table]]:
        frame = pl.concat([keys, rows], how="horizontal").select(
            *self._stage.key,
            *[agg.result(name) for name, agg in self._aggregates],
            pl.lit(self._epoch, pl.Int64).alias(EPOCH),
        )
        yield MAIN, frames.arrow(frame).cast(self._shapes.outputs[MAIN])


def aggregation_shapes(stage: Stage, aggregation: Aggregation, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """The output: key columns, the aggregates, and the epoch, an int64."""
    where = f"aggregate {stage.uid}"
    refuse_clash(stage, {EPOCH}, "the column that an aggregate adds")
    state = state_of(aggregation.aggregates, rows, where)
    values = values_of(stage, aggregation.aggregates, rows, state)
    fields = frames.from_arrow(state.arrow.empty_table())
    results = frames.arrow(fields.select([agg.result(name) for name, agg in aggregation.aggregates])).schema
    output = pa.schema([*keys, *results, pa.field(EPOCH, pa.int64())])
    check_storable(output, where, "Cast the column that it is made from in transform=")
    return Shapes(keys, state, {MAIN: output}, values)
