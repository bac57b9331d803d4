"""Taking a sink's table back to what it was after an earlier checkpoint, as one commit.

    version    12 (checkpoint 3)   13 (4)   14 (5)   15 (rewind 6, to 3): removes what 13 and 14 added, and says that 6
               is published

The commit carries the rewind's id as the transaction version, so whoever still wants to publish 4 or 5 finds that done.
Delta keeps the versions in between for as long as its log and its files are kept. Files that somebody removed meanwhile
come back if they are there still. What others commit after the rewind was decided stays.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from state_ops.counts import agrees, counted
from state_ops.delta import fenced_table
from state_ops.delta.log_entries import DataFile, active_files
from state_ops.errors import DamageError, plainly
from state_ops.facts import FLAT, HIDDEN, Facts, Named, fact
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.publications import Publication
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together
from weir.connectors.delta.append import check_committed
from weir.connectors.delta.replace_partitions import replaced_by, without
from weir.connectors.delta.replace_where import remove_unnamed
from weir.connectors.delta.statistics import statistics
from weir.connectors.delta.table_commit import (
    BRANCH,
    CHECKPOINT,
    RANGE,
    TableChange,
    branch_of,
    commit,
    data_files,
    file_path,
    publication,
    seen_by,
    staging_directory,
    table_path,
)

log = Logger("weir.rewind")

REWIND = "weir.rewind_to"
_HARMLESS = frozenset(  # they change no rows
    {"SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "VACUUM START", "VACUUM END", "ADD COLUMN"}
)


@dataclass(frozen=True, slots=True)
class Promoted:
    """A promotion that a table has published, as its log says.

    Attributes:
        checkpoint: Its id.
        version: Of the table, which it made.
        branch: The id of its branch. None: it is of an earlier release, or no promotion but a rewind, which one of
            these does not tell.
        range: Of event time, whose rows alone it replaced, as text. None: all since its branch's base.
    """

    checkpoint: int
    version: int
    branch: str | None
    range: str | None


@dataclass(frozen=True, slots=True)
class RowsBack(Facts):
    """The numbers of a table's rows that change when the table is taken back.

    Attributes:
        changed: Rows whose keys stay and that are again what they were; 0: a table without keys does not tell.
        gone: Rows that are there no more.
        come: Rows that are there again.
    """

    changed: Annotated[int, Named("rows_changed")]
    gone: Annotated[int, Named("rows_gone")]
    come: Annotated[int, Named("rows_come")]

    def __str__(self) -> str:
        ways = [
            (self.changed, agrees(self.changed, "changes back", "change back")),
            (self.gone, agrees(self.gone, "goes", "go")),
            (self.come, agrees(self.come, "comes back", "come back")),
        ]
        return ", ".join(f"{counted(number, 'row')} {verb}" for number, verb in ways if number) or "no row changes"


@dataclass(frozen=True, slots=True)
class TableRewind(Facts):
    """The changes that a rewind makes to one table.

    Attributes:
        version: The one that it is decided on.
        then: The one whose rows come back, None: no rows.
        goes, comes: Files.
        unknown: Commits of others that lie between, as version and operation.
        vacuumed: Files that would have to come back, and are not there.
        promoted: What was promoted into it in between and would be taken back, oldest first.
        becomes: What that does to its rows; None: nobody has looked, or there are too many.
    """

    table: Annotated[str, HIDDEN]
    version: int
    then: Annotated[int | None, Named("as_of_version")]
    goes: Annotated[tuple[DataFile, ...], HIDDEN]
    comes: Annotated[tuple[DataFile, ...], HIDDEN]
    unknown: Annotated[tuple[tuple[int, str], ...], Named("unknown_commits")]
    vacuumed: Annotated[tuple[str, ...], Named("vacuumed_files")]
    promoted: Annotated[tuple[Promoted, ...], HIDDEN] = ()
    becomes: Annotated[RowsBack | None, FLAT] = None

    @property
    @fact
    def files_removed(self) -> int:
        """The number of files that go."""
        return len(self.goes)

    @property
    @fact
    def files_restored(self) -> int:
        """The number of files that come back."""
        return len(self.comes)

    @property
    @fact
    def rows_removed(self) -> int:
        """The number of rows that the table has fewer afterwards."""
        return sum(file.rows for file in self.goes) - sum(file.rows for file in self.comes)

    @property
    def in_words(self) -> str:
        """The changes of its rows, for people."""
        if self.becomes is not None:
            return str(self.becomes)
        gone, come = (counted(sum(file.rows for file in files), "row") for files in (self.goes, self.comes))
        return f"files with {gone} go, older ones with {come} come back"


def planned(storage: Storage, table: str, to: int | None) -> TableRewind | None:
    """Return the changes that bring a table back to the publish of checkpoint `to`, or None if there is no table.

    `to` is None for the time before the first one.

    Raises:
        DamageError: The table's log does not reach back so far.
    """
    try:
        handle = fenced_table.open_table(storage, table_path(table))
    except TableNotFoundError:
        return None
    then, between = _since(storage, handle, table, to)
    goes, comes, vacuumed = _difference(storage, table, active_files(handle), files_at(storage, table, then))
    foreign = [entry for entry in between if CHECKPOINT not in entry and entry.get("operation") not in _HARMLESS]
    unknown = tuple((int(entry["version"]), str(entry.get("operation"))) for entry in foreign)
    return TableRewind(table, handle.version(), then, goes, comes, unknown, vacuumed, tuple(_promoted(between)))


def _promoted(between: Sequence[dict[str, Any]]) -> list[Promoted]:
    """Return the promotions, and rewinds that may be some, among entries of a table's log, oldest first; without those
    that were taken back."""
    promotions: list[Promoted] = []
    taken_back: list[range] = []
    for entry in sorted(between, key=lambda entry: int(entry["version"]), reverse=True):
        id = int(entry.get(CHECKPOINT, 0))
        if any(id in ids for ids in taken_back):
            continue
        if RANGE in entry or REWIND in entry:
            text = entry[RANGE].partition(": ")[2] if RANGE in entry else None
            promotions.append(Promoted(id, int(entry["version"]), entry.get(BRANCH), text))
        if REWIND in entry:
            taken_back.append(range(int(entry[REWIND]) + 1, id))
    return promotions[::-1]


def rewind(
    storage: Storage,
    app_id: str,
    table: str,
    checkpoint: Checkpoint,
    previous: int | None,
    files: Sequence[StateFile] = (),
    *,
    replaces: Path | None = None,
    evolves: bool = False,
) -> Publication:
    """Carry out a rewind or a promotion that is committed, on one table, exactly once however often this is called.

    Args:
        previous: The checkpoint that the table is expected to have.
        files: A branch's rows, which come in the same commit.
        replaces: They are the only ones of what they replace; a directory for files, one for each transfer at a time.
        evolves: The table gets the columns of theirs that it lacks.
    """
    started, sink, adds = time.perf_counter(), checkpoint.sinks[table], data_files(storage, table, files)

    def change_of(handle: DeltaTable) -> TableChange:
        new: list[pa.Field] = []
        rests: list[DataFile] = []
        if adds:  # what comes back was in this very table
            new = check_committed(storage, handle, table, checkpoint.id, adds, evolves=evolves)
        then, since = _since(storage, handle, table, sink.to)
        # A process that has not heard of the rewind may have published what is abandoned after that was decided.
        at = max([sink.at, *(int(entry["version"]) for entry in since if CHECKPOINT in entry)])
        now, wanted = active_files(handle), files_at(storage, table, then)
        if replaces is not None and adds and then is not None:
            was = fenced_table.open_table(storage, table_path(table), then)
            asked = replaced_by(storage, table, adds)
            out, rests = without(storage, table, was, wanted, asked, directory, replaces)
            gone = {file.path for file in out}
            wanted = [file for file in wanted if file.path not in gone]
        active = {file.path for file in now}
        goes, comes, vacuumed = _difference(storage, table, files_at(storage, table, at), wanted)
        if any(file.path not in active for file in goes):
            # Its rows are in other files by now, so only the whole version can come back.
            log.warning("what others committed since a rewind was decided is taken back too", table=table)
            goes, comes, vacuumed = _difference(storage, table, now, wanted)
        comes = tuple(described(storage, table, file) for file in comes if file.path not in active)
        if vacuumed:
            log.warning("files that a rewind would bring back are vacuumed", table=table, files=list(vacuumed))
        return TableChange([*comes, *rests, *adds], goes, {REWIND: str(sink.to or 0), **branch_of(sink)}, new)

    directory = staging_directory(storage, app_id, table, checkpoint).removeprefix(f"{table_path(table)}/")
    damaged = partial(_unreachable, storage, table)
    committed = commit(storage, app_id, table, checkpoint, previous, change_of, damaged)
    if committed.change is None:
        return publication(checkpoint, table, committed.version, 0, 0, started)
    if replaces is not None and adds:
        remove_unnamed(storage, app_id, table, checkpoint, committed.change.adds)
    goes = committed.change.removes
    rows = sum(file.rows for file in adds) - sum(file.rows for file in goes)
    return publication(checkpoint, table, committed.version, len(goes) + len(adds), rows, started)


def kept_for(storage: Storage, table: str) -> timedelta | None:
    """Return how long a table's log reaches back at least, and so the age of a checkpoint to go back to.

    None: there is no table, or its property is of a form that Delta does not document.
    """
    try:
        handle = fenced_table.open_table(storage, table_path(table))
    except TableNotFoundError:
        return None
    text = handle.metadata().configuration.get("delta.logRetentionDuration", "interval 30 days")
    duration = re.fullmatch(r"(?:interval\s+)?(\d+)\s+(second|minute|hour|day|week)s?", text.strip().lower())
    return timedelta(**{f"{duration[2]}s": int(duration[1])}) if duration else None


def described(storage: Storage, table: str, file: DataFile) -> DataFile:
    """Return a file as the log is to name it again: with its number of rows and what else its footer tells."""
    footer = storage.parquet_footer(file_path(table, file))
    return replace(file, rows=footer.num_rows, bounds=(), statistics=statistics(footer))


def version_of(storage: Storage, handle: DeltaTable, table: str, to: int | None) -> int | None:
    """Return the version that published a checkpoint, None for before all. Raises DamageError when the log does not
    reach back so far."""
    return _since(storage, handle, table, to)[0]


def _since(storage: Storage, handle: DeltaTable, table: str, to: int | None) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the version that published a checkpoint, None for before all, and the entries after it that came before
    the handle's version. Where that checkpoint's rows never came (at most once), the one that published the last
    before; where none had come by then, as the whole log tells, the one before all."""
    entries = seen_by(storage, table, handle.history())
    history = [entry for entry in entries if entry["version"] <= handle.version()]
    published = [int(entry["version"]) for entry in history if CHECKPOINT in entry]
    wanted = [int(entry["version"]) for entry in history if to is not None and int(entry.get(CHECKPOINT, to + 1)) <= to]
    first = min(int(entry["version"]) for entry in history)
    # A log without any publication may be of a table that was put in its place, whose rows would stay.
    nothing_came = first == 0 and (published or not active_files(handle))
    if to is not None and not wanted and not nothing_came:
        raise _unreachable(storage, table, f"its log does not reach back to checkpoint {to}")
    if to is None and published and first:
        raise _unreachable(storage, table, f"its log begins with version {first}")
    then = wanted[0] if wanted else min(published) - 1 if published else handle.version()
    return then, [entry for entry in history if entry["version"] > then]


