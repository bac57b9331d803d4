"""The fates of checkpoints and objects: which stay, which are deleted, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass

from state_ops.facts import Facts, fact
from state_ops.ids import CheckpointId


@dataclass(frozen=True, slots=True)
class Fate(Facts):
    """The fate of one checkpoint, with the reasons.

    Attributes:
        reasons: Why it stays, in words, each reason sufficient by itself; without reasons it goes.
        bytes: The bytes of its state and channel objects.
        frees: The bytes of those objects that go with it, because no checkpoint that stays names them.
    """

    id: CheckpointId
    stays: bool
    reasons: tuple[str, ...]
    bytes: int
    frees: int


@dataclass(frozen=True, slots=True)
class ObjectFate(Facts):
    """The fate of one object.

    Attributes:
        named_by: The checkpoints that stay and name it; if there are none, it is deleted.
    """

    path: str
    bytes: int
    named_by: tuple[CheckpointId, ...]

    @property
    @fact
    def stays(self) -> bool:
        return bool(self.named_by)
