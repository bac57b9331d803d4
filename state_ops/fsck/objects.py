"""Compares everything in storage with the objects that the registry and the tables name.

    state/<operator>/g<generation>-e<epoch>/<subtask>-<attempt>/<file>
    channels/<operator>/g<generation>-e<epoch>/<subtask>-<attempt>.parquet, or <subtask>-<attempt>/<number or
    output>.parquet
    outputs/<sink>/g<generation>-e<epoch>/<subtask>-<attempt>.parquet
    exchange/<operator>/g<generation>-e<epoch>/<map task>-<attempt>/<number>.blocks   for an epoch in flight
    tables/<table>/data/g<generation>-e<epoch>/<subtask>-<attempt>.parquet      and Delta's own files
    landed/<source>/<uuid>.parquet                                              for an epoch in flight
    registry/<table>/...                                                        Delta; data files of Weir's names
    coordinator/lease.json, held.json, halt.json, unpublished.json, fsck.json, fsck-quick.json, drill.json
    coordinator/requests/<uuid>.json, holds/<uuid>.json, restoring/<digest>.json
    promotes.json, backfill.json                                                of a branch

What fits none of these is foreign. An object that nothing names is an orphan only if its generation can commit
nothing any more: no clock and no age is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from state_ops.coordination import lease, restore_progress
from state_ops.delta.fenced_table import PROBE, open_table
from state_ops.delta.log_entries import active_files
from state_ops.errors import plainly
from state_ops.fsck.findings import Finding, Kind
from state_ops.fsck.sinks import SinkTable, mentioned
from state_ops.fsck.survey import TABLES, UNREADABLE, Survey
from state_ops.ids import CheckpointId, parse_epoch_dir
from state_ops.records.snapshot_files import OUTPUT
from state_ops.records.snapshot_files import TABLES as OF_TABLES
from state_ops.storage.branches import branch_of
from state_ops.storage.paths import HOLDS, NUMBER_OR_OUTPUT, RESTORES, data_directory
from state_ops.storage.storage import Storage, StoredFile
from state_ops.storage.store import UNFINISHED

_ATTEMPT = r"\d+-[0-9a-f]{32}"
_STAGED = re.compile(
    rf"(?:state/[^/]+/(?P<state>g\d+-e\d+)/{_ATTEMPT}/[^/]+"
    rf"|channels/[^/]+/(?P<channel>g\d+-e\d+)/{_ATTEMPT}(?:/{NUMBER_OR_OUTPUT})?\.parquet"
    rf"|exchange/[^/]+/(?P<blocks>g\d+-e\d+)/{_ATTEMPT}/\d+\.blocks"
    rf"|outputs/[^/]+/(?P<output>g\d+-e\d+)/{_ATTEMPT}\.parquet"
    rf"|tables/(?P<table>[^/]+)/data(?:-(?P<whose>[0-9a-f]{{8}}))?/(?P<rows>g\d+-e\d+)/{_ATTEMPT}(?:/\d+)?\.parquet)"
)
_LANDED = re.compile(r"landed/[^/]+/[0-9a-f]{32}\.(?:parquet|json)")
_REGISTRY_DATA = re.compile(r"registry/\w+/(?:data|checkpoint_id=\d+)/\d{20}-[0-9a-f]{32}\.parquet")
_BY_ANYBODY = (f"{HOLDS}/", "coordinator/requests/", f"{restore_progress.DIRECTORY}/")
_NOTES = re.compile(
    r"coordinator/(?:lease|origin|held|halt|unpublished|fsck|fsck-quick|drill|(?:requests|holds|restoring)/[0-9a-f]{32})\.json|(?:promotes|backfill)\.json"
)
_LOG = re.compile(r"(?P<table>(?:registry|tables)/[^/]+)/_delta_log/(?P<name>.+)")
_PROBED_AFTER = re.compile(rf"registry/{re.escape(PROBE)}g(\d+)-")
_HALF_IN_LOG = re.compile(r"_commit_.*\.tmp|.*#\d+")  # what delta-rs renames or links into place on a local disk


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A file that has to be there.

    Attributes:
        digest: Sha256 that was recorded; None: only its own page checksums can be looked at.
        live: It is part of a table that people read.
        checkpoints: The retained ones that name it.
    """

    path: str
    bytes: int
    digest: str | None
    live: bool
    checkpoints: tuple[CheckpointId, ...]

    @property
    def missing(self) -> Kind:
        return Kind.MISSING_ROWS if self.live else Kind.MISSING_OBJECT

    @property
    def altered(self) -> Kind:
        return Kind.ALTERED_ROWS if self.live else Kind.ALTERED_OBJECT

    @property
    def whose(self) -> str:
        if self.checkpoints:
            ids = ", ".join(str(id) for id in self.checkpoints)
            return f"checkpoint{'s' if len(self.checkpoints) > 1 else ''} {ids}"
        return "the table's newest version"


