"""Row groups without a row, as writers leave them that are given an empty batch: the rows of the others are read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recovery.harness import Site
from tests.weir.sources.test_hostile_parquet import read
from weir import Pipeline, delta, files, select
from weir.execution.in_process import InMemoryExecutor
from weir.run.run import RunOptions, run

ROWS = pa.table({"n": [1, 2], "text": ["a", None], "list": [[1, None], []], "nothing": pa.nulls(2, pa.string())})


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "lz4", "zstd"])
def test_rows_before_and_after_a_row_group_without_one_are_read(tmp_path: Path, codec: str):
    for name, tables in (("1", [ROWS[:0], ROWS, ROWS[:0], ROWS, ROWS[:0]]), ("2", [ROWS[:0]])):
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", ROWS.schema, compression=codec) as writer:
            for table in tables:
                writer.write_table(table)
    assert read(tmp_path).to_pylist() == [*ROWS.to_pylist(), *ROWS.to_pylist()]


@pytest.mark.parametrize(
    ("format", "text"), [("csv", "n\n1\n2\nx"), ("json", '{"n": 1}\n{"n": 2}\n{"n": 3'), ("csv", "n\nx\n1\n2")]
)
def test_a_block_that_has_nothing_but_bad_rows_takes_no_other_row_with_it(tmp_path: Path, format: str, text: str):
    source = files("{landing}/*", name="landing", format=format, schema={"n": pa.int64()}, on_bad="quarantine")
    kept = select("kept", source, "n", sink=delta.append("kept"))
    site = Site(tmp_path, {}, Pipeline("odd", (kept,), max_parallelism=8), __name__)
    site.landing.mkdir()
    (site.landing / f"1.{format}").write_text(text)
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    assert sorted(site.table("kept")["n"]) == [1, 2]
    assert len(site.table("kept_quarantine")) == 1
