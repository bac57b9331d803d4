"""Orders and payments, which a join or an as-of join brings together behind a stage and in front of another."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from tests.recovery.harness import Site
from weir import Pipeline, agg, aggregate, as_of, deduplicate, delta, files, join
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

TIME = pa.timestamp("us", tz="UTC")
SCHEMAS = {
    "orders": pa.schema([("seq", pa.int64()), ("id", pa.int64()), ("at", TIME), ("what", pa.string())]),
    "payments": pa.schema([("order", pa.int64()), ("paid_at", TIME), ("price", pa.int64())]),
}
ORDERS = files("{landing}/orders/*.parquet", name="orders", event_time="at")
PAYMENTS = files("{landing}/payments/*.parquet", name="payments", event_time="paid_at")
HOWS = ("left", "full", "inner", "as_of")


def pipeline_of(how: str) -> Pipeline:
    """A stage before a join, the join, and a stage behind it."""
    unique = deduplicate("unique", ORDERS, key="seq", on="at", ttl="30d")
    options = {"on": {"id": "order"}, "lateness": timedelta(hours=1), "late": delta.append("paid_late")}
    options["sink"] = delta.append("paid", event_time="at" if how == "full" else None)
    if how == "as_of":
        paid = as_of("paid", unique, PAYMENTS, **options)
    else:
        paid = join("paid", unique, PAYMENTS, within=("-2h", "5h"), how=how, **options)
    sums = aggregate("sums", paid, key="id", n=agg.count(), price=agg.sum("price"), sink=delta.append("sums"))
    return Pipeline("shop", (unique, paid, sums), max_parallelism=6)


def rows_of(number: int, source: str) -> list[dict]:
    """A day's rows, the last of which are of the next day: each file brings event time past its end."""
    chance = random.Random(f"{number} {source}")
    day = datetime(2026, 1, number, tzinfo=UTC)
    times = sorted(day + timedelta(hours=chance.uniform(0, 24)) for _ in range(40))
    keys = [chance.randrange(12) for _ in times]
    if source == "payments":
        return [
            {"order": key, "paid_at": at, "price": chance.randrange(9)} for key, at in zip(keys, times, strict=True)
        ]
    return [
        {"seq": 1000 * number + place, "id": key, "at": at, "what": chance.choice("ab")}
        for place, (key, at) in enumerate(zip(keys, times, strict=True))
    ]


@dataclass
class Shop:
    """A site whose every day is a file of each source, and an epoch."""

    site: Site

    @classmethod
    def at(cls, root: Path, pipeline: Pipeline) -> Shop:
        options = {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_CHECKPOINTS__NUM_RETAINED": "20", "WEIR_SPARK__PARALLELISM": "2"}
        shop = cls(Site(root, options, pipeline, __name__))
        for name in SCHEMAS:
            (shop.site.landing / name).mkdir(parents=True)
        return shop

    def run(self, *days: int) -> None:
        """Land days and run until they are read."""
        for number in days:
            for source, schema in SCHEMAS.items():
                folder = self.site.landing / source
                pq.write_table(pa.Table.from_pylist(rows_of(number, source), schema), folder / f"{number:05}.parquet")
        list(run(self.site.pipeline, self.site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))

    def table(self, name: str) -> pl.DataFrame:
        return pl.read_delta(str(self.site.storage / "tables" / name))
