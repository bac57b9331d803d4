"""The coordinator's decisions, without Spark, clock or I/O: what is pending, what an ack means, when to cut a barrier.

trigger -> PendingCheckpoint -> (every subtask acked) -> files and figures of a completed checkpoint
                             -> (a decline, a missing ack) -> aborted
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from state_ops.checkpoint import Ack, Checkpoint, StateFile
from state_ops.ids import CheckpointId, Generation


class Trigger(StrEnum):
    """Why an epoch's barrier was cut."""

    INTERVAL = "interval"
    SENSOR = "sensor"
    MANUAL = "manual"
    SAVEPOINT = "savepoint"
    SLICE_LIMIT = "slice_limit"
    DRAIN = "drain"


class AckOutcome(StrEnum):
    """What the coordinator made of an ack. Every ack gets one; only ACCEPTED counts."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    DECLINED = "declined"
    UNKNOWN = "unknown"
    FENCED = "fenced"


@dataclass(slots=True)
class PendingCheckpoint:
    """An epoch between its trigger and its completion. expected: number of subtasks by operator uid."""

    id: CheckpointId
    parent: Checkpoint | None
    generation: Generation
    expected: Mapping[str, int]
    acks: dict[tuple[str, int], Ack] = field(default_factory=dict)
    declines: list[Ack] = field(default_factory=list)

    def receive(self, ack: Ack) -> AckOutcome:
        """The first ack of a subtask is the winner among its attempts; late, foreign and fenced ones change nothing."""
        if ack.generation != self.generation:
            return AckOutcome.FENCED
        key = (ack.operator, ack.subtask)
        if ack.epoch != self.id or not 0 <= ack.subtask < self.expected.get(ack.operator, 0):
            return AckOutcome.UNKNOWN
        if ack.error is not None:
            self.declines.append(ack)
            return AckOutcome.DECLINED
        if key in self.acks:
            return AckOutcome.DUPLICATE
        self.acks[key] = ack
        return AckOutcome.ACCEPTED

    def missing(self, operator: str) -> list[int]:
        """Subtasks of one operator that have not acked."""
        return [index for index in range(self.expected[operator]) if (operator, index) not in self.acks]

    @property
    def complete(self) -> bool:
        return not self.declines and all(not self.missing(operator) for operator in self.expected)

    def acks_of(self, operator: str) -> list[Ack]:
        return [ack for (name, _), ack in sorted(self.acks.items()) if name == operator]

    def files(self) -> tuple[StateFile, ...]:
        return tuple(file for _, ack in sorted(self.acks.items()) for file in ack.files)


def next_id(head: Checkpoint | None, begun: Iterable[CheckpointId]) -> CheckpointId:
    """The next checkpoint id: above the head and above every id that was ever begun, completed or not."""
    return CheckpointId(max([head.id if head else 0, *begun]) + 1)


@dataclass(frozen=True, slots=True)
class TriggerPolicy:
    """When a waiting pipeline cuts a barrier by itself. interval: seconds, None = only on request; min_pause: seconds."""

    interval: float | None
    min_pause: float

    def due(self, *, since_last: float, backlog: bool, requested: bool, catching_up: bool) -> bool:
        """since_last: seconds since the last completed or aborted epoch. A request still keeps the min pause."""
        if catching_up:
            return backlog or requested
        if since_last < self.min_pause:
            return False
        return requested or (backlog and self.interval is not None and since_last >= self.interval)
