"""The directory in which a source's files arrive: on a local disk, on another file system of Arrow's, or in an object
store."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.fs as pafs

from state_ops.errors import ConfigurationError, InputError
from state_ops.storage.open_store import default_s3
from state_ops.storage.s3 import arrow_filesystem, is_s3, refuse_secrets
from weir.connectors.formats.hive import partitions_of
from weir.sources.parquet.parquet_files import ParquetFiles
from weir.sources.slices import SourceFile

if TYPE_CHECKING:
    from weir.settings.configuration import S3Settings

_WILDCARD = re.compile(r"[*?[]")
_ESCAPED = re.compile(r"\[([*?[])\]")
_GLOB = re.compile(r"[\\{}\[\]*?]")
_OBJECT_STORES = frozenset({"abfs", "gcs", "s3"})  # where a directory is no more than the names in it
_MOST_REMOTE = 8  # files


def literal(path: str) -> str:
    """Return a path that Spark takes for itself and not for a pattern."""
    return _GLOB.sub(r"\\\g<0>", path)


def _cut(pattern: str) -> tuple[str, list[str]]:
    """Return the directory up to the first wildcard, and the patterns of what is below it, the last one that of files.
    `[*]`, `[?]` and `[[]` stand for the characters themselves."""
    directories, _, file_name = pattern.rpartition("/")
    parts = directories.split("/")
    first = next((at for at, part in enumerate(parts) if _WILDCARD.search(_ESCAPED.sub("", part))), len(parts))
    names = [*parts[first:], *(["**", "*"] if file_name == "**" else [file_name])]
    return _ESCAPED.sub(r"\1", "/".join(parts[:first])), names


def _matches(parts: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether a path matches a pattern of paths."""
    if not names or not parts:
        return not names and not parts
    if names[0] == "**":
        return any(_matches(parts[at:], names[1:]) for at in range(len(parts)))
    return fnmatch.fnmatchcase(parts[0], names[0]) and _matches(parts[1:], names[1:])


def _refuse_brackets(pattern: str, where: str) -> None:
    """Raise ConfigurationError for a pattern whose brackets are meant for themselves: a name like that is there, and
    none that they stand for."""
    parent = Path("/")
    for part in pattern.split("/"):
        plain = _ESCAPED.sub("", part)
        if "[" not in plain:
            if _WILDCARD.search(plain):
                return
            parent /= _ESCAPED.sub(r"\1", part)
            continue
        if not (parent / part).exists():
            return
        if not any(fnmatch.fnmatchcase(other.name, part) for other in parent.iterdir()):
            raise ConfigurationError(
                f"The pattern {pattern} matches nothing: its brackets stand for one character of several, and "
                f"{parent / part} is there.",
                where=where,
                next=f"Write [[] for a bracket that is meant itself: {part.replace('[', '[[]')}",
            )
        return


def _markers(infos: Sequence[pafs.FileInfo]) -> frozenset[str]:
    """Objects that stand for directories: without a byte, and others lie below them, or their names have no ending."""
    empty = {info.path for info in infos if info.type == pafs.FileType.File and not info.size}
    if not empty:
        return frozenset()
    above = {info.path for info in infos if info.type == pafs.FileType.Directory}
    above |= {parent for info in infos for parent in _parents(info.path)}
    return frozenset(path for path in empty if path in above or "." not in path.rpartition("/")[2])


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _is_hidden(part: str) -> bool:
    """Return whether a file or directory is left alone, as Spark leaves it. A partition column may begin with _."""
    return part[:1] == "." or (part[:1] == "_" and "=" not in part)


