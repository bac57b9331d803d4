"""The files of a checkpoint: those in storage, and those on a worker's disk that are not uploaded yet."""

from __future__ import annotations

from dataclasses import dataclass

from state_ops.ids import AttemptId

STATE, OUTPUT, CHANNEL, INPUT = "state", "output", "channel", "input"

TABLES = "tables/"  # the directory of sinks' Delta tables

REFERENCE = "snapshot.reference"
"""The file of a snapshot that the backend keeps. Among databases side by side, their range stands in front of it."""


def is_reference(path: str) -> bool:
    """Return whether a file of a snapshot, by its name or path, stands for a snapshot that the backend keeps."""
    return path.endswith(REFERENCE) and path.rpartition("/")[2].rpartition("~")[2] == REFERENCE


@dataclass(frozen=True, slots=True)
class StateFile:
    """One immutable object that a checkpoint names.

    Attributes:
        kind: `state` is part of a snapshot, `output` has staged rows for a sink, `channel` has rows for the next stage
            only, `input` is of a source that is archived (`operator` is the source).
        name: The file's name in the local snapshot.
        path: Its path in the pipeline's storage.
        digest: The sha256 of its bytes, in hex.
        attempt: The attempt that created the object.
        new: Whether this checkpoint uploaded it; else an earlier one did, and this one references it.
        snapshot: For state, the attempt whose local directory holds the snapshot that this file is listed for.
    """

    operator: str
    subtask: int
    kind: str
    name: str
    path: str
    bytes: int
    digest: str
    new: bool
    attempt: AttemptId
    snapshot: AttemptId | None = None
    sink: str | None = None
    rows: int | None = None

    @property
    def in_table(self) -> bool:
        """True if the file lies in the directory of a sink's table.

        Once the rows are published, the table's log decides what becomes of it.
        """
        return self.kind == OUTPUT and self.path.startswith(TABLES)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One subtask's state at an epoch: the attempt that took it, and every file of it.

    Attributes:
        rescaled: Whether it is put together from the snapshots of other subtasks. Then it has more key groups than the
            subtask's own.
    """

    subtask: int
    attempt: AttemptId
    files: tuple[StateFile, ...]
    rescaled: bool = False


@dataclass(frozen=True, slots=True)
class LocalFile:
    """One file of a snapshot that has not been uploaded.

    Attributes:
        digest: The sha256 of a file that its backend changes in place, since forks copy such files; None for an
            immutable one.
        inherited: Whether it is the base's file of that name, the very inode.
        writing: Whether it may still be written (`async_writer.settle`). Then `bytes` is an estimate.
    """

    name: str
    bytes: int
    digest: str | None
    inherited: bool
    writing: bool = False


@dataclass(frozen=True, slots=True)
class LocalSnapshot:
    """One subtask's state at an epoch, on the disk of the host that made it and nowhere else."""

    subtask: int
    attempt: AttemptId
    files: tuple[LocalFile, ...]


@dataclass(frozen=True, slots=True)
class StagedFile:
    """Rows that a subtask hands out, on its host's disk.

    Attributes:
        local: The local path. The other fields are those of `StateFile`, once it is uploaded.
    """

    kind: str
    name: str
    local: str
    path: str
    bytes: int
    sink: str | None
    rows: int


def snapshots_of(files: tuple[StateFile, ...], operator: str) -> dict[int, Snapshot]:
    """Return the snapshots of one operator by subtask, from a checkpoint's listing."""
    by_subtask: dict[int, list[StateFile]] = {}
    for file in files:
        if file.kind == STATE and file.operator == operator:
            by_subtask.setdefault(file.subtask, []).append(file)
    return {
        subtask: Snapshot(subtask, listed[0].snapshot or listed[0].attempt, tuple(listed))
        for subtask, listed in by_subtask.items()
    }
