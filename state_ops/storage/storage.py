"""Durable storage of one pipeline, by URI: what the engine asks of storage, and the rules that hold for every store.

Every path that this module takes or returns is relative to the pipeline's root, uses `/`, and is checked to stay
under the root (`check_path`, and on local disks links too): registries are data, and data may be damaged or hostile.

Retries are here and nowhere else: what may pass (`UnavailableError`) is tried again, a bounded number of times and
seconds, with growing pauses; everything else is raised at once. delta-rs, which opens Delta tables itself, is told
the same bounds.

A local root is as durable as the page cache (nothing is fsynced: the Delta log on a local disk is not either);
it survives the death of every process. Machines that may die want an object store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import stamina

from state_ops.errors import ConfigurationError, DamageError, MissingError, TransientError
from state_ops.logs import Logger
from state_ops.parquet.footer import check
from state_ops.records.snapshot_files import is_reference
from state_ops.s3_options import S3Options
from state_ops.storage.branches import PARENT, inherited, is_inherited, parent_uri
from state_ops.storage.filesystem_store import FileSystemStore
from state_ops.storage.instrumented_store import InstrumentedStore, RequestCounts
from state_ops.storage.open_store import default_s3, open_store
from state_ops.storage.store import CHUNK, LOCAL_CHUNK, UNFINISHED, StoredFile, UnavailableError
from state_ops.storage.temp_dirs import scratch

__all__ = ["CancelledError", "Storage", "StoredFile", "UnavailableError", "check_path"]

log = Logger("weir.storage")

_DAMAGED = "`weir fsck PIPELINE` says what else is damaged and what is intact; docs/how-to/fsck.md says what to do."
_RETRY_SECONDS = 120.0
_TRANSFERS = 4
_FOOTER = 1 << 16  # bytes; as much as Arrow itself reads at first, and most footers fit
_Names = list[str]  # inside `Storage`, `list` is a method
_T = TypeVar("_T")


class CancelledError(TransientError):
    """A transfer was given up because its result is not wanted any more. There is nothing to do."""


class Cancelled(Protocol):
    """A threading.Event, or what has its `is_set`."""

    def is_set(self) -> bool: ...


def check_path(path: str) -> str:
    """Return `path` if it is a plain relative path below the root, else raise DamageError."""
    if not path or path[0] == "/" or "\\" in path or "\0" in path or ":" in path or ".." in path.split("/"):
        raise DamageError(
            f"The path {path!r} leaves the pipeline's storage root.",
            next="Weir never writes such a path: find out who altered the registry before you go on.",
        )
    return path


class Arrived(Protocol):
    """Is told how many bytes more of a download are here."""

    def __call__(self, bytes: int, /) -> object: ...


class Keeper(Protocol):
    """The snapshots that a state backend keeps, each under the full path of the file that has its reference.

    `backends.loader` has it; `backends.base.Keeping` says what it does.
    """

    def kept(self, below: str) -> Iterable[str]: ...

    def delete(self, keys: Collection[str]) -> None: ...

    def problem(self, reference: str) -> str | None: ...


def _nobody(_: int, /) -> None:
    """Nobody asks."""


class _Arriving:
    """A file that is being downloaded. size: as in `Storage.get_file`; without it every try begins anew."""

    def __init__(self, local: Path, size: int | None, arrived: Arrived) -> None:
        self._size, self._arrived = size, arrived
        self._hash, self._here, self._reported = hashlib.sha256(), 0, 0
        self.resumed = False
        self._file = local.open("r+b" if size is not None and local.exists() else "w+b")
        while size is not None and (chunk := self._file.read(LOCAL_CHUNK)):
            self._count(chunk)
        if size is not None and self._here > size:
            self.anew()

    def __enter__(self) -> _Arriving:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def whole(self) -> bool:
        return self._here == self._size and self._here > 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def begin(self) -> int:
        """Return the byte from which on a try has to read."""
        if self._size is None and self._here:
            self.anew()
        self.resumed |= self._here > 0
        return self._here

    def add(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._count(chunk)

    def anew(self) -> None:
        """Throw away what is here."""
        self._file.seek(0)
        self._file.truncate()
        self._hash, self._here, self.resumed = hashlib.sha256(), 0, False

    def _count(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self._here += len(chunk)
        if self._here > self._reported:  # not twice, where it had to begin anew
            self._arrived(self._here - self._reported)
            self._reported = self._here


class Storage:
    """Files below one root; long because all that is done to an object is here, with its retries.

    A branch's storage reads objects of the pipeline that it was forked from as `parent/<path>`, and refuses to write or
    delete them.

    A file with a reference goes together with the snapshot that it stands for: `keeper` deletes the snapshot, then the
    file is deleted. A snapshot without its file is listed as unfinished. Without a keeper such files stay, because
    nothing else tells which snapshots are to be deleted.

    Errors: OSError, of which UnavailableError was tried again in vain; ConfigurationError; DamageError for a path that
    leaves the root or content that is not what was recorded.

    Args:
        uri: A directory, or a URI: `file:///data/weir`, `s3://bucket/prefix`; gs, abfs and hdfs go through the same
            libraries, untested.
        s3: How S3 is reached; secrets are references, looked up in each process that opens the storage.
        request_counts: What this object has requested; a copy in another process begins at zero.
        mounts: By directory below the root, what is in its place: the URI of a directory elsewhere in the same kind of
            store, as a table that is there already. What lies there is listed with the rest.
        keeper: Has the snapshots that references stand for; None: the state backend keeps none.
    """

    def __init__(
        self,
        uri: str,
        s3: S3Options | None = None,
        request_counts: RequestCounts | None = None,
        mounts: Mapping[str, str] | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.uri = uri.rstrip("/")
        store = open_store(self.uri, s3)
        self.request_counts = RequestCounts() if request_counts is None else request_counts
        self.store = InstrumentedStore(store, self.request_counts)
        self.is_local = not store.remote
        self.keeper = keeper
        self._s3 = None if self.is_local else s3 or default_s3()
        if "://" not in uri and isinstance(store, FileSystemStore):
            self.uri = store.root
        above = parent_uri(self.uri)
        self._parent = Storage(above, s3, self.request_counts) if above is not None else None
        self._mounts = {path: Storage(there, s3, self.request_counts) for path, there in (mounts or {}).items()}
        for mounted in self._mounts.values():
            if mounted.is_local != self.is_local:
                raise ConfigurationError(
                    f"{mounted.uri} is in another kind of store than the pipeline's storage.",
                    where=self.uri,
                    next="Put both on disks, or both into a bucket.",
                )

    def __reduce__(self) -> tuple[Any, ...]:
        mounts = {path: mounted.uri for path, mounted in self._mounts.items()}
        return Storage, (self.uri, self._s3, None, mounts, self.keeper)

    def __repr__(self) -> str:
        return f"Storage({self.uri!r})"

    @property
    def delta_options(self) -> dict[str, str] | None:
        """Storage options for delta-rs, with secrets: pass them on, keep them nowhere. None on local disks."""
        from state_ops.storage.s3 import delta_options, is_s3

        return delta_options(self._s3) if self._s3 and is_s3(self.uri) else None

    @property
    def transfers(self) -> int:
        """The number of files that one subtask may transfer at a time."""
        return self._s3.transfers if self._s3 else _TRANSFERS

    def below(self, path: str) -> Storage:
        """Storage rooted at a directory of this one."""
        return Storage(f"{self.uri}/{check_path(path)}", self._s3)

    def full(self, path: str) -> str:
        """Return the path or URI by which other libraries (delta-rs, Spark) open `path`."""
        if self._parent is not None and is_inherited(path):
            return self._parent.full(path.removeprefix(PARENT))
        mount = self._mount_of(path)
        if mount is not None:
            mounted, rest = self._mounts[mount], path.removeprefix(mount).lstrip("/")
            return mounted.full(rest) if rest else mounted.uri
        return f"{self.uri}/{check_path(path)}"

    def directories(self) -> list[Path]:
        """Return the directories of this host in which it lies; none of an object store."""
        places = [each.store.on_disk("") for each in (self, *self._mounts.values())]
        return [place for place in places if place is not None]

    def is_mounted(self, path: str) -> bool:
        """Return whether a path lies elsewhere."""
        return self._mount_of(path) is not None

    def _mount_of(self, path: str) -> str | None:
        return next((mount for mount in self._mounts if path == mount or path.startswith(f"{mount}/")), None)

    def path_of(self, full: str) -> str | None:
        """Return the inverse of `full`; None if that is no path in this storage."""
        if full.startswith(f"{self.uri}/"):
            return full.removeprefix(f"{self.uri}/") or None
        for mount, mounted in self._mounts.items():
            if (rest := mounted.path_of(full)) is not None:
                return f"{mount}/{rest}"
        above = self._parent.path_of(full) if self._parent is not None else None
        return inherited(above) if above is not None else None

    def _there(self, path: str) -> tuple[InstrumentedStore, str]:
        """Return the store in which a path is read, and the path there."""
        if self._parent is not None and is_inherited(path):
            return self._parent._there(path.removeprefix(PARENT))
        mount = self._mount_of(path)
        if mount is not None:
            return self._mounts[mount]._there(path.removeprefix(mount).lstrip("/"))
        return self.store, check_path(path)

    def _writable(self, path: str) -> tuple[InstrumentedStore, str]:
        """Return the store in which a path is written or deleted, and the path there."""
        if self._parent is not None and is_inherited(path):
            raise DamageError(
                f"The path {path!r} leaves the branch: what it was forked from is only read.",
                where=self.uri,
                next="Weir never does that: report it, with what was running.",
            )
        return self._there(path)

    # -- writing

    def put_file(self, local: Path, path: str, *, cancelled: Cancelled | None = None) -> tuple[int, str]:
        """Copy a local file to `path`, whole or not at all; returns its size in bytes and sha256, computed on the way.

        Args:
            cancelled: Looked at before every chunk and every try; once set, nothing becomes visible and CancelledError
                is raised.
        """
        return self._retried(path, lambda: self._send(local, path, cancelled))

    def _send(self, local: Path, path: str, cancelled: Cancelled | None) -> tuple[int, str]:
        digest, sent = hashlib.sha256(), 0

        def chunks() -> Iterator[bytes]:
            nonlocal sent
            with local.open("rb") as source:
                while True:
                    self._check(cancelled, path)
                    chunk = source.read(LOCAL_CHUNK if self.is_local else CHUNK)
                    if not chunk:
                        return
                    digest.update(chunk)
                    sent += len(chunk)
                    yield chunk

        store, place = self._writable(path)
        store.write(place, chunks(), local.stat().st_size)
        return sent, digest.hexdigest()

    def put_bytes(self, path: str, data: bytes) -> None:
        """Write `data` (bytes or a buffer) to `path`, whole or not at all, over what is there."""
        store, place = self._writable(path)
        self._retried(path, lambda: store.write(place, iter((data,)), len(data)))

    def create(self, path: str, data: bytes) -> bool:
        """Put `data` at `path` unless a file is there; False if there is one, which an earlier try of this call may
        have put."""
        store, place = self._writable(path)
        return self._retried(path, lambda: store.create(place, data))

    # -- reading

    def get_file(
        self,
        path: str,
        local: Path,
        *,
        digest: str | None = None,
        cancelled: Cancelled | None = None,
        size: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Copy `path` to a local file; with `digest` (sha256), raise DamageError if the content is another one.

        Args:
            cancelled: As in `put_file`; what has arrived by then is left in `local`.
            size: How many bytes it has, of an object that never changes: then a download that broke off, in this call
                or in an earlier one that left `local`, goes on where it was.
            arrived: Is told of each piece how many bytes it has, of what `local` had already too.
        """
        with _Arriving(local, size, arrived or _nobody) as arriving:
            try:
                self._retried(path, lambda: self._receive(path, arriving, cancelled))
                if digest is not None and arriving.digest != digest and arriving.resumed:
                    arriving.anew()  # what was there may not have been its beginning
                    self._retried(path, lambda: self._receive(path, arriving, cancelled))
            except FileNotFoundError as error:
                raise self._missing(path) from error
        if digest is not None and arriving.digest != digest:
            raise self._altered(path)

    def on_disk(self, path: str) -> Path | None:
        """Return the file of an object that lies on a disk of this host, for reading only; None if it is elsewhere."""
        store, place = self._there(path)
        return store.on_disk(place)

    def prove(self, path: str, digest: str) -> None:
        """Read all of `path`; DamageError if it is gone, or its sha256 is another one."""
        stored = self.digest(path)
        if stored is None:
            raise self._missing(path)
        if stored != digest:
            raise self._altered(path)

    def _missing(self, path: str) -> DamageError:
        return MissingError(
            "A file of a completed checkpoint is missing from storage.", where=self.full(path), next=_DAMAGED
        )

    def _altered(self, path: str) -> DamageError:
        return DamageError(
            "A file of a completed checkpoint was altered or truncated: its sha256 is not the recorded one.",
            where=self.full(path),
            next=_DAMAGED,
        )

    @contextmanager
    def fetched(self, path: str, within: Path, *, digest: str | None = None) -> Iterator[Path]:
        """Yield a copy of an object, alone in a new directory below `within`, where others may be put beside it.
        Raises as `get_file`."""
        with scratch(within, "weir-fetched-") as directory:
            local = directory / "file"
            self.get_file(path, local, digest=digest)
            yield local

    def _receive(self, path: str, arriving: _Arriving, cancelled: Cancelled | None) -> None:
        store, place = self._there(path)
        start = arriving.begin()
        if arriving.whole:
            return
        try:
            for chunk in store.read(place, start):
                self._check(cancelled, path)
                arriving.add(chunk)
        except OSError as error:
            if not start or isinstance(error, UnavailableError | FileNotFoundError | PermissionError):
                raise
            arriving.anew()  # the object ends before that byte
            self._receive(path, arriving, cancelled)

    def _check(self, cancelled: Cancelled | None, path: str) -> None:
        if cancelled is not None and cancelled.is_set():
            raise CancelledError("A transfer was cancelled.", where=self.full(path))

    def read_bytes(self, path: str) -> bytes | None:
        """Return the content of `path`, or None if there is no such file."""
        try:
            store, place = self._there(path)
            return self._retried(path, lambda: b"".join(store.read(place)))
        except FileNotFoundError:
            return None

    def read_part(self, path: str, start: int, length: int) -> bytes:
        """Return `length` bytes of `path` from the byte `start` on, fewer at its end. Raises FileNotFoundError."""
        store, place = self._there(path)
        return self._retried(path, lambda: store.part(place, start, length))

    def digest(self, path: str) -> str | None:
        """Return the sha256 of the content of `path`, read in pieces; None if there is no such file."""

        store, place = self._there(path)

        def whole() -> str:
            seen = hashlib.sha256()
            for chunk in store.read(place):
                seen.update(chunk)
            return seen.hexdigest()

        try:
            return self._retried(path, whole)
        except FileNotFoundError:
            return None

    def parquet_footer(self, path: str) -> pq.FileMetaData:
        """Return the footer of a Parquet file; reads its end only. Raises FileNotFoundError, and pyarrow.ArrowException
        if it is none."""
        return self.parquet_end(path)[0]

    def parquet_end(self, path: str) -> tuple[pq.FileMetaData, int]:
        """Return the footer of a Parquet file, and the file's size in bytes, mostly with one request. Raises as
        `parquet_footer` does."""
        store, place = self._there(path)
        end, size = self._retried(path, lambda: store.tail(place, _FOOTER))
        needed = int.from_bytes(end[-8:-4], "little") + 8
        if end[-4:] == b"PAR1" and needed > len(end):
            end, size = self._retried(path, lambda: store.tail(place, needed))
        try:
            check(end)
            return pq.read_metadata(pa.BufferReader(end)), size
        except OSError as error:  # Arrow's word for a footer that is garbled, which is no fault of the storage
            raise pa.ArrowInvalid(str(error)) from error

    def size(self, path: str) -> int | None:
        """Size in bytes, or None if there is no such file."""
        store, place = self._there(path)
        return self._retried(path, lambda: store.size(place))

    def stamp(self, path: str) -> str | None:
        """Return a stamp that changes whenever the file is written anew, even with the same content; None if there is
        no file.
        """
        store, place = self._there(path)
        return self._retried(path, lambda: store.stamp(place))

    # -- what is there

    def list(self, path: str = "", *, unfinished: bool = False) -> Iterator[StoredFile]:
        """Return all files below `path`, in no order; nothing if there is no such directory. Complete, or an error:
        what is deleted is decided from it.

        Args:
            unfinished: Also what a killed process left half-written on a local disk, and what the state backend keeps
                without a file that stands for it, with a size of 0.
        """
        mount = self._mount_of(path)
        if mount is not None:
            rest = path.removeprefix(mount).lstrip("/")
            inside = self._mounts[mount].list(rest, unfinished=unfinished)
            return (replace(file, path=f"{mount}/{file.path}") for file in inside)
        files = self._retried(path, lambda: list(self.store.list(_directory(path))))
        for below, mounted in self._mounts.items():
            if not path or below.startswith(f"{path}/"):
                there = mounted.list(unfinished=unfinished)
                files += [replace(file, path=f"{below}/{file.path}") for file in there]
        if unfinished and self.keeper is not None:
            below, stored = f"{self.uri}/", {file.path for file in files}
            kept = [key.removeprefix(below) for key in self.keeper.kept(f"{below}{path}/" if path else below)]
            files += [StoredFile(key, 0) for key in kept if key not in stored]
        return (file for file in files if unfinished or not _is_unfinished(file))

    def list_dirs(self, path: str) -> _Names:
        """Return the names of the directories directly below `path`."""
        mount = self._mount_of(path)
        if mount is not None:
            return self._mounts[mount].list_dirs(path.removeprefix(mount).lstrip("/"))
        names = self._retried(path, lambda: list(self.store.list_dirs(_directory(path))))
        above = f"{path}/" if path else ""
        mounted = [mount.removeprefix(above).partition("/")[0] for mount in self._mounts if mount.startswith(above)]
        return list(dict.fromkeys([*names, *mounted]))

    # -- deleting

    def delete(self, path: str) -> bool:
        """Delete one file; False if it is known that it was not there, which object stores do not tell."""
        store, place = self._writable(path)
        if is_reference(path):
            self.delete_files([path])
            return self.keeper is not None
        return self._retried(path, lambda: store.delete(place))

    def delete_files(self, paths: Sequence[str]) -> None:
        """Delete files, in no order, in as few requests as the store can; those that are not there are no error."""
        by_store: dict[int, tuple[InstrumentedStore, _Names]] = {}
        references = [path for path in paths if is_reference(path)]
        if references and self.keeper is None:
            log.warning(
                "snapshots that a state backend keeps stay, because state.backend names another one",
                first=self.full(references[0]),
                number=len(references),
            )
            paths = [path for path in paths if not is_reference(path)]
        for path in paths:
            store, place = self._writable(path)
            by_store.setdefault(id(store), (store, []))[1].append(place)
        if references and self.keeper is not None:  # first: as long as a file is there, its snapshot is not forgotten
            self.keeper.delete([self.full(path) for path in references])
        for store, places in by_store.values():
            self._retried(places[0], partial(store.delete_files, places))

    def delete_tree(self, path: str) -> int:
        """Delete everything below `path`; returns how many files that were, half-written ones left out."""
        store, place = self._writable(path)
        files = list(self.list(path, unfinished=True))
        if store is not self.store or any(is_reference(file.path) for file in files):
            self.delete_files([file.path for file in files])
        else:
            self._retried(path, lambda: store.delete_all(place, files))
        return sum(1 for file in files if not _is_unfinished(file))

    def _retried(self, path: str, call: Callable[[], _T]) -> _T:
        if self._s3 is None:  # a disk that fails does not get better within seconds
            return call()
        for attempt in stamina.retry_context(
            on=UnavailableError, attempts=self._s3.max_attempts, timeout=_RETRY_SECONDS, wait_initial=0.1, wait_max=5.0
        ):
            with attempt:
                return call()
        raise AssertionError(f"{path}: the last attempt raises")


def _directory(path: str) -> str:
    return check_path(path) if path else ""


def _is_unfinished(file: StoredFile) -> bool:
    return file.path.rpartition("/")[2].startswith(UNFINISHED)