def tables_with_staged_rows(paths: Iterable[str]) -> set[str]:
    """Return the names of the tables in whose directories Weir has staged rows."""
    return {match["table"] for path in paths if (match := _STAGED.fullmatch(path)) is not None and match["table"]}


def expectations(seen: Survey, tables: Mapping[str, SinkTable]) -> dict[str, ExpectedFile]:
    """Return by path the objects that retained checkpoints and published tables need.

    Rows that are published belong to their table: they may have been compacted and vacuumed, and only what the table
    still names has to be there.
    """
    live = {path: size for table in tables.values() for path, size in table.files.items()}
    wanted = {}
    for path, named in seen.named.items():
        table = tables.get(named.sink or "")
        if named.kind == OUTPUT and path.startswith(OF_TABLES) and path not in live and table is not None:
            published = (table.version or 0) >= named.checkpoints[0]
            if published or table.problem is not None:
                continue
        wanted[path] = ExpectedFile(path, named.bytes, named.digest, path in live, tuple(named.checkpoints))
    for path, size in live.items():
        if path not in wanted:
            wanted[path] = ExpectedFile(path, size, None, True, ())
    return wanted


def compare(wanted: Mapping[str, ExpectedFile], stored: Mapping[str, int]) -> Iterator[Finding]:
    """Yield the objects that have to be there and are missing, or have another size."""
    for path, expected in wanted.items():
        size = stored.get(path)
        if size is None:
            yield Finding.of(expected.missing, f"It is gone; needed by {expected.whose}.", path, expected.checkpoints)
        elif size != expected.bytes:
            what = f"It has {size:,} bytes instead of {expected.bytes:,}; needed by {expected.whose}."
            yield Finding.of(expected.altered, what, path, expected.checkpoints, size)


def superfluous(
    storage: Storage, seen: Survey, tables: Mapping[str, SinkTable], stored: Mapping[str, int], app_id: str
) -> Iterator[Finding]:
    """Yield the files that nothing names.

    While it is not known in full what is named, none of the files that Weir writes is reported.
    """
    ours: dict[str, list[StoredFile]] = {}
    whose = data_directory("", app_id, True).rpartition("-")[2]
    for path, size in stored.items():
        file = StoredFile(path, size)
        if path in seen.named or path in seen.held:
            continue
        if (other := _STAGED.fullmatch(path)) is not None and other["whose"] not in (None, whose):
            continue  # another pipeline writes to that table as well, and sweeps it
        if branch_of(path) is not None and seen.readable:
            yield Finding.of(Kind.ORPHAN_OBJECT, "It is of a branch that was dropped.", path, bytes=size)
        elif path.rpartition("/")[2].startswith(UNFINISHED):
            yield from _half_written(seen, file)
        elif path.startswith(f"registry/{PROBE}"):
            after = _PROBED_AFTER.match(path)
            if after is None or int(after[1]) < seen.fence:  # else a taker may be at work in it
                yield Finding.of(Kind.PROBE, "A scratch table of a start that was cut off.", path, bytes=size)
        elif (staged := _STAGED.fullmatch(path)) is not None and (staged["table"] is None or staged["table"] in tables):
            if staged["table"] is not None:
                if path not in tables[staged["table"]].files:
                    ours.setdefault(staged["table"], []).append(file)
            elif seen.readable and _is_fenced(
                seen, staged["state"] or staged["channel"] or staged["blocks"] or staged["output"]
            ):
                yield Finding.of(Kind.ORPHAN_OBJECT, "No retained checkpoint names it.", path, bytes=size)
        elif _LANDED.fullmatch(path):
            if not seen.alive:  # else an epoch may be reading it
                yield Finding.of(
                    Kind.ORPHAN_OBJECT, "Rows that were landed for an epoch that has ended.", path, bytes=size
                )
        elif (entry := _LOG.fullmatch(path)) is not None and (
            entry["table"] in TABLES or entry["table"].removeprefix("tables/") in tables
        ):
            if _HALF_IN_LOG.fullmatch(entry["name"]) and not seen.alive:
                elsewhere = entry["table"] not in TABLES  # others may commit to a published table at any time
                what = "A commit to the table's log that was cut off."
                yield Finding.of(Kind.HALF_WRITTEN, what, path, bytes=size, leave=elsewhere)
        elif path.startswith(tuple(f"{table}/" for table in (*TABLES, RESTORES))) or _NOTES.fullmatch(path):
            continue  # `unnamed_registry_files` knows what the registry's tables name
        else:
            table = path.split("/")[1] if path.startswith("tables/") else ""
            if table in tables:
                ours.setdefault(table, []).append(file)
            else:
                yield _foreign(file)
    for name, files in ours.items():
        yield from _in_table(storage, seen, tables[name], files)


