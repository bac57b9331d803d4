"""One stage in one epoch: its input, its one job, its acks, its watermark."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import structlog

from configs.settings import Settings
from pipelines.runtime import watermarks
from pipelines.runtime.definition import FileSource, SessionWindow, Stage, source_of
from pipelines.runtime.executor import Channel, Landed
from pipelines.runtime.keyed_stage import KeyedTask
from pipelines.runtime.operators import LATE, MAIN, Progress, Shapes, shapes
from pipelines.runtime.sinks import delta
from pipelines.runtime.workshop import Working, Workshop, lap
from state_ops import errors, evolution
from state_ops.aggregates import Agg
from state_ops.backends import named as backends
from state_ops.backends.base import BackendOptions
from state_ops.cache import CacheSizes
from state_ops.checkpoint import STATE, Ack, Checkpoint, StateFile, snapshots_of
from state_ops.errors import (
    ConfigurationError,
    DamageError,
    PipelineError,
    StageError,
    TransientError,
    WeirError,
)
from state_ops.kinds import Collection
from state_ops.pending import FailureReason
from state_ops.value_types import type_name

log = structlog.get_logger("weir.epoch")


def run_stage(shop: Workshop, work: Working, stage: Stage) -> None:
    started = time.perf_counter()
    rows = _input(shop, work, stage)
    fixed = _shapes(shop, stage, rows)
    if fixed is None:  # nothing has ever arrived: there is no schema yet, hence no state and no rows
        _ack_nothing(work, stage)
        return
    task = _task(shop, work, stage, fixed)
    try:
        acks = shop.executor.run(task, rows, shop.inputs[stage.uid], work.deadline)
    except WeirError as error:
        check_deadline(shop, work, error)
        raise
    for ack in acks:
        received = work.coordinator.receive(ack)
        work.losers += received.discard
        if received.error is not None:
            work.coordinator.abort(time.monotonic(), work.pending.id, FailureReason.DECLINED)
            raise declined(received.error)
    missing = work.pending.missing(stage.uid)
    if missing:
        work.coordinator.abort(time.monotonic(), work.pending.id, FailureReason.MISSING_ACKS)
        raise TransientError(
            f"The subtasks {missing} of {stage.uid} did not ack.",
            where=f"epoch {work.pending.id}",
            next="The epoch was declined and will be replayed. Look at the executors' logs.",
        )
    _note_progress(work, stage, rows is not None)
    lap(work.ms, f"stage:{stage.uid}", started)


def check_deadline(shop: Workshop, work: Working, cause: Exception | None = None) -> None:
    if work.coordinator.expire(time.monotonic()):
        raise TransientError(
            f"Epoch {work.pending.id} was aborted: it took longer than {shop.settings.checkpoints.timeout_seconds:g} s.",
            where=f"pipeline {shop.pipeline.name}",
            next="Raise checkpoints.timeout_seconds, or cut smaller slices (epoch.max_files, max_rows, max_bytes).",
        ) from cause


def declined(report: dict[str, Any]) -> WeirError:
    """The typed error in a decline, which reports it as `Ack.error`."""
    kind = getattr(errors, report["kind"], WeirError)
    if kind is StageError:
        return StageError(report["what"], where=report["where"], next=report["next"], traceback=report["traceback"])
    return kind(report["what"], where=report["where"], next=report["next"])


def _input(shop: Workshop, work: Working, stage: Stage) -> Landed | Channel | None:
    """What the stage reads in this epoch; None if that is nothing."""
    if isinstance(stage.input, FileSource):
        planned = work.cut.slices.get(stage.input.name)
        if planned is None or not planned.files:
            return None
        assert planned.schema is not None
        return Landed(planned.schema, shop.readers[stage.input.name], planned.files)
    upstream = stage.input.uid
    staged = tuple(file for ack in work.pending.acks_of(upstream) for file in ack.files if is_rows(file))
    return Channel(shop.shapes[upstream].outputs[MAIN], shop.storage, staged) if staged else None


def is_rows(file: StateFile) -> bool:
    return file.kind != STATE and file.name == MAIN


def _shapes(shop: Workshop, stage: Stage, rows: Landed | Channel | None) -> Shapes | None:
    if stage.uid in shop.shapes:
        return shop.shapes[stage.uid]
    if rows is not None:
        raw: pa.Schema | None = rows.schema
    elif isinstance(stage.input, FileSource):  # no rows, but the schema may be known: from the files read before,
        raw = shop.expected.get(stage.input.name)
    else:  # or from the stage before
        known = shop.shapes.get(stage.input.uid)
        raw = known.outputs[MAIN] if known else None
    if raw is None:
        return None
    schema = shop.executor.columns(stage, raw, "what was read before" if rows is None else rows.where)
    fixed = shapes(stage, schema)
    _check_backend(shop, stage)
    fixed = _fitted_to_head(shop, stage, fixed)
    for table, output in tables_of(stage, fixed):
        delta.check_table(shop.storage, table, output)
    shop.inputs[stage.uid], shop.shapes[stage.uid] = schema, fixed
    return fixed


def tables_of(stage: Stage, fixed: Shapes) -> list[tuple[str, pa.Schema]]:
    """The tables that a stage writes, with their schemas."""
    named = [(stage.sink, MAIN), (stage.late, LATE)]
    return [(sink.table, fixed.outputs[output]) for sink, output in named if sink is not None]


def _check_backend(shop: Workshop, stage: Stage) -> None:
    """Refuse, before the first row, a backend that is not there or cannot read the state in the newest checkpoint."""
    configured = shop.settings.state.backend
    backends.named(configured)
    head = shop.registry.head()
    recorded = head.operators.get(stage.uid) if head else None
    if head is None or not recorded or not recorded.get("schema"):
        return
    problem = backends.misfit(recorded.get("backend", backends.DEFAULT), configured)
    if problem is not None:
        raise ConfigurationError(
            f"The state of {stage.uid} cannot be opened: {problem}.",
            where=f"stage {stage.uid}, checkpoint {head.id}",
            next="Set state.backend back, or give the stage a new uid: it then starts with empty state.",
        )


def backend_options(settings: Settings) -> BackendOptions:
    state = settings.state
    return BackendOptions(state.memory_mb, state.max_state_size_mb, dict(state.options))


def _fitted_to_head(shop: Workshop, stage: Stage, fixed: Shapes) -> Shapes:
    """The shapes with a state schema that also reads the rows in the newest checkpoint; refuses, before the first row, code
    that does not fit them."""
    head = shop.registry.head()
    recorded = head.operators.get(stage.uid) if head else None
    if not recorded or not recorded.get("schema"):
        return fixed
    assert head is not None
    where = f"stage {stage.uid}, checkpoint {head.id}"
    stored = evolution.from_record(recorded)
    problems = evolution.obstacles(stored, fixed.state)
    keys = [[field.name, type_name(field.type)] for field in fixed.keys]
    if recorded["keys"] != keys:
        problems.append(f"the key was {recorded['keys']}, is {keys}")
    if (was := recorded.get("window")) != (now := meaning(stage)):
        problems.append(f"its {_kind(stage)} were {was}, are {now}")
    if recorded["parallelism"] != shop.settings.spark.parallelism:
        problems.append(
            f"spark.parallelism was {recorded['parallelism']}, is {shop.settings.spark.parallelism}; state cannot be rescaled yet"
        )
    collections, misfits = _collections_fitted(recorded.get("collections") or {}, fixed)
    problems += misfits
    if recorded["max_parallelism"] != shop.pipeline.max_parallelism:
        problems.append(f"max_parallelism was {recorded['max_parallelism']}, is {shop.pipeline.max_parallelism}")
    if problems:
        raise PipelineError(
            f"The stage {stage.uid} does not fit its stored state: " + "; ".join(problems) + ".",
            where=where,
            next="Put the definition back, or give the stage a new uid: it then starts with empty state.",
        )
    if changes := stored.differences(fixed.state):
        log.info("state_schema_changed", stage=stage.uid, checkpoint=int(head.id), changes=changes)
    return replace(fixed, state=evolution.successor(recorded, fixed.state), collections=collections)


def _collections_fitted(recorded: dict[str, Any], fixed: Shapes) -> tuple[tuple[Collection, ...], list[str]]:
    """The lists and maps with schemas that also read what is stored; and why some cannot."""
    problems, fitted = [], []
    now = stored_collections(fixed)
    for name, was in recorded.items():
        if name not in now:
            problems.append(f"the {was['kind']} {name} is gone, and what it holds would stay behind")
        elif (was["kind"], was["key"]) != (now[name]["kind"], now[name]["key"]):
            problems.append(f"{name} was a {_shape(was)}, is a {_shape(now[name])}")
    for one in fixed.collections:
        if one.name not in recorded:
            fitted.append(one)
            continue
        obstacles = evolution.obstacles(evolution.from_record(recorded[one.name]), one.schema)
        problems += [f"{one.name}: {problem}" for problem in obstacles]
        fitted.append(replace(one, schema=evolution.successor(recorded[one.name], one.schema)))
    return tuple(fitted), problems


def stored_collections(fixed: Shapes | None) -> dict[str, Any]:
    """A stage's lists and maps as its checkpoint records them, by name: kind, a map's key, the schemas of elements."""
    return {
        one.name: {
            "kind": one.kind,
            "key": None if one.key is None else type_name(one.key),
            "schema": one.schema.to_json(),
            "schemas": evolution.recorded(one.schema),
        }
        for one in (fixed.collections if fixed else ())
    }


def _shape(recorded: dict[str, Any]) -> str:
    return f"map by {recorded['key']}" if recorded["key"] else recorded["kind"]


def meaning(stage: Stage) -> dict[str, Any] | None:
    """What an operator's stored state means: another window size or aggregate must not be merged into it."""
    if stage.aggregation is not None:
        return {"aggregates": _listed(stage.aggregation.aggregates)}
    if stage.deduplication is not None:
        return {"on": stage.deduplication.on}  # each key's state says when it ends: another ttl holds for new ones
    if stage.window is None:
        return None
    said = {"on": stage.window.on, "aggregates": _listed(stage.window.aggregates)}
    if isinstance(stage.window, SessionWindow):
        return {**said, "gap": stage.window.gap}
    shape = {"every": stage.window.every, "offset": stage.window.offset}
    usual = {"every": stage.window.size, "offset": 0}
    return {**said, "size": stage.window.size, **(shape if shape != usual else {})}


