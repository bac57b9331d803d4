"""Moments as microseconds since 1970 UTC, in which Weir keeps event times, watermarks and timers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def to_micros(moment: datetime) -> int:
    """Microseconds since 1970 UTC of an aware moment, exactly."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def to_the_second(moment: str) -> str:
    """Return a moment in ISO 8601, as lists for people show it: its date and its time of day, to the second. A text of
    a damaged note, which is no moment, stays as it is."""
    try:
        return datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return moment


def from_micros(micros: int) -> datetime:
    """Return the aware moment so many microseconds since 1970 UTC, or the nearest one that Python's years 1 to 9999 can
    express.

    Event times come from rows, and a watermark in the year 12000 must stop neither an epoch nor a command.
    """
    try:
        return _EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        return _FIRST if micros < 0 else _LAST
