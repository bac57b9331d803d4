"""Bids with a price in some range, the time of day and how many letters c there are in extra."""

from weir import Pipeline, delta, files, select

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

calculated = select(
    "calculated",
    bids,
    "auction",
    "bidder",
    "price * 0.908D AS price",
    "CASE WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'dayTime'"
    " WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'nightTime' ELSE 'otherTime' END AS bid_time_type",
    "date_time",
    "extra",
    "CAST(length(extra) - length(replace(extra, 'c', '')) AS bigint) AS c_counts",
    where="price * 0.908D > 1000000 AND price * 0.908D < 50000000",
    sink=delta.append("q14"),
)

pipeline = Pipeline("q14", (calculated,))
