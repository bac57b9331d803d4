"""Decides how long the demo waits for a run: for as long as the run gets on.

A run's heartbeat says that its process lives, which a run that hangs does too. What shows that it gets on is an epoch
that begins, a line of Spark's log, or processor time of its processes.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from state_ops.coordination import lease
from state_ops.coordination.lease import Lease

SILENCE_SECONDS = 600.0
"""A run in which nothing moves for as long is given up."""
BUSY_SECONDS = 30.0
"""Processor time that shows that a run gets on: one that hangs takes less within SILENCE_SECONDS."""
SAID_SECONDS = 30.0


@dataclass
class Patience:
    """Decides whether to wait on. All times are seconds of one monotonic clock.

    Attributes:
        heard: The newest checkpoint, or the beginning of waiting.
        moved: When something moved last.
        said: When a line was last printed.
    """

    heard: float
    signs: Hashable = None
    busy: float = 0.0

    def __post_init__(self) -> None:
        self.moved = self.said = self.heard

    def checkpoint(self, now: float) -> None:
        """Note a new checkpoint."""
        self.heard = self.moved = self.said = now

    def look(self, now: float, signs: Hashable, busy: float) -> None:
        """Note what is to be seen of the run.

        Args:
            signs: What changes only as a run gets on.
            busy: Processor seconds of its processes. Less than before: they are others.
        """
        if signs != self.signs or not self.busy <= busy < self.busy + BUSY_SECONDS:
            self.signs, self.busy, self.moved = signs, busy, now

    def speaks(self, now: float) -> bool:
        """Return whether it is time for a line, which counts as printed."""
        if now - self.said <= SAID_SECONDS:
            return False
        self.said = now
        return True

    def ends(self, now: float) -> bool:
        """Return whether nothing has moved for too long."""
        return now - self.moved > SILENCE_SECONDS


def doing(holder: Lease | None, last: int) -> str:
    """Say what keeps the next checkpoint waiting.

    Args:
        holder: The pipeline's lease.
        last: The newest checkpoint.
    """
    if holder is None or holder.stopped:
        return "Dagster is starting the run, which imports Dagster, Spark and Great Expectations"
    if lease.alive(holder) is False:
        return f"the run's process {holder.pid} has died; Dagster notices it, and begins another run"
    begun = f"epoch {holder.last_id} has begun" if holder.last_id > last else "it is preparing its first epoch"
    return f"the run lives (process {holder.pid}, {processor_seconds(holder):.0f} s of processor time), and {begun}"


def processor_seconds(holder: Lease | None) -> float:
    """Return the processor time of a run's process and all below it; 0 where there is none."""
    if holder is None or not lease.alive(holder):
        return 0.0
    total = 0.0
    with suppress(psutil.Error):
        run = psutil.Process(holder.pid)
        for process in (run, *run.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                # Those of children that have ended count too: workers come and go.
                total += times.user + times.system + times.children_user + times.children_system
    return total
