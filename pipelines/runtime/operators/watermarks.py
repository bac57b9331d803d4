"""Event time of a stage around its job, in microseconds since 1970 UTC; None where nothing is known yet.

Lateness in an epoch is judged by the watermark after the previous epoch; windows close by the one known before the job.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.runtime.definition import FileSource, Stage
from state_ops.checkpoints.checkpoint import Ack

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 2  # int64, and so is the moment after it, before which state is read


def before_job(stage: Stage, before: int | None, arriving: int | None) -> int | None:
    """The stage's watermark as far as it is known before its job. It never goes back.

    Args:
        before: After the previous epoch.
        arriving: Newest event time of the slice by its files' statistics, or the watermark of the stage upstream.
    """
    if arriving is None:
        return before
    watermark = min(max(arriving - (stage.window.lateness if stage.window else 0), _LOWEST), _HIGHEST)
    return watermark if before is None else max(before, watermark)


def handed_on(stage: Stage, before: int | None, after: int | None, drain: bool) -> int | None:
    """The watermark that stages downstream go by, from those of `before_job` and `after_job`.

    Where files have no statistics the job itself tells how far event time is. Windows and timers have not gone by that
    yet: what they hand out in the next epoch must not be late there.
    """
    holds_back = stage.window is not None or stage.on_timer is not None
    return before if holds_back and not drain else after


def after_job(stage: Stage, watermark: int | None, acks: Sequence[Ack], drain: bool) -> int | None:
    """The stage's watermark after its job, from `before_job`'s and from what its subtasks saw."""
    seen = [ack.max_event_time for ack in acks if ack.max_event_time is not None]
    if isinstance(stage.input, FileSource) and seen:
        watermark = before_job(stage, watermark, max(seen))
    if drain:
        # The windows up to here are closed now: whatever comes for them later is late, not a second first row.
        closed = [ack.closed_upto for ack in acks if ack.closed_upto is not None]
        watermark = max([*closed, *([watermark] if watermark is not None else [])], default=None)
    return watermark
