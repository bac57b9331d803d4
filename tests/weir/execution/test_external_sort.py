"""Rows in a stage's order, whatever memory there is: as a stable sort of all of them gives them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.tools.sampling import sampled
from weir.execution.external_sort import in_order
from weir.execution.row_order import ordered


def drawn(rng: np.random.Generator) -> pa.Table:
    """Some rows, with nulls, NaN and ties, of which many may be equal."""
    count = int(rng.integers(0, 2000))
    keys = rng.integers(0, int(rng.integers(1, 200)), count)
    keys[rng.random(count) < rng.choice([0, 0.5, 0.95])] = 7
    ratios = rng.choice([np.nan, -0.0, 0.0, 1.5, np.inf, -np.inf], count)
    return pa.table(
        {
            "key": pa.array(keys, mask=rng.random(count) < 0.1),
            "ratio": pa.array(ratios, mask=rng.random(count) < 0.1),
            "name": pa.array([f"n{number}" for number in rng.integers(0, 50, count)]),
            "place": pa.array(range(count), pa.int64()),
        }
    )


@pytest.mark.parametrize("columns", [["key"], ["key", "ratio"], ["key", "name", "ratio"]], ids="-".join)
@pytest.mark.parametrize("most_bytes", sampled([10_000, 1500, 1 << 30]))
def test_rows_come_in_order_and_ties_as_they_came(tmp_path: Path, columns, most_bytes):
    rng = np.random.default_rng(most_bytes + len(columns))
    for _ in range(12):
        rows = drawn(rng)
        cuts = sorted(rng.integers(0, rows.num_rows + 1, 20))
        parts = [rows.slice(at, end - at) for at, end in zip([0, *cuts], [*cuts, rows.num_rows], strict=True)]
        came = pa.concat_tables([rows.schema.empty_table(), *in_order(iter(parts), columns, tmp_path, most_bytes)])
        assert came["place"].to_pylist() == rows["place"].take(ordered(rows, columns)).to_pylist()
        assert not any(tmp_path.iterdir())


def test_memory_holds_a_range_even_where_a_key_has_half_of_the_rows_and_another_is_the_same_in_all_columns(tmp_path):
    rng, count, most = np.random.default_rng(1), 200_000, 200_000
    keys = np.where(rng.random(count) < 0.5, 7, rng.integers(0, 1000, count))
    times = np.where(rng.random(count) < 0.5, 7, rng.integers(0, 1 << 40, count))
    rows = pa.table({"key": keys, "at": times, "place": np.arange(count)})
    parts = (rows.slice(at, 5000) for at in range(0, count, 5000))
    came = list(in_order(parts, ["key", "at"], tmp_path, most))
    assert sum(part.num_rows for part in came) == count
    assert max(part.nbytes for part in came) <= most
