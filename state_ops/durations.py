"""Durations as authors write them: "90s", "15m", "1h", "30d", or a timedelta."""

from __future__ import annotations

import re
from datetime import timedelta

from state_ops.errors import PipelineError

_UNITS = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}


def micros(duration: str | timedelta, where: str, name: str) -> int:
    """Microseconds. Raises PipelineError for what is no duration. name: of the argument."""
    if isinstance(duration, timedelta):
        return duration // timedelta(microseconds=1)
    found = re.fullmatch(r"(\d+)(ms|s|m|h|d)", duration) if isinstance(duration, str) else None
    if not found:
        raise PipelineError(
            f"{name}={duration!r} is no duration.", where=where, next='Write it like "90s", "15m", "1h" or "1d".'
        )
    return int(found[1]) * _UNITS[found[2]]
