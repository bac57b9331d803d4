"""Epochs of the keyed aggregation on storage behind a link: how fast, and how much local disk."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.asynchronous.store import Limits, opened
from benchmarks.state import measure, workload
from benchmarks.state.engine import Task
from benchmarks.state.peers import environment
from benchmarks.state.workload import Slices, Workload

_LIMIT_SECONDS = 600
_SAMPLE_SECONDS = 0.1
_SETTLING_SECONDS = 4.0

Samples = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Variant:
    """How the storage is reached, how many epochs may be under way, and how RocksDB packs its files."""

    limits: Limits
    concurrent: int
    compression: str = "lz4"

    @property
    def name(self) -> str:
        return f"{self.limits.title}, max_concurrent {self.concurrent}, {self.compression}"


@dataclass(frozen=True, slots=True)
class Throughput:
    """steady: events/s between the ends of the first and the last epoch. drained: of the epochs after the first, from
    the trigger of the second to the end of the last, so that nothing that overlaps with neither is left out.
    high_water: bytes below the work directory, hard links once: the most in the first and in the second half of that
    time. stretches: of an alternating link, events/s of each stretch from the first whole one on; the first one's
    number, which has limits where it is odd."""

    variant: str
    repetition: int
    epochs: int
    events: int
    steady: float = 0.0
    drained: float = 0.0
    epoch_ms: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    high_water: tuple[int, int] = (0, 0)
    stretches: list[float] = field(default_factory=list)
    first_stretch: int = 0
    counters: dict[str, Any] = field(default_factory=dict)
    state_bytes: int = 0
    keys: int = 0
    differing: int = 0
    load: float = 0.0
    error: str = ""


def once(scratch: Path, variant: Variant, load: Workload, repetition: int) -> Throughput:
    """Run the variant in a fresh process, on an empty bucket. What fails is a measurement, with an error."""
    blank = Throughput(variant.name, repetition, load.epochs, load.events)
    return measure.attempt(scratch, blank, lambda run: _once(scratch, run, variant, load, repetition))


def _once(scratch: Path, run: Path, variant: Variant, load: Workload, repetition: int) -> Throughput:
    slices = Slices(load.epochs, load.events)
    inputs = workload.sliced(scratch, load, slices)
    busy = os.getloadavg()[0]
    with opened(variant.limits, scratch, run / "s3") as store:
        task = Task(
            row="throughput",
            inputs=[str(inputs)],
            files=workload.FILES,
            epochs=load.epochs,
            events=load.events,
            preload=0,
            durable=str(run / "durable"),
            local=str(run / "local"),
            result=str(run / "result.json"),
            payload=False,
            options={
                "form": "aggregate",
                "settings": {
                    "storage": store.settings(),
                    "local": {"work_dir": str(run / "work"), "cache_dir": str(scratch / "cache")},
                    "checkpoints": {"timeout_seconds": _LIMIT_SECONDS, "max_concurrent": variant.concurrent},
                    "state": {"compression": variant.compression},
                },
            },
        )
        with _sampled(lambda: _bytes(str(run / "work"))) as samples:
            place = environment(None, scratch)
            result = measure.start(task, "benchmarks.state.weir", place, run, _LIMIT_SECONDS)
        store.fetch("weir/bench/tables/totals/", run / "output")
    (begun, first), (ended, total) = result.progress[0], result.progress[-1]
    first_stretch, stretches = _stretches(result.progress, store.counters["begun"], variant.limits.alternate)
    return Throughput(
        variant=variant.name,
        repetition=repetition,
        epochs=load.epochs,
        events=load.events,
        steady=(total - first) / (ended - begun),
        drained=(total - first) / (ended - result.figures["triggered"][1]),
        epoch_ms=measure.epoch_ms(result.progress),
        phases=harness.medians(result.phases[:0:-1]),
        high_water=_halves(samples, begun, ended),
        stretches=stretches,
        first_stretch=first_stretch,
        counters=store.counters,
        state_bytes=result.figures["state_bytes"],
        load=busy,
        **workload.verify(scratch, load, slices, [f"{run}/output/*.parquet"]),
    )


def _stretches(progress: Sequence[tuple[float, int]], begun: float, seconds: float) -> tuple[int, list[float]]:
    """The number of the first stretch that lies between the ends of two epochs, and events/s of it and the others.
    Their first seconds, in which epochs of the stretch before go through, do not count."""
    if not seconds:
        return 0, []
    times, done = zip(*progress, strict=True)
    first = math.ceil((times[0] - begun) / seconds)
    speeds = []
    while (end := begun + (first + len(speeds) + 1) * seconds) <= times[-1]:
        counted = seconds - _SETTLING_SECONDS
        before, after = np.interp([end - counted, end], times, done)
        speeds.append(float(after - before) / counted)
    return first, speeds


def _halves(samples: Samples, begun: float, ended: float) -> tuple[int, int]:
    """The most in the first and in the second half of the time between."""
    half = (begun + ended) / 2
    first, second = ([size for at, size in samples if low <= at < high] for low, high in ((begun, half), (half, ended)))
    return max(first, default=0), max(second, default=0)


@contextmanager
def _sampled(bytes: Callable[[], int]) -> Iterator[Samples]:
    """Look at a size ten times a second. Each with the wall clock's seconds."""
    samples: Samples = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            samples.append((time.time(), bytes()))

    sampler = threading.Thread(target=look)
    sampler.start()
    try:
        yield samples
    finally:
        over.set()
        sampler.join()


def _bytes(directory: str) -> int:
    """Bytes of all files below, each inode once; what disappears meanwhile does not count."""
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(directory):  # passes over a directory that is gone
        for name in names:
            with suppress(FileNotFoundError):
                stat = Path(parent, name).lstat()
                sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())
