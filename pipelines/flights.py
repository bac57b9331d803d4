"""Delays that aircraft carry along, and hourly departures by airport. Copy this file to start your own pipeline.

Input: every flight that was to leave New York in 2013, a Parquet file a day. Cancelled flights (no dep_time) and rows
without a tail number are dropped and counted by `where`; a diverted leg has no arr_delay: it adds nothing to the sum.

`every="1h", size="3h"` would make the windows hop, `gap="30m"` make them sessions; `aggregate` and `deduplicate` stand
in a pipeline just as `window` does: docs/reference/operators.md.
"""

from typing import Annotated

import polars as pl

from weir import Epoch, Pipeline, State, Timestamp, ValueState, agg, delta, expect, files, stage, window


class Aircraft(State):
    """One row per tail number."""

    legs: Annotated[int, "Flown so far."] = 0
    dep_delay_min: Annotated[float, "Minutes that it left late, in all."] = 0.0
    arr_delay_min: Annotated[float, "Minutes that it arrived late, in all."] = 0.0
    last_dest: str | None = None
    last_departure: Timestamp | None = None
    last_arr_delay: float | None = None


# What columns of the table are, for people: Dagster shows it, and so does DESCRIBE TABLE.
LEGS = {
    "departure": "When it left.",
    "dep_delay": "Minutes behind its schedule; negative: ahead.",
    "minutes_since_previous": "Between this departure from New York and the one before; null for the first.",
    "previous_arr_delay": "Minutes that the leg before arrived late.",
    "inherited": "Whether the leg before was 15 minutes late or more, within twelve hours.",
}


@stage(
    "aircraft_rotation",
    source=files("{landing}/*.parquet", event_time="scheduled", name="landing"),
    key="tailnum",
    state=Aircraft,
    order_by=["scheduled", "flight"],
    where="dep_time IS NOT NULL AND tailnum IS NOT NULL",
    sink=delta.append("aircraft_legs", describe=LEGS),
    gate=expect("ExpectColumnValuesToBeBetween", column="dep_delay", min_value=-120, max_value=2000),
)
def aircraft_rotation(legs: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each flown leg with what its aircraft brought along from its previous New York departure."""
    legs = legs.with_columns(departure=pl.col("scheduled") + pl.duration(minutes=pl.col("dep_delay").cast(pl.Int64)))
    before = state.lag(legs, last_dest="dest", last_departure="departure", last_arr_delay="arr_delay")
    state.fold(legs, legs=agg.count(), dep_delay_min=agg.sum("dep_delay"), arr_delay_min=agg.sum("arr_delay"))
    gap = (legs["departure"] - before["last_departure"]).dt.total_minutes().cast(pl.Float64)
    inherited = ((before["last_arr_delay"] >= 15) & (gap <= 720)).fill_null(False)
    return legs.select(
        "tailnum", "carrier", "flight", "origin", "dest", "scheduled", "departure", "dep_delay", "arr_delay",
        minutes_since_previous=gap, previous_dest=before["last_dest"], previous_arr_delay=before["last_arr_delay"],
        inherited=inherited,
    )  # fmt: skip


airport_hourly = window(
    "airport_hourly",
    aircraft_rotation,
    key="origin",
    every="1h",
    on="scheduled",
    lateness="1h",
    departures=agg.count(),
    mean_dep_delay=agg.mean("dep_delay"),
    max_dep_delay=agg.max("dep_delay"),
    inherited=agg.sum("inherited"),
    sink=delta.append("airport_hourly"),
    late=delta.append("airport_hourly_late"),
)

pipeline = Pipeline(
    "flights",
    (aircraft_rotation, airport_hourly),
    max_parallelism=128,
    description="Which aircraft bring their delay along, and what that does to New York's airports.",
    owners=("team:air-traffic",),
)
