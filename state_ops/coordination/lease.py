"""The coordinator's lease, and the requests that others leave for it.

    coordinator/lease.json             who coordinates, and a counter that a heartbeat raises
    coordinator/requests/<uuid>.json   barrier and stop requests, in the order of their time

A lease says whether a coordinator lives; it grants no right, only the generation does. No wall clocks are compared:
a coordinator is dead when its counter did not change for 3 heartbeats on the observer's own monotonic clock. On the
coordinator's own host a vanished process is seen at once, unless a container or a boot lies between: its number says
nothing there."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from state_ops.coordination.processes import born, pid_namespace, process_lives
from state_ops.errors import DamageError, GateError, first_line, plainly
from state_ops.ids import CheckpointId, Generation
from state_ops.logs import Logger
from state_ops.redaction import redacted
from state_ops.storage.storage import Storage
from state_ops.storage.store import UNFINISHED

LEASE = "coordinator/lease.json"
DEAD_AFTER_HEARTBEATS = 3
FAILURES = 8
"""The number of failures that a lease remembers: the newest."""
FAILED, INTERRUPTED, DIED = "failed", "interrupted", "died"
_LAST_SECONDS = 5.0
_MESSAGE = 500  # characters of one: it is written at each heartbeat
_TEXTS = {"how": str, "host": str, "run_id": str | None, "error": str | None, "message": str | None}
log = Logger("weir.lease")
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Lease:
    """A coordinator's record of itself, written at each heartbeat.

    Attributes:
        last_id: The highest checkpoint id this coordinator has begun; a successor starts above it.
        early_id: The highest id of an epoch that any coordinator has begun whose rows go to sinks before its commit; 0:
            none; None: an older release wrote it.
        born: Tells the process from a later one of the same pid.
        pids: Among which processes that pid counts (`pid_namespace`).
        failures: How coordinators before it, and in the end itself, ended that were not asked to, oldest first; each as
            `failure` gives it.
        stopped: It ended by itself; outcome says how: "stopped" or "drained" as it was asked to, "interrupted" by a
            signal, "ended" because there was nothing more to do, or "failed".
    """

    generation: Generation
    counter: int
    last_id: CheckpointId
    host: str
    pid: int
    born: str
    heartbeat_seconds: float
    run_id: str | None
    stopped: bool = False
    outcome: str | None = None
    pids: str = ""  # as older releases wrote it
    early_id: int | None = None
    failures: list[Any] = field(default_factory=list)

    @property
    def process(self) -> tuple[str, int, str]:
        """The process that holds the lease; the generation may change while it does."""
        return self.host, self.pid, self.born


def read(storage: Storage) -> Lease | None:
    """Return the lease as it stands. Raises DamageError for one that cannot be read."""
    raw = storage.read_bytes(LEASE)
    if raw is None:
        return None
    try:
        holder = record(Lease, raw)
        return replace(holder, failures=[item for item in holder.failures if _is_failure(item)][-FAILURES:])
    except ValueError as error:
        raise unreadable(
            storage,
            LEASE,
            error,
            "Bring it back from a backup, or from an older version of the object. If there is none, and no "
            "coordinator of this pipeline runs "
            "anywhere, delete it: the next run goes on from the newest checkpoint.",
        ) from error


def record(kind: type[Record], data: bytes) -> Record:
    """Return a row of facts from a JSON object, of which fields that this release does not know are left out.

    Raises:
        ValueError: For what is no such object: a machine that lost its power may leave zeros, or half of one.
    """
    raw = json.loads(data)
    if not isinstance(raw, dict):
        raise ValueError(f"it is no JSON object but {type(raw).__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]  # mypy knows no hash of a type variable
    for name, value in known_fields(kind, raw).items():
        if not _fits(value, hints[name]):
            raise ValueError(f"{name} is {value!r:.100}")
    try:
        return kind(**known_fields(kind, raw))
    except TypeError as error:
        raise ValueError(str(error)) from error


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    """Return the types of a record's fields; each note that is read is checked against them."""
    return get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, kind) for kind in get_args(hint))
    plain = getattr(hint, "__supertype__", get_origin(hint) or hint)
    if plain in (int, float):
        return isinstance(value, int | plain) and not isinstance(value, bool)
    return isinstance(value, plain)


def unreadable(storage: Storage, path: str, error: Exception, advice: str) -> DamageError:
    """Return a note of the coordinator's that cannot be read.

    Args:
        advice: What a person does then.
    """
    return DamageError(f"{path} cannot be read: {first_line(error)}.", where=storage.full(path), next=advice)


