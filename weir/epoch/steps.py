"""The life of one epoch. Read this first.

    slice -> stages, each one Spark job that yields acks -> its gates, uploads -> gates on the whole -> commit ->
    publish -> prune

Where rows are delivered at least once, they go to sinks as soon as their stage has acked; where at most once, positions
are committed before the first stage.

Everything up to the commit can be thrown away: it lies under prefixes that only this attempt knows. The commit is one
row in the registry. Everything after the commit can be done again by whoever comes next.

These are its steps, each from values to a value. `readiness` says which epoch may take which step when: while one is
published the next one is committed, and another uploaded, and the stages of those after it are at work.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pyarrow as pa
from deltalake.exceptions import DeltaError

from state_ops.backends import composite
from state_ops.coordination import gate_hold, requests
from state_ops.coordination.requests import Request
from state_ops.errors import (
    DamageError,
    FencedError,
    RunEndedError,
    TransientError,
    WeirError,
    look_there,
    plainly,
)
from state_ops.ids import CheckpointId
from state_ops.keyed.per_key.state_cache import CacheFigures
from state_ops.logs import Logger
from state_ops.outputs import PARTS
from state_ops.records.acks import Ack
from state_ops.records.checkpoint import (
    EDITED,
    FORMAT_VERSION,
    POSITIONS,
    ROWS_AHEAD,
    ROWS_LOST,
    ROWS_QUARANTINED,
    WITH_ARCHIVE,
    WITH_PARTS,
    WITH_WAITING,
    Checkpoint,
    began,
    format_with,
    is_untold,
    rows_lost,
    spans_with,
    stats_of,
    taken_back,
    told_times,
)
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.publications import Publication
from state_ops.records.snapshot_files import CHANNEL, INPUT, OUTPUT, STATE, Snapshot, StagedFile, StateFile
from state_ops.schema import evolution
from state_ops.snapshots import stage_upload
from state_ops.storage.transfers import at_once
from weir.code_changes.sql import recorded_sql
from weir.connectors.delta import append
from weir.definition import Source, Stage, sinks_shown
from weir.definition.sink import Sink
from weir.epoch.model import EpochReport, InFlightEpoch
from weir.epoch.stage_shapes import sinks_of
from weir.execution.spark import spark_errors
from weir.gates import epoch_gates, evaluation
from weir.operators.compatibility import changeable, meaning, stored_collections, stored_keys
from weir.ownership import savepoints
from weir.ownership.context import RunContext
from weir.ownership.derived_checkpoint import nothing_before
from weir.ownership.fencing import as_owner
from weir.ownership.leftovers import delete_staged
from weir.ownership.prune import prune
from weir.ownership.publish import deliver, publish_missing
from weir.sinks.recorded_sink import recorded
from weir.sources import archive
from weir.timings import record_ms

log = Logger("weir.epoch")

_TOTALS = ("epochs", "rows_read", "bytes_new", "files_new")


def upload(context: RunContext, epoch: InFlightEpoch, stage: Stage, bases: Mapping[int, Snapshot]) -> list[Ack]:
    """Upload a stage's new files of state and its staged rows, so that the epoch can be committed.

    Rows for the next stage alone are skipped if that stage has applied them: no checkpoint needs them any more.

    Args:
        bases: By subtask, its snapshot in the newest confirmed checkpoint. Files named there are referenced, not
            uploaded.

    Returns:
        The acks of the stage's subtasks, each with the uploaded objects.
    """
    acks = epoch.pending.acks_of(stage.uid)
    full = context.settings.checkpoints.mode == "full"
    waiting = epoch.waiting_paths

    def waits(file: StagedFile) -> bool:
        return file.path in waiting

    return stage_upload.upload(
        context.storage,
        acks,
        bases,
        full=full,
        channels=waits,
        deadline=epoch.deadline,
        sent=epoch.delivered.get(stage.uid, ()),
    )


def deliver_stage(context: RunContext, epoch: InFlightEpoch, stage: Stage) -> tuple[list[StateFile], dict[str, float]]:
    """Let the sinks of a stage have its rows before the epoch is committed, which may fail: at least once.

    Returns:
        The rows' files that were uploaded for it, and its milliseconds.
    """
    clock, ms, acks = time.perf_counter(), dict[str, float](), epoch.acks[stage.uid]
    uploaded = stage_upload.upload_outputs(context.storage, acks, deadline=epoch.deadline)
    files = [*uploaded, *(file for ack in acks for file in ack.files if file.kind == OUTPUT)]
    if not files:
        return [], ms
    _prepare(context, _looked_at(context, epoch, _written(epoch, [stage], files), files))
    id, head = epoch.pending.id, context.head
    sinks = {
        name: recorded(
            context.pipeline,
            context.sinks.link(name, id, head.published(name) if head else None),
            name,
            head.sinks.get(name) if head else None,
            context.resolve,
        )
        for name in {file.sink for file in files if file.sink}
    }
    deliver(context, replace(nothing_before(context.generation, id, epoch.now), sinks=sinks), files)
    record_ms(ms, f"deliver:{stage.uid}", clock)
    return uploaded, ms


def publish(context: RunContext, epoch: InFlightEpoch, checkpoint: Checkpoint) -> tuple[Publication, ...]:
    """Make its rows visible after the commit. If this fails, the epoch stands all the same, and the next run's recovery
    does it again."""
    clock = time.perf_counter()
    publications = as_owner(context, lambda: publish_missing(context, [checkpoint]))
    record_ms(epoch.ms, "publish", clock)
    return tuple(publications)


def finish(
    context: RunContext,
    epoch: InFlightEpoch,
    checkpoint: Checkpoint,
    publications: tuple[Publication, ...],
    done_with: Sequence[Ack],
    also: Mapping[CheckpointId, Sequence[str]] | None,
) -> EpochReport:
    """Prune and answer requests after publishing. If this fails the epoch stands, and the next run does it again.

    Args:
        done_with: Acks whose files on this disk nobody needs any more.
        also: The checkpoints that epochs in flight need, as `Coordinator.needed` says; None: the next epoch prunes.
    """
    ms = dict(epoch.ms)
    clock = time.perf_counter()
    if context.held:
        context.held = not gate_hold.clear(context.storage)
    pruned = as_owner(context, lambda: prune(context, also=also)) if also is not None else ()
    for name in context.discarded:  # once more: tasks of a cancelled job may have gone on writing for a moment
        delete_staged(context, name)
    context.discarded.clear()
    stage_upload.clear(done_with)
    for name, planned in epoch.plan.slices.items():
        context.readers[name].release(planned)
        if context.tells_sources:
            context.readers[name].committed(checkpoint.offsets[name])
    for request in epoch.plan.requests:
        as_owner(context, partial(_answer, context, checkpoint, request))
    record_ms(ms, "prune", clock)
    columns = {uid: shapes.outputs for uid, shapes in epoch.shapes.items()}
    return EpochReport(checkpoint, tuple(epoch.verdicts), ms, publications, pruned, epoch.plan.backlog, columns)


def keep_up(context: RunContext) -> None:
    """Shorten the registry's logs, which nothing waits for."""
    as_owner(context, lambda: context.registry.keep_up(context.generation))


