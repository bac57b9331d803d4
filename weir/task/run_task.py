"""The keyed task: one subtask of one stage in one epoch. It runs inside a Spark task and knows nothing of Spark.

    fork the base snapshot -> run the operator over the batches -> barrier -> flush and snapshot (sync phase)
    -> one ack, which hands new SSTs and staged rows over to whoever uploads them

A stage without a key has no state: its operator runs over the batches, and its ack hands over staged rows alone.

Rows never travel back through the JVM: what a stage hands out is staged as Parquet by the task itself.
"""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event

import pyarrow as pa
import pyarrow.compute as pc
from polars.exceptions import PanicException

from state_ops import logs
from state_ops.arrow import frames
from state_ops.arrow.unfit_values import unfit
from state_ops.backends import composite
from state_ops.backends.base import Backend, BackendOptions
from state_ops.backends.loader import DEFAULT, named
from state_ops.coordination.restore_progress import BEAT_SECONDS, RestoreProgress, Restoring
from state_ops.counts import agrees, counted
from state_ops.errors import (
    InputError,
    LocalBaseError,
    PipelineError,
    RefusedError,
    StageError,
    TransientError,
    WeirError,
    to_report,
)
from state_ops.ids import AttemptId, CheckpointId, Generation, new_attempt_id
from state_ops.keyed.keyed_state import GROUP
from state_ops.keyed.per_key.state_cache import CacheSizes
from state_ops.keyed.timers import are_set
from state_ops.keyed.ttl import Forgotten
from state_ops.moments import from_micros
from state_ops.outputs import MAIN, REST
from state_ops.records.acks import Ack, PendingUpload
from state_ops.records.snapshot_files import LocalSnapshot, Snapshot, StagedFile
from state_ops.rows.resident_table import Residence
from state_ops.schema.key_groups import group_range
from state_ops.snapshots import rescale, snapshot, stage_upload
from state_ops.snapshots.attempt import Attempt
from state_ops.snapshots.object_cache import ObjectCache
from state_ops.snapshots.sweep import sweep
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together
from weir.definition import POSITIONS, Epoch, Operator, Progress, Shapes, Stage, Subtask
from weir.definition.column_lineage import before
from weir.operators import sides
from weir.operators.base import event_time_of
from weir.operators.compatibility import timers_left
from weir.task.async_snapshot import AsyncSnapshot
from weir.task.attempt_cache import Caching
from weir.task.refusals import OutputTarget
from weir.task.staged_output import StagedOutput
from weir.timings import record_ms

_DISCARD_SECONDS = 10.0


@dataclass(frozen=True)
class KeyedTask:
    """All that the subtasks of one stage need for one epoch; shipped to the executors by value.

    Attributes:
        bases: By subtask, the snapshot to build on.
        tables: By output name, the sink that gets it.
        channels: The outputs that other stages, or gates, read. One that is neither here nor in `tables` is dropped.
        resident_mb: MiB of rows that a subtask keeps as a resident table.
        warm_mb: MiB that entries of state caches may take in a worker process between epochs.
        full: The snapshot is to depend on no other.
        stages: Uids of all stages of the pipeline, the only ones whose local files are kept; none: nothing is known of
            others.
        seconds: What the epoch has left when its task begins; transfers stop then.
        swept: By subtask, where the sweep of expired state goes on.
        forgotten: What a TTL has let expire before this epoch.
        untold_timers: The stage has no on_timer, and what it builds on does not say whether timers are set.
        origin: The epoch whose rows these are, and whose time and progress the others say, if not this one.
        patience: Seconds after which the subtask stops between two batches, and leaves the rest; None: it applies all
            rows.
        unfinished: The origin has further rows.
        reread: Rows for the next stages may be read again after this epoch.
        asynchronous: A snapshot may be written after the barrier, where the coordinator shares the disk.
        objects: Those that this host keeps.
        keep: Attempts whose local directories are still needed, besides the bases'.
        here: A file of the coordinator's: a subtask that sees it shares its disk, and leaves the uploads to it; None:
            each subtask uploads by itself.
    """

    stage: Stage
    shapes: Shapes
    epoch: CheckpointId
    generation: Generation
    now: datetime
    progress: Progress
    parallelism: int
    max_parallelism: int
    storage: Storage
    work_dir: Path
    bases: Mapping[int, Snapshot | LocalSnapshot]
    tables: Mapping[str, OutputTarget]
    channels: frozenset[str]
    backend: str = DEFAULT
    options: BackendOptions = field(default_factory=BackendOptions)
    cache: CacheSizes | None = None
    resident_mb: int = 64
    warm_mb: int = 256
    full: bool = False
    stages: tuple[str, ...] = ()
    seconds: float | None = None
    swept: Mapping[int, str] = field(default_factory=dict)
    forgotten: Forgotten | None = None
    keep: frozenset[AttemptId] = frozenset()
    here: Path | None = None
    origin: CheckpointId | None = None
    patience: float | None = None
    unfinished: bool = False
    reread: bool = False
    asynchronous: bool = False
    objects: ObjectCache | None = None
    untold_timers: bool = False


