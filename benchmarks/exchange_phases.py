"""Where the processor time of rows goes between a slice and a snapshot, beside the plain shuffle of the same in Spark.

    make bench-phases                            about six minutes; writes benchmarks/results/exchange-phases.*
    python -m benchmarks.exchange_phases --quick --results /tmp/phases     two minutes: narrow rows alone, once or twice

A ladder of jobs on Spark, each of which does what the one before does and one phase more, and throws away what comes
out: scan, cut, shuffle, open, sort. A phase is the difference between two of them, in the processor time of all
processes. It is made three times: with rows as they went before there were blocks (Spark scans, shuffles and sorts),
with blocks, and in Spark alone, whose jobs leave rows in the JVM: that is the limit, since nothing reaches Python and
nothing is kept.

What a keyed task does with its rows is measured in this process, by functions that note the processor time between
them: fold (grouping in memory), state (looking up and writing rows), snapshot, upload. Whole epochs are real runs; what
they cost beside all phases is planning, commits, and starting jobs and tasks.

Bytes: of files (scan), of blocks (cut), that Spark's shuffle wrote, of rows in memory (open), of new files (snapshot)
and of what went to storage (upload).
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks import exchange as workload
from benchmarks import harness
from benchmarks.exchange import counts
from benchmarks.harness import Row
from configs import settings as configured
from pipelines.api import Pipeline
from pipelines.runtime.definition import Stage
from pipelines.runtime.execution import direct_read, exchange
from pipelines.runtime.execution.exchange import Pieces
from pipelines.runtime.execution.executor import Landed
from pipelines.runtime.execution.spark import spark_plan, spark_session, spark_task
from pipelines.runtime.operators import Progress, shapes
from pipelines.runtime.sources.files import FilesReader
from pipelines.runtime.sources.slices import SourceFile
from pipelines.runtime.task import run_task
from pipelines.runtime.task.run_task import KeyedTask
from state_ops.ids import CheckpointId, Generation
from state_ops.records.snapshot_files import STATE, Snapshot, StateFile, snapshots_of
from state_ops.rows.row_store import Rows
from state_ops.snapshots import snapshot, stage_upload
from state_ops.storage.storage import Storage

WIDTHS, QUICK_WIDTHS = (0, 128), (0,)
SUBTASKS, MAX_PARALLELISM = 2, 128
LADDER = ("scan", "cut", "shuffle", "open", "sort")
INSIDE = ("fold", "state", "snapshot", "upload")
ROWS, BLOCKS, PLAIN = "rows", "blocks", "plain"
_KEYS, _WARM, _BATCH_ROWS, _FILES = 200_000, 2, 65_536, 4

Job = Callable[[], object]
Frame = Callable[[], Any]
Batches = Iterator[pa.RecordBatch]


# Jobs on Spark


def drained(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Take all batches and hand on how many bytes they had."""
    size = sum(batch.nbytes for batch in batches)
    yield pa.RecordBatch.from_pydict({"bytes": [size]})


def _scanned(rows: Landed, pieces: Sequence[Pieces], tasks: Batches) -> Iterator[pa.RecordBatch]:
    """What a map task reads before it cuts anything."""
    for batch in tasks:
        for file, share in (piece for task in batch.column(0).to_pylist() for piece in pieces[task]):
            for table in direct_read.file_tables(rows, file, _BATCH_ROWS, share):
                yield from table.to_batches()


def _opened(rows: Landed, order: tuple[str, ...], work: Path, blocks: Batches) -> Iterator[pa.RecordBatch]:
    """What a subtask makes of its blocks."""
    tables = (table for _, table in exchange.opened(blocks, [rows.schema]))
    return direct_read.in_batches(replace(counts, order_by=order), tables, _BATCH_ROWS, work)


def jobs(session: Any, rows: Landed, work: Path) -> dict[str, dict[str, Job]]:
    """By way, the jobs of the ladder, of which each returns the bytes of what comes out; None where Spark keeps it.

    Each makes its frames anew: one that has run has its shuffle's files still, and would not shuffle again.
    """
    stage, layout = replace(counts, order_by=("a",)), (SUBTASKS, MAX_PARALLELISM, 0)
    pieces = exchange.pieces(rows, SUBTASKS)
    paths = [rows.reader.uri(file) for file in rows.files]

    def bytes_of(frame: Frame, then: Callable[[Batches], Batches] = iter) -> Job:
        return lambda: sum(
            row.bytes for row in frame().mapInArrow(lambda batches: drained(then(batches)), "bytes long").collect()
        )

    def nowhere(frame: Frame) -> Job:
        return lambda: frame().write.format("noop").mode("overwrite").save()

    def read() -> Any:
        return session.read.parquet(*paths)

    def tasks() -> Any:
        return session.range(0, len(pieces), 1, len(pieces))

    def cut(numbers: Batches) -> Iterator[pa.RecordBatch]:
        return spark_task.read_blocks(counts, rows, pieces, layout, numbers)

    def routed() -> Any:
        return spark_plan.routed(tasks().mapInArrow(cut, exchange.SCHEMA), SUBTASKS)

    def exchanged(of: Stage) -> Any:
        return spark_plan.exchanged(of, read(), SUBTASKS, MAX_PARALLELISM)

    return {
        ROWS: {
            "scan": nowhere(read),
            "shuffle": bytes_of(lambda: exchanged(counts)),
            "sort": bytes_of(lambda: exchanged(stage)),
        },
        BLOCKS: {
            "scan": bytes_of(tasks, lambda numbers: _scanned(rows, pieces, numbers)),
            "cut": bytes_of(tasks, cut),
            "shuffle": bytes_of(routed),
            "open": bytes_of(routed, lambda blocks: _opened(rows, (), work, blocks)),
            "sort": bytes_of(routed, lambda blocks: _opened(rows, ("a",), work, blocks)),
        },
        PLAIN: {
            "scan": nowhere(read),
            "shuffle": nowhere(lambda: read().repartition(SUBTASKS, "key")),
            "sort": nowhere(lambda: read().repartition(SUBTASKS, "key").sortWithinPartitions("key", "a")),
        },
    }