def _answer(context: RunContext, checkpoint: Checkpoint, request: Request) -> None:
    """Answer a request for a barrier, which has been cut."""
    # Whoever lost patience has withdrawn the request, and been informed that nothing was named.
    if request.kind == requests.NAME and context.storage.read_bytes(request.name) is not None:
        try:
            savepoints.save(context, checkpoint, request.savepoint, request.reason)
        except FencedError:
            raise
        except WeirError as error:  # the name was taken meanwhile: no reason to end the run, and who asked sees it
            log.warning("no savepoint was taken", name=request.savepoint, error=plainly(error))
    requests.take(context.storage, request)


def typed(error: BaseException, where: str) -> WeirError | None:
    """Return an error of Python, Spark's bridge or Delta as the error that tells the operator what to do.

    None: leave it.
    """
    from py4j.protocol import Py4JError, Py4JJavaError

    if isinstance(error, WeirError):
        return None
    if isinstance(error, Py4JJavaError):  # the JVM is there, and says what is wrong
        return TransientError(
            f"Spark failed: {spark_errors.reason(error)}",
            where=where,
            next=(
                "The epoch was declined. Spark's log has the whole trace: <local.work_dir>/spark.log on a local master."
            ),
        )
    if isinstance(error, Py4JError | ConnectionError | EOFError):
        return RunEndedError(
            f"Spark's JVM is gone: {plainly(error)}",
            where=where,
            next=(
                "Run again, which starts another one. On a local master the end of <local.work_dir>/spark.log says why"
                " it went."
            ),
        )
    if isinstance(error, OSError | DeltaError):
        return TransientError(
            plainly(error),
            where=where,
            next=f"The epoch was declined. {look_there(error)}.",
        )
    return None


