"""One stage in one epoch: its input, its one job, its acks, its watermark."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from state_ops.errors import (
    ConfigurationError,
    DamageError,
    TransientError,
    from_report,
)
from state_ops.ids import AttemptId, new_attempt_id
from state_ops.keyed.per_key.state_cache import CacheSizes
from state_ops.keyed.ttl import forgotten_after
from state_ops.logs import Logger
from state_ops.moments import to_micros
from state_ops.records.acks import Ack, PendingUpload
from state_ops.records.checkpoint import Checkpoint, stats_of
from state_ops.records.snapshot_files import Snapshot, StagedFile, StateFile
from state_ops.records.triggers import Trigger
from state_ops.snapshots import rescale
from state_ops.snapshots.stage_upload import read_by_next
from weir.connectors.lookups.lookup_table import Pinned
from weir.definition import MAIN, Pipeline, Progress, Shapes, Source, Stage, is_clocked
from weir.definition.sink import Sink
from weir.epoch.in_flight_data import InFlightData, rest
from weir.epoch.model import Applied, InFlightEpoch, StageProgress, StageResult
from weir.epoch.stage_input import (
    known_watermark,
    landed,
    parts_of,
    plan_stage,
    rows_offered,
    watermark_by_rows,
)
from weir.epoch.stage_shapes import check_columns, fixed_shapes
from weir.execution.executor import InputRows
from weir.gates import evaluation, quarantine, refused_rows
from weir.gates.evaluation import GateVerdict
from weir.operators import watermarks
from weir.ownership.context import RunContext
from weir.ownership.local_paths import objects, work_dir
from weir.ownership.pipeline_storage import backend_options
from weir.settings.configuration import Settings
from weir.sources.slices import EpochPlan
from weir.task.refusals import OutputTarget
from weir.task.run_task import KeyedTask
from weir.timings import record_ms

log = Logger("weir.epoch")


def bases(context: RunContext, head: Checkpoint | None, files: Sequence[StateFile], uid: str) -> dict[int, Snapshot]:
    """Return the snapshots that a stage's subtasks build on, from the newest checkpoint and its listing.

    The number of subtasks may have been another one then.
    """
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
    if any(ack.error is not None for ack in result.acks):
        return _without_refused(context, epoch, stage, result)
    if not stage.tables_aside:
        return result
    clock, ms = time.perf_counter(), dict(result.ms)
    acks = _with_quarantine(context, epoch, stage, list(result.acks))
    if not stage.quarantines:
        return replace(result, acks=tuple(acks))
    verdicts: list[GateVerdict] = []
    again: EpochPlan | None = None
    files = _judged(stage, acks)
    if files:  # before anything is built on rows that are to go
        looked_at = evaluation.looked_at(context.storage, stage, files)
        verdicts = _verdicts(context, stage, files, looked_at)
        if any(verdict.quarantines for verdict in verdicts):
            again = _without_failed(context, epoch, stage, acks, verdicts, looked_at)
        record_ms(ms, f"quarantine:{stage.uid}", clock)
    return StageResult(tuple(acks), tuple(verdicts), ms, result.shapes, again)


def _without_refused(context: RunContext, epoch: InFlightEpoch, stage: Stage, result: StageResult) -> StageResult:
    """Return the result of a job whose tasks have declined.

    If they declined because of rows that the sources set aside, the result has another plan.
    """
    parts = [
        (input, rows)
        for input in stage.inputs
        if isinstance(input.origin, Source) and (rows := landed(context, epoch, stage, input)) is not None
    ]
    shapes = context.shapes.get(stage.uid)
    target = _targets(context, stage, shapes).get(MAIN) if shapes is not None else None
    read = refused_rows.Read(epoch.plan, parts, context.readers, epoch.positioned)
    acks, again = refused_rows.judged(stage, result.acks, read, target)
    return replace(result, acks=acks, again=again)


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
    pinned, parts = _pinned(context, epoch, stage), parts_of(context, epoch, stage)
    fixed = fixed_shapes(context, epoch, stage, parts, pinned)
    if fixed is None:  # nothing has ever arrived: there is no schema yet, hence no state and no rows
        return StageResult(_nothing(context, epoch, stage))
    rows = InputRows(context.inputs[stage.uid], tuple(parts.items())) if parts else None
    epoch.made_times.setdefault(stage.uid, context.made_times.get(stage.uid, frozenset()))
    full = context.settings.checkpoints.mode == "full"  # then every snapshot is one of its own
    no_work = epoch.work[stage.uid].first is None or (rows is None and watermarks.acts_on_rows_alone(stage))
    if no_work and not full and not progress.rescaled:
        return StageResult(_idle(context, epoch, stage, progress), shapes=fixed)
    check_columns(context, epoch, stage)
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


def applied_alone(
    context: RunContext,
    epoch: InFlightEpoch,
    stage: Stage,
    before: StageProgress,
    here: Path | None = None,
    *,
    left: Collection[str] | None = None,
) -> StageProgress:
    """Let a stage apply its part of an epoch that nobody commits; those before it have. Returns where it stands then.

    Args:
        before: What the epoch builds on.
        here: As in `KeyedTask`.
        left: Where the rows are that it is not to apply, of an epoch that is played again; None: as its pace says.

    Raises:
        WeirError: The typed error of a subtask that declines.
    """
    work = plan_stage(context, epoch, stage, before)
    epoch.work[stage.uid] = work if left is None else work.leaving(left)
    result = run_job(context, epoch, stage, before, here=here)
    for ack in result.acks:
        if ack.error is not None:
            raise from_report(ack.error)
        epoch.pending.record(ack)
    epoch.acks[stage.uid] = epoch.pending.acks_of(stage.uid)
    if result.shapes is not None:
        epoch.shapes[stage.uid] = result.shapes
    return note_progress(context, epoch, stage, before)


def _pinned(context: RunContext, epoch: InFlightEpoch, stage: Stage) -> Pinned | None:
    """Return the table of a lookup as of the version that its rows of this epoch are joined with; None: it is no
    lookup.

    Raises LostError if it is gone.
    """
    if stage.operator.beside is None:
        return None
    first = epoch.work[stage.uid].first
    return context.lookups.joined(
        stage, epoch.plan.lookups[stage.uid], first.lookups.get(stage.uid) if first is not None else None
    )


def to_judge(epoch: InFlightEpoch, stage: Stage) -> list[StagedFile | StateFile]:
    """Return the files of rows that a stage's gates still have to look at, after the stage has acked.

    Gates of a stage that quarantines have looked in its job already.
    """
    return [] if stage.quarantines else _judged(stage, epoch.acks[stage.uid])


def judge(
    context: RunContext, stage: Stage, files: Sequence[StagedFile | StateFile]
) -> tuple[list[GateVerdict], dict[str, float]]:
    """Return the verdicts of a stage's gates on the rows in these files, and the milliseconds that they took."""
    ms, clock = dict[str, float](), time.perf_counter()
    verdicts = _verdicts(context, stage, files, evaluation.looked_at(context.storage, stage, files))
    record_ms(ms, f"gate:{stage.uid}", clock)
    return verdicts, ms


