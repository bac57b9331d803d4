"""Models of the output of the commands that watch pipelines, with `--json`: `top`, and `report --html`."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from weir.cli.schemas.base import Coordinator, Millis, Printed


class Problem(Printed):
    severity: str
    """wrong: somebody has to act; look: somebody should look; note: it is good to know."""
    what: str
    next: str
    """What a person does now; empty: nothing."""
    page: str | None
    """The page about it, in the project."""


class Epoch(Printed):
    id: int
    parent: int | None
    kind: str
    trigger: str
    reason: str
    generation: int
    run_id: str | None
    triggered_at: str
    completed_at: str
    rows_in: int
    rows_out: int
    """Rows for sinks, of all of them."""
    rows_quarantined: int
    waited_seconds: float | None
    """How long its oldest input file had been there when it was committed; null: it read no file."""
    seconds: float
    """From the trigger to the commit."""
    phases: Millis
    bottleneck: str | None
    late: dict[str, int]
    """By stage, rows behind the watermark."""
    state: dict[str, int]
    """By stage, bytes of state."""
    bytes_total: int
    bytes_new: int
    files: int


class NewestCheckpoint(Printed):
    id: int
    completed_at: str
    age_seconds: float


class Failure(Printed):
    model_config = ConfigDict(extra="allow")

    how: str
    """failed: by an error; interrupted: by a signal; died: without a word."""
    when: str
    run_id: str | None
    generation: int
    error: str | None
    message: str | None


class Stage(Printed):
    uid: str
    parallelism: int
    rows_in: int
    rows_out: int
    rows_late: int
    rows_waiting: int
    ms: float
    """Of its slowest subtask."""
    bytes_total: int
    watermark: str | None
    skew: float | None
    """How many times the average its largest subtask has; null: that is not known, or it is one subtask."""
    largest: int | None
    """The number of that subtask."""


class WatchedSink(Printed):
    name: str
    kind: str
    newest: int | None
    """The newest checkpoint with rows for it."""
    behind: int
    """How many retained checkpoints have rows that it lacks."""
    published_at: str | None
    lacks_since: int | None
    """The oldest of those."""
    why: str | None
    """Why the last try to publish it failed; null: nobody knows."""


class Watched(Printed):
    pipeline: str
    storage: str | None
    state: str
    """Who runs it, in a word: running, unknown, idle, interrupted, stopped, drained, cancelled, HELD, DEAD, HANGS, FAILED, UNREAD."""
    error: str | None
    """Why it cannot be read; then what is below is lacking."""
    problems: list[Problem]
    checkpoint: NewestCheckpoint | None
    coordinator: Coordinator | None
    in_flight: int = 0
    """Epochs that a living coordinator has begun since the newest checkpoint."""
    restarts: int = 0
    """Coordinators that followed another one, since the oldest of the epochs."""
    last_failure: Failure | None = None
    held: dict[str, Any] | None = None
    lag: dict[str, int | None] | None = None
    """By source, how much waits: null where that cannot be told."""
    units: dict[str, str] | None = None
    rows_per_second: float | None = None
    state_bytes: int = 0
    state_growth_bytes_per_hour: float | None = None
    retained: int = 0
    savepoints: int = 0
    epochs: list[Epoch] | None = None
    stages: list[Stage] | None = None
    sinks: list[WatchedSink] | None = None


class Top(Printed):
    """`weir top --once --json`"""

    at: str
    pipelines: list[Watched]


class Event(Printed):
    at: str
    kind: str
    what: str
    severity: str


class Incident(Printed):
    """`weir report --html FILE`"""

    file: str
    pipeline: str
    storage: str
    made_at: str
    problems: list[Problem]
    """The worst first."""
    epochs: list[Epoch]
    """The oldest first."""
    events: list[Event]
    """The newest first."""