def completed(
    context: RunContext, epoch: InFlightEpoch, parent: Checkpoint | None, channels: Mapping[str, StateFile]
) -> tuple[Checkpoint, tuple[StateFile, ...]]:
    """Check all that the epoch's checkpoint will name, and build the checkpoint.

    Args:
        channels: By path, the files of rows that the parent names.

    Returns:
        The checkpoint's row and its listing, which the commit writes.
    """
    clock = time.perf_counter()
    for name, planned in epoch.plan.slices.items():
        context.readers[name].verify(planned)
    pending = epoch.pending
    files = pending.files()
    files += _carried(epoch, files, channels)
    files += _archived(context, epoch, channels)
    early = context.pipeline.early  # then the rows are there by now
    written = _written(epoch, context.pipeline.stages, files)
    unfit = [] if early else _looked_at(context, epoch, written, files)
    judged = len(epoch.verdicts)
    checkpoint = _judged(context, epoch, _row(context, epoch, parent, files), files)
    if len(epoch.verdicts) > judged and not early:  # gates take their time, in which somebody may alter a sink
        unfit = _looked_at(context, epoch, written, ())
    _prepare(context, unfit)
    record_ms(epoch.ms, "seal", clock)
    return checkpoint, files


def _written(epoch: InFlightEpoch, stages: Sequence[Stage], files: Sequence[StateFile]) -> list[tuple[Sink, pa.Schema]]:
    """Return the sinks of some stages that the epoch writes to, with the columns of their rows.

    A sink belongs to an epoch that has no rows for it too, so that its table is there from the first epoch. A table of
    rows that are set aside belongs to the epochs that set rows aside.
    """
    staged = {file.sink for file in files if file.kind == OUTPUT}
    return [
        (sink, schema)
        for stage in stages
        if (fixed := epoch.shapes.get(stage.uid))
        for sink, schema in sinks_of(stage, fixed)
        if sink in sinks_shown(stage, staged)
    ]


def _looked_at(
    context: RunContext,
    epoch: InFlightEpoch,
    written: Sequence[tuple[Sink, pa.Schema]],
    files: Sequence[StateFile],
) -> list[tuple[Sink, pa.Schema]]:
    """Check staged rows; returns those of the sinks that may not take them as they are, with their columns."""
    outputs_of = [(uid, *output) for uid, fixed in epoch.shapes.items() for output in fixed.outputs.items()]
    schemas = {(uid, f"{name}{parts}"): schema for uid, name, schema in outputs_of for parts in ("", PARTS)}
    outputs = [file for file in files if file.kind == OUTPUT]
    looks: list[Callable[[], object]] = [partial(context.sinks.fits, sink, schema) for sink, schema in written]
    looks.append(lambda: context.sinks.keep(append.check(context.storage, outputs, schemas)))
    *fit, _ = at_once(looks)
    return [output for output, fits in zip(written, fit, strict=True) if not fits]


def _prepare(context: RunContext, unfit: Sequence[tuple[Sink, pa.Schema]]) -> None:
    for sink, schema in unfit:
        context.sinks.prepare(sink, schema)


def _judged(
    context: RunContext, epoch: InFlightEpoch, checkpoint: Checkpoint, files: tuple[StateFile, ...]
) -> Checkpoint:
    """Add the verdicts of all gates to the row; gates that look at the epoch as a whole are asked now.

    Raises:
        GateError: A gate holds the epoch.
    """
    clock = time.perf_counter()
    verdicts = epoch_gates.verdicts(context, epoch.deadline, checkpoint, files)
    if verdicts:
        record_ms(epoch.ms, "seal:gates", clock)
    for uid in dict.fromkeys(verdict.stage for verdict in verdicts):
        evaluation.refuse(uid, [verdict for verdict in verdicts if verdict.stage == uid])
    epoch.verdicts += verdicts
    operators = {
        uid: replace(stats, gates=[verdict.recorded() for verdict in epoch.verdicts if verdict.stage == uid])
        for uid, stats in checkpoint.operators.items()
    }
    return replace(checkpoint, operators=operators)


