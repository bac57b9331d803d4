"""The measured work as a Weir pipeline's author would write it."""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from benchmarks.state.engine import BAND
from benchmarks.state.workload import LATENESS_SECONDS, WINDOW_SECONDS
from weir import (
    Epoch,
    Fired,
    KeyState,
    ListOf,
    MapOf,
    Pipeline,
    State,
    ValueState,
    agg,
    aggregate,
    deduplicate,
    delta,
    files,
    stage,
    window,
)

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


_COLUMNS = {"key": pa.int64(), "n": pa.int64(), "total": pa.float64(), "top": pa.float64()}


@stage("per_key", source=_SOURCE, key="key", state=Totals, per_key=True, output=_COLUMNS, sink=delta.append("per_key"))
def per_key(key: int, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:  # noqa: ARG001
    """The same in a function that is called with one key's rows."""
    now = _added(state.get(), rows)
    state.update(now)
    return [{"key": key, "n": now.n, "total": now.total, "top": now.top}]


class Collected(Totals):
    """24 bytes, a list of all values and a map of how often each band of values came."""

    values: ListOf[float]
    bands: MapOf[int, int]


def _expired(key: int, fired: Fired, state: KeyState, epoch: Epoch) -> list[dict]:  # noqa: ARG001
    return []


@stage(
    "collected",
    source=_SOURCE,
    key="key",
    state=Collected,
    per_key=True,
    output=_COLUMNS,
    on_timer=_expired,
    sink=delta.append("collected"),
)
def collected(key: int, rows: list[dict], state: KeyState, epoch: Epoch) -> list[dict]:  # noqa: ARG001
    """The same; and each row appends to a list, changes an entry of a map and sets a timer, due after the run."""
    for row in rows:
        state.values.append(row["value"])
        band = int(row["value"]) // BAND
        state.bands[band] = state.bands.get(band, 0) + 1
        state.timers.set(after="1d")
    now = _added(state.get(), rows)
    state.update(now)
    return [{"key": key, "n": now.n, "total": now.total, "top": now.top}]


def _added(now: Totals, rows: list[dict]) -> Totals:
    for row in rows:
        value = row["value"]
        now.n, now.total = now.n + 1, now.total + value
        now.top = value if now.top is None else max(now.top, value)
    return now


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
    "per-key": Pipeline("bench", (per_key,)),
    "collected": Pipeline("bench", (collected,)),
    "stage": Pipeline("bench", (totals,)),
    "stage-payload": Pipeline("bench", (records,)),
}
