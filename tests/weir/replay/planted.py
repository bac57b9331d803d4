"""The small pipeline with a function that books twice."""

from __future__ import annotations

import polars as pl

from tests.recovery import small
from tests.tools.stages import altered
from weir import Epoch, Pipeline, ValueState, agg


def twice(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each amount counts twice."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    state.fold(rows, total=agg.sum("amount"))
    return rows.select("id", "at", "amount")


pipeline = Pipeline("small", (altered(small.accounts, function=twice),), max_parallelism=8)
