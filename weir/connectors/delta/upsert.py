"""Upserting a checkpoint's rows into a table with keys, as one commit: files with rows of these keys are written anew.

    file 1: keys a..f      changes: b, x, y       file 1 without b's old row and with its new one; file 2 stays as it is
    file 2: keys g..m                             new keys x, y -> a file of their own

Which files may have a key is told by the least and greatest values that the log has of each; which do have one, by the
key columns alone. All of it happens while the commit is made, on the very version that it follows: what others have
done to the table since, an OPTIMIZE for instance, is respected, and whoever comes between makes it happen again. A try
that was cut off leaves files that no log names, which are removed once one has landed. Beside delta-rs' MERGE it is
measured in benchmarks/results/upsert.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from state_ops.arrow import frames
from state_ops.arrow.parquet import staged_writer
from state_ops.delta import fenced_table
from state_ops.delta.log_entries import DataFile, active_files, add_actions, told
from state_ops.ids import new_attempt_id
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.publications import Publication
from state_ops.records.sink_link import SinkLink
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import scratch as scratch_dir
from state_ops.storage.transfers import together
from weir.connectors.delta.append import check_columns, check_demands, check_keyed, damaged
from weir.connectors.delta.changes import ROW, Changes, no_changes, spill
from weir.connectors.delta.replace_where import remove_unnamed
from weir.connectors.delta.restore_version import REWIND, described, files_at, version_of
from weir.connectors.delta.statistics import not_below, statistics
from weir.connectors.delta.table_commit import (
    TableChange,
    branch_of,
    commit,
    local_file,
    publication,
    staging_directory,
    table_path,
)
from weir.connectors.formats.stored_rows import stored_rows
from weir.connectors.staged_rows import StagedRows
from weir.definition.sink import Sink

_SMALL, _MANY = 8 << 20, 16
"""Once a table has that many files of fewer bytes, they are written together with the new rows."""
_NEW_ROWS = 1_000_000  # in one file, at most
_BATCH, _KEY_ROWS = 1 << 17, 1 << 20  # rows that are in memory at a time, whole and by their keys alone
_AT, _FILE = "__weir_at", "__weir_file"


@dataclass(frozen=True, slots=True)
class Upsert:
    """The settings of an upsert into one table.

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
    sink: Sink,
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
    upsert = Upsert(storage, sink.name, sink.capabilities.newest_of, directory, scratch)
    link = checkpoint.sinks.get(sink.name) or SinkLink(checkpoint.id, None)
    merged = Merged()

    with ExitStack() as stack:

        @cache
        def changes() -> Changes:
            return stack.enter_context(spilled(storage, sink, files, scratch, by_epoch=link.branch is not None))

        def change_of(handle: DeltaTable) -> TableChange:
            nonlocal merged
            check_demands(handle, sink.name, checkpoint.id)
            check_keyed(handle, sink.name)
            columns = {field.name: field.type for field in changes().schema}
            new = check_columns(handle, sink.name, checkpoint.id, columns, sink.capabilities.evolves)
            is_now = pa.schema([*frames.canonical_schema(pa.schema(handle.schema().to_arrow())), *new])
            if link.branch is None:
                merged = _merged(upsert, handle, active_files(handle), changes(), is_now)
                return TableChange(merged.adds, merged.removes, columns=new, exact=True)
            then = version_of(storage, handle, sink.name, link.to)
            merged = _on_earlier(upsert, handle, then, changes(), is_now)
            return TableChange(merged.adds, merged.removes, {REWIND: str(link.to or 0), **branch_of(link)}, new)

        committed = commit(
            storage, app_id, sink.name, checkpoint, previous, change_of, partial(damaged, storage, sink.name)
        )
    if committed.change is None:
        return publication(checkpoint, sink.name, committed.version, 0, 0, started)
    remove_unnamed(storage, app_id, sink.name, checkpoint, committed.change.adds)
    touched = len(committed.change.adds) + len(committed.change.removes)
    return publication(checkpoint, sink.name, committed.version, touched, merged.keys, started)


@contextmanager
def spilled(
    storage: Storage, sink: Sink, files: Sequence[StateFile], scratch: Path, *, by_epoch: bool
) -> Iterator[Changes]:
    """Yield the changes of keys that staged rows make, spilled to a local disk.

    Args:
        by_epoch: The files are of several epochs, each file's number in its `subtask`; else of one.
    """
    epochs = sorted({file.subtask for file in files}) if by_epoch else [None]
    parts = [[file for file in files if epoch is None or file.subtask == epoch] for epoch in epochs]
    staged = [StagedRows(storage, part, scratch) for part in parts if part]
    schemas = [rows.schema for rows in staged if rows.schema is not None]
    if not schemas:
        yield no_changes(sink)
        return
    with scratch_dir(scratch, "weir-upsert-") as directory:
        yield spill(sink, pa.unify_schemas(schemas), [rows.batches() for rows in staged], directory / "rows")


