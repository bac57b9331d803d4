"""One stage that counts and sums per key, the ways in which its rows reach their subtasks, and what DuckDB says of
them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tests.recovery.harness import Site
from weir import Pipeline, agg, aggregate, delta, files
from weir.execution import exchange

totals = aggregate(
    "totals",
    files("{landing}/*.parquet"),
    key="key",
    rows=agg.count(),
    total=agg.sum("n"),
    sink=delta.append("totals"),
)
pipeline = Pipeline("totals", (totals,))

_BLOCKS = {"WEIR_SPARK__DIRECT_READ_MB": "0", "WEIR_SPARK__EXCHANGE": "blocks"}
WAYS = {
    exchange.FILES: _BLOCKS,
    exchange.CUT: _BLOCKS | {"WEIR_SPARK__CONF": json.dumps({"spark.sql.files.openCostInBytes": "4194304"})},
    exchange.ROWS: {"WEIR_SPARK__DIRECT_READ_MB": "0", "WEIR_SPARK__EXCHANGE": "rows"},
    exchange.DIRECT: {"WEIR_SPARK__DIRECT_READ_MB": "1024"},
}


def land(site: Site, shapes: Sequence[tuple[int, int]]) -> None:
    """A file of so many rows of so many keys for each pair."""
    site.landing.mkdir(parents=True)
    draw = np.random.default_rng(3)
    for number, (rows, keys) in enumerate(shapes):
        columns = {"key": draw.integers(0, keys, rows), "n": draw.integers(0, 1000, rows)}
        pq.write_table(pa.table(columns), site.landing / f"{number:05}.parquet")


def assert_exact(site: Site) -> None:
    """State, and the newest rows of the table, are what DuckDB makes of all that has landed."""
    truth = duckdb.sql(
        f"SELECT key, count(*) AS rows, sum(n)::BIGINT AS total FROM read_parquet('{site.landing}/*.parquet')"
        " GROUP BY key ORDER BY key"
    ).df()
    state = site.state("totals").sort_values("key", ignore_index=True)[["key", "rows", "total"]]
    pd.testing.assert_frame_equal(state, truth, check_dtype=False)
    newest = site.table("totals").groupby("key", as_index=False)[["rows", "total"]].max()
    pd.testing.assert_frame_equal(newest, truth, check_dtype=False)
    site.assert_no_orphans()


def ways_taken(site: Site) -> set[str | None]:
    """How rows came in the epochs of the checkpoints that are retained."""
    return {json.loads(row)["totals"].get("exchange") for row in site.registry("checkpoints")["operators"]}
