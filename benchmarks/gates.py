"""What quality gates cost: epochs of 500,000 rows without a gate, with one and with three; and with gates on state and
figures.

    python -m benchmarks.gates                       about ten minutes; writes benchmarks/results/gates.*

Real runs on Spark, local[2]. Every kind is one pipeline over the same files: running aggregates of a million keys,
which hand out a row for each key that an epoch touches, some 400,000. The kinds take turns, forwards and backwards,
after a run that warms up; medians are over all epochs that count.

- gates: what the report has below `gate:` and `seal:gates`. They are asked beside the stage's next epoch, so nothing
  waits for them but the commit.
- to commit: from the trigger to the commit, other epochs' waits included.
- cpu: of this process, Spark's JVM and its workers together. It is steadier than wall time beside other load.
- gates' cpu: of the thread that asks them. Where all cores are busy all the time, it makes an epoch longer by its share
  of cpu, and by less where they are not. That share is compared with the target: it holds beside other load, too.
- longer by: against epochs without a gate, the median over rounds of the ratio of medians. Beside other load it is
  noise.

Seconds that Great Expectations takes to be imported fall into the first epoch of a process, beside its Spark job, and
are not counted.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.state import workload as work
from benchmarks.state.workload import Slices, Workload
from pipelines.api import Pipeline, agg, aggregate, delta, expect, files
from pipelines.runtime.definition import Gate
from pipelines.runtime.epoch import transitions
from pipelines.runtime.execution.spark.spark_executor import SparkExecutor
from pipelines.runtime.gates import epoch_gates

WARM, COUNTED, ROUNDS, ROWS = 2, 5, 6, 500_000
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
    runs: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in KINDS}
    _run(_pipeline(len(KINDS), ()), landing, scratch / "warm")
    for turn in range(ROUNDS):
        for number, (kind, gates) in list(enumerate(KINDS.items()))[:: -1 if turn % 2 else 1]:
            runs[kind].append(_run(_pipeline(number, gates), landing, scratch / str(turn)))
            shutil.rmtree(scratch / str(turn))
    return runs


def _run(pipeline: Pipeline, landing: Path, scratch: Path) -> list[dict[str, float]]:
    settings = harness.local_settings(
        scratch, pipeline.name, landing, epoch={"max_files": work.FILES, "max_rows": 100 * ROWS}
    )
    executor = SparkExecutor(settings, "weir-gates")
    with _timed(transitions, "judge") as rows, _timed(epoch_gates, "verdicts") as wholes:
        epochs = [
            {
                "wall": wall,
                "cpu": cpu,
                "to_commit": report.checkpoint.ms["to_commit"],
                "gates": sum(ms for phase, ms in report.ms.items() if phase.startswith(("gate:", "seal:gates"))),
                "rows_out": report.checkpoint.operators["totals"].rows_out,
            }
            for wall, cpu, report in harness.epochs(pipeline, settings, executor)
        ]
    gates_cpu = sum(statistics.median(calls[WARM:]) for calls in (rows, wholes) if calls)
    return [epoch | {"gates_cpu": gates_cpu * 1e3} for epoch in epochs[WARM:]]


@contextmanager
def _timed(module: Any, step: str) -> Iterator[list[float]]:
    """Seconds of processor time of the thread that takes a step, call by call."""
    times: list[float] = []
    original = getattr(module, step)

    def timed(*given: Any) -> Any:
        began = time.thread_time()
        try:
            return original(*given)
        finally:
            times.append(time.thread_time() - began)

    with patch.object(module, step, timed):
        yield times


def report(figures: Row) -> str:
    """The Markdown of what was measured."""
    plain = [harness.medians(epochs) for epochs in figures["epochs"]["no gate"]]
    rows = {}
    for kind, rounds in figures["epochs"].items():
        pairs = zip([harness.medians(epochs) for epochs in rounds], plain, strict=True)
        rows[kind] = {
            **harness.medians([epoch for epochs in rounds for epoch in epochs]),
            "longer": statistics.median(gated["wall"] / without["wall"] - 1 for gated, without in pairs),
            "reads_rows": any(gate.of == "rows" for gate in KINDS[kind]),
        }
    return harness.render("gates", **figures, rows=rows, counted=ROUNDS * COUNTED, size=ROWS, target=TARGET)


def main(results: Path = harness.RESULTS / "gates") -> None:
    """What quality gates cost: epochs without a gate, with one and with three; and with gates on state and figures."""
    figures = {"machine": harness.machine(), "load": os.getloadavg()[0], "epochs": harness.in_scratch(measure)}
    harness.publish(results, figures, report(figures))


if __name__ == "__main__":
    typer.run(main)
