"""The last bid of each bidder on each auction."""

from weir import Pipeline, agg, aggregate, delta, files

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

last_bids = aggregate(
    "last_bids",
    bids,
    key=["bidder", "auction"],
    order_by=["date_time", "seq"],
    price=agg.last("price"),
    channel=agg.last("channel"),
    url=agg.last("url"),
    date_time=agg.last("date_time"),
    extra=agg.last("extra"),
    sink=delta.upsert("q18", key=["bidder", "auction"]),
)

pipeline = Pipeline("q18", (last_bids,))
