"""The event times by which the checkpoints of a pipeline belong to days."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Days:
    """The event times by which the checkpoints of a pipeline belong to days.

    Attributes:
        sources: The names of the sources whose rows' times count.
        stages: The uids of the stages that read no other source, whose watermarks count.
        lateness: The longest of these stages' windows, in microseconds, by which watermarks stay behind. It counts if
            an earlier release has recorded statistics alone.
    """

    sources: frozenset[str]
    stages: frozenset[str] = frozenset()
    lateness: int = 0
