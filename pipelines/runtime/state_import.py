"""State from rows that somebody brings: bootstrap a stage from history, repair values. The result is a checkpoint of its own.

    1 2 3        3 is the newest
    1 2 3 4      4 = 3 with other rows in one stage: positions, watermarks, tables and all other stages as in 3
    1 2 3 4 5    5 continues 4

Rows are validated first, all of them; then each goes to the subtask that owns its key group, is written by the backend and the codec that a
run uses, and is uploaded under this owner's generation and an id of its own. The commit of the checkpoint's row decides: before it
nothing is changed, and what was uploaded by then the next owner removes.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import structlog

from configs.settings import Settings
from pipelines.runtime import restore, upkeep
from pipelines.runtime.commit import prune
from pipelines.runtime.definition import Pipeline, Stage
from pipelines.runtime.executor import Executor
from pipelines.runtime.recovery import owning
from pipelines.runtime.sources.files import nothing_read
from pipelines.runtime.spark_executor import SparkExecutor
from pipelines.runtime.stage_job import backend_options, local_directory, objects
from pipelines.runtime.start_from import waiting_paths
from pipelines.runtime.state_fit import meaning, stored_collections
from pipelines.runtime.state_plan import today
from pipelines.runtime.tenure import Tenure, open_storage
from state_ops import evolution, frames, snapshot
from state_ops.backends import joined
from state_ops.backends.named import DEFAULT, named
from state_ops.checkpoint import (
    EDIT,
    FORMAT_VERSION,
    STATE,
    Checkpoint,
    Snapshot,
    StateFile,
    snapshots_of,
    spans_with,
    to_micros,
)
from state_ops.edits import fitting
from state_ops.errors import PipelineError, WeirError
from state_ops.frames import schema_to_json
from state_ops.ids import CheckpointId, epoch_dir, new_attempt_id
from state_ops.key_groups import key_groups, subtask_of
from state_ops.kinds import GROUP, VALUE_STATE
from state_ops.registry import Registry
from state_ops.rows import Rows
from state_ops.schema import TOUCHED, StateSchema
from state_ops.snapshot import Attempt
from state_ops.storage import Storage
from state_ops.value_types import type_name, type_named

log = structlog.get_logger("weir.import")

_BATCH_ROWS = 100_000
_IDLE = dict.fromkeys(("rows_in", "rows_out", "rows_late", "rows_duplicate", "rows_null_key", "rows_dropped"), 0)


@dataclass(frozen=True, slots=True)
class Edit:
    """What an import did, or would do. rows: by subtask; before: bytes of the stage's state that it started from.

    head: the newest checkpoint before it; checkpoint: its own; None: it was a dry run.
    """

    stage: str
    replaces: bool
    rows: Mapping[int, int]
    head: CheckpointId | None
    checkpoint: CheckpointId | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "stage": self.stage,
            "mode": "replace" if self.replaces else "merge",
            "rows": sum(self.rows.values()),
            "subtasks": dict(self.rows),
            "before": self.head,
            "checkpoint": self.checkpoint,
        }


@dataclass(frozen=True, slots=True)
class _Target:
    """The stage's state that is edited. figures: what a checkpoint's row says of it; inputs: the sources' columns, of a first one."""

    uid: str
    keys: pa.Schema
    state: StateSchema
    figures: dict[str, Any]
    inputs: dict[str, Any]
    head: Checkpoint | None

    @property
    def is_there(self) -> bool:
        """Whether the newest checkpoint has state of it."""
        return self.head is not None and bool((self.head.operators.get(self.uid) or {}).get("schema"))


