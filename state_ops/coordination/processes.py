"""Tells whether the process that holds a lease is alive, as far as this host can see."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


def process_lives(host: str, pid: int, began: str, pids: str) -> bool | None:
    """Return whether a process lives; None if that cannot be seen from here.

    Args:
        began, pids: The results of `born` and `pid_namespace` for the process.
    """
    if host != socket.gethostname() or not pids or pids != pid_namespace():
        return None
    import psutil  # not at import: workers of Spark do without

    try:
        # A killed process that its parent has not collected yet is still listed, and does nothing any more.
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        return born(pid) == began
    except (psutil.Error, OSError):
        return False


def born(pid: int) -> str:
    """Return a text that tells a process from a later one with the same pid.

    On Linux it does not change when the clock is set.
    """
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        ticks = stat.read_text().rsplit(")", 1)[1].split()[19]
        return f"{_boot()}/{ticks}"
    import psutil

    return f"{psutil.Process(pid).create_time():.0f}"


def is_of_earlier_boot(host: str, began: str) -> bool:
    """Return whether a process of this host began before the host was booted, if hosts of one name are one.

    Args:
        began: The result of `born` for the process.
    """
    return host == socket.gethostname() and "/" in began and began.partition("/")[0] != _boot()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Among which processes the pids that this one sees count; "" where that cannot be told. Containers may share a
    host's name but not its pids, and a machine of the same name may be another one, or the same after a boot."""
    if sys.platform != "linux":
        return sys.platform
    try:
        if Path("/proc/self").readlink().name != str(os.getpid()):
            return ""  # what is mounted there shows another namespace's processes
        return f"{_boot()}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""
