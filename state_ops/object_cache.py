"""Objects of state that this host has fetched, by their digest, for whoever needs them next: another subtask after its parallelism
changed, a restore that was prepared, a look into an older checkpoint, a fork.

    <work>/objects/<sha256>      the object; SSTs only, which nobody changes in place, so they are hard links in every database

What is here has been verified when it came, and is hashed again before a process uses it for the first time: disks rot. The
directory is bounded: those unused for longest go, which frees room once no database links them any more.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from state_ops.checkpoint import StateFile
from state_ops.storage import Cancelled, CancelledError, Storage

_LOCK_SECONDS = 0.01
_PART = ".part"
_MOST_NOTED = 100_000
_verified: dict[tuple[int, int], tuple[int, int, str]] = {}


@dataclass(frozen=True, slots=True)
class ObjectCache:
    """directory: on the disk of the databases. most_bytes: what it may hold; 0: nothing is kept."""

    directory: Path
    most_bytes: int

    def holds(self, file: StateFile) -> bool:
        """Whether an object is here, by name and size."""
        with suppress(OSError):
            return (self.directory / file.digest).stat().st_size == file.bytes
        return False

    def fetch(self, storage: Storage, file: StateFile, target: Path, cancelled: Cancelled) -> bool:
        """Bring an object to `target`, as a link to what is here, fetched once however many ask; whether it had to be fetched.

        Raises DamageError when it is missing from storage or is not what the checkpoint recorded.
        """
        if not self.most_bytes:
            storage.get_file(file.path, target, digest=file.digest, cancelled=cancelled)
            return True
        kept = self.directory / file.digest
        with self._alone(storage, file, cancelled):
            if self._take(kept, file, target):
                return False
            part = kept.with_name(kept.name + _PART)
            storage.get_file(file.path, part, digest=file.digest, cancelled=cancelled)
            _note(part, file.digest)
            part.rename(kept)
            os.link(kept, target)
        self._make_room()
        return True

    def _take(self, kept: Path, file: StateFile, target: Path) -> bool:
        try:
            os.link(kept, target)
        except FileNotFoundError:
            return False
        if not is_object(target, file):
            target.unlink()
            kept.unlink(missing_ok=True)
            return False
        with suppress(OSError):  # evicted this very moment
            os.utime(kept, ns=(time.time_ns(), target.stat().st_mtime_ns))
        return True

    @contextmanager
    def _alone(self, storage: Storage, file: StateFile, cancelled: Cancelled) -> Iterator[None]:
        """Nobody on this host fetches the same object meanwhile. A process that dies lets go."""
        locks = self.directory / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / file.digest[:3]).open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if cancelled.is_set():
                        raise CancelledError("A download was cancelled.", where=storage.full(file.path)) from None
                    time.sleep(_LOCK_SECONDS)
            yield

    def _make_room(self) -> None:
        """Drop those unused for longest."""
        found = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.is_file() and not entry.name.endswith(_PART):
                        known = entry.stat()
                        found.append((known.st_atime_ns, known.st_size, entry.path))
        over = sum(size for _, size, _ in found) - self.most_bytes
        for _, size, path in sorted(found):
            if over <= 0:
                break
            Path(path).unlink(missing_ok=True)
            over -= size


def is_object(path: Path, file: StateFile) -> bool:
    """Whether a local file that nobody changes in place is an object that a checkpoint names: read once by this process, however many links
    to it there are."""
    known = path.stat()
    if known.st_size != file.bytes:
        return False
    if _verified.get((known.st_dev, known.st_ino)) == (known.st_size, known.st_mtime_ns, file.digest):
        return True
    with path.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != file.digest:
            return False
    _note(path, file.digest)
    return True


def _note(path: Path, digest: str) -> None:
    known = path.stat()
    if len(_verified) > _MOST_NOTED:
        _verified.clear()
    _verified[known.st_dev, known.st_ino] = (known.st_size, known.st_mtime_ns, digest)
