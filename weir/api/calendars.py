"""The calendar arguments of `window`: months and years, weeks that begin on a day, and the clocks of a time zone."""

from __future__ import annotations

import difflib
import re
from datetime import timedelta
from zoneinfo import ZoneInfo, available_timezones

from state_ops.durations import micros
from state_ops.errors import PipelineError
from weir.api.arguments import positive
from weir.operators.windows.calendars import DAY, Calendar

UTC = "UTC"
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_FIRST_MONDAY = 4  # 1970-01-05
_MOST_MONTHS = 1200
_LEAST_STEP = 60_000_000
Duration = str | timedelta


def calendar_of(
    place: str, every: Duration, size: Duration | None, offset: Duration, zone: str, week_begins: str | None
) -> Calendar | None:
    """Return the calendar of a window's arguments; None: windows of one length, counted from 1970-01-01 UTC."""
    _check_zone(place, zone)
    months, weeks = _number(every, {"mo": 1, "y": 12}), _number(every, {"w": 1})
    if week_begins is not None and not weeks:
        raise PipelineError(
            f"week_begins={week_begins!r} says on which day weeks begin, and every={every!r} is none of weeks.",
            where=place,
            next='Say every="1w", or leave week_begins= out.',
        )
    if months is None and weeks is None and zone == UTC:
        return None
    if size is not None:
        raise PipelineError(
            f"Windows of the calendar do not overlap, and size={size!r} makes them.",
            where=place,
            next="Leave size= out; hopping windows say every= in days or less, without zone=.",
        )
    if months is not None:
        return _of_months(place, every, months, offset, zone)
    if weeks is not None:
        return _of_weeks(place, every, weeks, offset, zone, week_begins)
    step = positive(every, place, "every")
    if step < _LEAST_STEP or (DAY % step and step % DAY):
        raise PipelineError(
            f"every={every!r} is neither a part of a day, from a minute on, nor whole days.",
            where=place,
            next="Say such a one, or leave zone= out.",
        )
    return Calendar(0, step, _shift(place, every, step, offset), zone)


def signed(duration: Duration, place: str, name: str) -> int:
    """Return a duration in microseconds, with a minus before a text for earlier. name: of the argument."""
    if isinstance(duration, str) and duration.startswith("-"):
        return -micros(duration[1:], place, name)
    return micros(duration, place, name)


def _shift(place: str, every: Duration, step: int, offset: Duration) -> int:
    shift = signed(offset, place, "offset")
    if abs(shift) >= step:
        raise _too_far(place, every, offset)
    return shift % step


def _too_far(place: str, every: Duration, offset: Duration) -> PipelineError:
    return PipelineError(
        f"offset={offset!r} is at least the time between windows, {every}.",
        where=place,
        next="Make offset smaller than every.",
    )


def _of_months(place: str, every: Duration, months: int, offset: Duration, zone: str) -> Calendar:
    if not 0 < months <= _MOST_MONTHS:
        raise PipelineError(
            f"every={every!r} is no time, or more than 100 years.", where=place, next='Say "1mo", "3mo" or "1y".'
        )
    earlier = isinstance(offset, str) and offset.startswith("-")
    shift = _number(str(offset).removeprefix("-"), {"mo": 1, "y": 12})
    if shift is None and not signed(offset, place, "offset"):
        shift = 0
    if shift is None:
        raise PipelineError(
            f"offset={offset!r} of months is not in months.", where=place, next='Say offset="3mo", or leave it out.'
        )
    if shift >= months and shift:
        raise _too_far(place, every, offset)
    return Calendar(months, 0, (-shift if earlier else shift) % months, zone)


def _of_weeks(
    place: str, every: Duration, weeks: int, offset: Duration, zone: str, week_begins: str | None
) -> Calendar:
    day = week_begins or _WEEKDAYS[0]
    if day not in _WEEKDAYS:
        raise PipelineError(
            f"week_begins={week_begins!r} is no day of the week.", where=place, next=f"Say {', '.join(_WEEKDAYS)}."
        )
    if signed(offset, place, "offset"):
        raise PipelineError(
            f"offset={offset!r} shifts weeks, which week_begins= does.",
            where=place,
            next='Say e.g. week_begins="sunday" alone.',
        )
    step = positive(f"{weeks * 7}d", place, f"every={every!r}, which is")
    return Calendar(0, step, (_FIRST_MONDAY + _WEEKDAYS.index(day)) * DAY % step, zone)


def _number(duration: Duration, units: dict[str, int]) -> int | None:
    """Return a duration in the smallest of some units; None if it is not written in them."""
    match = re.fullmatch(rf"(\d+)({'|'.join(units)})", duration) if isinstance(duration, str) else None
    return int(match[1]) * units[match[2]] if match else None


def _check_zone(place: str, zone: str) -> None:
    try:
        ZoneInfo(zone)
    except (TypeError, ValueError, OSError, LookupError, AttributeError) as error:
        near = difflib.get_close_matches(str(zone), sorted(available_timezones()), 3)
        raise PipelineError(
            f"zone={zone!r} is no time zone.",
            where=place,
            next=f"Say {' or '.join(map(repr, near))}." if near else 'Say e.g. zone="Europe/Berlin".',
        ) from error
