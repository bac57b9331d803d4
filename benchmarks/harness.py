"""What all benchmarks share: clocks, fresh processes, the machine and its pace, interrupted runs that go on, and
reports.

A benchmark measures, hands its figures to `publish`, and has its page as a template in `templates/`. A template is
Markdown with Jinja's expressions; `{{ value|number(",.0f") }}` formats as Python's `format` does.

What a shared machine gives changes by the hour, and figures of two such hours make no ratio. So `measure_steadily` and
`Log.measure` look at the pace before and after a measurement, and `at_usual_pace` leaves out what was made at another
one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from weir import Pipeline
from weir.epoch.model import EpochReport
from weir.run.run import RunOptions, run
from weir.settings.configuration import Settings

RESULTS = Path(__file__).parent / "results"
TEMPLATES = Path(__file__).parent / "templates"
TOLERANCE = 1.25
"""By how much two looks at the pace may differ and still count as the same machine."""
_LOOPS, _ADDITIONS, _ATTEMPTS = 7, 1_000_000, 3
_PLACES = ("--results", "--scratch")  # options that say nothing about how figures were made

Result = TypeVar("Result")
Row = dict[str, Any]


# Clocks


class Stopwatch:
    """Within `with`: milliseconds of wall clock, and of the CPU time of all threads of this process."""

    ms = cpu_ms = 0.0

    def __enter__(self) -> Stopwatch:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.ms, self.cpu_ms = (time.perf_counter() - self._wall) * 1e3, (time.process_time() - self._cpu) * 1e3


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    with Stopwatch() as clock:
        call()
    return clock.ms / 1e3


def cpu_seconds(pid: int | None = None) -> float:
    """CPU time of a process, by default this one, and of all that it started and that still live."""
    root = psutil.Process(pid)
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def medians(rows: Sequence[Row]) -> dict[str, float]:
    """The median of every figure; one that a row lacks counts as 0 there."""
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in rows[0]}


def medians_of(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of every column."""
    return {name: statistics.median(values) for name, values in columns.items()}


# Runs


class Epoch(NamedTuple):
    """An epoch that has ended: milliseconds of wall clock since the one before, CPU time of all processes, its
    report."""

    wall: float
    cpu: float
    report: EpochReport


def epochs(pipeline: Pipeline, settings: Settings, executor: Any = None, to_the_end: bool = True) -> Iterator[Epoch]:
    """Run a pipeline until it has caught up, or without an end until it is asked to stop."""
    began, used = time.perf_counter(), cpu_seconds()
    for report in run(pipeline, settings, RunOptions(until_caught_up=to_the_end), executor):
        ended, now = time.perf_counter(), cpu_seconds()
        yield Epoch((ended - began) * 1e3, (now - used) * 1e3, report)
        began, used = ended, now


def local_settings(root: Path, name: str, landing: Path, **sections: Any) -> Settings:
    """Settings of a pipeline whose storage and work directory are below `root`; `sections` go before these."""
    return Settings.model_validate(
        {
            "storage": {"root": f"{root}/storage"},
            "local": {"work_dir": f"{root}/work", "cache_dir": f"{root}/cache"},
            "run": {"poll_seconds": 0.005},
            "pipelines": {name: {"object": "benchmarks:none", "params": {"landing": str(landing)}}},
            **sections,
        }
    )


def in_scratch(measure: Callable[..., Result], *arguments: Any) -> Result:
    """Measure below a directory that is removed afterwards, which is the first argument."""
    with tempfile.TemporaryDirectory(prefix="weir-benchmark-") as root:
        return measure(Path(root), *arguments)