def _kind(stage: Stage) -> str:
    return "windows" if stage.window else "aggregates" if stage.aggregation else "rules of what is a duplicate"


def _listed(aggregates: Sequence[tuple[str, Agg]]) -> list[list[Any]]:
    return [[name, agg.kind, agg.column, *([list(agg.order_by)] if agg.order_by else [])] for name, agg in aggregates]


def _task(shop: Workshop, work: Working, stage: Stage, fixed: Shapes) -> KeyedTask:
    pipeline, settings, parent = shop.pipeline, shop.settings, work.parent
    listing = shop.registry.files(parent) if parent else ()
    tables = {MAIN: stage.sink.table} if stage.sink else {}
    if stage.late is not None:
        tables[LATE] = stage.late.table
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
        backend=settings.state.backend,
        options=backend_options(settings),
        cache=_cache_sizes(settings, stage),
        resident_mb=settings.state.resident_mb,
        full=settings.checkpoints.mode == "full",
        stages=tuple(known.uid for known in pipeline.stages),
        seconds=work.deadline - time.monotonic(),
        swept=_swept(parent, stage),
    )


def _swept(parent: Checkpoint | None, stage: Stage) -> dict[int, str]:
    """By subtask, where the sweep of expired state goes on."""
    recorded = (parent.operators.get(stage.uid) or {}) if parent else {}
    return {int(subtask): position for subtask, position in (recorded.get("swept") or {}).items()}


