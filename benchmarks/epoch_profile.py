"""Where the time of an epoch goes: epochs of 500,000 rows and empty ones, with one keyed stage and with two.

    make bench-epoch                                          about two minutes; writes benchmarks/results/epoch-profile.*
    python -m benchmarks.epoch_profile --label before         one more run under a label; the report has a column for each

Real runs on Spark through the public generator, and nothing but what it reports: a checkpoint's milliseconds by phase and its
operators' figures. `totals` counts, sums and takes the maximum of a million keys, spread evenly; `often` counts how many keys
have been seen how often. Every run is a process of its own, so that two versions of the code can be measured in turns, and
medians of their runs compared: a machine with neighbours moves by more than what is looked for.

- wall: from one report to the next; for empty epochs, which are asked for, from the request to the report.
- cpu: of this process, Spark's JVM and its Python workers together. It is steadier than wall time.
- stages: what the driver waited for the stages' jobs. tasks: the part of it inside keyed tasks (the slowest subtask of every
  phase). The difference, spark, is planning, reading, shuffling, starting tasks, and bringing acks back.
- commit, publish, prune: after the stages. rest: wall less all of these: looking for files and requests, planning the slice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.state import workload as work
from benchmarks.state.workload import Slices, Workload
from configs.settings import Settings
from pipelines.api import Pipeline, agg, aggregate, delta, files
from pipelines.runtime.run import run as runtime
from pipelines.runtime.run.run import RunOptions
from state_ops.coordination import requests
from state_ops.coordination.requests import Request

WARM = 2
"""Epochs of each kind that are run before those that count: Spark compiles its plans in them."""

_totals = aggregate(
    "totals",
    files("{landing}/*.parquet"),
    key="key",
    n=agg.count(),
    total=agg.sum("value"),
    top=agg.max("value"),
    sink=delta.append("totals"),
)
_often = aggregate("often", _totals, key="n", keys=agg.count(), sink=delta.append("often"))

PIPELINES = {"one stage": Pipeline("one", (_totals,)), "two stages": Pipeline("two", (_totals, _often))}


@dataclass(frozen=True, slots=True)
class Load:
    """full, empty: epochs that count, of rows and without any. rows: of a full epoch."""

    full: int = 5
    empty: int = 20
    rows: int = 500_000


def measure(load: Load, scratch: Path) -> dict[str, list[dict[str, float]]]:
    """Milliseconds by phase of every epoch that counts, by kind of epoch."""
    epochs = WARM + load.full
    shape = Workload("epoch-profile", 1_000_000, epochs=epochs, events=load.rows)
    landing = work.sliced(scratch, shape, Slices(epochs, load.rows))
    return {
        f"{name}, {kind}": found
        for name, pipeline in PIPELINES.items()
        for kind, found in _measured(pipeline, load, landing, scratch).items()
    }


def _measured(pipeline: Pipeline, load: Load, landing: Path, scratch: Path) -> dict[str, list[dict[str, float]]]:
    settings = Settings.model_validate(
        {
            "storage": {"root": f"{scratch}/storage"},
            "local": {"work_dir": f"{scratch}/work", "cache_dir": f"{scratch}/cache"},
            "epoch": {"max_files": work.FILES, "max_rows": 100 * load.rows},
            "run": {"poll_seconds": 0.005},
            "pipelines": {pipeline.name: {"object": "benchmarks:none", "params": {"landing": str(landing)}}},
        }
    )
    reports = _epochs(pipeline, settings)
    next(reports)  # Spark starts in it
    full = [next(reports) for _ in range(WARM + load.full - 1)]
    storage, _ = runtime.open_storage(pipeline, settings)
    empty = []
    for _ in range(WARM + load.empty):
        began = time.perf_counter()
        requests.send(storage, Request("barrier", reason="an epoch without data"))
        empty.append(next(reports) | {"wall": round((time.perf_counter() - began) * 1e3, 1)})
    requests.send(storage, Request("stop"))
    assert not list(reports), "an epoch that nobody asked for"
    return {f"{load.rows:,} rows": full[WARM - 1 :], "empty": empty[WARM:]}


def _epochs(pipeline: Pipeline, settings: Settings) -> Iterator[dict[str, float]]:
    """Every epoch's milliseconds by phase."""
    began, used = time.perf_counter(), cpu_seconds()
    for report in runtime.run(pipeline, settings, RunOptions()):
        ended, now = time.perf_counter(), cpu_seconds()
        phases = _phases(report.ms, report.checkpoint.operators)
        wall = (ended - began) * 1e3
        yield {"wall": round(wall, 1), "cpu": round((now - used) * 1e3, 1), **phases}
        began, used = ended, now


