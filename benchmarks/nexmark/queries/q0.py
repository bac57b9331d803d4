"""Bids as they are."""

from weir import Pipeline, delta, files, select

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

passed = select("passed", bids, "auction", "bidder", "price", "date_time", "extra", sink=delta.append("q0"))

pipeline = Pipeline("q0", (passed,))
