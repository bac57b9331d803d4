"""Replacing the rows of a range of event time in a sink's table, as one commit: those of the table go, others come.

Tables need no partitions for it. A file whose rows all lie in the range goes; one with some of them is written anew
without them; null is in no range. That is done while the commit is made, on the very version that it follows, so
whatever others have done to the table since is respected. A try that was cut off leaves files that no log names, which
are removed once one has landed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from state_ops.arrow.parquet import staged_writer
from state_ops.delta.log_entries import DataFile, active_files
from state_ops.errors import DamageError, WeirError
from state_ops.ids import new_attempt_id
from state_ops.moments import from_micros, to_micros
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.publications import Publication
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together
from weir.connectors.delta.append import check_committed
from weir.connectors.delta.statistics import statistics
from weir.connectors.delta.table_commit import (
    RANGE,
    TableChange,
    branch_of,
    commit,
    data_files,
    file_path,
    publication,
    staging_directory,
    table_path,
)
from weir.connectors.formats.stored_rows import stored_rows
from weir.connectors.parquet.footers import times

_DAY = 86_400_000_000  # microseconds


@dataclass(frozen=True, slots=True)
class Range:
    """Event times from `start` on, up to and without `end`: microseconds since 1970 UTC."""

    shown_as: ClassVar = "in_words"

    start: int
    end: int

    @property
    def in_words(self) -> str:
        """Its first minute and its end, for people."""
        return f"{from_micros(self.start):%Y-%m-%d %H:%M} to {from_micros(self.end):%Y-%m-%d %H:%M}"

    def __str__(self) -> str:
        return self.in_words

    def of(self, table: pa.Table, column: str) -> pa.Array:
        """Return which rows lie in the range; never null."""
        times = table.column(column)
        bounds = [_as(times.type, bound) for bound in (self.start, self.end)]
        within = pc.and_(pc.greater_equal(times, bounds[0]), pc.less(times, bounds[1]))
        return pc.fill_null(within, False)


def overlaps(text: str, wanted: Range) -> bool:
    """Return whether a range that a table's log has as text may share rows with another range.

    The text is of whole minutes. True if it cannot be read.
    """
    try:
        start, end = (
            to_micros(datetime.strptime(part, "%Y-%m-%d %H:%M").replace(tzinfo=UTC)) for part in text.split(" to ")
        )
    except ValueError:
        return True
    return start < wanted.end and wanted.start < end


def check_bounds(table: str, schema: pa.Schema, column: str, wanted: Range) -> None:
    """Raise WeirError if a table knows days, and the range begins or ends within one."""
    if pa.types.is_date(schema.field(column).type) and (wanted.start % _DAY or wanted.end % _DAY):
        raise WeirError(
            f"The range {wanted} begins or ends within a day, and the table {table} knows only days ({column}).",
            next="Choose whole days in UTC, or replace all since then (backfill.replaces: since).",
        )


def _as(type: pa.DataType, micros: int) -> pa.Scalar:
    moment = from_micros(micros)
    if pa.types.is_date(type):
        return pa.scalar(moment.date(), type)
    return pa.scalar(moment if type.tz is not None else moment.replace(tzinfo=None), type)


def only(local: Path, target: Path, column: str, wanted: Range, inside: bool) -> int:
    """Write the rows of a Parquet file that lie in a range, or outside it, to another one; returns how many those
    are."""
    rows = 0
    with stored_rows(local) as source, staged_writer(target, source.schema) as writer:
        for table in source.batches():
            within = wanted.of(table, column)
            kept = table.filter(within if inside else pc.invert(within))
            writer.write_table(kept)
            rows += kept.num_rows
    return rows


def overwrite(
    storage: Storage,
    app_id: str,
    table: str,
    checkpoint: Checkpoint,
    files: Sequence[StateFile],
    scratch: Path,
    *,
    evolves: bool = False,
) -> Publication:
    """Carry out a promotion of a range that is committed, on one table, exactly once however often this is called.

    Args:
        files: The rows of the range that come.
        scratch: A directory for the table's files, one for each transfer at a time.
        evolves: The table gets the columns of theirs that it lacks.

    Raises:
        DamageError: The table is not where the registry says.
    """
    started, sink, adds = time.perf_counter(), checkpoint.sinks[table], data_files(storage, table, files)
    wanted, column = Range(sink.start, sink.end), sink.column
    assert column is not None, "only the promotion of a range comes here"

    def change_of(handle: DeltaTable) -> TableChange:
        new = check_committed(storage, handle, table, checkpoint.id, adds, evolves=evolves)
        goes, rests = _apart(storage, app_id, table, checkpoint, active_files(handle), column, wanted, scratch)
        return TableChange([*rests, *adds], goes, {RANGE: f"{column}: {wanted}", **branch_of(sink)}, new)

    damaged = partial(_unreachable, storage, table)
    committed = commit(storage, app_id, table, checkpoint, sink.before, change_of, damaged)
    change = committed.change
    if change is None:
        return publication(checkpoint, table, committed.version, len(adds), 0, started)
    remove_unnamed(storage, app_id, table, checkpoint, change.adds)
    rows = sum(file.rows for file in change.adds) - sum(file.rows for file in change.removes)
    return publication(checkpoint, table, committed.version, len(change.removes) + len(change.adds), rows, started)


def touched(storage: Storage, table: str, active: Sequence[DataFile], column: str, wanted: Range, scratch: Path) -> int:
    """Return how many rows of a table lie in a range. Files with such rows are read.

    Args:
        scratch: As `overwrite` takes it.
    """

    def count(file: DataFile, _: object) -> int:
        within = _within(storage, table, file, column, wanted)
        if within is not None:
            return file.rows if within else 0
        with storage.fetched(file_path(table, file), scratch) as local, stored_rows(local) as source:
            rows = wanted.of(source.read([column]), column)
            return int(pc.sum(rows).as_py() or 0)

    return sum(together(count, list(active), at_once=storage.transfers))


def _apart(
    storage: Storage,
    app_id: str,
    table: str,
    checkpoint: Checkpoint,
    active: Sequence[DataFile],
    column: str,
    wanted: Range,
    scratch: Path,
) -> tuple[list[DataFile], list[DataFile]]:
    """Return the files that go, and what comes instead of those that have rows outside of the range as well."""
    attempt = new_attempt_id()
    directory = staging_directory(storage, app_id, table, checkpoint).removeprefix(f"{table_path(table)}/")

    def part(numbered: tuple[int, DataFile], _: object) -> tuple[DataFile | None, DataFile | None]:
        number, file = numbered
        within = _within(storage, table, file, column, wanted)
        if within is not None:
            return (file if within else None), None
        with storage.fetched(file_path(table, file), scratch) as local:
            rest = local.with_name("rest")
            rows, before = only(local, rest, column, wanted, inside=False), pq.read_metadata(local).num_rows
            if rows == before:
                return None, None
            if not rows:
                return file, None
            path = f"{directory}/{number}-{attempt}.parquet"
            size, _digest = storage.put_file(rest, f"{table_path(table)}/{path}")
            footer = pq.read_metadata(rest)
            return file, DataFile(path, size, rows, file.partition, statistics=statistics(footer))

    # Numbers above those of the rows that come: names are unique by the attempt, and a subtask's number is read by
    # people.
    parts = together(part, list(enumerate(active)), at_once=storage.transfers)
    return [goes for goes, _ in parts if goes is not None], [rest for _, rest in parts if rest is not None]


def _within(storage: Storage, table: str, file: DataFile, column: str, wanted: Range) -> bool | None:
    """Return whether all rows of a file lie in a range (True) or none does (False), or None if it has to be read.

    It is decided by the file's partition or its statistics.
    """
    partition = dict(file.partition)
    if column in partition:  # a day, which the file itself may not have
        day = partition[column]
        start = to_micros(datetime.fromisoformat(day).replace(tzinfo=UTC)) if day is not None else None
        return start is not None and wanted.start <= start < wanted.end
    footer = storage.parquet_footer(file_path(table, file))
    if footer.num_rows == 0:
        return False
    span = times(footer, column)
    if span is None:
        return None
    if span.greatest < wanted.start or span.least >= wanted.end:
        return False
    whole = wanted.start <= span.least and span.greatest < wanted.end and not span.nulls
    return True if whole else None


def remove_unnamed(storage: Storage, app_id: str, table: str, checkpoint: Checkpoint, kept: Sequence[DataFile]) -> None:
    """Remove what other tries have written and no log names. Only once the commit has landed: until then one of them
    may still land."""
    directory = staging_directory(storage, app_id, table, checkpoint)
    named = {f"{table_path(table)}/{file.path}" for file in kept}
    storage.delete_files([file.path for file in storage.list(directory, unfinished=True) if file.path not in named])


def _unreachable(storage: Storage, table: str, why: str) -> DamageError:
    return DamageError(
        f"A range of the table {table} cannot be replaced: {why}.",
        where=storage.full(table_path(table)),
        next="Nothing was changed in it. Was it dropped, restored or written by someone else? Put it back first.",
    )
