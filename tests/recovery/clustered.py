"""Two stages in a row: each counts and sums, per key, what comes to it."""

import polars as pl

from pipelines.api import Epoch, Pipeline, State, ValueState, agg, delta, files, stage


class Counted(State):
    """Of one key."""

    rows: int = 0
    total: int = 0


@stage("by_id", source=files("{landing}/*.parquet", name="landing"), key="id", state=Counted)
def by_id(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Of the finer key; its rows go to the next stage alone."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows


@stage("by_group", source=by_id, key="group", state=Counted, sink=delta.append("grouped"))
def by_group(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Of the coarser one."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.select("id", "group", "amount")


pipeline = Pipeline("clustered", (by_id, by_group))
