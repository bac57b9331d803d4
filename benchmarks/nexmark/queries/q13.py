"""Bids with a value of the side input."""

from weir import Pipeline, delta, files, lookup

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

valued = lookup(
    "valued",
    bids,
    select=["auction", "bidder", "price", "date_time", "auction % 10000 AS key"],
    table="{input}/side_input.parquet",
    on="key",
    how="inner",
    sink=delta.append("q13"),
)

pipeline = Pipeline("q13", (valued,))
