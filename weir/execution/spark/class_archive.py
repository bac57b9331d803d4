"""An archive of the classes that Spark loads, with which its JVM starts in half the time (JEP 350).

    <cache_dir>/java/classes-<key>-<bytes>.jsa    written by `python -m weir.local.class_archive`, read by each JVM

The key stands for one Java and one set of jars, so a JVM is never pointed at an archive of others; where it sees a
difference by itself (a longer class path), it goes on without. A file of another size than its name says is half
written or cut short, and is not used: a JVM would end on it.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

QUIET = "-Xlog:cds*=off"
"""A JVM that cannot use an archive says so on its standard output."""


def java_options(cache_dir: Path, home: Path) -> str:
    """Return what lets a JVM read the archive, or nothing where there is none.

    Args:
        cache_dir: Where archives lie.
        home: JAVA_HOME of the JVM, as `java_home` gives it.
    """
    archive = find(cache_dir, home)
    return f"{option('SharedArchiveFile', archive)} {QUIET}" if archive else ""


def option(name: str, path: Path) -> str:
    """Return an option of a JVM that names a file, as Spark takes it among others, whatever is in the path."""
    escaped = str(path).replace("\\", r"\\").replace('"', r"\"")
    return f'"-XX:{name}={escaped}"'


def find(cache_dir: Path, home: Path) -> Path | None:
    """Return the whole archive for this Java and these jars."""
    for path in directory(cache_dir).glob(f"classes-{key(home)}-*.jsa"):
        size = re.fullmatch(r"classes-\w+-(\d+)\.jsa", path.name)
        with suppress(FileNotFoundError):  # another process has just replaced it
            if size and path.stat().st_size == int(size[1]):
                return path
    return None


def keep(partial: Path, cache_dir: Path, home: Path) -> Path:
    """Give a whole archive its name, and remove those that it replaces."""
    archives = directory(cache_dir)
    path = archives / f"classes-{key(home)}-{partial.stat().st_size}.jsa"
    for old in archives.glob("classes-*.jsa"):  # a JVM that has one mapped keeps it
        if old != path:
            old.unlink(missing_ok=True)  # another process may keep one too
    return partial.replace(path)


def directory(cache_dir: Path) -> Path:
    """Return where archives lie."""
    return cache_dir.absolute() / "java"


def key(home: Path) -> str:
    """Return what stands for one Java and the jars of PySpark: the Java's release (for a wrapper, its script), and
    names, sizes and times of the jars, which a JVM compares too."""
    release = home / "release"
    java = (release if release.exists() else home / "bin" / "java").read_bytes()
    digest = hashlib.sha256(str(home).encode() + java)
    for jar in sorted((spark_home() / "jars").glob("*.jar")):
        facts = jar.stat()
        digest.update(f"{jar}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def spark_home() -> Path:
    """Return the directory of PySpark, without importing it."""
    pyspark = find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise ModuleNotFoundError("pyspark is not installed")
    return Path(pyspark.origin).parent
