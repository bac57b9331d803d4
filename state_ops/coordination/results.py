"""The results of the last checks of the storage and of the last drill, for monitoring from outside.

    coordinator/fsck.json          the last check that has read the contents
    coordinator/fsck-quick.json    the last one of sizes alone
    coordinator/drill.json         the last drill

They are notes, and no decision depends on them. Every process that checks or drills writes one, without a lease. The
last one stays. A result that cannot be written is logged, and the caller gets it all the same.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import AwareDatetime, TypeAdapter

from state_ops.errors import WeirError, plainly
from state_ops.logs import Logger
from state_ops.storage.storage import Storage

FSCK, FSCK_QUICK, DRILL = "coordinator/fsck.json", "coordinator/fsck-quick.json", "coordinator/drill.json"

log = Logger("weir.run")


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check (`weir fsck`).

    Attributes:
        at: When it ended.
        seconds: How long it took.
        quick: It has compared sizes alone.
        damaged: How many things are missing, altered or inconsistent.
        findings: By kind, how many there are of it.
        leftover_bytes: Of files that nothing needs.
        checkpoints: Retained ones.
        intact: Those of them that can be restored.
        host: Where it ran.
    """

    at: AwareDatetime
    seconds: float
    quick: bool
    damaged: int
    findings: Mapping[str, int]
    leftover_bytes: int
    checkpoints: int
    intact: int
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True, slots=True)
class RecordedDrill:
    """The result of a drill (`weir drill`).

    Attributes:
        at: When it ended.
        seconds: How long it took, what it compares included.
        checkpoint: The one that it restored.
        comes_back: Nothing was wrong with what was restored and replayed.
        replayed: The checkpoint's epoch was played again.
        in_time: The objectives of the settings are met.
        restore_seconds: Of the restore.
        replay_seconds: Of the epoch, up to its commit; None: it was not played again.
        recovery_seconds: From an empty host to the next commit; None: it does not come back.
        loss_seconds: How long the oldest input that no checkpoint has had waited.
        host: Where it ran.
    """

    at: AwareDatetime
    seconds: float
    checkpoint: int
    comes_back: bool
    replayed: bool
    in_time: bool
    restore_seconds: float
    replay_seconds: float | None
    recovery_seconds: float | None
    loss_seconds: float
    host: str = field(default_factory=socket.gethostname)


Result = TypeVar("Result", Checked, RecordedDrill)


def note(storage: Storage, path: str, result: Checked | RecordedDrill) -> None:
    """Leave a result for others to see. Storage that takes nothing from here, or not now, hides it from nobody who has
    asked for it."""
    try:
        storage.put_bytes(path, TypeAdapter(type(result)).dump_json(result))
    except (OSError, WeirError) as error:
        log.warning("a result could not be noted", path=storage.full(path), error=plainly(error))


def checked(storage: Storage) -> list[Checked]:
    """Return the last checks: the one that has read the contents, and a quick one if that is newer."""
    full, quick = _read(storage, FSCK, Checked), _read(storage, FSCK_QUICK, Checked)
    if full is not None and quick is not None and quick.at < full.at:
        quick = None
    return [result for result in (full, quick) if result is not None]


def drilled(storage: Storage) -> RecordedDrill | None:
    """Return the last drill; None: there was none."""
    return _read(storage, DRILL, RecordedDrill)


def _read(storage: Storage, path: str, kind: type[Result]) -> Result | None:
    """Return a note of this release or another; None if there is none that could be read."""
    data = storage.read_bytes(path)
    if data is None:
        return None
    try:
        return TypeAdapter(kind).validate_json(data)
    except ValueError as error:
        log.debug("a note is left out that cannot be read", path=storage.full(path), error=plainly(error))
        return None
