"""Checkpoints in front of a slow stage: aligned ones wait for it, unaligned ones do not.

    python -m benchmarks.alignment                   about five minutes; writes benchmarks/results/alignment.*
    python -m benchmarks.alignment --epochs 3 --factors 1,10 --results /tmp/alignment

Real runs on Spark: a fast keyed stage hands its rows to one that sleeps for each batch, as a stage that calls a service would, and takes
1, 3 and 10 times as long as the fast one. Epochs of 40,000 rows, 2 subtasks, batches of 1,000 rows. Aligned, and unaligned after 1 s.
The time of a checkpoint is that from its trigger to its commit. Every result is compared with DuckDB's over the input.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from configs import settings as configuration
from pipelines.api import Epoch, Pipeline, State, ValueState, agg, delta, files, stage
from pipelines.runtime.ownership.pipeline_storage import open_storage
from pipelines.runtime.run.run import RunOptions, run

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
    made = pipeline(factor)
    settings = configuration.load(
        {
            "WEIR_STORAGE__ROOT": str(root / "storage"),
            "WEIR_LOCAL__WORK_DIR": str(root / "work"),
            "WEIR_PIPELINES__ALIGNMENT__OBJECT": "benchmarks.alignment:pipeline",
            "WEIR_PIPELINES__ALIGNMENT__PARAMS": json.dumps({"landing": str(landing)}),
            "WEIR_EPOCH__MAX_FILES": "1",
            "WEIR_SPARK__PARALLELISM": str(SUBTASKS),
            "WEIR_SPARK__BATCH_ROWS": str(BATCH),
            "WEIR_RUN__POLL_SECONDS": "0.05",
            "WEIR_CHECKPOINTS__MAX_CONCURRENT": "1",
            **({} if alignment is None else {"WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": str(alignment)}),
        }
    )
    took, waiting = [], []
    started = time.monotonic()
    for report in run(made, settings, RunOptions(until_caught_up=True)):
        took.append(report.checkpoint.ms["to_commit"] / 1000)
        waiting.append(sum(figures["rows_waiting"] for figures in report.checkpoint.operators.values()))
    seconds = time.monotonic() - started
    storage, _ = open_storage(made, settings)
    uris = [uri.removeprefix("file://") for uri in DeltaTable(storage.full("tables/slow")).file_uris()]
    asked = "SELECT k, count(*), sum(v) FROM read_parquet({}) GROUP BY k ORDER BY k"
    same = duckdb.sql(asked.format(uris)).fetchall() == duckdb.sql(asked.format([f"{landing}/*.parquet"])).fetchall()
    counted = took[1:]  # Spark compiles its plans in the first
    return {
        "factor": factor,
        "alignment": "aligned" if alignment is None else f"unaligned after {alignment:g} s",
        "checkpoints": len(took),
        "median": statistics.median(counted),
        "longest": max(counted),
        "rows waiting at most": max(waiting),
        "seconds in all": seconds,
        "result": "equal to DuckDB's" if same else "WRONG",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--factors", default="1,3,10")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "alignment")
    arguments = parser.parse_args()
    found = []
    for factor in map(int, arguments.factors.split(",")):
        for alignment in (None, 1.0):
            with tempfile.TemporaryDirectory(prefix="weir-alignment-") as root:
                found.append(measure(Path(root), factor, alignment, arguments.epochs))
    columns = list(found[0])
    lines = [
        "# Checkpoints in front of a slow stage",
        "",
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; `python -m benchmarks.alignment`. Seconds.",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    for one in found:
        lines.append("| " + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in one.values()) + " |")
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.with_suffix(".md").write_text("\n".join(lines) + "\n")
    arguments.results.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
