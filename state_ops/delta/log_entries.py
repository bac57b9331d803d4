"""Entries of a Delta log that Weir itself writes and follows: in its registry, and in tables as it left them.

    version v, as it is known  --put v+1, unless it is there-->  look at v once more: unchanged  =  committed

The put is the question whether v is the newest version, so nothing is asked before it; delta-rs lists the log before
and after each commit and reads it again. Entries are cleaned away oldest first, so as long as v's entry is there, byte
for byte, none after it was cleaned away, and what was put or found there is the table's history.
docs/adr/0022-requests.md plays the sequences."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from state_ops.storage.storage import Storage

_OURS = frozenset({"commitInfo", "txn", "add", "remove"})


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file of a table: path relative to the table, size in bytes, rows, partition values, min/max by
    column.

    Attributes:
        statistics: What its add action says of its columns, as JSON; None: rows and bounds alone.
    """

    path: str
    bytes: int
    rows: int
    partition: tuple[tuple[str, str | None], ...] = ()
    bounds: tuple[tuple[str, int], ...] = ()
    statistics: str | None = field(default=None, compare=False)

    def stats(self) -> str:
        if self.statistics is not None:
            return self.statistics
        stats: dict[str, Any] = {"numRecords": self.rows}
        if self.bounds:
            stats |= {"minValues": dict(self.bounds), "maxValues": dict(self.bounds)}
        return as_json(stats)

    def add_action(self) -> AddAction:
        return AddAction(self.path, self.bytes, dict(self.partition), _now(), True, self.stats())

    def remove_action(self) -> RemoveAction:
        return RemoveAction(
            path=self.path,
            data_change=True,
            deletion_timestamp=_now(),
            size=self.bytes,
            partition_values=dict(self.partition) or None,
        )


@dataclass(frozen=True, slots=True)
class TableVersion:
    """One version of a table, as it was read; the record never changes, whatever becomes of the table.

    Attributes:
        entry: The version's own in the log, byte for byte.
        owners: Transaction versions by app id, of one app id alone.
        files: By path.
    """

    storage: Storage
    path: str
    number: int
    entry: bytes
    owners: Mapping[str, int]
    files: Mapping[str, DataFile]

    @property
    def table_uri(self) -> str:
        return self.storage.full(self.path)

    def version(self) -> int:
        return self.number

    def transaction_version(self, app_id: str) -> int | None:
        return self.owners.get(app_id)


def as_json(value: Any) -> str:
    """Return a value in JSON, as a log has it: characters are never escaped by number, since delta-rs (1.6.6) takes
    escaped ones of every other plane from U+20000 on for others."""
    return json.dumps(value, ensure_ascii=False)


def entry_path(table: str, version: int) -> str:
    return f"{table}/_delta_log/{version:020d}.json"


def read_version(
    storage: Storage, path: str, handle: DeltaTable, app_id: str, files: Sequence[DataFile]
) -> TableVersion | None:
    """Return the version that a handle that was just opened shows; None if the version's entry is gone already."""
    owner = handle.transaction_version(app_id)
    entry = storage.read_bytes(entry_path(path, handle.version()))
    if entry is None:
        return None
    owners = {} if owner is None else {app_id: owner}
    return TableVersion(storage, path, handle.version(), entry, owners, {file.path: file for file in files})


def still_there(version: TableVersion) -> bool:
    """Return whether the version's entry is still in the log; entries are cleaned away oldest first."""
    return version.storage.read_bytes(entry_path(version.path, version.number)) == version.entry


def newest_after(version: TableVersion, app_id: str) -> TableVersion | None:
    """Return the table's newest version, from one that was known; None if it has to be opened anew.

    Entries are read first, and only then it is asked whether the one that they follow is there still.
    """
    newest: TableVersion | None = version
    while newest is not None:
        entry = version.storage.read_bytes(entry_path(version.path, newest.number + 1))
        if entry is None:
            return newest if still_there(version) else None
        newest = _followed(newest, entry, app_id)
    return None


def append(
    version: TableVersion,
    app_id: str,
    number: int,
    adds: Sequence[DataFile] = (),
    removes: Sequence[DataFile] = (),
    metadata: Mapping[str, str] | None = None,
    *,
    as_logged: bool = False,
    table: Mapping[str, Any] | None = None,
) -> TableVersion:
    """Put the entry after `version`; returns the version that it makes, if `still_there(version)` says so afterwards.

    Any other exception means: outcome unknown.

    Args:
        number: The transaction version.
        metadata: Texts for the table's history.
        as_logged: Paths are as another entry has them, and not as in storage.
        table: What the table is from now on, as of `with_columns`.

    Raises:
        CommitFailedError: There is another entry.
    """
    entry = _written(app_id, number, adds, removes, metadata or {}, as_logged, table)
    path = entry_path(version.path, version.number + 1)
    # A put whose answer was lost is tried again, and finds what it has put itself.
    if not version.storage.create(path, entry) and version.storage.read_bytes(path) != entry:
        raise CommitFailedError(f"{version.path} has a version {version.number + 1} already.")
    newer = _followed(version, entry, app_id, _OURS | {"metaData"})
    assert newer is not None
    return newer


