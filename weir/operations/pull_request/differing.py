"""In what a branch differs from production over the same epochs: in the rows that they handed out, and in state.

Rows are compared as they were handed out, whatever became of them in a sink: they are what the checkpoints list. Of a
table with keys they are netted first, so that a key counts by what has become of it in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.counts import agrees, counted
from state_ops.errors import ConfigurationError
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import StateFile, snapshots_of
from state_ops.schema import descriptors
from state_ops.schema.key_groups import group_range
from state_ops.snapshots.rescale import first_key
from state_ops.storage.storage import Storage
from weir.connectors.delta.change_feed import CHANGE_TYPE, DELETE, UPDATE
from weir.connectors.delta.changes import ROW, Changes
from weir.connectors.delta.upsert import spilled
from weir.connectors.sink import Sink
from weir.definition import Pipeline
from weir.execution.executor import staged_table
from weir.inspection.database import database, load
from weir.inspection.diff import compared_views
from weir.inspection.snapshot_files import opened
from weir.inspection.view import View, view_of
from weir.operations.branch_diff import StateDiff, fields_differ
from weir.operations.pull_request.replaying import EpochPlayed
from weir.operations.pull_request.taking import Taken, rows_for
from weir.operations.row_diff import OURS, THEIRS, TableDiff, compared_rows
from weir.settings.configuration import Settings

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection as Connection

_OF_EPOCH = "_weir_epoch"  # of a quarantine: under which id an epoch ends depends on how often rows are set aside


def rows_differ(
    pipeline: Pipeline, taken: Taken, storage: Storage, played: Sequence[EpochPlayed], scratch: Path, sample: int
) -> Iterator[TableDiff | str]:
    """Return by sink how the rows of both differ in the replayed epochs; a sentence for a sink that cannot be compared.

    Args:
        storage: The branch's.
        scratch: A directory for rows that are netted.
        sample: How many rows are shown at most.
    """
    recorded = [epoch.recorded for epoch in played]
    listed = [file.sink for epoch in recorded for file in taken.listings[int(epoch.id)] if file.sink is not None]
    for sink in dict.fromkeys([*(sink.name for sink in pipeline.sinks), *listed]):
        ours = taken.handed_out(sink, recorded)
        theirs = [rows_for(sink, epoch.files) for epoch in played]
        gone = sum(file.path in taken.gone for files in ours for file in files)
        if gone:
            yield (
                f"Rows of {sink} are not compared: {counted(gone, 'file')} that production handed out in these epochs "
                f"{agrees(gone, 'is', 'are')} not there any more, as after an OPTIMIZE and a VACUUM of the table."
            )
            continue
        yield _compared(pipeline, sink, (taken.copy, ours), (storage, theirs), scratch, sample)


_Side = tuple[Storage, Sequence[Sequence[StateFile]]]


def _compared(pipeline: Pipeline, name: str, ours: _Side, theirs: _Side, scratch: Path, sample: int) -> TableDiff:
    sink = pipeline.sink(name)
    with database() as connection:
        if sink is not None and sink.capabilities.newest_of:
            first = _netted(connection, OURS, sink, ours, scratch)
            second = _netted(connection, THEIRS, sink, theirs, scratch)
        else:
            first, second = _loaded(connection, OURS, ours), _loaded(connection, THEIRS, theirs)
        return compared_rows(connection, pipeline, name, first, second, sample=sample, without=[_OF_EPOCH])


def _loaded(connection: Connection, name: str, side: _Side) -> pa.Schema | None:
    """Load rows as they were handed out; returns their columns, or None if there are none."""
    storage, epochs = side
    files = [file for files in epochs for file in files]
    if not files:
        return None
    schemas = [frames.canonical_schema(storage.parquet_footer(file.path).schema.to_arrow_schema()) for file in files]
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    load(connection, name, (frames.aligned(staged_table(storage, file), schema) for file in files), schema)
    return schema


def _netted(connection: Connection, name: str, sink: Sink, side: _Side, scratch: Path) -> pa.Schema | None:
    """Load what has become of each key: its newest row, or that it is gone."""
    storage, epochs = side
    files = [replace(file, subtask=epoch) for epoch, files in enumerate(epochs) for file in files]
    with spilled(storage, sink, files, scratch, by_epoch=True) as changes:
        if not changes.count:
            return None
        schema = changes.schema.append(pa.field(CHANGE_TYPE, pa.string()))
        load(connection, name, _newest(changes, schema), schema)
        return schema


def _newest(changes: Changes, schema: pa.Schema) -> Iterator[pa.Table]:
    for keys in changes.ranges():
        comes = changes.rows(keys[ROW].drop_nulls().to_numpy().astype(np.int64))
        goes = frames.arrow(keys.filter(keys[ROW].is_null()).select(changes.key))
        for rows, what in ((comes, UPDATE), (goes, DELETE)):
            marked = rows.append_column(CHANGE_TYPE, pa.repeat(pa.scalar(what, pa.string()), rows.num_rows))
            yield frames.aligned(marked, schema)


def states_differ(
    pipeline: Pipeline,
    settings: Settings,
    taken: Taken,
    storage: Storage,
    last: EpochPlayed,
    sample: int,
) -> Iterator[StateDiff]:
    """Return by stage how the state differs after the last epoch.

    Args:
        settings: By which backends open state.
        storage: The branch's.
    """
    end, tip = last.recorded, last.now
    for uid in dict.fromkeys([*end.stages_with_state, *tip.stages_with_state]):
        if uid not in end.stages_with_state or uid not in tip.stages_with_state:
            yield StateDiff(
                uid, None, why=f"only {'the branch' if uid in tip.stages_with_state else 'production'} has it"
            )
            continue
        stage = pipeline.stage(uid)
        left_out = stage.operator.clocked_state(stage)
        first = _view(pipeline, settings, taken.copy, end, uid, taken.listings[int(end.id)])
        second = _view(pipeline, settings, storage, tip, uid, last.files)
        try:
            with (
                compared_views(first, second, left_out, rounded=True) as difference,
                difference.rows(sample) as (_, tables),
            ):
                rows = [row for table in tables for row in frames.python_rows(table)]
                fields = fields_differ(difference, "production", "the branch")
                timers = _timers_differ(first, second) if pipeline.stage(uid).on_timer is not None else ""
                yield StateDiff(uid, dict(difference.counts), rows, fields, left_out, timers)
        except ConfigurationError as error:
            yield StateDiff(uid, None, why=error.what)


_TIMERS = {descriptors.EVENT_TIMERS: "event time", descriptors.PROCESSING_TIMERS: "processing time"}
_OF_TIMERS = pa.schema([("timer", pa.binary())])


def _timers_differ(first: View, second: View) -> str:
    """Return in words how many timers only one side has. It is "" if both have the same."""
    parts = []
    for kind, clock in _TIMERS.items():
        with database() as connection:
            load(connection, OURS, _timers(first, kind), _OF_TIMERS)
            load(connection, THEIRS, _timers(second, kind), _OF_TIMERS)
            for here, there, side in ((OURS, THEIRS, "production"), (THEIRS, OURS, "the branch")):
                query = f"SELECT count(*) FROM (SELECT * FROM {here} EXCEPT ALL SELECT * FROM {there})"
                ((count,),) = connection.execute(query).fetchall()
                parts += [f"only {side} has {counted(count, 'timer')} by {clock}"] if count else []
    return "; ".join(parts)


def _timers(view: View, kind: int) -> Iterator[pa.Table]:
    """Yield the entries of timers of one kind, key group by key group. What they hold is left out: it says in whose
    barrier they did not fire, which is over."""
    for subtask, taken in view.snapshots.items():
        with opened(view.storage, view.options, taken, view.backend) as backend:
            for group in group_range(subtask, view.parallelism, view.max_parallelism):
                beginning, end = (first_key(group) + bytes([of]) for of in (kind, kind + 1))
                keys = [key for key, _ in backend.scan(beginning, end)]
                yield pa.table([pa.array(keys, pa.binary())], schema=_OF_TIMERS)


def _view(
    pipeline: Pipeline,
    settings: Settings,
    storage: Storage,
    checkpoint: Checkpoint,
    uid: str,
    files: tuple[StateFile, ...],
) -> View:
    return view_of(pipeline, settings, storage, checkpoint, uid, snapshots_of(files, uid))
