"""Models of the output of `weir state ...` with `--json`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from weir.cli.schemas.base import Change, Printed, Row


class Count(Printed):
    """`weir state count`"""

    checkpoint: int
    stage: str
    total: int
    subtasks: dict[str, int]


class HistoryChange(Printed):
    """One change of a key's state."""

    checkpoint: int
    """The first retained one that has it so."""
    parent: int | None
    completed_at: str
    trigger: str
    reason: str
    run_id: str | None
    changed_in: tuple[int | None, int]
    """The first and the last epoch that may have changed it; null: it may be of any epoch before."""
    epochs_carried: list[int]
    """Epochs whose rows waited for the stage before."""
    slice: dict[str, Any]
    offsets: dict[str, Any]
    delta_versions: dict[str, Any]
    value: list[Row]
    """The rows of the key; none: it has no state any more."""


class StateDiff(Change):
    """`weir state diff`"""

    from_: int = Field(alias="from")
    to: int
    fields_only_in_from: list[str]
    fields_only_in_to: list[str]
    fields_of_other_type: dict[str, tuple[str, str]]
    sample: list[Row]


class Exported(Printed):
    """`weir state export`"""

    table: str
    version: int
    """Of the table."""
    stage: str
    checkpoint: int


class Imported(Printed):
    """`weir state import`"""

    stage: str
    mode: str
    """replace or merge."""
    rows: int
    subtasks: dict[str, int]
    before: int
    """The newest checkpoint before it."""
    checkpoint: int | None
    """Its own; null: a dry run."""


class Holding(Printed):
    checkpoint: int
    savepoints: list[str]
    entries: int
    bytes: int
    """Of the snapshot that has the key, which is written anew."""
    stays: str | None
    """The branch that keeps the checkpoint as it is."""


class Remaining(Printed):
    kind: str
    name: str
    why: str


class Deletion(Printed):
    """`weir state delete`"""

    stage: str
    key: list[Any]
    checkpoints: list[Holding]
    remains: list[Remaining]
    """Where the key may be still."""
    before: int
    checkpoint: int | None
    """Its own; null: a dry run."""
    bytes_written: int
