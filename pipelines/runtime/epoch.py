"""The life of one epoch. Read this first.

    slice -> stages, each one Spark job that yields acks -> gate -> commit -> publish -> prune

Everything up to the commit can be thrown away: it lies under prefixes that only this attempt knows. The commit is one
row in the registry. Everything after the commit can be done again by whoever comes next.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import structlog
from deltalake.exceptions import DeltaError

from configs.settings import Settings
from pipelines.runtime import gates, stateless, watermarks
from pipelines.runtime.definition import FileSource, Pipeline, Stage, source_of
from pipelines.runtime.gates import Verdict
from pipelines.runtime.keyed_stage import KeyedTask, in_spark
from pipelines.runtime.operators import LATE, MAIN, Progress, Shapes, shapes
from pipelines.runtime.sinks import delta
from pipelines.runtime.sources.files import FilesReader, Slice, SourceFile
from state_ops import errors, retention
from state_ops.checkpoint import OUTPUT, STATE, Ack, Checkpoint, StateFile, snapshots_of
from state_ops.coordinator import AckOutcome, PendingCheckpoint, Trigger
from state_ops.errors import (
    DamageError,
    InputError,
    PipelineError,
    RunEndedError,
    StageError,
    TransientError,
    WeirError,
)
from state_ops.frames import schema_to_json
from state_ops.ids import CheckpointId, Generation, epoch_dir
from state_ops.registry import Publication, Registry
from state_ops.schema import StateSchema, type_name
from state_ops.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = structlog.get_logger("weir.epoch")

_TOTALS = ("epochs", "rows_read", "bytes_new", "files_new")


@dataclass(frozen=True, slots=True)
class Cut:
    """Why this barrier is cut. slices: by source; drain: close every window."""

    trigger: Trigger
    reason: str
    slices: Mapping[str, Slice]
    drain: bool = False


@dataclass(frozen=True, slots=True)
class EpochReport:
    """A completed checkpoint, and what was done after its commit. ms: milliseconds by phase."""

    checkpoint: Checkpoint
    verdicts: tuple[Verdict, ...]
    ms: dict[str, float]
    publications: tuple[Publication, ...] = ()
    pruned: tuple[CheckpointId, ...] = ()


@dataclass
class Workshop:
    """What all epochs of one run share. shapes: the stages' schemas, found once; expected: the sources' schemas."""

    pipeline: Pipeline
    settings: Settings
    storage: Storage
    registry: Registry
    generation: Generation
    spark: SparkSession
    readers: Mapping[str, FilesReader]
    run_id: str | None = None
    shapes: dict[str, Shapes] = field(default_factory=dict)
    inputs: dict[str, pa.Schema] = field(default_factory=dict)
    expected: dict[str, pa.Schema] = field(default_factory=dict)
    discarded: list[str] = field(default_factory=list)


@dataclass
class _Working:
    """One epoch while it is being worked on; gone when it ends, whichever way."""

    pending: PendingCheckpoint
    cut: Cut
    now: datetime
    deadline: float
    verdicts: list[Verdict] = field(default_factory=list)
    watermarks: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)

    @property
    def parent(self) -> Checkpoint | None:
        return self.pending.parent


def complete(shop: Workshop, id: CheckpointId, parent: Checkpoint | None, cut: Cut) -> EpochReport:
    """Run one epoch up to its commit.

    Raises the WeirError that declined it, after everything that it staged was discarded; FencedError discards nothing.
    """
    started, triggered_at = time.perf_counter(), datetime.now(UTC)
    expected = {stage.uid: shop.settings.spark.parallelism for stage in shop.pipeline.stages}
    now = max(triggered_at, parent.epoch_now) if parent else triggered_at
    deadline = time.monotonic() + shop.settings.checkpoints.timeout_seconds
    work = _Working(PendingCheckpoint(id, parent, shop.generation, expected), cut, now, deadline)
    try:
        for stage in shop.pipeline.stages:
            _run_stage(shop, work, stage)
            _gate(shop, work, stage)
        for name, planned in cut.slices.items():
            shop.readers[name].verify(planned)
        _check_deadline(shop, work)
        checkpoint, files = _completed(shop, work, triggered_at)
    except errors.FencedError:
        raise
    except BaseException as error:
        discard(shop, id)
        if (typed := _typed(error, f"pipeline {shop.pipeline.name}, epoch {id}")) is not None:
            raise typed from error
        raise
    checkpoint = _commit(shop, work, checkpoint, files, started)
    return EpochReport(checkpoint, tuple(work.verdicts), work.ms)


def _typed(error: BaseException, where: str) -> WeirError | None:
    """What Python, Spark's bridge or Delta raised of their own accord, as what the operator should do; None: leave it."""
    from py4j.protocol import Py4JError

    if isinstance(error, WeirError):
        return None
    if isinstance(error, Py4JError | ConnectionError | EOFError):
        return RunEndedError(
            f"Spark's JVM is gone: {type(error).__name__}: {error}",
            where=where,
            next="Run again, which starts another one. On a local master the end of <local.work_dir>/spark.log says why it went.",
        )
    if isinstance(error, OSError | DeltaError):
        return TransientError(
            f"{type(error).__name__}: {error}",
            where=where,
            next="The epoch was declined. Look at the storage and the disk.",
        )
    return None


