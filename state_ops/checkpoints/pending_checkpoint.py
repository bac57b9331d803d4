"""An epoch between its trigger and its completion: what it waits for, what an ack means to it, why it may fail."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from state_ops.errors import DamageError
from state_ops.ids import CheckpointId, Generation, epoch_dir
from state_ops.records.acks import Ack
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import CHANNEL, OUTPUT, STATE, StateFile
from state_ops.records.triggers import Trigger


class AckOutcome(StrEnum):
    """The coordinator's verdict on an ack. Every ack gets one; only ACCEPTED counts.

    - DUPLICATE: the subtask has acked already, by this or by another attempt.
    - LATE: the epoch has completed or was aborted.
    - UNKNOWN: the epoch has no such operator or subtask.
    - FENCED: the ack is of another generation.
    - FOREIGN: this coordinator never began the epoch.
    """

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    DECLINED = "declined"
    LATE = "late"
    UNKNOWN = "unknown"
    FENCED = "fenced"
    FOREIGN = "foreign"


class FailureReason(StrEnum):
    """The reason why an epoch did not complete."""

    PLANNING = "its slice could not be planned"
    JOB = "a stage's job failed"
    DECLINED = "a subtask declined"
    MISSING_ACKS = "acks are missing"
    GATE = "a gate failed"
    TIMEOUT = "it took too long"
    COMMIT = "its commit failed"
    PREDECESSOR = "the epoch that it continues failed"
    RENEWED = "the coordinator claimed a new generation"


@dataclass(slots=True)
class PendingCheckpoint:
    """An epoch between its trigger and its completion.

    Attributes:
        parent_id: The checkpoint that it continues, pending or confirmed.
        base: The newest confirmed checkpoint at its trigger.
        expected: By operator uid, its number of subtasks.
        deadline: On the coordinator's clock.
        committing: Whether its commit has begun. From then on only the registry can tell whether it exists.
    """

    id: CheckpointId
    parent_id: CheckpointId | None
    base: Checkpoint | None
    generation: Generation
    trigger: Trigger
    expected: Mapping[str, int]
    deadline: float
    acks: dict[tuple[str, int], Ack] = field(default_factory=dict)
    declines: list[Ack] = field(default_factory=list)
    committing: bool = False

    def record(self, ack: Ack) -> AckOutcome:
        """Record an ack of this epoch and generation.

        The first ack of a subtask is the winner among its attempts. The same attempt acks again when what it handed
        over has been uploaded.
        """
        key = (ack.operator, ack.subtask)
        if not 0 <= ack.subtask < self.expected.get(ack.operator, 0):
            return AckOutcome.UNKNOWN
        if ack.error is not None and not self.committing:
            self.declines.append(ack)
            return AckOutcome.DECLINED
        accepted = self.acks.get(key)
        uploaded = accepted is not None and accepted.attempt == ack.attempt and accepted.pending_upload is not None
        if accepted is not None and (not uploaded or ack.pending_upload is not None):
            return AckOutcome.DUPLICATE
        self.acks[key] = ack
        return AckOutcome.ACCEPTED

    def missing(self, operator: str) -> list[int]:
        """Return the subtasks of one operator that have not acked."""
        return [index for index in range(self.expected[operator]) if (operator, index) not in self.acks]

    @property
    def complete(self) -> bool:
        """True if every subtask has acked, and everything that the acks stand for is in storage."""
        acked = not self.declines and all(not self.missing(operator) for operator in self.expected)
        return acked and all(ack.pending_upload is None for ack in self.acks.values())

    def acks_of(self, operator: str) -> list[Ack]:
        return [ack for (name, _), ack in sorted(self.acks.items()) if name == operator]

    def files(self) -> tuple[StateFile, ...]:
        return tuple(file for _, ack in sorted(self.acks.items()) for file in ack.files)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why no barrier is cut now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """The outcome of an ack.

    Attributes:
        error: Why the subtask declined, as in `Ack.error`.
        discard: Objects of its attempt that nothing names.
    """

    outcome: AckOutcome
    error: dict[str, Any] | None = None
    discard: tuple[StateFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Aborted:
    """An epoch that will never complete.

    Attributes:
        discard: Objects that only its accepted acks had named.
    """

    pending: PendingCheckpoint
    reason: FailureReason
    discard: tuple[StateFile, ...]


def _staged_in(file: StateFile) -> tuple[str, ...]:
    """Return the directory of its sink's table that a file lies in, which of a table elsewhere has the pipeline's
    mark."""
    directory = "/".join(file.path.split("/")[:3])
    return (
        (directory,) if re.fullmatch(rf"tables/{re.escape(file.sink or '')}/data(?:-[0-9a-f]{{8}})?", directory) else ()
    )


def owns(ack: Ack, file: StateFile) -> bool:
    """Return whether an object lies under the prefix of the acking attempt, where nobody else ever writes."""
    place = f"{epoch_dir(ack.generation, ack.epoch)}/{ack.subtask}-{ack.attempt}"
    below = {
        STATE: (f"state/{ack.operator}",),
        CHANNEL: (f"channels/{ack.operator}",),
        OUTPUT: (f"outputs/{file.sink}", *_staged_in(file)),
    }
    prefixes = tuple(f"{directory}/{place}{end}" for directory in below.get(file.kind, ()) for end in "/.")
    return file.path.startswith(prefixes) and ".." not in file.path.split("/")


def misreference(ack: Ack, file: StateFile) -> dict[str, Any]:
    """Return the decline that replaces an ack which names an object that it must not name."""
    return {
        "kind": DamageError.__name__,
        "what": f"Subtask {ack.subtask} of {ack.operator} acked with {file.path}, which is neither its attempt's own "
        "nor an object that a retained, confirmed checkpoint names.",
        "where": f"epoch {ack.epoch}, attempt {ack.attempt}",
        "next": "The epoch was declined. If it happens again, report it with the executors' logs: it must not.",
        "traceback": "",
    }
