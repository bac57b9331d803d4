"""`where=` of aggregates: which rows of a batch each of them takes.

The condition is evaluated as Spark evaluates it, without Spark (`weir.where`). An aggregate with
one is an aggregate of a column of its own, which is null in the rows of which the condition is false or null: that is
what SQL's FILTER means, since nulls are left out of all aggregates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import InputError, PipelineError
from state_ops.rows.aggregates import Agg
from weir.where import Fails, Refused, compiled

_REMEDY = (
    "The condition of an aggregate is evaluated without Spark; the page where of the reference lists what it may have. "
    "Make a column of it in the stage's select= or transform=, and ask for that."
)


class FilteredRows:
    """The rows that aggregates with conditions are made of, batch by batch.

    Attributes:
        aggregates: Without conditions, over the columns of `frame`.
    """

    def __init__(self, aggregates: Sequence[tuple[str, Agg]], by: Sequence[str], where: str) -> None:
        """Fix what is read of a batch.

        Args:
            by: The columns that rows are grouped by.
            where: For errors.
        """
        self.aggregates = tuple((name, agg.filtered(name)) for name, agg in aggregates)
        self._filtered = [(name, agg) for name, agg in aggregates if agg.where is not None]
        self._where = where
        self._given = _distinct([*by, *(column for _, agg in aggregates for column in agg.columns)])
        self._kept = _distinct([*by, *(column for _, agg in self.aggregates for column in agg.columns)])

    def frame(self, rows: pa.Table) -> pl.DataFrame:
        """Return the columns that rows are grouped by, and those that the aggregates are of.

        Raises:
            InputError: A condition cannot be evaluated over a row.
        """
        frame = frames.from_arrow(rows.select(self._given))
        if not self._filtered:
            return frame
        masks: dict[str, pl.Series] = {}  # aggregates may share a condition
        columns = []
        for name, agg in self._filtered:
            assert agg.where is not None
            if agg.where not in masks:
                masks[agg.where] = pl.Series(self._mask(name, agg, rows))
            values = pl.lit(True) if agg.column is None else pl.col(agg.column)
            columns.append(pl.when(masks[agg.where]).then(values).alias(agg.filtered(name).columns[0]))
        return frame.with_columns(columns).select(self._kept)

    def _mask(self, name: str, agg: Agg, rows: pa.Table) -> np.ndarray:
        assert agg.where is not None
        try:
            return compiled(agg.where, rows.schema).mask(rows)
        except Fails as error:
            raise InputError(
                f"{name} = {agg} fails over a row: {error}.",
                where=self._where,
                next="Correct the rows, or leave them out by the stage's where=; state and tables are as they were.",
            ) from error
        except Refused as error:
            raise InputError(
                f"{name} = {agg} met a row that it cannot tell of: {error}.", where=self._where, next=_REMEDY
            ) from error


def check_condition(name: str, agg: Agg, rows: pa.Schema, where: str) -> None:
    """Raise PipelineError unless the condition of an aggregate can be evaluated over such rows."""
    if agg.where is None:
        return
    try:
        compiled(agg.where, rows)
    except Refused as error:
        raise PipelineError(f"{name} = {agg}, but {error}.", where=where, next=_REMEDY) from error


def _distinct(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))
