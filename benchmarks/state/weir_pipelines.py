"""The measured work as a Weir pipeline's author would write it."""

from __future__ import annotations

import polars as pl

from benchmarks.state.workload import LATENESS_SECONDS, WINDOW_SECONDS
from pipelines.api import Epoch, Pipeline, State, ValueState, agg, aggregate, deduplicate, delta, files, stage, window

_SOURCE = files("{landing}/*.parquet")
_TIMED = files("{landing}/*.parquet", event_time="at")
_LENGTH, _LATENESS = f"{WINDOW_SECONDS}s", f"{LATENESS_SECONDS}s"


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

_AGGREGATES = {"n": agg.count(), "total": agg.sum("value"), "top": agg.max("value")}

windowed = window(
    "windows",
    _TIMED,
    key="key",
    on="at",
    every=_LENGTH,
    lateness=_LATENESS,
    sink=delta.append("windows"),
    **_AGGREGATES,
)

sessions = window(
    "sessions",
    _TIMED,
    key="key",
    on="at",
    gap=_LENGTH,
    lateness=_LATENESS,
    sink=delta.append("sessions"),
    **_AGGREGATES,
)

first_rows = deduplicate("first_rows", _TIMED, key="key", on="at", ttl=_LENGTH, sink=delta.append("first_rows"))

totals_pipeline = Pipeline("bench", (totals_aggregate,))

PIPELINES = {
    "aggregate": totals_pipeline,
    "aggregate-payload": Pipeline("bench", (records_aggregate,)),
    "window": Pipeline("bench", (windowed,)),
    "session": Pipeline("bench", (sessions,)),
    "deduplicate": Pipeline("bench", (first_rows,)),
    "stage": Pipeline("bench", (totals,)),
    "stage-payload": Pipeline("bench", (records,)),
}
