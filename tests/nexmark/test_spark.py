"""Spark's own answers are the truths too: so both sides of the comparison do the same work, and the truths are right."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.nexmark import spark, truth
from benchmarks.nexmark.compare import compare
from benchmarks.nexmark.generate import Options, generate
from weir.settings.configuration import PROJECT


@pytest.mark.long
def test_spark_hands_out_what_duckdb_says(tmp_path):
    generate(Options(20_000, files=4), tmp_path / "input")
    truth.write(tmp_path / "input", tmp_path / "truths", list(spark.QUERIES))
    words = ["--input", str(tmp_path / "input"), "--out", str(tmp_path / "out"), "--files", "2"]
    subprocess.run([sys.executable, "-m", "benchmarks.nexmark.spark", *words], cwd=PROJECT, check=True, timeout=500)
    results = {
        query: compare(tmp_path / "truths" / f"{query}.parquet", tmp_path / "out" / f"{query}.parquet")
        for query in spark.QUERIES
    }
    assert {query: result.examples or str(result) for query, result in results.items() if not result.equal} == {}
    assert all(result.rows for result in results.values())
