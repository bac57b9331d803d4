"""The progress of a run: a line for each epoch, for people or as fields of a JSON line, with the time that it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from state_ops.counts import agrees, counted
from state_ops.durations import roughly
from state_ops.logs import Logger
from state_ops.moments import from_micros
from state_ops.records.checkpoint import Checkpoint
from weir.definition import Pipeline
from weir.epoch.model import EpochReport
from weir.execution.executor import Executor
from weir.execution.spark.spark_executor import SparkExecutor
from weir.timings import shares

log = Logger("weir.run")

_SHOWN_SHARE = 0.05  # of an epoch's time, below which a phase says little
_PHASES_SHOWN = 4
_LONGEST_LINE = 160  # characters, as wide as a terminal or a page of Dagster's shows without wrapping
_NAME = 24  # characters of a stage's or a source's name
_ROWS = ("in", "out", "late", "dropped", "null_key", "duplicate", "quarantined", "waiting")


@dataclass
class Pace:
    """A clock that says how long a run took for each of its epochs.

    Epochs overlap. The time of one begins when the one before was committed, when it was triggered, or when Spark was
    there, whichever came last. These times add up, and leave out Spark's start.
    """

    executor: Executor | None = None
    _last: datetime | None = None

    def seconds(self, row: Checkpoint) -> float:
        """Return the seconds of a run's next epoch."""
        committed = row.triggered_at + timedelta(milliseconds=row.ms.get("to_commit", 0.0))
        ready = self.executor.ready_at if isinstance(self.executor, SparkExecutor) else None
        began = max(moment for moment in (row.triggered_at, self._last, ready) if moment is not None)
        self._last = committed
        return max(0.0, (committed - began).total_seconds())


def rows_late(row: Checkpoint) -> dict[str, int]:
    """Return an epoch's late rows by stage: one row of the source may be late in several, so their sum would say
    nothing."""
    return {uid: stats.rows_late for uid, stats in row.operators.items() if stats.rows_late}


def by_stage(numbers: Mapping[str, int]) -> str:
    """Return counts by stage, in words."""
    return ", ".join(f"{number:,} in {uid}" for uid, number in numbers.items())


def line(row: Checkpoint, seconds: float | None, width: int = 9) -> str:
    """Return an epoch as one line of at most 160 characters.

    Args:
        seconds: That the run took for it, None: that is not known.
        width: Of numbers.
    """
    return _fitting([*_of_checkpoint(row, seconds, width)])


def line_of(report: EpochReport, seconds: float | None) -> str:
    """Return the line of `line` with the phases that took the time, and the input that waits behind the epoch.

    Args:
        seconds: As in `line`.
    """
    parts = shares(report.ms)
    whole = sum(parts.values())
    slowest = sorted(parts, key=lambda phase: -parts[phase])[:_PHASES_SHOWN]
    phases = [
        f"{_brief(phase)} {parts[phase] / 1000:.2f} s" for phase in slowest if parts[phase] >= _SHOWN_SHARE * whole
    ]
    took = [f"  [{', '.join(phases[:count])}]" for count in range(len(phases), 0, -1)]
    behind = watermark_lag_seconds(report.checkpoint)
    old = [f"watermark {roughly(round(behind * 1_000_000))} old"] if behind else []
    waiting = {source: count for source, count in (report.backlog or {}).items() if count}
    lags = [[text, *old] for text in _by_name(waiting, "waiting in", "source")] or ([old] if old else [])
    lag = [f"  lag: {', '.join(texts)}" for texts in lags]
    return _fitting([*_of_checkpoint(report.checkpoint, seconds), _Part(0, took), _Part(2, lag)])


@dataclass
class _Part:
    """A part of a line.

    Attributes:
        importance: Parts of less are shortened first, and left out first.
        forms: The longest first; none: the line has no such part.
    """

    importance: int
    forms: list[str]

    @property
    def text(self) -> str:
        return self.forms[0] if self.forms else ""


