"""`coordinator/halt.json`: that a person has ended the pipeline, so that nobody but a person begins again.

It is an object of its own, beside the lease: the lease changes hands, with every command that owns the pipeline for a moment, and this
does not. Sensors read it; a run that begins epochs removes it, for whoever starts one by hand has begun again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from state_ops.lease import known
from state_ops.storage import Storage

PATH = "coordinator/halt.json"


@dataclass(frozen=True, slots=True)
class Halt:
    """how: "stopped", "drained" or "cancelled". why: in words. when: ISO 8601, UTC."""

    how: str
    why: str
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def read(storage: Storage) -> Halt | None:
    raw = storage.read_bytes(PATH)
    return Halt(**known(Halt, json.loads(raw))) if raw else None


def write(storage: Storage, halt: Halt) -> None:
    storage.put_bytes(PATH, json.dumps(asdict(halt)).encode())


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
    write(storage, Halt("stopped", why))
    try:
        yield
    finally:
        clear(storage)