def _in_table(storage: Storage, seen: Survey, table: SinkTable, files: list[StoredFile]) -> Iterator[Finding]:
    """Return the files in a table's directory that its newest version does not have.

    Files that the log has ever mentioned are the log's business.
    """
    if table.problem is not None or not seen.readable:
        return
    candidates = [file.path for file in files if file.path not in table.files]
    if not candidates:
        return
    try:
        in_log = mentioned(storage, table.path, candidates)
    except UNREADABLE as error:
        yield Finding.of(Kind.UNREADABLE_TABLE, f"An entry of its log cannot be read: {plainly(error)}", table.path)
        return
    holder = lease.read(storage)
    early = (holder.early_id or 0) if holder is not None else 0
    for file in files:
        if file.path in in_log or file.path in table.files:
            continue
        staged = _STAGED.fullmatch(file.path)
        if staged is None:
            yield _foreign(file)
        elif _is_fenced(seen, staged["rows"]):
            what = "Rows that no retained checkpoint names, and that the table's log never mentioned."
            parsed = parse_epoch_dir(staged["rows"])
            # A process that was taken for dead delivers its epoch's rows before their commit, unless the table is past
            # that epoch: then its publish is a no-op.
            may_come = parsed is not None and (table.version or 0) < parsed[1] <= early
            yield Finding.of(Kind.ORPHAN_ROWS, what, file.path, bytes=file.bytes, leave=may_come)


def unnamed_registry_files(storage: Storage, seen: Survey, stored: Mapping[str, int]) -> Iterator[Finding]:
    """Return data files in the registry's directories that its tables do not name.

    A living coordinator may be about to commit them.
    """
    for path in TABLES:
        try:
            handle = (
                open_table(storage, path) if any(file.startswith(f"{path}/_delta_log/") for file in stored) else None
            )
            named = {f"{path}/{file.path}" for file in active_files(handle)} if handle else set()
        except UNREADABLE:
            continue  # reading the registry said so already
        for file, size in stored.items():
            if not file.startswith(f"{path}/") or file.startswith(f"{path}/_delta_log/") or file in named:
                continue
            if file.rpartition("/")[2].startswith(UNFINISHED):
                continue
            if not _REGISTRY_DATA.fullmatch(file):
                yield _foreign(StoredFile(file, size))
            elif not seen.alive and seen.readable:
                what = "The table's log does not name it: a commit or a prune was cut off."
                yield Finding.of(Kind.UNNAMED_REGISTRY_FILE, what, file, bytes=size)


def _half_written(seen: Survey, file: StoredFile) -> Iterator[Finding]:
    parts = file.path.split("/")
    epoch = next((name for name in parts[2:4] if parse_epoch_dir(name)), None)
    what = "A file that was being written when its process ended."
    if epoch is not None:
        if _is_fenced(seen, epoch):
            yield Finding.of(Kind.HALF_WRITTEN, what, file.path, bytes=file.bytes)
    elif parts[0] in ("registry", "coordinator", "tables"):
        if not seen.alive:
            # Requests, holds and what restores say are written by anybody at any time: the writer of this one may be at
            # it.
            anybody = file.path.startswith(_BY_ANYBODY) or parts[0] == "tables"
            yield Finding.of(Kind.HALF_WRITTEN, what, file.path, bytes=file.bytes, leave=anybody)
    else:
        yield _foreign(file)


def _is_fenced(seen: Survey, epoch: str) -> bool:
    parsed = parse_epoch_dir(epoch)
    return parsed is not None and parsed[0] < seen.fence


def _foreign(file: StoredFile) -> Finding:
    return Finding.of(Kind.FOREIGN_FILE, "Weir writes no file of such a name here.", file.path, bytes=file.bytes)
