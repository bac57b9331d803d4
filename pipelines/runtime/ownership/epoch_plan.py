"""What one epoch reads, and why its barrier was cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from pipelines.runtime.connectors.lookups.lookup_table import Version
from pipelines.runtime.sources.slices import Slice
from state_ops.checkpoints.pending_checkpoint import Trigger
from state_ops.coordination.requests import Request


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What an epoch reads, and why its barrier is cut.

    Attributes:
        trigger: What cut the barrier; `reason` says it in words.
        slices: By source, what the epoch reads.
        drain: Close every window.
        requests: The requests that the epoch answers.
        at: When the barrier was cut, for an epoch that is replayed; None: now.
        now: The processing time by which its slices were planned. That of the epoch is no earlier.
        rounds: How often its slices were replayed with fewer rows.
        lookups: By stage, the version of the table that its rows are looked up in.
    """

    trigger: Trigger
    reason: str
    slices: Mapping[str, Slice]
    drain: bool = False
    requests: tuple[Request, ...] = ()
    at: datetime | None = None
    now: datetime | None = None
    rounds: int = 0
    lookups: Mapping[str, Version] = field(default_factory=dict)
