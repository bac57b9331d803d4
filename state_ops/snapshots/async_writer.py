"""Write a snapshot after its barrier, in a thread of the worker's process, while the stage's next epoch may run.

    <attempt's directory>/.snapshot/    the files, as long as they are written
                          snapshot/     the same, whole
                          .writing      locked by the process that writes; in it, what went wrong

Whoever needs the files waits for them (`settle`). The kernel releases the lock when the process dies, so nobody waits
for a dead writer. If the directory is removed meanwhile, the thread may fail in any way: nothing uses what it still
writes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from state_ops.errors import TransientError, WeirError
from state_ops.storage.storage import CancelledError

WHOLE = "snapshot"
_PARTIAL, _LOCK = ".snapshot", ".writing"
_LOOK_SECONDS = 0.005


def begin(directory: Path, write: Callable[[Path], object]) -> Thread:
    """Write a snapshot into an attempt's directory, in a thread.

    Args:
        write: Called with a path that does not exist yet; makes a directory with the files there.
    """
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    writer = Thread(target=_written, args=(directory, write, lock), name=f"snapshot {directory.name}", daemon=True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer.start()
    except BaseException:  # also if this thread is interrupted: nothing else would close it
        os.close(lock)
        raise
    return writer


def _written(directory: Path, write: Callable[[Path], object], lock: int) -> None:
    try:
        write(directory / _PARTIAL)
        (directory / _PARTIAL).rename(directory / WHOLE)
    except BaseException as error:  # whoever waits reports it: nothing joins this thread
        # First: on a full disk there is no room for the reason either.
        shutil.rmtree(directory / _PARTIAL, ignore_errors=True)
        reason = error.what if isinstance(error, WeirError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # then the released lock says that it is over, and nothing says why
            os.pwrite(lock, reason.encode(errors="replace"), 0)
    finally:
        with suppress(OSError):  # closing alone is not enough: a child that was forked meanwhile has the file open too
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def settle(directory: Path, deadline: float | None = None, cancelled: Event | None = None) -> None:
    """Return when a snapshot that was begun in `directory` is whole.

    Args:
        deadline: On time.monotonic().

    Raises:
        TransientError: It will never be whole, or is not in time.
        CancelledError: `cancelled` was set.
        FileNotFoundError: No snapshot was begun here.
    """
    while not (directory / WHOLE).exists():
        gone, why = _ended(directory / _LOCK)
        if gone:
            if (directory / WHOLE).exists():  # the snapshot became whole after the first look
                return
            raise TransientError(
                "A snapshot was not written after its barrier: " + (why or "the process that wrote it has ended") + ".",
                where=str(directory),
                next="The epoch is declined; its replay writes the snapshot at the barrier. Look at disk space and "
                "memory, and at what failed beside it.",
            )
        if cancelled is not None and cancelled.is_set():
            raise CancelledError("The wait for a snapshot was cancelled.", where=str(directory))
        if deadline is not None and time.monotonic() >= deadline:
            raise TransientError(
                "A snapshot was not written when the epoch's time was up.",
                where=str(directory),
                next="Raise checkpoints.timeout_seconds, or look at what slows the disk down.",
            )
        time.sleep(_LOOK_SECONDS)


def _ended(file: Path) -> tuple[bool, str]:
    """Return whether the writing thread or process has ended, and the error that it noted, if any."""
    lock = os.open(file, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False, ""
    else:
        return True, os.pread(lock, 4096, 0).decode(errors="replace")
    finally:
        os.close(lock)