def _row(
    context: RunContext, epoch: InFlightEpoch, parent: Checkpoint | None, files: tuple[StateFile, ...]
) -> Checkpoint:
    pending = epoch.pending
    sinks = dict(parent.sinks) if parent else {}
    for name in {file.sink for file in files if file.kind == OUTPUT and file.sink}:
        last = parent.published(name) if parent else None
        link = context.sinks.link(name, pending.id, last, sinks.get(name))
        link = recorded(context.pipeline, link, name, sinks.get(name), context.resolve)
        sinks[name] = link.updated(delivered=True) if context.pipeline.early else link
    state = [file for file in files if file.kind == STATE]
    before = parent.totals if parent else dict.fromkeys(_TOTALS, 0)
    new = [file for file in state if file.new]
    added = {
        "epochs": 1,
        "rows_read": sum(planned.rows for planned in epoch.plan.slices.values()),
        "bytes_new": sum(file.bytes for file in new),
        "files_new": len(new),
    }
    return Checkpoint(
        id=pending.id,
        parent_id=parent.id if parent else None,
        kind="checkpoint",
        generation=context.generation,
        commit_id=uuid.uuid4().hex,
        triggered_at=epoch.triggered_at,
        completed_at=epoch.triggered_at,
        epoch_now=epoch.now,
        trigger=epoch.plan.trigger.value,
        reason=epoch.plan.reason,
        offsets=_positions(context, epoch, parent),
        slice={name: planned.to_dict() for name, planned in epoch.plan.slices.items()},
        watermarks={**(parent.watermarks if parent else {}), **epoch.watermarks},
        operators={
            stage.uid: figures_of(context, epoch, stage, stats_of(parent, stage.uid))
            for stage in context.pipeline.stages
        },
        sinks=sinks,
        inputs=epoch.recorded_inputs(),
        ms={},
        totals={
            **{name: before.get(name, 0) + added[name] for name in _TOTALS},
            **{name: before[name] for name in (EDITED,) if name in before},
            **_lost(epoch, parent),
            **_quarantined(epoch, parent),
            **began(parent),
            **taken_back(parent),
            **context.requested(),
        },
        files=len(files),
        bytes_total=sum(file.bytes for file in state),
        bytes_new=added["bytes_new"],
        run_id=context.run_id,
        lineage=spans_with(parent, context.generation, pending.id),
        format_version=format_with(_format(epoch, state, any(file.kind == INPUT for file in files)), sinks),
    )


def _lost(epoch: InFlightEpoch, parent: Checkpoint | None) -> dict[str, int]:
    """Return the total of rows that no epoch has applied.

    Rows that the parent's positions were committed for count too, unless they are this epoch's.
    """
    lost = rows_lost(parent)
    if parent is not None and parent.kind == POSITIONS and epoch.positions_first:
        lost -= parent.totals[ROWS_AHEAD]
    return {ROWS_LOST: lost} if lost else {}


def _quarantined(epoch: InFlightEpoch, parent: Checkpoint | None) -> dict[str, int]:
    """Return the total of rows of sources that were set aside, by gates or since they could not be decoded."""
    before = parent.totals.get(ROWS_QUARANTINED, 0) if parent is not None else 0
    rows = before + sum(planned.rows_quarantined for planned in epoch.plan.slices.values())
    return {ROWS_QUARANTINED: rows} if rows else {}


