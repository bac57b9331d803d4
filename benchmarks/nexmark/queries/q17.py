"""Bids and prices of each auction and day."""

from weir import Pipeline, agg, aggregate, delta, files

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

auctions_by_day = aggregate(
    "auctions_by_day",
    bids,
    select=["auction", "price", "date_format(date_time, 'yyyy-MM-dd') AS day"],
    key=["auction", "day"],
    total_bids=agg.count(),
    rank1_bids=agg.count(where="price < 10000"),
    rank2_bids=agg.count(where="price >= 10000 AND price < 1000000"),
    rank3_bids=agg.count(where="price >= 1000000"),
    min_price=agg.min("price"),
    max_price=agg.max("price"),
    avg_price=agg.mean("price"),
    sum_price=agg.sum("price"),
    sink=delta.upsert("q17", key=["auction", "day"]),
)

pipeline = Pipeline("q17", (auctions_by_day,))
