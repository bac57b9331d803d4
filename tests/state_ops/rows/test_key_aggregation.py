"""Partials of batches: how much may gather."""

from __future__ import annotations

import random

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


@pytest.mark.parametrize("seed", range(12))
def test_ranks_of_several_values_in_one_order_are_those_of_each_by_itself(seed):
    chance = random.Random(seed)
    most = chance.choice([1, 3, 10_000])  # few values are equal, or all
    count = chance.choice([0, 1, 2, 60])

    def some(*values):
        return [chance.choice(values) for _ in range(count)]

    rows = pl.DataFrame(
        {
            "at": [chance.randrange(most) for _ in range(count)],
            "seq": some(None, 1, 2, 3) if seed % 2 else range(count),
            "ratio": some(float("nan"), 0.0, -0.0, 1.5, None),
            "text": some("b", "a", None, "ab"),
            "same": [7] * count,
        },
        schema={"at": pl.Int64, "seq": pl.Int64, "ratio": pl.Float64, "text": pl.String, "same": pl.Int64},
    ).with_columns(at_too="at", seq_too="seq")
    orders = (["at", "seq"], ["at_too", "seq_too"], ["ratio", "at"])
    rankings = {f"{by[0]} {value}": [*by, value] for by in orders for value in ("text", "same", "ratio")}
    ranks = {series.name: series for series in key_aggregation._all_ranks(rows, rankings)}
    for name, by in rankings.items():
        alone = key_aggregation._ranks(rows, by)
        assert ranks[name].is_null().equals(alone.is_null())
        taking_part = ranks[name].drop_nulls()
        assert taking_part.n_unique() == len(taking_part)
        ranked = rows.select(*dict.fromkeys(by))
        assert ranked[ranks[name].arg_sort()].drop_nulls().equals(ranked[alone.arg_sort()].drop_nulls())
