"""`registry/restores`: the result of every restore, for people who ask whether restores work and how long they take.

Nothing is decided from it, so writing it needs no right: a restore on any host appends its row, whoever owns the
pipeline. Every row is in a file of its own. Therefore whoever appends a row now and then rewrites the newest `KEPT`
rows as one file and removes the others.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from state_ops.delta import fenced_table, log_cleanup, log_entries
from state_ops.delta.log_entries import DataFile, active_files
from state_ops.delta.table_files import TableFiles
from state_ops.errors import plainly
from state_ops.logs import Logger
from state_ops.records.restores import Restored
from state_ops.redaction import scrubbing
from state_ops.storage.paths import RESTORES
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together

log = Logger("weir.restore")

_APP = "restores"
KEPT = 1000
"""Rows that stay when the table is compacted: the newest."""
FILES = 100
"""Files above which it is compacted."""
SCHEMA = pa.schema(
    [
        ("restored_at", pa.timestamp("us", tz="UTC")),
        ("checkpoint_id", pa.int64()),
        ("commit_id", pa.string()),
        ("purpose", pa.string()),
        ("valid", pa.bool_()),
        ("problem", pa.string()),
        ("files", pa.int64()),
        ("bytes_total", pa.int64()),
        ("bytes_fetched", pa.int64()),
        ("bytes_cached", pa.int64()),
        ("bytes_local", pa.int64()),
        ("fetch_ms", pa.float64()),
        ("check_ms", pa.float64()),
        ("expectations", pa.int64()),
        ("host", pa.string()),
        ("pid", pa.int64()),
        ("run_id", pa.string()),
    ]
)


def record(storage: Storage, restored: Restored) -> None:
    """Append a row.

    If it cannot be written, that is only logged, so that it does not hide the result of the restore.
    """
    try:
        fenced_table.ensure_table(storage, RESTORES, SCHEMA)
        handle = fenced_table.open_table(storage, RESTORES)
        with scrubbing():
            handle.create_write_transaction(
                [_written(storage, [restored]).add_action()],
                mode="append",
                schema=handle.schema(),
                commit_properties=CommitProperties(max_commit_retries=10),
            )
    except (OSError, DeltaError) as error:
        log.warning("a restore could not be recorded", checkpoint=int(restored.checkpoint_id), error=plainly(error))
        return
    try:
        _compact(storage)
    except (
        OSError,
        DeltaError,
    ) as error:  # another restore was recorded at the same moment, or storage cannot be reached
        log.info("the record of restores stays as it is until the next one", error=plainly(error))


def _compact(storage: Storage) -> None:
    """Put the newest rows into one file if there are many files, and delete the files that had them.

    The commit is the one right after the version that was read, or none, so a row that somebody appends meanwhile is
    not lost. A reader of the version before misses the rows whose files are gone, and nothing depends on those.
    """
    handle = fenced_table.open_table(storage, RESTORES)
    files = _newest_first(handle)
    if len(files) <= FILES:
        return
    before = accumulate((file.rows for file in files), initial=0)  # rows in newer files than each
    rows = _in_order(storage, [file for file, newer in zip(files, before, strict=False) if newer < KEPT])[-KEPT:]
    version = log_entries.read_version(storage, RESTORES, handle, _APP, [])
    if version is None:
        return
    log_entries.append(version, _APP, version.number + 1, [_written(storage, rows)], files, as_logged=True)
    if not log_entries.still_there(version):
        return
    with scrubbing():
        log_cleanup.write_checkpoint(fenced_table.open_table(storage, RESTORES))
    storage.delete_files([f"{RESTORES}/{file.path}" for file in files])
    log_cleanup.clean_up(storage, RESTORES)


def _written(storage: Storage, rows: Sequence[Restored]) -> DataFile:
    """Write rows as a file, which counts once it is committed. delta-rs' own writer ends with a panic where the path
    has a bracket."""
    table = pa.Table.from_pylist([dataclasses.asdict(row) for row in rows], schema=SCHEMA)
    return TableFiles(storage, RESTORES, SCHEMA).write_table(table, f"part-{uuid.uuid4().hex}.parquet")


def newest(storage: Storage) -> Restored | None:
    """Return the restore that was recorded last, read from one file; None if there was none."""
    try:
        handle = fenced_table.open_table(storage, RESTORES)
    except TableNotFoundError:
        return None
    return next(reversed(_in_order(storage, _newest_first(handle)[:1])), None)


def recorded(storage: Storage) -> Sequence[Restored]:
    """Return all restores that are recorded, oldest first."""
    try:
        handle = fenced_table.open_table(storage, RESTORES)
    except TableNotFoundError:
        return []
    return _in_order(storage, active_files(handle))


def _newest_first(handle: DeltaTable) -> list[DataFile]:
    actions = pa.RecordBatchReader.from_stream(handle.get_add_actions(flatten=True)).read_all()
    written = dict(zip(actions["path"].to_pylist(), actions["modification_time"].to_pylist(), strict=True))
    return sorted(active_files(handle), key=lambda file: (written[file.path], file.path), reverse=True)


def _in_order(storage: Storage, files: Sequence[DataFile]) -> list[Restored]:
    def rows(file: DataFile, _: object) -> list[Restored]:
        return _rows(storage, file)

    parts = together(rows, files, at_once=storage.transfers)
    return sorted((row for part in parts for row in part), key=lambda row: row.restored_at)


def _rows(storage: Storage, file: DataFile) -> list[Restored]:
    data = storage.read_bytes(f"{RESTORES}/{file.path}")
    if data is None:
        return []
    columns = {field.name for field in dataclasses.fields(Restored)}
    rows = pq.read_table(pa.BufferReader(data), use_threads=False).to_pylist()
    return [Restored(**{name: value for name, value in row.items() if name in columns}) for row in rows]
