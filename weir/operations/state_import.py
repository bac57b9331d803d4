"""Import rows as state: bootstrap a stage from history, or repair values. The result is a checkpoint of its own.

    1 2 3        3 is the newest
    1 2 3 4      4 = 3 with other rows in one stage: positions, watermarks, tables and all other stages as in 3
    1 2 3 4 5    5 continues 4

All rows are validated first. Then each row goes to the subtask that owns its key group. It is written by the backend
and the codec that a run uses, and uploaded under this owner's generation and an id of its own. The commit of the
checkpoint's row decides: before it nothing is changed, and the next owner removes what was uploaded by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import pyarrow as pa

from state_ops.arrow.frames import schema_to_json
from state_ops.arrow.types import type_named
from state_ops.checkpoints.registry import Registry
from state_ops.errors import PipelineError
from state_ops.facts import HIDDEN, Facts, Named, fact
from state_ops.ids import CheckpointId
from state_ops.keyed.imported_rows import fitting
from state_ops.records.checkpoint import Checkpoint, stats_of
from state_ops.schema import evolution
from state_ops.schema.key_groups import key_groups, subtask_of
from state_ops.storage.storage import Storage
from weir.definition import Pipeline, Stage
from weir.execution.executor import Executor
from weir.execution.spark.spark_executor import SparkExecutor
from weir.operations.plan import today
from weir.operations.state_edit import IDLE, EditedState, Routed, carry_out
from weir.operators.compatibility import changeable, meaning, stored_collections, stored_keys
from weir.ownership import savepoints
from weir.ownership.pipeline_storage import open_storage
from weir.ownership.prune import prune
from weir.restore import restore
from weir.restore.recovery import owning
from weir.settings.configuration import Settings


@dataclass(frozen=True, slots=True)
class Edit(Facts):
    """The result of an import, or the plan of it.

    Attributes:
        rows: By subtask, how many rows.
        head: The newest checkpoint before the import.
        checkpoint: The import's own checkpoint; None after a dry run.
    """

    stage: str
    replaces: Annotated[bool, HIDDEN]
    rows: Annotated[Mapping[int, int], Named("subtasks")]
    head: Annotated[CheckpointId | None, Named("before")]
    checkpoint: CheckpointId | None

    @property
    @fact
    def mode(self) -> str:
        """replace or merge."""
        return "replace" if self.replaces else "merge"

    @property
    @fact
    def total(self) -> Annotated[int, Named("rows")]:
        """The number of rows."""
        return sum(self.rows.values())


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

    Args:
        rows: The key columns, then the fields, as `state_reader.scan` gives them.
        replaces: Whether the stage's state becomes exactly these rows; else their keys are put, and all others stay.
        savepoint: A name for the checkpoint.
        executor: What tells the columns of a stage with a transform that has no state yet.

    Raises:
        BusyError: A coordinator is alive. As for all these errors, nothing is changed.
        InputError: Some rows do not fit; the message has all that is wrong with them.
        PipelineError: The stage's state cannot be made from rows.
        DamageError: The newest checkpoint is not whole.
    """
    runs = executor or SparkExecutor(settings, app=f"weir state import {pipeline.name}")
    if savepoint is not None:
        savepoints.check_free(pipeline, settings, savepoint)
    if dry_run:
        storage, registry = open_storage(pipeline, settings)
        target = _target(pipeline, settings, storage, registry, registry.head(), runs, uid, replaces)
        routed = _routed(target, rows)
        return Edit(uid, replaces, routed.by_subtask(), target.head.id if target.head else None, None)
    with owning(pipeline, settings, runs, epochs=False) as owner:
        context = owner.context
        target = _target(pipeline, settings, context.storage, context.registry, owner.head, runs, uid, replaces)
        routed = _routed(target, rows)
        if target.head is not None:
            restore.verify(context, target.head, purpose="edit")
        done = carry_out(owner, target, routed, replaces, reason)
        if savepoint is not None:
            savepoints.save(context, done, savepoint, reason or "weir state import")
        prune(context)
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
) -> EditedState:
    stage = pipeline.stage(uid)
    stats = stats_of(head, uid)
    if not stats.has_state:
        fixed, inputs = today(pipeline, settings, storage, registry, head, executor, uid)
        recorded = {name: schema_to_json(schema) for name, schema in inputs.items()}
        stats = stats.updated(
            **IDLE,
            parallelism=settings.spark.parallelism,
            max_parallelism=pipeline.max_parallelism,
            schema=fixed.state.to_json(),
            schemas=evolution.recorded(fixed.state),
            keys=stored_keys(fixed),
            backend=settings.state.backend,
            collections=stored_collections(fixed),
            sketched=dict(fixed.sketched),
            swept={},
            window=meaning(stage),
            ttl=asdict(stage.lifetime) if stage.lifetime else None,
            **changeable(stage),
            timers=False,
            rows_waiting=stats.rows_waiting,
            waiting=stats.waiting,
            ms={},
            cache=None,
        )
        target = EditedState(uid, fixed.keys, fixed.state, stats, recorded, head)
    else:
        schema = pa.schema([(name, type_named(kind)) for name, kind in stats.keys])
        target = EditedState(uid, schema, evolution.from_record(stats.schema_history), stats, {}, head)
    _refuse(stage, target, replaces)
    return target


def _refuse(stage: Stage, target: EditedState, replaces: bool) -> None:
    """Check that the stage's state is one row for each key.

    Raises:
        PipelineError: It is more than that.
    """
    if stage.closes:
        why = "it has windows, or ranks that become final, and so more than a row for each key"
    elif target.stats.collections:
        names = ", ".join(f"{record['kind']} {name}" for name, record in target.stats.collections.items())
        why = f"it has elements beside its rows ({names}), which cannot be imported yet"
    elif stage.on_timer is not None and (replaces or not target.is_there):
        why = "it has timers, which rows do not tell of; with --merge, existing keys keep theirs"
    else:
        return
    raise PipelineError(
        f"The state of {stage.uid} cannot be made from rows: {why}.",
        where=f"stage {stage.uid}",
        next="Nothing was changed. Let the pipeline read the history instead, or go back to an earlier checkpoint: "
        "weir rewind.",
    )


def _routed(target: EditedState, rows: pa.Table) -> Routed:
    where = f"stage {target.uid}" + (f", checkpoint {target.head.id}" if target.head else "")
    fit = fitting(rows, target.keys, target.state, where).combine_chunks()
    most, parallelism = target.stats.max_parallelism, target.stats.parallelism
    if not fit.num_rows:
        return Routed(fit, np.empty(0, np.uint16), np.empty(0, np.int64))
    groups = key_groups([fit.column(name) for name in target.keys.names], most)
    return Routed(fit, groups, np.asarray(subtask_of(groups, parallelism, most)))
