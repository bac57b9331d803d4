"""Bids on the auctions of one category."""

from pipelines.api import Pipeline, delta, files, join, side

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")
auctions = files("{input}/auction/*.parquet", name="auction", event_time="date_time")

bids_of_category = join(
    "bids_of_category",
    bids,
    side(auctions, where="category = 10"),
    on={"auction": "id"},
    ttl=None,
    sink=delta.append("q20"),
)

pipeline = Pipeline("q20", (bids_of_category,))
columns = {"bid_seq": "seq"}