def files_at(storage: Storage, table: str, version: int | None) -> list[DataFile]:
    """Return the files of a version of a table; none for None. Raises DamageError when it cannot be read any more."""
    if version is None:
        return []
    try:
        return active_files(fenced_table.open_table(storage, table_path(table), version))
    except DeltaError as error:
        raise _unreachable(
            storage, table, f"its version {version} cannot be read any more: {plainly(error)}"
        ) from error


def _difference(
    storage: Storage, table: str, now: Sequence[DataFile], then: Sequence[DataFile]
) -> tuple[tuple[DataFile, ...], tuple[DataFile, ...], tuple[str, ...]]:
    """Return the files that go, those that come back, and those that would have to and are not there."""
    present, wanted = {file.path for file in now}, {file.path for file in then}
    back = [file for file in then if file.path not in present]

    def exists(file: DataFile, _: object) -> bool:
        return storage.size(file_path(table, file)) is not None

    existing = together(exists, back, at_once=storage.transfers)
    comes = tuple(file for file, is_there in zip(back, existing, strict=True) if is_there)
    vacuumed = tuple(file.path for file, is_there in zip(back, existing, strict=True) if not is_there)
    return tuple(file for file in now if file.path not in wanted), comes, vacuumed


def _unreachable(storage: Storage, table: str, why: str) -> DamageError:
    return DamageError(
        f"The table {table} cannot be taken back: {why}.",
        where=storage.full(table_path(table)),
        next="Nothing was changed in it. Rewind to a newer checkpoint; or start another pipeline from a savepoint: "
        "weir run NEW --from PIPELINE:NAME.",
    )
