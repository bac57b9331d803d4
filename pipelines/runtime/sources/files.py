"""Parquet files that arrive in a directory: plan a slice, watch that nobody changes it, report what arrives too late.

A position is what has been read: the newest `_REMEMBERED` names one by one, and for the older ones (below `floor`) their
number and the sum of their hashes. That is bounded, and still tells when a file appears below the floor, so that such a
file is reported and never ignored.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import structlog

from configs.settings import EpochSettings
from pipelines.runtime.definition import FileSource
from state_ops import frames
from state_ops.checkpoint import to_micros
from state_ops.errors import ConfigurationError, InputError

_REMEMBERED = 10_000
_HASH_BITS = 64

log = structlog.get_logger("weir.source")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file as the slice saw it. size in bytes, mtime in ns since 1970; rows from its footer.

    nanos: timestamp columns that it stores in nanoseconds.
    """

    name: str
    size: int
    mtime_ns: int
    rows: int = 0
    nanos: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """What one epoch reads from one source.

    limited: a slice limit ended it, so there may be more. newest: the newest event time from the files' statistics in
    microseconds, None if they do not tell. schema: the columns that every file has, in canonical types.
    """

    files: tuple[SourceFile, ...]
    limited: bool
    newest: int | None
    schema: pa.Schema | None

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        files = [{**asdict(file), "nanos": list(file.nanos)} for file in self.files]  # as JSON gives it back
        return {"files": files, "rows": self.rows, "limited": self.limited}


