"""Stages that hand on what they read, of one input or of several: the definition. `running` has what works on rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from weir.definition import Input, Operator, OperatorKind, Shapes, Stage, Subtask


@dataclass(frozen=True, slots=True)
class Unchanged(OperatorKind):
    """The rows of a stage's input, as its SQL makes them."""

    kind: ClassVar[str] = "stage"
    slot: ClassVar[str] = ""

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        from weir.operators.stateless.running import unchanged_shapes

        return unchanged_shapes(stage, rows)

    def build(self, subtask: Subtask) -> Operator:
        from weir.operators.stateless.running import UnchangedOperator

        return UnchangedOperator()

    @property
    def has_state(self) -> bool:
        return False

    @property
    def hands_on(self) -> bool:
        return True

    def meaning(self) -> None:
        return None

    @property
    def needs_key(self) -> bool:
        return False

    def hands_out_changes(self, stage: Stage, output: str) -> bool:
        return any(input.brings_changes for input in stage.inputs)

    def no_changes(self, stage: Stage, input: Input) -> str | None:
        return None

    def clocked_output(self, stage: Stage) -> tuple[str, ...]:
        columns = (name for before in stage.stages_before for name in before.operator.clocked_output(before))
        return tuple(dict.fromkeys(columns))
