"""Payments by card that are to be looked at: two streams joined, a table of cards beside them, alerts on their own.

    payments, confirmations, cards -> traced -> confirmed -> known -> judged -> tables payments, alerts, alerted_cards

What its owner confirms in the app comes up to five minutes after a payment. `make demo-fraud` runs it.
"""

import polars as pl

from weir import (
    Epoch,
    Pipeline,
    State,
    Timestamp,
    ValueState,
    agg,
    aggregate,
    delta,
    files,
    join,
    lookup,
    stage,
)

payments = files("{landing}/payments/*.parquet", name="payments", event_time="at")
confirmations = files("{landing}/confirmations/*.parquet", name="confirmations", event_time="confirmed_at")


class Card(State):
    """Where a card was last, and when."""

    country: str | None = None
    at: Timestamp | None = None


@stage("traced", source=payments, key="card", state=Card, order_by=["at", "payment"])
def traced(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each payment, with whether its card was in another country less than an hour before."""
    before = state.lag(rows, country="country", at="at")
    soon = rows["at"] - before["at"] < pl.duration(hours=1)
    return rows.with_columns(travelled=((rows["country"] != before["country"]) & soon).fill_null(False))


confirmed = join("confirmed", traced, confirmations, on="payment", within=("0s", "5m"), how="left", lateness="30s")
known = lookup("known", confirmed, table="{cards}", on="card", columns=["home", "limit"])


@stage("judged", source=known, key=None, sink=delta.append("payments"), outputs={"alerts": delta.append("alerts")})
def judged(rows: pl.DataFrame, epoch: Epoch) -> dict[str, pl.DataFrame]:
    """All payments, and beside them those that nobody confirmed and that look wrong, with the reason."""
    abroad = (pl.col("country") != pl.col("home")) & (pl.col("amount") > 100)
    reason = pl.coalesce(
        pl.when(pl.col("home").is_null()).then(pl.lit("no such card")),
        pl.when("travelled").then(pl.lit("two countries within an hour")),
        pl.when(abroad).then(pl.lit("abroad")),
        pl.when(pl.col("amount") > pl.col("limit")).then(pl.lit("above its limit")),
    )
    alerts = rows.filter(pl.col("confirmed_at").is_null()).with_columns(reason=reason).drop_nulls("reason")
    return {"main": rows, "alerts": alerts.select("payment", "card", "at", "amount", "country", "reason")}


per_card = delta.upsert("alerted_cards", key="card")
alerted = aggregate("alerted_cards", judged.output("alerts"), key="card", alerts=agg.count(), sink=per_card)

pipeline = Pipeline("card_fraud", (traced, confirmed, known, judged, alerted))
