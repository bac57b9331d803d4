"""Savepoints, branches and running restores: each keeps a checkpoint that is old enough to be pruned.

    registry/pins/               Delta: savepoints and branches, by name; committed by the generation's owner alone
    coordinator/holds/<uuid>.json  one running restore each: which checkpoint it reads, and a counter that a heartbeat
                                   raises

A restore on any host may hold a checkpoint, without owning anything. It writes its hold first and then looks whether
the checkpoint is still there; pruning drops a checkpoint's row first and then looks for holds. So whichever comes
first, either the restore sees that the checkpoint is gone, or pruning sees the hold and leaves listing and objects
where they are.

A hold counts until its counter has not changed for 3 heartbeats on the observer's own monotonic clock, or its process
is gone and the observer sees the processes of its host and container. No wall clocks are compared.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease, processes
from state_ops.coordination.lease import DEAD_AFTER_HEARTBEATS
from state_ops.errors import PrunedError, plainly
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint
from state_ops.storage.paths import HOLDS
from state_ops.storage.storage import Storage

_HEARTBEAT_SECONDS = 5.0

log = Logger("weir.pins")


@dataclass(frozen=True, slots=True)
class HoldRecord:
    """One running restore's hold on a checkpoint.

    Attributes:
        purpose: What the checkpoint is read for, in words.
    """

    checkpoint_id: CheckpointId
    commit_id: str
    purpose: str
    host: str
    pid: int
    born: str
    heartbeat_seconds: float
    counter: int = 0
    pids: str = ""  # as older releases wrote it


class ReaderHold:
    """Keeps one checkpoint from being pruned for as long as the `with` block lasts.

    Call `check` before what was read is put to use, because a process that stood still for too long may have lost its
    hold.

    Raises:
        PrunedError: The checkpoint is gone already.
    """

    def __init__(
        self,
        storage: Storage,
        registry: Registry,
        checkpoint: Checkpoint,
        purpose: str,
        heartbeat_seconds: float = _HEARTBEAT_SECONDS,
    ) -> None:
        self._storage, self._registry, self._checkpoint = storage, registry, checkpoint
        self._path = f"{HOLDS}/{uuid.uuid4().hex}.json"
        self._held = HoldRecord(
            checkpoint.id,
            checkpoint.commit_id,
            purpose,
            socket.gethostname(),
            os.getpid(),
            processes.born(os.getpid()),
            heartbeat_seconds,
            pids=processes.pid_namespace(),
        )
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="weir-hold", daemon=True)

    def __enter__(self) -> ReaderHold:
        self._write()
        if not self._registry.holds(self._checkpoint):
            self._storage.delete(self._path)
            raise self._gone()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=self._held.heartbeat_seconds + 5)
        try:
            self._storage.delete(self._path)
        except OSError as error:  # a hold that cannot be removed expires by itself
            log.warning("a hold could not be given back", error=plainly(error))

    def check(self) -> None:
        """Check that this hold and the checkpoint are still there.

        Raises:
            PrunedError: They are not.
        """
        if self._storage.read_bytes(self._path) is None or not self._registry.holds(self._checkpoint):
            raise self._gone()

    def _gone(self) -> PrunedError:
        return PrunedError(
            f"Checkpoint {self._checkpoint.id} was pruned while it was being read.",
            where=self._storage.uri,
            next="Look again: `weir checkpoints` lists what is retained.",
        )

    def _beat(self) -> None:
        while not self._done.wait(self._held.heartbeat_seconds):
            try:
                if self._storage.read_bytes(self._path) is None:
                    return  # it was taken for dead and removed: `check` will raise, and it is not written again
                self._write()
            except OSError as error:
                log.warning("a hold's heartbeat failed", error=plainly(error))

    def _write(self) -> None:
        self._held = replace(self._held, counter=self._held.counter + 1)
        self._storage.put_bytes(self._path, json.dumps(asdict(self._held)).encode())


class HeldCommits:
    """The checkpoint commits that running restores hold: `commit_id in held`.

    A hold that cannot be read may be on any commit, so all commits are held then.
    """

    def __init__(self, holds: Mapping[str, HoldRecord]) -> None:
        self._ids = {hold.commit_id for hold in holds.values()}

    def __contains__(self, commit_id: str) -> bool:
        return "" in self._ids or commit_id in self._ids


class HoldWatcher:
    """One observer's memory of the holds that it has seen: since when each counter stands still."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def live(self, storage: Storage, now: float | None = None) -> dict[str, HoldRecord]:
        """Return the holds that count, by their path.

        Args:
            now: Seconds on this process's monotonic clock.
        """
        return self.sorted_out(storage, now)[0]

    def dead(self, storage: Storage, now: float | None = None) -> list[str]:
        """Return the paths of the holds that count no more."""
        return self.sorted_out(storage, now)[1]

    def sorted_out(self, storage: Storage, now: float | None = None) -> tuple[dict[str, HoldRecord], list[str]]:
        """Return the holds that count, by their path, and the paths of those that count no more, from one look."""
        looked = list(self._look(storage, now))
        return {path: held for path, held, counts in looked if counts}, [
            path for path, _, counts in looked if not counts
        ]

    def _look(self, storage: Storage, now: float | None) -> Iterator[tuple[str, HoldRecord, bool]]:
        moment = time.monotonic() if now is None else now
        for file in storage.list(HOLDS):
            raw = storage.read_bytes(file.path)
            if raw is None:
                continue
            try:
                held = lease.record(HoldRecord, raw)
            except ValueError:
                # Nobody can tell whose hold it is, and on what: it holds everything until it was silent long enough.
                held = HoldRecord(
                    CheckpointId(0), "", "an unreadable hold", "", 0, "", _HEARTBEAT_SECONDS, zlib.crc32(raw)
                )
            counter, since = self._seen.get(file.path, (-1, moment))
            if counter != held.counter or since > moment:
                since = moment
            self._seen[file.path] = (held.counter, since)
            yield file.path, held, self._alive(held, moment - since)

    @staticmethod
    def _alive(held: HoldRecord, silent: float) -> bool:
        lives = processes.process_lives(held.host, held.pid, held.born, held.pids)
        return silent < DEAD_AFTER_HEARTBEATS * held.heartbeat_seconds if lives is None else lives
