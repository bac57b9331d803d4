"""Running aggregates: at each barrier, one row with the current values for every key that the epoch touched, or what
became of that row.

Batches are reduced to a row a key as they come; state is read and written once an epoch and key, at the barrier. What
does not fit into memory until then waits on the local disk (`state_ops.rows.spill`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.runtime.connectors.delta_sink import (
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
from pipelines.runtime.definition import Aggregation, Stage
from pipelines.runtime.operators.base import MAIN, Shapes, check_storable, refuse_clash, state_of, values_of
from pipelines.runtime.operators.filtered_rows import FilteredRows
from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.ids import CheckpointId
from state_ops.keyed.keyed_state import GROUP, VALUE_STATE
from state_ops.rows import key_aggregation, retractions
from state_ops.rows.distinct_values import DistinctValues
from state_ops.rows.resident_table import Residence
from state_ops.rows.retractions import Retractions
from state_ops.rows.row_store import PRESENT, Rows
from state_ops.rows.spill import Spill

_PARTIAL_ROWS = 500_000
_OUT_ROWS = 100_000
_NEW = "__weir_new_"
_KINDS = ("", *CHANGES)  # of a row that is not handed out, and of those that are


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
        self._aggregation, self._shapes = aggregation, shapes
        self._rows = Rows(backend, shapes.state, shapes.keys, VALUE_STATE, residence)
        self._epoch, self._where = epoch, f"aggregate {stage.uid}"
        self._by = [GROUP, *stage.key]
        retracts = retractions.ROWS in shapes.state.arrow.names
        grouped = [*self._by, CHANGE_TYPE] if retracts else self._by
        self._filtered = FilteredRows(aggregation.aggregates, grouped, self._where)
        self._aggregates = self._filtered.aggregates
        self._retractions = Retractions(self._aggregates, shapes.state) if retracts else None
        if self._retractions is not None:
            self._aggregates = self._retractions.aggregates
        self._distinct = DistinctValues(self._aggregates, shapes.collections, backend, shapes.keys)
        self._partials = key_aggregation.Partials(self._aggregates, self._by, self._where, _PARTIAL_ROWS)
        self._spill = Spill(residence.target, residence.groups, stage.key)
        self._paused = False
        self.rows_late = self.rows_deferred = 0
        self.closed_upto: int | None = None

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        if self._retractions is not None:
            check_changes(rows, self._where)
        frame = self._filtered.frame(rows)
        if self._retractions is not None:
            frame = self._retractions.frame(frame, self._by, pl.col(CHANGE_TYPE).is_in(TAKEN_BACK))
        self._partials.add(frame)
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
        self._paused = True
        return self.barrier()  # the current values of what this checkpoint has seen

    def _handed_out(self, gathered: list[pl.DataFrame]) -> Iterator[tuple[str, pa.Table]]:
        """All partials of some keys merged into state, and the rows of these keys. Too many for memory go there one
        after the other; their keys are read once more, to be handed out once."""
        if len(gathered) == 1 or not key_aggregation.have_gathered(gathered, _PARTIAL_ROWS, 1):
            whole = key_aggregation.combined(self._aggregates, gathered, self._by, self._where)
            for before, rows in self._fold(whole, self._stay):
                yield from self._out(before, rows)
            return
        folded = [before for some in gathered for before, _ in self._fold(some, _all)]
        for before in pl.concat(folded).unique(self._by, keep="first", maintain_order=True).iter_slices(_OUT_ROWS):
            keys = before.select(self._by)
            rows, _ = self._rows.get(keys)
            if not (stay := self._stay(keys, rows)).all():
                self._rows.put(keys, rows, stay)
            yield from self._out(before, rows)

    def _fold(self, gathered: pl.DataFrame, stay: _Stay) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
        """Merge partials into state, part by part: the keys, with the state that they had if that is needed, and their
        new state.

        Args:
            stay: Which keys are kept with such state.
        """
        for fresh in key_aggregation.parts(gathered, self._by):
            keys = fresh.select(self._by)
            old, existed = self._rows.get(keys)
            fresh = self._distinct.counted(fresh)
            new = key_aggregation.merged(self._aggregates, old, fresh, self._where)
            self._rows.put(keys, new, stay(keys, new), ascending=True)
            if self._aggregation.changes:
                keys = pl.concat([keys, old.with_columns(pl.Series(PRESENT, existed))], how="horizontal")
            yield keys, new

    def _stay(self, keys: pl.DataFrame, rows: pl.DataFrame) -> np.ndarray:
        """bool[n], the keys that are kept: those that have a row. Without changes, none goes."""
        if self._retractions is None:
            return _all(keys, rows)
        if self._paused:
            return retractions.unbalanced(rows)
        return retractions.left(keys.drop(GROUP), rows, self._where)

    def _has_row(self, rows: pl.DataFrame) -> np.ndarray:
        """bool[n], the keys whose state, if there is some, is that of a row."""
        return _all(rows, rows) if self._retractions is None else retractions.has_rows(rows)

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
        """The aggregates of keys, by their state."""
        return rows.select(agg.result(name) for name, agg in self._filtered.aggregates)


_Stay = Callable[[pl.DataFrame, pl.DataFrame], np.ndarray]


def _all(keys: pl.DataFrame, _: pl.DataFrame) -> np.ndarray:
    return np.ones(len(keys), bool)


def _changes(
    keys: pl.DataFrame, old: pl.DataFrame, existed: np.ndarray, new: pl.DataFrame, exists: np.ndarray
) -> pl.DataFrame:
    """The rows of keys with what became of them, a key's old row directly before its new one.

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
    """The output: key columns, the aggregates, and the epoch, an int64."""
    where = f"aggregate {stage.uid}"
    refuse_clash(stage, {EPOCH}, "the column that an aggregate adds")
    state = state_of(aggregation.aggregates, rows, where)
    if aggregation.changes or CHANGE_TYPE in rows.names:
        refuse_clash(stage, {CHANGE_TYPE}, "the column that says what became of a row")
    if CHANGE_TYPE in rows.names:
        state = retractions.state_of(aggregation.aggregates, rows, where)
    values = values_of(stage, aggregation.aggregates, rows, state)
    fields = frames.from_arrow(state.arrow.empty_table())
    results = frames.arrow(fields.select([agg.result(name) for name, agg in aggregation.aggregates])).schema
    output = pa.schema([*keys, *results, pa.field(EPOCH, pa.int64())])
    if aggregation.changes:
        output = output.append(pa.field(CHANGE_TYPE, pa.string()))
    check_storable(output, where, "Cast the column that it is made from in select= or transform=")
    return Shapes(keys, state, {MAIN: output}, values)
