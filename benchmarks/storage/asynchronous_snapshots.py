"""State in memory, its snapshots written at the barrier or after it: `state.asynchronous_snapshots` off and on, in
turns.

    make bench-snapshots                                     about ten minutes; writes benchmarks/results/snapshots.*
    python -m benchmarks.storage.asynchronous_snapshots --reps 1     a look

Real runs on Spark with `state.backend: filesystem`, each in a process of its own. `totals` counts, sums and takes the
maximum by key; with two stages `often` counts how many keys have been seen how often. The first epoch gives every key
its state; the next ones, of 50,000 rows each, are warm-up and then count.

- epoch: wall time of the epochs that count by their number, from the end of the last one before them to the end of the
  last one.
- open, sync: milliseconds inside the keyed tasks of `totals`, the slowest subtask. upload: until its files are in
  storage, which includes the wait for a snapshot that is still being written.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks import harness
from benchmarks.epoch_profile import PIPELINES
from benchmarks.harness import Row

KEYS = (20_000, 200_000, 1_000_000)
WARM, COUNTED, ROWS = 3, 12, 50_000


def measure(root: Path, name: str, keys: int, asynchronous: bool) -> dict[str, float]:
    """One run. Milliseconds: wall per epoch, medians of the phases inside the first stage's tasks."""
    landing = root / "landing"
    landing.mkdir()
    random = np.random.default_rng(7)
    for number in range(1 + WARM + COUNTED):
        drawn = random.integers(0, keys, ROWS) if number else np.arange(keys)
        values = random.integers(0, 8000, len(drawn)) / 8
        pq.write_table(pa.table({"key": drawn, "value": values}), landing / f"{number:05}.parquet")
    settings = harness.local_settings(
        root,
        PIPELINES[name].name,
        landing,
        epoch={"max_files": 1, "max_rows": 10_000_000},
        state={"backend": "filesystem", "asynchronous_snapshots": asynchronous},
    )
    epochs = list(harness.epochs(PIPELINES[name], settings))
    assert len(epochs) == 1 + WARM + COUNTED, epochs
    counted = epochs[-COUNTED:]
    phases = harness.medians([epoch.report.checkpoint.operators["totals"].ms for epoch in reversed(counted)])
    return {"epoch": sum(epoch.wall for epoch in counted) / COUNTED, **phases}


def report(runs: list[Row]) -> str:
    """The Markdown of all runs."""
    groups: dict[tuple[str, int], dict[bool, list[dict[str, float]]]] = {}
    for run in runs:
        group = groups.setdefault((run["pipeline"], run["keys"]), {False: [], True: []})
        group[run["asynchronous"]].append(dict.fromkeys(("epoch", "open", "sync", "upload"), 0.0) | run["ms"])
    return harness.render("snapshots", runs=runs, groups=groups)


def main(reps: int = 3, results: Path = harness.RESULTS / "snapshots") -> None:
    """State in memory, its snapshots written at the barrier or after it, in turns."""
    runs: list[Row] = []
    for repetition in range(reps):
        for name in PIPELINES:
            for keys in KEYS:
                for asynchronous in (False, True) if repetition % 2 == 0 else (True, False):
                    ms = harness.in_fresh_process(harness.in_scratch, measure, name, keys, asynchronous)
                    run = {"pipeline": name, "keys": keys, "asynchronous": asynchronous, "repetition": repetition}
                    runs.append({**run, "machine": harness.machine(), "load": os.getloadavg()[0], "ms": ms})
                    print(run, {phase: round(value) for phase, value in ms.items()}, flush=True)
    harness.publish(results, runs, report(runs))


if __name__ == "__main__":
    typer.run(main)
