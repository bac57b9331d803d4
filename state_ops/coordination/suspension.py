"""`coordinator/suspension.json`: that a person has ended the pipeline, so that nobody but a person begins again.

It is an object of its own, beside the lease: the lease changes hands, with every command that owns the pipeline for a
moment, and this does not. Sensors read it; a run that begins epochs removes it, for whoever starts one by hand has
begun again."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from state_ops.coordination.lease import record, unreadable
from state_ops.coordination.processes import born, pid_namespace, process_lives
from state_ops.errors import plainly
from state_ops.facts import Facts
from state_ops.logs import Logger
from state_ops.storage.storage import Storage

PATH = "coordinator/halt.json"
log = Logger("weir.halt")

_FOR_A_WHILE = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Suspension(Facts):
    """A note that a person has ended the pipeline.

    Attributes:
        how: "stopped", "drained" or "cancelled".
        why: In words.
        when: ISO 8601, UTC.
        process: Host, pid and birth of the process for whose time alone it holds; None: until somebody begins again.
        pids: Among which processes that pid counts, as in a lease.
    """

    how: str
    why: str
    process: list[Any] | None = None
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    pids: str = ""


def read(storage: Storage) -> Suspension | None:
    """Return the suspension that holds now; None: nobody has ended the pipeline, or the process that did so for a while
    is gone."""
    raw = storage.read_bytes(PATH)
    try:
        suspension = record(Suspension, raw) if raw is not None else None
    except ValueError as error:
        advice = (
            "A person has ended the pipeline, or somebody promoted or rewound it. Delete it when the pipeline "
            "may begin again."
        )
        raise unreadable(storage, PATH, error, advice) from error
    if suspension is None or suspension.process is None:
        return suspension
    host, pid, began = suspension.process
    lives = process_lives(host, pid, began, suspension.pids)
    if lives is None:  # it cannot be seen from here: nobody promotes or rewinds for so long
        return suspension if datetime.now(UTC) - datetime.fromisoformat(suspension.when) < _FOR_A_WHILE else None
    return suspension if lives else None


def write(storage: Storage, suspension: Suspension) -> None:
    storage.put_bytes(PATH, json.dumps(asdict(suspension)).encode())


def clear(storage: Storage) -> bool:
    """Let sensors begin again; False if nobody had ended it."""
    if storage.read_bytes(PATH) is None:
        return False
    storage.delete(PATH)
    return True


@contextmanager
def during(storage: Storage, why: str) -> Iterator[None]:
    """Keep sensors from beginning while the `with` block lasts; what a person has ended before stays so afterwards."""
    if read(storage) is not None:
        yield
        return
    suspension = Suspension(
        "stopped", why, [socket.gethostname(), os.getpid(), born(os.getpid())], pids=pid_namespace()
    )
    write(storage, suspension)
    try:
        yield
    finally:
        try:
            if read(storage) == suspension:  # a person may have stopped it meanwhile, which stays
                clear(storage)
        except (
            OSError
        ) as error:  # must not replace the error that ended it; it counts no longer than this process lives
            log.warning("a suspension could not be taken back", error=plainly(error))
