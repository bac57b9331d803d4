"""Running aggregates: at each barrier, one row with the current values for every key that the epoch touched, or what
became of that row.

Batches are reduced to a row a key as they come; state is read and written once an epoch and key, at the barrier
(`state_ops.rows.epoch_fold`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.keyed.keyed_state import GROUP, VALUE_STATE
from state_ops.rows import distinct_values, key_aggregation
from state_ops.rows.aggregates import Agg
from state_ops.rows.changes import retractions, value_counts
from state_ops.rows.changes.retractions import Retractions
from state_ops.rows.changes.value_counts import ValueCounts, value_sets
from state_ops.rows.distinct_values import DistinctValues
from state_ops.rows.epoch_fold import EpochFold, everything
from state_ops.rows.resident_table import Residence
from state_ops.rows.row_store import PRESENT, RowStore
from state_ops.rows.spill import Spill
from weir.definition import MAIN, Shapes, Stage, Subtask
from weir.definition.change_feed import (
    CHANGE_TYPE,
    CHANGES,
    DELETE,
    EPOCH,
    INSERT,
    TAKEN_BACK,
    UPDATE,
    UPDATE_BEFORE,
    check_changes,
)
from weir.operators.aggregation import Aggregation
from weir.operators.base import check_storable, refuse_clash, state_of, values_of
from weir.operators.filtered_rows import FilteredRows

_PARTIAL_ROWS = 500_000
_OUT_ROWS = 100_000
_NEW = "__weir_new_"
_KINDS = ("", *CHANGES)  # of a row that is not handed out, and of those that are


class AggregationOperator:
    """State: one value row per key, the fields of the aggregates; of `count_distinct`, and of what goes by values over
    changes, the values as a map."""

    def __init__(self, aggregation: Aggregation, subtask: Subtask) -> None:
        stage, shapes, backend, residence = subtask.stage, subtask.shapes, subtask.backend, subtask.residence
        self._aggregation, self._shapes = aggregation, shapes
        self._epoch, self._where = subtask.checkpoint, f"aggregate {stage.uid}"
        self._by = [GROUP, *stage.key]
        retracts = retractions.ROWS in shapes.state.arrow.names
        grouped = [*self._by, CHANGE_TYPE] if retracts else self._by
        self._filtered = FilteredRows(aggregation.aggregates, grouped, self._where)
        self._aggregates = partials = self._filtered.aggregates
        self._retractions: Retractions | None = None
        if retracts:
            counts = self._value_counts(backend, residence)
            self._retractions = Retractions(self._aggregates, shapes.state, self._by, counts)
            self._aggregates, partials = self._retractions.aggregates, self._retractions.partials
        self._distinct = DistinctValues(self._aggregates, () if retracts else shapes.collections, backend, shapes.keys)
        self._rows = RowStore(backend, shapes.state, shapes.keys, VALUE_STATE, residence)
        spill = Spill(residence.target, residence.groups, stage.key)
        self._fold = EpochFold(partials, self._by, self._rows, spill, self._where, _PARTIAL_ROWS, _OUT_ROWS)
        self._paused = False
        self.rows_late = self.rows_deferred = 0
        self.closed_upto: int | None = None
        self.due: int | None = None
        self.swept: str | None = None
        self.has_timers: bool | None = None

    def _value_counts(self, backend: Backend, residence: Residence) -> list[ValueCounts]:
        """Return the counts of each set of values that aggregates over changes need."""
        counts: list[ValueCounts] = []
        for values, kept in zip(value_sets(self._aggregation.aggregates), self._shapes.collections, strict=True):

            def new_fold(
                sums: Sequence[tuple[str, Agg]], by: Sequence[str], rows: RowStore, fixed: Sequence[pl.Expr]
            ) -> EpochFold:
                spill = Spill(residence.target, residence.groups, by[1:], f"spill-{len(counts)}")
                return EpochFold(sums, by, rows, spill, self._where, _PARTIAL_ROWS, _OUT_ROWS, fixed)

            counts.append(ValueCounts(values, kept, backend, self._shapes.keys, new_fold, self._where))
        return counts

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        if self._retractions is not None:
            check_changes(rows, self._where)
        frame = self._filtered.frame(rows)
        if self._retractions is not None:
            frame = self._retractions.frame(frame, pl.col(CHANGE_TYPE).is_in(TAKEN_BACK))
        self._fold.add(frame)
        return iter(())

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        if self._retractions is not None:
            for turned in self._retractions.turned(judge=not self._paused):
                self._fold.add(turned)
        for before, rows in self._fold.folded(self._merged, self._stay, keep=self._aggregation.changes):
            yield from self._out(before, rows)
        self._distinct.barrier()
        self._rows.barrier()

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        self._paused = True
        return self.barrier()  # the current values of what this checkpoint has seen

    def _merged(self, keys: pl.DataFrame, old: pl.DataFrame, fresh: pl.DataFrame) -> pl.DataFrame:
        """Return the new state of keys, whose partials are merged into the old one."""
        fresh = self._distinct.counted(fresh)
        new = key_aggregation.merged(self._aggregates, old, fresh, self._where)
        return new if self._retractions is None else self._retractions.settled(keys, fresh, new)

    def _stay(self, keys: pl.DataFrame, rows: pl.DataFrame) -> np.ndarray:
        """Return bool[n], the keys that are kept: those that have a row. Without changes, all are kept."""
        if self._retractions is None:
            return everything(keys, rows)
        if self._paused:
            return self._retractions.unbalanced(rows)
        return self._retractions.left(keys, rows, self._where)

    def _has_row(self, rows: pl.DataFrame) -> np.ndarray:
        """Return bool[n], the keys whose state, if there is some, is that of a row."""
        return everything(rows, rows) if self._retractions is None else retractions.has_rows(rows)

    def _out(self, before: pl.DataFrame, rows: pl.DataFrame) -> Iterator[tuple[str, pa.Table]]:
        """Hand out what became of keys: their values, or the changes of these.

        Args:
            before: As `_fold` gives it.
            rows: The new state.
        """
        keys, values = before.select(self._by), self._values(rows)
        frame = pl.concat([keys, values], how="horizontal")
        if self._aggregation.changes:
            existed = before[PRESENT].to_numpy() & self._has_row(before)
            frame = _changes(keys, self._values(before), existed, values, self._has_row(rows))
        frame = frame.with_columns(pl.lit(self._epoch, pl.Int64).alias(EPOCH))
        names = self._shapes.outputs[MAIN].names
        yield MAIN, frames.arrow(frame.select(names)).cast(self._shapes.outputs[MAIN])

    def _values(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the aggregates of keys, by their state."""
        return rows.select(agg.result(name) for name, agg in self._filtered.aggregates)


