"""The project's code for executors on other hosts: packed when a session starts, and fetchable for as long as this
process lives.

An executor fetches the archive before its first task. One that joins hours later fetches it then, from the driver,
which serves the file where it lies. (A Spark Connect server keeps a copy of its own.) Third-party packages are not in
it: they are part of the workers' Python, which `spark.python` names.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from state_ops.storage.temp_dirs import scratch
from weir.definition.fingerprint import HOME, PACKAGES
from weir.settings.configuration import PROJECT, Settings, configuration_file
from weir.settings.project import is_installed, settings_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_INSTALLED = {"site-packages", "dist-packages"}
_ON_EVERY_EXECUTOR = {"pyspark", "py4j", "sitecustomize", "usercustomize"}
_SETTINGS = {".yaml", ".yml"}
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # the same code makes the same archive


def ship(spark: SparkSession, settings: Settings) -> Path:
    """Make the project's code importable in the executors of a session; returns the archive, which goes when this
    process ends."""
    kept = ExitStack()
    directory = kept.enter_context(scratch(settings.work_dir, "code-"))
    atexit.register(kept.close)
    files = [*of_weir(), *of_project(PROJECT), *of_modules(sys.modules.values())]
    archive = pack(directory, without_settings(files, PROJECT, configuration_file(os.environ)))
    spark.addArtifacts(str(archive), pyfile=True)
    return archive


def pack(directory: Path, files: Iterable[tuple[str, Path]]) -> Path:
    """Write an archive from which Python imports.

    Args:
        files: Their names in it, and where they are.
    """
    staging = directory / "code.zip"
    with zipfile.ZipFile(staging, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        packages: set[str] = set()
        for name, path in sorted(dict(files).items()):
            for parent in reversed(Path(name).parents[:-1]):
                if parent.as_posix() not in packages:  # Python finds a package without __init__.py only by this entry
                    packages.add(parent.as_posix())
                    archive.writestr(zipfile.ZipInfo(f"{parent.as_posix()}/", _FIRST_DAY), b"")
            entry = zipfile.ZipInfo(name, _FIRST_DAY)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    with staging.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    return staging.rename(directory / f"weir-{digest[:16]}.zip")


def of_weir() -> Iterator[tuple[str, Path]]:
    """Weir's own packages, wherever they are installed: executors run the driver's version of them."""
    for package in PACKAGES:
        yield from _importable(HOME / package)


def of_project(project: Path) -> Iterator[tuple[str, Path]]:
    """Yield all that can be imported from the project's folder, whatever it is called."""
    if is_installed(project):  # there is no project
        return
    for entry in sorted(project.iterdir()):
        if not entry.name.startswith("."):
            yield from _importable(entry)


def without_settings(files: Iterable[tuple[str, Path]], project: Path, chosen: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files but those of settings, which tasks never read: they may have secrets.

    Args:
        chosen: The file of settings that the environment names, wherever it lies.
    """
    configs, read = settings_folder(project).resolve(), chosen.resolve()
    for name, path in files:
        there = path.resolve()
        if there != read and not (there.suffix in _SETTINGS and there.is_relative_to(configs)):
            yield name, path


def of_modules(modules: Iterable[ModuleType]) -> Iterator[tuple[str, Path]]:
    """Yield the top-level modules and packages that this process has imported from elsewhere: neither from the project
    nor from installed packages."""
    standard = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    for module in list(modules):
        name = getattr(module, "__name__", "")
        if not name.isidentifier() or name.startswith("__") or name in _ON_EVERY_EXECUTOR:
            continue
        file = getattr(module, "__file__", None)
        for place in map(Path, getattr(module, "__path__", None) or ([file] if file else [])):
            there = place.parent == PROJECT or any(place.is_relative_to(path) for path in standard)
            if place.stem == name and not there and _INSTALLED.isdisjoint(place.parts):
                yield from _importable(place)


def _importable(entry: Path) -> Iterator[tuple[str, Path]]:
    """Yield a module's file, or what is in a package; of a directory that is none the modules alone: it may hold
    anything."""
    if entry.is_file() and entry.suffix == ".py":
        yield entry.name, entry
    if not entry.is_dir() or not entry.name.isidentifier() or _is_environment(entry):
        return
    whole = (entry / "__init__.py").exists()
    visited: set[Path] = set()
    for current, below, files in os.walk(entry, followlinks=True):
        directory = Path(current)
        if directory.resolve() in visited:  # a link to a directory above it
            below.clear()
            continue
        visited.add(directory.resolve())
        below[:] = [
            name
            for name in below
            if name != "__pycache__" and not name.startswith(".") and not _is_environment(directory / name)
        ]
        for name in files:
            path = directory / name
            if name.endswith(".py") or (whole and not name.startswith(".") and path.is_file()):
                yield path.relative_to(entry.parent).as_posix(), path


def _is_environment(directory: Path) -> bool:
    return (directory / "pyvenv.cfg").exists()
