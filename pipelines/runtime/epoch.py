"""The life of one epoch. Read this first.

    slice -> stages, each one Spark job that yields acks -> gate -> commit -> publish -> prune

Everything up to the commit can be thrown away: it lies under prefixes that only this attempt knows. The commit is one
row in the registry. Everything after the commit can be done again by whoever comes next.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from deltalake.exceptions import DeltaError

from pipelines.runtime import gates
from pipelines.runtime.commit import commit, delete_staged, discard, prune, publish_missing, raise_if_fenced, remove
from pipelines.runtime.definition import Stage
from pipelines.runtime.operators import duplicates
from pipelines.runtime.sinks import delta
from pipelines.runtime.stage_job import check_deadline, is_rows, meaning, run_stage, stored_collections, tables_of
from pipelines.runtime.workshop import Cut, EpochReport, Working, Workshop, lap
from state_ops import errors, evolution
from state_ops.cache import CacheFigures
from state_ops.checkpoint import OUTPUT, STATE, Ack, Checkpoint, StateFile, spans_with
from state_ops.coordinator import Coordinator
from state_ops.errors import (
    GateError,
    RunEndedError,
    TransientError,
    WeirError,
)
from state_ops.frames import schema_to_json
from state_ops.pending import FailureReason, PendingCheckpoint
from state_ops.value_types import type_name

_TOTALS = ("epochs", "rows_read", "bytes_new", "files_new")


def complete(shop: Workshop, coordinator: Coordinator, pending: PendingCheckpoint, cut: Cut) -> EpochReport:
    """Run one epoch, which the coordinator has just triggered, up to its commit.

    Raises the WeirError that declined it, after everything that it staged was discarded; FencedError discards nothing.
    """
    started, triggered_at = time.perf_counter(), datetime.now(UTC)
    id, parent = pending.id, pending.base
    now = max(triggered_at, parent.epoch_now) if parent else triggered_at
    deadline = time.monotonic() + coordinator.policy.timeout
    work = Working(coordinator, pending, cut, now, deadline)
    try:
        for stage in shop.pipeline.stages:
            run_stage(shop, work, stage)
            _gate(shop, work, stage)
        for name, planned in cut.slices.items():
            shop.readers[name].verify(planned)
        check_deadline(shop, work)
        checkpoint, files = _completed(shop, work, triggered_at)
    except errors.FencedError:
        raise
    except BaseException as error:
        raise_if_fenced(shop, error)
        reason = FailureReason.GATE if isinstance(error, GateError) else FailureReason.JOB
        coordinator.abort(time.monotonic(), id, reason)
        discard(shop, id)
        if (typed := _typed(error, f"pipeline {shop.pipeline.name}, epoch {id}")) is not None:
            raise typed from error
        raise
    try:
        committing = coordinator.begin_commit()
        assert committing is pending, "its stages have seen every ack, and it is the only one"
        checkpoint = commit(shop, work, checkpoint, files, started)
    except (errors.FencedError, RunEndedError):
        raise
    except WeirError:
        coordinator.abort(time.monotonic(), id, FailureReason.COMMIT)
        raise
    coordinator.completed(time.monotonic(), checkpoint)
    remove(shop, work.losers)
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
    clock = lap(ms, "publish", clock)
    pruned = prune(shop)
    for name in shop.discarded:  # once more: tasks of a cancelled job may have gone on writing for a moment
        delete_staged(shop, name)
    shop.discarded.clear()
    lap(ms, "prune", clock)
    return replace(report, publications=tuple(publications), pruned=pruned, ms=ms)


def _gate(shop: Workshop, work: Working, stage: Stage) -> None:
    started = time.perf_counter()
    staged = [file for ack in work.pending.acks_of(stage.uid) for file in ack.files if is_rows(file)]
    work.verdicts += gates.check(shop.storage, stage, staged)
    if stage.gates:
        lap(work.ms, f"gate:{stage.uid}", started)


def _completed(shop: Workshop, work: Working, triggered_at: datetime) -> tuple[Checkpoint, tuple[StateFile, ...]]:
    """The pending checkpoint as the row and the listing that will make it exist."""
    pending, parent = work.pending, work.parent
    files = pending.files()
    schemas = {(uid, name): schema for uid, fixed in shop.shapes.items() for name, schema in fixed.outputs.items()}
    delta.check(shop.storage, [file for file in files if file.kind == OUTPUT], schemas)
    for stage in shop.pipeline.stages:
        if stage.uid in shop.shapes:
            for table, schema in tables_of(stage, shop.shapes[stage.uid]):
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
            lineage=spans_with(parent, shop.generation, pending.id),
        ),
        files,
    )


def _figures(shop: Workshop, work: Working, stage: Stage) -> dict[str, Any]:
    acks = work.pending.acks_of(stage.uid)
    state = [file for ack in acks for file in ack.files if file.kind == STATE]
    fixed = shop.shapes.get(stage.uid)
    new = [file for file in state if file.new]
    phases = sorted({phase for ack in acks for phase in ack.ms})
    return {
        "parallelism": shop.settings.spark.parallelism,
        "max_parallelism": shop.pipeline.max_parallelism,
        "schema": fixed.state.to_json() if fixed else None,
        "schemas": evolution.recorded(fixed.state) if fixed else [],
        "keys": [[key.name, type_name(key.type)] for key in fixed.keys] if fixed else [],
        "backend": shop.settings.state.backend,
        "collections": stored_collections(fixed),
        "swept": {str(ack.subtask): ack.swept for ack in acks if ack.swept is not None},
        "window": meaning(stage),
        "files_total": len(state),
        "files_new": len(new),
        "bytes_total": sum(file.bytes for file in state),
        "bytes_new": sum(file.bytes for file in new),
        "rows_in": sum(ack.rows_in for ack in acks),
        "rows_out": sum(ack.rows_out for ack in acks),
        "rows_late": sum(ack.rows_late for ack in acks),
        "rows_duplicate": duplicates(acks) if stage.deduplication else 0,
        "rows_null_key": sum(ack.rows_null_key for ack in acks),
        "rows_dropped": work.dropped.get(stage.uid, 0),
        "ms": {phase: max(ack.ms.get(phase, 0.0) for ack in acks) for phase in phases},
        "cache": _cache_figures(stage, work.pending.id, acks),
    }


def _cache_figures(stage: Stage, checkpoint: int, acks: Sequence[Ack]) -> dict[str, int] | None:
    """The sum over the subtasks, logged; None for a stage without a cache."""
    found = [CacheFigures(**ack.cache) for ack in acks if ack.cache is not None]
    if not found:
        return None
    figures = sum(found, CacheFigures())
    figures.log(stage.uid, checkpoint)
    return asdict(figures)