def known_fields(kind: type, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row of facts that this release knows: a newer one, on another host, may have written
    more."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in raw.items() if name in names}


def remove_unfinished(storage: Storage) -> None:
    """Delete what a killed coordinator had written of its lease, on a local disk; for the owner, before its own first
    beat."""
    for file in storage.list(Path(LEASE).parent.as_posix(), unfinished=True) if storage.is_local else ():
        if file.path.startswith(f"{Path(LEASE).parent}/{UNFINISHED}"):
            storage.delete(file.path)


def failure(how: str, holder: Lease, error: BaseException | None = None) -> dict[str, Any]:
    """Return the note that is kept of a coordinator that ended unasked. People read it; nothing depends on it.

    Args:
        how: FAILED by an error; INTERRUPTED by a signal; DIED: its successor found that it had ended without a word,
            and when it did so is not known.
        holder: Its lease.

    Returns:
        JSON-ready: `how`, `when` in ISO 8601 UTC, `run_id`, `generation`, `host`, `pid`, and of an error its name as
        `error` and the first lines of what it says as `message`, redacted.
    """
    message = None
    if error is not None and how == FAILED:
        # Samples of rows stay in the hold's note, which goes with its cause.
        text = str(error).partition(":")[0] if isinstance(error, GateError) else str(error)
        message = " ".join(redacted(text).split())[:_MESSAGE]
    return {
        "how": how,
        "when": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "run_id": holder.run_id,
        "generation": holder.generation,
        "host": holder.host,
        "pid": holder.pid,
        "error": type(error).__name__ if message is not None else None,
        "message": message,
    }


def _is_failure(item: Any) -> bool:
    """Return whether an item has the form that `failure` gives; other releases and people may have written others."""
    if not isinstance(item, dict) or not item.keys() >= _TEXTS.keys() | {"when", "generation"}:
        return False
    try:
        has_zone = datetime.fromisoformat(item["when"]).tzinfo is not None
    except (TypeError, ValueError):
        return False
    return has_zone and type(item["generation"]) is int and all(isinstance(item[name], _TEXTS[name]) for name in _TEXTS)


def alive(lease: Lease | None) -> bool | None:
    """Return whether the coordinator lives; None if only watching the counter can tell.

    That is so if the coordinator runs on another host, or in a container.
    """
    if lease is None or lease.stopped:
        return False
    return process_lives(lease.host, lease.pid, lease.born, lease.pids)


def watch(storage: Storage) -> bool:
    """Return whether a coordinator lives; watch its counter for 3 heartbeats if nothing faster can tell."""
    first = read(storage)
    lives = alive(first)
    if lives is not None or first is None:
        return bool(lives)
    deadline = time.monotonic() + DEAD_AFTER_HEARTBEATS * first.heartbeat_seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, first.heartbeat_seconds / 2))
        now = read(storage)
        if now is None or now.stopped:
            return False
        if (now.generation, now.counter) != (first.generation, first.counter):
            return True
    return False


class Heartbeat:
    """Keeps the lease of the running coordinator fresh from a daemon thread; `with` it around the run.

    outcome: what the lease will say of an end without an error.
    """

    def __init__(
        self,
        storage: Storage,
        generation: Generation,
        last_id: CheckpointId,
        seconds: float,
        run_id: str | None,
        early_id: int = 0,
    ) -> None:
        self._storage, self._seconds = storage, seconds
        self._lease = Lease(
            generation=generation,
            counter=0,
            last_id=last_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            born=born(os.getpid()),
            heartbeat_seconds=seconds,
            run_id=run_id,
            pids=pid_namespace(),
            early_id=early_id,
        )
        self.outcome = "ended"
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="weir-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._done.set()
        self._thread.join(timeout=self._seconds + _LAST_SECONDS)
        failures = self._lease.failures
        if kind is not None and not issubclass(kind, GeneratorExit):
            self.outcome = FAILED if issubclass(kind, Exception) else INTERRUPTED
            failures = [*failures, failure(self.outcome, self._lease, error)][-FAILURES:]
        try:
            self._write(stopped=True, outcome=self.outcome, failures=failures)
        except OSError as error:  # must not replace the error that ended the run
            log.warning("the lease could not be given back", error=plainly(error))

    def renew(self, generation: Generation) -> None:
        """Go on under a generation that the coordinator claimed meanwhile."""
        if generation != self._lease.generation:
            self._write(generation=generation)

    def begin(self, id: CheckpointId, *, early: bool = False) -> None:
        """Write down that this id is taken, before anything is staged under it.

        Args:
            early: Sinks may get rows under it before it is committed.
        """
        self._write(last_id=id, **({"early_id": id} if early else {}))

    def _beat(self) -> None:
        while not self._done.wait(self._seconds):
            try:
                self._write()
            except OSError as error:  # a missed beat is visible to observers, which is what it is for
                log.warning("heartbeat failed", error=plainly(error))

    def _write(self, **changes: Any) -> None:
        # Behind a write that hangs nobody waits for ever, least of all the end of the run.
        if not self._lock.acquire(timeout=self._seconds + _LAST_SECONDS):
            raise TimeoutError("an earlier write of the lease does not end")
        try:
            # An unreadable one is written anew: the lease grants no right, and a successor writes its own over ours at
            # its next beat.
            with suppress(DamageError):
                current = read(self._storage)
                if current is not None and current.generation > self._lease.generation:
                    return  # a successor holds the lease; the registry will tell us that we are fenced
                if current is not None and not self._lease.counter:
                    changes["failures"] = _before(current)
            self._lease = replace(self._lease, counter=self._lease.counter + 1, **changes)
            self._storage.put_bytes(LEASE, json.dumps(asdict(self._lease)).encode())
        finally:
            self._lock.release()


def _before(predecessor: Lease) -> list[Any]:
    """Return the failures up to the end of a predecessor, which is dead."""
    if predecessor.stopped:
        return predecessor.failures
    return [*predecessor.failures, failure(DIED, predecessor)][-FAILURES:]
