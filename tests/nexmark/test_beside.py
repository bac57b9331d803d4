"""What Flink hands out, a log of changes, becomes a query's content."""

from __future__ import annotations

from datetime import UTC, datetime

import duckdb
import polars as pl

from benchmarks.nexmark import flink
from benchmarks.nexmark.compare import compare
from benchmarks.nexmark.generate import Options, generate


def test_content_is_the_newest_row_of_each_key(tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    changes = [("INSERT", 1, 5.0), ("UPDATE_BEFORE", 1, 5.0), ("UPDATE_AFTER", 1, 7.0), ("INSERT", 4, 2.0)]
    changes += [("UPDATE_AFTER", 1, 6.0), ("INSERT", 2, 1.0), ("INSERT", 3, 1.0), ("DELETE", 3, 1.0)]
    rows = pl.DataFrame(changes, ["op", "category", "avg_final"], orient="row")
    rows[:4].write_parquet(output / "part-abc-0-9")
    rows[4:].write_parquet(output / "part-abc-0-10")
    flink.hand_out("q4", output, tmp_path / "out")
    pl.DataFrame({"category": [1, 2, 4], "avg_final": [6.0, 1.0, 2.0]}).write_parquet(tmp_path / "truth.parquet")
    assert compare(tmp_path / "truth.parquet", tmp_path / "out" / "q4.parquet").equal


def test_times_and_partitions_are_read_as_they_were_written(tmp_path):
    output = tmp_path / "output" / "dt=2026-01-01" / "hm=10%3A02"
    output.mkdir(parents=True)
    at = datetime(2026, 1, 1, 10, 2)
    ids = {"auction": [1], "bidder": [2], "price": [3]}
    row = pl.DataFrame({**ids, "date_time": [at], "extra": ["x"]})
    row.write_parquet(output / "part-1")
    flink.hand_out("q10", tmp_path / "output", tmp_path / "out")
    truth = row.with_columns(date_time=pl.lit(at.replace(tzinfo=UTC)), dt=pl.lit("2026-01-01"), hm=pl.lit("10:02"))
    truth.write_parquet(tmp_path / "truth.parquet")
    assert compare(tmp_path / "truth.parquet", tmp_path / "out" / "q10.parquet").equal


def test_flink_gets_the_same_rows_in_order(tmp_path):
    generate(Options(5_000, files=3), tmp_path / "input")
    copy = flink.copied(tmp_path / "input", tmp_path / "copy")
    for name, number in (("person", 1), ("auction", 1), ("bid", 2)):
        files = sorted((copy / name).iterdir())
        assert len(files) == number
        assert all(pl.read_parquet(file)["seq"].is_sorted() for file in files)
        same = "SELECT count(*) FROM (FROM '{0}' EXCEPT ALL FROM '{1}')"
        folders = [tmp_path / "input" / name / "*.parquet", copy / name / "*.parquet"]
        assert [duckdb.sql(same.format(*pair)).fetchall() for pair in (folders, folders[::-1])] == [[(0,)], [(0,)]]