def _cache_sizes(settings: Settings, stage: Stage) -> CacheSizes | None:
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


# -- event time


def _watermark(work: Working, stage: Stage, before: int | None) -> int | None:
    """The stage's watermark as far as it is known before its job: from file statistics or from the stage upstream."""
    if isinstance(stage.input, FileSource):
        planned = work.cut.slices.get(stage.input.name)
        return watermarks.before_job(stage, before, planned.newest if planned else None)
    return watermarks.before_job(stage, before, work.handed_on.get(stage.input.uid))


def _note_progress(work: Working, stage: Stage, had_rows: bool) -> None:
    """Record the stage's watermark after its job, and what its where dropped."""
    parent = work.parent
    acks = work.pending.acks_of(stage.uid)
    known = _watermark(work, stage, parent.watermarks.get(stage.uid) if parent else None)
    after = watermarks.after_job(stage, known, acks, work.cut.drain)
    work.handed_on[stage.uid] = watermarks.handed_on(stage, known, after, work.cut.drain)
    if after is not None:
        work.watermarks[stage.uid] = after
    if had_rows and stage.transform is None:
        read = _rows_offered(work, stage)
        taken = sum(ack.rows_in + ack.rows_null_key for ack in acks)
        work.dropped[stage.uid] = read - taken


def _rows_offered(work: Working, stage: Stage) -> int:
    if isinstance(stage.input, FileSource):
        return work.cut.slices[stage.input.name].rows
    return sum(file.rows or 0 for ack in work.pending.acks_of(stage.input.uid) for file in ack.files if is_rows(file))


def _ack_nothing(work: Working, stage: Stage) -> None:
    recorded = work.parent.operators.get(stage.uid) if work.parent else None
    if recorded and recorded["schema"]:
        raise DamageError(
            f"Checkpoint {work.parent.id if work.parent else '?'} has state of {stage.uid}, but not what its input looks like.",
            where=f"stage {stage.uid}",
            next="Nothing was changed. Let a file arrive and run again.",
        )
    for subtask in work.pending.missing(stage.uid):
        work.coordinator.receive(Ack(stage.uid, subtask, "", work.pending.id, work.pending.generation))  # type: ignore[arg-type]
