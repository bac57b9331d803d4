"""The figures of a pipeline that `weir top` and `weir report --html` show, from what a look has read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from state_ops.counts import counted
from state_ops.facts import Facts
from state_ops.moments import from_micros
from state_ops.outputs import MAIN
from state_ops.records.checkpoint import EPOCH, Checkpoint
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.snapshot_files import STATE, StateFile
from weir.cli.watching.pipeline_look import PipelineLook
from weir.definition import Pipeline
from weir.sources.positions import Arrivals
from weir.timings import bottleneck

PHASES = {
    "stage": "stages",
    "gate": "gates",
    "quarantine": "gates",
    "deliver": "deliver",
    "upload": "upload",
    "seal": "seal",
    "commits_before": "commit",
    "publishing_before": "publish",
    "pruning_before": "prune",
}
"""By what a checkpoint records: the phases that people are shown. Committing, publishing and pruning are those of epochs
before, and phases of several epochs overlap, so they do not add up to an epoch's duration."""

_PACE_OVER = 10
_GROWS_FROM_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class EpochFigures(Facts):
    """One checkpoint in figures.

    Attributes:
        rows_out: Rows for sinks, of all of them.
        waited_seconds: How long the oldest of its input files had been there when it was committed; None: it read no file.
        seconds: From the trigger to the commit.
        phases: Milliseconds by phase, in the order of `PHASES`.
        late: Late rows by stage.
        state: Bytes of state by stage, of which `bytes_new` in all were uploaded.
    """

    id: int
    parent: int | None
    kind: str
    trigger: str
    reason: str
    generation: int
    run_id: str | None
    triggered_at: datetime
    completed_at: datetime
    rows_in: int
    rows_out: int
    rows_quarantined: int
    waited_seconds: float | None
    seconds: float
    phases: dict[str, float]
    bottleneck: str | None
    late: dict[str, int]
    state: dict[str, int]
    bytes_total: int
    bytes_new: int
    files: int


def of_epoch(row: Checkpoint, pipeline: Pipeline) -> EpochFigures:
    """Return the figures of a checkpoint.

    Args:
        pipeline: As it is defined now, which says what goes to sinks.
    """
    phases = dict.fromkeys(PHASES.values(), 0.0)
    for name, took in row.ms.items():
        phase = PHASES.get(name.partition(":")[0])
        if phase is not None and name != "seal:gates":  # a part of "seal"
            phases[phase] += took
    arrived = [file["mtime_ns"] / 1e9 for part in row.slice.values() for file in part["files"] if file["mtime_ns"] > 0]
    return EpochFigures(
        id=int(row.id),
        parent=row.parent_id,
        kind=row.kind,
        trigger=row.trigger,
        reason=row.reason,
        generation=int(row.generation),
        run_id=row.run_id,
        triggered_at=row.triggered_at,
        completed_at=row.completed_at,
        rows_in=row.rows_read,
        rows_out=sum(_rows_out(row.operators, pipeline)),
        rows_quarantined=row.rows_quarantined,
        waited_seconds=max(0.0, row.completed_at.timestamp() - min(arrived)) if arrived else None,
        seconds=row.ms.get("to_commit", 0.0) / 1000,
        phases={phase: round(took, 3) for phase, took in phases.items() if took},
        bottleneck=bottleneck(row.ms),
        late={uid: stats.rows_late for uid, stats in row.operators.items() if stats.rows_late},
        state={uid: stats.bytes_total for uid, stats in row.operators.items() if stats.has_state},
        bytes_total=row.bytes_total,
        bytes_new=row.bytes_new,
        files=row.files,
    )


def _rows_out(operators: Mapping[str, OperatorStats], pipeline: Pipeline) -> Iterable[int]:
    for stage in pipeline.stages:
        stats = operators.get(stage.uid)
        if stats is not None:
            for output, _ in stage.sinks_by_output:
                yield stats.rows_out if output == MAIN else stats.outputs.get(output, 0)


def rows_per_second(epochs: Sequence[EpochFigures]) -> float | None:
    """Return how many rows a second the last epochs of the newest coordinator read; None where that cannot be told."""
    newest = [epoch for epoch in epochs if epoch.kind == EPOCH and epoch.generation == epochs[-1].generation]
    newest = newest[-_PACE_OVER:]
    if not newest:
        return None
    # Epochs overlap, and the first began before what is counted here: so time runs from its commit.
    since, counted_rows = newest[0].completed_at, sum(epoch.rows_in for epoch in newest[1:])
    passed = (newest[-1].completed_at - since).total_seconds()
    if passed <= 0:
        since, counted_rows = newest[0].triggered_at, sum(epoch.rows_in for epoch in newest)
        passed = (newest[-1].completed_at - since).total_seconds()
    return counted_rows / passed if passed > 0 else None


def growth_per_hour(epochs: Sequence[EpochFigures]) -> float | None:
    """Return by how many bytes an hour the state has grown over the known epochs; None: they span too short a time."""
    if len(epochs) < 2:
        return None
    passed = (epochs[-1].completed_at - epochs[0].completed_at).total_seconds()
    if passed < _GROWS_FROM_SECONDS:
        return None
    return (epochs[-1].bytes_total - epochs[0].bytes_total) * 3600 / passed


def restarts(epochs: Sequence[EpochFigures], look: PipelineLook) -> int:
    """Count the coordinators that have followed one another since the oldest known epoch."""
    generations = [epoch.generation for epoch in epochs]
    if look.holder is not None:
        generations.append(int(look.holder.generation))
    return sum(later != earlier for earlier, later in itertools.pairwise(generations))


