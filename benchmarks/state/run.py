"""Weir's keyed aggregation side by side with its peers', on one machine, in one run.

    make bench-state                                              everything
    python -m benchmarks.state.run --quick                        a look: 1M keys, three epochs, one repetition
    python -m benchmarks.state.run --rows weir-aggregate,spark-changelog --scenario 'uniform-*' --reps 3

Repetitions alternate: each goes once through all rows. Every measurement is appended to a file below the scratch directory as
soon as it is made, so an interrupted run goes on where it was; `--again` forgets what was measured. At the end the report is written
from all that there is, as `python -m benchmarks.state.report` does alone. What is measured: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from benchmarks import pace
from benchmarks.state import report
from benchmarks.state.measure import Measurement, measure
from benchmarks.state.rows import ROWS, SCENARIOS, Row, Scenario

_QUICK_EPOCHS = 3
# Guesses for the estimate: events/s of a group, and seconds of start and check of one measurement.
_RATES = {"weir": 250_000, "a": 120_000, "b": 1_000, "c": 120_000, "d": 1_000, "e": 40_000}
_AROUND_SECONDS = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help="uniform-1m only, three epochs, one repetition")
    amount.add_argument("--full", action="store_true", help="everything (the default)")
    parser.add_argument("--rows", help="names or patterns, comma-separated")
    parser.add_argument("--scenario", help="names or patterns, comma-separated")
    parser.add_argument("--reps", type=int, help="repetitions (5, quick 1)")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "weir-bench-state")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="report's path, without suffix")
    parser.add_argument("--again", action="store_true", help="forget earlier measurements")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the engine's process ends as well
    scratch = given.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    log = scratch / ("measurements-quick.jsonl" if given.quick else "measurements.jsonl")
    if given.again:
        log.unlink(missing_ok=True)
    scenarios = [
        one
        for one in SCENARIOS
        if _chosen(one.workload.name, given.scenario or ("uniform-1m" if given.quick else None))
    ]
    rows = [row for row in ROWS if _chosen(row.name, given.rows)]
    repetitions = given.reps or (1 if given.quick else 5)
    epochs = _QUICK_EPOCHS if given.quick else None
    _estimate(scenarios, rows, repetitions, epochs)
    for scenario in scenarios:
        _run(scratch, log, scenario, [row for row in rows if row.name in scenario.rows], repetitions, epochs)
        shutil.rmtree(scratch / "bootstraps" / scenario.workload.name, ignore_errors=True)
    command = (
        "make bench-state" if not (given.quick or given.rows or given.scenario) else "python -m benchmarks.state.run"
    )
    report.write(report.load(log), given.results, command)
    print(given.results.with_suffix(".md").read_text())


def _chosen(name: str, patterns: str | None) -> bool:
    return patterns is None or any(fnmatch(name, pattern) for pattern in patterns.split(","))


def _run(
    scratch: Path, log: Path, scenario: Scenario, rows: Sequence[Row], repetitions: int, epochs: int | None
) -> None:
    workload = scenario.workload
    done = {(one.row, one.repetition) for one in report.load(log) if one.workload == workload.name and not one.error}
    failed: set[str] = set()  # in this run; the next one tries again
    for repetition in range(repetitions):
        for row in rows:
            if (row.name, repetition) in done or row.name in failed:
                continue
            slices = row.slices(workload, epochs or workload.epochs)
            free = shutil.disk_usage(scratch).free
            if free < scenario.disk:
                lacking = f"needs {scenario.disk >> 30} GiB of free disk, {free >> 30} were free"
                one = Measurement(workload.name, row.name, repetition, slices.epochs, slices.events, error=lacking)
            else:
                measured, paces = pace.steadily(partial(measure, scratch, workload, row, slices, repetition))
                one = replace(measured, pace=paces)
            with log.open("a") as file:
                file.write(json.dumps(asdict(one)) + "\n")
            if one.error:
                failed.add(row.name)
            print(f"{workload.name} {row.name} {repetition + 1}/{repetitions}: {_said(one)}", flush=True)


def _said(one: Measurement) -> str:
    if one.error:
        return one.error
    right = "equal to DuckDB's" if not one.differing else f"{one.differing:,} OF {one.keys:,} KEYS DIFFER"
    return f"{one.steady:,.0f} events/s, {one.whole:,.0f} with start-up; {right}"


def _estimate(scenarios: Sequence[Scenario], rows: Sequence[Row], repetitions: int, epochs: int | None) -> None:
    seconds = 0.0
    for scenario in scenarios:
        workload = scenario.workload
        for row in rows:
            if row.name in scenario.rows:
                slow = 3 if workload.payload else 1
                events = row.slices(workload, epochs or workload.epochs).total
                once = workload.keys if workload.preload else 0
                repeated = once if row.peers else 0
                seconds += repetitions * (_AROUND_SECONDS + slow * (events + repeated) / _RATES[row.group])
                seconds += slow * (once - repeated) / _RATES[row.group]
    print(
        f"{len(scenarios)} workloads, {repetitions} repetitions: about {seconds / 60:.0f} minutes on a quiet machine",
        flush=True,
    )


if __name__ == "__main__":
    main()
