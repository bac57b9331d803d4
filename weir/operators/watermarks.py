"""Event time of a stage around its job, in microseconds since 1970 UTC; None where nothing is known yet. Of a stage
with windows by processing time, that takes its place.

Lateness in an epoch is judged by the watermark after the previous epoch; windows close by the one known before the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from state_ops.records.acks import Ack
from weir.definition import Input, Source, Stage, sources_of

MADE_TIME = b"weir.made_time"
"""In the metadata of columns that an executor tells: a transform has put another column in place of the event time."""
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 2  # int64, and so is the moment after it, before which state is read


def before_job(stage: Stage, before: int | None, arriving: int | None) -> int | None:
    """Return the stage's watermark as far as it is known before its job. It never goes back.

    Args:
        before: After the previous epoch.
        arriving: Newest event time of the slice by its files' statistics, or the watermark of the stage upstream. Of
            windows by processing time, the epoch's.
    """
    if arriving is None:
        return before
    watermark = min(max(arriving - stage.lateness, _LOWEST), _HIGHEST)
    return watermark if before is None else max(before, watermark)


def handed_on(stage: Stage, before: int | None, after: int | None, drain: bool) -> int | None:
    """Return the watermark that stages downstream go by, from those of `before_job` and `after_job`.

    Where files have no statistics the job itself tells how far event time is. Windows and timers have not gone by that
    yet: what they hand out in the next epoch must not be late there.
    """
    watermark = before if holds_back(stage) and not drain else after
    return watermark if watermark is None else max(watermark - stage.operator.behind, _LOWEST)


def holds_back(stage: Stage) -> bool:
    """Return whether rows of earlier event times leave the stage's state only when the watermark has passed them."""
    return stage.operator.goes_by_watermark or stage.on_timer is not None


def time_matters(stage: Stage, stages: Sequence[Stage]) -> bool:
    """Return whether the stage's watermark lets the stage, or a stage that reads it, hand out rows."""
    return holds_back(stage) or any(time_matters(other, stages) for other in stages if stage in other.stages_before)


def acts_on_rows_alone(stage: Stage) -> bool:
    """Return whether the stage has nothing to do in an epoch without rows for it.

    Time that passes then neither changes its state nor lets it hand out rows.
    """
    return not stage.has_state or stage.operator.acts_on_rows_alone


def after_job(watermark: int | None, acks: Sequence[Ack], drain: bool) -> int | None:
    """Return a stage's watermark after its job, from what its rows say and from what its subtasks have closed."""
    if not drain:
        return watermark
    # The windows up to here are closed now: whatever comes for them later is late, not a second first row.
    closed = [ack.closed_upto for ack in acks if ack.closed_upto is not None]
    return max([*closed, *([watermark] if watermark is not None else [])], default=None)


def newest_time(input: Input, arriving: int | None, seen: Sequence[int | None], made: bool) -> int | None:
    """Return the newest event time in an input of a stage, as far as its rows tell, or None if they tell nothing more.

    Args:
        arriving: As far as its source tells.
        seen: The newest times that subtasks saw in it.
        made: SQL or a transform has put another time in place of the source's event time. Then it goes by what the rows
            say, but no further than the source: the stages behind may go by a column with its time.
    """
    newest = max((time for time in seen if time is not None), default=None)
    if newest is None or (arriving is None and not input.reads_files):
        return None
    if made:
        return newest if arriving is None else min(newest, arriving)
    return newest if input.reads_files and (arriving is None or input.keeps_event_time) else None


def made_times(stage: Stage, seen: Sequence[pa.Schema]) -> frozenset[int]:
    """Return the numbers of a stage's inputs in whose rows another time is in place of their source's event time.

    Args:
        seen: By input, the columns that its SQL or its transform leaves, as the executor tells them.
    """
    return frozenset(
        side
        for side, (input, columns) in enumerate(zip(stage.inputs, seen, strict=True))
        if (name := input.event_time) in columns.names
        and (pa.types.is_timestamp(columns.field(name).type) or pa.types.is_date(columns.field(name).type))
        and (not input.keeps_event_time or MADE_TIME in (columns.metadata or {}))
    )


@dataclass(frozen=True, slots=True)
class SidesTime:
    """The event time of each input of a stage with several.

    Attributes:
        newest: By input, how far its event time is, in microseconds; None: nothing has come that tells it.
        quiet: By source whose end is reached, the processing time in microseconds of the newest epoch with rows of it,
            or of the first epoch that found none.
        due: The processing time in microseconds at which event time goes on without rows, since an input becomes idle
            then; None: rows alone let it go on.
    """

    newest: tuple[int | None, ...] = ()
    quiet: Mapping[str, int] = field(default_factory=dict)
    due: int | None = None

    def after(self, arriving: Sequence[int | None], quiet: Mapping[str, int]) -> SidesTime:
        """Return where the inputs stand after an epoch.

        Args:
            arriving: By input, how far the epoch brings it; None: it tells nothing.
            quiet: As the attribute.
        """
        before = self.newest or (None,) * len(arriving)
        newest = tuple(
            max((time for time in pair if time is not None), default=None)
            for pair in zip(before, arriving, strict=True)
        )
        return SidesTime(newest, quiet)

    def least(self, stage: Stage, now: int) -> int | None:
        """Return how far the stage's event time is: as far as its slowest input that is not idle, and once all are
        idle as far as the newest. None: not known."""
        times = [
            time
            for input, time in zip(stage.inputs, self.newest, strict=True)
            if not all(self._is_idle(source, now) for source in sources_of(input))
        ]
        if not times:
            return max((time for time in self.newest if time is not None), default=None)
        return None if None in times else min(time for time in times if time is not None)

    def until_idle(self, stage: Stage, watermark: int | None, now: int) -> int | None:
        """Return what `due` is after an epoch.

        Args:
            watermark: The stage's after the epoch.
            now: The epoch's processing time.
        """
        after = {source.name: source.length("idle_after") for input in stage.inputs for source in sources_of(input)}
        ends = {since + length for name, since in self.quiet.items() if (length := after.get(name)) is not None}
        for moment in sorted(end for end in ends if end > now):
            then = before_job(stage, watermark, self.least(stage, moment))
            if then is not None and (watermark is None or then > watermark):
                return moment
        return None

    def _is_idle(self, source: Source, now: int) -> bool:
        after, since = source.length("idle_after"), self.quiet.get(source.name)
        return after is not None and since is not None and now - since >= after

    def of(self, stage: Stage, places: Sequence[int | None]) -> SidesTime:
        """Return the same for the stage as it is now. Nothing is known of an input that is new.

        Args:
            places: By input, its place among those of which this is known; None: it is new.
        """
        newest = tuple(None if place is None or not self.newest else self.newest[place] for place in places)
        read = {source.name for source in sources_of(stage)}
        quiet = {name: since for name, since in self.quiet.items() if name in read}
        return SidesTime(newest, quiet, self.due) if stage.is_of_several else SidesTime((), quiet)

    def to_json(self) -> dict[str, Any]:
        due = {} if self.due is None else {"due": self.due}
        return {"newest": list(self.newest), "quiet": dict(self.quiet), **due}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any] | None) -> SidesTime:
        return cls(tuple(raw["newest"]), raw["quiet"], raw.get("due")) if raw else cls()
