"""Bids, bidders and auctions of each channel and day, by how high the price is."""

from weir import Pipeline, agg, aggregate, delta, files

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")
LOW, MIDDLE, HIGH = "price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000"

channels = aggregate(
    "channels",
    bids,
    select=[
        *("channel", "bidder", "auction", "price"),
        "date_format(date_time, 'yyyy-MM-dd') AS day",
        "date_format(date_time, 'HH:mm') AS hm",
    ],
    key=["channel", "day"],
    minute=agg.max("hm"),
    total_bids=agg.count(),
    rank1_bids=agg.count(where=LOW),
    rank2_bids=agg.count(where=MIDDLE),
    rank3_bids=agg.count(where=HIGH),
    total_bidders=agg.count_distinct("bidder"),
    rank1_bidders=agg.count_distinct("bidder", where=LOW),
    rank2_bidders=agg.count_distinct("bidder", where=MIDDLE),
    rank3_bidders=agg.count_distinct("bidder", where=HIGH),
    total_auctions=agg.count_distinct("auction"),
    rank1_auctions=agg.count_distinct("auction", where=LOW),
    rank2_auctions=agg.count_distinct("auction", where=MIDDLE),
    rank3_auctions=agg.count_distinct("auction", where=HIGH),
    sink=delta.upsert("q16", key=["channel", "day"]),
)

pipeline = Pipeline("q16", (channels,))
