"""Bids on some auctions."""

from weir import Pipeline, delta, files, select

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

chosen = select("chosen", bids, "auction", "price", where="auction % 123 = 0", sink=delta.append("q2"))

pipeline = Pipeline("q2", (chosen,))
