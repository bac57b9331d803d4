"""A pipeline with a great many small states, to measure what an epoch uploads."""

import polars as pl

from weir import Epoch, Pipeline, State, ValueState, files, stage


class Counter(State):
    """Of one key."""

    changes: int = 0
    reading: float = 0.0
    label: str | None = None


@stage("counters", source=files("{landing}/*.parquet", name="landing"), key="id", state=Counter)
def counters(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> None:
    """Keep a key's newest reading and how often it changed; each key comes once an epoch."""
    before = state.get(rows)
    state.put(rows.with_columns(changes=before["changes"] + 1))


pipeline = Pipeline("counters", (counters,))
