"""Partials on the disk: every row comes back once, with those of its key, in the order in which they came."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_ops.keyed.keyed_state import GROUP
from state_ops.rows import key_aggregation
from state_ops.rows.spill import RANGES, Spill


def _rows(groups: list[int], first: int = 0) -> pl.DataFrame:
    return pl.DataFrame({GROUP: pl.Series(groups, dtype=pl.UInt16), "n": range(first, first + len(groups))})


@given(
    start=st.integers(0, 32_000),
    number=st.integers(1, 700),
    batches=st.lists(st.lists(st.integers(0, 10**6), max_size=20), min_size=1, max_size=6),
)
def test_all_rows_of_a_key_group_come_back_together_and_in_order(tmp_path_factory, start, number, batches):
    directory = tmp_path_factory.mktemp("spill")
    spill, given = Spill(directory, range(start, start + number)), []
    for batch in batches:
        rows = _rows([start + group % number for group in batch], sum(map(len, given)))
        spill.add(rows)
        given.append(rows)
    assert len(spill) == len(batches)
    ranges = [pl.concat(parts) for parts in spill.take()]
    assert len(ranges) <= RANGES
    for spilled_range in ranges:
        assert spilled_range["n"].is_sorted()
    groups = [set(spilled_range[GROUP]) for spilled_range in ranges]
    assert sum(map(len, groups)) == len(set().union(*groups)), "a key group is in one range"
    assert [min(some) for some in groups] == sorted(min(some) for some in groups)
    whole = pl.concat([*ranges, _rows([])])
    assert whole.sort("n").equals(pl.concat([*given, _rows([])]))
    assert not list(directory.iterdir()) and not len(spill)
    assert list(spill.take()) == []


def test_a_range_that_is_too_large_comes_in_parts_each_with_all_rows_of_its_keys_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(key_aggregation, "PARTIAL_BYTES", 20_000)
    draw, spill = np.random.default_rng(5), Spill(tmp_path, range(32), ["key"])
    given = []
    for batch in range(4):
        keys = draw.integers(0, 300, 2000)
        groups = np.where(keys < 270, 3, keys % 32).astype(np.uint16)  # nine of ten keys are of one group
        given.append(pl.DataFrame({GROUP: groups, "key": keys, "n": np.arange(2000) + 2000 * batch}))
        spill.add(given[-1])
    parts = [pl.concat(frames) for frames in spill.take()]
    assert len(parts) > RANGES and max(part.estimated_size() for part in parts) < 20_000
    assert all(part["n"].is_sorted() for part in parts)
    assert sum(part["key"].n_unique() for part in parts) == pl.concat(given)["key"].n_unique()
    assert pl.concat(parts).sort("n").equals(pl.concat(given))
    assert not list(tmp_path.iterdir())


def test_every_type_comes_back_as_it_was(tmp_path):
    at = datetime(2024, 5, 1, tzinfo=UTC)
    rows = pl.DataFrame(
        {
            GROUP: pl.Series([3, 3], dtype=pl.UInt16),
            "wide": pl.Series([1 << 100, None], dtype=pl.Int128),
            "exact": pl.Series([Decimal("1.50"), None], dtype=pl.Decimal(38, 2)),
            "text": ["\N{SNOWMAN}", None],
            "bytes": [b"\x00", None],
            "at": pl.Series([at, None], dtype=pl.Datetime("us", "UTC")),
            "list": [[1, None], None],
            "struct": [{"a": 1, "b": ["x"]}, None],
            "nothing": pl.Series([None, None], dtype=pl.Null),
        }
    )
    spill = Spill(tmp_path, range(8))
    spill.add(rows)
    ((spilled,),) = spill.take()
    assert spilled.schema == rows.schema and spilled.equals(rows)


def test_a_disk_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError):
        Spill(tmp_path / "missing", range(8)).add(_rows([1]))
