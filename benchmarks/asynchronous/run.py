"""Asynchronous checkpoints: throughput on slow storage, and the time from a file's landing to its row in a table.

    make bench-async               about a quarter of an hour; writes benchmarks/results/asynchronous.*
    python -m benchmarks.asynchronous.run --quick --results /tmp/asynchronous
    python -m benchmarks.asynchronous.run --part latency --reps 3
    python -m benchmarks.asynchronous.run --part alternating --compression zstd --concurrent 3

Repetitions alternate: each goes once through all variants and engines. Every measurement is appended to a file below
the scratch directory as soon as it is made, so an interrupted run goes on where it was, and more repetitions add to
those that there are; `--again` forgets what was measured. What is measured: benchmarks/README.md.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks import harness
from benchmarks.asynchronous import latency, report, throughput
from benchmarks.asynchronous.latency import Arrivals, Latency
from benchmarks.asynchronous.store import SCRATCH, Limits, gateway
from benchmarks.asynchronous.throughput import Throughput, Variant
from benchmarks.state.workload import Workload

LIMITS = (Limits(), Limits(20, 50))
ALTERNATING_EPOCHS, STRETCH_SECONDS = 150, 14  # some 16 epochs of 500,000 events a stretch
LOAD = Workload("asynchronous", 1_000_000, epochs=12, events=500_000)
QUICK = Workload("asynchronous-quick", 200_000, epochs=4, events=100_000)
INTERVALS = (0.0, 1.0, 5.0)
ENGINES = ("weir", "spark")


Measured = Iterator[tuple[str, str, Callable[[int], Throughput | Latency]]]
Part = Literal["throughput", "alternating", "latency"]


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="a look: small epochs, one or two at a time, a few seconds")
    ] = False,
    part: Annotated[Part | None, typer.Option(help="only this one")] = None,
    reps: Annotated[int, typer.Option(help="repetitions")] = 1,
    concurrent: Annotated[str, typer.Option(help="values of checkpoints.max_concurrent")] = "1,2,3",
    compression: Annotated[str, typer.Option(help="values of state.compression: lz4, zstd")] = "lz4",
    events: Annotated[int, typer.Option(help="events of an epoch")] = LOAD.events,
    epochs: Annotated[int, typer.Option(help="epochs of `alternating`")] = ALTERNATING_EPOCHS,
    stretch: Annotated[int, typer.Option(help="seconds of a stretch of `alternating`")] = STRETCH_SECONDS,
    scratch: Path = SCRATCH,
    results: Annotated[Path, typer.Option(help="report's path, without suffix")] = report.RESULTS,
    again: Annotated[bool, typer.Option("--again", help="forget earlier measurements")] = False,
) -> None:
    """Asynchronous checkpoints: throughput on slow storage, and the time from a file's landing to its row in a
    table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the engine's process ends as well
    scratch = scratch.resolve()
    log = harness.Log(scratch / ("measurements-quick.jsonl" if quick else "measurements.jsonl"), ("key",), again)
    gateway(scratch)
    load = QUICK if quick else replace(LOAD, name=f"{LOAD.name}-{events}", events=events)
    variants = [
        Variant(limits, number, compressed)
        for number in ([1, 2] if quick else map(int, concurrent.split(",")))
        for compressed in compression.split(",")
        for limits in LIMITS
    ]
    longer = replace(load, name=f"{load.name}-alternating", epochs=epochs)
    arrivals = replace(Arrivals(), measured=10.0) if quick else Arrivals()
    for repetition in range(reps):
        for kind, name, measure in _all(scratch, part, load, longer, stretch, variants, arrivals):
            key = f"{kind}: {name}, {repetition + 1}"
            if log.has(key=key):
                continue
            once = partial(measure, repetition)
            # What alternates is compared with what comes just before and after it.
            measured, paces = (once(), []) if kind == "alternating" else harness.measure_steadily(once)
            row = {"kind": kind, "key": key, "pace": paces, **asdict(measured)}
            log.add(row)
            print(f"{key}: {row['error'] or report.line_of(row)}", flush=True)
    report.write(log.rows(), results, harness.command("benchmarks.asynchronous.run", "bench-async"))


def _all(
    scratch: Path,
    part: Part | None,
    load: Workload,
    longer: Workload,
    stretch: int,
    variants: list[Variant],
    arrivals: Arrivals,
) -> Measured:
    """Kind, name and call of every measurement, in the order in which they alternate."""
    alternating = replace(LIMITS[1], alternate=stretch)
    by_kind = {
        "throughput": variants,
        "alternating": list(dict.fromkeys(replace(variant, limits=alternating) for variant in variants)),  # each once
    }
    for kind, chosen in by_kind.items():
        for variant in chosen if part == kind or (part is None and kind != "alternating") else ():
            events = longer if kind == "alternating" else load
            yield kind, f"{variant.name}, {load.events} events", partial(throughput.once, scratch, variant, events)
    for interval in INTERVALS if part in (None, "latency") else ():
        for engine in ENGINES:
            name = f"{engine} every {interval:g} s" if interval else f"{engine} as soon as possible"
            yield "latency", name, partial(latency.once, scratch, engine, interval, arrivals)


if __name__ == "__main__":
    typer.run(main)
