"""A store on a file system, through pyarrow.fs."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs

from state_ops.errors import ConfigurationError, DamageError

if TYPE_CHECKING:
    pass
from state_ops.storage.store import LOCAL_CHUNK, UNFINISHED, StoredFile

_LOOKS = 5


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
        if self._local and path and self._has_link(path) and not os.path.realpath(at).startswith(f"{self._root}/"):
            raise DamageError(
                f"The path {path!r} leads out of the pipeline's storage root through a link.",
                where=at,
                next="Weir makes no links there: find out who did, and whether it is to be trusted, before you go on.",
            )
        return at

    def _has_link(self, path: str) -> bool:
        """Return whether a path has a link or `..` in it, so that the file may lie elsewhere.

        The root has been resolved, so only the part below it counts.
        """
        at = self._root
        for name in path.split("/"):
            at = f"{at}/{name}"
            try:
                if name == ".." or stat.S_ISLNK(os.lstat(at).st_mode):
                    return True
            except OSError:  # nothing is there, and nothing below it
                return ".." in path.split("/")
        return False

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

    def part(self, path: str, start: int, length: int) -> bytes:
        with self._fs.open_input_file(self._at(path)) as source:
            return bytes(source.read_at(length, start))

    def size(self, path: str) -> int | None:
        info = self._fs.get_file_info(self._at(path))
        return info.size if info.type == pafs.FileType.File else None

    def on_disk(self, path: str) -> Path | None:
        return Path(self._at(path)) if self._local else None

    def stamp(self, path: str) -> str | None:
        info = self._fs.get_file_info(self._at(path))
        if info.type != pafs.FileType.File:
            return None
        if not self._local:
            return f"{info.size}-{info.mtime_ns}"
        try:
            # A backup that is copied back may have the size and the time of what it replaces; the time of the inode's
            # change is its own.
            stat = Path(self._at(path)).stat()
        except FileNotFoundError:  # since the look before
            return None
        return f"{stat.st_size}-{stat.st_ctime_ns}"

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
