"""Winning bids with their auctions: of each auction the highest bid while it was open, of equal ones the earliest."""

from weir import Pipeline, delta, desc, files, join, side, top_n

auctions = files("{input}/auction/*.parquet", name="auction", event_time="date_time")
bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

# No auction is open for longer than an hour.
bids_on_auctions = join(
    "bids_on_auctions",
    side(auctions, select=["id", "seller", "category", "date_time", "expires"]),
    side(bids, select=["auction", "bidder", "price", "date_time", "extra", "seq"]),
    on={"id": "auction"},
    within=("0s", "1h"),
    lateness="1m",
    suffix="_of_bid",
)
winning_bids = top_n(
    "winning_bids",
    bids_on_auctions,
    key="id",
    by=[desc("price"), "date_time_of_bid", "seq"],
    n=1,
    rank=None,
    until="expires",
    where="date_time_of_bid <= expires",
    sink=delta.append("q9"),
)

pipeline = Pipeline("q9", (bids_on_auctions, winning_bids))
columns = {"bid_date_time": "date_time_of_bid", "bid_extra": "extra"}
