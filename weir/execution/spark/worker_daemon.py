"""Spark's daemon of Python workers, with the modules of the PySpark that is installed.

Spark has workers import PySpark from an archive (`pyspark.zip`) that lies within the installed package. Python keeps no
compiled modules of an archive, so each daemon and worker that starts would compile them again, for a quarter of a
second each.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def without_archives(path: list[str]) -> list[str]:
    """Return a module path without Spark's archives, where the same PySpark lies around them, and what it needs."""
    others = [entry for entry in path if not entry.endswith(".zip")]
    found, needed = PathFinder.find_spec("pyspark", others), PathFinder.find_spec("py4j", others)
    if found is None or found.origin is None or needed is None:
        return path
    archives = Path(found.origin).resolve().parent / "python" / "lib"
    return [entry for entry in path if entry in others or Path(entry).resolve().parent != archives]


def ending_quietly(serve: Callable[..., int]) -> Callable[..., int]:
    """Return what serves a worker's tasks, without an error where the JVM has closed the connection: it has ended, or
    given up the task. A Unix socket tells so at once, by TCP nobody would hear of it."""

    def served(*arguments: Any) -> int:
        try:
            return serve(*arguments)
        except BrokenPipeError:
            return 1

    return served


if __name__ == "__main__":
    sys.path[:] = without_archives(sys.path)
    daemon: Any = importlib.import_module("pyspark.daemon")
    daemon.worker = ending_quietly(daemon.worker)
    daemon.manager()
