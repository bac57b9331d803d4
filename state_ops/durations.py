"""Durations as authors write them: "90s", "15m", "1h", "30d", or a timedelta."""

from __future__ import annotations

import re
from datetime import timedelta

from state_ops.errors import PipelineError

_UNITS = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}

_LONGEST = 36500 * _UNITS["d"]  # added to any moment between the years 0 and 9999 it still is an int64


def micros(duration: str | timedelta, where: str, name: str) -> int:
    """Microseconds. Raises PipelineError for what is no duration. name: of the argument."""
    if isinstance(duration, timedelta):
        return duration // timedelta(microseconds=1)
    found = re.fullmatch(r"(\d+)(ms|s|m|h|d)", duration) if isinstance(duration, str) else None
    if not found:
        raise PipelineError(
            f"{name}={duration!r} is no duration.", where=where, next='Write it like "90s", "15m", "1h" or "1d".'
        )
    length = int(found[1]) * _UNITS[found[2]]
    if length > _LONGEST:
        raise PipelineError(f"{name}={duration!r} is too long.", where=where, next='Make it at most "36500d".')
    return length
