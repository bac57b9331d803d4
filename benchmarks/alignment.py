"""Checkpoints in front of a slow stage: aligned ones wait for it, unaligned ones do not.

    python -m benchmarks.alignment                   about five minutes; writes benchmarks/results/alignment.*
    python -m benchmarks.alignment --epochs 3 --factors 1,10 --results /tmp/alignment

Real runs on Spark: a fast keyed stage hands its rows to one that sleeps for each batch, as a stage that calls a service
would, and takes 1, 3 and 10 times as long as the fast one. Epochs of 40,000 rows, 2 subtasks, batches of 1,000 rows.
Aligned, and unaligned after 1 s. The time of a checkpoint is that from its trigger to its commit. Every result is
compared with DuckDB's over the input.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from deltalake import DeltaTable

from benchmarks import harness
from pipelines.api import Epoch, Pipeline, State, ValueState, agg, delta, files, stage
from pipelines.runtime.ownership.pipeline_storage import open_storage

ROWS, BATCH, SUBTASKS = 40_000, 1_000, 2
FAST_SECONDS = 0.5
"""What the fast stage's job takes, roughly: mostly Spark's own work."""


class Seen(State):
    """Of one key."""

    rows: int = 0


@stage("fast", source=files("{landing}/*.parquet", name="landing"), key="k", state=Seen)
def fast(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:  # noqa: ARG001  the signature is Weir's
    """Every row as it came."""
    state.fold(rows, rows=agg.count())
    return rows


def pipeline(factor: int) -> Pipeline:
    """A stage behind `fast` that takes `factor` times as long."""
    seconds = factor * FAST_SECONDS / (ROWS / SUBTASKS / BATCH)

    @stage("slow", source=fast, key="k", state=Seen, sink=delta.append("slow"))
    def slow(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:  # noqa: ARG001
        """Every row, once somebody has thought about it."""
        time.sleep(seconds * len(rows) / BATCH)
        state.fold(rows, rows=agg.count())
        return rows

    return Pipeline("alignment", (fast, slow), max_parallelism=8)


def measure(root: Path, factor: int, alignment: float | None, epochs: int) -> dict[str, float | str | int]:
    """One run over `epochs` files, and its figures: seconds a checkpoint, rows that wait at most."""
    landing = root / "landing"
    landing.mkdir(parents=True)
    rng = np.random.default_rng(7)
    for number in range(epochs):
        rows = {"k": rng.integers(0, 1_000, ROWS), "v": rng.integers(0, 1_000, ROWS)}
        pq.write_table(pa.table(rows), landing / f"{number:03}.parquet")
    measured = pipeline(factor)
    checkpoints: dict[str, Any] = {} if alignment is None else {"alignment_timeout_seconds": alignment}
    settings = harness.local_settings(
        root,
        "alignment",
        landing,
        epoch={"max_files": 1},
        spark={"parallelism": SUBTASKS, "batch_rows": BATCH},
        run={"poll_seconds": 0.05},
        checkpoints={"max_concurrent": 1, **checkpoints},
    )
    with harness.Stopwatch() as clock:
        reports = [epoch.report.checkpoint for epoch in harness.epochs(measured, settings)]
    storage, _ = open_storage(measured, settings)
    uris = [uri.removeprefix("file://") for uri in DeltaTable(storage.full("tables/slow")).file_uris()]
    query = "SELECT k, count(*), sum(v) FROM read_parquet({}) GROUP BY k ORDER BY k"
    same = duckdb.sql(query.format(uris)).fetchall() == duckdb.sql(query.format([f"{landing}/*.parquet"])).fetchall()
    counted = pl.Series(
        [checkpoint.ms["to_commit"] / 1000 for checkpoint in reports[1:]]
    )  # Spark compiles in the first
    return {
        "factor": factor,
        "alignment": "aligned" if alignment is None else f"unaligned after {alignment:g} s",
        "checkpoints": len(reports),
        "median": counted.median(),
        "longest": counted.max(),
        "rows waiting at most": max(
            sum(stats.rows_waiting for stats in checkpoint.operators.values()) for checkpoint in reports
        ),
        "seconds in all": clock.ms / 1e3,
        "result": "equal to DuckDB's" if same else "WRONG",
    }


def main(epochs: int = 5, factors: str = "1,3,10", results: Path = harness.RESULTS / "alignment") -> None:
    """Checkpoints in front of a slow stage: aligned ones wait for it, unaligned ones do not."""
    rows = [
        harness.in_scratch(measure, factor, alignment, epochs)
        for factor in map(int, factors.split(","))
        for alignment in (None, 1.0)
    ]
    harness.publish(results, rows, harness.render("alignment", machine=harness.machine(), rows=rows))


if __name__ == "__main__":
    typer.run(main)