def _positions(context: RunContext, epoch: InFlightEpoch, parent: Checkpoint | None) -> dict[str, Any]:
    """Return the position of each source with the newest event time of its rows, by statistics or else from the acks.

    The newest event time of rows that no stage keeps is unknown if their file has no statistics.
    """
    positions = {}
    for name, position in epoch.source_offsets.offsets.items():
        past = parent.offsets.get(name) if parent else None
        newest, untold = [past.get("newest") if past else None, position.get("newest")], is_untold(past)
        planned = epoch.plan.slices.get(name)
        source = context.readers[name].source if planned is not None else None
        is_told = source is None or source.capabilities.files is None or source.event_time is None
        if not is_told and planned is not None and planned.rows and planned.newest is None:
            readers = [
                (stage, side)
                for stage in context.pipeline.stages
                for side, input in enumerate(stage.inputs)
                if isinstance(input.origin, Source) and input.name == name
            ]
            acks = {stage.uid: epoch.pending.acks_of(stage.uid) for stage, _ in readers}
            kept = [(stage, side) for stage, side in readers if side not in epoch.made_times.get(stage.uid, ())]
            newest += [_newest(ack, side) for stage, side in kept for ack in acks[stage.uid]]
            untold |= not any(_sees_all(epoch, stage, side, acks[stage.uid]) for stage, side in readers)
        positions[name] = told_times(position, newest, untold=untold)
    return positions


def _newest(ack: Ack, side: int) -> int | None:
    """Return the newest event time that a subtask has seen of one of its stage's inputs."""
    return ack.newest[side] if ack.newest else None


def _sees_all(epoch: InFlightEpoch, stage: Stage, side: int, acks: Sequence[Ack]) -> bool:
    """Return whether a stage has seen every row of a source, one of its inputs, as the files have it."""
    if any(input.transform is not None for input in stage.inputs) or not stage.inputs[side].keeps_event_time:
        return False
    return not epoch.dropped.get(stage.uid) and not any(ack.rows_null_key for ack in acks)


def _format(epoch: InFlightEpoch, state: Sequence[StateFile], archives: bool) -> int:
    """Return the oldest format that tells whoever reads the checkpoint all that is to be known of it."""
    if archives:
        return WITH_ARCHIVE
    if any(composite.is_part(file.name) for file in state):
        return WITH_PARTS
    return WITH_WAITING if any(epoch.waiting.values()) else FORMAT_VERSION


def _carried(
    epoch: InFlightEpoch, files: Sequence[StateFile], channels: Mapping[str, StateFile]
) -> tuple[StateFile, ...]:
    """Return the rows that still wait since an earlier checkpoint. Like state, they are only ever named again if a
    confirmed one names them."""
    named = {file.path for file in files if file.kind == CHANNEL}
    waiting = epoch.waiting_paths - named
    for path in sorted(waiting - channels.keys()):
        raise DamageError(
            f"Rows that wait for a stage are neither this epoch's nor in the checkpoint before: {path}.",
            where=f"epoch {epoch.pending.id}",
            next="The epoch was declined. If it happens again, report it: it must not.",
        )
    return tuple(replace(channels[path], new=False) for path in sorted(waiting))


def _archived(context: RunContext, epoch: InFlightEpoch, channels: Mapping[str, StateFile]) -> tuple[StateFile, ...]:
    """Input that is kept: this epoch's, and what somebody may read again from a checkpoint that is retained."""
    id = epoch.pending.id
    now = [
        file
        for name, planned in epoch.plan.slices.items()
        if planned.archived and planned.begin is not None
        for file in archive.named(planned.archived, name, planned.begin, id)
    ]
    retained = context.registry.checkpoints(as_owner=True)
    oldest = min((row.id for row in retained), default=id)
    before = archive.needed(channels.values(), oldest, epoch.source_offsets.offsets)
    again = {file.path for file in now}
    return (*now, *(replace(file, new=False) for file in before if file.path not in again))


