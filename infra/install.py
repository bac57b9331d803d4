"""Install what a lock file names into this Python's environment, and say how it gets on: `python infra/install.py
requirements-demo.lock`.

    pip installs uv -> uv installs the packages, then this project -> Spark's classes are archived

Nothing is installed when it starts, so it imports the standard library alone. A terminal and a log file get the same
lines. A run may be repeated after any failure.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent


class Size(NamedTuple):
    """The size of a lock file's packages on the disk, and the most of it that is downloaded."""

    installed: str
    downloads: str


SIZES = {
    "requirements-demo.lock": Size("1.6 GB", "0.8 GB"),
    "requirements.lock": Size("2.2 GB", "1.0 GB"),
}
"""The pages name these sizes too: tests/infra/test_install.py."""
ARCHIVE = "170 MB"
QUIET_SECONDS = 15.0
"""After as long without a line, one says what is waited for."""

_BEGUN, _ENDED = re.compile(r"\s*(?:Downloading|Building) (\S+.*)"), re.compile(r"\s*(?:Downloaded|Built) (\S+)")
_LISTED = re.compile(r" [+~-] \S+==")  # uv names each of the packages at the end


def main(lock: str) -> int:
    """Return 0 where all is installed, else the exit code of what failed."""
    begun, size = time.monotonic(), SIZES[lock]
    say(f"Installing what {lock} names: {size.installed} of packages, at most {size.downloads} of it downloads.")
    say(f"Then Spark's classes are archived, with which it starts in half the time: half a minute, {ARCHIVE}.")
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    uv = Path(sys.prefix, "bin", "uv")
    if not uv.exists() and (failed := _install_uv(lock, environment)):
        return _failed(failed)
    cache = uv_cache(uv, environment)
    environment["UV_CACHE_DIR"] = str(cache)
    before = held(cache)

    def so_far() -> str:
        return f"{(held(cache) - before) / 1e6:,.0f} MB downloaded, unpacked and built so far"

    for command in commands(lock, str(uv)):
        if failed := follow(command, environment, so_far):
            return _failed(failed)
    say(f"The packages are there after {time.monotonic() - begun:.0f} s. Archiving Spark's classes.")
    archive = [sys.executable, "-m", "weir.local.class_archive"]
    follow(archive, environment, lambda: "Spark runs and notes the classes that it loads")  # it starts without them too
    say(f"Installed in {time.monotonic() - begun:.0f} s.")
    return 0


def commands(lock: str, uv: str) -> list[list[str]]:
    """Return what uv is asked for: the packages, the project itself, and the packages that a project adds."""
    asked = [
        [uv, "pip", "sync", "--require-hashes", lock],
        [uv, "pip", "install", "--no-deps", "--no-build-isolation", "--editable", "."],
    ]
    if Path(PROJECT, "requirements.txt").exists():
        asked.append([uv, "pip", "install", "-r", "requirements.txt", "-c", "requirements.lock"])
    return asked


def _install_uv(lock: str, environment: Mapping[str, str]) -> int:
    """Let pip install uv by the very hash in the lock file."""
    locked = re.search(r"^uv==.*(?:\n .*)*\n", Path(PROJECT, lock).read_text(), re.MULTILINE)
    assert locked is not None, f"{lock} names no uv"
    asked = Path(sys.prefix, "uv.lock")
    asked.write_text(locked[0])
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    return follow([*pip, "-r", str(asked)], environment, lambda: "pip installs uv, which installs the rest")


def uv_cache(uv: Path, environment: Mapping[str, str]) -> Path:
    """Return uv's own cache, or one in the project where that cannot be written, which is said."""
    asked = [str(uv), "cache", "dir"]
    answer = subprocess.run(asked, env=environment, cwd=PROJECT, capture_output=True, text=True, check=False)
    try:
        if answer.returncode:
            raise OSError(answer.stderr.strip())
        place = Path(answer.stdout.strip())
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        ours = Path(PROJECT, ".weir", "cache", "uv")
        say(f"uv cannot write its cache ({error}): packages are kept in {ours}.")
        return ours


def held(folder: Path) -> int:
    """Return the bytes of all files below a folder; a file that goes meanwhile counts as nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118 - of 100,000 files
    return total


def follow(command: Sequence[str], environment: Mapping[str, str], does: Callable[[], str]) -> int:
    """Run a program in the project's folder, and pass on its lines; while there are none, say what it waits for.

    Args:
        does: Says what it does while it names nothing itself.

    Returns:
        Its exit code.
    """
    waiting: dict[str, str] = {}
    begun = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=PROJECT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert process.stdout is not None
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=QUIET_SECONDS)
            except queue.Empty:
                names = ", ".join(list(waiting.values())[:4])
                say(f"  {time.monotonic() - begun:.0f} s: {f'waiting for {names}; ' if names else ''}{does()}")
                continue
            if line is None:
                return process.wait()
            if ended := _ENDED.match(line):
                waiting.pop(_name(ended[1]), None)
            elif named := _BEGUN.match(line):
                waiting[_name(named[1])] = named[1]
            if not _LISTED.match(line):
                say(f"  {line.strip()}")


def _read(output: Iterable[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in output:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _name(package: str) -> str:
    return re.split(r"[ =]", package)[0]


def _failed(code: int) -> int:
    say("The installation failed, as the lines above say. What is installed stays: make again goes on from there.")
    return code


def say(text: str) -> None:
    """Print a line at once, also into a file."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
