"""One stage's state in one checkpoint as rows: by what the checkpoint's row recorded, whatever today's code and
settings say.

A snapshot's files are fetched into a temporary directory, every digest checked, and opened there. So parallelism,
backend, schemas, lists, maps, windows and the time to live are those of then, and a stage that is no longer in the
pipeline is read like any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow import frames
from state_ops.arrow.types import type_named
from state_ops.backends.base import Backend, BackendOptions
from state_ops.errors import ConfigurationError, PipelineError, WeirError
from state_ops.ids import CheckpointId
from state_ops.keyed.scan import scan_state
from state_ops.keyed.ttl import Expiry, Ttl, expiry_of, forgotten_in, visible
from state_ops.moments import to_micros
from state_ops.records.checkpoint import Checkpoint, stats_of
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.snapshot_files import Snapshot
from state_ops.schema import evolution
from state_ops.schema.descriptors import LIST, Collection
from state_ops.schema.key_groups import group_range, key_groups, subtask_of
from state_ops.schema.state_schema import TOUCHED, StateSchema
from state_ops.storage.storage import Storage
from weir.definition import Input, Pipeline, Source, Stage
from weir.inspection.snapshot_files import opened
from weir.operators import kinds
from weir.operators.expiring_keys import remembered
from weir.ownership.pipeline_storage import backend_options
from weir.settings.configuration import Settings

_READ_ELSEWHERE = Source(name="")  # a stage that is only read has no input


@dataclass(frozen=True, slots=True)
class View:
    """A stage's state in a checkpoint, with nothing open: it may be pickled and read in other processes.

    Attributes:
        stage: Only what windows, and ranks that become final, are read by; None for all other state.
        parallelism, max_parallelism: Of then.
        schema: The columns of its rows: key columns; of windows their bounds; fields; a column for each list and map.
        identity: The columns that tell a row from all others.
        due: Of rows that say when they are forgotten, the moment in microseconds since 1970 UTC at which the next epoch
            judges what has expired; None for all other state.
    """

    uid: str
    checkpoint: CheckpointId
    storage: Storage
    options: BackendOptions
    backend: str
    keys: pa.Schema
    state: StateSchema
    collections: tuple[Collection, ...]
    stage: Stage | None
    expiry: Expiry | None
    parallelism: int
    max_parallelism: int
    snapshots: Mapping[int, Snapshot]
    schema: pa.Schema
    identity: tuple[str, ...]
    due: int | None = None

    def tables(self, subtasks: Iterable[int] | None = None) -> Iterator[pa.Table]:
        """Yield all rows, by default of every subtask, in tables of at most one key group; fetched and opened one by
        one."""
        for subtask in range(self.parallelism) if subtasks is None else subtasks:
            with self.opened(subtask) as backend:
                if backend is not None:
                    yield from self.rows(backend, self.groups(subtask))

    def opened(self, subtask: int) -> AbstractContextManager[Backend | None]:
        """Fetch a subtask's snapshot and open it; None: it has no state."""
        taken = self.snapshots.get(subtask)
        return nullcontext() if taken is None else opened(self.storage, self.options, taken, self.backend)

    def groups(self, subtask: int) -> range:
        """Return the key groups of a subtask."""
        return group_range(subtask, self.parallelism, self.max_parallelism)

    def rows(self, backend: Backend, groups: range) -> Iterator[pa.Table]:
        """Yield the rows of some key groups, from an open snapshot."""
        if self.stage is not None:
            tables = self.stage.operator.opened(self.stage, self.keys, self.state, backend, groups)
        else:
            scanned = scan_state(backend, self.state, self.collections, self.keys, groups, self.expiry)
            tables = (remembered(table, self.due) for table in scanned)
        for table in tables:
            if table.num_rows:
                # A group without elements has no type for its lists, and nothing of what may not be null is shown as
                # such.
                yield table if table.schema.equals(self.schema) else table.cast(self.schema)

    def of_key(self, key: Sequence[pa.Array], backend: Backend) -> list[dict[str, Any]]:
        """Return the rows of one key, given as an array of one value for each key column, from its subtask's open
        snapshot."""
        group = self.group(key)
        rows: list[dict[str, Any]] = []
        for table in self.rows(backend, range(group, group + 1)):
            for name, column in zip(self.keys.names, key, strict=True):
                table = table.filter(pc.equal(table.column(name), column[0]))
            rows += frames.python_rows(table)
        return rows

    def group(self, key: Sequence[pa.Array]) -> int:
        """Return the key group of a key."""
        return int(key_groups(key, self.max_parallelism)[0])

    def subtask(self, key: Sequence[pa.Array]) -> int:
        """Return the subtask that has a key."""
        return int(subtask_of(self.group(key), self.parallelism, self.max_parallelism))


