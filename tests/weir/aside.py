"""A pipeline that sets rows with an amount out of 0 to 99 aside: sums per key, windows behind them, and a second reader
of the source."""

from __future__ import annotations

from datetime import UTC, datetime

import polars as pl
import pyarrow as pa

from weir import Epoch, Pipeline, State, ValueState, agg, aggregate, delta, expect, files, stage, window
from weir.definition import ROW, Gate

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
FAR = datetime(2199, 1, 1, tzinfo=UTC)  # an event time that would close every window
SCHEMA = pa.schema(
    [("id", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", tz="UTC")), ("amount", pa.int64())]
)
SOURCE = files("{landing}/*.parquet", event_time="at", name="landing")
TOLD = ["_weir_stage", "_weir_gate", "_weir_epoch", "_weir_file", "_weir_row", "_weir_reason"]


def between(low: int, high: int, column: str = "amount", **more) -> Gate:
    more.setdefault("on_failure", "quarantine")
    return expect("ExpectColumnValuesToBeBetween", column=column, min_value=low, max_value=high, **more)


class Account(State):
    """Of one key."""

    rows: int = 0
    total: int = 0


@stage(
    "accounts",
    source=SOURCE,
    key="id",
    state=Account,
    order_by=["n"],
    where="amount <> 7",
    sink=delta.append("booked"),
    gate=between(0, 99, quarantine_at_most=0.5),
)
def accounts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Every row is booked, and its key's sum goes up."""
    sums = state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.join(sums, on="id", how="left", maintain_order="left").select("id", "n", "at", "amount", "total", ROW)


hours = window(
    "hours", accounts, key="id", on="at", every="1h", lateness="30m", rows=agg.count(), total=agg.sum("amount"),
    sink=delta.append("hours"), late=delta.append("hours_late"),
)  # fmt: skip
others = aggregate("others", SOURCE, key="id", rows=agg.count(), total=agg.sum("amount"), sink=delta.append("others"))
pipeline = Pipeline("aside", (accounts, hours, others), max_parallelism=8)