def waiting(arrived: Mapping[str, Arrivals]) -> str:
    """Return what waits in all sources, in words: "12 files, 1,200 rows"."""
    by_unit: dict[str, int] = {}
    for arrivals in arrived.values():
        if arrivals.problem is None:
            by_unit[arrivals.unit] = by_unit.get(arrivals.unit, 0) + arrivals.waiting
    unknown = ["?"] if any(arrivals.problem is not None for arrivals in arrived.values()) else []
    return ", ".join([counted(number, unit) for unit, number in by_unit.items() if number] + unknown) or "0"


def number_waiting(arrived: Mapping[str, Arrivals]) -> int:
    """Return what waits as a number, whatever is counted. A source that cannot be looked at counts as 0."""
    return sum(arrivals.waiting for arrivals in arrived.values() if arrivals.problem is None)


@dataclass(frozen=True, slots=True)
class StageFigures(Facts):
    """A stage in the newest checkpoint.

    Attributes:
        ms: Of its slowest subtask, all phases.
        watermark: Up to when its windows are closed; None: it has none.
        skew: How many times the average the largest subtask has: of bytes of state, or of rows where it has none; None: that
            is not known, or it is one subtask.
        largest: The number of that subtask.
    """

    uid: str
    parallelism: int
    rows_in: int
    rows_out: int
    rows_late: int
    rows_waiting: int
    ms: float
    bytes_total: int
    watermark: datetime | None
    skew: float | None = None
    largest: int | None = None


def of_stages(head: Checkpoint, files: Iterable[StateFile] = ()) -> list[StageFigures]:
    """Return the figures of a checkpoint's stages.

    Args:
        files: Its listing, which tells subtasks from each other; without it nothing is known of their skew.
    """
    of_subtasks: dict[str, tuple[dict[int, int], dict[int, int]]] = {}
    for file in files:
        sizes, rows = of_subtasks.setdefault(file.operator, ({}, {}))
        if file.kind == STATE:
            sizes[file.subtask] = sizes.get(file.subtask, 0) + file.bytes
        elif file.new and file.rows:
            rows[file.subtask] = rows.get(file.subtask, 0) + file.rows
    stages = []
    for uid, stats in head.operators.items():
        sizes, rows = of_subtasks.get(uid, ({}, {}))
        skew, largest = _skew(sizes or rows, stats.parallelism)
        moment = head.watermarks.get(uid)
        stages.append(
            StageFigures(
                uid=uid,
                parallelism=stats.parallelism,
                rows_in=stats.rows_in,
                rows_out=stats.rows_out,
                rows_late=stats.rows_late,
                rows_waiting=stats.rows_waiting,
                ms=round(sum(stats.ms.values()), 3),
                bytes_total=stats.bytes_total,
                watermark=None if moment is None else from_micros(moment),
                skew=skew,
                largest=largest,
            )
        )
    return stages


def _skew(by_subtask: Mapping[int, int], parallelism: int) -> tuple[float | None, int | None]:
    total = sum(by_subtask.values())
    if parallelism < 2 or not total:
        return None, None
    largest = max(by_subtask, key=lambda subtask: by_subtask[subtask])
    return round(by_subtask[largest] * parallelism / total, 2), largest


@dataclass(frozen=True, slots=True)
class SinkFigures(Facts):
    """A sink beside the newest checkpoint.

    Attributes:
        kind: "table", or what else it is.
        newest: The newest checkpoint with rows for it.
        behind: How many retained checkpoints have rows that it lacks, as far as the registry knows.
        lacks_since: The oldest of them; None: it has all.
        why: Why the last try to publish it failed; None: nobody knows.
    """

    name: str
    kind: str
    newest: int | None
    behind: int
    published_at: datetime | None
    lacks_since: int | None = None
    why: str | None = None


def of_sinks(look: PipelineLook, pipeline: Pipeline) -> list[SinkFigures]:
    """Return the figures of a pipeline's sinks."""
    published = {row.sink: row.published_at for row in sorted(look.publications, key=lambda row: row.checkpoint_id)}
    lacking = [sink for _, sink in look.unpublished]
    since = {sink: int(id) for id, sink in reversed(look.unpublished)}
    why = {sink: refused.why for sink, refused in look.refused.items() if sink in since}
    return [
        SinkFigures(
            name=sink.name,
            kind="table" if pipeline.capabilities(sink).has_versions else sink.kind,
            newest=look.head.published(sink.name) if look.head else None,
            behind=lacking.count(sink.name),
            published_at=published.get(sink.name),
            lacks_since=since.get(sink.name),
            why=why.get(sink.name),
        )
        for sink in pipeline.sinks_shown(look.head.sinks if look.head else ())
    ]


def size(bytes: float) -> str:
    """Return a number of bytes for people: "1.2 GB"."""
    number, units = float(bytes), ["B", "kB", "MB", "GB", "TB"]
    while abs(number) >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.0f} {units[0]}" if units[0] == "B" or abs(number) >= 99.5 else f"{number:.1f} {units[0]}"


def ago(seconds: float) -> str:
    """Return roughly how long something lasted: "4 s", "12 min", "3 h", "2 d"."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:,.0f} s" if seconds >= 10 or seconds == 0 else f"{seconds:.1f} s"


def short_number(number: float) -> str:
    """Return a count in a few characters: 950, 12.3k, 4.6M."""
    for unit, length in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        scaled = number / length
        if abs(scaled) >= (9.9995 if unit == "k" else 0.9995):
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 99.5 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}" if abs(number) >= 10 or number == int(number) else f"{number:.1f}"
