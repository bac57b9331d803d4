"""A small auction house, written by hand: ties, equal times, bounds that count, and bids on what is not there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.nexmark.generate import side_input

BASE = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")
_KINDS = {"int": pa.int64(), "text": pa.string(), "time": TIME}


def _schema(**columns: str) -> pa.Schema:
    return pa.schema([(name, _KINDS[kind]) for kind, names in columns.items() for name in names.split()])


PERSON = _schema(int="id seq", text="name email_address credit_card city state extra", time="date_time")
AUCTION = _schema(
    int="id initial_bid reserve seller category seq", text="item_name description extra", time="date_time expires"
)
BID = _schema(int="auction bidder price seq", text="channel url extra", time="date_time")
_URL = "https://www.nexmark.com/one/two/three/item.htm?query=1"


def at(seconds: float) -> datetime:
    """The time so many seconds after noon."""
    return BASE + timedelta(seconds=seconds)


def person(seq: int, id: int, state: str = "OR", seconds: float = 0) -> dict[str, Any]:
    return {
        "id": id, "name": f"name {id}", "email_address": "a@b.com", "credit_card": "1", "city": "Bend",
        "state": state, "date_time": at(seconds), "extra": "x", "seq": seq,
    }  # fmt: skip


def auction(
    seq: int, id: int, seller: int = 1, category: int = 10, seconds: float = 0, length: float = 10
) -> dict[str, Any]:
    return {
        "id": id, "item_name": f"item {id}", "description": "d", "initial_bid": 1, "reserve": 2,
        "date_time": at(seconds), "expires": at(seconds + length), "seller": seller, "category": category,
        "extra": "x", "seq": seq,
    }  # fmt: skip


def bid(
    seq: int, auction: int = 1, bidder: int = 1, price: int = 100, seconds: float = 0, **others: Any
) -> dict[str, Any]:
    row = {
        "auction": auction, "bidder": bidder, "price": price, "channel": "Google", "url": _URL,
        "date_time": at(seconds), "extra": f"extra {seq}", "seq": seq,
    }  # fmt: skip
    return {**row, **others}


def write(
    root: Path,
    persons: list[dict[str, Any]] | None = None,
    auctions: list[dict[str, Any]] | None = None,
    bids: list[dict[str, Any]] | None = None,
) -> Path:
    """Write an input of one file a kind."""
    for name, schema, rows in (("person", PERSON, persons), ("auction", AUCTION, auctions), ("bid", BID, bids)):
        (root / name).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows or [], schema), root / name / "part-00000.parquet")
    pq.write_table(side_input(), root / "side_input.parquet")
    return root
