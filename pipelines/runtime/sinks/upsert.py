"""Upserting a checkpoint's rows into a table with keys, as one commit: files with rows of these keys are written anew.

    file 1: keys a..f      changes: b, x, y       file 1 without b's old row and with its new one; file 2 stays as it is
    file 2: keys g..m                             new keys x, y -> a file of their own

Which files may have a key is told by the least and greatest values that the log has of each; which do have one, by the
key columns alone. All of it happens while the commit is made, on the very version that it follows: what others have
done to the table since, an OPTIMIZE for instance, is respected, and whoever comes between makes it happen again. A try
that was cut off leaves files that no log names, which are removed once one has landed. `benchmarks.upsert` compares
this with delta-rs' MERGE.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from pipelines.runtime.connectors.delta_sink import UpsertSink
from pipelines.runtime.sinks.changes import ROW, Changes, net
from pipelines.runtime.sinks.delta import check_demands, check_keyed, damaged
from pipelines.runtime.sinks.replace_where import remove_unnamed
from pipelines.runtime.sinks.restore_version import REWIND, described, files_at, version_of
from pipelines.runtime.sinks.staged_rows import StagedRows
from pipelines.runtime.sinks.statistics import statistics
from pipelines.runtime.sinks.table_commit import (
    Change,
    branch_of,
    commit,
    file_path,
    publication,
    staging_directory,
    table_path,
)
from state_ops.arrow import frames
from state_ops.arrow.parquet import staged_writer
from state_ops.checkpoints.checkpoint import Checkpoint, StateFile
from state_ops.checkpoints.registry import Publication
from state_ops.delta import fenced_table
from state_ops.delta.log_entries import DataFile, active_files
from state_ops.ids import new_attempt_id
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import scratch as scratch_dir
from state_ops.storage.transfers import together

_SMALL, _MANY = 8 << 20, 16
"""Once a table has that many files of fewer bytes, they are written together with the new rows."""
_NEW_ROWS = 1_000_000  # in one file, at most
_AT, _FILE = "__weir_at", "__weir_file"


@dataclass(frozen=True, slots=True)
class Upsert:
    """What is upserted into one table.

    Attributes:
        storage: The pipeline's.
        table: The table's name.
        key: Its key columns.
        directory: For new files, relative to the table.
        scratch: For files that are read or written, one for each transfer at a time.
    """

    storage: Storage
    table: str
    key: tuple[str, ...]
    directory: str
    scratch: Path


def publish(
    storage: Storage,
    app_id: str,
    sink: UpsertSink,
    checkpoint: Checkpoint,
    previous: int | None,
    files: Sequence[StateFile],
    scratch: Path,
) -> Publication:
    """Bring a checkpoint's rows into the table, exactly once however often this is called.

    Of a promotion these are a branch's rows since the fork, epoch by epoch, and the table is what it was then.

    Args:
        previous: The id that the chain says was published last, None for none.
        files: Staged rows. Of a promotion the number of its epoch is the file's `subtask`.
        scratch: A directory for files, one for each transfer at a time.

    Raises:
        DamageError: The table is not where the registry says.
    """
    started = time.perf_counter()
    directory = staging_directory(storage, app_id, sink.name, checkpoint).removeprefix(f"{table_path(sink.name)}/")
    upsert = Upsert(storage, sink.name, sink.key, directory, scratch)
    ids = checkpoint.sinks.get(sink.name) or {}
    promoted = "branch" in ids
    counted: list[int] = []

    def change_of(handle: DeltaTable) -> Change:
        check_demands(handle, sink.name, checkpoint.id)
        check_keyed(handle, sink.name)
        changes = netted(storage, sink, files, scratch, by_epoch=promoted)
        counted[:] = [changes.rows.num_rows + changes.deleted.num_rows]
        if not promoted:
            return Change(*_merged(upsert, handle, active_files(handle), changes))
        then = version_of(storage, handle, sink.name, ids["to"])
        return _on_earlier(upsert, handle, then, changes, {REWIND: str(ids["to"] or 0), **branch_of(ids)})

    committed = commit(
        storage, app_id, sink.name, checkpoint, previous, change_of, partial(damaged, storage, sink.name)
    )
    if committed.change is None:
        return publication(checkpoint, sink.name, committed.version, 0, 0, started)
    remove_unnamed(storage, app_id, sink.name, checkpoint, committed.change.adds)
    touched = len(committed.change.adds) + len(committed.change.removes)
    return publication(checkpoint, sink.name, committed.version, touched, counted[0], started)


def netted(storage: Storage, sink: UpsertSink, files: Sequence[StateFile], scratch: Path, *, by_epoch: bool) -> Changes:
    """What staged rows make of each key.

    Args:
        by_epoch: The files are of several epochs, each file's number in its `subtask`; else of one.
    """
    epochs = sorted({file.subtask for file in files}) if by_epoch else [None]
    parts = [[file for file in files if epoch is None or file.subtask == epoch] for epoch in epochs]
    staged = [StagedRows(storage, part, scratch) for part in parts if part]
    schema = next((rows.schema for rows in staged if rows.schema is not None), None)
    if schema is None:
        none = pa.schema([]).empty_table()
        return Changes(none, none)
    return net(sink, schema, [rows.batches() for rows in staged], ordered=bool(sink.order_by))


def _on_earlier(
    upsert: Upsert, handle: DeltaTable, then: int | None, changes: Changes, metadata: Mapping[str, str]
) -> Change:
    """The changes, made to an earlier version of the table: what came since goes in the same commit."""
    now = {file.path: file for file in active_files(handle)}
    was = files_at(upsert.storage, upsert.table, then)
    adds: list[DataFile] = []
    removes: list[DataFile] = []
    if then is not None and changes.rows.num_rows + changes.deleted.num_rows:
        earlier = fenced_table.open_table(upsert.storage, table_path(upsert.table), then)
        adds, removes = _merged(upsert, earlier, was, changes)
    elif changes.rows.num_rows:
        adds, removes = _merged(upsert, handle, [], changes)
    gone = {file.path for file in removes}
    stays = {file.path: file for file in was if file.path not in gone}
    back = [described(upsert.storage, upsert.table, file) for path, file in stays.items() if path not in now]
    return Change([*back, *adds], [file for path, file in now.items() if path not in stays], metadata)


# -- merging


def _merged(
    upsert: Upsert, handle: DeltaTable, active: Sequence[DataFile], changes: Changes
) -> tuple[list[DataFile], list[DataFile]]:
    """What changes add to a version of the table and remove from it."""
    if not changes.rows.num_rows + changes.deleted.num_rows:
        return [], []
    schema = frames.canonical_schema(pa.schema(handle.schema().to_arrow()))
    keys = changes.keys(upsert.key)
    candidates = _candidates(handle, active, keys, upsert.key[0])

    def look(file: DataFile, _: object) -> pl.DataFrame:
        return _matches(upsert, file, keys)

    looked = together(look, candidates, at_once=upsert.storage.transfers)
    found = [(file, rows) for file, rows in zip(candidates, looked, strict=True) if len(rows)]
    placed = _placed(found, keys)
    small = [file for file in active if file.bytes < _SMALL]
    gathered = {file.path for file in small} if len(small) >= _MANY else set()
    matched = {file.path: rows for file, rows in placed}
    rewritten = [file for file, _ in placed if file.path not in gathered]

    updated = pa.array(np.concatenate([rows[ROW].drop_nulls().to_numpy() for _, rows in placed] or [np.empty(0, int)]))
    fresh = _rest(changes.rows, updated, upsert.key)

    def write(file: DataFile, _: object) -> DataFile | None:
        return _rewrite(upsert, schema, [(file, matched[file.path])], changes.rows, None)

    adds = together(write, rewritten, at_once=upsert.storage.transfers)
    together_with = [(file, matched.get(file.path, _NO_MATCH)) for file in small if file.path in gathered]
    for start in range(0, max(fresh.num_rows, 1), _NEW_ROWS):
        adds.append(_rewrite(upsert, schema, together_with, changes.rows, fresh.slice(start, _NEW_ROWS)))
        together_with = []
    removes = [file for file in active if file.path in gathered or file.path in matched]
    return [file for file in adds if file is not None], removes


_NO_MATCH = pl.DataFrame({_AT: [], ROW: []}, schema={_AT: pl.UInt32, ROW: pl.Int64})


def _rest(rows: pa.Table, taken: pa.Array, key: Sequence[str]) -> pa.Table:
    """The rows that no file of the table gets, in the order of their keys, so that files can be skipped."""
    left = np.ones(rows.num_rows, bool)
    left[taken.to_numpy(zero_copy_only=False)] = False
    rows = rows.filter(pa.array(left))
    return rows.sort_by([(name, "ascending") for name in key]) if rows.num_rows else rows


def _candidates(handle: DeltaTable, active: Sequence[DataFile], keys: pl.DataFrame, column: str) -> list[DataFile]:
    """The files that may have one of these keys, by the bounds that the log has of the first key column."""
    actions = pa.RecordBatchReader.from_stream(handle.get_add_actions(flatten=True)).read_all()
    low, high = f"min.{column}", f"max.{column}"
    wanted = keys[column].unique().sort()
    comparable = wanted.dtype == pl.String or wanted.dtype.is_integer() or wanted.dtype == pl.Date
    if not comparable or low not in actions.column_names or high not in actions.column_names:
        return list(active)
    bounds = dict(
        zip(
            actions.column("path").to_pylist(),
            zip(actions.column(low).to_pylist(), actions.column(high).to_pylist(), strict=True),
            strict=True,
        )
    )

    def may_have(file: DataFile) -> bool:
        least, greatest = bounds.get(file.path, (None, None))
        if least is None or greatest is None:
            return True
        first = int(wanted.search_sorted(least, side="left"))
        return first < len(wanted) and bool(wanted[first] <= greatest)

    return [file for file in active if may_have(file)]


def _matches(upsert: Upsert, file: DataFile, keys: pl.DataFrame) -> pl.DataFrame:
    """The rows of a file that have one of the keys: where they are, and which row comes instead, null for none."""
    with _local(upsert, file) as local:
        rows = frames.canonical(pq.read_table(local, columns=list(upsert.key), use_threads=False))
    here = pl.from_arrow(rows)
    assert isinstance(here, pl.DataFrame)
    return here.with_row_index(_AT).join(keys, on=list(upsert.key), how="inner").select(_AT, ROW).sort(_AT)


def _placed(found: Sequence[tuple[DataFile, pl.DataFrame]], keys: pl.DataFrame) -> list[tuple[DataFile, pl.DataFrame]]:
    """The matches, each new row at most once: a table that was no one's may have several rows of a key."""
    taken = np.zeros(len(keys) + 1, bool)
    placed = []
    for file, rows in found:
        first = rows.with_columns(pl.when(pl.col(ROW).is_first_distinct()).then(pl.col(ROW)).otherwise(None).alias(ROW))
        numbers = first[ROW].fill_null(len(keys)).to_numpy()
        again = taken[numbers]
        taken[numbers[numbers < len(keys)]] = True
        placed.append(
            (file, first.with_columns(pl.when(pl.Series(again)).then(None).otherwise(pl.col(ROW)).alias(ROW)))
        )
    return placed


