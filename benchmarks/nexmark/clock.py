"""What running a query takes: in all, and after the first epoch, when code is loaded and compiled."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.harness import cpu_seconds


@dataclass(frozen=True, slots=True)
class Took:
    """Times of a run, until all rows are published.

    Attributes:
        seconds: Wall time.
        cpu: Processor seconds of all processes.
        later_seconds: Wall time after the first epoch.
        later_cpu: Processor seconds after it.
    """

    seconds: float
    cpu: float
    later_seconds: float
    later_cpu: float


class Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._began = _now()
        self._first: tuple[float, float] | None = None

    def epoch(self) -> None:
        """Note that an epoch has ended."""
        if self._first is None:
            self._first = _now()

    def took(self) -> Took:
        """The times until now."""
        now, first = _now(), self._first or _now()
        return Took(now[0] - self._began[0], now[1] - self._began[1], now[0] - first[0], now[1] - first[1])


def _now() -> tuple[float, float]:
    return time.perf_counter(), cpu_seconds()
