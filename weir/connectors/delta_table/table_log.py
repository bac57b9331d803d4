"""The log of a Delta table that others write, as a source follows it: entry by entry, and sure that it is one history.

    position (version 7)          first entry that can be read   followed so far      newest
    v                             v                              v                    v
    5  6  7  8  9  10             5 (a checkpoint)               8: its digest        10

delta-rs opens a version, which tells the table's columns and, of the starting version, its files. From there on the
entries are read one by one, as in `state_ops.delta.log_entries`. Log cleanup removes the oldest entries first, so as
long as the last entry that was followed is there, byte for byte, the one behind it is the table's next version, or
there is none yet.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import deltalake
import pyarrow as pa
from deltalake.exceptions import DeltaError

from state_ops.delta import log_cleanup
from state_ops.delta.fenced_table import Table, open_table
from state_ops.delta.log_entries import entry_path
from state_ops.errors import ConfigurationError, InputError, LostError, TransientError, plainly
from state_ops.redaction import error_status, scrubbing
from state_ops.storage.s3 import refuse_secrets
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together

if TYPE_CHECKING:
    from weir.settings.configuration import S3Settings

_READABLE = frozenset(  # features of a reader
    {
        "columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)  # fmt: skip
_NAMED = re.compile(r"([0-9]{20})\.(json|checkpoint\..+)")
_OF_STORES = re.compile(r"Generic \w+ error|error sending request|non-2xx status")  # in what delta-rs says
_OF_WEIR = "weir.checkpoint"  # in commits of checkpoints; the others stand in those that take rows back as well
_TAKEN_BACK = frozenset({"weir.rewind_to", "weir.range", "weir.branch"})
_VECTORS = ("filepath", "selection_vector")  # as delta-rs calls them
_AHEAD, _REQUESTS, _KEPT_BYTES = 32, 8, 64 << 20  # versions, at a time, of entries


@dataclass(frozen=True, slots=True)
class Metadata:
    """The properties of a table from one version on.

    Attributes:
        id: Of the table.
        columns: As Arrow has them, those of the partition too.
        partition_by: The columns whose values stand in the log.
        has_feed: Its writers note changes that adds and removes of whole files do not tell.
    """

    id: str
    columns: pa.Schema
    partition_by: tuple[str, ...]
    has_feed: bool


@dataclass(frozen=True, slots=True)
class LoggedFile:
    """A file of a version.

    Attributes:
        path: Relative to the table.
        bytes: Its size; None: the log does not say.
        rows: How many it has; None: the log does not say.
        partition: By column, the text of the value that all rows have.
        change: What its rows are in the change data feed; None: they say it themselves.
        of: Which of its rows are read: those that are gone, or those that are new; None: all.
    """

    path: str
    bytes: int | None
    rows: int | None
    partition: Mapping[str, str | None]
    change: str | None
    of: str | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """An entry of the log: what it changes of the table's rows.

    Attributes:
        time: In milliseconds since 1970.
        operation: What its writer calls it.
        adds: Files whose rows are new.
        removes: Files whose rows are gone.
        changes: Files with the rows of the change data feed, which replace the two where there are any.
        vectors: A file of the two has a deletion vector.
        table: Its actions that say what the table is from now on.
        is_replacement: It is of `delta.upsert` or `delta.replace`, which note no changes.
    """

    version: int
    time: int
    operation: str
    adds: tuple[LoggedFile, ...]
    removes: tuple[LoggedFile, ...]
    changes: tuple[LoggedFile, ...]
    vectors: bool
    table: tuple[Mapping[str, Any], ...]
    is_replacement: bool


@contextmanager
def asking(where: str) -> Iterator[None]:
    """Raise errors of storage or delta-rs as errors about the table at this place."""
    try:
        yield
    except (DeltaError, OSError) as error:
        problem = plainly(error)
        if isinstance(error, PermissionError) or error_status(str(error)) in ("401", "403"):
            raise ConfigurationError(
                f"The table must not be read: {problem}",
                where=where,
                next="Give the host the right to read it; storage.s3 says by reference where keys are.",
            ) from None
        if isinstance(error, OSError) or _OF_STORES.search(str(error)):
            raise TransientError(f"The table cannot be read now: {problem}", where=where, next="Run again.") from None
        raise InputError(f"The table's log cannot be read: {problem}", where=where, next=_REPAIR) from None


class TableLog:
    """The log of one table, from any thread.

    Args:
        uri: The table's directory or URI.
        where: The source, for errors.
        s3: How s3:// is reached.
        seek: The command that reads the source on from elsewhere, as far as `--to`.
    """

    def __init__(self, uri: str, where: str, s3: S3Settings | None, seek: str) -> None:
        scheme, mark, place = refuse_secrets(uri, where).rstrip("/").rpartition("://")
        above, _, self.name = place.rpartition("/")
        if not above or not self.name:
            raise ConfigurationError(
                f"A table has to lie below a directory or a bucket: {uri}", where=where, next="Correct its path."
            )
        self.uri, self.where, self._seek = f"{scheme}{mark}{place}", where, seek
        self.storage = Storage(f"{scheme}{mark}{above}", s3)
        self._lock = threading.RLock()
        self._base, self._top, self._digest = 0, -1, ""
        self._metadata: list[tuple[int, Metadata]] = []
        self._forget()

    def _forget(self) -> None:
        """Forget all that was read of a table, so that it is not taken for the content of another one in its place."""
        self._newest = -1
        self._entries: dict[int, bytes] = {}
        self._files: tuple[int, Sequence[LoggedFile], Mapping[str, pa.BooleanArray]] = (-1, (), {})
        self._parsed: tuple[bytes, Commit] | None = None

    def asking(self) -> AbstractContextManager[None]:
        """Raise errors of storage or delta-rs as errors about this table."""
        return asking(f"{self.where}, {self.uri}")

    def problem(self, what: str, next: str, version: int | None = None) -> InputError:
        """Return an error about the table, or about one of its versions."""
        at = "" if version is None else f", version {version}"
        return InputError(what, where=f"{self.where}, {self.uri}{at}", next=next)

    def _anew(self) -> str:
        return f"`{self._seek} earliest` reads the new table as a whole; state and tables stay as they are."

    def versions(self) -> tuple[int, int]:
        """Return the first version from which on all can be read, and the newest one. Raises InputError if there is no
        table."""
        names = [named for name in log_cleanup.log_names(self.storage, self.name) if (named := _NAMED.fullmatch(name))]
        entries = {int(named[1]) for named in names if named[2] == "json"}
        checkpoints = {int(named[1]) for named in names if named[2] != "json"}
        if not names:
            raise self.problem(
                "There is no Delta table.", "Correct its path, or wait until its first version is written."
            )
        first = newest = max(entries | checkpoints)
        while first in entries:
            first -= 1
        # A version can be opened if it is the first of all, or a checkpoint stands for all that came before.
        opened = {version for at in checkpoints for version in (at, at + 1)} | {0}
        return min(version for version in (*opened, newest + 1) if version > first), newest

    def opened(self) -> tuple[int, int, Metadata]:
        """Return the first version from which on all can be read, the newest one, and what holds of that."""
        with self._lock:
            self._forget()
            first, self._newest = self.versions()
            return first, self._newest, self._open(self._newest)

    def digest(self, version: int) -> str | None:
        """Return the digest of a version's entry as it was read; None: the log has no such entry now."""
        with self._lock:
            known = self._entries.get(version)
            raw = self.storage.read_bytes(entry_path(self.name, version)) if known is None and version >= 0 else known
            return None if raw is None else _digest(raw)

    def follow(self, table: str, version: int, last: tuple[int, str | None] | None = None) -> int:
        """Be ready to read from a version on; returns the first one that can be read, which is a later one if entries
        have been cleaned away.

        Args:
            last: The version whose entry was read last, and the digest that it had, as far as that is known.

        Raises:
            InputError: There is another table, or it has not come that far, or it has come there otherwise.
        """
        with self._lock:
            if self._is_followed(table, version):
                return version
            first, newest, metadata = self.opened()
            if metadata.id != table:
                raise self.problem(
                    f"The table was dropped and made anew: its id is {metadata.id}, and {table} has been read.",
                    self._anew(),
                )
            if version > newest + 1:
                raise self.problem(
                    f"Versions up to {version - 1} have been read, but the newest one is {newest}: the table was "
                    "brought back from a copy.",
                    "Bring the newer one back, or seek the source to where it is to go on.",
                )
            if last is not None and last[1] is not None and self.digest(last[0]) not in (None, last[1]):
                raise self.problem(
                    f"Version {last[0]} is not the one that has been read: the table was brought back from an older "
                    "copy, and has grown again since.",
                    "Bring the newer one back, or seek the source to where it is to go on, or "
                    f"`{self._seek} earliest`, which reads the table as a whole.",
                    last[0],
                )
            begin = min(max(version, first), newest)
            raw = self.storage.read_bytes(entry_path(self.name, begin))
            self._base = self._top = begin
            self._digest, self._metadata = _digest(raw), [(begin, self._open(begin) if begin < newest else metadata)]
            return max(version, first)

    def _is_followed(self, table: str, version: int) -> bool:
        if not (self._metadata and self._base <= version <= self._top + 1 and self._metadata[0][1].id == table):
            return False
        newest = max((self._top, *self._entries))  # entries that were read ahead belong to this history as well
        was = _digest(self._entries[newest]) if newest > self._top else self._digest
        raw = self.storage.read_bytes(entry_path(self.name, newest))
        is_there = version > self._top or self._entry(version) is not None
        return is_there and raw is not None and _digest(raw) == was

    def metadata(self, version: int, table: str) -> Metadata:
        """Return the properties of a version.

        Raises LostError if its entry has been cleaned away, InputError if it is of another table.
        """
        with self._lock:
            newest_id = self._metadata[0][1].id if self._metadata else None
            if newest_id != table or not self._base <= version <= self._top + _AHEAD:
                first = self.follow(table, version)
                if first > version:
                    raise LostError(
                        f"The log begins with version {first}: what version {version} was is not known any more.",
                        where=f"{self.where}, {self.uri}",
                        next=AFTER_LOSS,
                    )
            while self._top < version:
                if self.commit(self._top + 1) is None:
                    raise self.problem("The version that was planned is gone: the table went back.", _REPAIR, version)
            return next(of for since, of in reversed(self._metadata) if since <= version)

    def has(self, version: int) -> bool:
        """Return whether the log has the entry of a version."""
        return self.storage.size(entry_path(self.name, version)) is not None

    def commit(self, version: int) -> Commit | None:
        """Return an entry, of a version that is followed or the one behind; None: there is none yet.

        Raises:
            InputError: It cannot be read, or makes another table of this one.
        """
        raw = self._entry(version)
        if raw is None and version <= max(self._top, self._newest):
            self._metadata = []
            raise TransientError(
                f"Version {version} was cleaned away while it was to be read.",
                where=f"{self.where}, {self.uri}",
                next="Run again, which says what is missing.",
            )
        if raw is None:
            return None
        with self._lock:
            if self._parsed is None or self._parsed[1].version != version or self._parsed[0] != raw:
                self._parsed = (raw, self._parse(version, raw))
            commit = self._parsed[1]
            if self._metadata and version == self._top + 1:
                self._go_on(commit)
                self._top, self._digest = version, _digest(raw)
        return commit

    def _parse(self, version: int, raw: bytes) -> Commit:
        try:
            return _commit(version, [json.loads(line) for line in raw.splitlines() if line.strip()])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.problem(f"The log's entry is damaged: {plainly(error)}", _REPAIR, version) from error

    def _entry(self, version: int) -> bytes | None:
        """Return an entry as it was put. Those of the next versions that are there are read with it, unless they are
        large, as this one tells."""

        def read(at: int, _: object = None) -> bytes | None:
            return self.storage.read_bytes(entry_path(self.name, at))

        with self._lock:
            if version not in self._entries:
                if sum(map(len, self._entries.values())) > _KEPT_BYTES:
                    self._entries.clear()
                first = read(version)
                if first is None:
                    return None
                count = min(_AHEAD, _KEPT_BYTES // max(len(first), 1))
                ahead = range(version + 1, min(version + count, self._newest) + 1)
                raws = zip(ahead, together(read, ahead, at_once=_REQUESTS), strict=True)
                self._entries |= {version: first, **{at: raw for at, raw in raws if raw is not None}}
            return self._entries[version]

    def _go_on(self, commit: Commit) -> None:
        before, version = self._metadata[-1][1], commit.version
        for action in commit.table:
            if "protocol" in action:
                self._check_features(action["protocol"].get("readerFeatures") or (), version)
            if "metaData" in action:
                raw = action["metaData"]
                if raw["id"] != before.id:
                    raise self.problem(
                        f"The table was replaced by another one, with the id {raw['id']}.",
                        self._anew(),
                        version,
                    )
                schema = deltalake.Schema.from_json(raw["schemaString"])
                configuration = raw.get("configuration") or {}
                self._metadata.append(
                    (version, self._described(raw["id"], schema, raw["partitionColumns"], configuration, version))
                )

    def at(self, version: int) -> Metadata:
        """Return the properties of any version, which need not be followed.

        Raises DeltaError if it cannot be opened.
        """
        with self._lock:
            return self._open(version)

    def on_disk(self, path: str) -> Path | None:
        """Return a file of the table on a disk of this host; None: it lies elsewhere.

        Raises InputError for a link that leads out of the table.
        """
        if not self.storage.is_local or "://" in self.storage.uri:
            return None
        table = Path(self.storage.full(self.name))
        if not (table / path).resolve().is_relative_to(table.resolve()):
            raise self.problem(
                f"The file {path} is a link out of the table's directory, which is not followed.",
                "Find out who made it; let the table's writer put the file itself there.",
            )
        return table / path

    def _handle(self, version: int) -> Table:
        return open_table(self.storage, self.name, version)

    def _open(self, version: int) -> Metadata:
        handle = self._handle(version)
        self._check_features(handle.protocol().reader_features or (), version)
        of = handle.metadata()
        return self._described(str(of.id), handle.schema(), of.partition_columns, of.configuration, version)

    def _described(
        self, id: str, schema: deltalake.Schema, partition_by: Sequence[str], configuration: Mapping[str, str], at: int
    ) -> Metadata:
        if configuration.get("delta.columnMapping.mode", "none") != "none":
            raise self.problem(
                "The table's columns are mapped (delta.columnMapping.mode), so its files have other names.",
                "Read it with a pipeline of Spark's, or write it anew without column mapping.",
                at,
            )
        feed = configuration.get("delta.enableChangeDataFeed", "false").lower() == "true"
        return Metadata(id, pa.schema(schema.to_arrow()), tuple(partition_by), feed)

    def _check_features(self, features: Sequence[str], version: int) -> None:
        if unknown := sorted(set(features) - _READABLE):
            raise self.problem(
                f"The table asks of its readers what Weir cannot do: {', '.join(unknown)}.",
                "Drop the feature (ALTER TABLE ... DROP FEATURE), or read a copy of the table without it.",
                version,
            )

    def files(self, version: int) -> Sequence[LoggedFile]:
        """Return all files of a version, the oldest first. Raises InputError if not all rows of them count."""
        files, kept = self.whole(version)
        if kept:
            raise self.with_vectors(version)
        return files

    def whole(self, version: int) -> tuple[Sequence[LoggedFile], Mapping[str, pa.BooleanArray]]:
        """Return all files of a version, the oldest first, and by path which rows count of those that have deletion
        vectors: rows behind the last one that is said do."""
        with self._lock:
            if self._files[0] != version:
                handle = self._handle(version)
                files = _files(_table(handle.get_add_actions(flatten=False)))
                kept: dict[str, pa.BooleanArray] = {}
                if "deletionVectors" in (handle.protocol().reader_features or ()):
                    with scrubbing():
                        vectors = _table(handle.deletion_vectors())
                    paths = {file.path for file in files}
                    for uri, rows in zip(*(vectors.column(name) for name in _VECTORS), strict=True):
                        kept[_below(uri.as_py(), paths)] = rows.values
                self._files = (version, files, kept)
            return self._files[1:]

    def with_vectors(self, version: int) -> InputError:
        """Return the error to raise for files with rows that do not count."""
        return self.problem(
            "The table has files with deletion vectors, which Weir does not read.",
            'Let its writer purge them (REORG TABLE ... APPLY (PURGE)), and begin again behind that, or at "earliest".',
            version,
        )


_REPAIR = "Look at the table with what writes it, and repair it; nothing of this epoch was applied."
AFTER_LOSS = 'Bring it back, or say on_lost="skip", which goes on with what is there and records it.'


def _digest(raw: bytes | None) -> str:
    return "" if raw is None else hashlib.sha256(raw).hexdigest()


def _commit(version: int, actions: Sequence[Mapping[str, Any]]) -> Commit:
    infos = [action["commitInfo"] for action in actions if "commitInfo" in action]
    info: Mapping[str, Any] = infos[0] if infos else {}
    adds, removes, changes = (
        [action[kind] for action in actions if kind in action] for kind in ("add", "remove", "cdc")
    )
    adds, removes = ([file for file in files if file["dataChange"]] for files in (adds, removes))
    times = [info.get("inCommitTimestamp"), info.get("timestamp"), *(file["modificationTime"] for file in adds)]
    return Commit(
        version,
        next((time for time in times if time is not None), 0),
        str(info.get("operation", "a commit")),
        tuple(_file(file, "insert") for file in adds),
        tuple(_file(file, "delete") for file in removes),
        tuple(_file(file, None) for file in changes),
        any(file.get("deletionVector") for file in (*adds, *removes)),
        tuple(action for action in actions if "protocol" in action or "metaData" in action),
        bool(adds and removes) and _OF_WEIR in info and not _TAKEN_BACK & info.keys(),
    )


def _file(action: Mapping[str, Any], change: str | None) -> LoggedFile:
    rows = json.loads(action.get("stats") or "{}").get("numRecords")
    return LoggedFile(unquote(action["path"]), action.get("size"), rows, action.get("partitionValues") or {}, change)


def _table(stream: Any) -> pa.Table:
    """Return the rows that delta-rs hands out. `pa.table` would import pandas."""
    return pa.RecordBatchReader.from_stream(stream).read_all()


def _below(uri: str, paths: Collection[str]) -> str:
    """Return the one of a table's paths with which a file's URI ends."""
    parts = unquote(uri).split("/")
    for number in range(len(parts)):
        if (end := "/".join(parts[number:])) in paths:
            return end
    raise InputError(f"Rows of {uri} are deleted, which is no file of the table's version.", next=_REPAIR)


def _files(actions: pa.Table) -> list[LoggedFile]:
    """Return the files that delta-rs lists, in an order that is the same each time."""
    typed = actions["partition"].chunks if "partition" in actions.column_names else []
    texts: dict[str, list[str | None]] = {}
    for chunk in typed:
        for field, values in zip(chunk.type, chunk.flatten(), strict=True):
            texts.setdefault(field.name, []).extend(values.cast(pa.string()).to_pylist())
    listed = zip(
        *(actions[name].to_pylist() for name in ("modification_time", "path", "size_bytes", "num_records")),
        range(actions.num_rows),
        strict=True,
    )
    return [
        LoggedFile(unquote(path), size, rows, {name: values[number] for name, values in texts.items()}, "insert")
        for _, path, size, rows, number in sorted(listed)
    ]