def _changes(
    keys: pl.DataFrame, old: pl.DataFrame, existed: np.ndarray, new: pl.DataFrame, exists: np.ndarray
) -> pl.DataFrame:
    """Return the rows of keys with what became of them, a key's old row directly before its new one.

    Args:
        existed: bool[n], whether it had a row.
        exists: bool[n], whether it has one.
    """
    differs = pl.any_horizontal(pl.col(name).ne_missing(pl.col(_NEW + name)) for name in old.columns)
    changed = pl.concat([old, new.rename(lambda name: _NEW + name)], how="horizontal").select(differs).to_series()
    revised = existed & exists & changed.to_numpy()
    kinds = np.stack(
        [
            np.where(revised, _KINDS.index(UPDATE_BEFORE), np.where(existed & ~exists, _KINDS.index(DELETE), 0)),
            np.where(revised, _KINDS.index(UPDATE), np.where(~existed & exists, _KINDS.index(INSERT), 0)),
        ],
        axis=1,
    ).ravel()
    at = np.arange(2 * len(keys)).reshape(2, -1).T.ravel()  # of each row, its place among the old and then the new ones
    both = pl.concat([pl.concat([keys, rows], how="horizontal") for rows in (old, new)])
    shown = np.flatnonzero(kinds)
    return both[at[shown]].with_columns(pl.Series(CHANGE_TYPE, np.array(_KINDS)[kinds[shown]], pl.String))


def aggregation_shapes(stage: Stage, aggregation: Aggregation, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """Return the output: key columns, the aggregates, and the epoch, an int64."""
    where = f"aggregate {stage.uid}"
    refuse_clash(stage, {EPOCH}, "the column that an aggregate adds")
    state = state_of(aggregation.aggregates, rows, where)
    if aggregation.changes or CHANGE_TYPE in rows.names:
        refuse_clash(stage, {CHANGE_TYPE}, "the column that says what became of a row")
    if CHANGE_TYPE in rows.names:
        state = retractions.state_of(aggregation.aggregates, rows, where)
    maps = value_counts.collections if CHANGE_TYPE in rows.names else distinct_values.collections
    values = values_of(stage, aggregation.aggregates, rows, state, maps)
    fields = frames.from_arrow(state.arrow.empty_table())
    results = frames.arrow(fields.select([agg.result(name) for name, agg in aggregation.aggregates])).schema
    output = pa.schema([*keys, *results, pa.field(EPOCH, pa.int64())])
    if aggregation.changes:
        output = output.append(pa.field(CHANGE_TYPE, pa.string()))
    check_storable(output, where, "Cast the column that it is made from in select= or transform=")
    return Shapes(keys, state, {MAIN: output}, values)
