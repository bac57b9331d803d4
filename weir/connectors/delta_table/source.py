"""A Delta table as a source: the files of the version at which it begins, then those of each later version, in order.

    position {"table": id, "version": 7, "index": 2}                    the third file that version 7 adds is next
    position {"table": id, "version": 7, "index": 2, "snapshot": true}  the third file that version 7 has is next

A position also has the digest of the entry that was read last, by which another history is told: a table that was
brought back from an older copy and has grown past it.

An entry of the log never changes, so the files of a version have one order for ever: that of the entry; those of the
starting version have the order of their age. A file is a part.

Appends alone are read, unless the source says `changes=True`: then rows come as in the change data feed, from the files
that writers note for it; where a version has none, rows of removed files are deleted, and then those of added ones
inserted. In either case what is gone comes before what is new: several files of changes are read twice, first for the
one and then for the other (`halves`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_ops.errors import DamageError, InputError, LostError, MissingError, PipelineError, WeirError, first_line
from state_ops.storage.storage import check_path
from state_ops.storage.transfers import together
from weir.connectors.delta_table.data_file import rows_of
from weir.connectors.delta_table.table_log import AFTER_LOSS, Commit, LoggedFile, Metadata, TableLog
from weir.connectors.parquet.bounds import TooMuchError
from weir.connectors.parquet.rows import DecodedRows
from weir.definition.change_feed import CHANGE_TYPE, COMMIT_TIME, TAKEN_BACK, VERSION
from weir.definition.source import (
    EARLIEST,
    LATEST,
    SKIP,
    Batch,
    Connector,
    Lag,
    Limits,
    Lost,
    Opening,
    Part,
    Planned,
    Position,
    Rejected,
    Source,
    SourceCapabilities,
    no_position,
)

_PARTITION = "table"
_TYPE, _VERSION, _TIME = CHANGE_TYPE, VERSION, COMMIT_TIME
_CHANGES = pa.schema([(_TYPE, pa.string()), (_VERSION, pa.int64()), (_TIME, pa.timestamp("us", "UTC"))])
_GONE, _NEW = "gone", "new"
_COUNTED = 1_000  # files that wait are counted up to here
_REQUESTS = 8  # at a time
_PASSED = 20  # versions without a row, after which a position is recorded before the log forgets them


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTableSource(Source):
    """The rows that a Delta table gains, or its change data feed.

    Attributes:
        path: The table's directory or URI, with {placeholders} from the configuration.
        changes: Rows that are updated and deleted come too, with the columns `_change_type`, `_commit_version` and
            `_commit_timestamp`.
    """

    path: str
    changes: bool = False

    @property
    def kind(self) -> str:
        return "delta"

    @property
    def capabilities(self) -> SourceCapabilities:
        return SourceCapabilities(place=self.path)

    @property
    def hands_out_changes(self) -> bool:
        return self.changes

    def open(self, opening: Opening) -> Connector:
        return _Connector(self, opening)


@dataclass(frozen=True, slots=True)
class _Place:
    """A position.

    Attributes:
        snapshot: It is among all files of the version, and not among those that it adds.
        digest: Of the log's last entry that was read, in hex; None: it is not known, as an earlier release left it.
        halves: The index counts the files of a version's changes twice, first for the rows that are gone. Positions of
            earlier releases count them once.
    """

    table: str
    version: int
    index: int = 0
    snapshot: bool = False
    digest: str | None = field(default=None, compare=False)
    halves: bool = False

    @classmethod
    def of(cls, position: Position) -> _Place:
        snapshot, digest = position.get("snapshot", False), position.get("digest")
        halves = position.get("halves", False)
        return cls(position["table"], position["version"], position["index"], snapshot, digest, halves)

    @property
    def last(self) -> int:
        """The version whose entry was read last; -1: none was."""
        return self.version if self.index or self.snapshot else self.version - 1

    def to_dict(self) -> dict[str, Any]:
        place = {"table": self.table, "version": self.version, "index": self.index}
        place |= {name: True for name in ("snapshot", "halves") if getattr(self, name)}
        return place | ({"digest": self.digest} if self.digest is not None else {})

    def is_before(self, end: _Place | None) -> bool:
        return end is None or (self.version, self.index) < (end.version, end.index)

    def counts_halves(self, end: _Place | None) -> bool:
        """Return whether this place and the end count the halves of the version's files, as far as they say."""
        ends = [place for place in (self, end) if place is not None and place.index and place.version == self.version]
        return all(place.halves for place in ends)

    def behind(self, number: int, count: int) -> _Place:
        """Return the place behind a file, by its number among so many."""
        if number + 1 < count:
            return replace(self, index=number + 1, digest=None)
        return _Place(self.table, self.version + 1)


