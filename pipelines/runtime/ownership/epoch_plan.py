"""What one epoch reads, and why its barrier was cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from pipelines.runtime.sources.slices import Slice
from state_ops.checkpoints.pending_checkpoint import Trigger
from state_ops.coordination.requests import Request


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Why this barrier is cut. slices: by source; drain: close every window; requests: those that it answers.

    at: when it was cut, for an epoch that is replayed; None: now. rounds: how often its slices were replayed with fewer
    rows."""

    trigger: Trigger
    reason: str
    slices: Mapping[str, Slice]
    drain: bool = False
    requests: tuple[Request, ...] = ()
    at: datetime | None = None
    rounds: int = 0
