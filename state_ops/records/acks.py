"""The report of a subtask to the coordinator, and what the subtask leaves for the coordinator to upload."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from state_ops.ids import AttemptId, CheckpointId, Generation
from state_ops.outputs import MAIN
from state_ops.records.snapshot_files import STATE, LocalFile, LocalSnapshot, StagedFile, StateFile


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """Files that a subtask leaves at the barrier for the coordinator to upload, if both see the same disk.

    Attributes:
        base: The attempt whose snapshot the subtask built on.
        snapshot: None if the subtask wrote nothing, so that its state is the base's.
        directory: The attempt's local directory.
    """

    base: AttemptId | None
    snapshot: LocalSnapshot | None
    staged: tuple[StagedFile, ...]
    directory: str

    def state_bytes(self, full: bool) -> int:
        """Return the largest number of bytes of state that are to be uploaded.

        Args:
            full: Whether the base's files are uploaded too.
        """
        return sum(file.bytes for file in self.snapshot.files if full or not file.inherited) if self.snapshot else 0


@dataclass(frozen=True, slots=True)
class Ack:
    """A subtask's report to the coordinator. If `error` is set, the subtask declines the epoch.

    Event times are microseconds since 1970 UTC.

    Attributes:
        ms: Durations in milliseconds by phase.
        swept: The key, in hex, up to which this epoch has swept expired state; None if it came to the end. It is a hint
            for the next epoch, and no part of the state.
        due: The processing time in microseconds at which windows or timers of its state are due next; None: never.
        cache: The `CacheFigures` of a stage that has a state cache.
        entries: Roughly how many entries its state has; None if nobody has looked.
        timers: Whether timers are set; None if nobody has looked.
        request_counts: The requests of a subtask in a process of its own, as `RequestCounts` counts them.
        pending_upload: What is still to be uploaded. The coordinator counts only acks that have none.
        exchange: How its rows reached it, on Spark.
        newest: By input of the stage, the newest event time of its rows in microseconds; empty: the subtask had none.
        rows_beside: By output beside the main one, the rows that it has handed out.
    """

    operator: str
    subtask: int
    attempt: AttemptId
    epoch: CheckpointId
    generation: Generation
    files: tuple[StateFile, ...] = ()
    rows_in: int = 0
    rows_out: int = 0
    rows_late: int = 0
    rows_null_key: int = 0
    closed_upto: int | None = None
    ms: dict[str, float] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    swept: str | None = None
    cache: dict[str, int] | None = None
    entries: int | None = None
    timers: bool | None = None
    request_counts: dict[str, int] | None = None
    pending_upload: PendingUpload | None = None
    exchange: str | None = None
    newest: tuple[int | None, ...] = ()
    rows_beside: dict[str, int] = field(default_factory=dict)
    due: int | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Ack:
        raw = json.loads(text)
        files = tuple(StateFile(**file) for file in raw["files"])
        pending_upload = _pending_upload(raw["pending_upload"]) if raw["pending_upload"] else None
        return cls(**{**raw, "files": files, "pending_upload": pending_upload, "newest": tuple(raw["newest"])})

    def rows_of(self, output: str) -> int:
        """Return how many rows of an output the subtask has handed out, whoever gets them."""
        return self.rows_out if output == MAIN else self.rows_beside.get(output, 0)

    def staged(self, name: str) -> list[StagedFile | StateFile]:
        """Return the files of one output's rows, uploaded or still local."""
        files: tuple[StagedFile | StateFile, ...] = self.pending_upload.staged if self.pending_upload else self.files
        return [file for file in files if file.kind != STATE and file.name == name]


def _pending_upload(raw: dict[str, Any]) -> PendingUpload:
    local = raw["snapshot"]
    if local is not None:
        local = LocalSnapshot(**{**local, "files": tuple(LocalFile(**file) for file in local["files"])})
    return PendingUpload(**{**raw, "snapshot": local, "staged": tuple(StagedFile(**file) for file in raw["staged"])})