class LandingDirectory:
    """One directory and the pattern of its files' names, or of their paths below it.

    Args:
        pattern: An absolute directory or URI, then a pattern of file names; of directories above them too, where `**`
            stands for any number of them.
        where: The source, for errors.
        s3: How s3:// is reached.
        within: The directory in which the pattern is to be looked for, whatever characters it has. None: the pattern
            says it.

    Attributes:
        directory: As the pattern spells it, up to the first wildcard.
        place: As positions record it: the same for two spellings of one URI.
        parquet: Reads its files.
    """

    def __init__(self, pattern: str, where: str, s3: S3Settings | None, within: str | None = None) -> None:
        directory, self._names = _cut(pattern) if within is None else (within, [pattern])
        refuse_secrets(pattern.rpartition("/")[0], where)  # all of it: options would look like a wildcard
        if not directory.strip("/"):
            raise ConfigurationError(
                f"A pattern with wildcards has to begin with a directory that has none: {pattern}",
                where=where,
                next="Name one, e.g. {landing}/*.parquet or {landing}/date=*/*.parquet.",
            )
        self.directory = directory
        if is_s3(directory):
            self._fs, self._path = arrow_filesystem(s3 or default_s3()), directory.partition("://")[2]
            self.place = f"s3://{self._path}"
        elif "://" in directory:
            self._fs, self._path = pafs.FileSystem.from_uri(directory)
            scheme = directory.partition("://")[0]
            self.place = self._path if scheme == "file" else f"{scheme}://{self._path}"
        else:
            self._fs, self._path = pafs.LocalFileSystem(), directory
            self.place = directory
        self.parquet = ParquetFiles(self._fs, self._path, directory)
        self._bucket_seen = False
        if within is None and isinstance(self._fs, pafs.LocalFileSystem):
            _refuse_brackets(pattern, where)

    def opens_in_workers(self, files: int) -> bool:
        """Return whether so many files can be opened in other processes as fast as here, one after the other.

        Other file systems may need what only this host or the JVM has. An object store takes its time for each file.
        """
        return self._fs.type_name == "local" or (self._fs.type_name == "s3" and files <= _MOST_REMOTE)

    def uri(self, file: SourceFile) -> str:
        """Return the file's place as people read it."""
        return self.parquet.uri(file)

    def spark_path(self, file: SourceFile) -> str:
        """Return the file's place as Spark reads it, which takes a path for a pattern unless its special characters are
        escaped."""
        return literal(self.uri(file))

    def exists(self) -> bool:
        """Return whether the landing directory exists, or its bucket on an object store, which has no directories."""
        if self._fs.type_name in _OBJECT_STORES:
            self._bucket_seen = self._bucket_seen or self._has_bucket()
            return self._bucket_seen
        return bool(self._fs.get_file_info(self._path).type == pafs.FileType.Directory)

    def _has_bucket(self) -> bool:
        return bool(self._fs.get_file_info(self._path.partition("/")[0]).type != pafs.FileType.NotFound)

    def files(self) -> Iterator[SourceFile]:
        """Return the files that are there, in any order. No file is opened."""
        found = self._on_disk() if isinstance(self._fs, pafs.LocalFileSystem) else self._listed()
        for file in found:
            parts = file.name.split("/")
            if not any(map(_is_hidden, parts)) and _matches(parts, self._names):
                yield file

    def _listed(self) -> Iterator[SourceFile]:
        selector = pafs.FileSelector(self._path, allow_not_found=True, recursive=len(self._names) > 1)
        infos = self._fs.get_file_info(selector)
        markers = _markers(infos) if self._fs.type_name in _OBJECT_STORES else frozenset()
        for info in infos:
            if info.type == pafs.FileType.File and info.path not in markers:
                yield self._file(info)

    def _on_disk(self) -> Iterator[SourceFile]:
        """Return the files on a local disk. A name that is not UTF-8 has its bytes escaped."""
        levels = None if "**" in self._names else len(self._names)
        for way, status in _walked(self._path, os.path.realpath(self._path), levels):
            name = os.fsencode(way).decode("utf-8", "backslashreplace")
            partitions = partitions_of(name) if len(self._names) > 1 else ()
            yield SourceFile(name, status.st_size, status.st_mtime_ns, partitions=partitions)

    def stat(self, names: list[str]) -> Iterator[SourceFile]:
        """Yield the files of these names that are there."""
        for info in self._fs.get_file_info([f"{self._path}/{name}" for name in names]):
            if info.type == pafs.FileType.File:
                yield self._file(info)
        if any("\\x" in name for name in names):
            yield from (file for file in self._nameless() if file.name in names)

    def _nameless(self) -> Iterator[SourceFile]:
        """Return the files whose names are not UTF-8. Only a local disk has them."""
        if isinstance(self._fs, pafs.LocalFileSystem):
            yield from (file for file in self._on_disk() if not Path(self._path, file.name).exists())

    def _file(self, info: pafs.FileInfo) -> SourceFile:
        if len(self._names) == 1:
            return SourceFile(info.base_name, info.size, info.mtime_ns or 0)
        name = info.path.removeprefix(self._path).lstrip("/")
        return SourceFile(name, info.size, info.mtime_ns or 0, partitions=partitions_of(name))

    def opened(self, file: SourceFile) -> pa.NativeFile:
        """Return the file's bytes as they lie there. Raises VanishedError, TransientError."""
        self._refuse_nameless(file)
        with self.parquet.reading(file):
            self.parquet.refuse_link(file, file.name)
            return self._fs.open_input_stream(f"{self._path}/{file.name}", compression=None)

    def is_at(self, recorded: str) -> bool:
        """Return whether two spellings, through links or `..`, are one directory."""
        if recorded == self.place:
            return True
        return isinstance(self._fs, pafs.LocalFileSystem) and Path(recorded).resolve() == Path(self.place).resolve()

    def check_name(self, file: SourceFile) -> None:
        """Raise InputError for a name that Spark, or any reader, cannot take."""
        self._refuse_nameless(file)
        # Hadoop takes a relative name with a colon for a URI: in its local file system's checksums, and in any escaped
        # path.
        if ":" in file.stored and (self._fs.type_name not in _OBJECT_STORES or self.spark_path(file) != self.uri(file)):
            raise InputError(
                f"The input file {file.name} has a colon in its name, so Spark cannot read it.",
                where=self.uri(file),
                next=f"Rename it, or move it out of {self.directory}; nothing of this epoch was applied.",
            )

    def _refuse_nameless(self, file: SourceFile) -> None:
        may_be = "\\x" in file.name and not Path(self._path, file.name).exists()
        if may_be and any(file.name == other.name for other in self._nameless()):
            raise InputError(
                f"The input file {file.name} has a name that is not UTF-8, so it cannot be opened by it.",
                where=self.uri(file),
                next=f"Rename it, or move it out of {self.directory}; nothing of this epoch was applied.",
            )


def _walked(
    directory: str, real: str, levels: int | None, way: str = "", passed: tuple[str, ...] = ()
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each file below a directory with its way from there. Hidden directories are left alone. A link is not
    followed where it leads back to a directory that the way has passed, or above one: the way would have no end.

    Args:
        real: The directory's path without links.
        levels: How many there are below the directory, with that of its files; None: any number.
        way: That to the directory.
        passed: The real paths of the directories before this one.
    """
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:  # it went meanwhile
        return
    passed = (*passed, real)
    for entry in entries:
        status = _status(entry)
        if status is None or _is_hidden(entry.name):
            continue
        if stat.S_ISREG(status.st_mode):
            yield f"{way}{entry.name}", status
        elif stat.S_ISDIR(status.st_mode) and levels != 1:
            target = os.path.realpath(entry.path) if entry.is_symlink() else f"{real.rstrip('/')}/{entry.name}"
            if not any(f"{before}/".startswith(f"{target.rstrip('/')}/") for before in passed):
                below = None if levels is None else levels - 1
                yield from _walked(entry.path, target, below, f"{way}{entry.name}/", passed)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return what an entry of a directory is, links followed; None where a link leads nowhere, or the entry went."""
    try:
        return entry.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
