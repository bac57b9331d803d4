"""Delta append sinks: publishing a completed checkpoint is one metadata-only commit of its staged files.

The chain of published ids stands in the checkpoints' rows (`sinks`): a table whose version is not where the chain says
is damaged.

A table that is as this process left it needs no opening: `PublishedTable` knows its newest version, and the next commit
is the put of the entry after it. Where anybody else has committed since, delta-rs looks at the table anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from state_ops.arrow.frames import canonical_type
from state_ops.arrow.types import parts
from state_ops.counts import counted
from state_ops.delta import fenced_table, log_entries
from state_ops.delta.log_entries import DataFile, TableVersion
from state_ops.delta.set_back import set_back
from state_ops.errors import DamageError, PipelineError
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.publications import Publication
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together
from weir.connectors.delta.table_commit import (
    CHECKPOINT,
    Committed,
    TableChange,
    commit,
    data_files,
    file_path,
    footer_of,
    interval,
    is_due,
    mark,
    publication,
    table_path,
)

log = Logger("weir.sink")

_WRITER = 2  # newer protocols may ask of a commit what only delta-rs knows

# Table features that ask nothing of a commit of whole files, or only where a column or property says so, which is
# looked at by itself.
_INERT = {
    "appendOnly",
    "invariants",
    "checkConstraints",
    "generatedColumns",
    "changeDataFeed",
    "timestampNtz",
    "columnMapping",
}
_FEATURES = 7  # the writer protocol that names its features
_IMPLIED = {6: {"identityColumns"}}  # by protocols that do not, beside the inert ones


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as this process has left it.

    Attributes:
        version: Of its log.
        columns: Name -> canonical type.
        interval: Versions between Delta checkpoints, which delta-rs writes.
    """

    version: TableVersion
    columns: Mapping[str, pa.DataType]
    interval: int

    def is_free(self, number: int | None, sink_app: str) -> bool:
        """Return whether the next publish may be a plain put.

        The table must be at this transaction version, and no Delta checkpoint may be due.
        """
        return self.version.transaction_version(sink_app) == number and not is_due(self.version.number, self.interval)


def ensure(
    storage: Storage,
    table: str,
    schema: pa.Schema,
    *,
    keyed: bool = False,
    partition_by: Sequence[str] = (),
    evolves: bool = False,
) -> None:
    """Create the table, or check the existing one. Only right before a commit: a declined epoch must not leave a table.

    Columns that the table lacks come with the commit that has the rows. Arguments as of `check_table`.
    """
    _check_names(table, storage.full(table_path(table)), schema)
    fenced_table.ensure_table(storage, table_path(table), schema, partition_by)
    check_table(storage, table, schema, keyed=keyed, partition_by=partition_by, evolves=evolves)


def fits(left: PublishedTable, schema: pa.Schema, *, evolves: bool = False) -> bool:
    """Return whether the table has these columns for certain.

    It is certain if only rows of others were added since this process left the table.

    Args:
        evolves: It may have more.
    """
    columns = {field.name: field.type for field in schema}
    same = columns.items() <= left.columns.items() if evolves else left.columns == columns
    return same and log_entries.newest_after(left.version, "") is not None


def check_table(
    storage: Storage,
    table: str,
    schema: pa.Schema,
    *,
    keyed: bool = False,
    partition_by: Sequence[str] | None = (),
    evolves: bool = False,
) -> None:
    """Check that the table, if there is one, has these columns and that Weir can commit to it. Raises PipelineError.

    It may be a table that others have made or altered: delta-rs commits files to some whose rows readers then take for
    others.

    Args:
        evolves: It gets columns that are new, and those that rows have no more are null in them.
    """
    uri = storage.full(table_path(table))
    _check_names(table, uri, schema)
    try:
        handle = fenced_table.open_table(storage, table_path(table))
    except TableNotFoundError:
        return
    if handle.metadata().configuration.get("delta.setTransactionRetentionDuration"):
        raise PipelineError(
            f"The table {table} forgets transaction versions (delta.setTransactionRetentionDuration).",
            where=uri,
            next="Unset that property: exactly-once publishing reads those versions.",
        )
    check_demands(handle, table, None, partition_by)
    if keyed:
        check_keyed(handle, table)
    was, now = _columns(handle), {field.name: field.type for field in schema}
    if evolves:
        _check_names(table, uri, _together(was, now))
        was, now = ({name: columns[name] for name in was if name in now} for columns in (was, now))
    changes = _changes(was, now)
    if changes:
        new = "" if evolves or any(now.get(name) != type for name, type in was.items()) else ', or say evolve="add"'
        raise PipelineError(
            f"The output for the table {table} changed: {changes}.",
            where=uri,
            next=f"Keep its columns{new}, or write to a table of another name.",
        )


