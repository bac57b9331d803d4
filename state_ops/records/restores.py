"""The result of a restore."""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime

from state_ops.facts import Facts
from state_ops.ids import CheckpointId


@dataclass(frozen=True, slots=True)
class Restored(Facts):
    """One restore.

    Attributes:
        purpose: What asked for it: restore, run, rewind or drill.
        problem: Why the checkpoint is not valid; None if it is.
        bytes_fetched: How many bytes of its state came from storage.
        bytes_cached: How many bytes came from this host's objects.
        bytes_local: How many bytes came from local snapshots.
        expectations: How many restore expectations were evaluated.
        bytes_unread: How many bytes were on this host, so that only their size was compared in storage. The table does
            not record it.
    """

    checkpoint_id: CheckpointId
    commit_id: str
    purpose: str
    valid: bool
    problem: str | None
    files: int
    bytes_total: int
    bytes_fetched: int = 0
    bytes_cached: int = 0
    bytes_local: int = 0
    fetch_ms: float = 0.0
    check_ms: float = 0.0
    expectations: int = 0
    bytes_unread: int = 0
    run_id: str | None = None
    host: str = dataclasses.field(default_factory=socket.gethostname)
    pid: int = dataclasses.field(default_factory=os.getpid)
    restored_at: datetime = dataclasses.field(default_factory=lambda: datetime.now(UTC))
