"""Keeps the Delta log of a registry table short, so that the millionth commit costs what the hundredth did.

Every `INTERVAL` versions the owner of the generation writes a Delta checkpoint, and the log entries behind the last but
one go. Versions decide, never clocks: Delta's own clean-up waits for a retention by age, so a busy log grows for weeks.

Why each step is safe:

- The last two Delta checkpoints stay with everything after them, so whoever opened the table or refreshed a handle less
  than `INTERVAL` commits ago misses nothing. An older handle finds a gap, and looks again (`FencedTable`).
- Oldest first: whatever a crash leaves is the unbroken end of the log, and the next clean-up starts with the rest.
- A commit that was decided on an older handle may still put its entry where one was cleaned away. No reader sees such
  an entry, because it lies before the checkpoints; its writer believes nothing before the newest version confirms it
  (`FencedTable.commit` and `claim`); and the next clean-up removes it.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltalake import DeltaTable

from state_ops.storage.storage import Storage
from state_ops.storage.store import UNFINISHED

INTERVAL = 20
"""Versions between two Delta checkpoints of a table of the registry."""

PROPERTIES = {
    "delta.enableDeletionVectors": "false",
    "delta.checkpointInterval": "100",
    # Files that pruning dropped are deleted at once; remembering each for a week would make the checkpoints grow.
    "delta.deletedFileRetentionDuration": "interval 0 seconds",
}


def is_due(version: int) -> bool:
    """Return whether the table needs a cleanup once it has this version."""
    return version % INTERVAL == 0


def is_overdue(names: Iterable[str]) -> bool:
    """Return whether a log of these names was left without a cleanup, by crashes or by an older release."""
    listed = list(names)
    newest = max(_checkpoints(listed), default=-1)
    behind = len(superseded(listed))
    return behind > 0 or sum(name.endswith(".json") and _version(name) > newest for name in listed) > INTERVAL


def superseded(names: Iterable[str]) -> list[str]:
    """Return the entries of a log that no reader needs any more, oldest first.

    They are older than the last Delta checkpoint but one.
    """
    listed = list(names)
    checkpoints = sorted(_checkpoints(listed))
    if len(checkpoints) < 2:
        return []
    return sorted(name for name in listed if 0 <= _version(name) < checkpoints[-2])


def may_be_cleaned(names: Iterable[str], version: int) -> bool:
    """Return whether a log of these names may have lost the entry of this version already, oldest entries first."""
    return sum(checkpoint > version for checkpoint in _checkpoints(names)) >= 2


def log_names(storage: Storage, path: str) -> list[str]:
    """Return the names in the log directory of the table at `path`."""
    log = f"{path}/_delta_log/"
    below = [file.path.removeprefix(log) for file in storage.list(log.rstrip("/"), unfinished=True)]
    return [name for name in below if "/" not in name]


def write_checkpoint(handle: DeltaTable) -> None:
    """Write the Delta checkpoint of exactly the handle's version."""
    handle.create_checkpoint()


def clean_up(storage: Storage, path: str) -> None:
    """Delete the log entries that no reader needs any more."""
    for name in superseded(log_names(storage, path)):
        storage.delete(f"{path}/_delta_log/{name}")


def _checkpoints(names: Iterable[str]) -> set[int]:
    return {_version(name) for name in names if name.endswith(".checkpoint.parquet") and _version(name) >= 0}


def _version(name: str) -> int:
    """Return the table version that a log entry belongs to, half-written or not; -1 for what belongs to none."""
    final = name.rpartition("-")[2] if name.startswith(UNFINISHED) else name
    digits = final.partition(".")[0]
    return int(digits) if len(digits) == 20 and digits.isdigit() else -1
