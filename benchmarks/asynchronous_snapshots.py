"""State in memory, its snapshots written at the barrier or after it: `state.asynchronous_snapshots` off and on, in turns.

    make bench-snapshots                                     about ten minutes; writes benchmarks/results/snapshots.*
    python -m benchmarks.asynchronous_snapshots --reps 1     a look

Real runs on Spark with `state.backend: filesystem`, each in a process of its own. `totals` counts, sums and takes the maximum by key;
with two stages `often` counts how many keys have been seen how often. The first epoch gives every key its state; the next ones, of
50,000 rows each, are warm-up and then count.

- epoch: wall time of the epochs that count by their number, from the end of the last one before them to the end of the last one.
- open, sync: milliseconds inside the keyed tasks of `totals`, the slowest subtask. upload: until its files are in storage, which
  includes the wait for a snapshot that is still being written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.epoch_profile import PIPELINES
from configs.settings import Settings
from pipelines.runtime.run import run as runtime
from pipelines.runtime.run.run import RunOptions

KEYS = (20_000, 200_000, 1_000_000)
WARM, COUNTED, ROWS = 3, 12, 50_000
RESULTS = Path(__file__).parent / "results" / "snapshots"


def measure(name: str, keys: int, asynchronous: bool, root: Path) -> dict[str, float]:
    """One run. Milliseconds: wall per epoch, medians of the phases inside the first stage's tasks."""
    landing = root / "landing"
    landing.mkdir()
    random = np.random.default_rng(7)
    for number in range(1 + WARM + COUNTED):
        drawn = random.integers(0, keys, ROWS) if number else np.arange(keys)
        values = random.integers(0, 8000, len(drawn)) / 8
        pq.write_table(pa.table({"key": drawn, "value": values}), landing / f"{number:05}.parquet")
    pipeline = PIPELINES[name]
    settings = Settings.model_validate(
        {
            "storage": {"root": f"{root}/storage"},
            "local": {"work_dir": f"{root}/work", "cache_dir": f"{root}/cache"},
            "epoch": {"max_files": 1, "max_rows": 10_000_000},
            "run": {"poll_seconds": 0.005},
            "state": {"backend": "filesystem", "asynchronous_snapshots": asynchronous},
            "pipelines": {pipeline.name: {"object": "benchmarks:none", "params": {"landing": str(landing)}}},
        }
    )
    ended, phases = [], []
    for report in runtime.run(pipeline, settings, RunOptions(until_caught_up=True)):
        ended.append(time.perf_counter())
        phases.append(report.checkpoint.operators["totals"]["ms"])
    assert len(ended) == 1 + WARM + COUNTED, ended
    found = {phase: statistics.median(ms.get(phase, 0.0) for ms in phases[-COUNTED:]) for phase in phases[-1]}
    return {"epoch": (ended[-1] - ended[-1 - COUNTED]) * 1e3 / COUNTED, **found}


def report(runs: list[dict[str, Any]]) -> str:
    """The Markdown of all runs."""
    lines = [
        "# Snapshots of state in memory, at the barrier and after it",
        "",
        f"Milliseconds, medians of {max(one['repetition'] for one in runs) + 1} runs each. {runs[0]['machine']}. Made by"
        " `make bench-snapshots`; what is measured stands in `benchmarks/asynchronous_snapshots.py`.",
        "",
        "| stages | keys | snapshot | epoch | against at the barrier | open | sync | upload |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for name, keys in dict.fromkeys((one["pipeline"], one["keys"]) for one in runs):
        medians = {}
        for asynchronous in (False, True):
            same = [
                one["ms"]
                for one in runs
                if (one["pipeline"], one["keys"], one["asynchronous"]) == (name, keys, asynchronous)
            ]
            medians[asynchronous] = {
                phase: statistics.median(ms.get(phase, 0.0) for ms in same)
                for phase in ("epoch", "open", "sync", "upload")
            }
        for asynchronous, ms in medians.items():
            change = f"{ms['epoch'] / medians[False]['epoch'] - 1:+.0%}" if asynchronous else ""
            cells = [name, f"{keys:,}", "after it" if asynchronous else "at the barrier", f"{ms['epoch']:,.0f}", change]
            lines.append("| " + " | ".join([*cells, *(f"{ms[p]:,.0f}" for p in ("open", "sync", "upload"))]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, keys, asynchronous = arguments.one
        with tempfile.TemporaryDirectory(prefix="weir-snapshots-") as root:
            print(json.dumps(measure(name, int(keys), asynchronous == "True", Path(root))))
        return
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    runs = []
    for repetition in range(arguments.reps):
        for name in PIPELINES:
            for keys in KEYS:
                for asynchronous in (False, True) if repetition % 2 == 0 else (True, False):
                    one = [sys.executable, "-m", "benchmarks.asynchronous_snapshots", "--one"]
                    said = subprocess.run(
                        [*one, name, str(keys), str(asynchronous)], check=True, stdout=subprocess.PIPE, text=True
                    )
                    ms = json.loads(said.stdout.splitlines()[-1])
                    what = {"pipeline": name, "keys": keys, "asynchronous": asynchronous, "repetition": repetition}
                    runs.append({**what, "machine": machine, "load": os.getloadavg()[0], "ms": ms})
                    print(what, {phase: round(value) for phase, value in ms.items()}, flush=True)
    arguments.results.with_suffix(".json").write_text(json.dumps(runs, indent=1) + "\n")
    text = report(runs)
    arguments.results.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