def _halved(files: Sequence[LoggedFile]) -> tuple[LoggedFile, ...]:
    """Return files of changes: first for the rows that are gone, then for the new ones.

    A row that moves to another partition is in two files, in any order.
    """
    return tuple(replace(file, of=of) for of in (_GONE, _NEW) for file in files)


class _Connector:
    def __init__(self, source: DeltaTableSource, opening: Opening) -> None:
        self._source = source
        self._seek = f"weir seek {opening.pipeline} {source.name} --to"
        self._log = TableLog(opening.resolve(source.path), f"source {source.name}", opening.s3, self._seek)
        self._quiet: tuple[_Place, _Place] | None = None  # from the one to below the other, no row changes

    def begin(self, start: str | datetime | Position) -> Position:
        with self._log.asking():
            first, newest, metadata = self._log.opened()
            _columns(self._source, self._log, metadata)
            if isinstance(start, Mapping):
                return self._given(start, metadata.id)
            if start == EARLIEST:
                return self._signed(_Place(metadata.id, newest, snapshot=True))
            if start == LATEST:
                return self._signed(_Place(metadata.id, newest + 1))
            if isinstance(start, datetime):
                return self._signed(_Place(metadata.id, self._at(start, first, newest)))
        raise PipelineError(
            f"start={start!r} is no place to begin in a table.",
            where=self._log.where,
            next='Say "earliest", "latest", a time, or a position {"version": n}.',
        )

    def _given(self, start: Position, table: str) -> Position:
        place = {"table": table, "index": 0, "snapshot": False, "digest": None, "halves": False, **start}
        numbers = [place.get("version"), place["index"]]
        if (
            place.keys() != {"table", "version", "index", "snapshot", "digest", "halves"}
            or place["table"] != table
            or not all(type(number) is int and number >= 0 for number in numbers)
            or not type(place["snapshot"]) is type(place["halves"]) is bool
            or not isinstance(place["digest"], str | None)
        ):
            raise no_position(start, '{"version": 0}', f"{self._log.where}, table {table}")
        return self._signed(_Place.of(place))

    def _signed(self, at: _Place) -> Position:
        """Return a place as a position, by which another history of the table is told from the one that was read."""
        return replace(at, digest=at.digest or self._log.digest(at.last)).to_dict()

    def _at(self, start: datetime, first: int, newest: int) -> int:
        """Return the first version that was committed at a time or later."""
        wanted = (start if start.tzinfo is not None else start.replace(tzinfo=UTC)).timestamp() * 1000

        def time(version: int) -> int:
            commit = self._log.commit(version)
            return commit.time if commit is not None else 0

        version = bisect_left(range(first, newest + 1), wanted, key=time) + first
        if version == first > 0:
            raise LostError(
                f"The log begins with version {first}, which is later than {start}: what came before is cleaned away.",
                where=f"{self._log.where}, {self._log.uri}",
                next='Say "earliest", which begins with all rows that the table has now, or a later time.',
            )
        return version

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        at = begin = _Place.of(position)
        if hold:  # it has one partition
            return Planned((), at.to_dict(), True, {_PARTITION: False})
        end = _Place.of(upto) if upto is not None else None
        parts, lost = list[Part](), list[Lost]()
        rows = size = 0
        limited = False
        with self._log.asking():
            try:
                at = self._continued(at, end, lost)
                for part, behind in self._ahead(at, end):
                    if part is not None and not self._is_left_out(part, lost):
                        rows, size = rows + (part.rows or 0), size + (part.bytes or 0)
                        limited = len(parts) >= limits.parts or rows > limits.rows or size > limits.bytes
                        if limited and parts:
                            break
                        parts.append(part)
                    at, limited = behind, False
            except InputError:
                if not parts and not lost:
                    raise
                limited = True  # what is wrong is said once this is read
            as_given = begin if at == begin else end if end is not None and at == end else None
            position_behind = as_given.to_dict() if as_given else self._signed(replace(at, digest=None))
            is_end = not limited and not at.snapshot and (end is None or not self._log.has(at.version))
        passes = not parts and at.version - position["version"] >= _PASSED
        return Planned(tuple(parts), position_behind, limited, {_PARTITION: is_end}, tuple(lost), passes)

    def _continued(self, at: _Place, end: _Place | None, lost: list[Lost]) -> _Place:
        """Return the place at which reading goes on.

        If versions have been cleaned away, it raises LostError, or adds to `lost`.
        """
        if self._quiet is not None and self._quiet[0].table == at.table and at.index == 0 and not at.snapshot:
            begin, behind = self._quiet
            if begin.version <= at.version < behind.version and (end is None or not end.is_before(behind)):
                at = behind
        version = self._log.follow(at.table, at.version, (at.last, at.digest))
        if version == at.version or not at.is_before(end):
            return at
        which = f"Version {at.version}" if version == at.version + 1 else f"Versions {at.version} to {version - 1}"
        what = f"{which} cannot be read any more: the log's entries have been cleaned away, and rows with them"
        if self._source.on_lost != SKIP:
            raise LostError(f"{what}.", where=f"{self._log.where}, {self._log.uri}", next=AFTER_LOSS)
        lost.append(Lost(self._log.uri, f"{what}."))
        return _Place(at.table, version)

    def _is_left_out(self, part: Part, lost: list[Lost]) -> bool:
        if self._source.on_lost != SKIP or self._log.storage.size(self._path(part)) is not None:
            return False
        missing = Lost(part.place["path"], f"A file of version {part.place['version']} is gone.")
        lost += [missing] if missing not in lost else []  # of the other half
        return True

    def _ahead(self, at: _Place, end: _Place | None) -> Iterator[tuple[Part | None, _Place]]:
        """Yield the parts from a place on, each with the place behind it; no part where a version has none."""
        if at.snapshot:
            commit = self._log.commit(at.version)
            files = self._log.files(at.version)
            yield from self._parts(at, end, files, commit.time if commit is not None else 0)
            at = _Place(at.table, at.version + 1)
        while at.is_before(end) and (commit := self._log.commit(at.version)) is not None:
            files, behind = self._changed(at.table, commit), _Place(at.table, at.version + 1)
            if len(files) > 1 and files is commit.changes and at.counts_halves(end):
                files, at = _halved(files), replace(at, halves=True)
            if not files:
                self._quiet = (self._quiet[0] if self._quiet is not None and self._quiet[1] == at else at, behind)
            yield from self._parts(at, end, files, commit.time)
            at = behind

    def _parts(
        self, at: _Place, end: _Place | None, files: Sequence[LoggedFile], time: int
    ) -> Iterator[tuple[Part | None, _Place]]:
        if at.index >= len(files):
            yield None, _Place(at.table, at.version + 1)
        for number in range(at.index, len(files)):
            if not replace(at, index=number).is_before(end):
                return
            yield self._part(at, number, files[number], time), at.behind(number, len(files))

    def _part(self, at: _Place, number: int, file: LoggedFile, time: int) -> Part:
        try:
            check_path(file.path)
        except DamageError:
            raise self._log.problem(
                f"The file {file.path} lies elsewhere, as those of a shallow clone do, or its name has a colon or a "
                "backslash.",
                "Read the table from which it was cloned, or a deep clone.",
                at.version,
            ) from None
        place: dict[str, Any] = {"table": at.table, "version": at.version, "path": file.path, "time": time}
        place |= {"size": file.bytes, "partition": dict(file.partition), "change": file.change}
        place |= {"of": file.of} if file.of is not None else {}
        kind = "-all" if at.snapshot else "" if file.of is None else f"-{file.of}"
        name = f"{quote(at.table, safe='')}-{at.version}-{number}{kind}"
        return Part(name, _PARTITION, place, file.rows, file.bytes)

    def _changed(self, table: str, commit: Commit) -> tuple[LoggedFile, ...]:
        """Return the files of a commit that are read. Raises InputError for what is no append, unless changes are
        read."""
        metadata = self._log.metadata(commit.version, table)
        _columns(self._source, self._log, metadata)
        if self._source.changes and commit.changes:
            return commit.changes
        restored = commit.operation == "RESTORE" and commit.adds
        if not self._source.changes and (commit.removes or restored):
            if commit.is_replacement:
                raise self._replaced(commit)
            raise self._log.problem(
                f"The table was not only added to: {commit.operation} removed or restored rows.",
                f"Read its changes (changes=True); or leave this version out: {self._behind(commit)}; or rewind this "
                "pipeline too, and seek then.",
                commit.version,
            )
        if commit.vectors:
            raise self._log.with_vectors(commit.version)
        return self._derived(commit, metadata) if self._source.changes else commit.adds

    def _replaced(self, commit: Commit) -> InputError:
        return self._log.problem(
            "A pipeline of Weir replaced rows of the table (delta.upsert or delta.replace), which notes no changes.",
            "Let a stage of that pipeline append these rows (delta.append), and read that table; a change data feed "
            f"would stop it. To leave this version out: {self._behind(commit)}.",
            commit.version,
        )

    def _behind(self, commit: Commit) -> str:
        return f"`{self._seek} '{{\"version\": {commit.version + 1}}}'`"

    def _derived(self, commit: Commit, metadata: Metadata) -> tuple[LoggedFile, ...]:
        """Return the files of a commit whose rows are the changes: first those that are gone, then those that are
        new."""
        if commit.removes and commit.adds and not metadata.has_feed:
            if commit.is_replacement:
                raise self._replaced(commit)
            raise self._log.problem(
                f"{commit.operation} changed rows, and the table did not note which: its change data feed was off.",
                "Set delta.enableChangeDataFeed=true on the table; and leave this version out: "
                f"{self._behind(commit)}; or begin again: `{self._seek} earliest`.",
                commit.version,
            )
        if metadata.partition_by and any(not file.partition for file in commit.removes):
            raise self._log.problem(
                "A removed file's partition is not said in the log.", "Leave this version out.", commit.version
            )
        return (*commit.removes, *commit.adds)

    def read(self, part: Part) -> Iterator[Batch]:
        place = part.place
        with self._log.asking():
            metadata = self._log.metadata(place["version"], place["table"])
            values = {name: place["partition"].get(name) for name in metadata.partition_by}
            columns = metadata.columns
            if self._source.changes and place["change"] is None:
                columns = pa.schema([*columns, _CHANGES.field(_TYPE)])
            with self._fetched(part) as local, self._about(part):
                for found in rows_of(local, columns, values):
                    yield _batch(found, place, self._source.changes)

    @contextmanager
    def _about(self, part: Part) -> Iterator[None]:
        """Raise errors as errors about a part's file."""
        try:
            yield
        except WeirError:
            raise
        except Exception as error:  # each library has its own for bytes that are no Parquet
            verb = "" if isinstance(error, TooMuchError) else "cannot be read: "
            raise InputError(
                f"A file of the table {verb}{first_line(error)}.", where=self.where(part), next=_LOOK
            ) from error

    @contextmanager
    def _fetched(self, part: Part) -> Iterator[Path]:
        """Return the part's file on a disk of this host. Raises LostError, and InputError if it has another size."""
        storage, path = self._log.storage, self._path(part)
        try:
            local = self._log.on_disk(part.place["path"])
            if local is not None:
                _check_size(part, self.where(part), local.stat().st_size)
                yield local
                return
            with storage.fetched(path, Path(gettempdir())) as local:
                _check_size(part, self.where(part), local.stat().st_size)
                yield local
        except (FileNotFoundError, MissingError):
            raise _gone(self.where(part)) from None

    def _path(self, part: Part) -> str:
        return f"{self._log.name}/{part.place['path']}"

    def verify(self, parts: Sequence[Part]) -> None:
        def check(part: Part, _: object) -> None:
            _check_size(part, self.where(part), self._log.storage.size(self._path(part)))

        with self._log.asking():
            together(check, parts, at_once=_REQUESTS)

    def lag(self, position: Position) -> Lag:
        at, lost = _Place.of(position), list[Lost]()
        rows = size = time = count = 0
        is_estimate = False
        with self._log.asking():
            try:
                for part, _ in self._ahead(self._continued(at, None, lost), None):
                    if part is None:
                        continue
                    if count == _COUNTED:
                        is_estimate = True
                        break
                    count += 1
                    is_estimate |= part.rows is None
                    rows, size, time = rows + (part.rows or 0), size + (part.bytes or 0), part.place["time"]
            except InputError:  # the plan says it
                is_estimate = True
        return Lag(rows, size, time * 1000 if time else None, is_estimate or bool(lost))

    def where(self, part: Part) -> str:
        return f"source {self._source.name}, {self.title(part)}"

    def title(self, part: Part) -> str:
        return f"{self._log.uri}, version {part.place['version']}, {part.place['path']}"

    def places(self, part: Part, rows: int) -> Sequence[str | None]:
        numbers: list[int] = []
        with suppress(WeirError):
            for batch in self.read(part):
                assert batch.numbers is not None, "each of its batches says them"
                numbers += batch.numbers()
        return [f"{self.title(part)}, row {number}" for number in numbers] if len(numbers) == rows else [None] * rows

    def committed(self, position: Position) -> None:
        pass

    def close(self) -> None:
        pass


