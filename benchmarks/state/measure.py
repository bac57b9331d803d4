"""One measurement: a fresh process with clean directories, its speed, and whether what it computed is right."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from benchmarks import harness
from benchmarks.state import workload as work
from benchmarks.state.engine import Result, Task
from benchmarks.state.peers import Environment, environment
from benchmarks.state.rows import Row
from benchmarks.state.workload import Slices, Workload

_PROJECT = Path(__file__).resolve().parents[2]
_LARGE_FILE = 1 << 20
_PORTS = 3
_LOOK_SECONDS = 0.25
LOG = "said.log"

Attempted = TypeVar("Attempted")


class FailedError(Exception):
    """A measurement that gave no figure. The text says why, without any path of this machine."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """steady: events/s from the end of the first measured epoch to the end; whole: events/s from the start of the
    process to the end of the last epoch (after a preload: of the measured events); start_seconds: until the engine was
    up; epoch_ms: of the epochs counted in steady, where the engine has epochs; differing: of the compared keys; load:
    of the machine, before; cpu: seconds of all the engine's processes per million of the events counted in steady;
    pace: benchmarks.pace, before and after."""

    workload: str
    row: str
    repetition: int
    epochs: int
    events: int
    steady: float = 0.0
    whole: float = 0.0
    start_seconds: float = 0.0
    epoch_ms: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    keys: int = 0
    differing: int = 0
    checked_apart: bool = False
    load: float = 0.0
    cpu: float = 0.0
    pace: list[float] = field(default_factory=list)
    error: str = ""


def measure(scratch: Path, workload: Workload, row: Row, slices: Slices, repetition: int) -> Measurement:
    """Run a row once. What fails is a measurement too, with an error and without figures."""
    blank = Measurement(workload.name, row.name, repetition, slices.epochs, slices.events)
    return attempt(scratch, blank, lambda run: _measure(scratch, workload, row, slices, repetition, run))


def attempt(scratch: Path, blank: Attempted, once: Callable[[Path], Attempted]) -> Attempted:
    """Measure in a directory that is empty at first. What fails is `blank` with the error."""
    run = _emptied(scratch / "run")
    try:
        return once(run)
    except (FailedError, RuntimeError, subprocess.SubprocessError, OSError) as error:
        message = scrubbed(f"{type(error).__name__}: {error}", scratch)
        return replace(blank, error=message, load=os.getloadavg()[0])  # type: ignore[type-var]
    finally:
        shutil.rmtree(run, ignore_errors=True)


def _emptied(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _measure(scratch: Path, workload: Workload, row: Row, slices: Slices, repetition: int, run: Path) -> Measurement:
    inputs = work.sliced(scratch, workload, slices)
    apart = row.checked is not None
    verdict = _checked_apart(scratch, workload, row) if row.checked is not None else None
    _emptied(run)
    inline = workload.preload and row.peers is not None
    if workload.preload and not inline:
        _clone(_bootstrap(scratch, workload, row), run / "durable")
    inputs = _landed(scratch, [work.preloaded(scratch, workload), inputs] if inline else [inputs])
    task = _task(row, run, inputs, slices, workload, row.options, inline)
    load = os.getloadavg()[0]
    began = time.time()
    result = _start(task, row, scratch, run)
    ended = result.progress[-1][0]
    first = next(index for index, (_, done) in enumerate(result.progress) if done >= task.preload + slices.events)
    counted = result.progress[first:]
    seconds = counted[-1][0] - counted[0][0]
    if verdict is None:
        verdict = work.verify(scratch, workload, slices, result.output)
    return Measurement(
        workload=workload.name,
        row=row.name,
        repetition=repetition,
        epochs=slices.epochs,
        events=slices.events,
        steady=(counted[-1][1] - counted[0][1]) / seconds if seconds > 0 else 0.0,
        whole=result.progress[-1][1] / (ended - began),
        start_seconds=result.ready - began,
        epoch_ms=epoch_ms(counted) if result.phases else [],
        phases=harness.medians(result.phases[:0:-1]) if len(result.phases) > 1 else {},
        figures=result.figures,
        settings=result.settings,
        versions=result.versions,
        keys=verdict["keys"],
        differing=verdict["differing"],
        checked_apart=apart,
        load=load,
        cpu=_cpu(result.cpu, counted),
    )


def epoch_ms(progress: Sequence[tuple[float, int]]) -> list[float]:
    """Milliseconds from each end of an epoch to the next."""
    return [round((after[0] - before[0]) * 1e3, 1) for before, after in pairwise(progress)]


def _cpu(seen: Sequence[tuple[float, float]], counted: Sequence[tuple[float, int]]) -> float:
    """CPU seconds per million events from the first of these epochs' ends to the last; 0 if nothing was seen."""
    events = counted[-1][1] - counted[0][1]
    if not seen or not events:
        return 0.0
    used = np.interp([counted[0][0], counted[-1][0]], [at for at, _ in seen], [cpu for _, cpu in seen])
    return round(float(used[1] - used[0]) / events * 1e6, 3)


