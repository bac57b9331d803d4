"""A backend that keeps state in memory, and whose first snapshot takes its process along while it is written after the
barrier."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from state_ops.backends.base import BackendOptions
from state_ops.backends.memory import FILE, FILESYSTEM, MemoryBackend

NAME = "tests.state_ops.dying:FACTORY"


class _Frozen:
    def __init__(self, backend: MemoryBackend, mark: Path) -> None:
        self._frozen, self._mark = MemoryBackend.freeze(backend), mark
        self.files, self.file_bytes, self.memory_bytes = (FILE,), 1, 1

    def write(self, target: Path) -> list[Path]:
        try:
            self._mark.touch(exist_ok=False)
        except FileExistsError:
            return self._frozen.write(target)
        target.mkdir()
        time.sleep(0.3)  # its task has acked, and whoever uploads waits
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def reopen(self, options: BackendOptions) -> _Backend:
        return _opened(self._frozen.reopen(options), options)


class _Backend(MemoryBackend):
    mark: Path

    def freeze(self) -> _Frozen:  # type: ignore[override]
        return _Frozen(self, self.mark)


class _Factory:
    format = "dying"

    def is_immutable(self, name: str) -> bool:
        return FILESYSTEM.is_immutable(name)

    def open(self, directory: Path, options: BackendOptions) -> _Backend:
        return _opened(FILESYSTEM.open(directory, options), options)


def _opened(backend: MemoryBackend, options: BackendOptions) -> _Backend:
    dying = _Backend()
    vars(dying).update(vars(backend))
    dying.mark = Path(options.own["mark"])
    return dying


FACTORY = _Factory()
