"""A process that has imported everything and started nothing: each step of a trial is a fork of it, in milliseconds.

`python -m tests.recovery.matrix.zygote <directory>` reads a trial per line of stdin and writes its outcome as a line to
stdout. It must start no thread of its own: neither Arrow, Polars, delta-rs nor Python could be used in its children
then.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's would start their threads at its import
os.environ.setdefault("POLARS_MAX_THREADS", "1")

import gc
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import py4j.protocol  # noqa: F401  what a declined epoch imports

from state_ops.delta import log_cleanup
from tests.recovery.matrix import trials
from tests.recovery.matrix.points import Disturbance, Point, read_journal
from tests.recovery.matrix.trials import Site, Trial

PATIENCE = 120.0
log_cleanup.INTERVAL = 4  # so that a run of a few epochs has logs to shorten


class Forks:
    """Runs steps in children of this process. root: where their answers and logs go."""

    def __init__(self, root: Path, marker: Path) -> None:
        self._root, self._marker, self._number = root, marker, 0
        self.log = root / "log"

    def __call__(
        self, step: Callable, *args: Any, during: Callable[[int], bool] | None = None, **kwargs: Any
    ) -> dict[str, Any] | None:
        """The child's answer; None if it was killed. during: called once it hangs, decides whether it is let go."""
        self._number += 1
        result = self._root / f"answer-{self._number}.json"
        child = os.fork()
        if child == 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
            trials.answer_to(result, self.log, step, *args, **kwargs)
        status = self._wait(child, during)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return None
        if not result.exists():
            raise RuntimeError(f"{step.__name__} ended with {status}:\n{self.log.read_text()[-3000:]}")
        answer = json.loads(result.read_text())
        result.unlink()
        return answer

    def _wait(self, child: int, during: Callable[[int], bool] | None) -> int:
        if during is None:
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            try:
                return os.waitpid(child, 0)[1]
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        deadline = time.monotonic() + PATIENCE
        while not self._marker.exists():
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        if not during(child):
            os.kill(child, signal.SIGKILL)
        return self._wait(child, None)


def main(root: Path) -> None:
    """Serve trials from stdin, after a first line that lists the calls of an undisturbed run."""
    root.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, _too_long)
    threads = _threads()  # of the allocators, which know forks, and one of Polars that tidies up
    site, base = Site(root / "site", root / "landing"), root / "base"
    forks = Forks(root, site.marker)
    gc.collect()
    gc.freeze()  # else the children's collector would copy all of these pages, one after the other
    trials.prepare(site, base, forks)
    print(json.dumps([[point.label, point.n] for point in _recorded(site, base, forks)]), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        forks.log.write_text("")
        try:
            if "recover" in request:
                outcome = trials.resume(Site(Path(request["recover"]), site.landing), forks)
            else:
                outcome = trials.conduct(site, base, _trial(request), forks)
        except Exception as error:
            outcome = trials.Outcome("broken", [f"{type(error).__name__}: {error}"])
        if outcome.problems:
            outcome.problems.append(f"its log ends: {forks.log.read_text()[-2000:]}")
        print(json.dumps([outcome.ended, outcome.problems, outcome.seconds]), flush=True)
        if _threads() != threads:
            raise RuntimeError(f"the zygote has started threads, its children cannot be trusted: {_threads()}")


def _too_long(*_: object) -> None:
    raise TimeoutError(f"a step did not end within {PATIENCE:g} s")


def _threads() -> list[str]:
    return sorted(path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def _recorded(site: Site, base: Path, forks: Forks) -> list[Point]:
    """The calls of an undisturbed run, which must be the same twice: else an index would mean nothing."""
    journals = []
    for number in (1, 2):
        trials.shutil.rmtree(site.root, ignore_errors=True)
        trials.shutil.copytree(base, site.root)
        journal = site.root.parent / f"journal-{number}"
        journal.unlink(missing_ok=True)
        answer = forks(trials.undisturbed, site, drain=True, journal=journal)
        assert answer is not None and answer["error"] is None, answer
        problems = forks(trials.checked, site, strict=True)["problems"]  # type: ignore[index]
        assert not problems, problems
        journals.append(read_journal(journal))
    assert journals[0] == journals[1], "two undisturbed runs are not alike"
    return journals[0]


def _trial(raw: dict[str, Any]) -> Trial:
    label, n = raw["at"]
    again = Disturbance(raw["again"][0], raw["again"][1]) if raw["again"] else None
    return Trial(Disturbance(raw["fault"], Point(label, n)), again, raw["lost"], raw["repair"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
