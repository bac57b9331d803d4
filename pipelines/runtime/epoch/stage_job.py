"""One stage in one epoch: its input, its one job, its acks, its watermark."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from configs.settings import Settings
from pipelines.runtime.connectors.delta_sink import ReplaceSink, UpsertSink, partitions
from pipelines.runtime.connectors.lookups.lookup_table import Pinned
from pipelines.runtime.connectors.sink import Sink
from pipelines.runtime.definition import ROW, Pipeline, Source, Stage, is_clocked
from pipelines.runtime.epoch.in_flight_data import InFlightData, Rows, Work, joined, rest, work
from pipelines.runtime.epoch.model import Applied, InFlightEpoch, StageProgress, StageResult
from pipelines.runtime.execution import direct_read
from pipelines.runtime.execution.executor import Channel, Landed, Several
from pipelines.runtime.gates import evaluation, quarantine
from pipelines.runtime.gates.evaluation import Verdict
from pipelines.runtime.operators import MAIN, Progress, Shapes, shapes, watermarks
from pipelines.runtime.operators.base import check_storable, refuse_same_names
from pipelines.runtime.operators.compatibility import fit
from pipelines.runtime.operators.joins import sides
from pipelines.runtime.operators.watermarks import SidesTime
from pipelines.runtime.ownership.context import RunContext
from pipelines.runtime.ownership.local_paths import backend_options, objects, work_dir
from pipelines.runtime.sources.slices import EpochPlan
from pipelines.runtime.task.run_task import KeyedTask
from pipelines.runtime.task.staged_output import Target
from pipelines.runtime.timings import record_ms
from state_ops.backends import loader as backends
from state_ops.checkpoints.checkpoint import (
    Ack,
    Checkpoint,
    PendingUpload,
    Snapshot,
    StagedFile,
    StateFile,
    stats_of,
    to_micros,
)
from state_ops.checkpoints.pending_checkpoint import Trigger
from state_ops.counts import agrees, counted
from state_ops.errors import (
    ConfigurationError,
    DamageError,
    PipelineError,
    TransientError,
)
from state_ops.ids import AttemptId, epoch_dir, new_attempt_id
from state_ops.keyed.per_key.state_cache import CacheSizes
from state_ops.keyed.ttl import forgotten_after
from state_ops.logs import Logger
from state_ops.snapshots import rescale
from state_ops.snapshots.stage_upload import read_by_next

log = Logger("weir.epoch")


def plan(context: RunContext, epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> Work:
    """What the stage applies in this epoch: what it has left before, or this epoch's rows. The stages upstream have
    acked."""
    if stage.sides:
        return _plan_sides(epoch, stage, progress)
    if isinstance(stage.input, Source):
        planned = epoch.plan.slices.get(stage.input.name)
        newest = planned.newest if planned else None
        return Work(InFlightData(epoch.pending.id, stage.uid, epoch.now, newest, (), None, lookups=epoch.plan.lookups))
    upstream, output, more = stage.input.uid, stage.from_output, None
    at = epoch.applied.get(upstream)
    if at is not None:
        rows = tuple(file for ack in epoch.acks[upstream] for file in read_by_next(ack, output))
        schema, layers = context.shapes[upstream].outputs[output] if rows else None, (rows,) if rows else ()
        arrived = InFlightData(at.epoch, upstream, at.now, at.watermark, layers, schema, output=output)
        more = replace(arrived, closed=at.whole, lookups=at.lookups)
    return work(joined(progress.waiting, more), progress.pace)


def _plan_sides(epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> Work:
    """The same for a stage with several inputs: it leaves no rows, nor do those before it (`Pipeline.must_finish`)."""
    arriving: list[int | None] = []
    for input in stage.inputs:
        if isinstance(input, Source):
            planned = epoch.plan.slices.get(input.name)
            arriving.append(planned.newest if planned else None)
            continue
        at = epoch.applied.get(input.uid)
        arriving.append(at.watermark if at is not None else None)
    files = epoch.ahead_of(stage)
    now = to_micros(epoch.now)
    read = {name: planned.rows > 0 or planned.limited for name, planned in epoch.plan.slices.items()}
    epoch.sides[stage.uid] = inputs = progress.sides.after(arriving, read, now)
    layers = (tuple(files),) if files else ()
    watermark, lookups = inputs.least(stage, now), epoch.plan.lookups
    arrived = InFlightData(epoch.pending.id, stage.uid, epoch.now, watermark, layers, None, lookups=lookups)
    return Work(arrived, layers)


def bases(context: RunContext, head: Checkpoint | None, files: Sequence[StateFile], uid: str) -> dict[int, Snapshot]:
    """What the subtasks of a stage build on, from the newest checkpoint and its listing, whatever their number was
    then."""
    if head is None or uid not in head.operators:
        return {}
    recorded, now = head.operators[uid], context.settings.spark.parallelism
    return rescale.bases(files, uid, recorded.parallelism, now, recorded.max_parallelism, head.commit_id)


def run_stage(context: RunContext, epoch: InFlightEpoch, stage: Stage, job: Callable[[], StageResult]) -> StageResult:
    """Run a stage's job; then ask its gates on rows, if they may set rows aside and no subtask declined. Others are
    asked by `judge`.

    Args:
        job: `run_job` of this stage.
    """
    result = job()
    if not stage.tables_aside or any(ack.error is not None for ack in result.acks):
        return result
    clock, ms = time.perf_counter(), dict(result.ms)
    acks = _with_quarantine(context, epoch, stage, list(result.acks))
    if not stage.quarantines:
        return replace(result, acks=tuple(acks))
    verdicts: list[Verdict] = []
    again: EpochPlan | None = None
    files = _judged(stage, acks)
    if files:  # before anything is built on rows that are to go
        looked_at = evaluation.looked_at(context.storage, stage, files)
        verdicts = _verdicts(context, stage, files, looked_at)
        if any(verdict.quarantines for verdict in verdicts):
            again = _without_failed(context, epoch, stage, acks, verdicts, looked_at)
        record_ms(ms, f"quarantine:{stage.uid}", clock)
    return StageResult(tuple(acks), tuple(verdicts), ms, result.shapes, again)


def run_job(
    context: RunContext,
    epoch: InFlightEpoch,
    stage: Stage,
    progress: StageProgress,
    *,
    keep: frozenset[AttemptId] = frozenset(),
    here: Path | None = None,
    reread: bool = False,
    asynchronous: bool = False,
) -> StageResult:
    """Run a stage's job: its subtasks apply what the stage's `work` in this epoch says.

    Args:
        progress: What the epoch builds on.
        keep: Attempts whose local files other epochs in flight need.
        here: As in `KeyedTask`, like `reread` and `asynchronous`.
    """
    started, ms = time.perf_counter(), dict[str, float]()
    rows: Landed | Channel | Several | None
    pinned = _pinned(context, epoch, stage)
    if stage.sides:
        parts = _parts(context, epoch, stage)
        fixed = _shapes_of_sides(context, epoch, stage, parts)
        rows = Several(context.inputs[stage.uid], tuple(parts.items())) if fixed is not None and parts else None
    else:
        rows = _input(context, epoch, stage)
        fixed = _shapes(context, epoch, stage, rows, pinned)
    if fixed is None:  # nothing has ever arrived: there is no schema yet, hence no state and no rows
        return StageResult(_nothing(context, epoch, stage))
    full = context.settings.checkpoints.mode == "full"  # then every snapshot is one of its own
    if epoch.work[stage.uid].first is None and not full and not progress.rescaled:
        return StageResult(_idle(context, epoch, stage, progress), shapes=fixed)
    _check_columns(context, epoch, stage)
    task = replace(
        _task(context, epoch, stage, fixed, progress),
        keep=keep,
        here=here,
        reread=reread,
        asynchronous=asynchronous,
        stage=stage if pinned is None else stage.pinned(pinned),
    )
    acks = context.executor.run(task, rows, context.inputs[stage.uid], lambda: epoch.deadline)
    record_ms(ms, f"stage:{stage.uid}", started)
    return StageResult(tuple(acks), ms=ms, shapes=fixed, joined=pinned.version if pinned and rows else None)


def _pinned(context: RunContext, epoch: InFlightEpoch, stage: Stage) -> Pinned | None:
    """The table of a lookup as of the version that its rows of this epoch are joined with; None: it is no lookup.

    Raises LostError if it is gone.
    """
    if stage.lookup is None:
        return None
    first = epoch.work[stage.uid].first
    return context.lookups.joined(
        stage, epoch.plan.lookups[stage.uid], first.lookups.get(stage.uid) if first is not None else None
    )


def to_judge(epoch: InFlightEpoch, stage: Stage) -> list[StagedFile | StateFile]:
    """What gates are still to look at of a stage that has acked: rows that it has handed out, unless its job has asked
    them already."""
    return [] if stage.quarantines else _judged(stage, epoch.acks[stage.uid])


def judge(
    context: RunContext, stage: Stage, files: Sequence[StagedFile | StateFile]
) -> tuple[list[Verdict], dict[str, float]]:
    """What a stage's gates say of the rows in these files, and the milliseconds of that."""
    ms, clock = dict[str, float](), time.perf_counter()
    verdicts = _verdicts(context, stage, files, evaluation.looked_at(context.storage, stage, files))
    record_ms(ms, f"gate:{stage.uid}", clock)
    return verdicts, ms