def check_committed(
    storage: Storage,
    handle: DeltaTable,
    table: str,
    checkpoint: CheckpointId,
    adds: Sequence[DataFile],
    *,
    evolves: bool = False,
    footers: Mapping[str, pq.FileMetaData] | None = None,
) -> list[pa.Field]:
    """Check before a committed checkpoint's files go into the table that it still takes them: somebody may have altered
    it since.

    Its rows can go nowhere else any more; columns that were added to the table are NULL in them. Raises PipelineError,
    and DamageError for a file that cannot be read.

    Args:
        evolves: The table gets the columns that it lacks.
        footers: Of files, by path, as far as they are known.

    Returns:
        The columns that the commit has to add.
    """
    check_demands(handle, table, checkpoint, partitioned_by(adds) if adds else None)
    return check_columns(handle, table, checkpoint, _columns_of(storage, table, adds, evolves, footers), evolves)


def check_columns(
    handle: DeltaTable, table: str, checkpoint: CheckpointId, columns: Mapping[str, pa.DataType], evolves: bool
) -> list[pa.Field]:
    """Return the columns that a table gets with the commit of a checkpoint.

    Raises PipelineError if the table's other columns are not those of the checkpoint's rows.
    """
    has = _columns(handle)
    new = [pa.field(name, type) for name, type in columns.items() if name not in has] if evolves else []
    was = {name: type for name, type in columns.items() if name in has or not evolves}
    if changes := _changes(was, {name: type for name, type in has.items() if name in was}):
        raise PipelineError(
            f"The table {table} has other columns than the rows of checkpoint {checkpoint}: {changes}.",
            where=handle.table_uri,
            next=_undo(checkpoint),
        )
    if new:
        _check_names(table, handle.table_uri, _together(has, columns), checkpoint)
        log.info("a table gets new columns", table=table, columns=[field.name for field in new])
    return new


