"""Where the time of an epoch goes: epochs of 500,000 rows and empty ones, with one keyed stage, with a where, with two.

    make bench-epoch                                  three minutes; writes benchmarks/results/epoch-profile.*
    python -m benchmarks.epoch_profile --label before  one more run under a label; the report has a column for each

Real runs on Spark through the public generator, and nothing but what it reports: a checkpoint's milliseconds by phase
and its operators' figures. `totals` counts, sums and takes the maximum of a million keys, spread evenly; `kept` does
that with the half of the rows that its where keeps; `often` counts how many keys have been seen how often. Every run is
a process of its own, so that two versions of the code can be measured in turns, and medians of their runs compared: a
machine with neighbours moves by more than what is looked for.

- wall: from one report to the next; for empty epochs, which are asked for, from the request to the report.
- cpu: of this process, Spark's JVM and its Python workers together. It is steadier than wall time.
- stages: what the driver waited for the stages' jobs. tasks: the part of it inside keyed tasks (the slowest subtask of
  every phase). The difference, spark, is planning, reading, shuffling, starting tasks, and bringing acks back.
- commit, publish, prune: after the stages. rest: wall less all of these: looking for files and requests, planning the
  slice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.state import workload as work
from benchmarks.state.workload import Slices, Workload
from state_ops.coordination import requests
from state_ops.coordination.requests import Request
from state_ops.records.operator_stats import OperatorStats
from weir import Pipeline, agg, aggregate, delta, files
from weir.ownership.pipeline_storage import open_storage

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
_where = replace(_totals.inputs[0], where="key % 2 = 0 AND value IS NOT NULL")
_kept = replace(_totals, uid="kept", inputs=(_where,), sink=delta.append("kept"))
_often = aggregate("often", _totals, key="n", keys=agg.count(), sink=delta.append("often"))

PIPELINES = {
    "one stage": Pipeline("one", (_totals,)),
    "one stage with a where": Pipeline("where", (_kept,)),
    "two stages": Pipeline("two", (_totals, _often)),
}

ROWS = 500_000
"""Of an epoch with rows."""


def measure(scratch: Path, full: int, empty: int, only: str | None = None) -> dict[str, list[dict[str, float]]]:
    """Milliseconds by phase of every epoch that counts, by kind of epoch.

    Args:
        scratch: Where everything goes.
        full: How many epochs with rows count.
        empty: How many epochs without rows count.
        only: One of `PIPELINES`; by default all.
    """
    shape = Workload("epoch-profile", 1_000_000, epochs=WARM + full, events=ROWS)
    landing = work.sliced(scratch, shape, Slices(WARM + full, ROWS))
    kinds: dict[str, list[dict[str, float]]] = {}
    for name, pipeline in PIPELINES.items() if only is None else [(only, PIPELINES[only])]:
        epochs = list(_epochs(pipeline, landing, scratch, full, empty))
        kinds[f"{name}, {ROWS:,} rows"], kinds[f"{name}, empty"] = epochs[WARM : WARM + full], epochs[-empty:]
    return kinds


def _epochs(pipeline: Pipeline, landing: Path, scratch: Path, full: int, empty: int) -> Iterator[dict[str, float]]:
    """Every epoch's milliseconds by phase: those with rows, then those without, each with those that warm up."""
    settings = harness.local_settings(
        scratch, pipeline.name, landing, epoch={"max_files": work.FILES, "max_rows": 100 * ROWS}
    )
    reports = harness.epochs(pipeline, settings, to_the_end=False)
    for number in range(2 * WARM + full + empty):
        began = time.perf_counter()
        if number >= WARM + full:
            requests.send(open_storage(pipeline, settings)[0], Request("barrier", reason="an epoch without data"))
        wall, cpu, report = next(reports)
        if number >= WARM + full:
            wall = (time.perf_counter() - began) * 1e3
        yield {
            "wall": round(wall, 1),
            "cpu": round(cpu, 1),
            **_phases(report.ms, report.checkpoint.operators),
        }
    requests.send(open_storage(pipeline, settings)[0], Request("stop"))
    assert not list(reports), "an epoch that nobody asked for"


def _phases(driver: dict[str, float], operators: dict[str, OperatorStats]) -> dict[str, float]:
    """By phase, over all stages. driver: ms that the coordinator noted; operators: a checkpoint's, with the tasks'
    ms."""
    inside: dict[str, float] = {}
    for stats in operators.values():
        for phase, ms in stats.ms.items():
            inside[f"task:{phase}"] = inside.get(f"task:{phase}", 0.0) + ms
    stages = sum(ms for phase, ms in driver.items() if phase.startswith("stage:"))
    tasks = sum(inside.values())
    after = {phase: ms for phase, ms in driver.items() if phase in ("commit", "publish", "prune")}
    return {"stages": stages, "spark": stages - tasks, "tasks": tasks, **inside, **after}


def medians(runs: list[Row], kind: str) -> dict[str, float]:
    """By phase, the median over all epochs of all runs. rest is of the medians: what no phase has."""
    middle = harness.medians([epoch for run in runs for epoch in run["epochs"][kind]])
    named = sum(middle.get(phase, 0.0) for phase in ("stages", "commit", "publish", "prune"))
    return middle | {"rest": middle["wall"] - named}


def report(labels: dict[str, list[Row]]) -> str:
    """The Markdown of all runs, by label."""
    first = next(iter(labels.values()))[0]
    kinds: dict[str, dict[str, dict[str, float]]] = {}
    for label, runs in labels.items():
        for kind in runs[0]["epochs"]:
            kinds.setdefault(kind, {})[label] = medians(runs, kind)
    return harness.render("epoch-profile", labels=labels, machine=first["machine"], kinds=kinds)


def main(
    label: Annotated[str, typer.Option(help="the report's column that this run belongs to")] = "now",
    fresh: Annotated[bool, typer.Option("--fresh", help="forget the label's earlier runs")] = False,
    results: Path = harness.RESULTS / "epoch-profile",
    full: Annotated[int, typer.Option(help="epochs with rows")] = 5,
    empty: Annotated[int, typer.Option(help="epochs without")] = 20,
    only: Annotated[str | None, typer.Option(help="one of the pipelines alone")] = None,
) -> None:
    """Where the time of an epoch goes, with rows and without."""
    raw = results.with_suffix(".json")
    labels: dict[str, list[Row]] = json.loads(raw.read_text()) if raw.exists() else {}
    epochs = harness.in_scratch(measure, full, empty, only)
    run = {"machine": harness.machine(), "epochs": epochs, "load": os.getloadavg()[0]}
    labels[label] = [*([] if fresh else labels.get(label, [])), run]
    harness.publish(results, labels, report(labels))


if __name__ == "__main__":
    typer.run(main)
