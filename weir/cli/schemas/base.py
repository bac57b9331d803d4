"""The common base of all models of the output of `--json`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

Millis = dict[str, float]
Row = dict[str, Any]
"""A row of a table, or of state: by column, its value as JSON has it."""


class Printed(BaseModel):
    """No key but those that are described; what an attribute means stands below it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Change(Printed):
    """The numbers of rows, or keys, that were added, removed and changed."""

    added: int
    removed: int
    changed: int


class Coordinator(Printed):
    alive: bool | None
    """Whether it runs; null: that cannot be told from this host."""
    host: str | None
    pid: int | None
    run_id: str | None
    outcome: str | None
    """How the last run ended: drained, stopped or cancelled."""
    died: bool
    """Whether the last run ended without a word, as a killed process does."""
    generation: int
    """Of the newest owner; it alone may commit."""