def _verdicts(
    context: RunContext, stage: Stage, files: Sequence[StagedFile | StateFile], looked_at: pa.Table
) -> list[Verdict]:
    """What a stage's gates say; a sample's keys are read only where one failed."""
    verdicts = evaluation.check(stage, looked_at)
    return evaluation.with_keys(verdicts, stage.key, lambda: evaluation.staged(context.storage, files, stage.key))


def _judged(stage: Stage, acks: Sequence[Ack]) -> list[StagedFile | StateFile]:
    return [file for ack in acks for file in read_by_next(ack)] if evaluation.of_rows(stage) else []


def _with_quarantine(context: RunContext, epoch: InFlightEpoch, stage: Stage, acks: list[Ack]) -> list[Ack]:
    """The acks, with the rows of its sources that could not be decoded, and those that the stage's gates have set aside
    before this replay."""
    for output, lane, sink in stage.tables_aside:
        if not isinstance(lane.input, Source):
            continue
        planned = epoch.plan.slices.get(lane.input.name)
        if planned is not None and (planned.left_out or planned.bad_rows):
            reader, scratch = context.readers[lane.input.name], work_dir(context)
            acks = quarantine.with_rows(context.storage, reader, planned, lane, acks, scratch, output, sink.name)
    return acks


def _without_failed(
    context: RunContext,
    epoch: InFlightEpoch,
    stage: Stage,
    acks: Sequence[Ack],
    verdicts: Sequence[Verdict],
    looked_at: pa.Table,
) -> EpochPlan:
    """The epoch's plan without the rows that a quarantining gate refuses. Raises GateError where these are too many."""
    assert isinstance(stage.input, Source), "only such a stage may quarantine"
    name, before = stage.input.name, epoch.plan
    positions = quarantine.positions_of(context.storage, acks)
    more = quarantine.decided(stage, before.slices[name], before.rounds, verdicts, looked_at, positions)
    log.warning("a gate sets rows aside", stage=stage.uid, epoch=int(epoch.pending.id), rows=len(more))
    slices = {**before.slices, name: context.readers[name].without(before.slices[name], more)}
    return replace(before, slices=slices, rounds=before.rounds + 1)


