"""Replacing whole partitions of a table by a checkpoint's rows, which reads no file, or the rows that a condition
keeps: one commit of its log.

What they replace is said by the staged files, so it is that of the code which handed the rows out.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
from deltalake import DeltaTable

from state_ops.arrow.parquet import where_of
from state_ops.delta.log_entries import DataFile, active_files
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.publications import Publication
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.storage import Storage
from weir.connectors.delta.append import check_committed, check_keyed, damaged
from weir.connectors.delta.predicates import apart, predicate
from weir.connectors.delta.replace_where import remove_unnamed
from weir.connectors.delta.table_commit import (
    TableChange,
    commit,
    data_files,
    file_path,
    footer_of,
    publication,
    staging_directory,
    table_path,
)

Partition = frozenset[tuple[str, str | None]]


def publish(
    storage: Storage,
    app_id: str,
    table: str,
    checkpoint: Checkpoint,
    previous: int | None,
    files: Sequence[StateFile],
    footers: Mapping[str, pq.FileMetaData] | None = None,
    *,
    scratch: Path,
) -> Publication:
    """Let a checkpoint's rows be the only ones of what they replace, exactly once however often this is called.

    Args:
        previous: The id that the chain says was published last, None for none.
        files: Staged in the table's directory.
        footers: Of files, by path, as far as they are known.
        scratch: A directory for files that are read or written, one for each transfer at a time.
    """
    started, adds = time.perf_counter(), data_files(storage, table, files, footers)

    def change_of(handle: DeltaTable) -> TableChange:
        check_committed(storage, handle, table, checkpoint.id, adds, footers=footers)
        check_keyed(handle, table)
        asked = replaced_by(storage, table, adds, footers)
        directory = staging_directory(storage, app_id, table, checkpoint).removeprefix(f"{table_path(table)}/")
        goes, rests = without(storage, table, handle, active_files(handle), asked, directory, scratch)
        return TableChange([*rests, *adds], goes, exact=bool(adds))

    committed = commit(storage, app_id, table, checkpoint, previous, change_of, partial(damaged, storage, table))
    if committed.change is None:
        return publication(checkpoint, table, committed.version, len(files), 0, started)
    change = committed.change
    if len(change.adds) > len(adds):
        remove_unnamed(storage, app_id, table, checkpoint, change.adds)
    rows = sum(file.rows for file in change.adds) - sum(file.rows for file in change.removes)
    return publication(checkpoint, table, committed.version, len(change.adds) + len(change.removes), rows, started)


@dataclass(frozen=True, slots=True)
class Replaced:
    """The partitions and rows that a checkpoint's rows replace.

    Attributes:
        partitions: Whole ones.
        conditions: Those whose rows go.
    """

    partitions: frozenset[Partition] = frozenset()
    conditions: tuple[str, ...] = ()


def replaced_by(
    storage: Storage, table: str, files: Sequence[DataFile], footers: Mapping[str, pq.FileMetaData] | None = None
) -> Replaced:
    """Return the partitions and conditions that rows replace, by their files.

    Args:
        footers: Of files, by path, as far as they are known.
    """
    paths = {file: file_path(table, file) for file in files}
    conditions = {file: where_of((footers or {}).get(path) or footer_of(storage, path)) for file, path in paths.items()}
    whole = partitions_of([file for file, condition in conditions.items() if condition is None])
    return Replaced(whole, tuple(sorted({text for text in conditions.values() if text is not None})))


def without(
    storage: Storage,
    table: str,
    handle: DeltaTable,
    active: Sequence[DataFile],
    replaced: Replaced,
    directory: str,
    scratch: Path,
) -> tuple[list[DataFile], list[DataFile]]:
    """Return the files of a version that go where rows are replaced, and what comes instead of those that have others
    too.

    Args:
        handle: The version.
        active: Its files.
        directory: For new files, relative to the table.
    """
    goes, left = within(active, replaced.partitions), outside(active, replaced.partitions)
    rests: list[DataFile] = []
    for condition in replaced.conditions:
        some, instead = apart(storage, predicate(table, condition, handle), directory, left, scratch)
        goes, gone = [*goes, *some], {file.path for file in some}
        left = [*(file for file in left if file.path not in gone), *instead]
        rests = [*(file for file in rests if file.path not in gone), *instead]
    there = {file.path for file in active}
    return [file for file in goes if file.path in there], rests


def partitions_of(files: Collection[DataFile]) -> frozenset[Partition]:
    """Return the partitions that files are of."""
    return frozenset(frozenset(file.partition) for file in files)


def within(files: Sequence[DataFile], partitions: Collection[Partition]) -> list[DataFile]:
    """Return the files of some partitions."""
    return [file for file in files if frozenset(file.partition) in partitions]


def outside(files: Sequence[DataFile], partitions: Collection[Partition]) -> list[DataFile]:
    """Return the files of other partitions."""
    return [file for file in files if frozenset(file.partition) not in partitions]