@dataclass
class _Counters:
    rows_in: int = 0
    rows_null_key: int = 0
    newest: list[int | None] = field(default_factory=list)
    entries: int | None = None
    ms: dict[str, float] = field(default_factory=dict)


def run(task: KeyedTask, subtask: int, batches: Iterator[pa.RecordBatch]) -> Ack:
    """Run one subtask to its ack. A failure is an ack too, a decline with the typed error in it; nothing is raised."""
    logs.adopt()
    attempt = Attempt(
        task.stage.uid,
        subtask,
        task.generation,
        task.epoch,
        new_attempt_id(),
        task.work_dir / task.stage.uid / str(subtask),
    )
    counters = _Counters()
    where = _where(task, subtask)
    declined: WeirError
    try:
        return (_run if task.stage.key else _run_stateless)(task, attempt, batches, counters)
    except WeirError as error:
        declined = error
    except OSError as error:
        declined = TransientError(
            f"{type(error).__name__}: {error}",
            where=where,
            next="The epoch was declined and will be replayed. Look at disk space and at the storage.",
        )
    except (Exception, PanicException) as error:
        # Not foreseen: say all there is to say, and do not let Spark try it four times. A panic of Polars' is no
        # Exception.
        declined = StageError(
            f"The stage {task.stage.uid} failed: {type(error).__name__}: {error}",
            where=where,
            next="The epoch was declined; state, offsets and tables are as they were. The trace above says where.",
            traceback=traceback.format_exc(),
        )
    shutil.rmtree(attempt.directory, ignore_errors=True)
    return Ack(task.stage.uid, subtask, attempt.id, task.epoch, task.generation, error=to_report(declined))


def _run_stateless(task: KeyedTask, attempt: Attempt, batches: Iterator[pa.RecordBatch], counters: _Counters) -> Ack:
    """Run one attempt of a stage without a key: apply the rows, hand over what it staged."""
    deadline = None if task.seconds is None else time.monotonic() + task.seconds
    sweep(attempt, task.keep, task.stages, task.parallelism)
    clock = time.perf_counter()
    attempt.directory.mkdir(parents=True, exist_ok=True)
    stage, shapes = task.stage, task.shapes.handed_out
    operator = stage.operator.build(Subtask(stage, shapes, _epoch(task, attempt), task.progress))
    staged = StagedOutput(attempt, task.tables, task.channels, task.shapes.tracked)
    with _closed(staged):
        _apply(task, operator, batches, staged, counters)
    record_ms(counters.ms, "process", clock)
    counters.entries = 0
    pending_upload = PendingUpload(None, None, staged.files(), str(attempt.directory))
    ack = _ack(task, attempt, pending_upload, operator, counters, staged.handed_out)
    shared = task.here is not None and task.here.exists()
    return ack if shared else _uploaded(task, attempt, None, ack, deadline)


