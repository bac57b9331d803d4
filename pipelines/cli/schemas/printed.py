"""What `--json` prints, as models of which `weir schema` makes JSON schemas. A test compares each with what is printed.

Keys are added by later releases, and none goes or changes its meaning without a line in the changelog.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Millis = dict[str, float]


class Printed(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Coordinator(Printed):
    alive: bool | None
    """Whether it runs; null: that cannot be told from this host."""
    host: str | None
    pid: int | None
    run_id: str | None
    outcome: str | None
    """How the last run ended: drained, stopped or cancelled."""
    generation: int
    """Of the newest owner; it alone may commit."""


class Suspended(Printed):
    how: str
    """stopped, drained or cancelled."""
    why: str
    when: str
    process: list[Any] | None
    pids: Any = None


class LastCheckpoint(Printed):
    id: int
    completed_at: str
    age_seconds: float
    trigger: str
    reason: str
    generation: int
    bottleneck: str | None
    """What took most of the time between triggering and commit."""
    bytes_total: int
    bytes_new: int
    totals: dict[str, Any]
    """Counters since the pipeline's first epoch."""


class Table(Printed):
    name: str
    path: str
    last_published: int | None
    """The newest checkpoint whose rows are in it."""


class OtherSink(Printed):
    name: str
    kind: str
    last_published: int | None


class Status(Printed):
    """`weir status`"""

    pipeline: str
    storage: str
    coordinator: Coordinator
    halted: Suspended | None
    """That a person has ended the pipeline."""
    last_checkpoint: LastCheckpoint | None
    rows_lost: int
    rows_quarantined: int
    restoring: list[dict[str, Any]]
    """Fetches of state that are going on."""
    held: dict[str, Any] | None
    """What holds the pipeline: a gate, or an input that cannot be read."""
    lag: dict[str, Any]
    """By source, how much waits: null where that cannot be told."""
    units: dict[str, str]
    """By source, what is counted there where it is not files."""
    unreachable: dict[str, str]
    missing: dict[str, str]
    """By source, a directory that does not exist."""
    delivered_again: dict[str, list[str]]
    set_aside: dict[str, Any]
    sources: dict[str, str]
    unapplied: dict[str, int]
    """By stage, rows of the newest checkpoint that it has still to apply."""
    watermarks: dict[str, str]
    tables: list[Table]
    sinks: list[OtherSink]


class Checkpoint(Printed):
    """One of `weir checkpoints`: a row of the registry, docs/reference/storage.md has its columns."""

    model_config = ConfigDict(extra="allow")

    id: int
    parent: int | None
    durations_ms: Millis
    bottleneck: str | None
    named: list[str]
    """Its savepoints and branches."""
    kind: str
    generation: int
    commit_id: str
    triggered_at: str
    completed_at: str
    trigger: str
    reason: str
    offsets: dict[str, Any]
    slice: dict[str, Any]
    watermarks: dict[str, Any]
    operators: dict[str, Any]
    sinks: dict[str, Any]


class Savepoint(Printed):
    """`weir savepoint`"""

    name: str
    checkpoint: int
    created_at: str
    reason: str


class Branch(Printed):
    """`weir fork`"""

    name: str
    id: str
    base: int
    """The pipeline's checkpoint from which it was made."""
    created_at: str
    reason: str
    head: int | None
    bytes_total: int | None
    bytes_own: int | None
    files_behind: dict[str, int]
    """By source, what the pipeline has read since: files, or rows where it is no files."""


class PlanFinding(Printed):
    kind: str
    name: str
    aspect: str
    verdict: str
    what: str
    next: str | None


class Sample(Printed):
    stage: str
    subtask: int
    rows: int
    problem: str | None


class Evaluated(Printed):
    by: str
    """python or spark."""
    why: str | None


class Plan(Printed):
    """`weir plan`"""

    pipeline: str
    checkpoint: int | None
    runs: bool
    """Whether a run would begin."""
    findings: list[PlanFinding]
    samples: list[Sample]
    spark: list[str]
    """Stages whose columns only Spark could tell."""
    where: dict[str, Evaluated]


class DamageFinding(Printed):
    kind: str
    severity: str
    what: str
    path: str | None
    checkpoints: list[int]
    bytes: int
    repair: str | None
    next: str | None


class CheckedCheckpoint(Printed):
    id: int
    names: list[str]
    intact: bool