class FilesReader:
    """One `FileSource` with its pattern resolved.

    pattern: absolute directory or URI, then a file name pattern. expected: the columns of the files read so far, if any.
    """

    def __init__(self, source: FileSource, pattern: str) -> None:
        self.source, self.pattern = source, pattern
        directory, _, self._names = pattern.rpartition("/")
        if any(mark in directory for mark in "*?["):
            raise ConfigurationError(
                f"Only the file name may have wildcards, not the directory: {pattern}",
                where=f"source {source.name}",
                next="Name one directory, e.g. {landing}/*.parquet.",
            )
        self.directory = directory
        if "://" in directory:
            self._fs, self._path = pafs.FileSystem.from_uri(directory)
        else:
            self._fs, self._path = pafs.LocalFileSystem(), directory

    def uri(self, file: SourceFile) -> str:
        return f"{self.directory}/{file.name}"

    # -- what is there

    def backlog(self, position: dict[str, Any] | None) -> list[SourceFile]:
        """The files that have not been read, in name order; one listing, no file is opened."""
        seen = set(position["seen"]) if position else set()
        floor = position["floor"] if position else None
        fresh, below = [], []
        for file in self._list():
            if floor is not None and file.name <= floor:
                below.append(file)
            elif file.name not in seen:
                fresh.append(file)
        if floor is not None and position is not None:
            self._check_below(position, below)
        return sorted(fresh, key=lambda file: file.name)

    def plan(self, position: dict[str, Any] | None, limits: EpochSettings, expected: pa.Schema | None) -> Slice:
        """The next slice after `position`: fresh files in name order up to a limit. Opens the files' footers.

        expected: schema of what was read before; without it the first file sets it. Raises InputError that names the file.
        """
        chosen: list[SourceFile] = []
        rows = size = 0
        newest: int | None = None
        told = True
        schema, limited = expected, False
        for file in self.backlog(position):
            footer, found = self._footer(file)
            if chosen and (
                len(chosen) >= limits.max_files
                or rows + footer.num_rows > limits.max_rows
                or size + file.size > limits.max_bytes
            ):
                limited = True
                break
            schema = found if schema is None else self._check_schema(file, schema, found)
            self._check_event_time(file, found)
            chosen.append(replace(file, rows=footer.num_rows, nanos=_nanos(footer)))
            rows, size = rows + footer.num_rows, size + file.size
            stat = _newest(footer, self.source.event_time)
            told = told and (stat is not None or footer.num_rows == 0)
            newest = stat if newest is None else max(newest, stat if stat is not None else newest)
        return Slice(tuple(chosen), limited, newest if told else None, schema)

    def advance(self, position: dict[str, Any] | None, files: tuple[SourceFile, ...]) -> dict[str, Any]:
        """The position after reading `files`."""
        old = position or {"files": 0, "floor": None, "below": 0, "below_sum": 0, "seen": [], "last": None}
        names = sorted({*old["seen"], *(file.name for file in files)})
        kept, sunk = names[-_REMEMBERED:], names[:-_REMEMBERED]
        return {
            "files": old["files"] + len(files),
            "last": max([file.name for file in files] + ([old["last"]] if old["last"] else []), default=None),
            "floor": sunk[-1] if sunk else old["floor"],
            "below": old["below"] + len(sunk),
            "below_sum": (old["below_sum"] + sum(map(_hash, sunk))) % (1 << _HASH_BITS),
            "seen": kept,
        }

    def verify(self, planned: Slice) -> None:
        """InputError if a file of the slice is gone or is not the file that was planned."""
        now = {file.name: file for file in self._stat([file.name for file in planned.files])}
        for file in planned.files:
            found = now.get(file.name)
            if found is None:
                raise InputError(
                    "A file vanished while an epoch was reading it.",
                    where=self.uri(file),
                    next="Put it back, or let its producer write under temporary names and rename; the epoch was declined.",
                )
            if (found.size, found.mtime_ns) != (file.size, file.mtime_ns):
                raise InputError(
                    "A file changed while an epoch was reading it.",
                    where=self.uri(file),
                    next="Files must not change after they arrive: deliver corrections under a new name. The epoch was declined.",
                )

    # -- how

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

    def _footer(self, file: SourceFile) -> tuple[pq.FileMetaData, pa.Schema]:
        try:
            with self._fs.open_input_file(f"{self._path}/{file.name}") as stream:
                footer = pq.read_metadata(stream)
            return footer, self._schema(footer)
        except (pa.ArrowException, OSError) as error:
            problem = "is empty" if file.size == 0 else "is not a readable Parquet file"
            raise InputError(
                f"The input file {file.name} {problem}.",
                where=f"{self.uri(file)} ({str(error).splitlines()[0]})",
                next=f"Repair it, or move it out of {self.directory}; nothing of this epoch was applied.",
            ) from error

    @staticmethod
    def _schema(footer: pq.FileMetaData) -> pa.Schema:
        schema = footer.schema.to_arrow_schema()
        return pa.schema([(field.name, frames.canonical_type(field.type)) for field in schema])

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
        total = sum(_hash(file.name) for file in below) % (1 << _HASH_BITS)
        if (len(below), total) == (position["below"], position["below_sum"]) or not below:
            return
        if len(below) < position["below"]:
            return  # old files were cleaned away, which is their owner's right
        newest = max(below, key=lambda file: file.mtime_ns)
        message = (
            f"{len(below)} files of {self.directory} sort at or below {position['floor']!r}, of which {position['below']} "
            f"were read: some arrived too late to be told apart. The last to change is {newest.name}."
        )
        if self.source.below_floor == "warn":
            log.warning("files below the floor are not read", detail=message)
            return
        raise InputError(
            message,
            where=f"source {self.source.name}",
            next='Deliver them again under newer names, or accept the loss with below_floor="warn" on the source.',
        )


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_HASH_BITS // 8).digest(), "big")


def _nanos(footer: pq.FileMetaData) -> tuple[str, ...]:
    schema = footer.schema.to_arrow_schema()
    return tuple(field.name for field in schema if pa.types.is_timestamp(field.type) and field.type.unit == "ns")


def _newest(footer: pq.FileMetaData, column: str | None) -> int | None:
    """The newest event time by the row groups' statistics, in microseconds; None if one of them has none."""
    if column is None:
        return None
    names = [footer.schema.column(index).name for index in range(footer.num_columns)]
    if column not in names:
        return None
    found = []
    for group in range(footer.num_row_groups):
        statistics = footer.row_group(group).column(names.index(column)).statistics
        if statistics is None or not statistics.has_min_max:
            return None
        found.append(statistics.max)
    return max([_micros(moment) for moment in found], default=None)


def _micros(moment: Any) -> int:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return aware.value // 1000 if hasattr(aware, "value") else to_micros(aware)  # pandas gives nanoseconds whole