def check_acks(epoch: InFlightEpoch, stage: Stage) -> None:
    """Whether every subtask has acked."""
    missing = epoch.pending.missing(stage.uid)
    if missing:
        raise TransientError(
            f"The subtasks {missing} of {stage.uid} did not ack.",
            where=f"epoch {epoch.pending.id}",
            next="The epoch was declined and will be replayed. Look at the executors' logs.",
        )


def late(context: RunContext, epoch: InFlightEpoch) -> TransientError:
    """The error of an epoch whose time is up."""
    return TransientError(
        f"Epoch {epoch.pending.id} was aborted: it took longer than"
        f" {context.settings.checkpoints.timeout_seconds:g} s.",
        where=f"pipeline {context.pipeline.title}",
        next="Raise checkpoints.timeout_seconds, or cut smaller slices (epoch.max_files, max_rows, max_bytes).",
    )


def _parts(context: RunContext, epoch: InFlightEpoch, stage: Stage) -> dict[int, Landed | Channel]:
    """What a stage with several inputs reads in this epoch, by the numbers of the inputs that have rows."""
    parts: dict[int, Landed | Channel] = {}
    for side, lane in enumerate(stage.sides):
        if isinstance(lane.input, Source):
            landed = _landed(context, epoch, lane, lane.input)
            if landed is not None:
                parts[side] = landed
            continue
        staged = _staged(epoch, lane, lane.input)
        if staged:
            schema = context.shapes[lane.input.uid].outputs[lane.from_output]
            parts[side] = Channel(schema, context.storage, tuple(staged))
    return parts