def _verdicts(
    context: RunContext, stage: Stage, files: Sequence[StagedFile | StateFile], looked_at: pa.Table
) -> list[GateVerdict]:
    """Return the verdicts of a stage's gates. A sample's keys are read only if a gate failed."""
    verdicts = evaluation.check(stage, looked_at)
    return evaluation.with_keys(verdicts, stage.key, lambda: evaluation.staged(context.storage, files, stage.key))


def _judged(stage: Stage, acks: Sequence[Ack]) -> list[StagedFile | StateFile]:
    return [file for ack in acks for file in read_by_next(ack)] if evaluation.of_rows(stage) else []


def _with_quarantine(context: RunContext, epoch: InFlightEpoch, stage: Stage, acks: list[Ack]) -> list[Ack]:
    """Return the acks, with the rows of its sources that could not be decoded, and those that the stage's gates have
    set aside before this replay."""
    for output, input, sink in stage.tables_aside:
        planned = epoch.plan.slices.get(input.name)
        if planned is not None and (planned.left_out or planned.bad_rows):
            reader, scratch = context.readers[input.name], work_dir(context)
            acks = quarantine.with_rows(
                context.storage, reader, planned, stage, input, acks, scratch, output, sink.name
            )
    return acks


def _without_failed(
    context: RunContext,
    epoch: InFlightEpoch,
    stage: Stage,
    acks: Sequence[Ack],
    verdicts: Sequence[GateVerdict],
    looked_at: pa.Table,
) -> EpochPlan:
    """Return the epoch's plan without the rows that a quarantining gate refuses. Raises GateError where these are too
    many."""
    name, before = stage.inputs[0].name, epoch.plan
    positions = quarantine.positions_of(context.storage, acks)
    rounds = before.rounds.get(stage.uid, 0)
    more = quarantine.decided(stage, before.slices[name], rounds, verdicts, looked_at, positions)
    log.warning("a gate sets rows aside", stage=stage.uid, epoch=int(epoch.pending.id), rows=len(more))
    return before.without(stage.uid, {name: context.readers[name].without(before.slices[name], more)})


def check_acks(epoch: InFlightEpoch, stage: Stage) -> None:
    """Raise TransientError unless every subtask has acked."""
    missing = epoch.pending.missing(stage.uid)
    if missing:
        raise TransientError(
            f"The subtasks {missing} of {stage.uid} did not ack.",
            where=f"epoch {epoch.pending.id}",
            next="The epoch was declined and will be replayed. Look at the executors' logs.",
        )


def late(context: RunContext, epoch: InFlightEpoch) -> TransientError:
    """Return the error of an epoch whose time is up."""
    return TransientError(
        f"Epoch {epoch.pending.id} was aborted: it took longer than"
        f" {context.settings.checkpoints.timeout_seconds:g} s.",
        where=f"pipeline {context.pipeline.title}",
        next="Raise checkpoints.timeout_seconds, or cut smaller slices (epoch.max_files, max_rows, max_bytes).",
    )


