"""Replacing whole partitions of a table by a checkpoint's rows: one commit of its log, which reads no file."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import pyarrow.parquet as pq
from deltalake import DeltaTable

from pipelines.runtime.sinks.delta import check_committed, check_keyed, damaged
from pipelines.runtime.sinks.table_commit import Change, commit, data_files, publication
from state_ops.checkpoints.checkpoint import Checkpoint, StateFile
from state_ops.checkpoints.registry import Publication
from state_ops.delta.log_entries import DataFile, active_files
from state_ops.storage.storage import Storage

Partition = frozenset[tuple[str, str | None]]


def publish(
    storage: Storage,
    app_id: str,
    table: str,
    checkpoint: Checkpoint,
    previous: int | None,
    files: Sequence[StateFile],
    footers: Mapping[str, pq.FileMetaData] | None = None,
) -> Publication:
    """Let a checkpoint's rows be the only ones in their partitions, exactly once however often this is called.

    Args:
        previous: The id that the chain says was published last, None for none.
        files: Staged in the table's directory.
        footers: Of files, by path, as far as they are known.
    """
    started, adds = time.perf_counter(), data_files(storage, table, files, footers)

    def change_of(handle: DeltaTable) -> Change:
        check_committed(storage, handle, table, checkpoint.id, adds, footers=footers)
        check_keyed(handle, table)
        return Change(adds, within(active_files(handle), partitions_of(adds)), exact=bool(adds))

    committed = commit(storage, app_id, table, checkpoint, previous, change_of, partial(damaged, storage, table))
    if committed.change is None:
        return publication(checkpoint, table, committed.version, len(files), 0, started)
    removes = committed.change.removes
    rows = sum(file.rows for file in adds) - sum(file.rows for file in removes)
    return publication(checkpoint, table, committed.version, len(adds) + len(removes), rows, started)


def partitions_of(files: Collection[DataFile]) -> frozenset[Partition]:
    """The partitions that files are of."""
    return frozenset(frozenset(file.partition) for file in files)


def within(files: Sequence[DataFile], partitions: Collection[Partition]) -> list[DataFile]:
    """The files of some partitions."""
    return [file for file in files if frozenset(file.partition) in partitions]


def outside(files: Sequence[DataFile], partitions: Collection[Partition]) -> list[DataFile]:
    """The files of other partitions."""
    return [file for file in files if frozenset(file.partition) not in partitions]
