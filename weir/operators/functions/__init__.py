"""An author's function: the definition. `function` and `per_key` have what works on rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from weir.definition import Input, Operator, OperatorKind, Shapes, Stage, Subtask
from weir.definition.change_feed import CHANGE_TYPE

if TYPE_CHECKING:
    import pyarrow as pa

    from state_ops.keyed.ttl import Ttl
    from state_ops.records.operator_stats import OperatorStats
    from state_ops.schema.state_class import State


@dataclass(frozen=True, slots=True)
class Function(OperatorKind):
    """A function over batches or, with `per_key`, over the rows of one key; without a key over batches alone.

    Attributes:
        function: The author's.
        state: The class of a key's state; None: the stage has no key.
        on_timer: Called when a timer of the state fires.
        ttl: When state is forgotten.
        per_key: Both functions are called once per key.
        declared: By output, the columns that functions per key hand out, if they are declared.
        accepts_changes: The function looks at the column `_change_type` of its rows.
    """

    kind: ClassVar[str] = "stage"
    slot: ClassVar[str] = ""

    function: Callable[..., Any]
    state: type[State] | None = None
    on_timer: Callable[..., Any] | None = None
    ttl: Ttl | None = None
    per_key: bool = False
    declared: tuple[tuple[str, pa.Schema], ...] = ()
    accepts_changes: bool = False

    def shapes(self, stage: Stage, rows: pa.Schema, keys: pa.Schema) -> Shapes:
        if not stage.key:
            from weir.operators.functions.keyless import keyless_shapes

            return keyless_shapes(stage, self, rows)
        from weir.operators.functions.function import function_shapes

        return function_shapes(stage, self, rows, keys)

    def build(self, subtask: Subtask) -> Operator:
        if not subtask.stage.key:
            from weir.operators.functions.keyless import KeylessOperator

            return KeylessOperator(self, subtask)
        from weir.operators.functions.function import FunctionOperator

        return FunctionOperator(self, subtask)

    def given_to_polars(self, stage: Stage, rows: pa.Schema) -> Sequence[str]:
        if not stage.key:
            return ()
        from state_ops.arrow import frames

        whole = not self.per_key and frames.is_given_polars(self.function)
        return rows.names if whole else stage.order_by

    def wrapped(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Function:
        on_timer = None if self.on_timer is None else functools.wraps(self.on_timer)(wrap(self.on_timer))
        return replace(self, function=functools.wraps(self.function)(wrap(self.function)), on_timer=on_timer)

    @property
    def needs_key(self) -> bool:
        return False

    @property
    def lifetime(self) -> Ttl | None:
        return self.ttl

    @property
    def acts_on_rows_alone(self) -> bool:
        return self.on_timer is None and self.ttl is None

    def meaning(self) -> None:
        return None

    def hands_out_changes(self, stage: Stage, output: str) -> bool:
        return any(name == output and CHANGE_TYPE in columns.names for name, columns in self.declared)

    def no_changes(self, stage: Stage, input: Input) -> str | None:
        return None if self.accepts_changes else "its function may not look at that column"

    def remembered(self, stage: Stage, recorded: OperatorStats, changes: bool) -> frozenset[str] | None:
        return frozenset("*") if self.accepts_changes and changes else None

    def mixes_rows(self) -> str | None:
        return None if self.on_timer is None else "hands out rows of its timers too, which come from none"