def _task(
    row: Row, run: Path, inputs: Path, slices: Slices, workload: Workload, options: dict[str, Any], inline: bool
) -> Task:
    ports = free_ports(_PORTS)
    return Task(
        row=row.name,
        inputs=[str(inputs)],
        files=work.FILES,
        epochs=slices.epochs,
        events=slices.events,
        preload=workload.keys if inline else 0,
        durable=str(run / "durable"),
        local=str(run / "local"),
        result=str(run / "result.json"),
        payload=workload.payload,
        options={**options, "port": ports[0], "ports": ports[1:]},
        operator=workload.operator,
    )


def _bootstrap(scratch: Path, workload: Workload, row: Row) -> Path:
    """What the row's engine keeps after the preload; made once, by the engine itself, then cloned for every
    repetition."""
    home = scratch / "bootstraps" / workload.name / row.name
    if not (home / "_DONE").exists():
        print(f"  loading {workload.keys:,} keys into {row.name}", flush=True)
        _emptied(home)
        slices = Slices(-(-workload.keys // workload.preload_events), workload.preload_events)
        inputs = _landed(scratch, [work.preloaded(scratch, workload)])
        task = _task(row, home, inputs, slices, workload, row.options, False)
        _start(task, row, scratch, home, seconds=4 * row.seconds)
        shutil.rmtree(home / "local", ignore_errors=True)
        (home / "_DONE").touch()
    return home / "durable"


def _clone(source: Path, target: Path) -> None:
    """Copy small files, which may be pointers that are written over; link large ones, which no engine ever changes."""

    def place(origin: str, copy: str) -> str:
        if Path(origin).stat().st_size >= _LARGE_FILE:
            os.link(origin, copy)
            return copy
        return shutil.copy2(origin, copy)

    shutil.copytree(source, target, copy_function=place)


def _landed(scratch: Path, directories: list[Path]) -> Path:
    """Link files to where every engine reads them: what was loaded from one directory cannot go on with another."""
    target = _emptied(scratch / "landing")
    for directory in directories:
        for file in sorted(directory.glob("*.parquet")):
            os.link(file, target / file.name)
    return target


def _checked_apart(scratch: Path, workload: Workload, row: Row) -> dict[str, int]:
    """Compare a run of the row's query over two epochs with a sink that keeps everything; once for a workload."""
    checked = scratch / "checked" / f"{workload.name}-{row.name}.json"
    if not checked.exists():
        slices = Slices(2, workload.events)
        run = _emptied(scratch / "run")
        inputs = _landed(scratch, [work.sliced(scratch, workload, slices)])
        assert row.checked is not None
        task = _task(row, run, inputs, slices, workload, row.checked, False)
        result = _start(task, row, scratch, run)
        checked.parent.mkdir(parents=True, exist_ok=True)
        checked.write_text(json.dumps(work.verify(scratch, workload, slices, result.output, result.form, loaded=False)))
    counts: dict[str, int] = json.loads(checked.read_text())
    return counts


def _start(task: Task, row: Row, scratch: Path, run: Path, seconds: int | None = None) -> Result:
    """Run the row's program to its end, in its environment."""
    return start(task, f"benchmarks.state.{row.module}", environment(row.peers, scratch), run, seconds or row.seconds)


def start(task: Task, module: str, place: Environment, run: Path, limit: int) -> Result:
    """Run an engine's program to its end, for `limit` seconds at most. Raises FailedError with the end of what it
    said."""
    (run / "task.json").write_text(json.dumps(asdict(task)))
    with process([place.python, "-m", module, str(run / "task.json")], place, run) as engine:
        seen: list[tuple[float, float]] = []
        ends = time.monotonic() + limit
        while (code := engine.poll()) is None:
            if time.monotonic() > ends:
                raise FailedError(f"not done after {limit} s")
            with suppress(psutil.NoSuchProcess):
                seen.append((time.time(), max([harness.cpu_seconds(engine.pid), *(cpu for _, cpu in seen[-1:])])))
            with suppress(subprocess.TimeoutExpired):
                engine.wait(_LOOK_SECONDS)
    if code or not Path(task.result).exists():
        raise FailedError(_last_words((run / LOG).read_text(errors="replace")) or f"ended with {code}")
    return replace(Result(**json.loads(Path(task.result).read_text())), cpu=seen)


@contextmanager
def process(command: list[str], place: Environment, run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a session of its own, which ends with all that it has started. What it says goes to `LOG`."""
    path = os.pathsep.join(filter(None, [str(_PROJECT), place.variables.get("PYTHONPATH")]))
    variables = {**os.environ, **place.variables, "PYTHONPATH": path}
    with (run / LOG).open("w") as log:
        running = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables, cwd=run,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield running
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if re.search(r"(Error|Exception)\b.*:", line)]
    return " | ".join(dict.fromkeys([*lines[-3:]]))[:600] or text.strip()[-300:]


def scrubbed(text: str, scratch: Path) -> str:
    """Without any path of this machine."""
    for path in (scratch, _PROJECT, Path.home()):
        text = text.replace(str(path), "...")
    return text


def free_ports(number: int) -> list[int]:
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports
