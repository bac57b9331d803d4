"""Where bytes are kept: one small Protocol, and the file system behind it.

Paths are relative to the store's root and were checked by `Storage`, which is what everything else uses. A store says
what happened by the kind of OSError: UnavailableError may pass (throttled, timed out, connection lost), FileNotFoundError
and PermissionError are what they say, any other one stays. No message holds what a server or a library wrote, only
its status, code and kind: answers of servers repeat parts of the request.

`FileSystemStore` is pyarrow.fs; `ObjectStore`, in its own module, is obstore (docs/adr/0010-object-stores.md says why not one for both).
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

import pyarrow.fs as pafs

from state_ops.errors import ConfigurationError, DamageError, first_line

if TYPE_CHECKING:
    from configs.settings import S3Settings

CHUNK = 4 << 20  # bytes sent at a time over a network
ARRIVING = 512 << 10  # bytes that are read at a time over one: what a download that breaks off loses at most
PART = 8 << 20  # bytes of one request; larger objects are sent in parts, of which S3 allows 10,000
LOCAL_CHUNK = 256 << 10  # and on a disk: what stays in a processor's cache from reading to hashing to writing
_LOOKS = 5
_ESCAPE = re.compile(r"%[0-9a-fA-F]{2}")
UNFINISHED = ".tmp-"


class UnavailableError(OSError):
    """Storage is throttled, answers too late, or is out of reach: it may work in a moment."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One object in storage: path relative to the root, size in bytes."""

    path: str
    bytes: int


class Store(Protocol):
    """Bytes below one root. Each operation is whole or raises; a listing is complete or raises."""

    remote: bool

    def write(self, path: str, chunks: Iterator[bytes], size: int) -> None:
        """Put an object of `size` bytes in place, over what is there: visible as a whole, or not at all."""

    def create(self, path: str, data: bytes) -> bool:
        """Put an object in place unless there is one; False if there is. What fencing stands on, for small objects."""

    def read(self, path: str, start: int = 0) -> Iterator[bytes]:
        """The object's content from the byte `start` on, which it has. Raises FileNotFoundError."""

    def tail(self, path: str, length: int) -> tuple[bytes, int]:
        """The last `length` bytes, all if there are fewer, and the object's size in bytes. Raises FileNotFoundError."""

    def size(self, path: str) -> int | None:
        """Size in bytes, None if there is no such object."""

    def stamp(self, path: str) -> str | None:
        """What is another one once the object has been written anew, even with the same content; None if there is no such object."""

    def list(self, path: str) -> Iterable[StoredFile]:
        """All objects below `path`, also unfinished ones; none if there is no such directory."""

    def list_dirs(self, path: str) -> Iterable[str]:
        """Names of the directories directly below `path`."""

    def delete(self, path: str) -> bool:
        """Delete an object; False if it is known that there was none, which object stores do not tell."""

    def delete_files(self, paths: Sequence[str]) -> None:
        """Delete objects, whether they are there or not."""

    def delete_all(self, path: str, files: Iterable[StoredFile]) -> None:
        """Delete the files, which are all of those below `path`, and the directory."""


def open_store(uri: str, s3: S3Settings | None = None) -> Store:
    """The store for a URI or a path. Raises ConfigurationError."""
    scheme = uri.partition("://")[0] if "://" in uri else "file"
    if "@" in uri.partition("://")[2].partition("/")[0]:
        raise ConfigurationError(
            "The storage root holds credentials.",
            where="storage.root",
            next="Write s3://bucket/prefix; storage.s3 says by reference where the keys are.",
        )
    if scheme == "file" and _ESCAPE.search(unquote(uri) if "://" in uri else uri):
        # delta-rs and the kernel below it decode a path each for itself, and then look for another directory.
        raise ConfigurationError(
            "The storage root holds a percent sign and two hex digits, below which no library can open Delta tables.",
            where=f"storage.root = {uri}",
            next="Rename the directory, or give another one: spaces and other characters may stand in it as they are.",
        )
    try:
        if scheme in ("s3", "s3a", "gs", "az", "abfs", "abfss"):
            from state_ops.object_store import ObjectStore  # and its library: not where there are only disks

            return ObjectStore(uri, s3 or default_s3())
        if "://" in uri:
            return FileSystemStore(*pafs.FileSystem.from_uri(uri))
        return FileSystemStore(pafs.LocalFileSystem(), uri)
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            "The storage root cannot be used: " + first_line(error),
            where=f"storage.root = {uri}",
            next="Give a directory or a URI such as s3://bucket/prefix.",
        ) from None


def default_s3() -> S3Settings:
    from configs.settings import S3Settings  # not at import: workers on local disks do without the settings' libraries

    return S3Settings()