def written_by_shuffle(session: Any, jobs: Iterable[int]) -> int:
    """The bytes that the shuffles of some jobs wrote."""
    context = session.sparkContext
    store, tracker = context._jsc.sc().statusStore(), context.statusTracker()
    infos = [info for job in jobs if (info := tracker.getJobInfo(job)) is not None]
    stages = {stage for info in infos for stage in info.stageIds}
    return sum(int(store.lastStageAttempt(stage).shuffleWriteBytes()) for stage in stages)


def climbed(session: Any, rows: Landed, work: Path, repetitions: int) -> dict[str, dict[str, Row]]:
    """By way and phase, processor seconds and bytes of one slice; all jobs in turns."""
    ladders, tracker = jobs(session, rows, work), session.sparkContext.statusTracker()
    took: dict[tuple[str, str], list[float]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for repetition in range(_WARM + repetitions):
        for way, ladder in ladders.items():
            for phase, job in ladder.items():
                jobs_before = set(tracker.getJobIdsForGroup(None))
                before = harness.cpu_seconds()
                out = job()
                time.sleep(0.05)  # what Spark does when a job is over
                if repetition >= _WARM:
                    took.setdefault((way, phase), []).append(harness.cpu_seconds() - before)
                if phase == "shuffle":
                    new = set(tracker.getJobIdsForGroup(None)) - jobs_before
                    sizes[way, phase] = written_by_shuffle(session, new)
                elif isinstance(out, int):
                    sizes[way, phase] = out
    figures: dict[str, dict[str, Row]] = {way: {} for way in ladders}
    stored = sum(file.size for file in rows.files)
    for way, ladder in ladders.items():
        below = 0.0
        for phase in ladder:
            middle = statistics.median(took[way, phase])
            size = stored if phase == "scan" else sizes.get((way, phase))
            figures[way][phase] = {"cpu": middle - below, "bytes": size if phase != "sort" else None}
            below = middle
    return figures


# What a keyed task does


class Shares:
    """Processor time of this process by phase: each moment counts for the innermost one that has begun."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._phases, self._since = ["rest"], time.process_time()

    def _note(self) -> None:
        now = time.process_time()
        self.seconds[self._phases[-1]] += now - self._since
        self._since = now

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count what is within for a phase."""
        self._note()
        self._phases.append(phase)
        try:
            yield
        finally:
            self._note()
            self._phases.pop()

    def counted(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """A function whose time counts for a phase."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with self.within(phase):
                return function(*arguments, **named)

        return call

    def patches(self) -> Iterator[Any]:
        """What has to be in force while a task runs."""
        phases: dict[str, list[tuple[Any, str]]] = {
            "fold": [(run_task, "_apply")],
            "state": [(Rows, name) for name in ("get", "put", "flush", "barrier")],
            "snapshot": [(snapshot, "take"), (snapshot, "prepare")],
            "upload": [(stage_upload, "upload")],
        }
        for phase, places in phases.items():
            for place, name in places:
                yield mock.patch.object(place, name, self.counted(getattr(place, name), phase))


def applied(scratch: Path, slices: Sequence[Landed]) -> dict[str, Row]:
    """By phase within a keyed task, processor seconds and bytes of a slice, both subtasks together: medians over the
    slices after those that warm up."""
    storage, fixed = Storage(str(scratch / "storage")), shapes(counts, slices[0].schema)
    bases: dict[int, Snapshot] = {}
    epochs: list[dict[str, float]] = []
    sizes: list[tuple[int, int]] = []
    for number, rows in enumerate(slices):
        shares, files = Shares(), list[StateFile]()
        task = KeyedTask(
            stage=counts, shapes=fixed, epoch=CheckpointId(number + 1), generation=Generation(1),
            now=datetime(2026, 1, 1, tzinfo=UTC), progress=Progress(None, None, False), parallelism=SUBTASKS,
            max_parallelism=MAX_PARALLELISM, storage=storage, work_dir=scratch / "task", bases=bases, tables={},
            channels=frozenset(), event_time=None, stages=(counts.uid,),
        )  # fmt: skip
        for subtask in range(SUBTASKS):
            batches = direct_read.own_batches(counts, rows, subtask, SUBTASKS, MAX_PARALLELISM, _BATCH_ROWS, scratch)
            given = list(batches)
            with ExitStack() as patched:
                for patch in shares.patches():
                    patched.enter_context(patch)
                ack = run_task.run(task, subtask, iter(given))
            assert ack.error is None, ack.error
            files += ack.files
        bases = dict(snapshots_of(tuple(files), counts.uid))
        epochs.append({phase: shares.seconds[phase] for phase in INSIDE})
        new = [file for file in files if file.new]
        sizes.append((sum(file.bytes for file in new if file.kind == STATE), sum(file.bytes for file in new)))
    middle = harness.medians(epochs[_WARM:])
    written, sent = (int(statistics.median(column)) for column in zip(*sizes[_WARM:], strict=True))
    return {
        phase: {"cpu": middle[phase], "bytes": {"snapshot": written, "upload": sent}.get(phase)} for phase in INSIDE
    }


# All of it


def _slices(landing: Path) -> list[Landed]:
    """The landed files as slices of so many files each, as a run cuts them."""
    reader, paths = FilesReader(counts.input, f"{landing}/*.parquet"), sorted(landing.iterdir())  # type: ignore[arg-type]
    schema = pq.read_schema(paths[0])
    files = [
        SourceFile(path.name, path.stat().st_size, path.stat().st_mtime_ns, pq.read_metadata(path).num_rows)
        for path in paths
    ]
    return [Landed(schema, reader, tuple(files[at : at + _FILES])) for at in range(0, len(files), _FILES)]


def _epochs(scratch: Path, landing: Path, way: str, epochs: int) -> float:
    """Processor seconds of a real epoch."""
    settings = harness.local_settings(
        scratch / way, "counting", landing,
        spark={"exchange": way, "parallelism": SUBTASKS, "direct_read_mb": 0}, epoch={"max_files": _FILES},
    )  # fmt: skip
    ran = list(harness.epochs(Pipeline("counting", (replace(counts, order_by=("a",)),)), settings))
    assert len(ran) == _WARM + epochs
    return statistics.median(epoch.cpu for epoch in ran[_WARM:]) / 1e3


def measured(scratch: Path, widths: Sequence[int], epochs: int) -> list[Row]:
    """A table for each width: by phase and way, processor seconds and bytes for a million rows."""
    tables = []
    for width in widths:
        landing = scratch / f"landing-{width}"
        rows = workload.write(landing, width, _WARM + epochs, _KEYS)
        slices = _slices(landing)
        whole = {way: _epochs(scratch / str(width), landing, way, epochs) for way in (ROWS, BLOCKS)}
        session = spark_session.session(configured.load({}), app="phases")
        ladders = climbed(session, slices[0], scratch / "task", epochs)
        inside = applied(scratch / f"applied-{width}", slices)
        for way in (ROWS, BLOCKS):
            ladders[way] |= inside
        tables.append(_per_million(width, rows, ladders, whole))
        print(tables[-1], flush=True)
    return tables


def _per_million(width: int, rows: int, ladders: Mapping[str, Mapping[str, Row]], whole: Mapping[str, float]) -> Row:
    scale = 1e6 / rows
    phases = {
        phase: {
            way: {name: None if value is None else value * scale for name, value in ladder[phase].items()}
            for way, ladder in ladders.items()
            if phase in ladder
        }
        for phase in (*LADDER, *INSIDE)
    }
    sums = {way: sum(ladder[phase]["cpu"] for phase in ladder) * scale for way, ladder in ladders.items()}
    return {
        "width": width,
        "rows": rows,
        "phases": phases,
        "sums": sums,
        "epochs": {way: seconds * scale for way, seconds in whole.items()},
    }


def report(figures: dict[str, Any]) -> str:
    """The Markdown of all tables."""
    return harness.render("exchange-phases", ways=(ROWS, BLOCKS, PLAIN), **figures)


def main(quick: bool = False, epochs: int = 5, results: Path = harness.RESULTS / "exchange-phases") -> None:
    """Processor time and bytes of each phase for a million rows, beside a plain shuffle in Spark."""
    load = os.getloadavg()[0]
    widths, epochs = (QUICK_WIDTHS, 2) if quick else (WIDTHS, epochs)
    figures = {"machine": harness.machine(), "load": load, "epochs": epochs, "subtasks": SUBTASKS}
    figures["command"] = harness.command("benchmarks.exchange_phases", "bench-phases")
    figures["tables"] = harness.in_scratch(measured, widths, epochs)
    harness.publish(results, figures, report(figures))


if __name__ == "__main__":
    typer.run(main)
