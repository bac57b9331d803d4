"""In what a branch differs from production over the same epochs: in the rows that they handed out, and in state.

Rows are compared as they were handed out, whatever became of them in a sink: they are what the checkpoints list. Of a
table with keys they are netted first, so that a key counts by what has become of it in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.counts import agrees, counted
from state_ops.records.snapshot_files import StateFile, snapshots_of
from state_ops.storage.storage import Storage
from weir.connectors.delta.changes import ROW, Changes
from weir.connectors.delta.upsert import spilled
from weir.definition import Pipeline
from weir.definition.change_feed import CHANGE_TYPE, DELETE, UPDATE
from weir.definition.sink import Sink
from weir.execution.executor import staged_table
from weir.inspection.comparison.states import StateDiff, states_differ
from weir.inspection.comparison.tables import OURS, THEIRS, TableDiff, compared_rows
from weir.inspection.database import database, load
from weir.inspection.view import View, view_of
from weir.operations.pull_request.replaying import EpochPlayed
from weir.operations.pull_request.taking import Taken, rows_for
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


def state_diffs(
    pipeline: Pipeline, settings: Settings, taken: Taken, storage: Storage, last: EpochPlayed, sample: int
) -> Iterator[StateDiff]:
    """Return by stage how the state differs after the last epoch.

    Args:
        settings: By which backends open state.
        storage: The branch's.
    """
    end, tip = last.recorded, last.now

    def views(uid: str) -> AbstractContextManager[tuple[View, View]]:
        first, second = (snapshots_of(files, uid) for files in (taken.listings[int(end.id)], last.files))
        ours = view_of(pipeline, settings, taken.copy, end, uid, first)
        return nullcontext((ours, view_of(pipeline, settings, storage, tip, uid, second)))

    return states_differ(pipeline, end, tip, views, ("production", "the branch"), sample=sample, replayed=True)
