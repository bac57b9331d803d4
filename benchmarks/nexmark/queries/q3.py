"""Auctions of one category whose seller lives in one of three states."""

from weir import Pipeline, delta, files, join, side

auctions = files("{input}/auction/*.parquet", name="auction", event_time="date_time")
persons = files("{input}/person/*.parquet", name="person", event_time="date_time")

local_auctions = join(
    "local_auctions",
    side(auctions, select=["id", "seller"], where="category = 10"),
    side(persons, select=["id", "name", "city", "state"], where="lower(state) IN ('or', 'id', 'ca')"),
    on={"seller": "id"},
    ttl=None,
    sink=delta.append("q3"),
)

pipeline = Pipeline("q3", (local_auctions,))