def _landed(context: RunContext, epoch: InFlightEpoch, stage: Stage, source: Source) -> Landed | None:
    planned = epoch.plan.slices.get(source.name)
    if planned is None or not planned.files:
        return None
    assert planned.schema is not None
    schema, reader = source_schema(stage, planned.schema), context.readers[source.name]
    return Landed(schema, reader, planned.files, tuple(planned.positions_left_out()))


def _staged(epoch: InFlightEpoch, stage: Stage, upstream: Stage) -> list[Rows]:
    """The rows for a stage that one upstream hands out in this epoch."""
    acks, output = epoch.acks[upstream.uid], stage.from_output
    staged = [file for ack in acks for file in read_by_next(ack, output)]
    rows_out = sum(ack.rows_of(output) for ack in acks)
    if (rows_staged := sum(file.rows or 0 for file in staged)) != rows_out:
        raise DamageError(
            f"{upstream.uid} has handed out {counted(rows_out, 'row')}, of which {rows_staged} "
            f"{agrees(rows_staged, 'is', 'are')} staged for {stage.uid}.",
            where=f"epoch {epoch.pending.id}",
            next="Nothing was applied. If it happens again, report it: it must not.",
        )
    return staged


def _input(context: RunContext, epoch: InFlightEpoch, stage: Stage) -> Landed | Channel | None:
    """What the stage reads in this epoch; None if that is nothing."""
    if isinstance(stage.input, Source):
        return _landed(context, epoch, stage, stage.input)
    _staged(epoch, stage, stage.input)
    done = epoch.work[stage.uid]
    if done.first is None or not done.files:
        return None
    _check_digests(context, epoch, done.files)
    assert done.first.schema is not None
    # Without a transform they go through where once more, so that rows which fail for ever can be left out.
    as_seen = done.first.begun and stage.transform is not None
    return Channel(done.first.schema, context.storage, done.files, as_seen=as_seen)


def _check_digests(context: RunContext, epoch: InFlightEpoch, files: Sequence[StagedFile | StateFile]) -> None:
    """Whether rows that are read from a checkpoint are those that it names."""
    of_this_epoch = f"/{epoch_dir(epoch.pending.generation, epoch.pending.id)}/"
    for file in files:
        if isinstance(file, StateFile) and of_this_epoch not in file.path:
            data = context.storage.read_bytes(file.path)
            if data is None or hashlib.sha256(data).hexdigest() != file.digest:
                raise DamageError(
                    f"Rows that {file.operator} has left in front of a stage"
                    f" {'are gone' if data is None else 'have changed'}.",
                    where=context.storage.full(file.path),
                    next="Nothing was applied. `weir fsck` says what else is damaged; put the object back, or rewind.",
                )


def _check_columns(context: RunContext, epoch: InFlightEpoch, stage: Stage) -> None:
    """Refuse rows that were left under another definition of this stage or of the one upstream."""
    first = epoch.work[stage.uid].first
    if first is None or first.schema is None:
        return
    assert isinstance(stage.input, Stage), "only such a stage leaves rows"
    now = context.inputs[stage.uid] if first.begun else context.shapes[stage.input.uid].outputs[stage.from_output]
    if not first.schema.equals(now):
        raise PipelineError(
            f"{counted(first.rows, 'row')} of epoch {first.epoch} {agrees(first.rows, 'waits', 'wait')} "
            f"for {stage.uid} with other columns than it has now: "
            f"{', '.join(map(str, first.schema))}; now {', '.join(map(str, now))}.",
            where=f"stage {stage.uid}",
            next=(
                "Put the definition back and let the run catch up, or end it with `weir stop --savepoint NAME`, which"
                " lets the stages apply all rows first; then change it."
            ),
        )


