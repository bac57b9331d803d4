"""Sessions of each bidder: bids that are less than 10 s apart."""

from weir import Pipeline, agg, delta, files, window

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

sessions = window(
    "sessions",
    bids,
    key="bidder",
    on="date_time",
    gap="10s",
    lateness="1m",
    bid_count=agg.count(),
    sink=delta.append("q11"),
)

pipeline = Pipeline("q11", (sessions,))
columns = {"starttime": "window_start", "endtime": "window_end"}
