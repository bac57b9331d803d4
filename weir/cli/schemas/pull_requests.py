"""Models of the output of `weir ci` with `--json`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from weir.cli.schemas.base import Printed
from weir.cli.schemas.proofs import Plan


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
    cause: str
    """code; input: what the epoch read cannot be read again; gates: one would hold the epoch."""
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
    timers: str
    """How many timers only one side has, in words."""
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
    not_compared: list[str]
    """What of the rows could not be compared, in sentences."""
    notes: list[str]
    bytes_copied: int
    """Of production."""
    seconds: dict[str, float]
    parallelism: int