def _shapes(
    context: RunContext, epoch: InFlightEpoch, stage: Stage, rows: Landed | Channel | None, pinned: Pinned | None
) -> Shapes | None:
    first = epoch.work[stage.uid].first
    seen = rows.schema if rows is not None and not (first is not None and first.begun) else None
    looked_up = () if pinned is None else (pinned.version.columns,)
    has_other_types = (  # a column of nulls has got its type
        seen is not None and (seen, *looked_up) != context.reads.get(stage.uid)
    )
    if stage.uid in context.shapes and not has_other_types:
        return context.shapes[stage.uid]
    if seen is not None:
        raw: pa.Schema | None = seen
    elif isinstance(stage.input, Source):  # no rows, but the schema may be known: from the files read before,
        known_files = epoch.source_offsets.expected.get(stage.input.name)
        if known_files is None and context.pipeline.is_before_several(stage):  # which may have rows of another input
            known_files = stage.input.declared_columns
        raw = None if known_files is None else source_schema(stage, known_files)
    else:  # or from the stage before
        upstream = context.shapes.get(stage.input.uid)
        raw = upstream.outputs[stage.from_output] if upstream else None
    if raw is None:
        return None
    direct_read.check_where(stage, raw, context.settings.spark.conf)
    schema = context.executor.columns(stage, raw, "what was read before" if rows is None else rows.where)
    fixed = shapes_of(stage if pinned is None else stage.pinned(pinned), schema, raw)
    return _fixed(context, stage, fixed, (raw, *looked_up), schema)


def _shapes_of_sides(
    context: RunContext, epoch: InFlightEpoch, stage: Stage, parts: Mapping[int, Landed | Channel]
) -> Shapes | None:
    """The same for a stage with several inputs; None as long as none of them has had rows.

    Raises PipelineError where only some have, and nothing tells the columns of the others.
    """
    raw = [_columns_of(context, epoch, lane, parts.get(side)) for side, lane in enumerate(stage.sides)]
    if stage.uid in context.shapes and tuple(raw) == context.reads.get(stage.uid):
        return context.shapes[stage.uid]
    if not parts and None in raw:
        return context.shapes.get(stage.uid)
    seen = []
    for side, (lane, columns) in enumerate(zip(stage.sides, raw, strict=True)):
        if columns is None:
            raise PipelineError(
                f"T{sides.name_of(stage, side)[1:]} has had no row yet, so nothing tells its columns, and"
                f" {stage.uid} has rows of another input that wait for them.",
                where=f"stage {stage.uid}",
                next="Say them at the source (schema=...), or run again when it has a first file.",
            )
        part = parts.get(side)
        direct_read.check_where(lane, columns, context.settings.spark.conf)
        seen.append(context.executor.columns(lane, columns, "what was read before" if part is None else part.where))
    schema = sides.wide(stage, seen)
    known = [columns for columns in raw if columns is not None]
    return _fixed(context, stage, shapes_of(stage, schema, *known), tuple(raw), schema)


def _columns_of(
    context: RunContext, epoch: InFlightEpoch, lane: Stage, part: Landed | Channel | None
) -> pa.Schema | None:
    """The columns of an input; None if nothing tells them yet."""
    if part is not None:
        return part.schema
    if isinstance(lane.input, Source):
        expected = epoch.source_offsets.expected.get(lane.input.name)
        return lane.input.declared_columns if expected is None else expected
    upstream = context.shapes.get(lane.input.uid)
    return upstream.outputs[lane.from_output] if upstream else None


