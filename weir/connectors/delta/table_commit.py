"""The one commit that a checkpoint makes to a sink's Delta table, exactly once however often it is tried.

Transaction app id: `<pipeline>/<branch>/<table>`, stable for ever; version: the checkpoint's id. delta-rs accepts the
same version twice in sequence, so the version is read on the very handle that commits, each time. Appends, replaced
ranges and restored versions differ only in what they add and remove, which they say for that handle.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from state_ops.arrow.parquet import partition_of
from state_ops.delta import fenced_table, log_entries
from state_ops.delta.log_entries import DataFile
from state_ops.delta.set_back import set_back
from state_ops.errors import DamageError, plainly
from state_ops.ids import epoch_dir
from state_ops.records.checkpoint import TAKES_BACK, Checkpoint
from state_ops.records.publications import Publication
from state_ops.records.sink_link import SinkLink
from state_ops.records.snapshot_files import StateFile
from state_ops.redaction import scrubbing
from state_ops.storage.paths import data_directory
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together
from weir.connectors.delta.statistics import statistics

_MAX_RACES = 20
CHECKPOINT = "weir.checkpoint"
WHOSE = "weir.storage"  # of a table elsewhere: a mark of the pipeline's storage
RANGE = "weir.range"  # of the promotion of one
BRANCH = "weir.branch"  # of a promotion: the id of the branch whose rows it brought


@dataclass(frozen=True, slots=True)
class TableChange:
    """The changes that one commit makes to a table.

    Attributes:
        adds: Files that come.
        removes: Files that go.
        metadata: What its entry says beside the checkpoint's id.
        columns: That the table gets.
        exact: It holds for the version alone for which it was asked, although it removes nothing: what others have
            added meanwhile might have to go.
    """

    adds: Sequence[DataFile]
    removes: Sequence[DataFile] = ()
    metadata: Mapping[str, str] | None = None
    columns: Sequence[pa.Field] = ()
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """A table that has a checkpoint's commit.

    Attributes:
        version: The Delta version that the commit made.
        handle: The table at that version, or at a later one.
        change: What was committed. None: an earlier try had done it already.
    """

    version: int
    handle: DeltaTable
    change: TableChange | None


def table_path(table: str) -> str:
    return f"tables/{table}"


def mark(storage: Storage, table: str) -> dict[str, str]:
    """Return the mark by which commits name their pipeline in a table to which others may commit as well."""
    if not storage.is_mounted(table_path(table)):
        return {}
    return {WHOSE: hashlib.sha256(storage.uri.encode()).hexdigest()[:16]}


def seen_by(storage: Storage, table: str, history: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of a table's log, in which those of other pipelines are like anybody's."""
    ours = mark(storage, table).get(WHOSE)
    return [
        entry
        if entry.get(WHOSE) == ours
        else {name: value for name, value in entry.items() if not name.startswith("weir.")}
        for entry in history
    ]


def staging_directory(storage: Storage, app_id: str, table: str, checkpoint: Checkpoint) -> str:
    """Return the directory of the files that are written for a checkpoint's publish."""
    directory = data_directory(table, app_id, storage.is_mounted(table_path(table)))
    return f"{directory}/{epoch_dir(checkpoint.generation, checkpoint.id)}"


def file_path(table: str, file: DataFile) -> str:
    """Return the path of a file of a sink's table. The table's log names the file as in a URI."""
    return f"{table_path(table)}/{unquote(file.path)}"


@contextmanager
def local_file(storage: Storage, table: str, file: DataFile, scratch: Path) -> Iterator[Path]:
    """Return a file of the table on a local disk: the file itself if it is there, else a copy."""
    path = file_path(table, file)
    if storage.is_local:
        yield Path(storage.full(path).removeprefix("file://"))
        return
    with storage.fetched(path, scratch) as local:
        yield local


def with_partition(rows: pa.Table, file: DataFile) -> pa.Table:
    """Return a file's rows with its partition's values, as texts, where the file has not got these columns itself: what
    others have written, an OPTIMIZE for instance, has none."""
    for name, value in file.partition:
        if name not in rows.column_names:
            rows = rows.append_column(name, pa.repeat(pa.scalar(value, pa.string()), rows.num_rows))
    return rows


def data_files(
    storage: Storage, table: str, files: Sequence[StateFile], footers: Mapping[str, pq.FileMetaData] | None = None
) -> list[DataFile]:
    """Return a checkpoint's staged files as the table's log names them: with partition and statistics.

    Args:
        footers: By path, those that are known; others are read.
    """
    prefix = f"{table_path(table)}/"

    def data_file(file: StateFile, _: object) -> DataFile:
        footer = (footers or {}).get(file.path)
        if footer is None:
            footer = footer_of(storage, file.path)
        path = file.path.removeprefix(prefix)
        return DataFile(path, file.bytes, file.rows or 0, partition_of(footer), statistics=statistics(footer))

    return together(data_file, list(files), at_once=storage.transfers)


def footer_of(storage: Storage, path: str) -> pq.FileMetaData:
    """Return the footer of a committed checkpoint's file. Raises DamageError."""
    try:
        return storage.parquet_footer(path)
    except (FileNotFoundError, pa.ArrowException) as error:
        raise DamageError(
            f"A file of a committed checkpoint cannot be read: {plainly(error)}.",
            where=storage.full(path),
            next="Nothing was published. `weir fsck PIPELINE` says what else is damaged: bring the files back from a "
            "backup.",
        ) from error


