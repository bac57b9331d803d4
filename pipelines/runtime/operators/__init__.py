"""What happens to the rows of one subtask between two barriers: a stage's function, windows, running
aggregates. One module for each."""

from __future__ import annotations

import pyarrow as pa

from pipelines.runtime.definition import Epoch, Stage
from pipelines.runtime.operators.aggregation import AggregationOperator, aggregation_shapes
from pipelines.runtime.operators.base import LATE, MAIN, Operator, Progress, Shapes, event_time_of
from pipelines.runtime.operators.function import FunctionOperator, function_shapes
from pipelines.runtime.operators.windows import WindowOperator, open_windows, window_shapes
from state_ops.backends.base import Backend
from state_ops.errors import PipelineError
from state_ops.key_groups import group_range
from state_ops.keys import check_key_type

__all__ = ["LATE", "MAIN", "Operator", "Progress", "Shapes", "build", "event_time_of", "open_windows", "shapes"]


def shapes(stage: Stage, rows: pa.Schema) -> Shapes:
    """A stage's schemas from its input's; the function is tried on an empty table. PipelineError if they do not fit."""
    names = [*stage.key, *stage.order_by, *([stage.window.on] if stage.window else [])]
    for name in names:
        if name not in rows.names:
            raise PipelineError(
                f"The input of {stage.uid} has no column {name!r}.",
                where=f"stage {stage.uid}",
                next=f"Its columns are: {', '.join(rows.names)}.",
            )
    keys = pa.schema([rows.field(name) for name in stage.key])
    for field in keys:
        check_key_type(field.name, field.type)
    if stage.window is not None:
        return window_shapes(stage, stage.window, rows, keys)
    if stage.aggregation is not None:
        return aggregation_shapes(stage, stage.aggregation, rows, keys)
    return function_shapes(stage, rows, keys)


def build(
    stage: Stage, fixed: Shapes, backend: Backend, epoch: Epoch, progress: Progress, max_parallelism: int
) -> Operator:
    """The operator of one subtask for one epoch."""
    if stage.window is not None:
        groups = group_range(epoch.subtask, epoch.parallelism, max_parallelism)
        return WindowOperator(stage, fixed, backend, progress, groups)
    if stage.aggregation is not None:
        return AggregationOperator(stage, stage.aggregation, fixed, backend, epoch.id)
    return FunctionOperator(stage, fixed.keys, fixed.state, backend, epoch, fixed.outputs[MAIN])