def _fixed(
    context: RunContext, stage: Stage, fixed: Shapes, raw: tuple[pa.Schema | None, ...], seen: pa.Schema
) -> Shapes:
    """Keep a stage's shapes, once they fit its state, its backend and its sinks.

    Args:
        raw: By input, the columns that it has; of a lookup those of its table too.
        seen: Those that the stage's function sees.
    """
    _check_backend(context, stage)
    fixed = _fitted_to_head(context, stage, fixed)
    for sink, output in sinks_of(stage, fixed):
        context.sinks.check(sink, output)
    context.reads[stage.uid], context.inputs[stage.uid], context.shapes[stage.uid] = raw, seen, fixed
    return fixed


def source_schema(stage: Stage, files: pa.Schema) -> pa.Schema:
    """What a stage reads of a source whose files have these columns: with their rows' positions, if its gates may set
    rows aside."""
    if stage.quarantine is None:
        return files
    assert isinstance(stage.input, Source), "only such a stage may quarantine"
    quarantine.refuse_own_column(stage.input, files)
    return files if not stage.quarantines else pa.schema([*files, pa.field(ROW, pa.int64())])


def shapes_of(stage: Stage, seen: pa.Schema, *read: pa.Schema) -> Shapes:
    """A stage's schemas, those of all its tables among them.

    Args:
        seen: The columns that its function sees.
        read: By input, those before its transform.

    Raises:
        PipelineError: Where they do not fit.
    """
    where = f"stage {stage.uid}"
    if stage.quarantines and ROW not in seen.names:
        raise PipelineError(
            f"A gate of {stage.uid} is to quarantine rows of the source, but the transform drops {ROW!r}, by which they"
            " are known.",
            where=where,
            next="Let the transform keep that column.",
        )
    aside = {}
    for output, lane, sink in stage.tables_aside:
        columns = read[stage.lanes.index(lane)]
        kept = quarantine.table_schema(lane, pa.schema([field for field in columns if field.name != ROW]))
        check_storable(kept, f"{where}, the table {sink.name}", "Cast it in what writes the files")
        refuse_same_names(kept, f"{where}, the table {sink.name}")
        aside[output] = kept
    fixed = shapes(stage, seen)
    return replace(fixed, outputs={**fixed.outputs, **aside}) if aside else fixed


def sinks_of(stage: Stage, fixed: Shapes) -> list[tuple[Sink, pa.Schema]]:
    """The sinks that a stage writes to, with the columns of their rows."""
    return [(sink, fixed.outputs[output]) for output, sink in stage.sinks_by_output]


def _check_backend(context: RunContext, stage: Stage) -> None:
    """Refuse, before the first row, a backend that is not there or cannot read the state in the newest checkpoint."""
    configured = context.settings.state.backend
    backends.named(configured)
    head, recorded = context.head, stats_of(context.head, stage.uid)
    if head is None or not recorded.has_state:
        return
    problem = backends.misfit(recorded.backend, configured)
    if problem is not None:
        raise ConfigurationError(
            f"The state of {stage.uid} cannot be opened: {problem}.",
            where=f"stage {stage.uid}, checkpoint {head.id}",
            next="Set state.backend back, or give the stage a new uid: it then starts with empty state.",
        )


def _fitted_to_head(context: RunContext, stage: Stage, fixed: Shapes) -> Shapes:
    """The shapes with a state schema that also reads the rows in the newest checkpoint; refuses, before the first row,
    code that does not fit them."""
    head, recorded = context.head, stats_of(context.head, stage.uid)
    if head is None or not recorded.has_state:
        return fixed
    fitted = fit(stage, fixed, recorded, context.pipeline)
    if fitted.problems:
        raise PipelineError(
            f"The stage {stage.uid} does not fit its stored state: " + "; ".join(fitted.problems) + ".",
            where=f"stage {stage.uid}, checkpoint {head.id}",
            next=fitted.remedies,
        )
    if fitted.migrations:
        log.info("state_schema_changed", stage=stage.uid, checkpoint=int(head.id), changes=fitted.migrations)
    for loss in fitted.losses:
        log.warning("state_is_lost", stage=stage.uid, checkpoint=int(head.id), change=loss.what)
    return fitted.shapes


