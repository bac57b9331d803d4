"""Windows of the calendar: months, and days, weeks and hours as the clocks of a time zone show them.

A window begins whenever the zone's clock shows the start of a month, or a multiple of a step, and wherever the clock
leaps over one. So all windows together leave no gap, and a row is in exactly one. An hour that comes twice, when
clocks are set back, is two windows of an hour, but prolongs a window that is longer than what is repeated.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np

from state_ops.arrow.unfit_values import FIRST_MICRO, LAST_MICRO
from state_ops.counts import counted
from state_ops.durations import shown

DAY = 86_400_000_000
_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_DAYS_AROUND = 2  # by which a zone's date may differ from that of UTC, and one to spare


@dataclass(frozen=True, slots=True)
class Calendar:
    """The moments at which windows begin.

    Attributes:
        months: Between the starts of two windows, counted from January 1970; 0: `step` counts.
        step: Microseconds on the zone's clock between the starts of two windows, counted from 1970-01-01: a part of a
            day, or whole days; 0: `months` counts.
        shift: By which the starts are shifted to later: months, or microseconds on the zone's clock.
        zone: The time zone's name.
    """

    months: int
    step: int
    shift: int
    zone: str

    def __str__(self) -> str:
        every = counted(self.months, "month") if self.months else shown(self.step)
        shift = counted(self.shift, "month") if self.months else shown(self.shift)
        return f"{every}{f' shifted by {shift}' if self.shift else ''} in {self.zone}"

    def bounds(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return int64[n] twice: the beginning and the end of each moment's window, in microseconds since 1970 UTC.

        The first window may begin before the year 1, and the last one end after 9999.

        Args:
            times: int64[n], in the same unit.

        Raises:
            OverflowError: A moment does not lie within the years 1 to 9999.
        """
        outside = (times < FIRST_MICRO) | (times > LAST_MICRO)
        if outside.any():
            raise OverflowError(f"{times[outside][0]:,} microseconds since 1970")
        width = DAY if 0 < self.step < DAY else 32 * DAY
        blocks = [_starts(self, width, int(block)) for block in np.unique(times // width)]
        starts = np.unique(np.concatenate([np.empty(0, np.int64), *blocks]))
        after = np.searchsorted(starts, times, side="right")
        return starts[after - 1], starts[after]


@functools.lru_cache(maxsize=4096)
def _starts(calendar: Calendar, width: int, block: int) -> np.ndarray:
    """Return int64[n], the starts of the windows that overlap a block of time, and that of the window after it."""
    first, last = block * width, (block + 1) * width - 1
    zone = ZoneInfo(calendar.zone)
    if 0 < calendar.step < DAY and (offset := _steady_offset(zone, first - DAY, last + DAY)) is not None:
        numbers = [(moment + offset - calendar.shift) // calendar.step for moment in (first, last)]
        return np.arange(numbers[0], numbers[1] + 2) * calendar.step + calendar.shift - offset
    near = _on_clocks(calendar, first - _DAYS_AROUND * DAY, last + _DAYS_AROUND * DAY)
    moments = {moment for clock in near for moment in _moments(zone, clock, calendar.step)}
    starts = np.array(sorted(moments), np.int64)
    begin = max(0, int(np.searchsorted(starts, first, side="right")) - 1)
    return starts[begin : int(np.searchsorted(starts, last, side="right")) + 1]


def _steady_offset(zone: ZoneInfo, first: int, last: int) -> int | None:
    """Return the offset of the zone's clock from UTC throughout a few days.

    No zone changes it twice in these.
    """
    if first < FIRST_MICRO + DAY or last > LAST_MICRO - DAY:
        return None
    offset = _offset_at(zone, first)
    return offset if offset == _offset_at(zone, last) else None


def _on_clocks(calendar: Calendar, first: int, last: int) -> list[int]:
    """Return the starts of windows, from the last one before `first` to the first one after `last`.

    All are in microseconds since 1970 on the zone's clock.
    """
    if calendar.months:
        numbers = [(_month(moment) - calendar.shift) // calendar.months for moment in (first, last)]
        months = [calendar.months * at + calendar.shift for at in range(numbers[0], numbers[1] + 2)]
        return [int(start) for start in np.array(months, "M8[M]").astype("M8[us]").astype(np.int64)]
    numbers = [(moment - calendar.shift) // calendar.step for moment in (first, last)]
    return [calendar.step * at + calendar.shift for at in range(numbers[0], numbers[1] + 2)]


def _month(moment: int) -> int:
    """Return the number of a moment's month, from 0 for January 1970."""
    return int(np.datetime64(moment, "us").astype("M8[M]").astype(np.int64))


def _moments(zone: ZoneInfo, on_clock: int, step: int) -> list[int]:
    """Return the moments, in microseconds since 1970 UTC, at which a window begins since the clock shows its start, or
    leaps over it.

    Args:
        on_clock: The start, in microseconds since 1970 on the clock.
        step: Of the windows, on the clock; 0: months.
    """
    if not FIRST_MICRO <= on_clock <= LAST_MICRO:  # no `datetime`; the clock is as far from UTC as next to it
        return [on_clock - _offset_at(zone, min(max(on_clock, FIRST_MICRO + DAY), LAST_MICRO - DAY))]
    clock = (_EPOCH + on_clock * _MICROSECOND).replace(tzinfo=zone)
    first, second = (on_clock - _offset(clock.replace(fold=fold)) for fold in (0, 1))
    if first < second:  # the clock shows it twice
        return [first, second] if 0 < step <= second - first else [first]
    if first == second:
        return [first]
    before, leapt = second, first  # the clock was not set forward yet, and it was
    offset = on_clock - before
    while leapt - before > 1:
        middle = (before + leapt) // 2
        if _offset_at(zone, middle) == offset:
            leapt = middle
        else:
            before = middle
    return [leapt]


def _offset(clock: datetime) -> int:
    offset = clock.utcoffset()
    assert offset is not None, "a zone has an offset at each time"
    return offset // _MICROSECOND


def _offset_at(zone: ZoneInfo, moment: int) -> int:
    return _offset((_EPOCH + moment * _MICROSECOND).replace(tzinfo=UTC).astimezone(zone))
