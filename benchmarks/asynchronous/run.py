"""Asynchronous checkpoints: throughput on slow storage, and the time from a file's landing to its row in a table.

    make bench-async                                        about a quarter of an hour; writes benchmarks/results/asynchronous.*
    python -m benchmarks.asynchronous.run --quick --results /tmp/asynchronous
    python -m benchmarks.asynchronous.run --part latency --reps 3
    python -m benchmarks.asynchronous.run --part alternating --compression zstd --concurrent 3

Repetitions alternate: each goes once through all variants and engines. Every measurement is appended to a file below the scratch
directory as soon as it is made, so an interrupted run goes on where it was, and more repetitions add to those that there are;
`--again` forgets what was measured. What is measured: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import pace
from benchmarks.asynchronous import latency, report, throughput
from benchmarks.asynchronous.latency import Arrivals, Latency
from benchmarks.asynchronous.store import Limits, gateway
from benchmarks.asynchronous.throughput import Throughput, Variant
from benchmarks.state.workload import Workload

LIMITS = (Limits(), Limits(20, 50))
ALTERNATING_EPOCHS, STRETCH_SECONDS = 150, 14  # some 16 epochs of 500,000 events a stretch
STALLS = (Limits(), Limits(stall=60))
LOAD = Workload("asynchronous", 1_000_000, epochs=12, events=500_000)
QUICK = Workload("asynchronous-quick", 200_000, epochs=4, events=100_000)
INTERVALS = (0.0, 1.0, 5.0)
ENGINES = ("weir", "spark")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick", action="store_true", help="a look: small epochs, one or two at a time, a few seconds"
    )
    parser.add_argument("--part", choices=["throughput", "alternating", "stall", "latency"], help="only this one")
    parser.add_argument("--reps", type=int, default=1, help="repetitions (1)")
    parser.add_argument("--concurrent", default="1,2,3", help="values of checkpoints.max_concurrent")
    parser.add_argument("--compression", default="lz4", help="values of state.compression: lz4, zstd")
    parser.add_argument("--events", type=int, default=LOAD.events, help="events of an epoch (500000)")
    parser.add_argument("--epochs", type=int, default=ALTERNATING_EPOCHS, help="epochs of `alternating` (150)")
    parser.add_argument(
        "--stretch", type=int, default=STRETCH_SECONDS, help="seconds of a stretch of `alternating` (14)"
    )
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "weir-bench-async")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="report's path, without suffix")
    parser.add_argument("--again", action="store_true", help="forget earlier measurements")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the engine's process ends as well
    scratch = given.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    log = scratch / ("measurements-quick.jsonl" if given.quick else "measurements.jsonl")
    if given.again:
        log.unlink(missing_ok=True)
    concurrent = [1, 2] if given.quick else [int(number) for number in given.concurrent.split(",")]
    gateway(scratch)
    load = QUICK if given.quick else replace(LOAD, name=f"{LOAD.name}-{given.events}", events=given.events)
    variants = [
        Variant(limits, number, compression)
        for number in concurrent
        for compression in given.compression.split(",")
        for limits in LIMITS
    ]
    longer = replace(load, name=f"{load.name}-alternating", epochs=given.epochs)
    for kind, key, measure in _all(scratch, given.quick, given.part, load, longer, given.stretch, variants, given.reps):
        if key in {one["key"] for one in report.load(log) if not one["error"]}:
            continue
        # What alternates is compared with what comes just before and after it.
        measured, paces = (measure(), []) if kind == "alternating" else pace.steadily(measure)
        one = {"kind": kind, "key": key, "pace": paces, **asdict(measured)}
        with log.open("a") as file:
            file.write(json.dumps(one) + "\n")
        print(f"{key}: {one['error'] or report.said(one)}", flush=True)
    asked = [f"--part {given.part}"] if given.part else []
    asked += ["--quick"] if given.quick else []
    asked += [f"--reps {given.reps}"] if given.reps != 1 else []
    asked += [f"--concurrent {given.concurrent}"] if given.concurrent != "1,2,3" else []
    asked += [f"--compression {given.compression}"] if given.compression != "lz4" else []
    asked += [f"--events {given.events}"] if given.events != LOAD.events else []
    asked += [f"--epochs {given.epochs}"] if given.epochs != ALTERNATING_EPOCHS else []
    asked += [f"--stretch {given.stretch}"] if given.stretch != STRETCH_SECONDS else []
    command = f"python -m benchmarks.asynchronous.run {' '.join(asked)}" if asked else "make bench-async"
    report.write(report.load(log), given.results, command)
    print(given.results.with_suffix(".md").read_text())


Measured = Iterator[tuple[str, str, Callable[[], Throughput | Latency]]]


def _all(
    scratch: Path,
    quick: bool,
    part: str | None,
    load: Workload,
    longer: Workload,
    stretch: int,
    variants: list[Variant],
    repetitions: int,
) -> Measured:
    """Kind, key and call of every measurement, in the order in which they alternate."""
    arrivals = replace(Arrivals(), measured=10.0) if quick else Arrivals()
    for repetition in range(repetitions):
        for limits in STALLS if part in (None, "stall") else ():
            variant = Variant(limits, 2)
            yield _one(
                "stall", f"{variant.name}, {load.events} events", repetition, throughput.once, scratch, variant, load
            )
        for variant in variants if part in (None, "throughput") else ():
            name = f"{variant.name}, {load.events} events"
            yield _one("throughput", name, repetition, throughput.once, scratch, variant, load)
        alternating = replace(LIMITS[1], alternate=stretch)
        coming_and_going = dict.fromkeys(replace(one, limits=alternating) for one in variants)  # each once
        for variant in coming_and_going if part == "alternating" else ():
            name = f"{variant.name}, {load.events} events"
            yield _one("alternating", name, repetition, throughput.once, scratch, variant, longer)
        for interval in INTERVALS if part in (None, "latency") else ():
            for engine in ENGINES:
                name = f"{engine} every {interval:g} s" if interval else f"{engine} as soon as possible"
                yield _one("latency", name, repetition, latency.once, scratch, engine, interval, arrivals)


def _one(
    kind: str, name: str, repetition: int, once: Callable[..., Any], *arguments: Any
) -> tuple[str, str, Callable[[], Any]]:
    return kind, f"{kind}: {name}, {repetition + 1}", lambda: once(*arguments, repetition)


if __name__ == "__main__":
    main()