def _columns(source: DeltaTableSource, log: TableLog, metadata: Metadata) -> pa.Schema:
    """Return the columns of rows. Raises InputError if there is no event time among them."""
    columns, named = metadata.columns, source.event_time
    if source.changes:
        if taken := set(columns.names) & set(_CHANGES.names):
            raise log.problem(
                f"The table has a column {min(taken)} itself.", "Rename it, or read the table without changes=True."
            )
        columns = pa.schema([*columns, *_CHANGES])
    if named is not None and not (named in columns.names and pa.types.is_timestamp(columns.field(named).type)):
        raise log.problem(
            f"The event time {named} is no timestamp of the table.", f"It has {', '.join(columns.names)}."
        )
    return columns


def _batch(found: DecodedRows, place: Mapping[str, Any], changes: bool) -> Batch:
    """Return the rows of a file as its part gives them.

    changes: True if the source reads changes.
    """
    rows, numbers, bad = found.table, found.numbers, found.bad
    if place.get("of") is not None:
        is_new = place["of"] == _NEW
        kept = _is_gone(rows) != is_new
        rows, numbers = rows.filter(pa.array(kept)), numbers[kept]
        bad = tuple(value for value, is_gone in zip(bad, _is_gone(found.aside), strict=True) if is_gone != is_new)
    rejected = tuple(Rejected(value.row + 1, value.reason, value.raw) for value in bad)
    with_changes = _with_changes(rows, place) if changes else rows
    return Batch(with_changes, rejected, lambda: (numbers + 1).tolist())