def _together(was: Mapping[str, pa.DataType], now: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema({**was, **now}.items())


def _check_names(table: str, uri: str, columns: pa.Schema, committed: CheckpointId | None = None) -> None:
    """Refuse columns whose names differ in case alone: nobody could open the table any more.

    committed: as of `check_demands`."""
    if alike := next(_alike(columns), None):
        raise PipelineError(
            f"The table {table} would have the columns {alike}, which Delta does not tell apart.",
            where=uri,
            next="Rename the new one." if committed is None else _undo(committed),
        )


def _alike(fields: Iterable[pa.Field], path: str = "") -> Iterator[str]:
    names: dict[str, str] = {}
    for field in fields:
        other = names.setdefault(field.name.lower(), field.name)
        if other != field.name:
            yield f"{path}{other} and {path}{field.name}"
        if pa.types.is_nested(field.type):
            yield from _alike(parts(field.type), f"{path}{field.name}.")


def partitioned_by(files: Sequence[DataFile]) -> tuple[str, ...]:
    """Return the partition columns of some files."""
    return tuple(dict.fromkeys(name for file in files for name, _ in file.partition))


def check_demands(
    handle: DeltaTable,
    table: str,
    committed: CheckpointId | None = None,
    partition_by: Sequence[str] | None = (),
) -> None:
    """Check that the table, as this handle shows it, asks of a commit nothing but its files. Raises PipelineError.

    Args:
        committed: The checkpoint whose rows must go into it; None: they may still go elsewhere.
        partition_by: How these files are partitioned; None: there are none.
    """
    demands = list(_demands(handle, partition_by))
    if demands:
        cures = "; ".join(dict.fromkeys(cure for _, cure in demands))
        raise PipelineError(
            f"Weir cannot write to the table {table} as it is: {'; '.join(what for what, _ in demands)}.",
            where=handle.table_uri,
            next=f"{cures}; or write to a table of another name." if committed is None else _undo(committed, cures),
        )


def check_keyed(handle: DeltaTable, table: str) -> None:
    """Check that files of the table may be written anew without what readers of its changes expect. Raises
    PipelineError."""
    for name in ("delta.enableChangeDataFeed", "delta.appendOnly"):
        if handle.metadata().configuration.get(name, "false").lower() == "true":
            raise PipelineError(
                f"Weir cannot replace rows of the table {table}: {name} is set.",
                where=handle.table_uri,
                next=f"ALTER TABLE … UNSET TBLPROPERTIES ('{name}'); or write to a table of another name.",
            )


def _undo(committed: CheckpointId, how: str = "RESTORE TABLE … TO VERSION AS OF …") -> str:
    return (
        f"Checkpoint {committed} is committed, and its rows must go into this very table. "
        f"Undo the change there and keep its log ({how}), then run again."
    )


def _changes(was: Mapping[str, pa.DataType], now: Mapping[str, pa.DataType]) -> str:
    """Return the differences between columns, in words. It is empty if there are none. Their order does not count."""
    changes = [f"{name} is new" for name in now if name not in was]
    changes += [f"{name} is gone" for name in was if name not in now]
    changes += [f"{name} was {was[name]}, is {now[name]}" for name in now if name in was and was[name] != now[name]]
    return "; ".join(changes)


def _demands(handle: DeltaTable, partition_by: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    """Yield each demand of the table on its writers that Weir does not meet, with the way to undo it."""
    metadata, protocol = handle.metadata(), handle.protocol()
    partitions = metadata.partition_columns
    if partition_by is not None and list(partition_by) != partitions:
        wanted = f"by {', '.join(partition_by)}" if partition_by else "without partitions"
        yield f"it is partitioned by {', '.join(partitions) or 'nothing'}", f"Write it anew {wanted}"
    if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
        yield "its columns are mapped (delta.columnMapping.mode)", "Write it anew without column mapping"
    for name in metadata.configuration:
        if name.startswith("delta.constraints."):
            constraint = name.removeprefix("delta.constraints.")
            yield f"it has the constraint {constraint}", f"ALTER TABLE … DROP CONSTRAINT {constraint}"
    for path, field in _fields(json.loads(handle.schema().to_json())):
        if not field["nullable"]:
            yield f"{path} is NOT NULL", f"ALTER TABLE … ALTER COLUMN {path} DROP NOT NULL"
        for name in field["metadata"]:
            if name.startswith("delta.") and not name.startswith("delta.columnMapping."):
                yield f"{path} has {name}", f"Write it anew without {name}"
    named = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
    features = named if protocol.min_writer_version >= _FEATURES else _IMPLIED.get(protocol.min_writer_version, set())
    for name in sorted(features - _INERT):
        yield f"it has the table feature {name}", f"ALTER TABLE … DROP FEATURE {name}"


def _fields(type: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the columns of a Delta schema in JSON, those within others too, by their paths as in SQL; items of arrays
    and maps as columns."""
    if not isinstance(type, dict):
        return
    prefix = f"{path}." if path else ""
    if type["type"] == "struct":
        inside = [(field["name"], field) for field in type["fields"]]
    elif type["type"] == "array":
        inside = [("element", {"type": type["elementType"], "nullable": type["containsNull"], "metadata": {}})]
    else:
        item = {"type": type["valueType"], "nullable": type["valueContainsNull"], "metadata": {}}
        inside = [("key", {"type": type["keyType"], "nullable": True, "metadata": {}}), ("value", item)]
    for name, field in inside:
        yield f"{prefix}{name}", field
        yield from _fields(field["type"], f"{prefix}{name}")


def _columns(handle: DeltaTable) -> dict[str, pa.DataType]:
    return _canonical(pa.schema(handle.schema().to_arrow()))


def _columns_of(
    storage: Storage,
    table: str,
    adds: Sequence[DataFile],
    differ: bool,
    footers: Mapping[str, pq.FileMetaData] | None,
) -> dict[str, pa.DataType]:
    """Return the columns of committed files, by their footers. differ: some may have more than others. Raises
    DamageError."""
    columns: dict[str, pa.DataType] = {}
    for file in adds if differ else adds[:1]:
        path = file_path(table, file)
        footer = (footers or {}).get(path) or footer_of(storage, path)
        columns |= _canonical(footer.schema.to_arrow_schema())
    return columns


def _canonical(schema: pa.Schema) -> dict[str, pa.DataType]:
    return {field.name: canonical_type(field.type) for field in schema}


def check(
    storage: Storage, files: Sequence[StateFile], schemas: Mapping[tuple[str, str], pa.Schema]
) -> dict[str, pq.FileMetaData]:
    """Raise DamageError unless staged files are fit for the commit, since Delta checks none of this.

    The files must exist, and have the recorded size, number of rows, and the schema of their (operator, output).

    Returns:
        Their footers by path, which tell what the tables' logs are to say of them.
    """

    def problem_of(file: StateFile, _: object) -> str | pq.FileMetaData:
        return _problem(storage, file, schemas[file.operator, file.name])

    footers = {}
    for file, problem in zip(files, together(problem_of, files, at_once=storage.transfers), strict=True):
        if not isinstance(problem, str):
            footers[file.path] = problem
        else:
            raise DamageError(
                f"A staged file {problem}.",
                where=storage.full(file.path),
                next="The epoch was declined; find out who deletes or alters files below the pipeline's root.",
            )
    return footers


def _problem(storage: Storage, file: StateFile, schema: pa.Schema) -> str | pq.FileMetaData:
    try:
        footer, size = storage.parquet_end(file.path)
    except FileNotFoundError:
        return "is gone"
    except pa.ArrowException as error:
        stored = storage.size(file.path)
        if stored == file.bytes:
            return f"is not readable Parquet: {error}"
        return f"has {stored} bytes instead of {file.bytes}"
    if size != file.bytes:
        return f"has {size} bytes instead of {file.bytes}"
    if footer.num_rows != file.rows:
        return f"has {counted(footer.num_rows, 'row')} instead of {file.rows}"
    if not footer.schema.to_arrow_schema().equals(schema):
        return f"has the columns {footer.schema.to_arrow_schema()} instead of {schema}"
    return footer


def publish(
    storage: Storage,
    app_id: str,
    table: str,
    checkpoint: Checkpoint,
    previous: int | None,
    files: Sequence[StateFile],
    left: MutableMapping[str, PublishedTable] | None = None,
    footers: Mapping[str, pq.FileMetaData] | None = None,
    *,
    evolves: bool = False,
) -> Publication:
    """Make a checkpoint's rows visible in one table, exactly once however often this is called.

    Args:
        previous: The id that the chain says was published last, None for none.
        left: Tables as this process has left them, which is kept up to date.
        footers: Of files, by path, as far as they are known.
        evolves: The table gets the columns that it lacks.
    """
    started, adds = time.perf_counter(), data_files(storage, table, files, footers)
    last_left = left.pop(table, None) if left is not None else None
    if last_left is not None and evolves:
        columns = _columns_of(storage, table, adds, True, footers)
        last_left = last_left if columns.keys() <= last_left.columns.keys() else None
    now = _put(last_left, f"{app_id}/{table}", checkpoint.id, previous, adds) if last_left is not None else None
    if now is not None:
        version = now.version.number
    else:

        def change_of(handle: DeltaTable) -> TableChange:
            new = check_committed(storage, handle, table, checkpoint.id, adds, evolves=evolves, footers=footers)
            return TableChange(adds, columns=new)

        gone = partial(damaged, storage, table)
        committed = commit(storage, app_id, table, checkpoint, previous, change_of, gone)
        version = committed.version
        now = _left(storage, table, f"{app_id}/{table}", committed) if left is not None else None
    if left is not None and now is not None:
        left[table] = now
    return publication(checkpoint, table, version, len(files), sum(file.rows for file in adds), started)


def _put(
    left: PublishedTable, sink_app: str, checkpoint: CheckpointId, previous: int | None, adds: Sequence[DataFile]
) -> PublishedTable | None:
    """Publish to a table that is as it was left: the put succeeds only after its newest version. None: look at it
    anew."""
    if not left.is_free(previous, sink_app) or not log_entries.still_there(left.version):
        return None
    try:
        marks = mark(left.version.storage, left.version.path.rpartition("/")[2])
        metadata = {CHECKPOINT: str(checkpoint), **marks}
        newest = log_entries.append(left.version, sink_app, checkpoint, adds, metadata=metadata)
    except CommitFailedError:
        return None
    # Only its columns and its transaction version are asked for.
    return replace(left, version=replace(newest, files={}))


def _left(storage: Storage, table: str, sink_app: str, committed: Committed) -> PublishedTable | None:
    """Return the table as the handle shows it after a publish; None if the next one is to go through delta-rs again."""
    handle = committed.handle
    if handle.version() != committed.version or handle.protocol().min_writer_version > _WRITER:
        return None
    version = log_entries.read_version(storage, table_path(table), handle, sink_app, [])
    return PublishedTable(version, _columns(handle), interval(handle)) if version is not None else None


def marker(storage: Storage, app_id: str, table: str) -> int | None:
    """Return the newest checkpoint that a table has; None: it has none, or there is no table."""
    try:
        version: int | None = fenced_table.open_table(storage, table_path(table)).transaction_version(
            f"{app_id}/{table}"
        )
        return version
    except TableNotFoundError:
        return None


def diverged(storage: Storage, app_id: str, table: str, published: int | None, *, lacks: bool = False) -> str | None:
    """Return in words how a table differs from the newest checkpoint, or None if it does not.

    It does not differ either if there is neither table nor rows for it.

    Args:
        published: The checkpoint that the newest one says was published last.
        lacks: It may have less.
    """
    try:
        version = fenced_table.open_table(storage, table_path(table)).transaction_version(f"{app_id}/{table}")
    except TableNotFoundError:  # without rows so far; else making it anew would hide that those of the past are gone
        return None if published is None else f"it is gone, and checkpoint {published} has rows in it"
    if version == published or (lacks and (version or 0) < (published or 0)):
        return None
    return f"its last published checkpoint is {version}, but the registry's newest is {published}"


def check_rows(storage: Storage, app_id: str, table: str) -> None:
    """Check that nobody else has restored the table to before what was published in it last. Raises DamageError."""
    try:
        handle = fenced_table.open_table(storage, table_path(table))
    except TableNotFoundError:
        return
    restored = set_back(storage, table_path(table), handle, f"{app_id}/{table}")
    if restored is not None:
        raise damaged(storage, table, f"{restored}")


def damaged(storage: Storage, table: str, how: str, also: str = "") -> DamageError:
    """Return the error for a table that is not where the registry says.

    Args:
        also: One more cause, with what to do about it.
    """
    return DamageError(
        f"A sink table is not where the registry says: {how}.",
        where=storage.full(table_path(table)),
        next="Nothing was published or deleted. Was the table dropped, restored or written by someone else? Put it "
        "back first. "
        "Were its checkpoints deleted by `weir cancel --delete`? Go on under another pipeline name. "
        f"{also}docs/playbooks/sink-altered.md",
    )
