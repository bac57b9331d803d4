"""Models of the output of restores, rewinds and branches with `--json`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from weir.cli.schemas.base import Change, Printed, Row

Position = dict[str, Any]
"""How far a source has been read, as its connector says it."""


class StageFiles(Printed):
    subtasks: int
    files: int
    bytes: int
    bytes_local: int


class Restored(Printed):
    """A row of `registry/restores`, and what its table does not record."""

    checkpoint_id: int
    commit_id: str
    purpose: str
    valid: bool
    problem: str | None
    files: int
    bytes_total: int
    bytes_fetched: int
    bytes_cached: int
    bytes_local: int
    fetch_ms: float
    check_ms: float
    expectations: int
    bytes_unread: int
    """Of files that this host had: in storage only their sizes were compared."""
    run_id: str | None
    host: str
    pid: int
    restored_at: str


class Restore(Printed):
    """`weir restore`"""

    checkpoint: int
    completed_at: str
    files: int
    bytes_total: int
    bytes_local: int
    bytes_cached: int
    bytes_to_fetch: int
    stages: dict[str, StageFiles]
    restored: Restored | None
    """null: a dry run."""


class StateBytes(Printed):
    now: int
    then: int


class SourceRewind(Printed):
    again: int
    """Files, or parts, that are read again."""
    gone: list[str]


class TableBack(Printed):
    """A table's rows that are taken back; the last three fields are null if nobody has counted them."""

    rows_removed: int
    rows_changed: int | None = None
    rows_gone: int | None = None
    rows_come: int | None = None
    unknown_commits: list[tuple[int, str]]
    """Commits of others, by version and operation."""


class TableRewind(TableBack):
    version: int
    as_of_version: int | None
    """null: it is empty afterwards."""
    files_removed: int
    files_restored: int
    vacuumed_files: list[str]


class SinkRewind(Printed):
    kind: str
    published: int | None
    then: int | None
    stays: str | None
    """Why it keeps what it was given since; null: it gives that back."""


class Rewind(Printed):
    """`weir rewind`"""

    head: int
    to: int
    """0: before the first checkpoint."""
    to_completed_at: str | None
    """null: before the first checkpoint."""
    abandoned: list[int]
    state_bytes: dict[str, StateBytes]
    sources: dict[str, SourceRewind]
    tables: dict[str, TableRewind]
    sinks: dict[str, SinkRewind]
    unpublished: dict[str, list[int]]
    """By sink, the checkpoints that are taken back before their rows came into it."""
    obstacles: list[str]
    checkpoint: int | None
    """Its own, or the newest one where nothing was to be taken back; null: a dry run."""


class Seek(Printed):
    """`weir seek`"""

    head: int
    source: str
    from_: Position | None = Field(alias="from")
    to: Position
    waits: int | None
    """Rows behind that; null: nobody knows."""
    checkpoint: int | None
    """Its own; null: a dry run."""


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
    """Of the newest checkpoint's state, what it does not share with the pipeline; null: its listing cannot be read."""
    files_behind: dict[str, int]
    """By source, what the pipeline has read since: files, or rows where it is no files."""


class TakenBack(Printed):
    checkpoint: int
    what: str
    tables: list[str]


class TableDiff(Change):
    rows: int
    """Of the pipeline since the fork."""
    rows_branch: int
    days: dict[str, Change]
    """By day of event time; under "" where the table has none."""
    columns: str
    left_out: list[str]
    sample: list[Row]


class BranchStateDiff(Printed):
    added: int | None = None
    removed: int | None = None
    changed: int | None = None
    not_compared: str
    """Why; then there are no counts."""
    fields: str
    """Those that only one side has, or that have another type, in words."""
    left_out: list[str]
    sample: list[Row]


class BranchDiff(Printed):
    """`weir diff`"""

    pipeline: str
    branch: str
    head: int
    base: int
    branch_head: int
    files_behind: dict[str, int]
    same: bool
    taken_back: list[TakenBack]
    tables: dict[str, TableDiff]
    state: dict[str, BranchStateDiff]


class Backfill(Printed):
    """`weir backfill`"""

    branch: str
    base: int | None
    resumed: bool
    epochs: int
    promoted: int | None
    """The pipeline's checkpoint; null: it waits for `weir promote`, or nothing differs."""
    difference: BranchDiff
    note: str | None


class TablePromotion(TableBack):
    rows_added: int
    files_added: int


class SinkPromotion(Printed):
    kind: str
    keeps: bool
    lacks: bool
    rows_added: int


class Promotion(Printed):
    """`weir promote`"""

    branch: str
    head: int
    base: int
    branch_head: int
    files_behind: dict[str, int]
    range: str | None
    tables: dict[str, TablePromotion]
    sinks: dict[str, SinkPromotion]
    taken_back: list[TakenBack]
    obstacles: list[str]
    checkpoint: int | None
    """Its own; null: a dry run."""