def branch_of(link: SinkLink) -> dict[str, str]:
    """Return the entry of a promotion's commit that names its branch. It is empty for a rewind."""
    return {BRANCH: link.branch} if link.branch is not None else {}


def commit(
    storage: Storage,
    app_id: str,
    table: str,
    checkpoint: Checkpoint,
    previous: int | None,
    change_of: Callable[[DeltaTable], TableChange],
    damaged: Callable[[str], DamageError],
) -> Committed:
    """Commit a checkpoint's change to a table, unless the table has it already.

    Args:
        previous: The id that the chain says was published last; None for none.
        change_of: What is to be committed, on the very version that a handle shows. It is asked again when others have
            committed meanwhile.
        damaged: The error for a table that is not where the chain says, which it gets in words.

    Raises:
        DamageError: The table is gone, ahead or behind, others have restored it to before its newest publish, or they
            commit all the time.
    """
    sink_app, last = f"{app_id}/{table}", ""
    for _ in range(_MAX_RACES):
        try:
            handle = fenced_table.open_table(storage, table_path(table))
        except TableNotFoundError as error:
            raise damaged(f"checkpoint {checkpoint.id} has rows for it, but the table is gone") from error
        version = handle.transaction_version(sink_app)
        if version is not None and version >= checkpoint.id:
            return Committed(_version_of(storage, table, handle, checkpoint.id), handle, None)
        if version != previous:
            raise damaged(f"its last published checkpoint is {version}, but the registry says {previous}")
        restored = None if _restores(checkpoint, table) else set_back(storage, table_path(table), handle, sink_app)
        if restored is not None:
            raise damaged(f"{restored}")
        change = change_of(handle)
        metadata = {CHECKPOINT: str(checkpoint.id), **mark(storage, table), **(change.metadata or {})}
        before = handle.version()
        try:
            if change.removes or change.columns or change.exact:
                _put_after(storage, table, handle, sink_app, checkpoint, change, metadata)
            else:
                fenced_table.commit(handle, sink_app, checkpoint.id, change.adds, (), metadata, _log_cleanup(handle))
        except CommitFailedError as error:
            last = plainly(error)
            continue
        handle.update_incremental()
        # The next version is ours, unless a commit without our app id came first and delta-rs went behind it.
        new = handle.version() - before
        return Committed(
            handle.version() if new == 1 else _version_of(storage, table, handle, checkpoint.id, new), handle, change
        )
    raise damaged(f"{_MAX_RACES} commits in a row failed ({last}); only Weir may write to it")


def _restores(checkpoint: Checkpoint, table: str) -> bool:
    """Return whether a checkpoint brings a table back to an earlier version, whatever others have done to it since."""
    link = checkpoint.sinks.get(table)
    return checkpoint.kind in TAKES_BACK and link is not None and link.column is None


def _put_after(
    storage: Storage,
    table: str,
    handle: DeltaTable,
    sink_app: str,
    checkpoint: Checkpoint,
    change: TableChange,
    metadata: Mapping[str, str],
) -> None:
    """Commit a change as the entry right after the version that it was made for.

    delta-rs would put it behind what others have committed since, although an OPTIMIZE among it has removed these very
    files and added their rows in others: they would be there twice. Raises CommitFailedError where there is another
    entry.
    """
    version = log_entries.read_version(storage, table_path(table), handle, sink_app, [])
    if version is None:
        raise CommitFailedError(f"the entry of version {handle.version()} was cleaned away")
    table_now = log_entries.with_columns(handle, change.columns) if change.columns else None
    log_entries.append(
        version, sink_app, checkpoint.id, change.adds, change.removes, metadata, as_logged=True, table=table_now
    )
    if not log_entries.still_there(version):
        raise CommitFailedError(f"the entry of version {version.number} was cleaned away")
    if is_due(version.number, interval(handle)):
        newest = fenced_table.open_table(storage, table_path(table))
        newest.create_checkpoint()
        with scrubbing():
            newest.cleanup_metadata()


def publication(
    checkpoint: Checkpoint, sink: str, version: int | None, files: int, rows: int, started: float
) -> Publication:
    """Return the registry's record of a publish that ends now.

    Args:
        started: By `time.perf_counter`.
    """
    ms = round((time.perf_counter() - started) * 1000, 3)
    return Publication(checkpoint.id, sink, version, files, rows, datetime.now(UTC), ms)


def interval(handle: DeltaTable) -> int:
    """Return how many versions lie between two Delta checkpoints of a table."""
    return int(handle.metadata().configuration.get("delta.checkpointInterval") or 100)


def is_due(version: int, interval: int) -> bool:
    """Return whether the commit after this version makes delta-rs write a Delta checkpoint.

    delta-rs does so at each version before a multiple of the interval.
    """
    return (version + 2) % interval == 0


def _log_cleanup(handle: DeltaTable) -> PostCommitHookProperties:
    """Delta checkpoints as the table's properties say. Expired entries are looked for only when one is written: it
    takes a listing of the whole log, which has every version of a month."""
    due = is_due(handle.version(), interval(handle))
    return PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=due)


def _version_of(storage: Storage, table: str, handle: DeltaTable, checkpoint: int, among: int = 50) -> int:
    """Return the Delta version, among the newest ones, that published a checkpoint; the newest version if its entry is
    gone."""
    for entry in seen_by(storage, table, handle.history(among)):
        if entry.get(CHECKPOINT) == str(checkpoint):
            return int(entry["version"])
    return handle.version()