def _run(task: KeyedTask, attempt: Attempt, batches: Iterator[pa.RecordBatch], counters: _Counters) -> Ack:
    """Run one attempt from its base snapshot to its ack: open the state, apply the rows, take a snapshot, hand over."""
    deadline = None if task.seconds is None else time.monotonic() + task.seconds
    base = task.bases.get(attempt.subtask)
    keep = task.keep.union(*(_local_owners(other) for other in task.bases.values()))
    sweep(attempt, keep, task.stages, task.parallelism)
    clock = time.perf_counter()
    kind = named(task.backend)
    is_immutable = composite.is_immutable(kind)
    shared = task.here is not None and task.here.exists()
    writer = AsyncSnapshot(
        task.asynchronous and shared, task.backend, task.stage.uid, attempt.subtask, task.warm_mb << 20
    )
    unwritten = writer.claim(base)
    progress = _progress(task, attempt)
    copy = snapshot.working_copy(
        task.storage, attempt, base, deadline, is_immutable, task.objects, read=unwritten is None, progress=progress
    )
    if progress.fetched and task.seconds is not None:  # which has taken nothing of the epoch's time
        deadline = time.monotonic() + task.seconds
    with snapshot.healing(copy):
        key = task.storage.full(attempt.reference)
        options = replace(task.options, where=_where(task, attempt.subtask), key=key)
        backend = unwritten.reopen(options) if unwritten is not None else composite.opened(kind, copy.db, options)
        clock = record_ms(counters.ms, "open", clock)
        staged = StagedOutput(attempt, task.tables, task.channels, task.shapes.tracked)
        with _closed(backend, staged):
            moved = isinstance(base, Snapshot) and base.rescaled
            if isinstance(base, Snapshot) and moved:
                rescale.settle(backend, base, _groups(task, attempt))
                clock = record_ms(counters.ms, "rescale", clock)
            caching = Caching(task.cache, task.stage.uid, attempt.subtask, base, task.warm_mb << 20)
            operator = _operator(task, attempt, backend, caching, copy.source)
            _apply(task, operator, batches, staged, counters)
            clock = record_ms(counters.ms, "process", clock)
            caching.barrier()
            changed = backend.written or moved or (task.full and base is not None)
            counters.entries = backend.approximate_entries()
            frozen = writer.freeze(backend)
            taken = snapshot.take(attempt, backend) if changed and frozen is None else []
            record_ms(counters.ms, "sync", clock)
    prepared: LocalSnapshot | None = None
    if changed and frozen is not None:
        prepared = snapshot.begin(attempt, copy, frozen, is_immutable)
    elif changed:
        prepared = snapshot.prepare(attempt, copy, taken, is_immutable)
    else:
        shutil.rmtree(copy.db, ignore_errors=True)
    pending_upload = PendingUpload(base.attempt if base else None, prepared, staged.files(), str(attempt.directory))
    ack = replace(_ack(task, attempt, pending_upload, operator, counters, staged.handed_out), cache=caching.figures)
    if not shared:
        ack = _uploaded(task, attempt, base, ack, deadline)
    for kept in (caching, writer):
        kept.keep(attempt.id if changed else base.attempt if base else None)
    return ack


def _operator(task: KeyedTask, attempt: Attempt, backend: Backend, caching: Caching, source: Path | None) -> Operator:
    """Return the stage's operator on the subtask's state. source: of the working copy."""
    groups, base = _groups(task, attempt), task.bases.get(attempt.subtask)
    if task.untold_timers and are_set(backend, groups):
        left = timers_left(task.stage.uid)
        where = _where(task, attempt.subtask)
        raise PipelineError(f"{left.what.capitalize()}.", where=where, next=left.next)
    return task.stage.operator.build(
        Subtask(
            task.stage,
            task.shapes.handed_out,
            _epoch(task, attempt),
            task.progress,
            groups,
            task.max_parallelism,
            backend,
            task.swept.get(attempt.subtask),
            caching.open,
            Residence(source, attempt.directory, task.resident_mb << 20, groups, fresh=base is None),
            task.epoch,
            task.forgotten,
        )
    )


def _epoch(task: KeyedTask, attempt: Attempt) -> Epoch:
    """Return what the stage's function may know."""
    watermark = None if task.progress.before is None else from_micros(task.progress.before)
    return Epoch(task.origin or task.epoch, task.now, watermark, attempt.subtask, task.parallelism)


def _apply(
    task: KeyedTask, operator: Operator, batches: Iterator[pa.RecordBatch], staged: StagedOutput, counters: _Counters
) -> None:
    """Apply batches until there are no more or patience ends; stage what comes out, and what is left."""
    arriving = _Patient(batches, task.patience)
    for rows in _data(task, arriving, counters):
        for output, table in operator.process(rows):
            staged.write(output, table)
        if counters.rows_in > operator.rows_deferred:
            arriving.applied()
    stopped = staged.leave(_as_seen(batch) for batch in arriving.rest())
    for output, table in operator.pause() if stopped or task.unfinished else operator.barrier():
        if output == REST:
            staged.leave([table.drop_columns([GROUP])])
            counters.rows_in -= table.num_rows
        else:
            staged.write(output, table)
    staged.check()


