"""Findings about a changed pipeline: what the change means for state that is stored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from state_ops.facts import Facts


class Verdict(StrEnum):
    """The consequence of a change for the next run.

    MIGRATES: rows are migrated when they are read. LOSES: the run goes on, and state is lost for good. FLAG: the run
    goes on once a flag says that the change is meant. UNKNOWN: not compared, because a refused change comes first.
    """

    COMPATIBLE = "compatible"
    MIGRATES = "migrates"
    LOSES = "loses state"
    FLAG = "needs a flag"
    REFUSED = "refused"
    UNKNOWN = "not compared"

    @property
    def stops(self) -> bool:
        """True if a run would be refused."""
        return self in (Verdict.FLAG, Verdict.REFUSED)


@dataclass(frozen=True, slots=True)
class Finding(Facts):
    """One thing about the pipeline.

    Attributes:
        kind: A stage, a source or a table, with its name.
        aspect: What of it.
        next: What to do.
    """

    kind: str
    name: str
    aspect: str
    verdict: Verdict
    what: str
    next: str | None = None


ANOTHER_UID = "Put the definition back, or give the stage a new uid: it then starts with empty state."


def refused(uid: str, aspect: str, what: str) -> Finding:
    """Return the finding that a stage's state cannot be used by what the stage has become."""
    return Finding("stage", uid, aspect, Verdict.REFUSED, what, ANOTHER_UID)
