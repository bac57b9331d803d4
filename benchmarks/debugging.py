"""How long `weir debug` takes to find a wrong key in a large state: with the key given, and without.

    python -m benchmarks.debugging                    # 5 GB of state; ten minutes, 12 GB of disk
    python -m benchmarks.debugging --keys 200000 --results /tmp/debugging

A stage of two subtasks keeps a kilobyte that does not compress for each key. In the last epoch, which has rows of a
thousand keys, the code gives one key a wrong value; then the code is right again, and the epoch is played again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import harness
from pipelines import debugging
from pipelines.api import Epoch, Pipeline, State, ValueState, files, stage
from pipelines.runtime.execution.in_process import InMemoryExecutor

_FILE_KEYS, _LAST_KEYS, _BYTES = 250_000, 1_000, 1_000
_PLANTED = 4_711


class Wide(State):
    """Of one key."""

    rows: int = 0
    content: bytes = b""


def _kept(rows: pl.DataFrame, state: ValueState, wrong: bool) -> pl.DataFrame:
    random = np.random.default_rng(int(rows["id"].min() or 0)).bytes(rows.height * _BYTES)
    contents = [random[at : at + _BYTES] for at in range(0, len(random), _BYTES)]
    times = pl.when(pl.lit(wrong) & (pl.col("id") == _PLANTED)).then(99).otherwise(1)
    state.put(rows.select("id", rows=times.cast(pl.Int64), content=pl.Series(contents, dtype=pl.Binary)))
    return rows


@stage("wide", source=files("{landing}/*.parquet", name="landing"), key="id", state=Wide)
def right(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:  # noqa: ARG001  a stage gives it
    """Keeps a kilobyte of each key."""
    return _kept(rows, state, wrong=False)


def wrong(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:  # noqa: ARG001  a stage gives it
    """The same, but for one key."""
    return _kept(rows, state, wrong=True)


pipeline = Pipeline("wide", (right,))


def _settings(root: Path) -> harness.Settings:
    return harness.local_settings(
        root, "wide", root / "landing", spark={"parallelism": 2}, epoch={"max_files": 1},
        checkpoints={"num_retained": 2, "timeout_seconds": 3600},
    )  # fmt: skip


def _build(root: Path, keys: int) -> int:
    """Make the state, and the epoch with the wrong key; returns its id."""
    landing = root / "landing"
    landing.mkdir()
    starts = range(0, keys, _FILE_KEYS)
    for number, start in enumerate(starts):
        ids = pa.array(range(start, min(keys, start + _FILE_KEYS)), pa.int64())
        pq.write_table(pa.table({"id": ids}), landing / f"{number:04}.parquet")
    list(harness.epochs(pipeline, _settings(root), InMemoryExecutor(50_000)))
    some = {*np.random.default_rng(7).integers(0, keys, _LAST_KEYS).tolist(), _PLANTED}
    pq.write_table(pa.table({"id": pa.array(sorted(some), pa.int64())}), landing / f"{len(starts):04}.parquet")
    planted = replace(pipeline, stages=(replace(right, function=wrong),))
    (*_, last) = harness.epochs(planted, _settings(root), InMemoryExecutor(50_000))
    return int(last.report.checkpoint.id)


def _forget_files(root: Path) -> None:
    """Have the system forget what it keeps of files in memory, so that they are read from the disk."""
    os.sync()
    for file in (file for file in root.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _found(root: Path, epoch: int, key: int | None) -> harness.Row:
    """Play the epoch again; the seconds that took."""
    _forget_files(root)
    began, used = time.perf_counter(), time.process_time()
    seen = debugging.debug(pipeline, epoch, key=key, settings=_settings(root))
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    (difference,) = seen.differences
    assert [(row["id"], row["rows"]) for row in difference.recorded] == [(_PLANTED, 99)], "the wrong key is found"
    return {
        "key": "given" if key is not None else "unknown", "seconds": seconds, "cpu": cpu, "bytes": seen.fetched,
        **{f"{name} seconds": took for name, took in seen.seconds.items()},
    }  # fmt: skip


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=5_000_000)
    parser.add_argument("--results", type=Path, default=harness.RESULTS / "debugging")
    parser.add_argument("--scratch", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weir-benchmark-", dir=options.scratch) as directory:
        root = Path(directory)
        epoch = _build(root, options.keys)
        rows = [harness.in_fresh_process(_found, root, epoch, key) for key in (None, _PLANTED)]
    figures = {"keys": options.keys, "load": os.getloadavg()[0], "rows": rows}
    page = harness.render(
        "debugging", machine=harness.machine(), command=harness.command("benchmarks.debugging"), **figures
    )
    harness.publish(options.results, figures, page)


if __name__ == "__main__":
    main()
