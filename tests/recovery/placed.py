"""A run on a cluster, epoch by epoch, which says how many subtasks have changed their host: `python -m
tests.recovery.placed ENVIRONMENT EPOCHS LANDING KEYS`, and twice more as many after a line on its standard input.
The first epoch has a row of each of KEYS keys, the others of the first 100."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import polars as pl
import structlog

from weir import Pipeline, agg, aggregate, delta, files
from weir.execution.spark.spark_executor import SparkExecutor
from weir.run.run import RunOptions, run
from weir.settings import configuration as settings

sums = aggregate(
    "sums", files("{landing}/*.parquet", name="landing"), key="key", sink=delta.append("sums"), rows=agg.count()
)
TURNS = 3
pipeline = Pipeline("placed", (sums,))


def main(env: dict[str, str], epochs: int, landing: Path, keys: int) -> None:
    loaded = settings.load(env)
    executor = SparkExecutor(loaded, "placed")
    for turn in range(TURNS):
        for number in range(epochs):
            rows = 100 if turn or number else keys
            pl.DataFrame({"key": range(rows)}).write_parquet(landing / f"{turn}-{number:03}.parquet")
            for _ in run(pipeline, loaded, RunOptions(until_caught_up=True), executor):
                pass
        assert executor.placement is not None
        hosts = Counter(executor.placement._hosts.values())
        print(json.dumps([executor.placement.moved, executor.placement.stayed, sorted(hosts.values())]), flush=True)
        if turn < TURNS - 1:
            sys.stdin.readline()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    main(json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)
