"""Partials of batches: how much may gather."""

from __future__ import annotations

import polars as pl
import pytest

from state_ops.rows import aggregates as agg
from state_ops.rows import key_aggregation

LATEST = [("latest", agg.max("text"))]


@pytest.mark.parametrize(("number", "length", "full"), [(200, 10, False), (200, 4_000, True), (2_000, 10, True)])
def test_partials_are_full_by_their_number_and_by_their_size(monkeypatch, number, length, full):
    monkeypatch.setattr(key_aggregation, "_WAITING_BYTES", 0)
    monkeypatch.setattr(key_aggregation, "PARTIAL_BYTES", 100_000)
    gathered = key_aggregation.Partials(LATEST, ["k"], "tried", limit=1_000)
    for begin in range(0, number, 50):
        keys = list(range(begin, begin + 50))
        gathered.add(pl.DataFrame({"k": keys, "text": [f"{k:0{length}d}" for k in keys]}))
    assert gathered.full is full
    taken = gathered.take()
    assert sorted(taken["k"]) == list(range(number)) and not gathered.full