class FileSystemStore:
    """Files below a directory; a file appears by a rename. An empty directory goes with its last file."""

    def __init__(self, fs: pafs.FileSystem, root: str) -> None:
        self._fs, self._local = fs, isinstance(fs, pafs.LocalFileSystem)
        self._root = os.path.realpath(root) if self._local else root.rstrip("/")
        self.remote = not self._local

    @property
    def root(self) -> str:
        return self._root

    def _at(self, path: str) -> str:
        at = f"{self._root}/{path}" if path else self._root
        if self._local and path and not os.path.realpath(at).startswith(f"{self._root}/"):
            raise DamageError(
                f"The path {path!r} leads out of the pipeline's storage root through a link.",
                where=at,
                next="Weir makes no links there: find out who did, and whether it is to be trusted, before you go on.",
            )
        return at

    def write(self, path: str, chunks: Iterator[bytes], size: int) -> None:  # noqa: ARG002  an object store needs it
        final = self._at(path)
        parent, _, name = final.rpartition("/")
        staging = f"{parent}/{UNFINISHED}{uuid.uuid4().hex}-{name}"
        try:
            with self._open_output(parent, staging) as sink:
                for chunk in chunks:
                    sink.write(chunk)
            self._fs.move(staging, final)
        except BaseException:
            with contextlib.suppress(OSError):
                self._fs.delete_file(staging)
            raise

    def create(self, path: str, data: bytes) -> bool:
        final = Path(self._at(path))
        if not self._local:
            raise ConfigurationError(
                "This storage has no put that fails where an object is.",
                where=str(final),
                next="Use a local disk or an object store.",
            )
        staging = final.with_name(f"{UNFINISHED}{uuid.uuid4().hex}-{final.name}")
        staging.parent.mkdir(parents=True, exist_ok=True)
        staging.write_bytes(data)
        try:
            os.link(staging, final)  # as delta-rs does it on a disk
        except FileExistsError:
            return False
        finally:
            staging.unlink()
        return True

    def _open_output(self, parent: str, path: str) -> Any:
        while True:
            self._fs.create_dir(parent, recursive=True)
            try:
                return self._fs.open_output_stream(path)
            except FileNotFoundError:
                # Whoever deleted the last file there has just removed the directory.
                if self._fs.get_file_info(parent).type == pafs.FileType.Directory:
                    raise

    def read(self, path: str, start: int = 0) -> Iterator[bytes]:
        with self._fs.open_input_file(self._at(path)) as source:
            source.seek(start)
            while chunk := source.read(LOCAL_CHUNK):
                yield chunk

    def tail(self, path: str, length: int) -> tuple[bytes, int]:
        with self._fs.open_input_file(self._at(path)) as source:
            size = source.size()
            return source.read_at(min(size, length), max(size - length, 0)), size

    def size(self, path: str) -> int | None:
        info = self._fs.get_file_info(self._at(path))
        return info.size if info.type == pafs.FileType.File else None

    def stamp(self, path: str) -> str | None:
        info = self._fs.get_file_info(self._at(path))
        if info.type != pafs.FileType.File:
            return None
        if not self._local:
            return f"{info.size}-{info.mtime_ns}"
        try:
            # A backup that is copied back may have the size and the time of what it replaces; the time of the inode's change is its own.
            found = Path(self._at(path)).stat()
        except FileNotFoundError:  # since the look before
            return None
        return f"{found.st_size}-{found.st_ctime_ns}"

    def list(self, path: str) -> Iterable[StoredFile]:
        for info in self._infos(path, recursive=True):
            if info.type == pafs.FileType.File:
                yield StoredFile(info.path[len(self._root) + 1 :], info.size)

    def list_dirs(self, path: str) -> Iterable[str]:
        infos = self._infos(path, recursive=False)
        return [PurePosixPath(info.path).name for info in infos if info.type == pafs.FileType.Directory]

    def _infos(self, path: str, recursive: bool) -> Any:
        selector = pafs.FileSelector(self._at(path), recursive=recursive, allow_not_found=True)
        for _ in range(_LOOKS - 1):
            with suppress(FileNotFoundError):  # a directory was there and was removed, empty, while Arrow came to it
                return self._fs.get_file_info(selector)
        return self._fs.get_file_info(selector)

    def delete(self, path: str) -> bool:
        at = self._at(path)
        try:
            self._fs.delete_file(at)
        except FileNotFoundError:
            return False
        self._drop_empty_dirs(at)
        return True

    def delete_files(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.delete(path)

    def delete_all(self, path: str, files: Iterable[StoredFile]) -> None:  # noqa: ARG002  an object store needs them
        at = self._at(path)
        while self._fs.get_file_info(at).type == pafs.FileType.Directory:
            # Somebody else may be deleting it too; whatever the two leave to each other is deleted the next time round.
            with contextlib.suppress(FileNotFoundError):
                self._fs.delete_dir(at)
            self._drop_empty_dirs(at)

    def _drop_empty_dirs(self, path: str) -> None:
        # They would pile up, one for each pruned epoch. Only the local rmdir refuses a directory that is not empty.
        directory, root = Path(path).parent, Path(self._root)
        while self._local and root in directory.parents:
            try:
                directory.rmdir()
            except OSError:
                return
            directory = directory.parent
