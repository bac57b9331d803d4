"""Plays trials on several zygotes at once, and says what came of them."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.recovery.matrix.points import Point
from tests.recovery.matrix.trials import Outcome, Trial
from weir.settings.configuration import PROJECT

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Played:
    """A trial and what came of it."""

    trial: Trial
    outcome: Outcome


class Zygote:
    """A zygote's process. root: its directory; points: the calls of an undisturbed run, in their order."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True)
        self.root = root
        self._said = root / "said"
        command = [sys.executable, "-m", "tests.recovery.matrix.zygote", str(root)]
        with self._said.open("wb") as sink:
            self._process = subprocess.Popen(
                command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True
            )
        self.points: list[Point] = []

    def prepare(self) -> None:
        """Wait until it has made its site and noted the calls of an undisturbed run."""
        self.points = [Point(label, n) for label, n in self._line()]

    def play(self, trial: Trial) -> Outcome:
        at = trial.disturbance.at
        assert isinstance(at, Point)
        again = [trial.again.fault, trial.again.at] if trial.again else None
        at_point = {"fault": trial.disturbance.fault, "at": [at.label, at.n]}
        return self._asked({**at_point, "again": again, "lost": trial.lost, "repair": trial.repair})

    def recover(self, root: Path) -> Outcome:
        """Run and check a site that something else has disturbed; it must have this zygote's landing directory."""
        return self._asked({"recover": str(root)})

    def _asked(self, request: dict) -> Outcome:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Outcome(*self._line())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> list:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a zygote has ended: {self._said.read_text()[-3000:]}")
        return json.loads(line)


@contextmanager
def zygotes(number: int) -> Iterator[list[Zygote]]:
    """So many zygotes, each with a site of its own, all of which see the same calls."""
    root = Path(tempfile.mkdtemp(prefix="weir-matrix-", dir=_MEMORY if _MEMORY.is_dir() else None))
    started: list[Zygote] = []
    try:
        for index in range(number):
            started.append(Zygote(root / str(index)))
        for zygote in started:
            zygote.prepare()
        assert all(zygote.points == started[0].points for zygote in started), "two zygotes see different calls"
        yield started
    finally:
        for zygote in started:
            zygote.end()
        shutil.rmtree(root, ignore_errors=True)


def play(
    started: Sequence[Zygote], trials: Sequence[Trial], seen: Callable[[Played], None], until: float | None = None
) -> list[Played]:
    """Every trial on whichever zygote is free. seen: told of each as it ends. until: on time.monotonic()."""
    waiting: queue.SimpleQueue[Trial] = queue.SimpleQueue()
    for trial in trials:
        waiting.put(trial)
    played: list[Played] = []
    errors: list[BaseException] = []
    lock = threading.Lock()

    def serve(zygote: Zygote) -> None:
        try:
            while not errors and (until is None or time.monotonic() < until):
                trial = waiting.get_nowait()
                outcome = zygote.play(trial)
                with lock:
                    played.append(Played(trial, outcome))
                    seen(played[-1])
        except queue.Empty:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(zygote,)) for zygote in started]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return played


def summary(played: Sequence[Played]) -> str:
    """How many trials of each fault there were and how the disturbed run ended; deviations by operation."""
    lines = ["", f"{'fault':<20}{'trials':>8}{'deviations':>12}   the disturbed run ended"]
    faults = sorted({trial.trial.disturbance.fault for trial in played})
    for fault in faults:
        mine = [trial for trial in played if trial.trial.disturbance.fault == fault]
        ends = Counter(trial.outcome.ended for trial in mine)
        ended = ", ".join(f"{end} {number}" for end, number in ends.most_common())
        lines.append(f"{fault:<20}{len(mine):>8}{_wrong(mine):>12}   {ended}")
    lines += ["", f"{'operation':<34}{'trials':>8}{'deviations':>12}"]
    for operation in sorted({_operation(trial) for trial in played}):
        mine = [trial for trial in played if _operation(trial) == operation]
        lines.append(f"{operation:<34}{len(mine):>8}{_wrong(mine):>12}")
    lines.append(f"{'all':<34}{len(played):>8}{_wrong(played):>12}")
    return "\n".join(lines)


def _operation(trial: Played) -> str:
    at = trial.trial.disturbance.at
    return at.operation if isinstance(at, Point) else "?"


def _wrong(played: Sequence[Played]) -> int:
    return sum(bool(trial.outcome.problems) for trial in played)