def _rewrite(
    upsert: Upsert,
    schema: pa.Schema,
    files: Sequence[tuple[DataFile, pl.DataFrame]],
    changed: pa.Table,
    fresh: pa.Table | None,
) -> DataFile | None:
    """Write files anew as one, without the rows that match and with those that come instead, and fresh ones; None if
    nothing is left."""
    if not files and (fresh is None or not fresh.num_rows):
        return None
    with scratch_dir(upsert.scratch, "weir-upsert-") as directory:
        target, rows = directory / "file", 0
        with staged_writer(target, schema) as writer:
            for file, matches in files:
                rows += _copy_rest(upsert, file, matches[_AT].to_numpy(), writer, schema)
                comes = matches[ROW].drop_nulls()
                rows += _write(writer, changed.take(pa.array(comes.to_arrow())), schema)
            if fresh is not None:
                rows += _write(writer, fresh, schema)
        if not rows:
            return None
        path = f"{upsert.directory}/0-{new_attempt_id()}.parquet"
        size, _digest = upsert.storage.put_file(target, f"{table_path(upsert.table)}/{path}")
        return DataFile(path, size, rows, statistics=statistics(pq.read_metadata(target)))


def _copy_rest(
    upsert: Upsert, file: DataFile, without: np.ndarray[Any, Any], writer: pq.ParquetWriter, schema: pa.Schema
) -> int:
    rows, begin = 0, 0
    with _local(upsert, file) as local, pq.ParquetFile(local) as source:
        for batch in source.iter_batches(1 << 17, use_threads=False):
            end = begin + batch.num_rows
            inside = without[np.searchsorted(without, begin) : np.searchsorted(without, end)] - begin
            if len(inside):
                kept = np.ones(batch.num_rows, bool)
                kept[inside] = False
                batch = batch.filter(pa.array(kept))
            rows += _write(writer, pa.Table.from_batches([batch]), schema)
            begin = end
    return rows


def _write(writer: pq.ParquetWriter, rows: pa.Table, schema: pa.Schema) -> int:
    if rows.num_rows:
        writer.write_table(frames.aligned(frames.canonical(rows), schema))
    return rows.num_rows


@contextmanager
def _local(upsert: Upsert, file: DataFile) -> Iterator[Path]:
    """A file of the table on a local disk, where it is there already, or a copy of it."""
    path = file_path(upsert.table, file)
    if upsert.storage.is_local:
        yield Path(upsert.storage.full(path).removeprefix("file://"))
        return
    with upsert.storage.fetched(path, upsert.scratch) as local:
        yield local
