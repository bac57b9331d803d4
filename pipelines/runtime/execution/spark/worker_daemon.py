"""Spark's daemon of Python workers, with the modules of the PySpark that is installed.

Spark has workers import PySpark from an archive (`pyspark.zip`) that lies within the installed package. Python keeps no
compiled modules of an archive, so each daemon and worker that starts would compile them again, for a quarter of a
second each.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def without_archives(path: list[str]) -> list[str]:
    """Return a module path without Spark's archives, where the same PySpark lies around them, and what it needs."""
    others = [entry for entry in path if not entry.endswith(".zip")]
    found, needed = PathFinder.find_spec("pyspark", others), PathFinder.find_spec("py4j", others)
    if found is None or found.origin is None or needed is None:
        return path
    archives = Path(found.origin).resolve().parent / "python" / "lib"
    return [entry for entry in path if entry in others or Path(entry).resolve().parent != archives]


if __name__ == "__main__":
    sys.path[:] = without_archives(sys.path)
    importlib.import_module("pyspark.daemon").manager()