def parsed(keys: pa.Schema, key: Sequence[Any], uid: str) -> list[pa.Array]:
    """Return a value for each key column, or the text of one, as arrays of one value. Raises ConfigurationError for a
    key that cannot be one."""
    if len(key) != len(keys):
        raise ConfigurationError(
            f"The key of {uid} has {len(keys)} column{'s' if len(keys) > 1 else ''} ({', '.join(keys.names)}), not "
            f"{len(key)}.",
            next="Give one --key for each, in this order.",
        )
    columns = []
    for column, text in zip(keys, key, strict=True):
        try:
            columns.append(pa.array([text]).cast(column.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            advice = 'Write it as "2026-05-01 12:00:00Z".' if pa.types.is_timestamp(column.type) else str(error)
            raise ConfigurationError(
                f"{text!r} is no {column.type}, which the key column {column.name!r} of {uid} is.", next=advice
            ) from error
    return columns


# -- from the record


def state_stats(pipeline: Pipeline, checkpoint: Checkpoint, uid: str) -> OperatorStats:
    """Return what a checkpoint records of a stage that has state. Raises PipelineError for a stage that nobody knows,
    WeirError for one without state."""
    stats = stats_of(checkpoint, uid)
    if stats.has_state:
        return stats
    stages = list(dict.fromkeys([*(stage.uid for stage in pipeline.stages), *checkpoint.operators]))
    if uid not in stages:
        raise PipelineError(
            f"The pipeline {pipeline.title} has no stage {uid!r}.", next=f"Its stages are: {', '.join(stages)}."
        )
    raise WeirError(
        f"The stage {uid} of {pipeline.title} has no state in checkpoint {checkpoint.id}.",
        next=f"Stages that have some there: {', '.join(checkpoint.stages_with_state) or 'none'}.",
    )


def view_of(
    pipeline: Pipeline,
    settings: Settings,
    storage: Storage,
    checkpoint: Checkpoint,
    uid: str,
    snapshots: Mapping[int, Snapshot],
) -> View:
    """Return how a stage's state in a checkpoint is read.

    Args:
        snapshots: From its listing, by subtask.
    """
    stats = state_stats(pipeline, checkpoint, uid)
    keys = pa.schema([(name, type_named(kind)) for name, kind in stats.keys])
    state = evolution.from_record(stats.schema_history)
    collections = tuple(Collection.from_json(name, raw) for name, raw in stats.collections.items())
    stage = _windows(pipeline, stats, uid, keys)
    ttl = _ttl(pipeline, stats, uid, checkpoint, state, collections)
    identity, now = tuple(keys.names), to_micros(checkpoint.epoch_now)
    if stage is not None:
        schema = stage.operator.opened_schema(stage, keys, state)
        identity += stage.operator.identity
    else:
        schema = _columns(keys, state, collections)
    return View(
        uid=uid,
        checkpoint=checkpoint.id,
        storage=storage,
        options=backend_options(settings),
        backend=stats.backend,
        keys=keys,
        state=state,
        collections=collections,
        stage=stage,
        expiry=expiry_of(state, ttl, now, forgotten_in(stats, now)),
        parallelism=stats.parallelism,
        max_parallelism=stats.max_parallelism,
        snapshots=snapshots,
        schema=schema,
        identity=identity,
        due=_due(stats, checkpoint, uid),
    )


def _columns(keys: pa.Schema, state: StateSchema, collections: Sequence[Collection]) -> pa.Schema:
    """Return the columns of `scan_state`: with lists or maps they have passed through Polars, which has fewer types."""
    rows = pa.schema([*keys, *[pa.field(field.name, field.type) for field in visible(state)]])
    if not collections:
        return pa.schema([(field.name, field.type) for field in rows])
    columns = [(field.name, field.type) for field in _through_polars(rows)]
    for declared in collections:
        fields = [pa.field(field.name, field.type) for field in declared.fields]
        if declared.key is not None:
            fields = [pa.field(declared.key_column, declared.key), *fields]
        element = _through_polars(pa.schema(fields))
        plain = declared.kind == LIST and element.names == [declared.name]
        columns.append((declared.name, pa.list_(element.field(0).type if plain else pa.struct(list(element)))))
    return pa.schema(columns)


def _through_polars(schema: pa.Schema) -> pa.Schema:
    return frames.arrow(frames.from_arrow(schema.empty_table())).schema


def _windows(pipeline: Pipeline, stats: OperatorStats, uid: str, keys: pa.Schema) -> Stage | None:
    """Return a stage that has the windows of then, or the ranks; None where its state is by key alone. Older records
    leave it to the definition."""
    if "window" not in stats.names:
        stage = next((stage for stage in pipeline.stages if stage.uid == uid), None)
        return stage if stage is not None and stage.closes else None
    operator = kinds.of_meaning(stats.window)
    if operator is None or not operator.closes:
        return None
    return Stage(uid, (Input(_READ_ELSEWHERE, key=tuple(keys.names)),), operator)


def _due(stats: OperatorStats, checkpoint: Checkpoint, uid: str) -> int | None:
    """Return the time by which the next epoch would judge that keys have expired: event time, or its own.

    It is for deduplication and ranks.
    """
    operator = kinds.of_meaning(stats.window)
    if operator is None or not operator.indexes_keys:
        return None
    by_event_time = operator.time_column is not None
    return checkpoint.watermarks.get(uid) if by_event_time else to_micros(checkpoint.epoch_now)


def _ttl(
    pipeline: Pipeline,
    stats: OperatorStats,
    uid: str,
    checkpoint: Checkpoint,
    state: StateSchema,
    collections: Sequence[Collection],
) -> Ttl | None:
    """Return the time to live of then. Records of earlier releases do not have it: then it is that of the
    definition."""
    if "ttl" in stats.names:
        return Ttl(**stats.ttl) if stats.ttl else None
    if not any(TOUCHED in schema.arrow.names for schema in (state, *(declared.schema for declared in collections))):
        return None
    stage = next((stage for stage in pipeline.stages if stage.uid == uid), None)
    if stage is None or stage.lifetime is None:
        raise WeirError(
            f"What {uid} has forgotten by checkpoint {checkpoint.id} cannot be told: its time to live is not recorded "
            "there, " + ("and the stage is gone." if stage is None else "and today's stage has none."),
            where=f"stage {uid}, checkpoint {checkpoint.id}",
            next="Read it with the pipeline's code of then, which defines the stage with its ttl=.",
        )
    return stage.lifetime