def _of_checkpoint(row: Checkpoint, seconds: float | None, width: int = 9) -> Iterator[_Part]:
    """Yield the parts of a line that its checkpoint tells."""
    bad = sum(len(part.get("set_aside", ())) for part in row.slice.values())
    took = "" if seconds is None else f"  {seconds:.2f} s"
    yield _Part(9, [
        f"epoch {row.id:>4}  {row.trigger:<11}  {row.rows_read:>{width},} {agrees(row.rows_read, 'row ', 'rows')}"
        f"  state {row.bytes_total / 1024:>{width},.0f} KiB (+{row.bytes_new / 1024:,.0f} KiB){took}"
    ])  # fmt: skip
    yield _Part(1, [f"  {row.rows_read / seconds:,.0f} rows/s"] if row.rows_read and seconds else [])
    yield _Part(3, [f"  late: {text}" for text in _by_name(rows_late(row), "in", "stage")])
    yield _Part(4, [f"  quarantined {counted(row.rows_quarantined, 'row')}"] if row.rows_quarantined else [])
    yield _Part(4, [f"  set aside {counted(bad, 'file')}"] if bad else [])


def _by_name(numbers: Mapping[str, int], verb: str, kind: str) -> list[str]:
    """Return counts by name in words, from all of them to how many there are."""
    most_first = sorted(numbers.items(), key=lambda item: -item[1])
    texts = [f"{number:,} {verb} {_brief(name)}" for name, number in most_first]
    some = [
        ", ".join(texts[:count]) + (f" and {counted(len(texts) - count, kind)} more" if count < len(texts) else "")
        for count in range(len(texts), 0, -1)
    ]
    return [*some, f"{verb} {counted(len(texts), kind)}"] if texts else []


def _brief(name: str) -> str:
    """Return a name with its middle left out if it is long."""
    return name if len(name) <= _NAME else f"{name[: _NAME // 2]}…{name[-(_NAME // 2 - 1) :]}"


def _fitting(parts: Sequence[_Part]) -> str:
    """Join the parts. A line that would be too long has parts that matter less shortened, and in the end left out."""
    for part in sorted(parts, key=lambda part: part.importance)[:-1]:
        while part.forms and sum(len(each.text) for each in parts) > _LONGEST_LINE:
            part.forms = part.forms[1:]
    return "".join(part.text for part in parts)


def fields(pipeline: Pipeline, report: EpochReport, seconds: float) -> dict[str, Any]:
    """Return the fields of a JSON line about an epoch, with units in their names.

    Args:
        seconds: As in `line`.
    """
    row = report.checkpoint
    behind = watermark_lag_seconds(row)
    caches = {uid: dict(stats.cache) for uid, stats in row.operators.items() if stats.cache}
    return {
        "pipeline": pipeline.name,
        **({"branch": pipeline.branch.name} if pipeline.branch is not None else {}),
        "epoch": int(row.id),
        "generation": int(row.generation),
        "run_id": row.run_id,
        "trigger": row.trigger,
        "reason": row.reason,
        "rows_in": row.rows_read,
        "rows_out": sum(publication.rows for publication in report.publications),
        "rows_late": sum(rows_late(row).values()),
        "rows_quarantined": row.rows_quarantined,
        "stage_rows": {
            uid: {kind: count for kind in _ROWS if (count := getattr(stats, f"rows_{kind}"))}
            for uid, stats in row.operators.items()
        },
        "seconds": round(seconds, 3),
        "phase_ms": dict(report.ms),
        "stage_phase_ms": {uid: dict(stats.ms) for uid, stats in row.operators.items()},
        **({"stage_cache_entries": caches} if caches else {}),
        "state_bytes": row.bytes_total,
        "state_new_bytes": row.bytes_new,
        "backlog": None if report.backlog is None else dict(report.backlog),
        "watermark_lag_seconds": None if behind is None else round(behind, 3),
    }


def watermark_lag_seconds(row: Checkpoint) -> float | None:
    """Return the seconds that the oldest of an epoch's watermarks was behind its commit.

    It is 0 after a drain, and None if there is no watermark.
    """
    if not row.watermarks:
        return None
    oldest = from_micros(min(row.watermarks.values()))
    return max(0.0, (row.completed_at - oldest).total_seconds())
