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
    """Return a module path without Spark's archives, if it has the same PySpark unpacked, and what that needs."""
    archives = [entry for entry in path if entry.endswith(".zip") and Path(entry).parts[-3:-1] == ("python", "lib")]
    rest = [entry for entry in path if entry not in archives]
    found, needed = PathFinder.find_spec("pyspark", rest), PathFinder.find_spec("py4j", rest)
    if found is None or found.origin is None or needed is None:
        return path
    package = Path(found.origin).resolve().parent
    return rest if all(Path(entry).resolve().parents[2] == package for entry in archives) else path


if __name__ == "__main__":
    sys.path[:] = without_archives(sys.path)
    importlib.import_module("pyspark.daemon").manager()
