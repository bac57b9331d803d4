"""Models of the output of the commands that prove, compare and explain, with `--json`."""

from __future__ import annotations

from typing import Any

from weir.cli.schemas.base import Printed, Row
from weir.cli.schemas.changes import Restored


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
    other_code: list[str]
    """Stages whose code is another than when the checkpoint was made."""


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


class Replay(Printed):
    parent: int | None
    rows: int
    entries: int
    """Of state, that were compared."""
    seconds: float


class Drill(Printed):
    """`weir drill`"""

    checkpoint: int
    drilled_at: str
    recovery_seconds: float | None
    """null: it does not come back as it was."""
    restore_seconds: float
    loss_seconds: float
    """How long the oldest input has waited that no checkpoint holds."""
    restored: Restored | None
    replay: Replay | None
    not_replayed: str | None
    problems: list[str]
    missed: list[str]
    """Objectives of the settings."""


class Verdict(Printed):
    name: str
    """The stage's uid."""
    title: str
    of: str
    """rows, state or figures."""
    on_failure: str
    passed: bool
    rows: int
    unexpected: int
    sample: list[Any]
    keys: list[Row]


class Docs(Printed):
    """`weir report` without --html"""

    pipeline: str
    index: str
    """The page to open."""
    passed: bool
    verdicts: list[Verdict]
    left_out: list[str]


class Difference(Printed):
    of: str
    """state, or the name of an output."""
    recorded: list[Row]
    replayed: list[Row]


class Code(Printed):
    then: str | None
    """A fingerprint; null: the checkpoint does not say."""
    now: str
    changed: bool | None


class Debug(Printed):
    """`weir debug`"""

    pipeline: str
    stage: str
    epoch: int
    parent: int | None
    """The checkpoint that it was begun on; null: it was the first."""
    verdict: str
    """Whether it plays again to what it made, in one sentence."""
    key: Row | None
    subtasks: list[int]
    slices: dict[str, Any]
    """By source, what the epoch read."""
    rows: list[Row]
    before: list[Row]
    after: list[Row]
    recorded: list[Row]
    """State after the epoch as its checkpoint has it."""
    outputs: dict[str, list[Row]]
    published: dict[str, list[Row]]
    """By output, what the epoch staged for its sink then."""
    differences: list[Difference]
    code: Code
    seconds: dict[str, float]
    """By phase."""
    bytes_fetched: int
    notes: list[str]


class Statement(Printed):
    certainty: str
    """known, inferred or unknown."""
    what: str


class Contribution(Printed):
    epoch: int
    slices: dict[str, Any]
    rows: list[Row]


class Trace(Printed):
    stage: str
    key: Row
    contributions: list[Contribution]
    unknown: list[str]
    before: list[Trace]
    """Of the stages before it."""


class Explain(Printed):
    """`weir explain`"""

    pipeline: str
    table: str
    row: Row
    matches: int
    """How many rows of the table fit."""
    file: str
    file_row: int
    stage: str
    output: str
    epoch: int | None
    subtask: int | None
    statements: list[Statement]
    played: Debug | None
    trace: Trace | None
