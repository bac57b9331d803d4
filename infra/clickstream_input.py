"""Clicks for `make demo-kafka` and for the tests: visitors who come in sessions, on several partitions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

FIRST = datetime(2026, 1, 5, 8, tzinfo=UTC)
_PAGES = ("/", "/search", "/shoes", "/hats", "/cart", "/pay")


@dataclass(frozen=True, slots=True)
class Click:
    """One message: the partition on which it comes, and what it holds."""

    partition: int
    visitor: str
    page: str
    price: float | None
    at: datetime

    @property
    def value(self) -> bytes:
        row = {"visitor": self.visitor, "page": self.page, "price": self.price, "at": self.at.isoformat()}
        return json.dumps(row).encode()


def clicks(count: int, *, partitions: int = 3, visitors: int = 200, seed: int = 1) -> Iterator[Click]:
    """Clicks in the order of their times. A visitor's are all on one partition; prices are whole cents."""
    chance = random.Random(seed)
    ends = dict.fromkeys(range(visitors), FIRST)
    at = FIRST
    for _ in range(count):
        at += timedelta(seconds=chance.expovariate(1))
        visitor = chance.randrange(visitors)
        if chance.random() < 0.02:  # comes back another time: the session before has ended by then
            ends[visitor] = at + timedelta(minutes=45)
        if at < ends[visitor]:
            continue
        page = chance.choice(_PAGES)
        price = chance.randrange(100, 20_000) / 4 if page == "/pay" else None
        yield Click(visitor % partitions, f"v{visitor:04}", page, price, at)
