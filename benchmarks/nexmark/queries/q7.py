"""The highest bids of each window of 10 s."""

from weir import Pipeline, delta, desc, files, top_n

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

START = "unix_micros(date_time) DIV 10000000 * 10000000"
highest = top_n(
    "highest",
    bids,
    select=[
        *("auction", "price", "bidder", "date_time", "extra"),
        f"timestamp_micros({START}) AS window_start",
        f"timestamp_micros({START} + 10000000) AS window_end",
    ],
    key="window_start",
    by=desc("price"),
    n=1,
    ties=True,
    rank=None,
    until="window_end",
    lateness="1m",
    sink=delta.append("q7"),
)

pipeline = Pipeline("q7", (highest,))
