"""The auctions with most bids in each window of 10 s, one of which begins every 2 s."""

from weir import Pipeline, agg, delta, desc, files, top_n, window

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

counts = window("counts", bids, key="auction", on="date_time", every="2s", size="10s", lateness="1m", num=agg.count())
hottest = top_n(
    "hottest",
    counts,
    key="window_start",
    by=desc("num"),
    n=1,
    ties=True,
    rank=None,
    until="window_end",
    sink=delta.append("q5"),
)

pipeline = Pipeline("q5", (counts, hottest))