def _on_earlier(upsert: Upsert, handle: DeltaTable, then: int | None, changes: Changes, schema: pa.Schema) -> Merged:
    """Return the changes, made to an earlier version of the table: what came since goes in the same commit."""
    now = {file.path: file for file in active_files(handle)}
    was = files_at(upsert.storage, upsert.table, then)
    base = handle if then is None else fenced_table.open_table(upsert.storage, table_path(upsert.table), then)
    merged = _merged(upsert, base, was, changes, schema)
    gone = {file.path for file in merged.removes}
    stays = {file.path: file for file in was if file.path not in gone}
    back = [described(upsert.storage, upsert.table, file) for path, file in stays.items() if path not in now]
    goes = [file for path, file in now.items() if path not in stays]
    return Merged([*back, *merged.adds], goes, merged.keys)


# -- merging


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of merging changes into a table's version: files that come, files that go, and the number of keys."""

    adds: Sequence[DataFile] = ()
    removes: Sequence[DataFile] = ()
    keys: int = 0


def _merged(
    upsert: Upsert, handle: DeltaTable, active: Sequence[DataFile], changes: Changes, schema: pa.Schema
) -> Merged:
    """Return the schema after the merge.

    schema: The columns of the files that come.
    """
    if not changes.count:
        return Merged()
    places = _placed(upsert, handle, active, changes)
    small = [file for file in active if file.bytes < _SMALL]
    gathered = {file.path for file in small} if len(small) >= _MANY else set()
    rewritten = [file for file in active if file.path in places.matches and file.path not in gathered]

    def write(file: DataFile, _: object) -> DataFile | None:
        return _rewrite(upsert, schema, [(file, places.of(file))], changes, _NO_ROWS)

    adds = together(write, rewritten, at_once=upsert.storage.transfers)
    together_with = [(file, places.of(file)) for file in small if file.path in gathered]
    for start in range(0, max(len(places.fresh), 1), _NEW_ROWS):
        adds.append(_rewrite(upsert, schema, together_with, changes, places.fresh[start : start + _NEW_ROWS]))
        together_with = []
    removes = [file for file in active if file.path in gathered or file.path in places.matches]
    return Merged([file for file in adds if file is not None], removes, places.keys)


_NO_MATCH = pl.DataFrame({_AT: [], ROW: []}, schema={_AT: pl.Int64, ROW: pl.Int64})
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Places:
    """The places of changed rows. It takes some bytes for each of them, whatever the rows hold.

    Attributes:
        matches: By a file's path, its rows that have one of the keys: where they are, and the number of the row that
            comes instead, null for none.
        fresh: The numbers of the rows that no file gets, in the order of their keys, so that files can be skipped.
        keys: How many are changed.
    """

    matches: Mapping[str, pl.DataFrame]
    fresh: np.ndarray[Any, Any]
    keys: int

    def of(self, file: DataFile) -> pl.DataFrame:
        return self.matches.get(file.path, _NO_MATCH)


def _placed(upsert: Upsert, handle: DeltaTable, active: Sequence[DataFile], changes: Changes) -> Places:
    """Ask the files that may have one of the keys for their key columns, keys range by range."""
    bounds = _bounds(handle, upsert.key[0])
    matches: dict[str, list[pl.DataFrame]] = {}
    taken, fresh, number = np.zeros(changes.count, bool), [_NO_ROWS], 0

    def look(candidate: tuple[DataFile, pl.DataFrame], _: object) -> pl.DataFrame:
        return _matches(upsert, *candidate)

    for keys in changes.ranges():
        number += len(keys)
        candidates = [(file, some) for file in active if len(some := _possible(keys, upsert.key[0], bounds, file))]
        looked = together(look, candidates, at_once=upsert.storage.transfers)
        for (file, _), rows in zip(candidates, looked, strict=True):
            if len(rows):
                matches.setdefault(file.path, []).append(_once(rows, taken))
        comes = keys[ROW].drop_nulls().to_numpy()
        fresh.append(comes[~taken[comes]])
    sorted_by_place = {path: pl.concat(parts).sort(_AT) for path, parts in matches.items()}
    return Places(sorted_by_place, np.concatenate(fresh), number)


Bounds = Mapping[str, tuple[Any, Any]]


