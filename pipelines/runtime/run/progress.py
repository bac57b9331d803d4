"""How a run gets on: a line for each epoch, with the time that the run took for it, and its late rows by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from pipelines.runtime.execution.executor import Executor
from pipelines.runtime.execution.spark.spark_executor import SparkExecutor
from state_ops.checkpoints.checkpoint import Checkpoint
from state_ops.counts import counted


@dataclass
class Pace:
    """How long a run took for each of its epochs.

    They overlap, so what counts is the time since the one before was committed, or since the epoch was triggered, or
    since Spark was there, whichever came last. These times add up, and hold nothing of Spark's start.
    """

    executor: Executor | None = None
    _last: datetime | None = None

    def seconds(self, row: Checkpoint) -> float:
        """The seconds of a run's next epoch."""
        committed = row.triggered_at + timedelta(milliseconds=row.ms.get("to_commit", 0.0))
        ready = self.executor.ready_at if isinstance(self.executor, SparkExecutor) else None
        began = max(moment for moment in (row.triggered_at, self._last, ready) if moment is not None)
        self._last = committed
        return max(0.0, (committed - began).total_seconds())


def rows_late(row: Checkpoint) -> dict[str, int]:
    """An epoch's late rows by stage: one row of the source may be late in several, so their sum would say nothing."""
    return {uid: stats.rows_late for uid, stats in row.operators.items() if stats.rows_late}


def by_stage(numbers: Mapping[str, int]) -> str:
    """Counts by stage, for people."""
    return ", ".join(f"{number:,} in {uid}" for uid, number in numbers.items())


def line(row: Checkpoint, seconds: float | None, width: int = 9) -> str:
    """One epoch on one line.

    Args:
        seconds: That the run took for it, None: that is not known.
        width: Of numbers.
    """
    late = rows_late(row)
    bad = sum(len(part.get("set_aside", ())) for part in row.slice.values())
    took = "" if seconds is None else f"  {seconds:.2f} s"
    pace = f"  {row.rows_read / seconds:,.0f} rows/s" if row.rows_read and seconds else ""
    return (
        f"epoch {row.id:>4}  {row.trigger:<11}  {row.rows_read:>{width},} rows  state"
        f" {row.bytes_total / 1024:>{width},.0f} KiB (+{row.bytes_new / 1024:,.0f}){took}{pace}"
        + (f"  late: {by_stage(late)}" if late else "")
        + (f"  quarantined {row.rows_quarantined:,}" if row.rows_quarantined else "")
        + (f"  set aside {counted(bad, 'file')}" if bad else "")
    )
