"""One attempt of a subtask at an epoch: the directory that it works in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from state_ops.ids import AttemptId, CheckpointId, Generation, epoch_dir
from state_ops.records.snapshot_files import REFERENCE


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one subtask: whose state it works on, and where its local files are."""

    operator: str
    subtask: int
    generation: Generation
    epoch: CheckpointId
    id: AttemptId
    home: Path

    @property
    def directory(self) -> Path:
        return self.home / f"{epoch_dir(self.generation, self.epoch)}-{self.id}"

    @property
    def prefix(self) -> str:
        """The prefix of this attempt's objects in storage; nobody else ever writes there."""
        return f"state/{self.operator}/{epoch_dir(self.generation, self.epoch)}/{self.subtask}-{self.id}"

    @property
    def reference(self) -> str:
        """The path of the file that stands for its snapshot, if the backend keeps that."""
        return f"{self.prefix}/{REFERENCE}"
