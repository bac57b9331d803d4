"""A pipeline with every kind of state, run without Spark, epoch by epoch, for tests that look into it; and its replay
in DuckDB."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.checkpoints.registry import Registry
from tests.recovery.harness import Site
from weir import (
    Epoch,
    KeyedState,
    ListOf,
    MapOf,
    Pipeline,
    State,
    agg,
    deduplicate,
    delta,
    files,
    stage,
    window,
)
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, open_storage, run

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("ride", pa.int64()),
        ("rider", pa.string()),
        ("city", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("fare", pa.int64()),
    ]
)
SOURCE = files("{landing}/*.parquet", event_time="at", name="landing")


class Stop(State):
    """A place and a price."""

    city: str = ""
    fare: int = 0


class Rider(State):
    """Of one rider."""

    rides: int = 0
    paid: int = 0
    stops: ListOf[Stop]
    spent: MapOf[str, int]


@stage("riders", source=SOURCE, key="rider", state=Rider, order_by=["at", "ride"], sink=delta.append("rides"))
def riders(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    """Each ride as it came; a list of all stops, and a map of what was spent where."""
    state.fold(rows, rides=agg.count(), paid=agg.sum("fare"))
    state.stops.append(rows)
    state.spent.fold(rows, spent_key="city", spent=agg.sum("fare"))
    return rows


# Named like the table that it writes, as pipelines often have it.
hourly = window(
    "hourly", SOURCE, key=["city", "rider"], on="at", every="1h", lateness="10m", sink=delta.append("hourly"),
    n=agg.count(), mean=agg.mean("fare"),
)  # fmt: skip
trips = window("trips", SOURCE, key="rider", on="at", gap="30m", sink=delta.append("trips"), total=agg.sum("fare"))
unique = deduplicate("unique", SOURCE, key="ride", sink=delta.append("unique"))

pipeline = Pipeline("rides", (riders, hourly, trips, unique), max_parallelism=8)


class Rides:
    """A site of the pipeline; each call of `epoch` lands one file and runs one epoch."""

    def __init__(self, root: Path, pipeline: Pipeline = pipeline, **options: str) -> None:
        defaults = {
            "WEIR_EPOCH__MAX_FILES": "1",
            "WEIR_CHECKPOINTS__NUM_RETAINED": "5",
            "WEIR_SPARK__PARALLELISM": "2",
        }
        self.site = Site(root, defaults | options, pipeline, __name__)
        self._chance = random.Random(7)
        self._landed = 0

    @property
    def registry(self) -> Registry:
        return open_storage(self.site.pipeline, self.site.settings)[1]

    def land(self, rows: int = 40) -> None:
        """A file of rides in the next 45 minutes. The riders of an even file differ from those of an odd one but for r0
        and r1."""
        number = self._landed = self._landed + 1
        rides = []
        for row in range(rows):
            rider = self._chance.choice(["r0", "r1", *(f"r{number % 2}-{name}" for name in range(6))])
            at = NOON + timedelta(minutes=45 * (number - 1), seconds=self._chance.randrange(45 * 60))
            rides.append(
                [number * 1000 + row, rider, self._chance.choice(["Oslo", "Bergen"]), at, self._chance.randrange(1, 90)]
            )
        self.site.landing.mkdir(parents=True, exist_ok=True)
        table = pa.table(
            [pa.array(column, field.type) for column, field in zip(zip(*rides, strict=True), SCHEMA, strict=True)],
            schema=SCHEMA,
        )
        staging = self.site.landing / f".{number:03}"
        pq.write_table(table, staging)
        staging.rename(self.site.landing / f"{number:03}.parquet")

    def epochs(self, number: int = 1, **options: object) -> None:
        for _ in range(number):
            self.land()
        asked = RunOptions(until_caught_up=True, run_id="a-dagster-run", **options)  # type: ignore[arg-type]
        list(run(self.site.pipeline, self.site.settings, asked, InMemoryExecutor()))

    def replay(self, query: str, files: int) -> list[tuple]:
        """What SQL says of the first input files, as the table `rides`."""
        names = [str(self.site.landing / f"{number:03}.parquet") for number in range(1, files + 1)]
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")
            return connection.execute(f"WITH rides AS (FROM read_parquet({names})) {query}").fetchall()
