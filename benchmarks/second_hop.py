"""What an epoch costs on two hosts whose rows go through Spark's shuffle, and through storage to where the state is.

    python -m benchmarks.second_hop            about half an hour
    python -m benchmarks.second_hop --cells 1 --epochs 4

Two workers of Spark's own master whose disks are apart (`tests/tools/spark_cluster.py`), a directory that both see as
storage, an aggregate of three numbers. For each cell of keys, rows an epoch and subtasks: processor seconds of all
processes an epoch, and subtasks that ran on another host than the epoch before.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks import harness
from configs import settings
from pipelines.api import Pipeline, agg, aggregate, delta, files
from pipelines.runtime.execution.spark.spark_executor import SparkExecutor
from tests.tools.spark_cluster import cluster

CELLS = [(1_000_000, 100_000, 4), (4_000_000, 400_000, 4), (4_000_000, 400_000, 16), (100_000, 2_000_000, 4)]
_WARM = 2
pipeline = Pipeline(
    "hopping",
    (
        aggregate(
            "sums",
            files("{landing}/*.parquet"),
            key="key",
            rows=agg.count(),
            total=agg.sum("a"),
            most=agg.max("b"),
            sink=delta.append("sums"),
        ),
    ),
)


def write(landing: Path, keys: int, rows: int, epochs: int) -> None:
    """A first file with each key, and one for each further epoch."""
    landing.mkdir(parents=True)
    draw = np.random.default_rng(keys)
    for number in range(epochs):
        count = rows if number else keys
        columns = {
            "key": draw.integers(0, keys, count) if number else draw.permutation(keys),
            "a": draw.integers(0, 1 << 40, count),
            "b": draw.random(count),
        }
        pq.write_table(pa.table(columns), landing / f"{number:04}.parquet", compression="zstd", row_group_size=65_536)


def cell(scratch: Path, keys: int, rows: int, subtasks: int, hop: str, epochs: int) -> dict[str, Any]:
    """CPU seconds an epoch, and how many subtasks moved, in a process of its own."""
    with cluster(scratch / "cluster", scratch / "storage", workers=2) as spark:
        landing = scratch / "storage" / "landing"
        write(landing, keys, rows, 1 + _WARM + epochs)
        given = {
            "WEIR_STORAGE__ROOT": str(scratch / "storage"),
            "WEIR_LOCAL__WORK_DIR": str(scratch / "work"),
            "WEIR_PIPELINES__HOPPING__OBJECT": "benchmarks.second_hop:pipeline",
            "WEIR_PIPELINES__HOPPING__PARAMS": f'{{"landing": "{landing}"}}',
            "WEIR_EPOCH__MAX_FILES": "1",
            "WEIR_CHECKPOINTS__MAX_CONCURRENT": "1",
            "WEIR_RUN__POLL_SECONDS": "0.01",
            **spark.settings,
            "WEIR_SPARK__PARALLELISM": str(subtasks),
            "WEIR_SPARK__DIRECT_READ_MB": "0",
            "WEIR_SPARK__SECOND_HOP": hop,
        }
        configured = settings.load(given)
        executor = SparkExecutor(configured, "hopping")
        cpu, moved, ways = [], [0], set()
        for epoch in harness.epochs(pipeline, configured, executor):
            assert executor.placement is not None
            stats = epoch.report.checkpoint.operators["sums"]
            cpu.append(round(epoch.cpu / 1e3, 2))
            moved.append(executor.placement.moved)
            ways.add(stats.exchange)
            state = stats.to_json()["bytes_total"] >> 20
        ms = dict(epoch.report.ms)
    each = [after - before for before, after in itertools.pairwise(moved)][1 + _WARM :]
    return {
        "keys": keys, "rows": rows, "subtasks": subtasks, "hop": hop, "state": state, "ways": sorted(map(str, ways)),
        "cpu": cpu[1 + _WARM :], "mean": round(float(np.mean(cpu[1 + _WARM :])), 2), "moved": sum(each),
        "of": len(each) * subtasks, "ms": {name: round(value) for name, value in ms.items()},
    }  # fmt: skip


def measured(scratch: Path, cells: list[int], epochs: int, hops: list[str]) -> None:
    """Print a line for each cell and way."""
    for number, hop in itertools.product(cells, hops):
        print(harness.in_fresh_process(cell, scratch / f"{number}-{hop}", *CELLS[number], hop, epochs), flush=True)


def main(cells: list[int] | None = None, epochs: int = 6, hops: list[str] | None = None) -> None:
    """The second hop beside Spark's shuffle."""
    harness.in_scratch(measured, cells or list(range(len(CELLS))), epochs, hops or ["off", "on"])


if __name__ == "__main__":
    typer.run(main)
