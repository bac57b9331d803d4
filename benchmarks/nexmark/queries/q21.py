"""Bids with the id of their channel, of those that have one."""

from weir import Pipeline, delta, files, select

bids = files("{input}/bid/*.parquet", name="bid", event_time="date_time")

_ID = (
    "CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'"
    " ELSE regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) END"
)

with_ids = select(
    "with_ids",
    bids,
    *("auction", "bidder", "price", "channel", f"{_ID} AS channel_id", "seq"),
    where="lower(channel) IN ('apple', 'google', 'facebook', 'baidu') OR url RLIKE '(&|^)channel_id='",
    sink=delta.append("q21"),
)

pipeline = Pipeline("q21", (with_ids,))
