"""Bytewax: a keyed `stateful_batch` with recovery to SQLite, in two worker processes; runs in the peers' environment.

Its keys are texts, so the key becomes one. Epochs end by time; each keeps a snapshot (pickled, a row per key) of every
key that it changed. What changed is handed to a sink that writes Parquet. Progress is what the two readers have handed
out: the dataflow holds back its readers, so they are a batch ahead at most.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bytewax.operators as op
import pyarrow as pa
import pyarrow.parquet as pq
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.operators import StatefulBatchLogic
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main

from benchmarks.state.engine import Result, Task, serve

_ROWS = 10_000
_FLUSH_ROWS = 250_000


class _Reader(StatefulSourcePartition):
    """Every second file, in batches of rows; its position is the number of batches."""

    def __init__(self, files: list[Path], resume: int | None, progress: list[tuple[float, int]]) -> None:
        self._batches = (batch for file in files for batch in pq.ParquetFile(file).iter_batches(_ROWS))
        self._at, self._progress, self._rows = 0, progress, 0
        for _ in range(resume or 0):
            self.next_batch()

    def next_batch(self) -> list[tuple[str, Any]]:
        batch = next(self._batches)
        self._at += 1
        self._rows += batch.num_rows
        self._progress.append((time.time(), self._rows))
        keys, *values = (column.to_pylist() for column in batch.columns)
        return list(zip(map(str, keys), zip(*values, strict=True), strict=True))

    def snapshot(self) -> int:
        return self._at


class _Files(FixedPartitionedSource):
    def __init__(self, directory: str, progress: list[tuple[float, int]]) -> None:
        self._files, self._progress = sorted(Path(directory).glob("*.parquet")), progress

    def list_parts(self) -> list[str]:
        return ["0", "1"]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> _Reader:  # noqa: ARG002
        return _Reader(self._files[int(for_part) :: 2], resume_state, self._progress)


class _Totals(StatefulBatchLogic):
    """Of (value,) or (value, payload): (n, total, top) or (n, total, top, payload)."""

    def __init__(self, held: tuple[Any, ...] | None) -> None:
        self._held = held or (0, 0.0, float("-inf"))

    def on_batch(self, values: list[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], bool]:
        n, total, top = self._held[:3]
        amounts = [value[0] for value in values]
        self._held = (
            n + len(values),
            total + sum(amounts),
            max(top, *amounts),
            *map(max, *(value[1:] for value in values), self._held[3:] or values[0][1:]),
        )
        return [self._held], StatefulBatchLogic.RETAIN

    def snapshot(self) -> tuple[Any, ...]:
        return self._held


class _Writer(StatelessSinkPartition):
    def __init__(self, file: Path, payload: bool) -> None:
        self._rows: list[Any] = []
        fields = {"key": pa.int64(), "n": pa.int64(), "total": pa.float64(), "top": pa.float64()}
        self._schema = pa.schema({**fields, "payload": pa.string()} if payload else fields)
        self._writer = pq.ParquetWriter(file, self._schema)

    def write_batch(self, items: list[Any]) -> None:
        self._rows += items
        if len(self._rows) >= _FLUSH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            keys, held = zip(*self._rows, strict=True)
            columns = [list(map(int, keys)), *map(list, zip(*held, strict=True))]
            self._writer.write_table(pa.table(columns, schema=self._schema))
            self._rows = []

    def close(self) -> None:
        self._flush()
        self._writer.close()


class _Output(DynamicSink):
    def __init__(self, directory: Path, payload: bool) -> None:
        self._directory, self._payload = directory, payload

    def build(self, step_id: str, worker_index: int, worker_count: int) -> _Writer:  # noqa: ARG002
        return _Writer(self._directory / f"{worker_index}.parquet", self._payload)


def work(task: Task, number: int, ports: list[int]) -> None:
    """One worker process: its part of the dataflow, then its progress in a file."""
    progress: list[tuple[float, int]] = []
    flow = Dataflow("totals")
    keyed = op.input("events", flow, _Files(task.inputs[0], progress))
    changed = op.stateful_batch("totals", keyed, _Totals)
    op.output("changed", changed, _Output(Path(task.durable, "output"), task.payload))
    cluster_main(
        flow,
        [f"127.0.0.1:{port}" for port in ports],
        number,
        epoch_interval=timedelta(seconds=task.options["epoch_seconds"]),
        recovery_config=RecoveryConfig(str(Path(task.durable, "recovery"))),
    )
    progress.append((time.time(), progress[-1][1] if progress else 0))
    Path(task.local, f"progress-{number}.json").write_text(json.dumps(progress))


def run(task: Task, result: Result) -> None:
    result.ready = time.time()
    for directory in ("output", "recovery"):
        Path(task.durable, directory).mkdir()
    init_db_dir(Path(task.durable, "recovery"), 2)
    workers = [subprocess.Popen([sys.executable, "-m", __spec__.name, sys.argv[1], str(number)]) for number in (0, 1)]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit("a worker process of Bytewax failed")
    counts = [json.loads(Path(task.local, f"progress-{number}.json").read_text()) for number in (0, 1)]
    done = {0: 0, 1: 0}
    noted = [(at, worker, rows) for worker in (0, 1) for at, rows in counts[worker]]
    for at, worker, rows in sorted(noted):
        done[worker] = rows
        result.progress.append((at, sum(done.values())))
    result.settings = {
        "processes": 2,
        "rows per batch": _ROWS,
        "epoch_interval seconds": task.options["epoch_seconds"],
        "recovery partitions": 2,
        "sink": "Parquet",
    }
    result.versions = {"bytewax": version("bytewax"), "python": platform.python_version()}
    result.output = [f"{task.durable}/output/*.parquet"]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        given = Task(**json.loads(Path(sys.argv[1]).read_text()))
        work(given, int(sys.argv[2]), given.options["ports"])
    else:
        serve(run)
