"""What quality gates cost: epochs of 500,000 rows without a gate, with one and with three; and with gates on state and figures.

    python -m benchmarks.gates                       about two minutes; writes benchmarks/results/gates.*

Real runs on Spark, local[2]. Every kind is one pipeline over the same files: running aggregates of a million keys, which hand out a row for
each key that an epoch touches, some 400,000. The kinds take turns, and medians are over all epochs that count. `gates` is what the
checkpoint records below `gate:` and `seal:gates`: the time in which the stage's lane waits for them; `share` is of the epoch's wall time.
An epoch overlaps with the next one, so wall time grows by less where another lane is the bottleneck. Seconds that Great Expectations takes
to be imported fall into the first epoch of a process, beside its Spark job, and are not counted.
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

from benchmarks.state import workload as work
from benchmarks.state.workload import Slices, Workload
from configs.settings import Settings
from pipelines.api import Pipeline, agg, aggregate, delta, expect, files
from pipelines.runtime import run as runtime
from pipelines.runtime.definition import Gate
from pipelines.runtime.run import RunOptions
from pipelines.runtime.spark_executor import SparkExecutor

WARM, COUNTED, ROUNDS, ROWS = 2, 4, 2, 500_000
TARGET = 0.05

_KEY = expect("ExpectColumnValuesToNotBeNull", column="key")
_N = expect("ExpectColumnValuesToBeBetween", column="n", min_value=1)
_PAIR = expect(
    "ExpectColumnPairValuesAToBeGreaterThanB", column_A="total", column_B="top", or_equal=True, on_failure="warn"
)
_TOP = expect("ExpectColumnValuesToBeBetween", column="top", min_value=-1e9, on_failure="warn")
_STATE = expect("ExpectColumnValuesToBeBetween", column="n", min_value=1, of="state")
_FIGURES = expect("ExpectColumnValuesToBeBetween", column="rows_out", min_value=1, of="figures")

KINDS: dict[str, tuple[Gate, ...]] = {
    "no gate": (),
    "one gate": (_N,),
    "three gates": (_KEY, _N, _TOP),
    "one gate on a pair of columns": (_PAIR,),
    "one of state, one of figures": (_STATE, _FIGURES),
}


def _pipeline(number: int, gates: tuple[Gate, ...]) -> Pipeline:
    totals = aggregate(
        "totals",
        files("{landing}/*.parquet"),
        key="key",
        n=agg.count(),
        total=agg.sum("value"),
        top=agg.max("value"),
        sink=delta.append("totals"),
        gate=gates,
    )
    return Pipeline(f"gates_{number}", (totals,))


def measure(scratch: Path) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of every epoch that counts, by kind."""
    epochs = WARM + COUNTED
    landing = work.sliced(scratch, Workload("gates", 1_000_000, epochs=epochs, events=ROWS), Slices(epochs, ROWS))
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for turn in range(ROUNDS):
        for number, (kind, gates) in enumerate(KINDS.items()):
            found[kind] += _run(_pipeline(number, gates), landing, scratch / str(turn))
    return found


def _run(pipeline: Pipeline, landing: Path, scratch: Path) -> list[dict[str, float]]:
    settings = Settings.model_validate(
        {
            "storage": {"root": f"{scratch}/storage"},
            "local": {"work_dir": f"{scratch}/work", "cache_dir": f"{scratch}/cache"},
            "epoch": {"max_files": work.FILES, "max_rows": 100 * ROWS},
            "run": {"poll_seconds": 0.005},
            "pipelines": {pipeline.name: {"object": "benchmarks:none", "params": {"landing": str(landing)}}},
        }
    )
    epochs, began = [], time.perf_counter()
    executor = SparkExecutor(settings, "weir-gates")
    for report in runtime.run(pipeline, settings, RunOptions(until_caught_up=True), executor):
        ended = time.perf_counter()
        asked = sum(ms for phase, ms in report.ms.items() if phase.startswith(("gate:", "seal:gates")))
        stage = sum(ms for phase, ms in report.ms.items() if phase.startswith("stage:"))
        out = report.checkpoint.operators["totals"]["rows_out"]
        epochs.append({"wall": (ended - began) * 1e3, "stage": stage, "gates": asked, "rows_out": out})
        began = ended
    return epochs[WARM:]


def report(found: dict[str, list[dict[str, float]]], machine: str) -> str:
    lines = [
        "# What quality gates cost",
        "",
        f"Medians over {ROUNDS * COUNTED} epochs of {ROWS:,} rows each, in milliseconds. {machine}. Made by `python -m benchmarks.gates`; what the columns",
        f"mean stands there. Target: below {TARGET:.0%} of the epoch.",
        "",
        "| | rows looked at | epoch | stage's job | gates | share |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind, epochs in found.items():
        middle = {name: statistics.median(epoch[name] for epoch in epochs) for name in epochs[0]}
        share = middle["gates"] / middle["wall"]
        rows = f"{middle['rows_out']:,.0f}" if any(gate.of == "rows" for gate in KINDS[kind]) else ""
        lines.append(
            f"| {kind} | {rows} | {middle['wall']:,.0f} | {middle['stage']:,.0f} | {middle['gates']:,.0f} | {share:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "gates")
    target = parser.parse_args().results
    with tempfile.TemporaryDirectory(prefix="weir-gates-") as root:
        found = measure(Path(root))
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".json").write_text(json.dumps({"machine": machine, "epochs": found}, indent=1) + "\n")
    text = report(found, machine)
    target.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
