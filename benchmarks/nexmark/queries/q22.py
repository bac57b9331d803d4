"""Bids with the first three directories of their url."""

from weir import Pipeline, delta, files, select

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

directories = select(
    "directories",
    bids,
    *("auction", "bidder", "price", "channel"),
    *(f"split_part(url, '/', {place + 3}) AS dir{place}" for place in (1, 2, 3)),
    "seq",
    sink=delta.append("q22"),
)

pipeline = Pipeline("q22", (directories,))
