"""Delta append sinks: publishing a completed checkpoint is one metadata-only commit of its staged files.

Transaction app id: `<pipeline>/<branch>/<table>`, stable for ever; version: the checkpoint's id. delta-rs accepts the same
version twice in sequence, so the version is read on the very handle that commits, each time. The chain of published
ids stands in the checkpoints' rows (`sinks`): a table whose version is not where the chain says is damaged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import pyarrow as pa
from deltalake import DeltaTable, PostCommitHookProperties
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from state_ops import delta_log
from state_ops.checkpoint import Checkpoint, StateFile
from state_ops.delta_log import DataFile
from state_ops.errors import DamageError, PipelineError
from state_ops.frames import canonical_type
from state_ops.registry import Publication
from state_ops.storage import Storage

_MAX_RACES = 20
_CHECKPOINT = "weir.checkpoint"


def table_path(table: str) -> str:
    return f"tables/{table}"


def ensure(storage: Storage, table: str, schema: pa.Schema) -> None:
    """Create the table, or check the existing one. Only right before a commit: a declined epoch must not leave a table."""
    delta_log.ensure_table(storage, table_path(table), schema)
    check_table(storage, table, schema)


def check_table(storage: Storage, table: str, schema: pa.Schema) -> None:
    """Check that the table, if there is one, has these columns and that Weir can commit to it. Raises PipelineError."""
    uri = storage.full(table_path(table))
    try:
        handle = delta_log.open_table(storage, table_path(table))
    except TableNotFoundError:
        return
    if handle.metadata().configuration.get("delta.setTransactionRetentionDuration"):
        raise PipelineError(
            f"The table {table} forgets transaction versions (delta.setTransactionRetentionDuration).",
            where=uri,
            next="Unset that property: exactly-once publishing reads those versions.",
        )
    existing = pa.schema(handle.schema().to_arrow())
    was = {field.name: canonical_type(field.type) for field in existing}
    now = {field.name: field.type for field in schema}
    if was != now:
        changes = [f"{name} is new" for name in now if name not in was]
        changes += [f"{name} is gone" for name in was if name not in now]
        changes += [f"{name} was {was[name]}, is {now[name]}" for name in now if name in was and was[name] != now[name]]
        raise PipelineError(
            f"The output for the table {table} changed: {'; '.join(changes)}.",
            where=uri,
            next="Keep its columns, or write to a table of another name.",
        )


def check(storage: Storage, files: Sequence[StateFile], schemas: Mapping[tuple[str, str], pa.Schema]) -> None:
    """What must hold before the commit names staged files, because Delta itself checks none of it: they exist, and have the
    recorded size, number of rows, and the schema of their (operator, output). Raises DamageError."""
    for file in files:
        problem = _problem(storage, file, schemas[file.operator, file.name])
        if problem:
            raise DamageError(
                f"A staged file {problem}.",
                where=storage.full(file.path),
                next="The epoch was declined; find out who deletes or alters files below the pipeline's root.",
            )


def _problem(storage: Storage, file: StateFile, schema: pa.Schema) -> str | None:
    size = storage.size(file.path)
    if size is None:
        return "is gone"
    if size != file.bytes:
        return f"has {size} bytes instead of {file.bytes}"
    try:
        footer = storage.parquet_footer(file.path)
    except pa.ArrowException as error:
        return f"is not readable Parquet: {error}"
    if footer.num_rows != file.rows:
        return f"has {footer.num_rows} rows instead of {file.rows}"
    if not footer.schema.to_arrow_schema().equals(schema):
        return f"has the columns {footer.schema.to_arrow_schema()} instead of {schema}"
    return None


def publish(
    storage: Storage, app_id: str, table: str, checkpoint: Checkpoint, previous: int | None, files: Sequence[StateFile]
) -> Publication:
    """Make a checkpoint's rows visible in one table, exactly once however often this is called.

    previous: the id that the chain says was published last, None for none.
    """
    started = time.perf_counter()
    uri = storage.full(table_path(table))
    sink_app = f"{app_id}/{table}"
    rows = sum(file.rows or 0 for file in files)
    try:
        handle = delta_log.open_table(storage, table_path(table))
    except TableNotFoundError as error:
        raise _damaged(uri, f"checkpoint {checkpoint.id} has rows for it, but the table is gone") from error
    for _ in range(_MAX_RACES):
        version = handle.transaction_version(sink_app)
        if version is not None and version >= checkpoint.id:
            delta_version = _version_of(handle, checkpoint.id)
            break
        if version != previous:
            raise _damaged(uri, f"its last published checkpoint is {version}, but the registry says {previous}")
        prefix = f"{table_path(table)}/"
        adds = [DataFile(file.path.removeprefix(prefix), file.bytes, file.rows or 0) for file in files]
        try:
            before = handle.version()
            metadata = {_CHECKPOINT: str(checkpoint.id)}
            delta_log.commit(handle, sink_app, checkpoint.id, adds, metadata=metadata, upkeep=_upkeep(handle))
        except CommitFailedError:
            handle = delta_log.open_table(storage, table_path(table))
            continue
        handle.update_incremental()
        # The next version is ours, unless a commit without our app id came first and delta-rs went behind it.
        new = handle.version() - before
        delta_version = handle.version() if new == 1 else _version_of(handle, checkpoint.id, new)
        break
    else:
        raise _damaged(uri, f"{_MAX_RACES} commits in a row met another writer; only Weir may write to it")
    ms = round((time.perf_counter() - started) * 1000, 3)
    return Publication(checkpoint.id, table, delta_version, len(files), rows, datetime.now(UTC), ms)


def check_chain(storage: Storage, app_id: str, table: str, head: Checkpoint | None) -> None:
    """Before the first epoch: the table is where the newest checkpoint says. Raises DamageError when it is ahead or behind.

    Ahead: its rows come from checkpoints that the registry does not have, so replaying their input would double them.
    """
    problem = astray(storage, app_id, table, head)
    if problem is not None:
        raise _damaged(storage.full(table_path(table)), problem)


def astray(storage: Storage, app_id: str, table: str, head: Checkpoint | None) -> str | None:
    """How the table is not where the newest checkpoint says, in words; None if it is, or if there is no table."""
    try:
        version = delta_log.open_table(storage, table_path(table)).transaction_version(f"{app_id}/{table}")
    except TableNotFoundError:
        return None  # a sink without rows so far; publishing says so if the chain has some
    known = (head.sinks.get(table) or {}).get("id") if head else None
    if version == known:
        return None
    return f"its last published checkpoint is {version}, but the registry's newest is {known}"


def _upkeep(handle: DeltaTable) -> PostCommitHookProperties:
    """Delta checkpoints as the table's properties say. Expired entries are looked for only when one is written: it takes a
    listing of the whole log, which has every version of a month."""
    interval = int(handle.metadata().configuration.get("delta.checkpointInterval") or 100)
    due = (handle.version() + 2) % interval == 0  # delta-rs writes one at each version before a multiple
    return PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=due)


def _version_of(handle: DeltaTable, checkpoint: int, among: int = 50) -> int:
    """The Delta version, among the newest ones, that published a checkpoint; the newest version if its entry is gone."""
    for entry in handle.history(among):
        if entry.get(_CHECKPOINT) == str(checkpoint):
            return int(entry["version"])
    return handle.version()


def _damaged(uri: str, how: str) -> DamageError:
    return DamageError(
        f"A sink table is not where the registry says: {how}.",
        where=uri,
        next="Nothing was published or deleted. Was the table dropped, restored or written by someone else? Put it back first. "
        "Were its checkpoints deleted by `weir cancel --delete`? Go on under another pipeline name.",
    )
