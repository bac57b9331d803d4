"""State that is being fetched: how far that is, for whoever waits for it or looks.

    coordinator/restoring/<digest>.json    one for what one process fetches; gone at its end

A fetch may take longer than an epoch: the state may be large, and the storage slow. So it has no deadline of an
epoch's. In its place it says here, again and again, that it goes on, and the coordinator lets the time of its epoch
begin anew each time. One that gets no byte for ten minutes, or whose process is gone, says nothing any more, and its
epoch's time runs out like any other's."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from state_ops.coordination.lease import record
from state_ops.storage.storage import Arrived, Storage

DIRECTORY = "coordinator/restoring"
BEAT_SECONDS = 2.0
_STALLED_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Restoring:
    """One fetch of state, in progress.

    Attributes:
        stage, subtask: Whose state; None: that of several.
        generation, epoch: For which epoch; None: before a run's first, or by a command.
        bytes: Those that are here, of bytes_total.
        beat: How often this was said.
        at: When it was said last, UTC.
    """

    purpose: str
    stage: str | None = None
    subtask: int | None = None
    generation: int | None = None
    epoch: int | None = None
    host: str = ""
    bytes: int = 0
    bytes_total: int = 0
    beat: int = 0
    at: str = ""

    @property
    def path(self) -> str:
        """The file in which it says so. A subtask that runs again, on any host, replaces the file of its run before."""
        who = f"{self.purpose}/{self.stage}/{self.subtask}"
        return f"{DIRECTORY}/{hashlib.sha256(who.encode()).hexdigest()[:32]}.json"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class RestoreProgress:
    """Says how far one process is.

    What is fetched sooner than that is never said at all.

    Args:
        about: Whose state it is.
        seconds: How often, at most.
        heard: Is told each time, in its thread.
    """

    def __init__(
        self,
        storage: Storage,
        about: Restoring,
        seconds: float = BEAT_SECONDS,
        heard: Callable[[Restoring], None] | None = None,
    ) -> None:
        self._storage, self._seconds, self._heard = storage, seconds, heard
        self._state = replace(about, host=socket.gethostname())
        self._lock, self._done = threading.Lock(), threading.Event()
        self._moved = time.monotonic()
        self.fetched = False

    @contextmanager
    def fetching(self, total: int) -> Iterator[Arrived]:
        """While so many bytes are fetched; yields what is to be told of those that have come."""
        self.fetched, self._moved = True, time.monotonic()
        self._state = replace(self._state, bytes_total=total)
        thread = threading.Thread(target=self._say, name="weir-restoring", daemon=True)
        thread.start()
        try:
            yield self._arrived
        finally:
            self._done.set()
            thread.join(timeout=self._seconds)  # behind storage that hangs nobody waits for it
            if self._state.beat:
                with suppress(OSError):
                    self._storage.delete(self._state.path)

    def _arrived(self, bytes: int, /) -> None:
        with self._lock:
            self._state, self._moved = replace(self._state, bytes=self._state.bytes + bytes), time.monotonic()

    def _say(self) -> None:
        while not self._done.wait(self._seconds):
            with self._lock:
                if time.monotonic() - self._moved > _STALLED_SECONDS:
                    continue
                now = datetime.now(UTC).isoformat(timespec="seconds")
                state = self._state = replace(self._state, beat=self._state.beat + 1, at=now)
            with suppress(OSError):  # a missed beat, of which there are more
                self._storage.put_bytes(state.path, json.dumps(asdict(state)).encode())
            if self._heard is not None:
                self._heard(state)


def read(storage: Storage) -> list[Restoring]:
    """Return the fetches that have been reported, in no order.

    The last reports of killed processes are among them.
    """
    fetches = []
    for file in storage.list(DIRECTORY):
        raw = storage.read_bytes(file.path)
        if raw:
            with suppress(ValueError):  # on a disk, half of what a killed process wrote
                fetches.append(record(Restoring, raw))
    return fetches


def clear(storage: Storage) -> None:
    """Remove what killed processes have left; for the owner. Who lives says it again."""
    storage.delete_files([file.path for file in storage.list(DIRECTORY, unfinished=True)])


def described(restoring: Sequence[Restoring]) -> str:
    """Describe in words how many bytes are here."""
    here, total = (sum(getattr(fetch, name) for fetch in restoring) for name in ("bytes", "bytes_total"))
    return f"{here / 1e6:,.1f} of {total / 1e6:,.1f} MB ({100 * here // max(1, total)} %)"