def _bounds(handle: DeltaTable, column: str) -> Bounds:
    """Return by a file's path the least and the greatest value of a column, as the log has them."""
    actions = add_actions(handle)
    low, high = told(actions, "min").get(column), told(actions, "max").get(column)
    if low is None or high is None:
        return {}
    values = zip(low, map(not_below, high), strict=True)
    return dict(zip(actions.column("path").to_pylist(), values, strict=True))


def _possible(keys: pl.DataFrame, column: str, bounds: Bounds, file: DataFile) -> pl.DataFrame:
    """Return the keys, of some in order, that a file may have."""
    least, greatest = bounds.get(file.path, (None, None))
    type = keys.schema[column]
    if least is None or greatest is None or not (type == pl.String or type.is_integer() or type == pl.Date):
        return keys
    first = int(keys[column].search_sorted(least, side="left"))
    return keys.slice(first, int(keys[column].search_sorted(greatest, side="right")) - first)


def _matches(upsert: Upsert, file: DataFile, keys: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of a file that have one of the keys: where they are, and which row comes instead, null for
    none."""
    matches, at = [_NO_MATCH], 0
    columns = keys.clear().select(upsert.key).to_arrow().schema
    with local_file(upsert.storage, upsert.table, file, upsert.scratch) as local, stored_rows(local) as source:
        for rows in source.batches(_KEY_ROWS, upsert.key):
            here = pl.from_arrow(frames.aligned(rows, columns))
            assert isinstance(here, pl.DataFrame)
            joined = here.with_row_index(_AT, at).join(keys, on=list(upsert.key), how="inner")
            matches.append(joined.select(pl.col(_AT).cast(pl.Int64), ROW))
            at += rows.num_rows
    return pl.concat(matches)


def _once(matches: pl.DataFrame, taken: np.ndarray[Any, Any]) -> pl.DataFrame:
    """Return matches in which each new row comes at most once, and not at all if it is taken.

    Notes which rows are taken from now on: a table of others may have several rows of a key.
    """
    numbers = matches[ROW].fill_null(0).to_numpy()
    comes = (matches[ROW].is_not_null() & matches[ROW].is_first_distinct()).to_numpy() & ~taken[numbers]
    taken[numbers[comes]] = True
    return matches.with_columns(pl.when(pl.Series(comes)).then(pl.col(ROW)).alias(ROW))


def _rewrite(
    upsert: Upsert,
    schema: pa.Schema,
    files: Sequence[tuple[DataFile, pl.DataFrame]],
    changes: Changes,
    fresh: np.ndarray[Any, Any],
) -> DataFile | None:
    """Write files anew as one, without the rows that match and with those that come instead, and fresh ones; None if
    nothing is left."""
    if not files and not len(fresh):
        return None
    with scratch_dir(upsert.scratch, "weir-upsert-") as directory:
        target, rows = directory / "file", 0
        with staged_writer(target, schema) as writer:
            for file, matches in files:
                rows += _copy_rest(upsert, file, matches[_AT].to_numpy(), writer, schema)
                rows += _write_changed(writer, changes, matches[ROW].drop_nulls().to_numpy(), schema)
            rows += _write_changed(writer, changes, fresh, schema)
        if not rows:
            return None
        path = f"{upsert.directory}/0-{new_attempt_id()}.parquet"
        size, _digest = upsert.storage.put_file(target, f"{table_path(upsert.table)}/{path}")
        return DataFile(path, size, rows, statistics=statistics(pq.read_metadata(target)))


def _copy_rest(
    upsert: Upsert, file: DataFile, without: np.ndarray[Any, Any], writer: pq.ParquetWriter, schema: pa.Schema
) -> int:
    rows, begin = 0, 0
    with local_file(upsert.storage, upsert.table, file, upsert.scratch) as local, stored_rows(local) as source:
        for batch in source.batches(_BATCH):
            end = begin + batch.num_rows
            inside = without[np.searchsorted(without, begin) : np.searchsorted(without, end)] - begin
            if len(inside):
                kept = np.ones(batch.num_rows, bool)
                kept[inside] = False
                batch = batch.filter(pa.array(kept))
            rows += _write(writer, batch, schema)
            begin = end
    return rows


def _write_changed(writer: pq.ParquetWriter, changes: Changes, numbers: np.ndarray[Any, Any], schema: pa.Schema) -> int:
    parts = [numbers[start : start + _BATCH] for start in range(0, len(numbers), _BATCH)]
    return sum(_write(writer, changes.rows(part), schema) for part in parts)


def _write(writer: pq.ParquetWriter, rows: pa.Table, schema: pa.Schema) -> int:
    if rows.num_rows:
        writer.write_table(frames.aligned(rows, schema))
    return int(rows.num_rows)