def finish(shop: Workshop, report: EpochReport) -> EpochReport:
    """Publish and prune after the commit. If this fails the epoch stands: recovery does it again, in the next run."""
    ms, clock = dict(report.ms), time.perf_counter()
    publications = publish_missing(shop, [report.checkpoint])
    clock = _lap(ms, "publish", clock)
    pruned = prune(shop)
    for name in shop.discarded:  # once more: tasks of a cancelled job may have gone on writing for a moment
        _delete_staged(shop, name)
    shop.discarded.clear()
    _lap(ms, "prune", clock)
    return replace(report, publications=tuple(publications), pruned=pruned, ms=ms)


# -- stages


def _run_stage(shop: Workshop, work: _Working, stage: Stage) -> None:
    started = time.perf_counter()
    rows = _input(shop, work, stage)
    fixed = _shapes(shop, stage, rows)
    if fixed is None:  # nothing has ever arrived: there is no schema yet, hence no state and no rows
        _ack_nothing(work, stage)
        return
    task = _task(shop, work, stage, fixed)
    frame = stateless.exchanged(stage, rows, shop.inputs[stage.uid], shop.spark, task.parallelism, task.max_parallelism)
    for ack in _collect(shop, work, frame, task):
        outcome = work.pending.receive(ack)
        if outcome is AckOutcome.DECLINED:
            raise declined(ack)
    missing = work.pending.missing(stage.uid)
    if missing:
        raise TransientError(
            f"The subtasks {missing} of {stage.uid} did not ack.",
            where=f"epoch {work.pending.id}",
            next="The epoch was declined and will be replayed. Look at the executors' logs.",
        )
    _note_progress(work, stage, rows is not None)
    _lap(work.ms, f"stage:{stage.uid}", started)