def with_columns(handle: DeltaTable, columns: Sequence[pa.Field]) -> dict[str, Any]:
    """Return a table's metadata action, as its log has it, with more columns; existing rows have null in them."""
    is_now = handle.metadata()
    schema = json.loads(handle.schema().to_json())
    schema["fields"] += json.loads(Schema.from_arrow(pa.schema(columns)).to_json())["fields"]
    names = {"name": is_now.name, "description": is_now.description}
    return {
        "id": str(is_now.id),
        **{key: text for key, text in names.items() if text is not None},
        "format": {"provider": "parquet", "options": {}},
        "schemaString": as_json(schema),
        "partitionColumns": is_now.partition_columns,
        "createdTime": is_now.created_time,
        "configuration": is_now.configuration,
    }


def _written(
    app_id: str,
    number: int,
    adds: Sequence[DataFile],
    removes: Sequence[DataFile],
    metadata: Mapping[str, str],
    as_logged: bool,
    table: Mapping[str, Any] | None,
) -> bytes:
    now = _now()

    def path_of(file: DataFile) -> str:
        return file.path if as_logged else quote(file.path, safe="/=")

    # The id makes each try an entry of its own.
    info = {"timestamp": now, "operation": "WRITE", "operationParameters": {"mode": "Append"}, "try": uuid.uuid4().hex}
    lines: list[dict[str, Any]] = [{"commitInfo": {**info, **metadata}}]
    lines.append({"txn": {"appId": app_id, "version": number}})
    if table is not None:
        lines.append({"metaData": table})
    for file in adds:
        fields = {"path": path_of(file), "partitionValues": dict(file.partition), "size": file.bytes}
        lines.append({"add": {**fields, "modificationTime": now, "dataChange": True, "stats": file.stats()}})
    for file in removes:
        fields = {
            "path": path_of(file),
            "deletionTimestamp": now,
            "dataChange": True,
            "extendedFileMetadata": True,
        }
        lines.append({"remove": {**fields, "partitionValues": dict(file.partition), "size": file.bytes}})
    return "\n".join(map(as_json, lines)).encode()


def _followed(before: TableVersion, entry: bytes, app_id: str, understood: Set[str] = _OURS) -> TableVersion | None:
    """Return the version that an entry makes of the one before; None if it does what only delta-rs understands."""
    owners, files = dict(before.owners), dict(before.files)
    try:
        actions = [json.loads(line) for line in entry.splitlines()]
        if any(action.keys() - understood for action in actions):
            return None
        for action in actions:
            if "remove" in action:
                files.pop(unquote(action["remove"]["path"]), None)
            elif "add" in action:
                file = _data_file(action["add"])
                files[file.path] = file
            elif action.get("txn", {}).get("appId") == app_id:
                owners[app_id] = action["txn"]["version"]
    except (ValueError, KeyError, TypeError, AttributeError):  # a damaged entry: delta-rs says what is wrong with it
        return None
    return TableVersion(before.storage, before.path, before.number + 1, entry, owners, files)


def _data_file(add: Mapping[str, Any]) -> DataFile:
    stats = json.loads(add.get("stats") or "{}")
    bounds = tuple((name, value) for name, value in stats.get("minValues", {}).items() if isinstance(value, int))
    partition = tuple((add.get("partitionValues") or {}).items())
    return DataFile(unquote(add["path"]), add["size"], stats.get("numRecords") or 0, partition, bounds)


def active_files(handle: DeltaTable) -> list[DataFile]:
    """Return the files of the handle's version, from the log alone."""
    actions = add_actions(handle)
    partitions, least = told(actions, "partition"), told(actions, "min")
    files = zip(*(actions.column(name).to_pylist() for name in ("path", "size_bytes", "num_records")), strict=True)
    return [
        DataFile(
            path,
            size,
            rows or 0,
            tuple((name, _text(values[row])) for name, values in partitions.items()),
            tuple((name, values[row]) for name, values in least.items() if isinstance(values[row], int)),
        )
        for row, (path, size, rows) in enumerate(files)
    ]


def add_actions(handle: DeltaTable) -> pa.Table:
    """Return the files of the handle's version as delta-rs lists them, with what the log tells of their columns in
    structs: flattened, a column "a.b" and the field b of a struct a would have one name."""
    return pa.RecordBatchReader.from_stream(handle.get_add_actions(flatten=False)).read_all()


def told(actions: pa.Table, what: str) -> dict[str, list[Any]]:
    """Return by column that is not nested what the log tells of it, file by file.

    Args:
        actions: Of `add_actions`.
        what: "partition", "min", "max" or "null_count".
    """
    if what not in actions.column_names:
        return {}
    type, chunks = actions.schema.field(what).type, actions.column(what).chunks
    parts = [chunk.flatten() for chunk in chunks]
    return {
        field.name: [value for part in parts for value in part[at].to_pylist()]
        for at, field in enumerate(type)
        if not pa.types.is_nested(field.type)
    }


def _text(value: Any) -> str | None:
    """Return a value of a partition as the log has it."""
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _now() -> int:
    return int(time.time() * 1000)
