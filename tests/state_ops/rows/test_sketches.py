"""Sketches are within what the reference says of them, however their values were cut, and those of before are read."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from state_ops.rows.sketches import DISTINCT, QUANTILE, estimates, gathered, sketched, united

GOLDEN = {
    DISTINCT: "0201070c0308030008094a0ab190e205c47a2707",
    QUANTILE: "020114c8000400000300000000000000000000000000f03f0000000000000840000000000000f03f0100000000000000"
    "0000000000000040010000000000000000000000000008400100000000000000",
}


def lists(parts: list[np.ndarray]) -> pl.Series:
    inner = pl.Float64() if parts[0].dtype.kind == "f" else pl.Int64()
    return pl.Series([part.tolist() for part in parts], dtype=pl.List(inner))


def cut(kind: str, values: np.ndarray, parts: int) -> pl.Series:
    """One sketch of values that came in so many epochs."""
    whole = pl.Series([b""], dtype=pl.Binary)
    for part in np.array_split(values, parts):
        whole = united(kind)([whole, sketched(kind, lists([part]))])
    return whole


def test_sketches_have_the_bytes_that_they_once_had_and_are_read_from_them():
    values = {DISTINCT: [3, 1, 2], QUANTILE: [3.0, 1.0, 2.0]}
    for kind, golden in GOLDEN.items():
        assert sketched(kind, pl.Series([values[kind]]))[0].hex() == golden
        old = pl.Series([bytes.fromhex(golden)])
        more = united(kind)([old, sketched(kind, pl.Series([[values[kind][0] + 1, values[kind][0] + 2]]))])
        assert estimates(kind, 1.0)(more).to_list() == [5]


@pytest.mark.parametrize("number", [0, 1, 100, 3000, 200_000])
def test_distinct_values_are_estimated_within_five_percent_and_alike_however_they_are_cut(number):
    values = np.random.default_rng(number).permutation(number)
    estimate = estimates(DISTINCT, None)
    (whole,) = estimate(cut(DISTINCT, values, 1)).to_list()
    assert abs(whole - number) <= 0.05 * number
    parts = np.array_split(np.concatenate([values, values[::-1]]), 7)
    (together,) = estimate(gathered(DISTINCT)([sketched(DISTINCT, lists(parts))])).to_list()
    assert estimate(cut(DISTINCT, values[::-1], 5)).to_list() == [together] == [whole]


@pytest.mark.parametrize("distribution", ["normal", "lognormal"])
def test_a_quantile_has_nearly_its_share_of_the_values_below_it(distribution):
    values = getattr(np.random.default_rng(1), distribution)(size=100_000)
    most = {0.0: 0.00001, 0.01: 0.002, 0.1: 0.01, 0.5: 0.02, 0.9: 0.01, 0.99: 0.002, 1.0: 0.0}
    for parts in (1, 50):
        sketch = cut(QUANTILE, values, parts)
        for share, off in most.items():
            (quantile,) = estimates(QUANTILE, share)(sketch).to_list()
            assert abs(float((values <= quantile).mean()) - share) <= off, share
        assert len(sketch[0]) < 8192