def _collect(shop: Workshop, work: _Working, frame: DataFrame, task: KeyedTask) -> list[Ack]:
    """Run the stage's one job to its acks; when the epoch's time is up the job is cancelled."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    done = threading.Event()
    threading.Thread(target=_cancel_late, args=(shop.spark, work.deadline, done), daemon=True).start()
    acks = frame.mapInArrow(lambda batches: in_spark(task, batches), "ack string")
    if task.stage.gates:
        gates.load_meanwhile()
    try:
        found = acks.collect()
    except (PySparkException, Py4JJavaError) as error:  # without Connect, a job's own failure comes untranslated
        _check_deadline(shop, work, error)
        raise _from_spark(task.stage, error) from error
    finally:
        done.set()
    return [Ack.from_json(row.ack) for row in found]


def _cancel_late(spark: SparkSession, deadline: float, done: threading.Event) -> None:
    # All jobs of the session: a tag set by one thread is not known in another. Again and again: an interrupt that comes
    # before the job has started is not remembered.
    while not done.wait(max(0.2, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            spark.interruptAll()


def _check_deadline(shop: Workshop, work: _Working, cause: Exception | None = None) -> None:
    if time.monotonic() >= work.deadline:
        raise TransientError(
            f"Epoch {work.pending.id} was aborted: it took longer than {shop.settings.checkpoints.timeout_seconds:g} s.",
            where=f"pipeline {shop.pipeline.name}",
            next="Raise checkpoints.timeout_seconds, or cut smaller slices (epoch.max_files, max_rows, max_bytes).",
        ) from cause


def _from_spark(stage: Stage, error: Exception) -> WeirError:
    text = str(error)
    lines = [line.strip().removeprefix(": ") for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith("An error occurred while calling")]
    reason = said[0][:500] if said else type(error).__name__
    unreadable = re.search(r"\S+\.parquet", text)
    if unreadable and any(
        mark in text for mark in ("FAILED_READ_FILE", "ParquetDecodingException", "not a Parquet file")
    ):
        return InputError(
            f"Spark cannot read the input of {stage.uid}: {reason}",
            where=unreadable[0],
            next="Repair the file, or move it out of the landing directory; nothing of this epoch was applied.",
        )
    return TransientError(
        f"The Spark job of {stage.uid} failed: {reason}",
        where=f"stage {stage.uid}",
        next="The epoch was declined. Spark's log has the whole trace: <local.work_dir>/spark.log on a local master.",
    )


def declined(ack: Ack) -> WeirError:
    """The typed error in a decline."""
    report = ack.error or {}
    kind = getattr(errors, report["kind"], WeirError)
    if kind is StageError:
        return StageError(report["what"], where=report["where"], next=report["next"], traceback=report["traceback"])
    return kind(report["what"], where=report["where"], next=report["next"])


def _input(shop: Workshop, work: _Working, stage: Stage) -> DataFrame | None:
    """The stage's rows of this epoch before the shuffle; None if there are none."""
    if isinstance(stage.input, FileSource):
        planned = work.cut.slices.get(stage.input.name)
        if planned is None or not planned.files:
            return None
        reader = shop.readers[stage.input.name]
        assert planned.schema is not None
        raw = _read_source(shop.spark, planned.schema, reader, planned.files)
    else:
        upstream = stage.input.uid
        staged = [file for ack in work.pending.acks_of(upstream) for file in ack.files if _is_rows(file)]
        if not staged:
            return None
        raw = _read(shop.spark, shop.shapes[upstream].outputs[MAIN], [shop.storage.full(file.path) for file in staged])
    return stateless.prepared(stage, raw)


def _read_source(spark: SparkSession, schema: pa.Schema, reader: FilesReader, files: Sequence[SourceFile]) -> DataFrame:
    """The rows of a slice. Columns that a file stores in nanoseconds, which Spark cannot read, are cut to microseconds."""
    from pyspark.sql import functions as F

    parts = []
    for nanos in sorted({file.nanos for file in files}):
        stored = pa.schema([field.with_type(pa.int64()) if field.name in nanos else field for field in schema])
        part = _read(spark, stored, [reader.uri(file) for file in files if file.nanos == nanos])
        for name in nanos:
            whole = F.expr(f"timestamp_micros((`{name}` - pmod(`{name}`, 1000)) div 1000)")
            part = part.withColumn(name, whole if schema.field(name).type.tz else whole.cast("timestamp_ntz"))
        parts.append(part)
    return functools.reduce(lambda one, other: one.unionByName(other), parts)