def figures_of(context: RunContext, epoch: InFlightEpoch, stage: Stage, before: OperatorStats) -> OperatorStats:
    """Return the figures that the checkpoint records of a stage. `before` has those of its parent."""
    acks = epoch.pending.acks_of(stage.uid)
    state = [file for ack in acks for file in ack.files if file.kind == STATE]
    fixed = epoch.shapes.get(stage.uid)
    new = [file for file in state if file.new]
    phases = sorted({phase for ack in acks for phase in ack.ms})
    entries, timers, cache = _entries(acks), _timers(stage, acks), _cache_figures(stage, epoch.pending.id, acks)
    return OperatorStats(
        parallelism=context.settings.spark.parallelism,
        max_parallelism=context.pipeline.max_parallelism,
        schema=fixed.state.to_json() if fixed and stage.has_state else None,
        schemas=evolution.recorded(fixed.state) if fixed and stage.has_state else [],
        keys=stored_keys(fixed),
        backend=context.settings.state.backend,
        collections=stored_collections(fixed),
        sketched=dict(fixed.sketched) if fixed else {},
        swept={str(ack.subtask): ack.swept for ack in acks if ack.swept is not None},
        clock=epoch.clocks.get(stage.uid),
        due={str(ack.subtask): ack.due for ack in acks if ack.due is not None},
        window=meaning(stage),
        ttl=asdict(stage.lifetime) if stage.lifetime else None,
        forgotten=asdict(forgotten) if (forgotten := epoch.forgotten.get(stage.uid)) else None,
        **{**changeable(stage), "sql": recorded_sql(stage)},
        files_total=len(state),
        files_new=len(new),
        bytes_total=sum(file.bytes for file in state),
        bytes_new=sum(file.bytes for file in new),
        rows_in=sum(ack.rows_in for ack in acks),
        rows_out=sum(ack.rows_out for ack in acks),
        rows_late=sum(ack.rows_late for ack in acks),
        rows_duplicate=stage.operator.rows_duplicate(acks),
        rows_null_key=sum(ack.rows_null_key for ack in acks),
        rows_dropped=epoch.dropped.get(stage.uid, 0),
        entries=before.entries if entries is None else entries,  # not all of its subtasks had anything to do
        timers=before.timers if timers is None else timers,
        rows_quarantined=_left_out(epoch, stage),
        rows_waiting=sum(in_flight.rows for in_flight in epoch.waiting.get(stage.uid, ())),
        waiting=[in_flight.to_json() for in_flight in epoch.waiting.get(stage.uid, ())],
        ms={phase: max(ack.ms.get(phase, 0.0) for ack in acks) for phase in phases},
        cache=cache,
        cache_totals=_added(before.cache_totals, cache),
        delivery=context.pipeline.delivery,
        sides=epoch.sides[stage.uid].to_json() if stage.uid in epoch.sides else None,
        outputs={name: sum(ack.rows_of(name) for ack in acks) for name, _ in stage.outputs},
        lookup=_looked_up(epoch, stage),
        exchange=next((ack.exchange for ack in acks if ack.exchange is not None), None),
        code=context.code_of(stage),
    )


def _looked_up(epoch: InFlightEpoch, stage: Stage) -> dict[str, Any] | None:
    """Return the version of its table with which a lookup's rows are joined."""
    planned, joined = epoch.plan.lookups.get(stage.uid), epoch.joined.get(stage.uid)
    if planned is None:
        return None
    is_other = joined is not None and joined.same != planned.same
    return {**planned.to_json(), **({"joined": joined.to_json()} if joined is not None and is_other else {})}


def _added(before: Mapping[str, int] | None, now: Mapping[str, int] | None) -> dict[str, int] | None:
    """Return the counts of all epochs so far, or None if there never was anything to count."""
    if before is None or now is None:
        counts = before if now is None else now
        return dict(counts) if counts is not None else None
    return {name: before.get(name, 0) + count for name, count in now.items()}


def _entries(acks: Sequence[Ack]) -> int | None:
    entries = [ack.entries for ack in acks]
    return None if None in entries else sum(number for number in entries if number is not None)


def _timers(stage: Stage, acks: Sequence[Ack]) -> bool | None:
    """Return whether timers are set in a stage's state, or None if that is not known."""
    if stage.on_timer is None:
        return False
    if any(ack.timers for ack in acks):
        return True
    return None if any(ack.timers is None for ack in acks) else False


def _left_out(epoch: InFlightEpoch, stage: Stage) -> int:
    """Return the rows of its sources that the stage has not got: bad ones, and those that some stage's gate has set
    aside."""
    sources = {input.name for input in stage.inputs if isinstance(input.origin, Source)}
    return sum(planned.rows_quarantined for name, planned in epoch.plan.slices.items() if name in sources)


def _cache_figures(stage: Stage, checkpoint: int, acks: Sequence[Ack]) -> dict[str, int] | None:
    """Return the sum over the subtasks, logged; None for a stage without a cache."""
    counted = [CacheFigures(**ack.cache) for ack in acks if ack.cache is not None]
    if not counted:
        return None
    figures = sum(counted, CacheFigures())
    figures.log(stage.uid, checkpoint)
    return asdict(figures)
