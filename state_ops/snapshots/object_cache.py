"""Objects of state that this host has fetched, by digest, so that they need not be fetched again.

They are used by another subtask after its parallelism changed, by a restore that was prepared, by a look into an older
checkpoint, and by a fork.

    <work>/objects/<sha256>      the object; only SSTs, which nobody changes in place: databases have hard links

An object is verified when it arrives, and hashed again before a process uses it for the first time, because disks rot.
A process does not hash it twice: blocks of an SST have checksums of their own, and when one is wrong, the objects are
read again and damaged ones removed (`drop_rotten`). The directory is bounded: the objects unused for longest are
removed, which frees room once no database links them any more.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from state_ops.errors import DamageError
from state_ops.records.snapshot_files import StateFile
from state_ops.storage import disks
from state_ops.storage.storage import Arrived, Cancelled, CancelledError, Storage

_LOCK_SECONDS, _PATIENCE_SECONDS = 0.01, 30.0
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = ".part"
_MOST_NOTED = 100_000
_verified: dict[tuple[int, int], tuple[int, int, str]] = {}


@dataclass(frozen=True, slots=True)
class ObjectCache:
    """The objects of this host.

    Attributes:
        directory: On the disk of the databases, so that hard links work.
        most_bytes: How many bytes it may hold; with 0 nothing is kept.
    """

    directory: Path
    most_bytes: int

    def holds(self, file: StateFile) -> bool:
        """Return whether an object is here, judged by its name and size."""
        with suppress(OSError):
            return self._at(file).stat().st_size == file.bytes
        return False

    def drop(self, digests: Iterable[str]) -> None:
        """Remove the objects of these digests, because damage was found in one.

        Files that were verified before are verified again.
        """
        _verified.clear()
        for digest in digests:
            if _DIGEST.fullmatch(digest):
                (self.directory / digest).unlink(missing_ok=True)

    def drop_rotten(self, files: Iterable[StateFile]) -> bool:
        """Read some objects again and remove the damaged ones.

        Returns:
            Whether there was a damaged one.
        """
        _verified.clear()
        has_rotten = False
        for file in files:
            with suppress(FileNotFoundError):  # not here, or just evicted
                if not is_object(self._at(file), file):
                    self._at(file).unlink()
                    has_rotten = True
        return has_rotten

    def _at(self, file: StateFile) -> Path:
        if not _DIGEST.fullmatch(file.digest):
            raise DamageError(
                f"The registry names {file.digest!r} as the digest of a file.",
                where=file.path,
                next="Weir never writes such a digest: find out who altered the registry before you go on.",
            )
        return self.directory / file.digest

    def fetch(
        self,
        storage: Storage,
        file: StateFile,
        target: Path,
        cancelled: Cancelled,
        arrived: Arrived | None = None,
        part: Path | None = None,
    ) -> bool:
        """Bring an object to `target` as a hard link, after one download that all who ask for it share.

        Args:
            arrived: Told of bytes as they are downloaded, as in `Storage.get_file`.
            part: Where to download if the object is not to be kept here, beside `target`.

        Returns:
            Whether it had to be downloaded.

        Raises:
            DamageError: The object is missing from storage, or is not what the checkpoint recorded.
        """
        if not self.most_bytes:
            download(storage, file, target, cancelled, arrived, part)
            return True
        kept = self._at(file)
        with self._alone(storage, file, cancelled) as alone:
            if self._take(kept, file, target):
                return False
            if not alone:  # the process that downloads it may be stuck
                download(storage, file, target, cancelled, arrived, part)
                return True
            arriving = kept.with_name(kept.name + _PART)
            storage.get_file(
                file.path, arriving, digest=file.digest, cancelled=cancelled, size=file.bytes, arrived=arrived
            )
            _note(arriving, file.digest)
            disks.link(arriving, target)
            arriving.rename(kept)
        self._make_room()
        return True

    def _take(self, kept: Path, file: StateFile, target: Path) -> bool:
        try:
            disks.link(kept, target)
        except FileNotFoundError:
            return False
        if not is_object(target, file):
            target.unlink()
            kept.unlink(missing_ok=True)
            return False
        with suppress(OSError):  # just evicted
            os.utime(kept, ns=(time.time_ns(), target.stat().st_mtime_ns))
        return True

    @contextmanager
    def _alone(self, storage: Storage, file: StateFile, cancelled: Cancelled) -> Iterator[bool]:
        """Keep everybody else on this host from fetching the same object in the `with` block.

        It yields False if another process has not finished after some time. A process that dies releases the lock.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        with self._lock(file.digest) as lock:
            while not (locked := _locked(lock)) and time.monotonic() < until:
                if cancelled.is_set():
                    raise CancelledError("A download was cancelled.", where=storage.full(file.path))
                time.sleep(_LOCK_SECONDS)
            try:
                yield locked
            finally:
                # Closing alone is not enough: a child that was forked meanwhile has the file open too.
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _lock(self, digest: str) -> IO[str]:
        locks = self.directory / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        return (locks / digest[:3]).open("w")

    def _drop_left(self, part: Path) -> None:
        """Remove a download whose process was killed."""
        with self._lock(part.name) as lock:
            if _locked(lock):
                part.unlink(missing_ok=True)
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _make_room(self) -> None:
        """Remove the objects unused for longest.

        Downloads that were broken off count too, because the next fetch continues them.
        """
        kept_files = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.is_file():
                        stat = entry.stat()
                        kept_files.append((stat.st_atime_ns, stat.st_size, Path(entry.path)))
        over = sum(size for _, size, _ in kept_files) - self.most_bytes
        for _, size, path in sorted(kept_files):
            if over <= 0:
                break
            if path.name.endswith(_PART):
                self._drop_left(path)
            else:
                path.unlink(missing_ok=True)
            over -= size


def download(
    storage: Storage,
    file: StateFile,
    target: Path,
    cancelled: Cancelled,
    arrived: Arrived | None = None,
    part: Path | None = None,
) -> None:
    """Bring an object from storage and check its digest.

    Args:
        part: Where the bytes arrive; a download that was broken off is continued from there.
    """
    if part is None:
        storage.get_file(file.path, target, digest=file.digest, cancelled=cancelled, arrived=arrived)
        return
    storage.get_file(file.path, part, digest=file.digest, cancelled=cancelled, size=file.bytes, arrived=arrived)
    part.rename(target)


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_object(path: Path, file: StateFile) -> bool:
    """Return whether a local file that nobody changes in place is the object that a checkpoint names.

    This process reads the file once, however many links to it there are.
    """
    stat = path.stat()
    if stat.st_size != file.bytes:
        return False
    if _verified.get((stat.st_dev, stat.st_ino)) == (stat.st_size, stat.st_mtime_ns, file.digest):
        return True
    with path.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != file.digest:
            return False
    _note(path, file.digest)
    return True


def _note(path: Path, digest: str) -> None:
    stat = path.stat()
    if len(_verified) > _MOST_NOTED:
        _verified.clear()
    _verified[stat.st_dev, stat.st_ino] = (stat.st_size, stat.st_mtime_ns, digest)
