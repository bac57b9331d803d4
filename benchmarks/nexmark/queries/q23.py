"""Bids of persons who also sell, with all auctions that they sell."""

from pipelines.api import Pipeline, delta, files, join

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")
persons = files("{input}/person/*.parquet", name="person", event_time="date_time")
auctions = files("{input}/auction/*.parquet", name="auction", event_time="date_time")

bids_of_persons = join("bids_of_persons", bids, persons, on={"bidder": "id"}, ttl=None)
bids_of_sellers = join(
    "bids_of_sellers",
    bids_of_persons,
    auctions,
    on={"bidder": "seller"},
    ttl=None,
    suffix="_sold",
    sink=delta.append("q23"),
)

pipeline = Pipeline("q23", (bids_of_persons, bids_of_sellers))
columns = {"bid_seq": "seq", "auction": "id"}
