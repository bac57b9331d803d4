"""Parquet files that arrive in a directory: plan a slice, watch that nobody changes it, report what arrives too late.

A position is what has been read, in bounded space: the newest `_REMEMBERED` names with their times of change and sizes,
and of the older ones (at or below `floor`) their number, the sum of their hashes and the newest of their times of
change. So a file that appears below the floor is reported, and one that was delivered again after it was read;
docs/adr/0004-file-positions.md says when it cannot be.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import structlog

from configs.settings import EpochSettings, S3Settings
from pipelines.runtime.definition import FileSource
from pipelines.runtime.sources.footers import alone, by_arrow, enums, nanos, times, too_large
from pipelines.runtime.sources.parquet_files import ParquetFiles, retyped
from pipelines.runtime.sources.slices import LeftOut, SetAside, Slice, SourceFile
from state_ops.arrow import frames
from state_ops.errors import ConfigurationError, InputError, VanishedError
from state_ops.storage.s3 import arrow_filesystem, is_s3, refuse_secrets

DELIVERED_AGAIN = "Deliver what is new in them under other names, or replay the range of event time that they have: docs/how-to/backfills.md."
"""What a person does about files that were delivered again after they were read."""

_REMEMBERED = 10_000
_HASH_BITS = 64
_GLOB = re.compile(r"[\\{}\[\]*?]")
_OBJECT_STORES = frozenset({"abfs", "gcs", "s3"})  # where a directory is no more than the names in it
_MOST_REMOTE = 8  # files
_LOOKED_AT = 1 << 20  # rows at a time

log = structlog.get_logger("weir.source")


def named(files: Sequence[SourceFile], most: int = 3) -> str:
    """How many files, and the names of the first of them."""
    names = ", ".join(file.name for file in files[:most]) + (", ..." if len(files) > most else "")
    return f"{len(files)} {'file' if len(files) == 1 else 'files'}: {names}"


def literal(path: str) -> str:
    """A path that Spark takes for itself and not for a pattern."""
    return _GLOB.sub(r"\\\g<0>", path)


@dataclass(frozen=True, slots=True)
class _Read:
    """What a position remembers of a file; None: an older Weir read it, and did not note that."""

    mtime_ns: int | None
    size: int | None

    def is_still(self, file: SourceFile) -> bool:
        return self.mtime_ns in (None, file.mtime_ns) and self.size in (None, file.size)


def _read_at(position: Mapping[str, Any] | None) -> dict[str, _Read]:
    """The files that a position remembers, by name."""
    if position is None:
        return {}
    none = [None] * len(position["seen"])
    times, sizes = position.get("seen_ns") or none, position.get("seen_bytes") or none
    return {name: _Read(ns, size) for name, ns, size in zip(position["seen"], times, sizes, strict=True)}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What one listing of a source says beside a position, by name in each part.

    Attributes:
        fresh: The files that have not been read.
        below: The files that sort at or below the floor.
        again: The files that were delivered again after they were read, so that what they have now is not read.
    """

    fresh: tuple[SourceFile, ...]
    below: tuple[SourceFile, ...]
    again: tuple[SourceFile, ...]


