"""Bids of each bidder: windows of 10 s of processing time, summed by bidder."""

from weir import Pipeline, agg, aggregate, delta, files, window

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

windows = window("windows", bids, key="bidder", on=None, every="10s", bids=agg.count())
totals = aggregate("totals", windows, key="bidder", bid_count=agg.sum("bids"), sink=delta.upsert("q12", key="bidder"))

pipeline = Pipeline("q12", (windows, totals))