def in_fresh_process(measure: Callable[..., Result], *arguments: Any) -> Result:
    """Measure in a process that has done nothing before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


# Pace


def probe() -> float:
    """Milliseconds for a million additions in Python: the least of seven, since others may come in between."""
    return min(seconds(lambda: sum_up(_ADDITIONS)) for _ in range(_LOOPS)) * 1e3


def sum_up(numbers: int) -> int:
    """Add up numbers in a plain loop."""
    total = 0
    for number in range(numbers):
        total += number
    return total


def measure_steadily(measure: Callable[[], Result]) -> tuple[Result, list[float]]:
    """Measure, again where the machine changed its pace, three times at most.

    Returns:
        The measurement, and the paces before and after it.
    """
    for attempt in range(_ATTEMPTS):
        before = probe()
        result = measure()
        paces = [round(before, 1), round(probe(), 1)]
        if is_same_pace(paces):
            break
        again = "measured again" if attempt + 1 < _ATTEMPTS else "kept, and left out of medians"
        print(f"  the machine changed its pace from {paces[0]} to {paces[1]} ms: {again}", flush=True)
    return result, paces


def is_same_pace(paces: Sequence[float]) -> bool:
    """Whether the machine was one and the same at all of these looks."""
    return not paces or max(paces) <= TOLERANCE * min(paces)


def at_usual_pace(measurements: Sequence[Result], paces: Callable[[Result], Sequence[float]]) -> list[Result]:
    """Those made at the pace that most were made at, or without a look at it."""
    looks = [look for measurement in measurements for look in paces(measurement)]
    middle = statistics.median(looks or [0.0])
    return [
        measurement
        for measurement in measurements
        if is_same_pace(paces(measurement)) and all(is_same_pace([look, middle]) for look in paces(measurement))
    ]


def pace_sentence(measurements: Sequence[Result], used: int, paces: Callable[[Result], Sequence[float]]) -> str:
    """A sentence for the report, "" where nobody has looked. used: how many measurements the figures rest on."""
    looks = [look for measurement in measurements for look in paces(measurement)]
    if not looks:
        return ""
    left_out = len(measurements) - used
    end = f"; {left_out} of {len(measurements)} measurements, made at another pace, are left out" if left_out else ""
    return (
        f"Pace of the machine (a million additions in Python) beside the measurements: {min(looks):.0f} to"
        f" {max(looks):.0f} ms, median {statistics.median(looks):.0f}{end}."
    )


class Log:
    """Measurements in a file, one JSON object a line, each written as soon as it is made: an interrupted run goes on.

    Args:
        file: The log.
        key: Columns that tell measurements apart.
        again: Whether to forget what was measured before.
    """

    def __init__(self, file: Path, key: tuple[str, ...], again: bool = False) -> None:
        self._file, self._key = file, key
        file.parent.mkdir(parents=True, exist_ok=True)
        if again:
            file.unlink(missing_ok=True)

    def rows(self) -> list[Row]:
        """The last measurement of each key. A line that an interrupted run left half-written is skipped."""
        rows: dict[tuple[Any, ...], Row] = {}
        for line in self._file.read_text().splitlines() if self._file.exists() else []:
            with suppress(ValueError):
                row = json.loads(line)
                rows[tuple(row[name] for name in self._key)] = row
        return list(rows.values())

    def has(self, **key: Any) -> bool:
        """Whether there is such a measurement that did not fail."""
        return any(not row["error"] and all(row[name] == value for name, value in key.items()) for row in self.rows())

    def add(self, row: Row) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")


# Reports


def machine() -> str:
    """This machine, for a reader who wants to compare."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 2**30
    processor = f" ({names[0]})" if names else ""
    return (
        f"{os.cpu_count()} cores{processor}, {memory:.0f} GiB of memory, {platform.system()}, "
        f"Python {platform.python_version()}"
    )


def _lines(file: str) -> list[str]:
    return Path(file).read_text().splitlines() if Path(file).exists() else []


def command(module: str, target: str = "") -> str:
    """What made the figures, without where they were put. target: of make, which stands for no options."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word in _PLACES:
            next(words)
        elif word != "--again":
            kept.append(word)
    return f"python -m {module} {shlex.join(kept)}".rstrip() if kept or not target else f"make {target}"


def render(template: str, **values: Any) -> str:
    """A page from `templates/`."""
    pages = Environment(
        loader=FileSystemLoader([TEMPLATES, TEMPLATES / "storage", TEMPLATES / "nexmark"]),
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    pages.filters |= {
        "number": format,
        "median": lambda values: statistics.median(list(values)),
        "medians": medians,
        "json": partial(json.dumps, sort_keys=True),
    }
    return pages.get_template(f"{template}.md").render(values)


def publish(target: Path, figures: Any, page: str) -> None:
    """Write `target`.json and `target`.md, and print the page."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    target.with_suffix(".md").write_text(page)
    print(page)