def _phases(driver: dict[str, float], operators: dict[str, Any]) -> dict[str, float]:
    """By phase, over all stages. driver: ms that the coordinator noted; operators: a checkpoint's, with the tasks' ms."""
    inside: dict[str, float] = {}
    for figures in operators.values():
        for phase, ms in figures["ms"].items():
            inside[phase] = inside.get(phase, 0.0) + ms
    stages = sum(ms for phase, ms in driver.items() if phase.startswith("stage:"))
    after = {phase: ms for phase, ms in driver.items() if phase in ("commit", "publish", "prune")}
    tasks = sum(inside.values())
    return (
        {"stages": stages, "spark": stages - tasks, "tasks": tasks}
        | {f"task:{p}": ms for p, ms in inside.items()}
        | after
    )


def cpu_seconds() -> float:
    """Seconds of this process and of all that it started and that still lives."""
    own = psutil.Process()
    times = []
    for process in [own, *own.children(recursive=True)]:
        try:
            times.append(process.cpu_times())
        except psutil.NoSuchProcess:
            continue
    return sum(each.user + each.system for each in times)


def medians(runs: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """By phase, the median over all epochs of all runs. rest is of the medians: what no phase has."""
    epochs = [epoch for run in runs for epoch in run["epochs"][kind]]
    found = {phase: statistics.median(epoch.get(phase, 0.0) for epoch in epochs) for phase in epochs[0]}
    named = sum(found.get(phase, 0.0) for phase in ("stages", "commit", "publish", "prune"))
    return found | {"rest": found["wall"] - named}


def report(labels: dict[str, list[dict[str, Any]]]) -> str:
    """The Markdown of all runs, by label."""
    first = next(iter(labels.values()))[0]
    counted = ", ".join(f"{label}: {len(runs)}" for label, runs in labels.items())
    lines = [
        "# Where the time of an epoch goes",
        "",
        f"Milliseconds, medians over all epochs of all runs ({counted}). {first['machine']}. Made by `make bench-epoch`;"
        " what the rows mean stands in `benchmarks/epoch_profile.py`.",
    ]
    for kind in first["epochs"]:
        columns = {label: medians(runs, kind) for label, runs in labels.items()}
        lines += [
            "",
            f"## {kind[0].upper()}{kind[1:]}",
            "",
            f"| | {' | '.join(columns)} |",
            f"|---|{'---:|' * len(columns)}",
        ]
        for phase in dict.fromkeys(phase for found in columns.values() for phase in found):
            cells = " | ".join(f"{found[phase]:,.0f}" if phase in found else "" for found in columns.values())
            lines.append(f"| {phase} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now", help="the report's column that this run belongs to")
    parser.add_argument("--fresh", action="store_true", help="forget the label's earlier runs")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "epoch-profile")
    parser.add_argument("--full", type=int, default=Load().full, help="epochs with rows")
    parser.add_argument("--empty", type=int, default=Load().empty, help="epochs without")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weir-epoch-") as root:
        epochs = measure(Load(arguments.full, arguments.empty), Path(root))
    target = arguments.results
    target.parent.mkdir(parents=True, exist_ok=True)
    raw = target.with_suffix(".json")
    labels: dict[str, list[dict[str, Any]]] = json.loads(raw.read_text()) if raw.exists() else {}
    earlier = [] if arguments.fresh else labels.get(arguments.label, [])
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    labels[arguments.label] = [*earlier, {"machine": machine, "load": os.getloadavg()[0], "epochs": epochs}]
    raw.write_text(json.dumps(labels, indent=1) + "\n")
    text = report(labels)
    target.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
