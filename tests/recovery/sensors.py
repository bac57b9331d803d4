"""A pipeline whose author made a mistake: it does not expect a reading without a unit."""

import polars as pl

from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, stage

FACTORS = {"C": 1.0, "mC": 0.001}


class Sensor(State):
    """Of one sensor."""

    readings: int = 0


def celsius(reading: str) -> float:
    """A reading such as `21500 mC`."""
    number, unit = reading.split()
    return float(number) * FACTORS[unit]


@stage(
    "sensors",
    source=files("{landing}/*.parquet", name="landing"),
    key="sensor",
    state=Sensor,
    sink=delta.append("readings"),
)
def sensors(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Readings in degrees."""
    state.fold(rows, readings=agg.count())
    degrees = [celsius(reading) for reading in rows["reading"]]
    return rows.select("sensor", degrees=pl.Series(degrees, dtype=pl.Float64))


pipeline = Pipeline("sensors", (sensors,))
