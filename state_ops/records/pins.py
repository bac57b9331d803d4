"""Names of checkpoints: savepoints and branches."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from state_ops.ids import CheckpointId

SAVEPOINT, BRANCH = "savepoint", "branch"


@dataclass(frozen=True, slots=True)
class Pin:
    """A name for a checkpoint, which retention then never touches.

    Attributes:
        kind: `savepoint`, or `branch` for a branch that reads from the checkpoint.
    """

    kind: str
    name: str
    checkpoint_id: CheckpointId
    commit_id: str
    created_at: datetime
    reason: str
    digest: str | None = field(default=None, compare=False)
