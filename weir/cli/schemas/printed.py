"""Models of the output of `--json`, from which `weir schema` makes JSON schemas.

A test compares each with the output.

Keys are added by later releases, and none goes or changes its meaning without a line in the changelog.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, TypeAdapter

from weir.cli.schemas import changes, proofs, pull_requests, state, watching
from weir.cli.schemas.base import Coordinator, Millis, Printed, Row


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


class Unpublished(Printed):
    checkpoints: list[int]
    """Committed, and their rows are not in the sink as far as the registry knows; oldest first."""
    why: str | None
    """Why the last try to publish them failed; null: nobody knows."""
    since: str | None
    """When it failed."""


class Table(Printed):
    name: str
    path: str
    last_published: int | None
    """The newest checkpoint whose rows are in it."""
    unpublished: Unpublished | None


class OtherSink(Printed):
    name: str
    kind: str
    last_published: int | None
    unpublished: Unpublished | None


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
    """One of `weir checkpoints`: a row of the registry, whose columns docs/reference/registry.md has."""

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
    weir_version: str | None
    """The version of Weir that wrote it; null in checkpoints of releases before 0.1.0."""


class Savepoint(Printed):
    """`weir savepoint`"""

    name: str
    checkpoint: int
    created_at: str
    reason: str


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


HISTORY = "state get --history"
BY_COMMAND: dict[str, Any] = {
    "status": Status,
    "checkpoints": list[Checkpoint],
    "savepoint": Savepoint,
    "savepoints": list[Savepoint],
    "restore": changes.Restore,
    "rewind": changes.Rewind,
    "seek": changes.Seek,
    "fork": changes.Branch,
    "forks": list[changes.Branch],
    "diff": changes.BranchDiff,
    "promote": changes.Promotion,
    "backfill": changes.Backfill,
    "drill": proofs.Drill,
    "plan": proofs.Plan,
    "ci": pull_requests.Ci,
    "top": watching.Top,
    "report": watching.Incident | proofs.Docs,
    "debug": proofs.Debug,
    "explain": proofs.Explain,
    "prune": Prune,
    "fsck": proofs.Fsck,
    "state get": list[Row] | Row | None,
    HISTORY: list[state.HistoryChange],
    "state scan": Row,
    "state count": state.Count,
    "state sql": Row,
    "state diff": state.StateDiff,
    "state export": state.Exported,
    "state import": state.Imported,
    "state delete": state.Deletion,
}
BY_LINE = ("state scan", "state sql")
"""Those that print a document for each row, on a line of its own."""


def schema(command: str) -> dict[str, Any]:
    """Return the JSON schema of what a command prints with `--json`."""
    described = TypeAdapter(BY_COMMAND[command]).json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **described,
        "title": f"weir {command} --json",
    }
