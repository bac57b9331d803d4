"""Durations as authors write them ("90s", "15m", "1h", "30d", or a timedelta), and as messages show them ("1 h 30
min")."""

from __future__ import annotations

import re
from datetime import timedelta

from state_ops.errors import PipelineError

_UNITS = {"us": 1, "ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}

_LONGEST = 36500 * _UNITS["d"]  # added to any moment between the years 0 and 9999 it still is an int64


def micros(duration: str | timedelta, where: str, name: str) -> int:
    """Microseconds. Raises PipelineError for what is no duration.

    Args:
        name: Of the argument.
    """
    match = re.fullmatch(r"(\d+)(us|ms|s|m|h|d)", duration) if isinstance(duration, str) else None
    if isinstance(duration, timedelta):
        length = duration // timedelta(microseconds=1)
    elif match:
        length = int(match[1]) * _UNITS[match[2]]
    else:
        raise PipelineError(
            f"{name}={duration!r} is no duration.", where=where, next='Write it like "90s", "15m", "1h" or "1d".'
        )
    if abs(length) > _LONGEST:
        raise PipelineError(f"{name}={duration!r} is too long.", where=where, next='Make it at most "36500d".')
    return length


_SHOWN = (
    ("d", _UNITS["d"]),
    ("h", _UNITS["h"]),
    ("min", _UNITS["m"]),
    ("s", _UNITS["s"]),
    ("ms", _UNITS["ms"]),
    ("µs", 1),
)


def shown(micros: int) -> str:
    """Return a duration for people, exact, each unit that it has: 604,800,000,000 µs is "7 d", 5,400,000,000 is "1 h 30
    min"."""
    rest, parts = abs(micros), list[str]()
    for unit, length in _SHOWN:
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count:,} {unit}")
    return ("-" if micros < 0 else "") + (" ".join(parts) or "0 s")


def roughly(micros: int) -> str:
    """Return a duration for people by its two largest units, from seconds on: 90,061,000,000 µs is "1 d 1 h"."""
    second = _UNITS["s"]
    return " ".join(shown(micros // second * second).split(" ")[:4])
