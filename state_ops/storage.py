"""Durable storage of one pipeline, by URI, on `pyarrow.fs`.

Every path that this module takes or returns is relative to the pipeline's root, uses `/`, and is checked to stay
under the root (`check_path`): registries are data, and data may be damaged or hostile.

A local root is as durable as the page cache (nothing is fsynced: the Delta log on a local disk is not either);
it survives the death of every process. Machines that may die want an object store.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from state_ops.errors import ConfigurationError, DamageError

_CHUNK = 4 << 20
_Names = list[str]  # inside `Storage`, `list` is a method


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One object in storage: path relative to the root, size in bytes."""

    path: str
    bytes: int


def check_path(path: str) -> str:
    """Return `path` if it is a plain relative path below the root, else raise DamageError."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or "\\" in path or "\0" in path or ":" in path or ".." in pure.parts:
        raise DamageError(
            f"The path {path!r} leaves the pipeline's storage root.",
            next="Weir never writes such a path: find out who altered the registry before you go on.",
        )
    return path


class Storage:
    """Files below one root.

    uri: a directory path or a URI that pyarrow understands (`file:///data/weir`, `s3://bucket/prefix`).
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        try:
            if "://" in uri:
                self._fs, self._root = pafs.FileSystem.from_uri(self.uri)
            else:
                self._fs, self._root = pafs.LocalFileSystem(), str(Path(self.uri).resolve())
                self.uri = self._root
        except (ValueError, OSError) as error:
            raise ConfigurationError(
                f"The storage root cannot be used: {error}",
                where=f"storage.root = {uri}",
                next="Give a directory or a URI such as s3://bucket/prefix.",
            ) from error
        self.is_local = isinstance(self._fs, pafs.LocalFileSystem)
        self.delta_options: dict[str, str] | None = None

    def __reduce__(self):
        return Storage, (self.uri,)

    def below(self, path: str) -> Storage:
        """Storage rooted at a directory of this one."""
        return Storage(f"{self.uri}/{check_path(path)}")

    def full(self, path: str) -> str:
        """The path or URI by which other libraries (delta-rs, Spark) open `path`."""
        return f"{self.uri}/{check_path(path)}"

    def _at(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def put_file(self, local: Path, path: str) -> tuple[int, str]:
        """Copy a local file to `path`, whole or not at all; returns its size in bytes and sha256, computed on the way."""
        digest, size = hashlib.sha256(), 0
        with local.open("rb") as source, self._atomic(path) as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                sink.write(chunk)
        return size, digest.hexdigest()

    def put_bytes(self, path: str, data: bytes) -> None:
        """Write `data` to `path`, whole or not at all, over what is there."""
        with self._atomic(path) as sink:
            sink.write(data)

    def get_file(self, path: str, local: Path, *, digest: str | None = None) -> None:
        """Copy `path` to a local file; with `digest` (sha256), raise DamageError if the content is another one."""
        seen = hashlib.sha256()
        try:
            with self._fs.open_input_stream(self._at(path)) as source, local.open("wb") as sink:
                while chunk := source.read(_CHUNK):
                    seen.update(chunk)
                    sink.write(chunk)
        except FileNotFoundError as error:
            raise DamageError(
                "A file of a completed checkpoint is missing from storage.", where=self.full(path)
            ) from error
        if digest is not None and seen.hexdigest() != digest:
            raise DamageError(
                "A file of a completed checkpoint was altered or truncated: its sha256 is not the recorded one.",
                where=self.full(path),
            )

    def read_bytes(self, path: str) -> bytes | None:
        """The content of `path`, or None if there is no such file."""
        try:
            with self._fs.open_input_stream(self._at(path)) as source:
                return source.read()
        except FileNotFoundError:
            return None

    def parquet_footer(self, path: str) -> pq.FileMetaData:
        """The footer of a Parquet file; reads its end only."""
        with self._fs.open_input_file(self._at(path)) as stream:
            return pq.read_metadata(stream)

    def open_output(self, path: str):
        """A writable stream at `path`; for files that nothing reads before they are named in an ack."""
        self._make_parent(path)
        return self._fs.open_output_stream(self._at(path))

    def size(self, path: str) -> int | None:
        """Size in bytes, or None if there is no such file."""
        info = self._fs.get_file_info(self._at(path))
        return info.size if info.type == pafs.FileType.File else None

    def list(self, path: str = "", *, unfinished: bool = False) -> Iterator[StoredFile]:
        """Files below `path`, in no order; nothing if there is no such directory.

        unfinished: also what a killed process left half-written on a local disk.
        """
        for info in self._infos(path, recursive=True):
            name = PurePosixPath(info.path).name
            if info.type == pafs.FileType.File and (unfinished or not name.startswith(".tmp-")):
                yield StoredFile(info.path[len(self._root) + 1 :], info.size)

    def list_dirs(self, path: str) -> _Names:
        """Names of the directories directly below `path`."""
        return [
            PurePosixPath(info.path).name
            for info in self._infos(path, recursive=False)
            if info.type == pafs.FileType.Directory
        ]

    def _infos(self, path: str, recursive: bool):
        base = self._at(path) if path else self._root
        return self._fs.get_file_info(pafs.FileSelector(base, recursive=recursive, allow_not_found=True))

    def delete(self, path: str) -> bool:
        """Delete one file; False if it was not there."""
        try:
            self._fs.delete_file(self._at(path))
        except FileNotFoundError:
            return False
        if self.is_local:
            self._drop_empty_dirs(Path(self._at(path)).parent)
        return True

    def delete_tree(self, path: str) -> int:
        """Delete everything below `path`; returns how many files that were."""
        count = sum(1 for _ in self.list(path))
        if self._fs.get_file_info(self._at(path)).type == pafs.FileType.Directory:
            self._fs.delete_dir(self._at(path))
            if self.is_local:
                self._drop_empty_dirs(Path(self._at(path)).parent)
        return count

    def _drop_empty_dirs(self, directory: Path) -> None:
        # An object store has no empty directories; on a disk they would pile up, one for each pruned epoch.
        root = Path(self._root)
        while directory != root and root in directory.parents:
            try:
                directory.rmdir()
            except OSError:
                return
            directory = directory.parent

    def _make_parent(self, path: str) -> None:
        if self.is_local:
            Path(self._at(path)).parent.mkdir(parents=True, exist_ok=True)

    def _atomic(self, path: str):
        self._make_parent(path)
        return _AtomicWrite(self._fs, self._at(path), self.is_local)


class _AtomicWrite:
    """A stream whose file appears at `path` on success only. Object stores do that by themselves."""

    def __init__(self, fs: pafs.FileSystem, path: str, is_local: bool) -> None:
        self._fs, self._path = fs, path
        parent, _, name = path.rpartition("/")
        self._staging = f"{parent}/.tmp-{uuid.uuid4().hex}-{name}" if is_local else path

    def __enter__(self):
        self._stream = self._fs.open_output_stream(self._staging)
        return self._stream

    def __exit__(self, kind, error, trace) -> None:
        self._stream.close()
        if self._staging == self._path:
            return
        if kind is None:
            self._fs.move(self._staging, self._path)
        else:
            self._fs.delete_file(self._staging)
