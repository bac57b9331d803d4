"""A stage in this very process, without Spark: rows are filtered, routed and sorted as Spark does it, and each subtask is the
real keyed task on the real backend. For unit tests of pipelines (`pipelines.testing`) and for tests of the coordinator.

`where` is Spark SQL; here Polars evaluates it. What Polars does not understand is refused by name. `transform` needs Spark.
"""

from __future__ import annotations

import time

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.runtime import direct, keyed_stage
from pipelines.runtime.definition import Stage
from pipelines.runtime.executor import Channel, Deadline, Landed
from pipelines.runtime.keyed_stage import KeyedTask
from pipelines.runtime.sorting import ordered
from state_ops import frames
from state_ops.checkpoint import Ack
from state_ops.errors import PipelineError, TransientError

_ROW = "__weir_row"


class InMemoryExecutor:
    """Runs the subtasks one after the other, in their order. batch_rows: the largest batch that a function gets."""

    def __init__(self, batch_rows: int = 65_536) -> None:
        self._batch_rows = batch_rows

    def columns(self, stage: Stage, schema: pa.Schema, where: str) -> pa.Schema:
        if stage.transform is not None:
            raise PipelineError(f"The transform of {stage.uid} needs Spark.", where=where, next="Run it on Spark.")
        return filtered(stage, frames.canonical(schema.empty_table())).schema

    def run(self, task: KeyedTask, rows: Landed | Channel | None, columns: pa.Schema, deadline: Deadline) -> list[Ack]:
        table = columns.empty_table()
        if rows is not None:
            table = pa.concat_tables([rows.schema.empty_table(), *direct.tables(rows, self._batch_rows)])
            if not rows.as_seen:
                table = filtered(task.stage, table)
        parts = routed(task.stage, table, task.parallelism, task.max_parallelism, self._batch_rows)
        acks = []
        for subtask, batches in enumerate(parts):
            if time.monotonic() >= deadline():
                raise TransientError(f"Subtask {subtask} of {task.stage.uid} was not begun: the epoch's time is up.")
            # Through JSON, as from an executor: an ack that could not travel must not pass here.
            acks.append(Ack.from_json(keyed_stage.run(task, subtask, iter(batches)).to_json()))
        return acks

    def cancel(self) -> None:
        """Subtasks run to their end here: they are short."""


def routed(
    stage: Stage, rows: pa.Table, parallelism: int, max_parallelism: int, batch_rows: int
) -> list[list[pa.RecordBatch]]:
    """Each subtask's batches, as Spark's shuffle and sort hand them out."""
    if not rows.num_rows:
        return [[] for _ in range(parallelism)]
    rows, owners = direct.with_owners(stage, rows, parallelism, max_parallelism)
    order = np.arange(rows.num_rows)
    if stage.order_by:
        order = ordered(rows, [*stage.key, *stage.order_by])
    parts = [rows.take(order[owners[order] == subtask]) for subtask in range(parallelism)]
    return [part.combine_chunks().to_batches(max_chunksize=batch_rows) for part in parts]


def filtered(stage: Stage, rows: pa.Table) -> pa.Table:
    """The rows that the stage's `where` keeps."""
    if stage.where is None:
        return rows
    problem: object = "Spark takes double quotes for a text, Polars for a name"
    if '"' not in stage.where:
        try:
            kept = frames.polars(rows).with_row_index(_ROW).filter(pl.sql_expr(stage.where))[_ROW]
            return rows.take(kept.to_numpy().astype(np.int64))
        except (pl.exceptions.PolarsError, TypeError) as error:
            problem = error
    raise PipelineError(
        f"The where of {stage.uid} cannot be evaluated without Spark: {problem}",
        where=f"stage {stage.uid}, where={stage.where!r}",
        next="Write it in SQL that Polars knows too, or test the function without the where.",
    )
