"""Requests that other processes leave for the run that owns a pipeline."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict, dataclass, replace

from state_ops.coordination.lease import known_fields, record
from state_ops.errors import first_line
from state_ops.storage.storage import Storage

BARRIER, STOP, NAME, UNNAME = "barrier", "stop", "savepoint", "drop_savepoint"
UPKEEP, REPAIR = "upkeep", "repair"
FORK, UNFORK = "fork", "drop_fork"


REQUESTS = "coordinator/requests"
UNREADABLE = "unreadable"  # the kind of a request that cannot be read


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the running coordinator.

    Attributes:
        trigger: Who asks (sensor, manual).
        kind: "barrier"; "stop", with `drain` or with `delete`, which drops the checkpoints without a name at the end;
            "savepoint", which names the next checkpoint `savepoint`; "drop_savepoint"; "upkeep", which prunes and
            removes what nothing names; "fork" and "drop_fork", which pin `checkpoint` for the branch `savepoint` and
            let it go.
    """

    kind: str
    trigger: str = "manual"
    reason: str = ""
    drain: bool = False
    delete: bool = False
    savepoint: str = ""
    checkpoint: int | None = None
    tick: str | None = None
    at: float = 0.0
    name: str = ""


def send(storage: Storage, request: Request) -> Request:
    """Leave a request; the coordinator reads it at its next barrier."""
    sent = replace(request, at=time.time(), name=f"{REQUESTS}/{uuid.uuid4().hex}.json")
    # What is not asked for is left out: a coordinator of an older release would not know it.
    options = {name: value for name, value in asdict(sent).items() if value is not None}
    storage.put_bytes(sent.name, json.dumps(options).encode())
    return sent


def pending(storage: Storage) -> list[Request]:
    """Return all requests that no coordinator has taken yet, oldest first; those that cannot be read are of the kind
    UNREADABLE.

    A request is named by its file, whatever it says of itself: that name is what `take` deletes.
    """
    requests = []
    for file in storage.list(REQUESTS):
        raw = storage.read_bytes(file.path)
        if raw is not None:
            requests.append(replace(_request(raw), name=file.path))
    return sorted(requests, key=lambda request: request.at)


def _request(raw: bytes) -> Request:
    """Return a request; one with an option of a newer release becomes one of an unknown kind.

    To do half of what it asks may be harm.
    """
    try:
        request = record(Request, raw)
    except ValueError as error:
        return Request(UNREADABLE, reason=first_line(error))
    unknown = sorted(json.loads(raw).keys() - known_fields(Request, json.loads(raw)).keys())
    return replace(request, kind=f"{request.kind} with {', '.join(unknown)}") if unknown else request


def take(storage: Storage, request: Request) -> None:
    """Remove a request that was carried out."""
    storage.delete(request.name)
