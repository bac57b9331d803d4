"""What every engine's program is given and what it gives back. Standard library only: peers run it in their own
environments.

    python -m benchmarks.state.<engine> task.json

A program processes the whole input of its task and writes down when how many events were done, on the wall clock
(`time.time`), so that the caller can also count the start of its process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BAND = 250
"""Values from a multiple of this to the next one have an entry of their own in each key's map."""


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement of one row.

    inputs: directories of Parquet files, read one after the other, `files` files an epoch of `events` events. durable:
    what the engine keeps for its next start (checkpoints, tables); local: scratch. payload: 1 KB workload. options: the
    row's own. operator: as in `workload.Workload`.
    """

    row: str
    inputs: list[str]
    files: int
    epochs: int
    events: int
    preload: int
    durable: str
    local: str
    result: str
    payload: bool
    options: dict[str, Any]
    operator: str = "aggregate"


@dataclass
class Result:
    """progress: (wall clock in seconds, events done so far) after each epoch, or as often as the engine says. ready:
    when the engine had started. output: globs of files with key, n, total, top, of which the row with the highest n is
    a key's last; form: "parquet", or "debezium-json", a change log of such rows. phases: milliseconds by phase, per
    epoch, as the engine itself reports. cpu: (wall clock, CPU seconds of all its processes so far), as the caller has
    seen them."""

    ready: float = 0.0
    progress: list[tuple[float, int]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    form: str = "parquet"
    phases: list[dict[str, float]] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)


def serve(run: Callable[[Task, Result], None]) -> None:
    """Read the task, run it, write the result; an exception ends the process, and stderr says why."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    for directory in (task.durable, task.local):
        Path(directory).mkdir(parents=True, exist_ok=True)
    result = Result()
    run(task, result)
    if not result.ready:
        result.ready = time.time()
    Path(task.result).write_text(json.dumps(asdict(result)))