@dataclass(frozen=True, slots=True)
class _Routed:
    """Rows with their key groups, and which subtask has which."""

    rows: pa.Table
    groups: np.ndarray
    owners: np.ndarray

    def by_subtask(self) -> dict[int, int]:
        numbers, counts = np.unique(self.owners, return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def import_rows(
    pipeline: Pipeline,
    settings: Settings,
    uid: str,
    rows: pa.Table,
    *,
    replaces: bool = False,
    savepoint: str | None = None,
    dry_run: bool = False,
    reason: str = "",
    executor: Executor | None = None,
) -> Edit:
    """Put rows into a stage's state, as a checkpoint of its own, which the next run continues.

    rows: key columns, then fields, as `state_reader.scan` gives them. replaces: the stage's state is exactly these rows; else their keys are
    put and all others stay. savepoint: name the checkpoint. executor: what tells the columns of a stage with a transform, where the stage has no
    state yet. Raises BusyError when a coordinator is alive, InputError with all that is wrong with the rows, PipelineError for a stage whose
    state cannot be made from rows, DamageError when the newest checkpoint is not whole; nothing is changed then.
    """
    runs = executor or SparkExecutor(settings, app=f"weir state import {pipeline.name}")
    if savepoint is not None:
        upkeep.check_free(pipeline, settings, savepoint)
    if dry_run:
        storage, registry = open_storage(pipeline, settings)
        target = _target(pipeline, settings, storage, registry, registry.head(), runs, uid, replaces)
        routed = _routed(target, rows)
        return Edit(uid, replaces, routed.by_subtask(), target.head.id if target.head else None, None)
    with owning(pipeline, settings, runs, epochs=False) as tenure:
        shop = tenure.shop
        target = _target(pipeline, settings, shop.storage, shop.registry, tenure.head, runs, uid, replaces)
        routed = _routed(target, rows)
        if target.head is not None:
            restore.verify(shop, target.head, purpose="edit")
        done = _carry_out(tenure, target, routed, replaces, reason)
        if savepoint is not None:
            upkeep.save(shop, done, savepoint, reason or "weir state import")
        prune(shop)
        return Edit(uid, replaces, routed.by_subtask(), target.head.id if target.head else None, done.id)


# -- what is edited


def _target(
    pipeline: Pipeline,
    settings: Settings,
    storage: Storage,
    registry: Registry,
    head: Checkpoint | None,
    executor: Executor,
    uid: str,
    replaces: bool,
) -> _Target:
    stage = pipeline.stage(uid)
    figures = (head.operators.get(uid) if head else None) or {}
    if not figures.get("schema"):
        fixed, inputs = today(pipeline, settings, storage, registry, head, executor, uid)
        recorded = {name: schema_to_json(schema) for name, schema in inputs.items()}
        keys = [[key.name, type_name(key.type)] for key in fixed.keys]
        figures = {
            **figures,
            **_IDLE,
            "parallelism": settings.spark.parallelism,
            "max_parallelism": pipeline.max_parallelism,
            "schema": fixed.state.to_json(),
            "schemas": evolution.recorded(fixed.state),
            "keys": keys,
            "backend": settings.state.backend,
            "collections": stored_collections(fixed),
            "swept": {},
            "window": meaning(stage),
            "ttl": asdict(stage.ttl) if stage.ttl else None,
            "rows_waiting": figures.get("rows_waiting", 0),
            "waiting": figures.get("waiting", []),
            "ms": {},
            "cache": None,
        }
        target = _Target(uid, fixed.keys, fixed.state, figures, recorded, head)
    else:
        schema = pa.schema([(name, type_named(kind)) for name, kind in figures["keys"]])
        target = _Target(uid, schema, evolution.from_record(figures), dict(figures), {}, head)
    _refuse(stage, target, replaces)
    return target


def _refuse(stage: Stage, target: _Target, replaces: bool) -> None:
    """Raises PipelineError for state that is more than a row for each key."""
    collections = target.figures["collections"] or {}
    if stage.window is not None:
        why = "it has windows, whose state is more than a row for each key"
    elif collections:
        names = ", ".join(f"{one['kind']} {name}" for name, one in collections.items())
        why = f"it has elements beside its rows ({names}), which cannot be imported yet"
    elif stage.on_timer is not None and (replaces or not target.is_there):
        why = "it has timers, which rows do not tell of; with --merge, existing keys keep theirs"
    else:
        return
    raise PipelineError(
        f"The state of {stage.uid} cannot be made from rows: {why}.",
        where=f"stage {stage.uid}",
        next="Nothing was changed. Let the pipeline read the history instead, or go back to an earlier checkpoint: weir rewind.",
    )


def _routed(target: _Target, rows: pa.Table) -> _Routed:
    where = f"stage {target.uid}" + (f", checkpoint {target.head.id}" if target.head else "")
    fit = fitting(rows, target.keys, target.state, where).combine_chunks()
    most, parallelism = target.figures["max_parallelism"], target.figures["parallelism"]
    if not fit.num_rows:
        return _Routed(fit, np.empty(0, np.uint16), np.empty(0, np.int64))
    groups = key_groups([fit.column(name) for name in target.keys.names], most)
    return _Routed(fit, groups, np.asarray(subtask_of(groups, parallelism, most)))


# -- writing


def _carry_out(tenure: Tenure, target: _Target, routed: _Routed, replaces: bool, reason: str) -> Checkpoint:
    shop, head = tenure.shop, target.head
    id = CheckpointId(max(tenure.last_id, head.id if head else 0) + 1)
    tenure.heartbeat.begin(id)
    listing = shop.registry.files(head) if head else ()
    now = head.epoch_now if head else datetime.now(UTC)
    bases = {} if replaces else snapshots_of(tuple(listing), target.uid)
    place = f"state/{target.uid}/{epoch_dir(shop.generation, id)}"
    own: list[StateFile] = []
    try:
        for subtask in range(target.figures["parallelism"]):
            chosen = np.flatnonzero(routed.owners == subtask)
            if len(chosen):
                own += _written(tenure, target, routed, chosen, id, subtask, bases.get(subtask), to_micros(now))
            else:
                own += snapshot.unchanged(bases.get(subtask))
    except BaseException:
        with suppress(OSError, WeirError):  # what stays all the same is removed by the next owner
            shop.storage.delete_tree(place)
        raise
    row, files = _row(tenure, target, id, tuple(listing), tuple(own), now, replaces, reason, routed.rows.num_rows)
    shop.registry.commit(row, files)
    shop.head = row
    log.info(
        "state imported",
        pipeline=shop.pipeline.name,
        stage=target.uid,
        checkpoint=int(id),
        rows=routed.rows.num_rows,
        mode="replace" if replaces else "merge",
    )
    return row


def _written(
    tenure: Tenure,
    target: _Target,
    routed: _Routed,
    chosen: np.ndarray,
    id: CheckpointId,
    subtask: int,
    base: Snapshot | None,
    now: int,
) -> tuple[StateFile, ...]:
    """One subtask's snapshot with the chosen rows in it, uploaded. now: processing time, for a time to live."""
    shop = tenure.shop
    home = local_directory(shop.settings, shop.pipeline, shop.storage) / target.uid / str(subtask)
    attempt = Attempt(target.uid, subtask, shop.generation, id, new_attempt_id(), home)
    kind = named(target.figures.get("backend", DEFAULT))
    is_immutable = joined.is_immutable(kind)
    where = f"stage {target.uid}, import {id}, subtask {subtask}"
    try:
        forked = snapshot.fork(shop.storage, attempt, base, None, is_immutable, objects(shop.settings))
        with snapshot.healing(forked):
            backend = joined.opened(kind, forked.db, replace(backend_options(shop.settings), where=where))
            try:
                rows = Rows(backend, target.state, target.keys, VALUE_STATE)
                for start in range(0, len(chosen), _BATCH_ROWS):
                    some = chosen[start : start + _BATCH_ROWS]
                    rows.put(*_frames(target, routed.rows.take(pa.array(some)), routed.groups[some], now))
                rows.barrier()
                taken = snapshot.take(attempt, backend)
            finally:
                backend.close()
        prepared = snapshot.prepare(attempt, forked, taken, is_immutable)
        return snapshot.upload(shop.storage, attempt, prepared, base).files
    except BaseException:
        shutil.rmtree(attempt.directory, ignore_errors=True)
        raise


def _frames(target: _Target, rows: pa.Table, groups: np.ndarray, now: int) -> tuple[pl.DataFrame, pl.DataFrame, Any]:
    """What `Rows.put` takes: keys with their groups, fields, and that all of them are there."""
    frame = frames.from_arrow(rows)
    keys = frame.select(target.keys.names).with_columns(pl.Series(GROUP, groups.astype(np.int32)))
    fields = frame.select(pl.exclude(target.keys.names))
    if TOUCHED in target.state.arrow.names:
        fields = fields.with_columns(pl.lit(now, pl.Int64).alias(TOUCHED))
    return keys, fields, np.ones(len(keys), bool)


def _row(
    tenure: Tenure,
    target: _Target,
    id: CheckpointId,
    listing: tuple[StateFile, ...],
    own: tuple[StateFile, ...],
    now: datetime,
    replaces: bool,
    reason: str,
    number: int,
) -> tuple[Checkpoint, tuple[StateFile, ...]]:
    shop, head, at = tenure.shop, target.head, datetime.now(UTC)
    operators = {uid: _idle(figures) for uid, figures in (head.operators if head else {}).items()}
    waiting = {path for figures in operators.values() for path in waiting_paths(figures)}
    others = [file for file in listing if file.path in waiting or (file.kind == STATE and file.operator != target.uid)]
    files = (*(replace(file, new=False) for file in others), *own)
    state = [file for file in files if file.kind == STATE]
    new = [file for file in own if file.new]
    figures = _idle(target.figures)
    operators[target.uid] = {
        **figures,
        "swept": {} if replaces else figures["swept"],
        "files_total": len(own),
        "bytes_total": sum(file.bytes for file in own),
        "files_new": len(new),
        "bytes_new": sum(file.bytes for file in new),
    }
    totals = dict(head.totals) if head else dict.fromkeys(("epochs", "rows_read", "bytes_new", "files_new"), 0)
    added = sum(file.bytes for file in new)
    totals |= {
        "bytes_new": totals.get("bytes_new", 0) + added,
        "files_new": totals.get("files_new", 0) + len(new),
    }
    made = Checkpoint(
        id=id,
        parent_id=head.id if head else None,
        kind=EDIT,
        generation=shop.generation,
        commit_id=uuid.uuid4().hex,
        triggered_at=at,
        completed_at=at,
        epoch_now=now,
        trigger="edit",
        reason=f"{number} rows of {target.uid} {'replace its state' if replaces else 'merged'}"
        + (f": {reason}" if reason else ""),
        offsets=dict(head.offsets) if head else {},
        slice={name: nothing_read() for name in head.slice} if head else {},
        watermarks=dict(head.watermarks) if head else {},
        operators=operators,
        sinks=dict(head.sinks) if head else {},
        inputs={**target.inputs, **(head.inputs if head else {})},
        ms={},
        totals=totals,
        files=len(files),
        bytes_total=sum(file.bytes for file in state),
        bytes_new=added,
        run_id=shop.run_id,
        format_version=head.format_version if head else FORMAT_VERSION,
        lineage=spans_with(head, shop.generation, id),
    )
    return made, files


def _idle(figures: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's figures in a checkpoint in which it has done nothing."""
    return {**figures, **_IDLE, "files_new": 0, "bytes_new": 0, "ms": {}, "cache": None}
