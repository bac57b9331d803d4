"""From a file's landing to its row in the Delta table: small files at a steady rate, one engine, one interval.

Every file holds a row whose key no other has. The observer, in this process, sees each commit of the table's log within
milliseconds; afterwards the data files say which commit made which of these rows visible, and DuckDB whether the table
holds what it should: each of these rows once, and every key's last row equal to an aggregation of all files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from benchmarks import harness
from benchmarks.state import workload
from benchmarks.state.measure import LOG, FailedError, attempt, process
from benchmarks.state.peers import environment

_PROJECT = Path(__file__).resolve().parents[2]
_KEYS = 10_000
_LOOK_SECONDS = 0.005
_START_SECONDS, _WARM_SECONDS, _END_SECONDS = 180, 120, 120
_BEHIND_SECONDS = 3.0  # of arrivals, beside those of an interval: an engine that has so few waiting keeps up
_AT_ONCE = 0.02  # Weir's interval and poll where barriers are to follow each other; Spark's trigger is 0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """rate: files per second; rows: of a file; warm: commits, at least, before the files that count; measured: seconds
    of those. They also wait until what a cold engine let pile up has been worked off."""

    rate: float = 5.0
    rows: int = 500
    warm: int = 5
    measured: float = 45.0

    @property
    def counted(self) -> int:
        return round(self.measured * self.rate)

    @property
    def most(self) -> int:
        """Files, with those of the longest warming up."""
        return self.counted + round(_WARM_SECONDS * self.rate)


@dataclass(frozen=True, slots=True)
class Latency:
    """engine: "weir" or "spark". interval: seconds; 0: as soon as possible. ms: of each counted file. commits: of the
    table in the counted time. warm: files before those that count. cpu: processors busy, of the engine's processes.
    differing: keys whose last row is wrong."""

    engine: str
    interval: float
    repetition: int
    ms: list[float] = field(default_factory=list)
    commits: int = 0
    warm: int = 0
    cpu: float = 0.0
    keys: int = 0
    differing: int = 0
    doubled: int = 0
    load: float = 0.0
    error: str = ""


def once(scratch: Path, engine: str, interval: float, arrivals: Arrivals, repetition: int) -> Latency:
    """One measurement. What fails is one, too, with an error."""
    blank = Latency(engine, interval, repetition)
    return attempt(scratch, blank, lambda run: _once(scratch, run, engine, interval, arrivals, repetition))


def _once(scratch: Path, run: Path, engine: str, interval: float, arrivals: Arrivals, repetition: int) -> Latency:
    (run / "landing").mkdir(parents=True)
    (run / "made").mkdir()
    _make(run / "made", arrivals.most + 1, arrivals.rows)
    load = os.getloadavg()[0]
    table = run / ("storage/bench/tables/totals" if engine == "weir" else "table")
    watch = Observer(table)
    place = environment(None, scratch)
    place.variables["WEIR_CONFIG"] = str(_configuration(scratch, run, interval or _AT_ONCE))
    with process(_command(scratch, run, engine, interval, table), place, run) as running:
        watch.start()
        try:
            _land(run, arrivals.most)  # one file ahead of all: its row says that the engine is up
            _wait(watch, running, {arrivals.most}, _START_SECONDS)
            landed: list[float] = []
            begun = time.monotonic()
            waiting, few = 0, arrivals.rate * (interval + _BEHIND_SECONDS)
            while (watch.commits < arrivals.warm or waiting > few) and len(landed) < arrivals.most - arrivals.counted:
                _land_on_time(run, landed, arrivals, begun)
                waiting = len(landed) + 1 - len(watch.read())
            before, since, first = harness.cpu_seconds(running.pid), time.monotonic(), len(landed)
            while len(landed) < first + arrivals.counted:
                _land_on_time(run, landed, arrivals, begun)
            cpu = (harness.cpu_seconds(running.pid) - before) / (time.monotonic() - since)
            _wait(watch, running, set(range(len(landed))), _END_SECONDS)
        except FailedError as error:
            raise FailedError(f"{error}: {(run / LOG).read_text(errors='replace').strip()[-300:]}") from None
        finally:
            watch.over.set()
            watch.join()
    seen = watch.seen
    truth = workload.totals([f"{run}/landing/*.parquet"])
    verdict = workload.compare(f"read_parquet({[str(file) for file in watch.files]})", truth, run)
    return Latency(
        engine=engine,
        interval=interval,
        repetition=repetition,
        ms=[round((seen[number] - landed[number]) * 1e3, 1) for number in range(first, len(landed))],
        commits=len({seen[number] for number in range(first, len(landed))}),
        warm=first,
        cpu=cpu,
        **verdict,
        doubled=watch.doubled,
        load=load,
    )


def _make(directory: Path, count: int, rows: int) -> None:
    """Files of `rows` rows over a few thousand keys, and one more row with a key of its own: -1 - the file's number."""
    rng = np.random.default_rng(11)
    for number in range(count):
        keys = np.append(rng.integers(0, _KEYS, rows), -1 - number)
        columns = {"key": pa.array(keys), "value": pa.array(rng.integers(0, 8_000, rows + 1) / 8.0)}
        pq.write_table(pa.table(columns), directory / f"{number:06}.parquet")


