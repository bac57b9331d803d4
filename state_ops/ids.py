"""One type per number: an epoch is not an int among ints."""

from __future__ import annotations

import uuid
from typing import NewType

CheckpointId = NewType("CheckpointId", int)
"""Id of an epoch and of the checkpoint that it yields. Only grows, is never reused."""

Generation = NewType("Generation", int)
"""The coordinator's fencing token: one higher for each coordinator that takes the pipeline over."""

AttemptId = NewType("AttemptId", str)
"""One try of one subtask in one epoch. A uuid, not Spark's attempt number: those repeat."""


def new_attempt_id() -> AttemptId:
    return AttemptId(uuid.uuid4().hex)


def epoch_dir(generation: Generation, epoch: CheckpointId) -> str:
    """Directory name of everything that one epoch of one generation stages: `g3-e17`."""
    return f"g{generation}-e{epoch}"


def parse_epoch_dir(name: str) -> tuple[Generation, CheckpointId] | None:
    """Return the inverse of `epoch_dir`; None for a name that Weir did not give."""
    head, _, tail = name.partition("-e")
    if not (head.startswith("g") and head[1:].isdigit() and tail.isdigit()):
        return None
    return Generation(int(head[1:])), CheckpointId(int(tail))
