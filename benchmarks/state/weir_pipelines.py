"""The measured work as a Weir pipeline's author would write it."""

from __future__ import annotations

import polars as pl

from pipelines.api import Epoch, Pipeline, State, ValueState, agg, aggregate, delta, files, stage

_SOURCE = files("{landing}/*.parquet")


class Totals(State):
    """24 bytes."""

    n: int = 0
    total: float = 0.0
    top: float | None = None


class Records(State):
    """24 bytes and a text of 1,024."""

    n: int = 0
    total: float = 0.0
    top: float | None = None
    payload: str | None = None


@stage("totals", source=_SOURCE, key="key", state=Totals, sink=delta.append("totals"))
def totals(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:  # noqa: ARG001
    """Count, sum and maximum per key; hands out what changed."""
    return state.fold(rows, n=agg.count(), total=agg.sum("value"), top=agg.max("value"))


@stage("records", source=_SOURCE, key="key", state=Records, sink=delta.append("records"))
def records(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:  # noqa: ARG001
    """The same with the key's greatest text."""
    return state.fold(rows, n=agg.count(), total=agg.sum("value"), top=agg.max("value"), payload=agg.max("payload"))


totals_aggregate = aggregate(
    "totals",
    _SOURCE,
    key="key",
    n=agg.count(),
    total=agg.sum("value"),
    top=agg.max("value"),
    sink=delta.append("totals"),
)

records_aggregate = aggregate(
    "records",
    _SOURCE,
    key="key",
    n=agg.count(),
    total=agg.sum("value"),
    top=agg.max("value"),
    payload=agg.max("payload"),
    sink=delta.append("records"),
)

totals_pipeline = Pipeline("bench", (totals_aggregate,))

PIPELINES = {
    "aggregate": totals_pipeline,
    "aggregate-payload": Pipeline("bench", (records_aggregate,)),
    "stage": Pipeline("bench", (totals,)),
    "stage-payload": Pipeline("bench", (records,)),
}