def _groups(task: KeyedTask, attempt: Attempt) -> range:
    return group_range(attempt.subtask, task.parallelism, task.max_parallelism)


def _where(task: KeyedTask, subtask: int) -> str:
    return f"stage {task.stage.uid}, epoch {task.epoch}, subtask {subtask}"


def _progress(task: KeyedTask, attempt: Attempt) -> RestoreProgress:
    """Tells the coordinator that the subtask's state is being fetched, often enough for the epoch's time."""
    about = Restoring("epoch", task.stage.uid, attempt.subtask, task.generation, task.epoch)
    seconds = BEAT_SECONDS if task.seconds is None else min(BEAT_SECONDS, max(0.0, task.seconds) / 5 + 0.05)
    return RestoreProgress(task.storage, about, seconds)


def _local_owners(base: Snapshot | LocalSnapshot) -> set[AttemptId]:
    """Return the attempts in whose local directories a base's files may lie."""
    if isinstance(base, Snapshot) and base.rescaled:
        return {base.attempt, *(file.snapshot or file.attempt for file in base.files)}
    return {base.attempt}


def _uploaded(
    task: KeyedTask, attempt: Attempt, base: Snapshot | LocalSnapshot | None, ack: Ack, deadline: float | None
) -> Ack:
    """Return the ack of a subtask that uploads by itself: nobody else sees this disk."""
    if isinstance(base, LocalSnapshot):
        raise LocalBaseError(
            "The epoch before is still being uploaded by a coordinator that does not see this disk.",
            where=str(attempt.directory),
            next="The stage runs again as soon as it is in storage.",
        )
    bases = {} if base is None else {attempt.subtask: base}
    with _discarded_on_failure(task, attempt, ack):
        (durable,) = stage_upload.upload(
            task.storage, [ack], bases, full=task.full, channels=partial(_for_stages, task), deadline=deadline
        )
    stage_upload.clear([ack])
    return durable


def _for_stages(task: KeyedTask, file: StagedFile) -> bool:
    """Return whether a stage, or the coordinator, may read these rows from storage. What goes to a table can be read
    there, in this epoch."""
    target = task.tables.get(file.name)
    in_table = target is not None and not target.partition_by
    return file.name in (REST, POSITIONS) or (file.name in task.channels and (task.reread or not in_table))


@contextmanager
def _closed(*resources: Backend | StagedOutput) -> Iterator[None]:
    """Close all at the end. On a full disk closing fails as well: that must not replace the error that says so."""
    try:
        yield
    except BaseException:
        for resource in resources:
            with suppress(Exception):
                resource.close()
        raise
    for resource in resources:
        resource.close()


@contextmanager
def _discarded_on_failure(task: KeyedTask, attempt: Attempt, ack: Ack) -> Iterator[None]:
    """Leave no object of an attempt that will not ack, as far as storage still answers; the coordinator does the
    rest."""
    try:
        yield
    except BaseException:
        with suppress(OSError, WeirError):
            together(
                _discard,
                [(task.storage, attempt, [file.path for file in _staged_of(ack)])],
                at_once=1,
                deadline=time.monotonic() + _DISCARD_SECONDS,
                grace=0,
            )
        raise


def _staged_of(ack: Ack) -> list[StagedFile]:
    """Everything that an attempt may have uploaded beside its snapshot."""
    channels = [file for file in stage_upload.for_stages(ack) if isinstance(file, StagedFile)]
    return [*(ack.pending_upload.staged if ack.pending_upload else ()), *channels]


def _discard(uploaded: tuple[Storage, Attempt, list[str]], cancelled: Event) -> None:
    storage, attempt, staged = uploaded
    snapshot.discard(storage, attempt)
    for path in staged:
        if not cancelled.is_set():
            storage.delete(path)


def _ack(
    task: KeyedTask,
    attempt: Attempt,
    handed: PendingUpload,
    operator: Operator,
    counters: _Counters,
    handed_out: Mapping[str, int],
) -> Ack:
    return Ack(
        task.stage.uid,
        attempt.subtask,
        attempt.id,
        task.epoch,
        task.generation,
        rows_in=counters.rows_in,
        rows_out=handed_out.get(MAIN, 0),
        rows_late=operator.rows_late,
        rows_null_key=counters.rows_null_key,
        newest=tuple(counters.newest),
        rows_beside={output: rows for output, rows in handed_out.items() if output != MAIN},
        closed_upto=operator.closed_upto,
        swept=operator.swept,
        due=operator.due,
        ms=counters.ms,
        entries=counters.entries,
        timers=operator.has_timers,
        pending_upload=handed,
    )


