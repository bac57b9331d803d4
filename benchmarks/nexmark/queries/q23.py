"""Bids of persons who also sell, with all auctions that they sell."""

from weir import Pipeline, delta, files, join, side

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")
persons = files("{input}/person/*.parquet", name="person", event_time="date_time")
auctions = files("{input}/auction/*.parquet", name="auction", event_time="date_time")

bids_of_persons = join(
    "bids_of_persons",
    side(bids, select=["bidder", "price", "seq AS bid_seq"]),
    side(persons, select=["id", "name"]),
    on={"bidder": "id"},
    ttl=None,
)
bids_of_sellers = join(
    "bids_of_sellers",
    bids_of_persons,
    side(auctions, select=["seller", "id AS auction", "item_name"]),
    on={"bidder": "seller"},
    ttl=None,
    sink=delta.append("q23"),
)

pipeline = Pipeline("q23", (bids_of_persons, bids_of_sellers))