def _read(spark: SparkSession, schema: pa.Schema, paths: list[str]) -> DataFrame:
    from pyspark.errors import AnalysisException
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        return spark.read.schema(from_arrow_schema(schema)).parquet(*paths)
    except AnalysisException as error:
        raise InputError(
            f"Spark cannot find a file that was there when the epoch was planned: {str(error).splitlines()[0]}",
            where=paths[0] if len(paths) == 1 else f"one of {len(paths)} files in {paths[0].rpartition('/')[0]}",
            next="Put it back, or run again, which plans anew; the epoch was declined.",
        ) from error


def _is_rows(file: StateFile) -> bool:
    return file.kind != STATE and file.name == MAIN


def _shapes(shop: Workshop, stage: Stage, rows: DataFrame | None) -> Shapes | None:
    if stage.uid in shop.shapes:
        return shop.shapes[stage.uid]
    if rows is None:
        # No rows, but the schema may be known: from the files read before, or from the stage before.
        if isinstance(stage.input, FileSource):
            raw = shop.expected.get(stage.input.name)
        else:
            known = shop.shapes.get(stage.input.uid)
            raw = known.outputs[MAIN] if known else None
        if raw is None:
            return None
        rows = stateless.prepared(stage, _empty(shop.spark, raw))
    schema = stateless.schema_of(rows)
    fixed = shapes(stage, schema)
    _check_against_head(shop, stage, fixed)
    for table, output in _tables(stage, fixed):
        delta.check_table(shop.storage, table, output)
    shop.inputs[stage.uid], shop.shapes[stage.uid] = schema, fixed
    return fixed


def _tables(stage: Stage, fixed: Shapes) -> list[tuple[str, pa.Schema]]:
    """The tables that a stage writes, with their schemas."""
    late = stage.window.late if stage.window else None
    named = [(stage.sink, MAIN), (late, LATE)]
    return [(sink.table, fixed.outputs[output]) for sink, output in named if sink is not None]


def _empty(spark: SparkSession, schema: pa.Schema) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    return spark.createDataFrame([], from_arrow_schema(schema))


def _check_against_head(shop: Workshop, stage: Stage, fixed: Shapes) -> None:
    """Refuse, before the first row, code that does not fit the state in the newest checkpoint."""
    head = shop.registry.head()
    recorded = head.operators.get(stage.uid) if head else None
    if not recorded or not recorded.get("schema"):
        return
    assert head is not None
    where = f"stage {stage.uid}, checkpoint {head.id}"
    problems = StateSchema.from_json(recorded["schema"]).differences(fixed.state)
    keys = [[field.name, type_name(field.type)] for field in fixed.keys]
    if recorded["keys"] != keys:
        problems.append(f"the key was {recorded['keys']}, is {keys}")
    if (was := recorded.get("window")) != (now := _windowing(stage)):
        problems.append(f"its windows were {was}, are {now}")
    if recorded["parallelism"] != shop.settings.spark.parallelism:
        problems.append(
            f"spark.parallelism was {recorded['parallelism']}, is {shop.settings.spark.parallelism}; state cannot be rescaled yet"
        )
    if recorded["max_parallelism"] != shop.pipeline.max_parallelism:
        problems.append(f"max_parallelism was {recorded['max_parallelism']}, is {shop.pipeline.max_parallelism}")
    if problems:
        raise PipelineError(
            f"The stage {stage.uid} does not fit its stored state: " + "; ".join(problems) + ".",
            where=where,
            next="Put the definition back, or give the stage a new uid: it then starts with empty state.",
        )


def _windowing(stage: Stage) -> dict[str, Any] | None:
    """What a window's stored state means: another size or aggregate must not be merged into it."""
    if stage.window is None:
        return None
    aggregates = [[name, agg.kind, agg.column] for name, agg in stage.window.aggregates]
    return {"on": stage.window.on, "size": stage.window.size, "aggregates": aggregates}


