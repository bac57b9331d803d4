"""What quality gates cost: epochs of 500,000 rows without a gate, with one and with three; and with gates on state and figures.

    python -m benchmarks.gates                       about ten minutes; writes benchmarks/results/gates.*

Real runs on Spark, local[2]. Every kind is one pipeline over the same files: running aggregates of a million keys, which hand out a row for
each key that an epoch touches, some 400,000. The kinds take turns, forwards and backwards, after a run that warms up; medians are over all epochs
that count.

- gates: what the report has below `gate:` and `seal:gates`. They are asked beside the stage's next epoch, so nothing waits for them but the commit.
- to commit: from the trigger to the commit, other epochs' waits included.
- cpu: of this process, Spark's JVM and its workers together. It is steadier than wall time beside other load.
- gates' cpu: of the thread that asks them. Where all cores are busy all the time, it makes an epoch longer by its share of cpu, and by less where they
  are not. That share is compared with the target: it holds beside other load, too.
- longer by: against epochs without a gate, the median over rounds of the ratio of medians. Beside other load it is noise.

Seconds that Great Expectations takes to be imported fall into the first epoch of a process, beside its Spark job, and are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.epoch_profile import cpu_seconds
from benchmarks.state import workload as work
from benchmarks.state.workload import Slices, Workload
from configs.settings import Settings
from pipelines.api import Pipeline, agg, aggregate, delta, expect, files
from pipelines.runtime.definition import Gate
from pipelines.runtime.epoch import transitions
from pipelines.runtime.epoch.stage_job import judge
from pipelines.runtime.execution.spark_executor import SparkExecutor
from pipelines.runtime.gates import epoch_gates
from pipelines.runtime.gates.epoch_gates import verdicts
from pipelines.runtime.run import run as runtime
from pipelines.runtime.run.run import RunOptions

WARM, COUNTED, ROUNDS, ROWS = 2, 5, 6, 500_000
TARGET = 0.05
_PROFILE = (
    "Where an expectation's time goes, by cProfile of three gates on 400,000 rows: 87 % is spent in validating the graph of its metrics, of which more than three quarters do",
    "not look at a row. The dependencies of metrics are worked out twice for each expectation (47 %), which builds its configuration some 150 times (34 %).",
    "Resolving the metrics, all that looks at rows, takes 20 %, the batch and its validator 9 %, the conversion to pandas 3 %. So nothing that a",
    "suite could share is worth sharing, and what Weir can do is not to wait.",
)

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
    "one of state": (_STATE,),
    "one of figures": (_FIGURES,),
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


def measure(scratch: Path) -> dict[str, list[list[dict[str, float]]]]:
    """Milliseconds of every epoch that counts, by kind and round."""
    epochs = WARM + COUNTED
    landing = work.sliced(scratch, Workload("gates", 1_000_000, epochs=epochs, events=ROWS), Slices(epochs, ROWS))
    found: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in KINDS}
    _run(_pipeline(len(KINDS), ()), landing, scratch / "warm")
    for turn in range(ROUNDS):
        for number, (kind, gates) in list(enumerate(KINDS.items()))[:: -1 if turn % 2 else 1]:
            found[kind].append(_run(_pipeline(number, gates), landing, scratch / str(turn)))
            shutil.rmtree(scratch / str(turn))
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
    epochs, began, used = [], time.perf_counter(), cpu_seconds()
    executor = SparkExecutor(settings, "weir-gates")
    asked_rows, asked_whole = list[float](), list[float]()
    transitions.judge, epoch_gates.verdicts = _timed(judge, asked_rows), _timed(verdicts, asked_whole)
    for report in runtime.run(pipeline, settings, RunOptions(until_caught_up=True), executor):
        ended, now = time.perf_counter(), cpu_seconds()
        asked = sum(ms for phase, ms in report.ms.items() if phase.startswith(("gate:", "seal:gates")))
        epochs.append(
            {
                "wall": (ended - began) * 1e3,
                "cpu": (now - used) * 1e3,
                "gates_cpu": 0.0,
                "to_commit": report.checkpoint.ms["to_commit"],
                "gates": asked,
                "rows_out": report.checkpoint.operators["totals"]["rows_out"],
            }
        )
        began, used = ended, now
    asking = sum(statistics.median(calls[WARM:]) for calls in (asked_rows, asked_whole) if calls)
    return [one | {"gates_cpu": asking * 1e3} for one in epochs[WARM:]]


def report(found: dict[str, list[list[dict[str, float]]]], machine: str, load: float) -> str:
    lines = [
        "# What quality gates cost",
        "",
        f"Medians over {ROUNDS * COUNTED} epochs of {ROWS:,} rows each, in milliseconds. {machine}. Made by `python -m benchmarks.gates`; what the columns",
        f"mean stands there. Load average at the start {load:.1f}. Target: a share of at most {TARGET:.0%}.",
        "",
        "| | rows looked at | gates | gates' cpu | epoch | to commit | cpu | **share of cpu** | longer by |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    plain = [_medians(epochs) for epochs in found["no gate"]]
    for kind, rounds in found.items():
        middle = _medians([epoch for epochs in rounds for epoch in epochs])
        by_round = list(zip([_medians(epochs) for epochs in rounds], plain, strict=True))
        longer = statistics.median(own["wall"] / without["wall"] - 1 for own, without in by_round)
        share = f"{middle['gates_cpu'] / middle['cpu']:.1%} | {longer:+.1%}" if KINDS[kind] else " | "
        rows = f"{middle['rows_out']:,.0f}" if any(gate.of == "rows" for gate in KINDS[kind]) else ""
        lines.append(
            f"| {kind} | {rows} | {middle['gates']:,.0f} | {middle['gates_cpu']:,.0f} | {middle['wall']:,.0f} | {middle['to_commit']:,.0f} "
            f"| {middle['cpu']:,.0f} | {share} |"
        )
    return "\n".join([*lines, "", *_PROFILE]) + "\n"


def _timed(step: Callable[..., Any], took: list[float]) -> Callable[..., Any]:
    """The same step; took: the seconds of processor time of its thread, call by call."""

    def timed(*given: Any) -> Any:
        began = time.thread_time()
        try:
            return step(*given)
        finally:
            took.append(time.thread_time() - began)

    return timed


def _medians(epochs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(epoch[name] for epoch in epochs) for name in epochs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "gates")
    target = parser.parse_args().results
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="weir-gates-") as root:
        found = measure(Path(root))
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".json").write_text(
        json.dumps({"machine": machine, "load": load, "epochs": found}, indent=1) + "\n"
    )
    text = report(found, machine, load)
    target.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
