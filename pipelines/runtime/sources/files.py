"""Parquet files that arrive in a directory: plan a slice, watch that nobody changes it, report what arrives too late.

A position is what has been read, in bounded space: the newest `_REMEMBERED` names with their times of change, and of the
older ones (at or below `floor`) their number, the sum of their hashes and the newest of their times of change. So a file
that appears below the floor is reported; docs/adr/0004-file-positions.md says when it cannot be.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import structlog

from configs.settings import EpochSettings, S3Settings
from pipelines.runtime.definition import FileSource
from pipelines.runtime.sources.footers import nanos, shifts_dates, times
from pipelines.runtime.sources.parquet_files import ParquetFiles
from pipelines.runtime.sources.slices import LeftOut, Slice, SourceFile
from state_ops import frames
from state_ops.errors import ConfigurationError, InputError
from state_ops.s3 import arrow_filesystem, is_s3, refuse_secrets

_REMEMBERED = 10_000
_HASH_BITS = 64
_GLOB = re.compile(r"[\\{}\[\]*?]")
_OBJECT_STORES = frozenset({"abfs", "gcs", "s3"})  # where a directory is no more than the names in it
_MOST_REMOTE = 8  # files

log = structlog.get_logger("weir.source")


def literal(path: str) -> str:
    """A path that Spark takes for itself and not for a pattern."""
    return _GLOB.sub(r"\\\g<0>", path)


class FilesReader:
    """One `FileSource` with its pattern resolved.

    pattern: absolute directory or URI, then a file name pattern. s3: how s3:// is reached. only: asked at each listing for what says which
    names may be read; None: all.
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
        """Whether so many files can be opened in other processes as in this one, one after the other. Other file systems may need what only this host
        or only the JVM has; an object store takes its time for each."""
        return self._fs.type_name == "local" or (self._fs.type_name == "s3" and files <= _MOST_REMOTE)

    def uri(self, file: SourceFile) -> str:
        """The file's place as people read it."""
        return self._parquet.uri(file)

    def spark_path(self, file: SourceFile) -> str:
        """The file's place as Spark reads it, which takes a path for a pattern unless its special characters are escaped."""
        return literal(self.uri(file))

    # -- what is there

    def exists(self) -> bool:
        """Whether the landing directory is there; on an object store, which has no directories, whether its bucket is."""
        if self._fs.type_name in _OBJECT_STORES:
            self._bucket_seen = self._bucket_seen or self._has_bucket()
            return self._bucket_seen
        return self._fs.get_file_info(self._path).type == pafs.FileType.Directory

    def _has_bucket(self) -> bool:
        return self._fs.get_file_info(self._path.partition("/")[0]).type != pafs.FileType.NotFound

    def check(self, position: dict[str, Any] | None) -> None:
        """Whether reading may go on from `position`: call it when a run begins and whenever it looks for input.

        Raises InputError if files were read from a directory that is gone or from another one, and, by policy, if files
        arrived below the floor. `backlog` finds nothing amiss, so that one can always look.
        """
        self._check_directory(position)
        if position and position["floor"] is not None:
            self._check_below(position, self._split(position)[1])

    def backlog(self, position: dict[str, Any] | None) -> list[SourceFile]:
        """The files that have not been read, in name order, none if there is no directory; one listing, no file is opened."""
        return self._split(position)[0]

    def plan(self, position: dict[str, Any] | None, limits: EpochSettings, expected: pa.Schema | None) -> Slice:
        """The next slice after `position`: fresh files in name order up to a limit. Opens the files' footers.

        expected: schema of what was read before; without it the first file sets it. Raises InputError that names the file,
        also for what `check` raises it, and TransientError if storage fails. A file beyond a limit is not opened, so it can
        do no harm to the slice before it.
        """
        self._check_directory(position)
        fresh, below = self._split(position)
        if position and position["floor"] is not None:
            self._check_below(position, below)
        return self._planned(fresh, limits, expected)

    def plan_again(self, recorded: Mapping[str, Any], expected: pa.Schema | None) -> Slice:
        """The slice of an epoch that was, as `Slice.to_dict` recorded it. Raises InputError if a file is not what it was.

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
        rows = size = 0
        newest: int | None = None
        told = True
        schema, limited = expected, False
        for file in fresh:
            if (
                chosen
                and limits is not None
                and (len(chosen) >= limits.max_files or rows >= limits.max_rows or size + file.size > limits.max_bytes)
            ):
                limited = True
                break
            with self._about(file):
                self._check_name(file)
                footer, stored = self._parquet.footer(file)
                if chosen and limits is not None and rows + footer.num_rows > limits.max_rows:
                    limited = True
                    break
                found = frames.canonical_schema(stored)
                schema = found if schema is None else self._check_schema(file, schema, found)
                self._check_event_time(file, found)
            by_nanos = tuple(name for name in nanos(stored) if name in schema.names)
            by_spark = bool(by_nanos) or pa.uint64() in stored.types or shifts_dates(footer)
            chosen.append(replace(file, rows=footer.num_rows, nanos=by_nanos, by_spark=by_spark))
            rows, size = rows + footer.num_rows, size + file.size
            found = times(footer, self.source.event_time) if self.source.event_time is not None else None
            told = told and (found is not None or footer.num_rows == 0)
            if found is not None:
                newest = found.greatest if newest is None else max(newest, found.greatest)
        return Slice(tuple(chosen), limited, newest if told else None, schema)

    def advance(
        self, position: dict[str, Any] | None, files: tuple[SourceFile, ...], newest: int | None = None
    ) -> dict[str, Any]:
        """The position after reading `files`. newest: their newest event time, as in `Slice`."""
        old = position or {"files": 0, "floor": None, "below": 0, "below_sum": 0, "seen": [], "last": None}
        times = dict(zip(old["seen"], old.get("seen_ns") or [None] * len(old["seen"]), strict=True))
        times.update((file.name, file.mtime_ns) for file in files)
        names = sorted(times)
        kept, sunk = names[-_REMEMBERED:], names[:-_REMEMBERED]
        known = [times[name] for name in sunk]
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
            "seen_ns": [times[name] for name in kept],
        }

    def again(self, then: dict[str, Any] | None, now: dict[str, Any] | None) -> tuple[list[SourceFile], list[str]]:
        """What was read between two positions: the files that are there as they were, and the names of those that are not.

        Files that the later position remembers by number alone are named as that. One listing.
        """
        before = set(then["seen"]) if then else set()
        times = zip(now["seen"], now.get("seen_ns") or [None] * len(now["seen"]), strict=True) if now else ()
        read = {name: ns for name, ns in times if name not in before}
        here = {file.name: file for file in self._list() if file.name in read}
        same = [here[name] for name, ns in read.items() if name in here and ns in (None, here[name].mtime_ns)]
        gone = sorted(read.keys() - {file.name for file in same})
        forgotten = (now["files"] if now else 0) - (then["files"] if then else 0) - len(read)
        return same, gone + ([f"{forgotten} older files, whose names are not remembered"] if forgotten > 0 else [])

    def without(self, planned: Slice, more: Sequence[LeftOut]) -> Slice:
        """The same slice without some more rows, whose event times must close nothing. Reads the event times of its files."""
        left_out, newest = (*planned.left_out, *more), planned.newest
        column = self.source.event_time
        if newest is not None and column is not None:
            newest = None
            for file in planned.files:
                times = self.table(file, [column]).column(column)
                kept = np.ones(len(times), dtype=bool)
                kept[[one.row for one in left_out if one.file == file.name]] = False
                left = frames.canonical(pa.table([times.filter(pa.array(kept))], [column])).column(0)
                last = pc.max(left.cast(pa.int64())).as_py()
                if last is not None:
                    newest = last if newest is None else max(newest, last)
        return replace(planned, left_out=left_out, newest=newest)

    def table(self, file: SourceFile, columns: Sequence[str] | None = None) -> pa.Table:
        """One file's rows, whole in memory. Large slices are read by Spark; this is for who needs one file alone. Raises as `batches`."""
        with self._about(file), self._parquet.decoded(file) as parquet:
            return parquet.read(None if columns is None else list(columns), use_threads=False)

    def batches(self, file: SourceFile, columns: pa.Schema, rows: int) -> Iterator[pa.Table]:
        """One file's columns, so many rows at a time; its bytes are whole in memory. columns: as the slice was planned.

        Raises InputError if it is gone, damaged or not what was planned, and TransientError if storage fails.
        """
        with self._about(file), self._parquet.decoded(file) as parquet:
            if any(name not in parquet.schema_arrow.names for name in columns.names):
                raise self._parquet.changed(file)
            for batch in parquet.iter_batches(rows, columns=columns.names, use_threads=False):
                yield frames.canonical(pa.Table.from_batches([batch]).select(columns.names)).cast(columns)

    def verify(self, planned: Slice) -> None:
        """InputError if a file of the slice is gone or is not the file that was planned."""
        now = {file.name: file for file in self._stat([file.name for file in planned.files])}
        for file in planned.files:
            found = now.get(file.name)
            with self._about(file):
                if found is None:
                    raise InputError(
                        "A file vanished while an epoch was reading it.",
                        where=self.uri(file),
                        next="Put it back, or let its producer write under temporary names and rename; the epoch was declined.",
                    )
                if (found.size, found.mtime_ns) != (file.size, file.mtime_ns):
                    raise self._parquet.changed(file)

    def are_as_read(self, files: Mapping[str, Sequence[int]]) -> bool:
        """Whether files are there as an epoch saw them. files: by name, size in bytes and time of change in ns since 1970."""
        now = {file.name: [file.size, file.mtime_ns] for file in self._stat(list(files))}
        return now == {name: list(figures) for name, figures in files.items()}

    # -- how

    @contextmanager
    def _about(self, file: SourceFile) -> Iterator[None]:
        """Whatever is raised for input is about this file, as it was when it was listed."""
        try:
            yield
        except InputError as error:
            error.files = {self.source.name: {file.name: (file.size, file.mtime_ns)}}
            raise

    def _split(self, position: dict[str, Any] | None) -> tuple[list[SourceFile], list[SourceFile]]:
        """One listing: what was not read, in name order; and what sorts at or below the floor."""
        seen = set(position["seen"]) if position else set()
        floor = position["floor"] if position else None
        fresh, below = [], []
        allowed = self._only() if self._only is not None else None
        for file in self._list():
            if floor is not None and file.name <= floor:
                below.append(file)
            elif file.name not in seen and (allowed is None or allowed(file.name)):
                fresh.append(file)
        return sorted(fresh, key=lambda file: file.name), below

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
                    next="Name the directory as before, or rename the source, with its old name in retired=, to read all anew.",
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
        times = {name: ns for name, ns in zip(position["seen"], position["seen_ns"], strict=True) if ns is not None}
        here = [file for file in self._list() if file.name in times]
        if not here or any(file.mtime_ns != times[file.name] for file in here):
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
        # Hadoop takes a relative name with a colon for a URI: in its local file system's checksums, and in any escaped path.
        if ":" in file.name and (self._fs.type_name not in _OBJECT_STORES or self.spark_path(file) != self.uri(file)):
            raise InputError(
                f"The input file {file.name} has a colon in its name, so Spark cannot read it.",
                where=self.uri(file),
                next=f"Rename it, or move it out of {self.directory}; nothing of this epoch was applied.",
            )

    def _check_schema(self, file: SourceFile, expected: pa.Schema, found: pa.Schema) -> pa.Schema:
        for field in expected:
            if field.name not in found.names:
                raise InputError(
                    f"The input file {file.name} has no column {field.name!r} ({field.type}), which earlier files have.",
                    where=self.uri(file),
                    next=f"Repair it, or move it out of {self.directory}; nothing of this epoch was applied.",
                )
            other = found.field(field.name).type
            if other != field.type:
                raise InputError(
                    f"The column {field.name!r} of the input file {file.name} is {other}; earlier files have {field.type}.",
                    where=self.uri(file),
                    next=f"Repair it, or move it out of {self.directory}; nothing of this epoch was applied.",
                )
        return expected

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

    def _check_below(self, position: dict[str, Any], below: list[SourceFile]) -> None:
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


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_HASH_BITS // 8).digest(), "big")
