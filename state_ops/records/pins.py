"""Names of checkpoints: savepoints and branches."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated

from state_ops.facts import HIDDEN, Facts, Named
from state_ops.ids import CheckpointId

SAVEPOINT, BRANCH = "savepoint", "branch"


@dataclass(frozen=True, slots=True)
class Pin(Facts):
    """A name for a checkpoint, which retention then never touches.

    Attributes:
        kind: `savepoint`, or `branch` for a branch that reads from the checkpoint.
    """

    kind: Annotated[str, HIDDEN]
    name: str
    checkpoint_id: Annotated[CheckpointId, Named("checkpoint")]
    commit_id: Annotated[str, HIDDEN]
    created_at: datetime
    reason: str
    digest: Annotated[str | None, HIDDEN] = field(default=None, compare=False)
