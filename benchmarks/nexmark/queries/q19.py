"""The ten highest bids of each auction."""

from weir import Pipeline, delta, desc, files, top_n

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

highest = top_n(
    "highest",
    bids,
    select=["auction", "bidder", "price", "date_time", "seq"],
    key="auction",
    by=[desc("price"), "seq"],
    n=10,
    sink=delta.upsert("q19", key=["auction", "rank_number"]),
)

pipeline = Pipeline("q19", (highest,))