def _land_on_time(run: Path, landed: list[float], arrivals: Arrivals, begun: float) -> None:
    """The next file, at its moment of the steady rate that began then."""
    time.sleep(max(0.0, begun + len(landed) / arrivals.rate - time.monotonic()))
    landed.append(_land(run, len(landed)))


def _land(run: Path, number: int) -> float:
    """Move a file to where it is read, whole at once. Returns when."""
    unfinished = run / "made" / f"{number:06}.parquet"
    os.utime(unfinished)
    at = time.time()
    unfinished.rename(run / "landing" / unfinished.name)
    return at


def _command(scratch: Path, run: Path, engine: str, interval: float, table: Path) -> list[str]:
    """What starts an engine."""
    if engine == "weir":
        return [sys.executable, "-m", "weir.cli.main", "run", "bench"]
    task = {"landing": str(run / "landing"), "table": str(table), "local": str(run / "local"),
            "checkpoint": str(run / "checkpoint"), "interval": interval, "cache": str(scratch / "cache")}  # fmt: skip
    return [sys.executable, "-m", "benchmarks.asynchronous.spark_stream", json.dumps(task)]


def _configuration(scratch: Path, run: Path, interval: float) -> Path:
    file = run / "weir.yaml"
    settings = {
        "storage": {"root": str(run / "storage")},
        "local": {"work_dir": str(run / "work"), "cache_dir": str(scratch / "cache")},
        "checkpoints": {"interval_seconds": interval},
        "run": {"poll_seconds": _AT_ONCE},
        "pipelines": {
            "bench": {
                "object": "benchmarks.state.weir_pipelines:totals_pipeline",
                "params": {"landing": str(run / "landing")},
            }
        },
    }
    file.write_text(yaml.safe_dump(settings))
    return file


class Observer(threading.Thread):
    """Looks for the next commit of a Delta table's log all the time. seen: file number -> when its row was visible,
    wall clock in seconds. commits: so far. files: data files of all commits. doubled: rows of their own that came
    twice."""

    def __init__(self, table: Path) -> None:
        super().__init__()
        self._table, self.commits = table, 0
        self._logs: list[tuple[float, str]] = []
        self.over = threading.Event()
        self.seen: dict[int, float] = {}
        self.files: list[Path] = []
        self.doubled = 0

    def run(self) -> None:
        while not self.over.wait(_LOOK_SECONDS):
            log = self._table / "_delta_log" / f"{self.commits:020}.json"
            if log.exists():
                at = time.time()
                self._logs.append((at, log.read_text()))
                self.commits += 1

    def read(self) -> set[int]:
        """Which files' rows are visible, as far as the log has been seen."""
        while self._logs:
            at, text = self._logs.pop(0)
            for line in filter(None, text.splitlines()):
                added = json.loads(line).get("add")
                if added:
                    self.files.append(self._table / unquote(added["path"]))
                    keys = pq.read_table(self.files[-1], columns=["key"])["key"]
                    for key in keys.filter(pc.less(keys, 0)).to_pylist():
                        self.doubled += -1 - key in self.seen
                        self.seen.setdefault(-1 - key, at)
        return set(self.seen)


def _wait(watch: Observer, process: subprocess.Popen[bytes], numbers: set[int], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not numbers <= watch.read():
        if process.poll() is not None:
            raise FailedError(f"ended with {process.returncode}")
        if time.monotonic() > limit:
            raise FailedError(f"{len(numbers - watch.read())} of {len(numbers)} files not visible after {seconds} s")
        time.sleep(0.1)
