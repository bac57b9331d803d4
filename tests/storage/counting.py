"""A small pipeline whose result is plain: how many rows each key had so far."""

from __future__ import annotations

import json
import random

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from tests.storage.conftest import KEY, SECRET, Bucket
from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, stage
from weir.settings import configuration as settings
from weir.settings.configuration import Settings


class Seen(State):
    """Of one key."""

    rows: int = 0


@stage(
    "counts", source=files("{landing}/*.parquet"), key="id", state=Seen, order_by=["at"], sink=delta.append("counted")
)
def counts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Every row is passed on; its key's count goes up."""
    state.fold(rows, rows=agg.count())
    return rows.select("id", "at")


pipeline = Pipeline("counting", (counts,), max_parallelism=8)


def environment(bucket: Bucket, port: int | None = None, **other: str) -> dict[str, str]:
    """WEIR_ variables for storage and landing directory in the bucket; each file is an epoch."""
    return {
        "WEIR_STORAGE__ROOT": f"s3://{bucket.name}/root",
        "WEIR_STORAGE__S3__ENDPOINT": f"http://127.0.0.1:{port or bucket.port}",
        "WEIR_STORAGE__S3__REGION": "us-east-1",
        "WEIR_STORAGE__S3__ALLOW_HTTP": "true",
        "WEIR_STORAGE__S3__ACCESS_KEY_ID__ENV": KEY,
        "WEIR_STORAGE__S3__SECRET_ACCESS_KEY__ENV": SECRET,
        "WEIR_PIPELINES__COUNTING__OBJECT": "tests.storage.counting:pipeline",
        "WEIR_PIPELINES__COUNTING__PARAMS": json.dumps({"landing": f"s3://{bucket.name}/landing"}),
        "WEIR_EPOCH__MAX_FILES": "1",
        "WEIR_CHECKPOINTS__NUM_RETAINED": "1",
        **other,
    }


def configured(bucket: Bucket, work: object, port: int | None = None, **other: str) -> Settings:
    return settings.load(environment(bucket, port, WEIR_LOCAL__WORK_DIR=str(work), **other))


def rows_of(number: int) -> list[dict]:
    """What file `number` holds: ten rows, of keys that all files have and one that it has alone."""
    return [{"id": f"k{at}" if at < 9 else f"only-{number}", "at": 10 * number + at} for at in range(10)]


def land(bucket: Bucket, *numbers: int, more: int = 0) -> None:
    """more: further rows of each file, of keys that no other row has, at 100 and later."""
    for number in numbers:
        data, draw = pa.BufferOutputStream(), random.Random(number)
        others = [{"id": draw.randbytes(16).hex(), "at": 100 + at} for at in range(more)]
        pq.write_table(pa.Table.from_pylist(rows_of(number) + others), data)
        bucket.client.put_object(
            Bucket=bucket.name, Key=f"landing/{number:05}.parquet", Body=data.getvalue().to_pybytes()
        )


def counted(bucket: Bucket) -> list[dict]:
    """The rows of the table, read past Weir: log by delta-rs, files from the server."""
    from state_ops.delta import fenced_table

    storage = bucket.storage(prefix="root/counting")
    handle = fenced_table.open_table(storage, "tables/counted")
    rows: list[dict] = []
    for file in fenced_table.active_files(handle):
        data = bucket.content(f"root/counting/tables/counted/{file.path}")
        rows += pq.read_table(pa.BufferReader(data), use_threads=False).to_pylist()
    return sorted(rows, key=lambda row: row["at"])
