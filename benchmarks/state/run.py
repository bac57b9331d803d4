"""Weir's keyed aggregation side by side with its peers', on one machine, in one run.

    make bench-state                                              everything
    python -m benchmarks.state.run --quick                        a look: 1M keys, three epochs, one repetition
    python -m benchmarks.state.run --rows weir-aggregate,spark-changelog --scenario 'uniform-*' --reps 3

Repetitions alternate: each goes once through all rows. Every measurement is appended to a file below the scratch
directory as soon as it is made, so an interrupted run goes on where it was; `--again` forgets what was measured. At the
end the report is written from all that there is, as `python -m benchmarks.state.report` does alone. What is measured:
benchmarks/README.md.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import harness
from benchmarks.state import report
from benchmarks.state.measure import Measurement, measure
from benchmarks.state.rows import ROWS, SCENARIOS, Row, Scenario

_QUICK_EPOCHS = 3
# Guesses for the estimate: events/s of a group, and seconds of start and check of one measurement.
_RATES = {"weir": 250_000, "a": 120_000, "b": 1_000, "c": 120_000, "d": 1_000, "e": 40_000}
_AROUND_SECONDS = 25


def main(
    quick: Annotated[bool, typer.Option("--quick", help="uniform-1m only, three epochs, one repetition")] = False,
    full: Annotated[bool, typer.Option("--full", help="everything (the default)")] = False,
    rows: Annotated[str | None, typer.Option(help="names or patterns, comma-separated")] = None,
    scenario: Annotated[str | None, typer.Option(help="names or patterns, comma-separated")] = None,
    reps: Annotated[int | None, typer.Option(help="repetitions (5, quick 1)")] = None,
    scratch: Path = report.SCRATCH,
    results: Annotated[Path, typer.Option(help="report's path, without suffix")] = report.RESULTS,
    again: Annotated[bool, typer.Option("--again", help="forget earlier measurements")] = False,
) -> None:
    """Weir's keyed aggregation side by side with its peers', on one machine, in one run."""
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the engine's process ends as well
    scratch = scratch.resolve()
    log = report.log(scratch, quick, again)
    pattern = scenario or ("uniform-1m" if quick else None)
    scenarios = [scenario for scenario in SCENARIOS if _chosen(scenario.workload.name, pattern)]
    chosen = [row for row in ROWS if _chosen(row.name, rows)]
    repetitions = reps or (1 if quick else 5)
    _estimate(scenarios, chosen, repetitions, _QUICK_EPOCHS if quick else None)
    for matched in scenarios:
        for measured in _run(scratch, log, matched, chosen, repetitions, _QUICK_EPOCHS if quick else None):
            print(
                f"{measured.workload} {measured.row} {measured.repetition + 1}/{repetitions}: {_line(measured)}",
                flush=True,
            )
        shutil.rmtree(scratch / "bootstraps" / matched.workload.name, ignore_errors=True)
    command = "python -m benchmarks.state.run" if quick or rows or scenario else "make bench-state"
    report.write([Measurement(**row) for row in log.rows()], results, command)


def _chosen(name: str, patterns: str | None) -> bool:
    return patterns is None or any(fnmatch(name, pattern) for pattern in patterns.split(","))


def _run(
    scratch: Path, log: harness.Log, scenario: Scenario, rows: Sequence[Row], repetitions: int, epochs: int | None
) -> Iterator[Measurement]:
    """Measure what is not measured yet. What fails is tried again by the next run, not in this one."""
    workload = scenario.workload
    failed: set[str] = set()
    for repetition in range(repetitions):
        for row in (row for row in rows if row.name in scenario.rows):
            key = {"workload": workload.name, "row": row.name, "repetition": repetition}
            if row.name in failed or log.has(**key):
                continue
            slices = row.slices(workload, epochs or workload.epochs)
            free = shutil.disk_usage(scratch).free
            if free < scenario.disk:
                lacking = f"needs {scenario.disk >> 30} GiB of free disk, {free >> 30} were free"
                measured = Measurement(**key, epochs=slices.epochs, events=slices.events, error=lacking)
            else:
                once = partial(measure, scratch, workload, row, slices, repetition)
                measured, paces = harness.measure_steadily(once)
                measured = replace(measured, pace=paces)
            log.add(asdict(measured))
            failed |= {row.name} if measured.error else set()
            yield measured


def _line(measurement: Measurement) -> str:
    if measurement.error:
        return measurement.error
    right = (
        "equal to DuckDB's"
        if not measurement.differing
        else f"{measurement.differing:,} OF {measurement.keys:,} KEYS DIFFER"
    )
    return f"{measurement.steady:,.0f} events/s, {measurement.whole:,.0f} with start-up; {right}"


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
    typer.run(main)
