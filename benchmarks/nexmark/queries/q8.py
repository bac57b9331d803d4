"""Persons who opened an auction in the window of 10 s in which they joined."""

from pipelines.api import Pipeline, delta, files, join, side

persons = files("{input}/person/*.parquet", name="person", event_time="date_time")
auctions = files("{input}/auction/*.parquet", name="auction", event_time="date_time")


def in_windows(rows):
    """Rows with the start of their window."""
    return rows.selectExpr("*", "timestamp_micros(unix_micros(date_time) div 10000000 * 10000000) AS starttime")


new_sellers = join(
    "new_sellers",
    side(persons, transform=in_windows),
    side(auctions, transform=in_windows),
    on={"id": "seller", "starttime": "starttime"},
    within=("-10s", "10s"),
    how="semi",
    lateness="1m",
    sink=delta.append("q8"),
)

pipeline = Pipeline("q8", (new_sellers,))