def _task(context: RunContext, epoch: InFlightEpoch, stage: Stage, fixed: Shapes, progress: StageProgress) -> KeyedTask:
    pipeline, settings = context.pipeline, context.settings
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
        tables=_targets(context, stage, fixed),
        channels=pipeline.outputs_read(stage).union((MAIN,) if evaluation.of_rows(stage) else ()),
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


def _targets(context: RunContext, stage: Stage, fixed: Shapes) -> dict[str, OutputTarget]:
    """Return the sink of each output. What is quarantined is written once the stage's gates have looked at its
    rows."""
    aside = {output for output, _, _ in stage.tables_aside}
    return {
        output: replace(_target(context.pipeline, sink), rules=context.sinks.rules(sink, fixed.outputs[output]))
        for output, sink in stage.sinks_by_output
        if output not in aside
    }


def _target(pipeline: Pipeline, sink: Sink) -> OutputTarget:
    can = sink.capabilities
    return OutputTarget(sink.name, pipeline.staging(sink), can.newest_of, can.partition_by, can.replaces_where)


def _untold(head: Checkpoint | None, stage: Stage) -> bool:
    """Return whether a stage has state for which an earlier release did not record whether it has timers."""
    recorded = stats_of(head, stage.uid)
    return recorded.has_state and recorded.timers is None


def cache_sizes(settings: Settings, stage: Stage) -> CacheSizes | None:
    """Return the sizes of a stage's state cache; None if it has none. Raises ConfigurationError for one that cannot
    have any."""
    configured = settings.state.caches.get(stage.uid)
    if configured is None:
        return None
    if not stage.operator.per_key or stage.lifetime is not None:
        why = (
            "forgets its state by a TTL"
            if stage.operator.per_key
            else "works on whole batches, which gain nothing from one"
        )
        raise ConfigurationError(
            f"A state cache is configured for the stage {stage.uid}, which {why}.",
            where=f"state.caches.{stage.uid}",
            next="Remove it: a cache is for stages with per_key=True and without ttl.",
        )
    return CacheSizes(configured.l1, configured.l2)


def note_progress(context: RunContext, epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> StageProgress:
    """Record the stage's watermark after its job, what it has left, and what its where dropped; returns where the stage
    stands now."""
    acks, done = epoch.pending.acks_of(stage.uid), epoch.work[stage.uid]
    after, waiting, forgotten, inputs = progress.watermark, done.behind, progress.forgotten, progress.sides
    if done.first is not None:
        left = rest(done, acks, context.inputs.get(stage.uid))
        if left is not None:
            waiting = (left, *waiting)
        forgotten = forgotten_after(progress.forgotten, stage.lifetime, to_micros(done.first.now))
        known, handed_on = known_watermark(epoch, stage, progress), None
        watermark = watermark_by_rows(epoch, stage, known, acks)
        inputs = epoch.sides.get(stage.uid, inputs)
        if left is None:
            after = watermarks.after_job(watermark, acks, epoch.plan.drain)
            handed_on = watermarks.handed_on(stage, known, after, epoch.plan.drain)
        if stage.is_of_several and watermarks.time_matters(stage, context.pipeline.stages):
            inputs = replace(inputs, due=inputs.until_idle(stage, after, to_micros(epoch.now)))
            epoch.sides[stage.uid] = inputs
        epoch.applied[stage.uid] = Applied(
            done.first.epoch, done.first.now, left is None, handed_on, done.first.lookups
        )
        offered = rows_offered(epoch, stage)
        if offered and all(input.transform is None for input in stage.inputs):
            taken = sum(ack.rows_in + ack.rows_null_key for ack in acks)
            epoch.dropped[stage.uid] = offered - taken - (left.rows if left else 0)
    if after is not None:
        (epoch.clocks if is_clocked(stage) else epoch.watermarks)[stage.uid] = after
    epoch.waiting[stage.uid] = waiting
    epoch.forgotten[stage.uid] = forgotten
    return progress.after(acks, after, waiting, forgotten, inputs)


def _idle(context: RunContext, epoch: InFlightEpoch, stage: Stage, progress: StageProgress) -> tuple[Ack, ...]:
    """Return the acks of a stage without anything to do, of which no job is run: its state is what it was."""
    acks = []
    for subtask in range(context.settings.spark.parallelism):
        base, attempt = progress.bases.get(subtask), AttemptId(new_attempt_id())
        nowhere = work_dir(context) / stage.uid / str(subtask) / attempt
        handed = PendingUpload(base.attempt if base else None, None, (), str(nowhere))
        id, generation, swept = epoch.pending.id, epoch.pending.generation, progress.swept.get(subtask)
        due = progress.due.get(subtask)
        acks.append(
            Ack(
                stage.uid, subtask, attempt, id, generation, swept=swept, due=due, pending_upload=handed,
                entries=0 if base is None else None,
            )
        )  # fmt: skip
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
