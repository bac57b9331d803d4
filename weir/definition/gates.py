"""Gates: conditions on the rows, the state and the figures of an epoch, and on a checkpoint that is restored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from state_ops.errors import PipelineError
from state_ops.value_text import literal
from weir.definition.names import HOLD, QUARANTINE, WARN

ROWS, STATE, FIGURES = "rows", "state", "figures"


_POLICIES, _LOOKED_AT = (HOLD, WARN, QUARANTINE), (ROWS, STATE, FIGURES)


_SHARE = 0.1


_EXPECTATION = re.compile(r"Expect[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Gate:
    """One Great Expectations expectation on what one epoch makes of a stage.

    Attributes:
        expectation: The name of its class.
        arguments: Its arguments by name.
        on_failure: "hold": the epoch is declined. "warn": it goes on, and says so. "quarantine": it is replayed without
            the rows of the source that fail.
        of: "rows": those that the stage hands out. "state": a sample of what would be committed. "figures": one row
            with the numbers that the checkpoint records of the stage.
        quarantine_at_most: The share of the source's rows that may be set aside.
    """

    expectation: str
    arguments: tuple[tuple[str, Any], ...]
    on_failure: str = HOLD
    of: str = ROWS
    quarantine_at_most: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.expectation, str) or not _EXPECTATION.fullmatch(self.expectation):
            raise PipelineError(
                f"{literal(self.expectation)} is no expectation of Great Expectations.",
                next='Give a class name such as "ExpectColumnValuesToNotBeNull".',
            )
        for name, value, choices in (("on_failure", self.on_failure, _POLICIES), ("of", self.of, _LOOKED_AT)):
            if value not in choices:
                raise PipelineError(
                    f"{name}={literal(value)} is nothing that a gate can do.",
                    where=f"gate {self.title}",
                    next=f"Say one of: {', '.join(choices)}.",
                )
        where, most = f"gate {self.title}", self.quarantine_at_most
        if self.on_failure == QUARANTINE and self.of != ROWS:
            raise PipelineError(
                f"Only rows can be set aside, not {self.of}.", where=where, next=f'Say on_failure="{HOLD}" or "{WARN}".'
            )
        if most is not None and (self.on_failure != QUARANTINE or not 0 < most <= 1):
            raise PipelineError(
                f"quarantine_at_most={literal(most)} is no share of the rows that a gate may set aside.",
                where=where,
                next=f'Say a number above 0 and up to 1, with on_failure="{QUARANTINE}".',
            )

    @property
    def share(self) -> float:
        """The largest share of a slice's rows that a quarantining gate may set aside."""
        return _SHARE if self.quarantine_at_most is None else self.quarantine_at_most

    @property
    def title(self) -> str:
        """The gate for people, and the name under which checkpoints record its verdicts."""
        return f"{self.expectation}({', '.join(f'{key}={literal(value)}' for key, value in self.arguments)})"

    def is_titled(self, recorded: str) -> bool:
        """Return whether a recorded verdict is this gate's.

        Before titles were JSON, they had values as Python writes them.
        """
        before = f"{self.expectation}({', '.join(f'{key}={value!r}' for key, value in self.arguments)})"
        return recorded in (self.title, before)


@dataclass(frozen=True, slots=True)
class Expected:
    """A condition that must hold when a checkpoint is restored.

    Attributes:
        of: Of a stage's state, or of a table.
        name: The stage's uid, or the table's name.
        gate: What holds.
    """

    of: Literal["state", "table"]
    name: str
    gate: Gate
