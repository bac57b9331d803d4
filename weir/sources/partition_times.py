"""The event time of a source that has partitions: the least of those that are not idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weir.definition.source import Planned, Source
from weir.sources.slices import PartitionTime


@dataclass(frozen=True, slots=True)
class PartitionTimes:
    """The event times of a source's partitions, in microseconds.

    Attributes:
        idle_after: The processing time after which a partition without rows holds nothing back; None: it always does.
        max_ahead: How far a partition may be read ahead of the slowest one; None: as far as there is.
    """

    idle_after: int | None
    max_ahead: int | None

    @classmethod
    def of(cls, source: Source) -> PartitionTimes:
        return cls(source.length("idle_after"), source.length("max_ahead"))

    def newest(self, partitions: Mapping[str, PartitionTime], now: int) -> int | None:
        """Return the source's event time; None: a partition that is not idle has had no rows yet."""
        active = [of.newest for of in partitions.values() if not self._is_idle(of, now)]
        if not active:  # the last one to fall silent says how far they all were
            return max((of.newest for of in partitions.values() if of.newest is not None), default=None)
        return None if None in active else min(time for time in active if time is not None)

    def too_far_ahead(self, partitions: Mapping[str, PartitionTime], now: int) -> frozenset[str]:
        """Return the partitions that wait for slower ones."""
        if self.max_ahead is None:
            return frozenset()
        active = {name: of for name, of in partitions.items() if not self._is_idle(of, now)}
        times = {name: of.newest for name, of in active.items() if of.newest is not None}
        if not times:
            return frozenset()
        if any(of.newest is None and of.quiet_since is None for of in active.values()):  # of these nothing is known yet
            return frozenset(times)
        most = min(times.values()) + self.max_ahead
        return frozenset(name for name, of in partitions.items() if of.newest is not None and of.newest > most)

    def _is_idle(self, of: PartitionTime, now: int) -> bool:
        after = self.idle_after
        return after is not None and of.quiet_since is not None and now - of.quiet_since >= after


def merged(partitions: Mapping[str, PartitionTime], seen: Mapping[str, int]) -> dict[str, PartitionTime]:
    """Partitions with the newest event times of some more rows."""
    times = {
        name: [time for time in (of.newest, seen.get(name)) if time is not None] for name, of in partitions.items()
    }
    return {name: replace(of, newest=max(times[name], default=None)) for name, of in partitions.items()}


def quiet(before: Mapping[str, PartitionTime], planned: Planned, now: int) -> dict[str, PartitionTime]:
    """Since when the end of each partition has been reached, behind this plan."""
    read = {part.partition for part in planned.parts}
    times = {}
    for name, is_end in planned.ends.items():
        was = before.get(name, PartitionTime())
        quiet_since = None
        if is_end:
            quiet_since = now if name in read or was.quiet_since is None else was.quiet_since
        times[name] = replace(was, quiet_since=quiet_since)
    return times