def _task(shop: Workshop, work: _Working, stage: Stage, fixed: Shapes) -> KeyedTask:
    pipeline, settings, parent = shop.pipeline, shop.settings, work.parent
    listing = shop.registry.files(parent) if parent else ()
    tables = {MAIN: stage.sink.table} if stage.sink else {}
    if stage.window is not None and stage.window.late is not None:
        tables[LATE] = stage.window.late.table
    before = parent.watermarks.get(stage.uid) if parent else None
    return KeyedTask(
        stage=stage,
        shapes=fixed,
        epoch=work.pending.id,
        generation=shop.generation,
        now=work.now,
        progress=Progress(before, _watermark(work, stage, before), work.cut.drain),
        parallelism=settings.spark.parallelism,
        max_parallelism=pipeline.max_parallelism,
        storage=shop.storage,
        work_dir=settings.work_dir / f"{pipeline.name}-{hashlib.sha256(shop.storage.uri.encode()).hexdigest()[:8]}",
        bases=snapshots_of(listing, stage.uid),
        tables=tables,
        channel=pipeline.feeds_others(stage) or bool(stage.gates),
        event_time=source_of(stage).event_time,
        write_buffer_mb=settings.state.write_buffer_mb,
        block_cache_mb=settings.state.block_cache_mb,
    )


# -- event time


def _watermark(work: _Working, stage: Stage, before: int | None) -> int | None:
    """The stage's watermark as far as it is known before its job: from file statistics or from the stage upstream."""
    if isinstance(stage.input, FileSource):
        planned = work.cut.slices.get(stage.input.name)
        return watermarks.before_job(stage, before, planned.newest if planned else None)
    return watermarks.before_job(stage, before, work.watermarks.get(stage.input.uid))


def _note_progress(work: _Working, stage: Stage, had_rows: bool) -> None:
    """Record the stage's watermark after its job, and what its where dropped."""
    parent = work.parent
    acks = work.pending.acks_of(stage.uid)
    known = _watermark(work, stage, parent.watermarks.get(stage.uid) if parent else None)
    known = watermarks.after_job(stage, known, acks, work.cut.drain)
    if known is not None:
        work.watermarks[stage.uid] = known
    if had_rows and stage.transform is None:
        read = _rows_offered(work, stage)
        taken = sum(ack.rows_in + ack.rows_null_key for ack in acks)
        work.dropped[stage.uid] = read - taken


def _rows_offered(work: _Working, stage: Stage) -> int:
    if isinstance(stage.input, FileSource):
        return work.cut.slices[stage.input.name].rows
    return sum(file.rows or 0 for ack in work.pending.acks_of(stage.input.uid) for file in ack.files if _is_rows(file))


def _ack_nothing(work: _Working, stage: Stage) -> None:
    recorded = work.parent.operators.get(stage.uid) if work.parent else None
    if recorded and recorded["schema"]:
        raise DamageError(
            f"Checkpoint {work.parent.id if work.parent else '?'} has state of {stage.uid}, but not what its input looks like.",
            where=f"stage {stage.uid}",
            next="Nothing was changed. Let a file arrive and run again.",
        )
    for subtask in work.pending.missing(stage.uid):
        work.pending.receive(Ack(stage.uid, subtask, "", work.pending.id, work.pending.generation))  # type: ignore[arg-type]


# -- gate, commit, publish, prune


def _gate(shop: Workshop, work: _Working, stage: Stage) -> None:
    started = time.perf_counter()
    staged = [file for ack in work.pending.acks_of(stage.uid) for file in ack.files if _is_rows(file)]
    work.verdicts += gates.check(shop.storage, stage, staged)
    if stage.gates:
        _lap(work.ms, f"gate:{stage.uid}", started)


