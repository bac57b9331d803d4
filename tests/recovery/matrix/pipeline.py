"""A pipeline with one of everything that an epoch stages: state that grows and is deleted, a channel, rows that are
both read on and published, a side output for late rows."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from weir import Epoch, Pipeline, State, Timestamp, ValueState, agg, delta, files, stage, window


class Meter(State):
    """Of one meter, until a row says that it is gone."""

    readings: int = 0
    total: int = 0
    last: int | None = None
    last_at: Timestamp | None = None


@stage(
    "meters",
    source=files("{landing}/*.parquet", event_time="at", name="landing"),
    key=["site", "meter"],
    state=Meter,
    order_by=["at", "seq"],
)
def meters(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each reading with the step from the meter's previous one. No sink: its rows are a channel."""
    before = state.lag(rows, last="value", last_at="at")
    state.fold(rows, readings=agg.count(), total=agg.sum("value"))
    state.delete(rows.filter(pl.col("gone")))
    return rows.select("site", "meter", "at", "seq", "value", step=rows["value"] - before["last"])


hourly = window(
    "hourly",
    meters,
    key="site",
    every="1h",
    on="at",
    lateness="20m",
    readings=agg.count(),
    total=agg.sum("value"),
    highest=agg.max("value"),
    steps=agg.sum("step"),
    sink=delta.append("hourly"),
    late=delta.append("hourly_late"),
)


class Peak(State):
    """Of one site."""

    hours: int = 0
    best: int | None = None
    last: int | None = None


@stage(
    "peaks", source=hourly, key="site", state=Peak, order_by=["window_start"], sink=delta.append("peaks"),
)  # fmt: skip
def peaks(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each closed hour with the site's previous one. What it reads is published, too."""
    before = state.lag(rows, last="total")
    state.fold(rows, hours=agg.count(), best=agg.max("total"))
    return rows.select("site", "window_start", "total", previous=before["last"])


pipeline = Pipeline("meters", (meters, hourly, peaks), max_parallelism=16)

newest = replace(peaks, sink=delta.upsert("peaks", "site", order_by=["window_start"]))
before_deploy = Pipeline("meters", (meters, hourly, newest), max_parallelism=16)