class FilesReader:
    """One `FileSource` with its pattern resolved.

    pattern: absolute directory or URI, then a file name pattern. s3: how s3:// is reached. only: asked at each listing
    for what says which names may be read; None: all.
    """

    def __init__(
        self,
        source: FileSource,
        pattern: str,
        s3: S3Settings | None = None,
        only: Callable[[], Callable[[str], bool]] | None = None,
    ) -> None:
        self.source, self.pattern, self._s3, self._only = source, pattern, s3, only
        directory, _, self._names = pattern.rpartition("/")
        refuse_secrets(directory, f"source {source.name}")
        if any(mark in directory for mark in "*?["):
            raise ConfigurationError(
                f"Only the file name may have wildcards, not the directory: {pattern}",
                where=f"source {source.name}",
                next="Name one directory, e.g. {landing}/*.parquet.",
            )
        self.directory = directory
        if is_s3(directory):
            self._fs, self._path = arrow_filesystem(s3 or S3Settings()), directory.partition("://")[2]
            self._place = f"s3://{self._path}"
        elif "://" in directory:
            self._fs, self._path = pafs.FileSystem.from_uri(directory)
            scheme = directory.partition("://")[0]
            self._place = self._path if scheme == "file" else f"{scheme}://{self._path}"
        else:
            self._fs, self._path = pafs.LocalFileSystem(), directory
            self._place = directory
        self._parquet = ParquetFiles(self._fs, self._path, directory)
        self._warned: set[tuple[Any, ...]] = set()
        self._bucket_seen = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Without secrets, as S3Settings name them, and without `only`: elsewhere it reads files that were planned here.
        return FilesReader, (self.source, self.pattern, self._s3)

    def opens_in_workers(self, files: int) -> bool:
        """Whether so many files can be opened in other processes as in this one, one after the other. Other file
        systems may need what only this host or only the JVM has; an object store takes its time for each."""
        return self._fs.type_name == "local" or (self._fs.type_name == "s3" and files <= _MOST_REMOTE)

    def uri(self, file: SourceFile) -> str:
        """The file's place as people read it."""
        return self._parquet.uri(file)

    def spark_path(self, file: SourceFile) -> str:
        """The file's place as Spark reads it, which takes a path for a pattern unless its special characters are
        escaped."""
        return literal(self.uri(file))

    # -- what is there

    def exists(self) -> bool:
        """Whether the landing directory is there; on an object store, which has no directories, whether its bucket
        is."""
        if self._fs.type_name in _OBJECT_STORES:
            self._bucket_seen = self._bucket_seen or self._has_bucket()
            return self._bucket_seen
        return self._fs.get_file_info(self._path).type == pafs.FileType.Directory

    def _has_bucket(self) -> bool:
        return self._fs.get_file_info(self._path.partition("/")[0]).type != pafs.FileType.NotFound

    def check(self, position: dict[str, Any] | None) -> Arrivals:
        """Whether reading may go on from `position`, and what has arrived: call it when a run begins and whenever it
        looks for input.

        Raises InputError if files were read from a directory that is gone or from another one, and, by policy, if files
        arrived below the floor. `look` finds nothing amiss, so that one can always look. Both list the directory once.
        """
        self._check_directory(position)
        arrived = self.look(position)
        if position and position["floor"] is not None:
            self._check_below(position, arrived.below)
        return arrived

    def say_again(self, arrived: Arrivals) -> None:
        """Warn of the files that were delivered again and are not read, once for each delivery."""
        new = [file for file in arrived.again if self._first_time("again", file.name, file.mtime_ns, file.size)]
        if new:
            log.warning(
                "files were delivered again after they were read, and are not read again",
                source=self.source.name,
                directory=self.directory,
                files=named(new),
                next=DELIVERED_AGAIN,
            )

    def look(self, position: dict[str, Any] | None) -> Arrivals:
        """What has arrived, nothing if there is no directory; one listing, no file is opened."""
        read = _read_at(position)
        floor, newest = (position["floor"], position.get("below_newest_ns")) if position else (None, None)
        fresh, below, again = [], [], []
        allowed = self._only() if self._only is not None else None
        for file in sorted(self._list(), key=lambda file: file.name):
            if floor is not None and file.name <= floor:
                below.append(file)
                if newest is not None and file.mtime_ns > newest:
                    again.append(file)
            elif file.name in read:
                if not read[file.name].is_still(file):
                    again.append(file)
            elif allowed is None or allowed(file.name):
                fresh.append(file)
        return Arrivals(tuple(fresh), tuple(below), tuple(again))

    def backlog(self, position: dict[str, Any] | None) -> list[SourceFile]:
        """The files that have not been read, in name order; as `look`."""
        return list(self.look(position).fresh)

    def plan(self, position: dict[str, Any] | None, limits: EpochSettings, expected: pa.Schema | None) -> Slice:
        """The next slice after `position`: fresh files in name order up to a limit. Opens the files' footers.

        expected: schema of what was read before; without it the first file sets it. Raises InputError that names the
        file, also for what `check` raises it, and TransientError if storage fails. A file beyond a limit is not opened,
        so it can do no harm to the slice before it.
        """
        return self._planned(self.check(position).fresh, limits, expected)

    def plan_again(self, recorded: Mapping[str, Any], expected: pa.Schema | None) -> Slice:
        """The slice of an epoch that was, as `Slice.to_dict` recorded it. Raises InputError if a file is not what it
        was.

        Of rows that gates had set aside it knows which, and no more why.
        """
        files = recorded["files"]
        there = {file.name: file for file in self._stat([one["name"] for one in files])}
        for one in files:
            now = there.get(one["name"])
            if now is None or (now.size, now.mtime_ns) != (one["size"], one["mtime_ns"]):
                raise InputError(
                    f"The input file {one['name']} {'is gone' if now is None else 'has changed'} since it was read.",
                    where=f"{self.directory}/{one['name']}",
                    next="Keep input for as long as an epoch may have to be replayed.",
                )
        left_out = [
            LeftOut("", "", name, row, "") for name, rows in recorded.get("excluded", {}).items() for row in rows
        ]
        planned = self._planned([there[one["name"]] for one in files], None, expected)
        return replace(planned, left_out=tuple(left_out))

    def _planned(self, fresh: Sequence[SourceFile], limits: EpochSettings | None, expected: pa.Schema | None) -> Slice:
        """The first of these files, up to a limit. limits: None takes all."""
        chosen: list[SourceFile] = []
        set_aside: list[SetAside] = []
        rows = size = 0
        newest: int | None = None
        schema, limited = expected, False
        unread = dict[str, str]()
        for file in fresh:
            if (
                (chosen or set_aside)
                and limits is not None
                and (
                    len(chosen) + len(set_aside) >= limits.max_files
                    or rows >= limits.max_rows
                    or size + file.size > limits.max_bytes
                )
            ):
                limited = True
                break
            try:
                with self._about(file):
                    self._check_name(file)
                    footer, stored = self._parquet.footer(file)
                    if chosen and limits is not None and rows + footer.num_rows > limits.max_rows:
                        limited = True
                        break
                    bytes_too = frames.canonical_schema(stored)  # as earlier releases took the names of enums
                    found = frames.canonical_schema(retyped(stored, enums(footer, stored)))
                    fixed = found if schema is None else self._check_schema(file, schema, found, bytes_too)
                    self._check_types(file, footer, stored, fixed.names)
                    self._check_event_time(file, found)
                    last = self._newest(file, footer)
            except InputError as error:
                if limits is None or not self.sets_aside(file):
                    raise
                set_aside.append(self._set_aside(file, error))
                continue
            schema = fixed
            unread = {name: file.name for name in found.names if name not in schema.names} | unread
            by_nanos = tuple(name for name in nanos(footer, stored) if name in schema.names)
            unknown = by_arrow(footer, stored, schema.names)
            chosen.append(replace(file, rows=footer.num_rows, nanos=by_nanos, by_arrow=unknown))
            rows, size = rows + footer.num_rows, size + file.size
            if last is not None:
                newest = last if newest is None else max(newest, last)
        fresh_ones = [name for name in unread if self._first_time("unread", name)]
        if fresh_ones:
            log.warning(
                f"columns that the first files did not have are not read: {', '.join(fresh_ones)}",
                source=self.source.name,
                file=unread[fresh_ones[0]],
            )
        return Slice(tuple(chosen), limited, newest, schema, unread=tuple(unread), set_aside=tuple(set_aside))

    def sets_aside(self, file: SourceFile) -> bool:
        """Whether a file that cannot be read is left out: the source wants that, and the file is there as it was seen.
        One that is still being written, or has vanished, may be read yet."""
        wanted = self.source.on_bad == "quarantine"
        return wanted and self.are_as_read({file.name: (file.size, file.mtime_ns)})

    def _set_aside(self, file: SourceFile, error: InputError) -> SetAside:
        reason = error.what.splitlines()[0]
        log.warning("an input file is set aside", source=self.source.name, file=self.uri(file), reason=reason)
        return SetAside(file, reason)

    def without_file(self, planned: Slice, file: SourceFile, error: InputError, expected: pa.Schema | None) -> Slice:
        """The same slice without a file that turned out not to be readable; it is set aside. expected: as in `plan`."""
        rest = self._planned([one for one in planned.files if one.name != file.name], None, expected)
        return replace(
            rest,
            limited=planned.limited,
            left_out=tuple(one for one in planned.left_out if one.file != file.name),
            set_aside=(*planned.set_aside, self._set_aside(file, error)),
        )

    def advance(
        self,
        position: dict[str, Any] | None,
        files: tuple[SourceFile, ...],
        newest: int | None = None,
        set_aside: tuple[SetAside, ...] = (),
    ) -> dict[str, Any]:
        """The position after reading `files`. newest: their newest event time, as in `Slice`; set_aside: files that
        count as read, though they
        are not: one that is repaired comes under another name."""
        files = (*files, *(one.file for one in set_aside))
        old = position or {"files": 0, "floor": None, "below": 0, "below_sum": 0, "seen": [], "last": None}
        read = _read_at(old) | {file.name: _Read(file.mtime_ns, file.size) for file in files}
        names = sorted(read)
        kept, sunk = names[-_REMEMBERED:], names[:-_REMEMBERED]
        known: list[Any] = [read[name].mtime_ns for name in sunk]
        if old["below"]:
            known.append(old.get("below_newest_ns"))
        return {
            "directory": self._place,
            "newest": max([one for one in (old.get("newest"), newest) if one is not None], default=None),
            "files": old["files"] + len(files),
            "last": max([file.name for file in files] + ([old["last"]] if old["last"] else []), default=None),
            "floor": sunk[-1] if sunk else old["floor"],
            "below": old["below"] + len(sunk),
            "below_sum": (old["below_sum"] + sum(map(_hash, sunk))) % (1 << _HASH_BITS),
            # None: nothing is there, or an older Weir read some of it and did not note the time
            "below_newest_ns": None if None in known else max(known, default=None),
            "seen": kept,
            "seen_ns": [read[name].mtime_ns for name in kept],
            "seen_bytes": [read[name].size for name in kept],
            **_all_set_aside(old.get("set_aside"), set_aside),
        }

    def again(self, then: dict[str, Any] | None, now: dict[str, Any] | None) -> tuple[list[SourceFile], list[str]]:
        """What was read between two positions: the files that are there as they were, and the names of those that are
        not.

        Files that the later position remembers by number alone are named as that. One listing.
        """
        read, same, gone = self._compared(then, now)
        forgotten = (now["files"] if now else 0) - (then["files"] if then else 0) - len(read)
        return same, list(gone) + (
            [f"{forgotten} older files, whose names are not remembered"] if forgotten > 0 else []
        )

    def changed(self, then: dict[str, Any] | None, now: dict[str, Any] | None) -> dict[str, SourceFile | None]:
        """By name, what is there now of the files that were read between two positions and are gone (None) or not what
        they were, as far as the later position remembers names."""
        return self._compared(then, now)[2]

    def _compared(
        self, then: dict[str, Any] | None, now: dict[str, Any] | None
    ) -> tuple[dict[str, _Read], list[SourceFile], dict[str, SourceFile | None]]:
        """What was read between two positions, by name; the files of it that are as they were; by name, what is there
        now of the others."""
        before = set(then["seen"]) if then else set()
        read = {name: was for name, was in _read_at(now).items() if name not in before}
        here = {file.name: file for file in self._list() if file.name in read}
        same = [here[name] for name, was in read.items() if name in here and was.is_still(here[name])]
        others = sorted(read.keys() - {file.name for file in same})
        return read, same, {name: here.get(name) for name in others}

    def without(self, planned: Slice, more: Sequence[LeftOut]) -> Slice:
        """The same slice without some more rows, whose event times must close nothing. Reads the event times of its
        files."""
        left_out, newest = (*planned.left_out, *more), planned.newest
        column = self.source.event_time
        if newest is not None and column is not None:
            newest = None
            for file in planned.files:
                times = self.table(file, [column]).column(column)
                kept = np.ones(len(times), dtype=bool)
                kept[[one.row for one in left_out if one.file == file.name]] = False
                last = _greatest(times.filter(pa.array(kept)))
                if last is not None:
                    newest = last if newest is None else max(newest, last)
        return replace(planned, left_out=left_out, newest=newest)

    def table(self, file: SourceFile, columns: Sequence[str] | None = None) -> pa.Table:
        """One file's rows in canonical types, whole in memory. Large slices are read by Spark; this is for who needs
        one file alone. Raises as `batches`."""
        with self._about(file):
            return pa.concat_tables(self._parquet.tables(file, columns, max(file.rows, 1)))

    def batches(self, file: SourceFile, columns: pa.Schema, rows: int) -> Iterator[pa.Table]:
        """One file's columns, so many rows at a time; its bytes are whole in memory. columns: as the slice was planned.

        Raises InputError if it is gone, damaged or not what was planned, and TransientError if storage fails.
        """
        with self._about(file):
            for table in self._parquet.tables(file, columns.names, rows):
                yield table.cast(columns)

    def verify(self, planned: Slice) -> None:
        """InputError if a file of the slice is gone or is not the file that was planned."""
        now = {file.name: file for file in self._stat([file.name for file in planned.files])}
        for file in planned.files:
            found = now.get(file.name)
            with self._about(file):
                if found is None:
                    raise VanishedError(
                        "A file vanished while an epoch was reading it.",
                        where=self.uri(file),
                        next="Put it back, or let its producer write under temporary names and rename; the epoch was declined.",
                    )
                if (found.size, found.mtime_ns) != (file.size, file.mtime_ns):
                    raise self._parquet.changed(file)

    def are_as_read(self, files: Mapping[str, Sequence[int]]) -> bool:
        """Whether files are there as an epoch saw them. files: by name, size in bytes and time of change in ns since
        1970."""
        now = {file.name: [file.size, file.mtime_ns] for file in self._stat(list(files))}
        return now == {name: list(figures) for name, figures in files.items()}

    # -- how

    @contextmanager
    def _about(self, file: SourceFile) -> Iterator[None]:
        """Whatever is raised for input is about this file, as it was when it was listed."""
        try:
            yield
        except InputError as error:
            error.files = self.blamed(file)
            raise

    def blamed(self, file: SourceFile) -> dict[str, dict[str, tuple[int, int]]]:
        """The `files` of an error whose cause is this file alone."""
        return {self.source.name: {file.name: (file.size, file.mtime_ns)}}

    def _list(self) -> Iterator[SourceFile]:
        infos = self._fs.get_file_info(pafs.FileSelector(self._path, allow_not_found=True))
        for info in infos:
            name = info.base_name
            if info.type == pafs.FileType.File and name[:1] not in "._" and fnmatch.fnmatchcase(name, self._names):
                yield SourceFile(name, info.size, info.mtime_ns or 0)

    def _stat(self, names: list[str]) -> Iterator[SourceFile]:
        for info in self._fs.get_file_info([f"{self._path}/{name}" for name in names]):
            if info.type == pafs.FileType.File:
                yield SourceFile(info.base_name, info.size, info.mtime_ns or 0)

    def _check_directory(self, position: dict[str, Any] | None) -> None:
        if position and position["files"]:
            recorded = position.get("directory", self._place)
            if not self._same_place(recorded) and not self._moved(position):
                raise InputError(
                    f"The source {self.source.name} was read from {recorded} and now names {self._place}: files there with "
                    "names that were read would be taken as read already.",
                    where=f"source {self.source.name}",
                    next="Name the directory as before, or rename the source, with its old name in retired= and the new one in added=, to read all anew.",
                )
            if not self.exists():
                raise InputError(
                    f"The landing directory is gone, of which {position['files']} files were read.",
                    where=self.directory,
                    next="Mount it, put it back, or correct the source's pattern; nothing is read until then.",
                )
        elif not self.exists() and self._first_time("missing"):
            log.warning(f"landing directory does not exist yet: {self.directory}", source=self.source.name)

    def _same_place(self, recorded: str) -> bool:
        """Whether two spellings, through links or `..`, are one directory."""
        if recorded == self._place:
            return True
        return isinstance(self._fs, pafs.LocalFileSystem) and Path(recorded).resolve() == Path(self._place).resolve()

    def _moved(self, position: dict[str, Any]) -> bool:
        """Whether this is the recorded directory in another place: remembered files are here, all of them unchanged."""
        if ("moved", position["directory"]) in self._warned:
            return True
        read = {name: was for name, was in _read_at(position).items() if was.mtime_ns is not None}
        here = [file for file in self._list() if file.name in read]
        if not here or not all(read[file.name].is_still(file) for file in here):
            return False
        self._first_time("moved", position["directory"])
        log.warning(
            "the landing directory has moved", source=self.source.name, was=position["directory"], now=self._place
        )
        return True

    def _first_time(self, *what: Any) -> bool:
        new = what not in self._warned
        self._warned.add(what)
        return new

    def _check_name(self, file: SourceFile) -> None:
        # Hadoop takes a relative name with a colon for a URI: in its local file system's checksums, and in any escaped
        # path.
        if ":" in file.name and (self._fs.type_name not in _OBJECT_STORES or self.spark_path(file) != self.uri(file)):
            raise InputError(
                f"The input file {file.name} has a colon in its name, so Spark cannot read it.",
                where=self.uri(file),
                next=f"Rename it, or move it out of {self.directory}; nothing of this epoch was applied.",
            )

    def _check_schema(self, file: SourceFile, expected: pa.Schema, found: pa.Schema, bytes_too: pa.Schema) -> pa.Schema:
        fields = []
        for field in expected:
            if field.name not in found.names:
                raise InputError(
                    f"The input file {file.name} has no column {field.name!r} ({field.type}), which earlier files have.",
                    where=self.uri(file),
                    next=f"Repair it, or move it out of {self.directory}; nothing of this epoch was applied.",
                )
            other = found.field(field.name).type
            same = bytes_too.field(field.name).type == field.type
            common = field.type if same else frames.common_type(field.type, other)
            if common is None:
                raise InputError(
                    f"The column {field.name!r} of the input file {file.name} is {other}; earlier files have {field.type}.",
                    where=self.uri(file),
                    next=f"Repair it, or move it out of {self.directory}; nothing of this epoch was applied.",
                )
            fields.append(field.with_type(common))
        return pa.schema(fields)

    def _check_types(self, file: SourceFile, footer: pq.FileMetaData, stored: pa.Schema, names: Sequence[str]) -> None:
        for field in frames.canonical_schema(stored):
            if field.name in names and (part := frames.unreadable(field.type)) is not None:
                what = f"is {field.type}" if part == field.type else f"is {field.type}, with {part}"
                raise self._parquet.unreadable(file, field.name, f"{what}, a type that no stage can have")
        if (found := too_large(footer, stored, names)) is not None:
            raise self._parquet.unreadable(
                file, found[0], f"holds {found[1]}, and Weir has no number above {2**63 - 1}"
            )

    def _newest(self, file: SourceFile, footer: pq.FileMetaData) -> int | None:
        """The newest event time in a file: by its statistics, or by its rows where these do not tell."""
        column = self.source.event_time
        if column is None or not footer.num_rows:
            return None
        told = times(footer, column)
        if told is not None or not alone(footer, column):
            return told.greatest if told is not None else None
        found = [_greatest(part) for part in self._parquet.column(file, column, _LOOKED_AT)]
        return max((one for one in found if one is not None), default=None)

    def _check_event_time(self, file: SourceFile, found: pa.Schema) -> None:
        column = self.source.event_time
        if column is None:
            return
        kind = found.field(column).type if column in found.names else None
        if kind is None or not pa.types.is_timestamp(kind):
            raise InputError(
                f"The event time column {column!r} of the source {self.source.name} "
                + (f"is {kind}, not a timestamp." if kind else "is not in the file."),
                where=self.uri(file),
                next=f"Repair the file, move it out of {self.directory}, or correct event_time= of the source.",
            )

    def _check_below(self, position: dict[str, Any], below: Sequence[SourceFile]) -> None:
        floor, read, known = position["floor"], position["below"], position.get("below_newest_ns")
        total = sum(_hash(file.name) for file in below) % (1 << _HASH_BITS)
        late = sorted(
            (file for file in below if known is not None and file.mtime_ns > known), key=lambda file: file.name
        )
        if late:
            names = ", ".join(file.name for file in late[:3]) + (", ..." if len(late) > 3 else "")
            message = (
                f"{len(late)} files of {self.directory} sort at or below {floor!r} and are newer than all that were read "
                f"there, so they arrived too late or changed after they were read: {names}."
            )
        elif len(below) >= read and (len(below), total) != (read, position["below_sum"]):
            newest = max(below, key=lambda file: file.mtime_ns)
            message = (
                f"{len(below)} files of {self.directory} sort at or below {floor!r}, of which {read} were read: some arrived "
                f"too late to be told apart. The last to change is {newest.name}."
            )
        else:
            return  # all were read; or fewer are left, since old files may be cleaned away
        if self.source.below_floor == "warn":
            if self._first_time("below", position["files"], position["last"]):
                log.warning("files below the floor are not read", source=self.source.name, detail=message)
            return
        raise InputError(
            message,
            where=f"source {self.source.name}",
            next=f"Deliver them again under names above {floor!r} and take these away, or accept the loss with "
            'below_floor="warn" on the source.',
        )


def _greatest(times: pa.ChunkedArray) -> int | None:
    found: int | None = pc.max(times.cast(pa.int64())).as_py()
    return found


def _all_set_aside(before: Mapping[str, Any] | None, more: Sequence[SetAside]) -> dict[str, Any]:
    """How many files have been set aside so far, and the last of them; nothing for a source of which none was."""
    if more:
        return {"set_aside": {"files": (before or {}).get("files", 0) + len(more), "last": more[-1].to_dict()}}
    return {"set_aside": before} if before else {}


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_HASH_BITS // 8).digest(), "big")