def _task(context: RunContext, epoch: InFlightEpoch, stage: Stage, fixed: Shapes, progress: StageProgress) -> KeyedTask:
    pipeline, settings = context.pipeline, context.settings
    # What is quarantined is written once the stage's gates have looked at its rows.
    aside = {output for output, _, _ in stage.tables_aside}
    targets = {output: _target(pipeline, sink) for output, sink in stage.sinks_by_output if output not in aside}
    doing = epoch.work[stage.uid]
    first = doing.first or InFlightData(epoch.pending.id, stage.uid, epoch.now, None, (), None)
    # What is given a name, or is the end, leaves nothing behind; a stage that reads a source has its slices for that.
    stops = not pipeline.must_finish(stage) and epoch.plan.trigger not in (Trigger.SAVEPOINT, Trigger.DRAIN)
    return KeyedTask(
        stage=stage,
        shapes=fixed,
        epoch=epoch.pending.id,
        generation=epoch.pending.generation,
        now=first.now,
        progress=Progress(progress.watermark, known_watermark(epoch, stage, progress), epoch.plan.drain),
        origin=first.epoch,
        patience=settings.checkpoints.alignment_timeout_seconds if stops else None,
        unfinished=bool(doing.left) or doing.first is None,
        parallelism=settings.spark.parallelism,
        max_parallelism=pipeline.max_parallelism,
        storage=context.storage,
        work_dir=work_dir(context),
        bases=progress.bases,
        tables=targets,
        channels=pipeline.outputs_read(stage).union((MAIN,) if evaluation.of_rows(stage) else ()),
        event_time=stage.input.event_time if isinstance(stage.input, Source) and not stage.sides else None,
        backend=settings.state.backend,
        options=backend_options(settings),
        cache=cache_sizes(settings, stage),
        resident_mb=settings.state.resident_mb,
        warm_mb=settings.state.warm_mb,
        full=settings.checkpoints.mode == "full",
        stages=tuple(other.uid for other in pipeline.stages),
        objects=objects(settings),
        seconds=epoch.deadline - time.monotonic(),
        swept=progress.swept,
        forgotten=progress.forgotten,
        untold_timers=stage.function is not None and stage.on_timer is None and _untold(context.head, stage),
    )


def _target(pipeline: Pipeline, sink: Sink) -> Target:
    key = sink.key if isinstance(sink, UpsertSink) else ()
    condition = sink.where if isinstance(sink, ReplaceSink) else None
    return Target(sink.name, pipeline.staging(sink), key, partitions(sink), condition)


def _untold(head: Checkpoint | None, stage: Stage) -> bool:
    """Whether a stage has state of which an earlier release did not record whether timers are set in it."""
    recorded = stats_of(head, stage.uid)
    return recorded.has_state and recorded.timers is None


def cache_sizes(settings: Settings, stage: Stage) -> CacheSizes | None:
    """The sizes of a stage's state cache; None if it has none. Raises ConfigurationError for one that cannot have
    any."""
    configured = settings.state.caches.get(stage.uid)
    if configured is None:
        return None
    if not stage.per_key or stage.ttl is not None:
        why = "forgets its state by a TTL" if stage.per_key else "works on whole batches, which gain nothing from one"
        raise ConfigurationError(
            f"A state cache is configured for the stage {stage.uid}, which {why}.",
            where=f"state.caches.{stage.uid}",
            next="Remove it: a cache is for stages with per_key=True and without ttl.",
        )
    return CacheSizes(configured.l1, configured.l2)