class _Patient:
    """The batches until the time is up, counted from the first one, but not before something has been applied; then the
    rest."""

    def __init__(self, batches: Iterator[pa.RecordBatch], seconds: float | None) -> None:
        self._batches, self._seconds = batches, seconds
        self._applied = False

    def applied(self) -> None:
        self._applied = True

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        began: float | None = None
        for batch in self._batches:
            began = time.monotonic() if began is None and batch.num_rows else began
            yield batch  # whoever takes the next one is done with this
            if self._seconds is None or began is None or not self._applied:
                continue
            if time.monotonic() >= began + self._seconds:
                return

    def rest(self) -> Iterator[pa.RecordBatch]:
        return (batch for batch in self._batches if batch.num_rows)


def _as_seen(batch: pa.RecordBatch) -> pa.Table:
    """Return rows as the stage's function would see them.

    Rows with null keys are treated when they are applied.
    """
    rows = frames.canonical(pa.Table.from_batches([batch]))
    return rows.drop_columns([GROUP]) if GROUP in rows.column_names else rows


def _data(task: KeyedTask, batches: Iterable[pa.RecordBatch], counters: _Counters) -> Iterator[pa.Table]:
    """Yield the batches in canonical types, null keys treated by policy."""
    for batch in batches:
        rows = frames.canonical(pa.Table.from_batches([batch]))
        _check_fit(task, rows)
        rows = _without_null_keys(task, rows, counters)
        if not rows.num_rows:
            continue
        counters.rows_in += rows.num_rows
        _note_newest(task.stage, rows, counters)
        yield rows


def _check_fit(task: KeyedTask, rows: pa.Table) -> None:
    """Refuse values that no stage can be given: Python has no such date, and a text that is not UTF-8 may end the
    process that looks at it. Raises RefusedError."""
    for value in unfit(rows):
        raise RefusedError(
            f"A row for the stage {task.stage.uid} cannot be read: its column {value.column!r} {value.problem}.",
            where=f"stage {task.stage.uid}, epoch {task.epoch}",
            next='Correct it where it is written, or set such rows aside with on_bad="quarantine" on the source.',
        )


def _note_newest(stage: Stage, rows: pa.Table, counters: _Counters) -> None:
    """Note the newest event time of each input, as far as the rows have the column of its source."""
    counters.newest = counters.newest or [None] * len(stage.inputs)
    for side, input in enumerate(stage.inputs):
        column = None if input.event_time is None else sides.names_in_table(stage, side)(input.event_time)
        if column is not None and column in rows.column_names:
            times = (event_time_of(sides.narrowed(stage, side, rows), column), counters.newest[side])
            counters.newest[side] = max((time for time in times if time is not None), default=None)


def _without_null_keys(task: KeyedTask, rows: pa.Table, counters: _Counters) -> pa.Table:
    for name in () if task.stage.operator.keeps_null_keys else task.stage.key:
        missing = rows.column(name).null_count
        if not missing:
            continue
        if task.stage.null_keys == "fail":
            raise _without_key(task, rows.filter(pc.is_null(rows.column(name))), name)
        counters.rows_null_key += missing
        rows = rows.filter(pc.is_valid(rows.column(name)))
    return rows


def _without_key(task: KeyedTask, rows: pa.Table, key: str) -> InputError:
    """Return the error of rows that lack a column of the key, in the words of the first input of which there are
    any."""
    stage, of_input = task.stage, ""
    input, column, missing = stage.inputs[0], key, rows.num_rows
    if stage.is_of_several:
        side = pc.min(rows.column(sides.SIDE)).as_py()
        input, of_input = stage.inputs[side], f" in {sides.name_of(stage, side)}"
        column, missing = input.key[stage.key.index(key)], sides.narrowed(stage, side, rows).num_rows
    given = before(input.columns, column)  # a where is about the columns before
    condition = "" if given is None else f'where="{given} IS NOT NULL", or '
    return InputError(
        f"{counted(missing, 'row')} of a batch {agrees(missing, 'has', 'have')} no {column!r}, "
        f"which is a key of {stage.uid}{of_input}.",
        where=f"stage {stage.uid}, epoch {task.epoch}",
        next=f'Leave them out and count them: {condition}null_keys="drop" on the stage.',
    )
