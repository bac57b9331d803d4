"""The directories that attempts leave on a host: list them, and remove those that nothing can need.

Of a subtask the newest confirmed snapshot, those of the epochs in flight and the running attempt stay; they all share
their SSTs. A confirmed snapshot is removed when a later checkpoint is confirmed, never before, because it is forked
again if the later checkpoint is declined.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from state_ops.ids import AttemptId, CheckpointId, Generation, parse_epoch_dir
from state_ops.storage.temp_dirs import remove_left

if TYPE_CHECKING:
    from state_ops.snapshots.attempt import Attempt

RESTORING = ".restoring-"
SORTING = "weir-sort-"
"""The prefix of directories beside the stages' directories in which a subtask sorts its rows."""


def sweep(attempt: Attempt, bases: Collection[AttemptId], stages: Collection[str], parallelism: int) -> None:
    """Remove local directories that nothing can need, before the attempt makes its own.

    - Of the attempt's own subtask, everything older than this epoch is removed, and so are subtasks and stages that no
      longer exist.
    - Of other subtasks of the stage, only lower generations are removed, because an earlier epoch may be in flight
      there.
    - What killed subtasks of any stage have sorted is removed.
    - Another attempt of this very epoch may be alive (speculation), so its directory stays.

    Args:
        bases: The attempts whose directories stay: what this epoch of the stage builds on, what it would be replayed
            from, and what of earlier epochs is being uploaded.
        stages: The uids of the pipeline's stages; empty if nothing is known of other stages.
        parallelism: The stage's.
    """
    mine = (attempt.generation, attempt.epoch)
    operator = attempt.home.parent
    for home in directories(operator):
        if not home.name.isdigit():
            continue
        subtask = int(home.name)
        settled = subtask == attempt.subtask or subtask >= parallelism
        _sweep_home(home, mine if settled else (attempt.generation, CheckpointId(0)), bases)
    for left in operator.parent.glob(f"{SORTING}*"):  # of subtasks that were killed; the stage may sort no more
        remove_left(left)
    removed = [path for path in directories(operator.parent) if path.name not in stages] if stages else []
    for other in removed:
        homes = [home for home in directories(other) if home.name.isdigit()]
        for home in homes:
            _sweep_home(home, mine, ())
            _remove_if_empty(home)
        if homes:
            _remove_if_empty(other)


def _sweep_home(home: Path, before: tuple[Generation, CheckpointId], bases: Collection[AttemptId]) -> None:
    for directory in attempts(home):
        parsed = parse_epoch_dir(directory.name.rpartition("-")[0])
        if parsed is not None and parsed < before and owner(directory) not in bases:
            shutil.rmtree(directory, ignore_errors=True)
    for directory in home.glob(f"{RESTORING}*"):
        if directory.name.removeprefix(RESTORING) not in bases:
            remove_left(directory)


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def attempts(home: Path) -> list[Path]:
    """Return the directories of attempts in a subtask's home."""
    return [path for path in directories(home) if parse_epoch_dir(path.name.rpartition("-")[0]) is not None]


def owner(directory: Path) -> AttemptId:
    return AttemptId(directory.name.rpartition("-")[2])


def directories(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):  # another attempt has just removed it
        return []
