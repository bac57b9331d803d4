"""How fast the machine is just now: what a shared one gives changes by the hour, and figures of two such hours make no ratio."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

TOLERANCE = 1.25
"""By how much two looks may differ and still count as the same machine."""
_LOOPS, _ADDITIONS = 7, 1_000_000
_ATTEMPTS = 3

Measured = TypeVar("Measured")


def probe() -> float:
    """Milliseconds for a million additions in Python: the least of seven, since others may come in between."""
    return min(_additions() for _ in range(_LOOPS))


def _additions() -> float:
    began, total = time.perf_counter(), 0
    for number in range(_ADDITIONS):
        total += number
    return (time.perf_counter() - began) * 1e3


def steadily(once: Callable[[], Measured]) -> tuple[Measured, list[float]]:
    """What `once` measures, and the paces before and after it. Where these differ it is measured anew, three times at most."""
    for attempt in range(_ATTEMPTS):
        before = probe()
        measured = once()
        paces = [round(before, 1), round(probe(), 1)]
        if same(paces):
            break
        again = "measured again" if attempt + 1 < _ATTEMPTS else "kept, and left out of medians"
        print(f"  the machine changed its pace from {paces[0]} to {paces[1]} ms: {again}", flush=True)
    return measured, paces


def same(paces: Sequence[float]) -> bool:
    """Whether the machine was one and the same at all of these looks."""
    return not paces or max(paces) <= TOLERANCE * min(paces)


def usual(measured: Sequence[Measured], paces: Callable[[Measured], Sequence[float]]) -> list[Measured]:
    """Those made at the pace that most were made at, or without a look at it."""
    looks = [look for one in measured for look in paces(one)]
    if not looks:
        return list(measured)
    middle = statistics.median(looks)
    return [one for one in measured if all(same([look, middle]) for look in paces(one)) and same(paces(one))]


def told(measured: Sequence[Measured], used: int, paces: Callable[[Measured], Sequence[float]]) -> str:
    """A sentence for the report, "" where nobody has looked. used: how many of them the figures rest on."""
    looks = [look for one in measured for look in paces(one)]
    if not looks:
        return ""
    left = len(measured) - used
    out = f"; {left} of {len(measured)} measurements, made at another pace, are left out" if left else ""
    return (
        f"Pace of the machine (a million additions in Python) beside the measurements: {min(looks):.0f} to {max(looks):.0f} ms,"
        f" median {statistics.median(looks):.0f}{out}."
    )
