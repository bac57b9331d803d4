"""Bids in a table that is partitioned by day and minute."""

from weir import Pipeline, delta, files, select

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

partitioned = select(
    "partitioned",
    bids,
    *("auction", "bidder", "price", "date_time", "extra"),
    "date_format(date_time, 'yyyy-MM-dd') AS dt",
    "date_format(date_time, 'HH:mm') AS hm",
    sink=delta.append("q10", partition_by=["dt", "hm"]),
)

pipeline = Pipeline("q10", (partitioned,))