def _is_gone(rows: pa.Table) -> np.ndarray:
    """Return bool[n], the rows that are known to be gone."""
    gone: np.ndarray = pc.is_in(rows.column(_TYPE), pa.array(TAKEN_BACK)).to_numpy()
    return gone.astype(bool)


def _with_changes(rows: pa.Table, place: Mapping[str, Any]) -> pa.Table:
    count = rows.num_rows
    if place["change"] is not None:
        rows = rows.append_column(_CHANGES.field(_TYPE), pa.repeat(place["change"], count))
    time = pa.scalar(place["time"] * 1000, pa.timestamp("us", "UTC"))
    rows = rows.append_column(_CHANGES.field(_VERSION), pa.repeat(pa.scalar(place["version"], pa.int64()), count))
    return rows.append_column(_CHANGES.field(_TIME), pa.repeat(time, count))


def _check_size(part: Part, where: str, size: int | None) -> None:
    if size is None:
        raise _gone(where)
    if part.place["size"] not in (None, size):
        raise InputError(
            f"A file of the table has {size} bytes, and {part.place['size']} by the log: it was written anew.",
            where=where,
            next=_LOOK,
        )


def _gone(where: str) -> LostError:
    return LostError("A file of the table is gone: it was vacuumed.", where=where, next=AFTER_LOSS)


_LOOK = "Look at the table with what writes it; nothing of this epoch was applied."