def _completed(shop: Workshop, work: _Working, triggered_at: datetime) -> tuple[Checkpoint, tuple[StateFile, ...]]:
    """The pending checkpoint as the row and the listing that will make it exist."""
    pending, parent = work.pending, work.parent
    files = pending.files()
    schemas = {(uid, name): schema for uid, fixed in shop.shapes.items() for name, schema in fixed.outputs.items()}
    delta.check(shop.storage, [file for file in files if file.kind == OUTPUT], schemas)
    for stage in shop.pipeline.stages:
        if stage.uid in shop.shapes:
            for table, schema in _tables(stage, shop.shapes[stage.uid]):
                delta.ensure(shop.storage, table, schema)
    offsets = dict(parent.offsets) if parent else {}
    for name, planned in work.cut.slices.items():
        offsets[name] = shop.readers[name].advance(offsets.get(name), planned.files)
        if planned.schema is not None:
            shop.expected[name] = planned.schema
    sinks = dict(parent.sinks) if parent else {}
    for name in {file.sink for file in files if file.kind == OUTPUT and file.sink}:
        sinks[name] = {"id": int(pending.id), "before": sinks[name]["id"] if name in sinks else None}
    operators = {stage.uid: _figures(shop, work, stage) for stage in shop.pipeline.stages}
    state = [file for file in files if file.kind == STATE]
    before = parent.totals if parent else dict.fromkeys(_TOTALS, 0)
    new = [file for file in state if file.new]
    added = {
        "epochs": 1,
        "rows_read": sum(planned.rows for planned in work.cut.slices.values()),
        "bytes_new": sum(file.bytes for file in new),
        "files_new": len(new),
    }
    return (
        Checkpoint(
            id=pending.id,
            parent_id=parent.id if parent else None,
            kind="checkpoint",
            generation=shop.generation,
            commit_id=uuid.uuid4().hex,
            triggered_at=triggered_at,
            completed_at=triggered_at,
            epoch_now=work.now,
            trigger=work.cut.trigger.value,
            reason=work.cut.reason,
            offsets=offsets,
            slice={name: planned.to_dict() for name, planned in work.cut.slices.items()},
            watermarks={**(parent.watermarks if parent else {}), **work.watermarks},
            operators=operators,
            sinks=sinks,
            inputs={name: schema_to_json(schema) for name, schema in shop.expected.items()},
            ms={},
            totals={name: before.get(name, 0) + added[name] for name in _TOTALS},
            files=len(files),
            bytes_total=sum(file.bytes for file in state),
            bytes_new=added["bytes_new"],
            run_id=shop.run_id,
        ),
        files,
    )


def _figures(shop: Workshop, work: _Working, stage: Stage) -> dict[str, Any]:
    acks = work.pending.acks_of(stage.uid)
    state = [file for ack in acks for file in ack.files if file.kind == STATE]
    fixed = shop.shapes.get(stage.uid)
    new = [file for file in state if file.new]
    phases = sorted({phase for ack in acks for phase in ack.ms})
    return {
        "parallelism": shop.settings.spark.parallelism,
        "max_parallelism": shop.pipeline.max_parallelism,
        "schema": fixed.state.to_json() if fixed else None,
        "keys": [[key.name, type_name(key.type)] for key in fixed.keys] if fixed else [],
        "window": _windowing(stage),
        "files_total": len(state),
        "files_new": len(new),
        "bytes_total": sum(file.bytes for file in state),
        "bytes_new": sum(file.bytes for file in new),
        "rows_in": sum(ack.rows_in for ack in acks),
        "rows_out": sum(ack.rows_out for ack in acks),
        "rows_late": sum(ack.rows_late for ack in acks),
        "rows_null_key": sum(ack.rows_null_key for ack in acks),
        "rows_dropped": work.dropped.get(stage.uid, 0),
        "ms": {phase: max(ack.ms.get(phase, 0.0) for ack in acks) for phase in phases},
    }


