"""The comparison sees each kind of difference, and none where rows only come in another order."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.nexmark.compare import compare

TRUTH = pa.table({"a": [1, 1, 2, None], "x": [1.0, 1.0, 2_000_000.0, None], "t": ["p", "p", None, "q"]})


@pytest.mark.parametrize(
    ("content", "differing"),
    [
        (TRUTH, 0),
        (TRUTH.take([3, 1, 2, 0]), 0),
        (TRUTH.set_column(1, "x", pa.array([1.0, 1.0, 2_000_001.0, None])), 0),
        (TRUTH.set_column(1, "x", pa.array([1.0, 1.0, 2_000_021.0, None])), 1),
        (TRUTH.set_column(1, "x", pa.array([1.0, 1.0, None, None])), 1),
        (TRUTH.set_column(1, "x", pa.array([1.0, 1.0, 2_000_000.0, 0.0])), 1),
        (TRUTH.slice(1), 1),
        (pa.concat_tables([TRUTH, TRUTH.slice(0, 1)]), 1),
        (TRUTH.set_column(2, "t", pa.array(["p", "r", None, "q"])), 2),
    ],
)
def test_rows_are_compared(tmp_path, content, differing):
    pq.write_table(TRUTH, tmp_path / "truth.parquet")
    pq.write_table(content, tmp_path / "content.parquet")
    result = compare(tmp_path / "truth.parquet", tmp_path / "content.parquet")
    assert (result.rows, result.differing, result.equal) == (4, differing, not differing)
    assert len(result.examples) == differing


@pytest.mark.parametrize(
    "content", [TRUTH.select(["a", "t", "x"]), TRUTH.drop(["t"]), TRUTH.set_column(0, "a", TRUTH["a"].cast(pa.int32()))]
)
def test_other_columns_are_no_content(tmp_path, content):
    pq.write_table(TRUTH, tmp_path / "truth.parquet")
    pq.write_table(content, tmp_path / "content.parquet")
    assert "columns are" in compare(tmp_path / "truth.parquet", tmp_path / "content.parquet").problem
    assert "there is no" in compare(tmp_path / "truth.parquet", tmp_path / "none.parquet").problem


@pytest.mark.parametrize("swap", [False, True])
def test_a_row_that_one_side_alone_has_differs_without_any_float(tmp_path, swap):
    truth, content = (TRUTH.drop(["x"]), TRUTH.drop(["x"]).slice(1))[:: -1 if swap else 1]
    pq.write_table(truth, tmp_path / "truth.parquet")
    pq.write_table(content, tmp_path / "content.parquet")
    assert compare(tmp_path / "truth.parquet", tmp_path / "content.parquet").differing == 1