def known_watermark(epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> int | None:
    """The stage's watermark as far as it is known before its job: from file statistics or from the stage upstream; of
    windows by processing time, from the clock of the epoch that it applies."""
    first = epoch.work[stage.uid].first
    arriving = to_micros(first.now) if first and stage.by_clock else first.arriving if first else None
    return watermarks.before_job(stage, progress.watermark, arriving)


def note_progress(
    epoch: InFlightEpoch, stage: Stage, progress: StageProgress, columns: pa.Schema | None
) -> StageProgress:
    """Record the stage's watermark after its job, what it has left, and what its where dropped; returns where the stage
    stands now.

    Args:
        columns: Those that its function sees.
    """
    acks, done = epoch.pending.acks_of(stage.uid), epoch.work[stage.uid]
    after, waiting, forgotten, inputs = progress.watermark, done.behind, progress.forgotten, progress.sides
    if done.first is not None:
        left = rest(done, acks, columns)
        if left is not None:
            waiting = (left, *waiting)
        forgotten = forgotten_after(progress.forgotten, stage.ttl, to_micros(done.first.now))
        known, handed_on = known_watermark(epoch, stage, progress), None
        watermark = known
        if stage.sides:
            watermark, inputs = _watermark_of_sides(epoch, stage, known, acks)
        if left is None:
            after = watermarks.after_job(stage, watermark, acks, epoch.plan.drain)
            handed_on = watermarks.handed_on(stage, known, after, epoch.plan.drain)
        epoch.applied[stage.uid] = Applied(
            done.first.epoch, done.first.now, left is None, handed_on, done.first.lookups
        )
        offered = _rows_offered(epoch, stage)
        if offered and all(lane.transform is None for lane in stage.lanes):
            taken = sum(ack.rows_in + ack.rows_null_key for ack in acks)
            epoch.dropped[stage.uid] = offered - taken - (left.rows if left else 0)
    if after is not None:
        (epoch.clocks if is_clocked(stage) else epoch.watermarks)[stage.uid] = after
    epoch.waiting[stage.uid] = waiting
    epoch.forgotten[stage.uid] = forgotten
    return progress.after(acks, after, waiting, forgotten, inputs)


def _watermark_of_sides(
    epoch: InFlightEpoch, stage: Stage, watermark: int | None, acks: Sequence[Ack]
) -> tuple[int | None, SidesTime]:
    """The watermark of a stage with several inputs after its job: files without statistics tell only now what their
    newest event time is."""
    now, inputs = to_micros(epoch.now), epoch.sides[stage.uid]
    if any(ack.newest_by_side for ack in acks):
        seen = zip(*(ack.newest_by_side for ack in acks if ack.newest_by_side), strict=True)
        newest = [max((time for time in times if time is not None), default=None) for times in seen]
        epoch.sides[stage.uid] = inputs = inputs.after(newest, {}, now)
    return watermarks.before_job(stage, watermark, inputs.least(stage, now)), inputs


def _rows_offered(epoch: InFlightEpoch, stage: Stage) -> int:
    if stage.sides:
        return sum(_rows_of(epoch, lane) for lane in stage.sides)
    if isinstance(stage.input, Source):
        return _rows_of(epoch, stage)
    first = epoch.work[stage.uid].first
    return first.rows if first is not None and not first.begun else 0


def _rows_of(epoch: InFlightEpoch, lane: Stage) -> int:
    """How many rows an epoch has for a stage that reads a single input."""
    if isinstance(lane.input, Stage):
        return sum(ack.rows_of(lane.from_output) for ack in epoch.acks[lane.input.uid])
    planned = epoch.plan.slices.get(lane.input.name)
    return planned.rows - len(planned.left_out) if planned else 0


def _idle(context: RunContext, epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> tuple[Ack, ...]:
    """The acks of a stage that nothing has been handed on to in full: its state is what it was."""
    acks = []
    for subtask in range(context.settings.spark.parallelism):
        base, attempt = progress.bases.get(subtask), AttemptId(new_attempt_id())
        nowhere = work_dir(context) / stage.uid / str(subtask) / attempt
        handed = PendingUpload(base.attempt if base else None, None, (), str(nowhere))
        id, generation, swept = epoch.pending.id, epoch.pending.generation, progress.swept.get(subtask)
        due = progress.due.get(subtask)
        acks.append(Ack(stage.uid, subtask, attempt, id, generation, swept=swept, due=due, handover=handed))
    return tuple(acks)


def _nothing(context: RunContext, epoch: InFlightEpoch, stage: Stage) -> tuple[Ack, ...]:
    if context.head is not None and stats_of(context.head, stage.uid).has_state:
        raise DamageError(
            f"Checkpoint {context.head.id} has state of {stage.uid}, but not what its input looks like.",
            where=f"stage {stage.uid}",
            next="Nothing was changed. Let a file arrive and run again.",
        )
    pending = epoch.pending
    return tuple(
        Ack(stage.uid, subtask, AttemptId(""), pending.id, pending.generation) for subtask in pending.missing(stage.uid)
    )
