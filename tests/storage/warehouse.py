"""A pipeline between buckets' directories: files by day below `landing/`, and tables of a warehouse that others have as
well. `python -m tests.storage.warehouse` runs it until it has caught up, by the configuration of its environment."""

from __future__ import annotations

import json
import os
from datetime import date

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from state_ops.storage.storage import Storage
from tests.storage import counting
from tests.storage.conftest import Bucket
from weir import Epoch, Pipeline, Stage, State, ValueState, agg, delta, files, stage
from weir.definition.delta_sink import DeltaSink
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run
from weir.settings import configuration as settings

TABLES = ("totals", "booked", "days")


class Total(State):
    """Of one key."""

    total: int = 0


LANDED = files("{landing}/**/*.parquet")


@stage(
    "totals", source=LANDED, key="id", state=Total, order_by=["nth"], sink=delta.upsert("{warehouse}/totals", key="id")
)
def totals(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """What each key's total is now."""
    state.fold(rows, total=agg.sum("amount"))
    return rows.select("id", state.get(rows)["total"])


def all_of(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Every row."""
    return rows.select("id", "nth", "amount", "day")


def passed_on(sink: DeltaSink) -> Stage:
    """A stage that hands out what it is given."""
    return stage(sink.name, source=LANDED, key="id", state=Total, order_by=["nth"], sink=sink)(all_of)


booked = passed_on(delta.append("{warehouse}/booked", partition_by="day"))
days = passed_on(delta.replace("{warehouse}/days", by="day"))
pipeline = Pipeline("warehouse", (totals, booked, days), max_parallelism=4)


def environment(bucket: Bucket, work: object, port: int | None = None) -> dict[str, str]:
    """WEIR_ variables for it; each file is an epoch."""
    places = {name: f"s3://{bucket.name}/{name}" for name in ("landing", "warehouse")}
    return {
        **counting.environment(bucket, port, WEIR_LOCAL__WORK_DIR=str(work)),
        "WEIR_PIPELINES__WAREHOUSE__OBJECT": "tests.storage.warehouse:pipeline",
        "WEIR_PIPELINES__WAREHOUSE__PARAMS": json.dumps(places),
        "WEIR_CHECKPOINTS__NUM_RETAINED": "8",
    }


def rows_of(number: int) -> list[dict]:
    """What file `number` holds: rows of keys that all files have, and of one that it has alone."""
    ids = [f"k{at}" for at in range(9)] + [f"only-{number}"]
    return [{"id": id, "nth": 10 * number + at, "amount": number} for at, id in enumerate(ids)]


def day_of(number: int) -> date:
    """Every third file is of the same day."""
    return date(2024, 1, 1 + number % 3)


def land(bucket: Bucket, *numbers: int) -> None:
    for number in numbers:
        data = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows_of(number)), data)
        key = f"landing/some where/day={day_of(number)}/{number:05}.parquet"
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=data.getvalue().to_pybytes())


def expected(*numbers: int) -> dict[str, list[tuple]]:
    """The rows of each table, by SQL over those of the files."""
    database = duckdb.connect()
    database.register("landed", pl.DataFrame([{**row, "day": day_of(at)} for at in numbers for row in rows_of(at)]))
    newest = "SELECT day, max(amount) FROM landed GROUP BY day"  # files come by number
    query = {
        "totals": "SELECT id, sum(amount)::BIGINT FROM landed GROUP BY id ORDER BY ALL",
        "booked": "SELECT id, nth, amount, day FROM landed ORDER BY ALL",
        "days": f"SELECT id, nth, amount, day FROM landed WHERE (day, amount) IN ({newest}) ORDER BY ALL",
    }
    return {table: database.sql(sql).fetchall() for table, sql in query.items()}


def opened(storage: Storage, table: str) -> DeltaTable:
    """A table as anybody opens it."""
    return DeltaTable(f"{storage.uri}/{table}", storage_options=storage.delta_options)


def stored(storage: Storage, table: str) -> list[tuple]:
    database = duckdb.connect()
    database.register("rows", opened(storage, table).to_pyarrow_table())
    columns = "id, total" if table == "totals" else "id, nth, amount, day"
    return database.sql(f"SELECT {columns} FROM rows ORDER BY ALL").fetchall()


def main() -> None:
    list(run(pipeline, settings.load(dict(os.environ)), RunOptions(until_caught_up=True), InMemoryExecutor()))
    os._exit(0)


if __name__ == "__main__":
    main()