class RepairPlan(Printed):
    refused: str | None
    publish: list[DamageFinding]
    drop: list[DamageFinding]
    delete: list[DamageFinding]
    bytes: int


class Fsck(Printed):
    """`weir fsck`"""

    storage: str
    generation: int
    coordinator_alive: bool | None
    quick: bool
    damaged: bool
    files: int
    bytes: int
    bytes_read: int
    checkpoints: list[CheckedCheckpoint]
    findings: list[DamageFinding]
    plan: RepairPlan | None
    repaired: bool


class CheckpointFate(Printed):
    id: int
    stays: bool
    reasons: list[str]
    bytes: int
    frees: int


class ObjectFate(Printed):
    path: str
    bytes: int
    named_by: list[int]
    stays: bool


class Prune(Printed):
    """`weir prune`"""

    dry_run: bool
    checkpoints: list[CheckpointFate]
    objects: list[ObjectFate]
    bytes_freed: int


class Count(Printed):
    """`weir state count`"""

    checkpoint: int
    stage: str
    total: int
    subtasks: dict[str, int]


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


class Watched(Printed):
    pipeline: str
    storage: str | None
    state: str
    """Who runs it, in a word: running, unknown, idle, interrupted, stopped, drained, cancelled, HELD, DEAD, FAILED, UNREAD."""
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


class Docs(Printed):
    """`weir report` without --html"""

    pipeline: str
    index: str
    passed: bool
    verdicts: list[dict[str, Any]]
    left_out: list[str]


class ReplayedEpoch(Printed):
    id: int
    rows: int
    """That it read."""
    seconds_production: float | None
    """From barrier to commit."""
    seconds_branch: float | None
    bytes_production: int
    """Of new state."""
    bytes_branch: int


class EndedReplay(Printed):
    epoch: int | None
    unreadable: bool
    """What the epoch read cannot be read again; else the code is to blame."""
    error: str


class TableDifference(Printed):
    rows: int
    rows_branch: int
    added: int
    removed: int
    changed: int
    days: dict[str, dict[str, int]]
    """By day of the event time; under "" where there is none."""
    columns: str
    """Columns that only one side has, or that have another type, in words."""
    left_out: list[str]
    sample: list[dict[str, Any]]
    """`change` says added, removed, was or is."""


class StateDifference(Printed):
    added: int = 0
    removed: int = 0
    changed: int = 0
    why: str
    """Why it is not compared, or fields that only one side has."""
    left_out: list[str]
    sample: list[dict[str, Any]]


class GateOutcome(Printed):
    of: str
    """A stage; or "table NAME", "state NAME" of what is expected of a restored checkpoint."""
    gate: str
    on_failure: str
    failed: list[int]
    """The epochs in which it failed."""
    asked: int
    failed_before: int | None
    """In how many of the same epochs it failed in production; null: it is not asked there."""
    example: str


class Ci(Printed):
    """`weir ci`"""

    pipeline: str
    from_: str = Field(alias="from")
    found: list[str]
    """What there is something to be said of: plan, code, input, gates, rows, state."""
    plan: Plan | None
    """null: the code cannot be imported."""
    newest: int | None
    """Production's newest checkpoint."""
    base: int | None
    """The checkpoint from which the epochs were replayed; null: from nothing."""
    epochs: list[ReplayedEpoch]
    failed: EndedReplay | None
    """What ended the replay before its end."""
    tables: dict[str, TableDifference]
    state: dict[str, StateDifference]
    gates: list[GateOutcome]
    notes: list[str]
    bytes_copied: int
    """Of production."""
    seconds: dict[str, float]
    parallelism: int


BY_COMMAND: dict[str, Any] = {
    "status": Status,
    "checkpoints": list[Checkpoint],
    "savepoint": Savepoint,
    "savepoints": list[Savepoint],
    "fork": Branch,
    "forks": list[Branch],
    "plan": Plan,
    "ci": Ci,
    "fsck": Fsck,
    "prune": Prune,
    "state count": Count,
    "top": Top,
    "report": Incident | Docs,
}


def schema(command: str) -> dict[str, Any]:
    """The JSON schema of what a command prints with `--json`."""
    meta = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**meta, "title": f"weir {command} --json", **TypeAdapter(BY_COMMAND[command]).json_schema()}
