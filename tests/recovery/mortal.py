"""A pipeline in which a worker dies once, in the middle of a batch, as the system's memory killer would end it."""

import os
import signal
from pathlib import Path

import polars as pl

from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, stage


class Count(State):
    """Of one key."""

    rows: int = 0


@stage(
    "counts", source=files("{landing}/*.parquet", name="landing"), key="id", state=Count, sink=delta.append("counted")
)
def counts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Count a key's rows; whoever finds a fuse lights it."""
    state.fold(rows, rows=agg.count())
    for fuse in rows["fuse"].drop_nulls().unique():
        if Path(fuse).exists():
            Path(fuse).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return rows.select("id")


pipeline = Pipeline("mortal", (counts,))
