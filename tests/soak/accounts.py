"""The pipeline that soaks: small, so that thousands of epochs fit into minutes, but with everything that can go wrong.

Two stages, three tables; few keys of which one gets much of the rows; states that are deleted and opened again; rows so
late that their window is closed.
"""

from __future__ import annotations

import polars as pl

from weir import Epoch, Pipeline, State, Timestamp, ValueState, agg, delta, files, stage, window


class Account(State):
    """From an account's opening, which is its first entry, until it is closed."""

    entries: int = 0
    balance: int = 0
    opened_by: int | None = None
    last_at: Timestamp | None = None


@stage(
    "accounts",
    source=files("{landing}/*.parquet", event_time="at", name="landing"),
    key="account",
    state=Account,
    order_by=["seq"],
    sink=delta.append("ledger"),
)
def accounts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each entry with what it made of its account, and the epoch that read it."""
    keys = rows.select("account").unique(maintain_order=True)
    held = {
        key: values if values["entries"] else None
        for key, values in zip(keys["account"], state.get(keys).to_dicts(), strict=True)
    }
    entries, balances, opened = [], [], []
    for row in rows.iter_rows(named=True):
        now = held[row["account"]] or {"entries": 0, "balance": 0, "opened_by": row["seq"]}
        now = {**now, "entries": now["entries"] + 1, "balance": now["balance"] + row["amount"], "last_at": row["at"]}
        entries.append(now["entries"])
        balances.append(now["balance"])
        opened.append(now["opened_by"])
        held[row["account"]] = None if row["closes"] else now
    open_now = [{"account": key, **values} for key, values in held.items() if values]
    closed = [key for key, values in held.items() if values is None]
    if open_now:
        schema = {"account": pl.String, "entries": pl.Int64, "balance": pl.Int64, "opened_by": pl.Int64}
        state.put(pl.DataFrame(open_now, schema={**schema, "last_at": rows.schema["at"]}))
    if closed:
        state.delete(pl.DataFrame({"account": closed}, schema={"account": pl.String}))
    return rows.with_columns(
        pl.Series("entry", entries, pl.Int64),
        pl.Series("balance", balances, pl.Int64),
        pl.Series("opened_by", opened, pl.Int64),
        pl.lit(epoch.id, pl.Int64).alias("epoch"),
    )


turnover = window(
    "turnover",
    accounts,
    key="branch",
    every="10m",
    on="at",
    lateness="3m",
    entries=agg.count(),
    amount=agg.sum("amount"),
    highest=agg.max("balance"),
    sink=delta.append("turnover"),
    late=delta.append("turnover_late"),
)

pipeline = Pipeline("soaked", (accounts, turnover), max_parallelism=32)
