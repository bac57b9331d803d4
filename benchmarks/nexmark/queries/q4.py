"""The mean winning price of each category."""

from weir import Pipeline, agg, aggregate, delta, desc, files, join, side, top_n

auctions = files("{input}/auction/*.parquet", name="auction", event_time="date_time")
bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

# No auction is open for longer than an hour.
bids_on_auctions = join(
    "bids_on_auctions",
    side(auctions, select=["id", "category", "date_time", "expires"]),
    side(bids, select=["auction", "price", "date_time", "seq"]),
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
)
averages = aggregate(
    "averages", winning_bids, key="category", avg_final=agg.mean("price"), sink=delta.upsert("q4", key="category")
)

pipeline = Pipeline("q4", (bids_on_auctions, winning_bids, averages))
