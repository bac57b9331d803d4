"""Bids on the auctions of one category."""

from weir import Pipeline, delta, files, join, side

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")
auctions = files("{input}/auction/*.parquet", name="auction", event_time="date_time")

bids_of_category = join(
    "bids_of_category",
    side(bids, select=["auction", "bidder", "price", "seq AS bid_seq"]),
    side(auctions, select=["id", "item_name", "seller", "category"], where="category = 10"),
    on={"auction": "id"},
    ttl=None,
    sink=delta.append("q20"),
)

pipeline = Pipeline("q20", (bids_of_category,))
