"""Bids with a value of the side input."""

from pipelines.api import Pipeline, delta, files, lookup

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

valued = lookup(
    "valued",
    bids,
    table="{input}/side_input.parquet",
    on="key",
    how="inner",
    transform=lambda rows: rows.withColumn("key", rows.auction % 10_000),
    sink=delta.append("q13"),
)

pipeline = Pipeline("q13", (valued,))