def _commit(
    shop: Workshop, work: _Working, checkpoint: Checkpoint, files: Sequence[StateFile], started: float
) -> Checkpoint:
    """The one commit point. An error leaves the outcome unknown, so the registry is asked under a fresh claim."""
    work.ms["to_commit"] = round((time.perf_counter() - started) * 1000, 3)
    checkpoint = replace(checkpoint, completed_at=datetime.now(UTC), ms=dict(work.ms))
    clock = time.perf_counter()
    try:
        shop.registry.commit(checkpoint, files)
    except errors.FencedError:
        raise
    except Exception as error:
        _settle(shop, checkpoint, error)
    _lap(work.ms, "commit", clock)
    return checkpoint


def _settle(shop: Workshop, checkpoint: Checkpoint, error: Exception) -> None:
    """After a commit of unknown outcome: return if it landed; raise, with everything discarded, if it cannot land any more."""
    try:
        claimed = shop.registry.take_over(after=shop.generation)
        landed = shop.registry.holds(checkpoint)
    except errors.FencedError:
        raise
    except Exception as second:
        raise RunEndedError(
            f"Nobody can tell whether checkpoint {checkpoint.id} was committed: {error}; then: {second}",
            where=shop.storage.full("registry/checkpoints"),
            next="Look at the storage, then run again: the next run finds out. Nothing was deleted.",
        ) from error
    if not landed:
        discard(shop, checkpoint.id)
    shop.generation = claimed
    if not landed:
        raise TransientError(
            f"The registry could not be committed: {error}",
            where=shop.storage.full("registry/checkpoints"),
            next="The epoch was discarded and will be replayed. Look at the storage.",
        ) from error


def discard(shop: Workshop, epoch: CheckpointId) -> None:
    """Delete what a declined epoch staged. Its id is never used again and was not committed, so nothing can name this.

    A failure is logged, not raised: it must not replace the error that declined the epoch, and the next take-over cleans up.
    """
    name = epoch_dir(shop.generation, epoch)
    try:
        _delete_staged(shop, name)
    except OSError as error:
        log.warning("what a declined epoch staged could not be deleted", epoch=epoch, error=str(error))
    shop.discarded.append(name)


def _delete_staged(shop: Workshop, name: str) -> None:
    for stage in shop.pipeline.stages:
        shop.storage.delete_tree(f"state/{stage.uid}/{name}")
        shop.storage.delete_tree(f"channels/{stage.uid}/{name}")
    for sink in shop.pipeline.sinks:
        shop.storage.delete_tree(f"tables/{sink.table}/data/{name}")


def publish_missing(shop: Workshop, checkpoints: Sequence[Checkpoint]) -> list[Publication]:
    """Publish what some sink lacks, oldest checkpoint first; what is there already is a no-op."""
    published: list[Publication] = []
    for checkpoint in sorted(checkpoints, key=lambda row: row.id):
        staged: dict[str, list[StateFile]] = {}
        for file in shop.registry.files(checkpoint):
            if file.kind == OUTPUT and file.sink:
                staged.setdefault(file.sink, []).append(file)
        for sink, files in sorted(staged.items()):
            before = checkpoint.sinks[sink]["before"]
            published.append(delta.publish(shop.storage, shop.pipeline.app_id, sink, checkpoint, before, files))
    shop.registry.record_publications(shop.generation, published)
    return published


def prune(shop: Workshop) -> tuple[CheckpointId, ...]:
    """Drop the checkpoints beyond the retained number, rows first, then the objects that only they named."""
    completed = shop.registry.checkpoints()
    listings = {row.id: shop.registry.files(row) for row in completed}
    plan = retention.plan(completed, listings, shop.settings.checkpoints.num_retained)
    if plan.drop:
        retention.apply(shop.registry, shop.storage, shop.generation, plan)
    return plan.drop


def _lap(ms: dict[str, float], phase: str, since: float) -> float:
    now = time.perf_counter()
    ms[phase] = round((now - since) * 1000, 3)
    return now
