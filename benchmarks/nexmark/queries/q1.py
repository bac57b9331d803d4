"""Bids with their price in another currency."""

from weir import Pipeline, delta, files, select

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

converted = select(
    "converted", bids, "auction", "bidder", "price * 0.908D AS price", "date_time", "extra", sink=delta.append("q1")
)

pipeline = Pipeline("q1", (converted,))
