"""Directories that a process works in for a while, and that somebody removes after it was killed, or goes on with.

    <home>/<prefix><pid>-<digits>/  locked by its process; the pid is for people, the digits are random
    <home>/<prefix><name>/          the same for work that the next process takes up where it was (`resumable`)

The kernel lets go of the lock when the process dies. A pid would not tell: in a container each start has the same, and
another container on this disk has its own.

Directories belong to their user alone (mode 0700): a home may be the machine's temporary directory. What others have
put there under such a name, a pipe that would block whoever opens it or a link, is left alone.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK


def make_private(directory: Path) -> None:
    """Make a directory, and what is missing above it, for this user alone. One that is there stays as it is."""
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def scratch(home: Path, prefix: str) -> Iterator[Path]:
    """Yield a new directory in `home`, which is removed after the `with` block.

    What killed processes have left there under this prefix is removed first.
    """
    make_private(home)
    for left in home.glob(f"{prefix}[0-9]*-*"):
        remove_left(left)
    directory, lock = _new_directory(home, prefix)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has it too
        os.close(lock)


@contextmanager
def resumable(home: Path, prefix: str, name: str) -> Iterator[Path | None]:
    """Yield a directory in `home` with what an earlier process has left of the same work. It stays where the block is
    left by an exception.

    What is left of other work under this prefix goes before. None: another process is at this very work.
    """
    make_private(home)
    for other in home.glob(f"{prefix}*"):
        if other.name != f"{prefix}{name}":
            remove_left(other)
    directory, lock = home / f"{prefix}{name}", None
    while lock is None:
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = _locked(directory)
        except FileNotFoundError:  # somebody has just ended that work, or has no use for it and has removed it
            continue
        except OSError:
            break
    if lock is None:
        yield None
        return
    try:
        yield directory
    finally:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has it too
        os.close(lock)


def _new_directory(home: Path, prefix: str) -> tuple[Path, int]:
    """Return a directory, and the lock on it. One that is taken for left over before it is locked is made again."""
    while True:
        directory = home / f"{prefix}{os.getpid()}-{secrets.token_hex(6)}"
        directory.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            lock = os.open(directory, _OPEN)
            with suppress(OSError):  # a disk that knows no locks: nobody gets one there, so nobody removes it either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if directory.exists():
                return directory, lock
            os.close(lock)


def _locked(directory: Path) -> int:
    """Return the lock on the directory that is at this path.

    Raises:
        FileNotFoundError: There is none, or it was removed or renamed before it was locked.
        OSError: Somebody has the lock, the disk knows no locks, or this is no directory of this user's.
    """
    lock = os.open(directory, _OPEN)
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            raise PermissionError(f"{directory} is another user's")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), directory.stat()):
            raise FileNotFoundError(directory)
    except OSError:
        os.close(lock)
        raise
    return lock


def remove_left(directory: Path) -> None:
    """Remove a directory of these whose process is gone."""
    with suppress(OSError):  # its process lives, or it is gone by now
        lock = _locked(directory)
        try:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
