"""Two stages in a row, each of which counts and sums per key, for workers that are hosts of their own."""

import os
import time
from pathlib import Path

import polars as pl

from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, stage


class Totals(State):
    """Of one key."""

    rows: int = 0
    total: int = 0


@stage("by_id", source=files("{landing}/*.parquet", name="landing"), key="id", state=Totals)
def by_id(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Of the finer key; its rows go to the next stage alone. The rows say what this worker must not see, and what it
    waits for."""
    seen = [path for path in rows["hidden"].unique() if Path(path).exists()]
    if seen:
        raise AssertionError(f"a worker sees what it must not: {seen}")
    for gate in rows["gate"].drop_nulls().unique():
        Path(f"{gate}.{os.getpid()}").touch()
        while Path(gate).exists():
            time.sleep(0.02)
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows


@stage("by_group", source=by_id, key="group", state=Totals, sink=delta.append("grouped"))
def by_group(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Of the coarser one."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.select("id", "group", "amount")


pipeline = Pipeline("clustered", (by_id, by_group))
