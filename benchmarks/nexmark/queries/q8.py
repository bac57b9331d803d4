"""Persons who opened an auction in the window of 10 s in which they joined."""

from weir import Pipeline, delta, files, join, side

persons = files("{input}/person/*.parquet", name="person", event_time="date_time")
auctions = files("{input}/auction/*.parquet", name="auction", event_time="date_time")

START = "timestamp_micros(unix_micros(date_time) DIV 10000000 * 10000000) AS starttime"

new_sellers = join(
    "new_sellers",
    side(persons, select=["id", "name", "date_time", START]),
    side(auctions, select=["seller", "date_time", START]),
    on={"id": "seller", "starttime": "starttime"},
    within=("-10s", "10s"),
    how="semi",
    lateness="1m",
    sink=delta.append("q8"),
)

pipeline = Pipeline("q8", (new_sellers,))
