"""The highest bids of each window of 10 s."""

from pipelines.api import Pipeline, delta, desc, files, top_n

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")


def in_windows(rows):
    """Bids with the bounds of their window."""
    start = "unix_micros(date_time) div 10000000 * 10000000"
    bounds = (f"timestamp_micros({start}) AS window_start", f"timestamp_micros({start} + 10000000) AS window_end")
    return rows.selectExpr("auction", "price", "bidder", "date_time", "extra", *bounds)


highest = top_n(
    "highest",
    bids,
    key="window_start",
    by=desc("price"),
    n=1,
    ties=True,
    rank=None,
    until="window_end",
    lateness="1m",
    transform=in_windows,
    sink=delta.append("q7"),
)

pipeline = Pipeline("q7", (highest,))
