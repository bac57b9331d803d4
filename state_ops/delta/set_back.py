"""Tables that others have restored (Delta's RESTORE) to before what Weir published last.

A RESTORE keeps the log's transaction versions, so the table says that it has a checkpoint whose rows it lacks. Entries
are read backwards, to the newest one of the app id: where that is the table's newest entry, nothing else is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from state_ops.delta import fenced_table
from state_ops.delta.log_entries import active_files, entry_path
from state_ops.storage.storage import Storage

_RESTORE = "RESTORE"


@dataclass(frozen=True, slots=True)
class SetBack:
    """A RESTORE that took published rows out of a table.

    Attributes:
        version: The Delta version that it made.
        number: The transaction version, which is a checkpoint's id, that was published last.
        whole: The newest Delta version that has all published rows.
    """

    version: int
    number: int
    whole: int

    def __str__(self) -> str:
        return (
            f"version {self.version}, a RESTORE by another writer, has set it back to before checkpoint {self.number}, "
            f"so that it lacks published rows. Version {self.whole} has them"
        )


def set_back(storage: Storage, path: str, handle: DeltaTable, app_id: str) -> SetBack | None:
    """Return the RESTORE that has set the table back to before the newest commit of an app id.

    A RESTORE to that commit's version, or to a later one, is none: it takes back only what others have done since.

    Args:
        path: Of the table, from the storage's root.
        handle: The table at the version that is looked at.

    Returns:
        None: there is none, or the log does not reach back to that commit.
    """
    if handle.transaction_version(app_id) is None:  # a table of others: nothing was published, however long its log is
        return None
    restores: list[int] = []
    for version in range(handle.version(), -1, -1):
        actions = _actions(storage, path, version)
        if actions is None:
            return None
        number = next((txn["version"] for txn in _of(actions, "txn") if txn.get("appId") == app_id), None)
        if number is not None:
            found = _judged(storage, path, version, handle.version(), restores[::-1]) if restores else None
            return SetBack(found[0], number, found[1]) if found is not None else None
        if any(info.get("operation") == _RESTORE for info in _of(actions, "commitInfo")):
            restores.append(version)
    return None


def _judged(storage: Storage, path: str, published: int, newest: int, restores: list[int]) -> tuple[int, int] | None:
    """Follow the versions since a publish: each has what the one before has, and a RESTORE has what one of them had.

    Returns:
        The RESTORE that has set the newest version back, and the newest version that is whole; None: that one is.
    """
    whole, bad, last = [published], None, published
    for version in [*restores, newest + 1]:
        if bad is None:
            whole += range(last + 1, version)
        if version > newest:
            break
        files = _files(storage, path, version)
        bad = None if any(_files(storage, path, earlier) == files for earlier in reversed(whole)) else version
        whole += [version] if bad is None else []
        last = version
    return (bad, whole[-1]) if bad is not None else None


def _files(storage: Storage, path: str, version: int) -> frozenset[str] | int:
    """Return the paths of a version's files; of one that cannot be read any more its number, which equals no other."""
    try:
        return frozenset(file.path for file in active_files(fenced_table.open_table(storage, path, version)))
    except DeltaError:
        return version


def _actions(storage: Storage, path: str, version: int) -> list[dict[str, Any]] | None:
    entry = storage.read_bytes(entry_path(path, version))
    if entry is None:
        return None
    try:
        return [json.loads(line) for line in entry.splitlines() if line]
    except ValueError:  # delta-rs says what is wrong with it
        return None


def _of(actions: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [action[kind] for action in actions if isinstance(action, dict) and isinstance(action.get(kind), dict)]
