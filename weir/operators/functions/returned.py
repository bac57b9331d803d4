"""The values that a stage's function returns: rows of its main output, or rows by output, at once or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from types import GeneratorType
from typing import Any

from state_ops.errors import StageError
from weir.definition import MAIN, Stage


def returned(stage: Stage, result: Any) -> Sequence[tuple[str, Any]]:
    """Return the rows that a call of a stage's function made, each time with the output that they are for.

    Args:
        result: What the call returned; of a function that yields, whose code runs now, the generator.

    Raises:
        StageError: The stage has not declared an output of that name.
    """
    if not isinstance(result, GeneratorType | dict):  # of each key of a batch, perhaps, so it should cost nothing
        return () if result is None else ((MAIN, result),)
    parts: list[tuple[str, Any]] = []
    for part in result if isinstance(result, GeneratorType) else (result,):
        by_output = part if isinstance(part, dict) else {MAIN: part}
        for name, rows in by_output.items():
            if name not in stage.returned:
                raise StageError(
                    f"The function of the stage {stage.uid} returned rows for an output {name!r}, which the stage does"
                    f" not declare; its outputs are: {', '.join(stage.returned)}.",
                    where=f"stage {stage.uid}",
                    next="Declare it, outputs={...}; rows that are dicts are returned as a list of them.",
                )
            if rows is not None:
                parts.append((name, rows))
    return parts
