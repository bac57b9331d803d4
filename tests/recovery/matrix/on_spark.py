"""The same points in a real run on Spark: in the coordinator, and in the Python workers that its JVM starts.

Each trial is a `weir run` of its own that starts from the zygote's site, is disturbed once, and is recovered and
checked by the zygote. Deaths are of the whole host (the coordinator, its JVM and its workers at once), or of one worker
alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from state_ops.coordination import requests
from tests.recovery.matrix import matrix
from tests.recovery.matrix.matrix import Played, Zygote
from tests.recovery.matrix.points import Disturbance, Point, reached
from tests.recovery.matrix.trials import Outcome, Site, Trial
from weir.settings.configuration import PROJECT

_INJECTED = Path(__file__).parent / "injected"
_PATIENCE = 240.0
_IN_COORDINATOR, _IN_WORKERS = 22, 14
_SPREAD = ("host dies before", "host dies after")
_WORKER = ("host dies after", "kill before", "EIO", "kill after", "host dies before", "ENOSPC")
_CHANCE = ("local.", f"Storage.list {requests.REQUESTS}")
_HANGS = {"host dies before": "hang", "host dies after": "zombie after"}  # there it is held, and all of it is killed


@dataclass(frozen=True)
class Noted:
    """A call of an undisturbed run. by: the process that made it is the coordinator's."""

    point: Point
    by_coordinator: bool


def main() -> int:
    """Play the trials, two at a time; returns how many deviated."""
    with matrix.zygotes(1) as [zygote]:
        noted = recorded(zygote)
        trials = planned(noted)
        workers = {call.point for call in noted if not call.by_coordinator}
        print(f"\nOn Spark: {len(noted)} calls, {len(workers)} of them in workers; {len(trials)} trials", flush=True)
        lock, started, played = threading.Lock(), time.monotonic(), list[Played]()

        def play_numbered(numbered: tuple[int, Trial]) -> None:
            outcome = play(zygote, *numbered, lock)
            with lock:
                played.append(Played(numbered[1], outcome))
                result = "\n    ".join(["DEVIATION", *outcome.problems]) if outcome.problems else outcome.ended
                print(
                    f"{len(played)} of {len(trials)}, {time.monotonic() - started:.0f} s: {numbered[1]}: {result}",
                    flush=True,
                )

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(play_numbered, enumerate(trials)))
    print(matrix.summary(played))
    return sum(bool(trial.outcome.problems) for trial in played)


def recorded(zygote: Zygote) -> list[Noted]:
    """The calls of an undisturbed run on Spark, which is exact."""
    site = _copied(zygote, "undisturbed")
    journal = site.root / "journal"
    process = _start(site, None, journal)
    assert process.wait(_PATIENCE) == 0, _output(site)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    outcome = zygote.recover(site.root)
    assert not outcome.problems, outcome.problems
    return [Noted(Point(label, n), pid == process.pid) for label, n, pid in lines]


def planned(noted: Sequence[Noted]) -> list[Trial]:
    """Calls spread over the run: over all operations of the coordinator, and over those of the workers.

    Only calls that every run makes: not the polls between epochs, whose number is chance, and in a worker those whose
    label says subtask and epoch, since which worker takes which task is chance.
    """
    coordinator = [call.point for call in noted if call.by_coordinator and not call.point.label.startswith(_CHANCE)]
    workers = [
        call.point for call in noted if not call.by_coordinator and call.point.n == 1 and "/g2-e" in call.point.label
    ]
    trials = []
    for points, number, faults in ((coordinator, _IN_COORDINATOR, _SPREAD), (workers, _IN_WORKERS, _WORKER)):
        for index in range(number):
            point = points[(2 * index + 1) * len(points) // (2 * number)]
            fault = faults[index % len(faults)]
            if fault in ("EIO", "ENOSPC") and point.reads:
                fault = "kill before"
            trials.append(Trial(Disturbance(fault, point)))
    return trials


def play(zygote: Zygote, number: int, trial: Trial, lock: threading.Lock) -> Outcome:
    """One trial. lock: around the zygote, which does one thing at a time."""
    started, site, problems = time.monotonic(), _copied(zygote, f"spark-{number}"), list[str]()
    disturbance = trial.disturbance
    held = disturbance.fault in _HANGS
    fault = _HANGS.get(disturbance.fault, disturbance.fault)
    process = _start(site, Disturbance(fault, disturbance.at, site.marker, site.release))
    try:
        if held:
            ended = "killed" if _killed_when_held(process, site) else "not held"
            if ended == "not held":
                problems.append(f"it never got there: {_output(site)}")
        else:
            status = process.wait(_PATIENCE)
            output = _output(site)
            ended = "done" if status == 0 else "error"
            if status not in (0, 1) or (status == 1 and ("error:" not in output or "not foreseen" in output)):
                problems.append(f"it ended with {status}, which is no typed error: {output}")
            if not reached(site.marker).exists():
                problems.append("no process got to that call")
    finally:
        _kill_family(process)
    with lock:
        problems += zygote.recover(site.root).problems
    shutil.rmtree(site.root, ignore_errors=True)
    return Outcome(ended, problems, time.monotonic() - started)


def _copied(zygote: Zygote, name: str) -> Site:
    site = Site(zygote.root / name, zygote.root / "landing")
    shutil.copytree(zygote.root / "base", site.root)
    return site


def _start(site: Site, disturbance: Disturbance | None, journal: Path | None = None) -> subprocess.Popen:
    at = disturbance.at if disturbance else None
    wish = {
        "root": str(site.root),
        "fault": disturbance.fault if disturbance else None,
        "at": [at.label, at.n] if isinstance(at, Point) else None,
        "files": [str(site.marker), str(site.release)],
        "journal": str(journal) if journal else None,
    }
    env = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")} | site.env()
    env["MATRIX"] = json.dumps(wish)
    env["PYTHONPATH"] = os.pathsep.join([str(_INJECTED), str(PROJECT), *filter(None, [env.get("PYTHONPATH")])])
    env["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    command = [sys.executable, "-m", "weir.cli.main", "run", "meters", "--until-caught-up", "--drain"]
    with (site.root / "said").open("wb") as sink:
        return subprocess.Popen(
            command, cwd=PROJECT, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )


def _output(site: Site) -> str:
    return (site.root / "said").read_text(errors="replace")[-3000:]


def _killed_when_held(process: subprocess.Popen, site: Site) -> bool:
    """Wait until some process of the family is held at the point, then kill them all."""
    deadline = time.monotonic() + _PATIENCE
    while not site.marker.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    _kill_family(process)
    return True


def _kill_family(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        return
    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    for member in family:  # first still, so that none has the time to tidy up after another's death
        member.suspend()
    for member in family:
        member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=20)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
