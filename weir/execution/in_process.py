"""A stage in this very process, without Spark: rows are filtered, routed and sorted as Spark does it, and each subtask
is the real keyed task on the real backend. For unit tests of pipelines (`weir.testing`) and for tests of the
coordinator.

`where` is evaluated as Spark does it (`weir.where`); what that does not cover is refused by name. `transform`
needs Spark."""

from __future__ import annotations

import itertools
import time
from functools import partial

import numpy as np
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import InputError, PipelineError, TransientError
from state_ops.records.acks import Ack
from weir import where
from weir.definition import Input, Stage
from weir.execution import direct_read
from weir.execution.executor import Channel, Deadline, InputRows, Landed
from weir.execution.row_order import ordered
from weir.task import run_task
from weir.task.run_task import KeyedTask


class InMemoryExecutor:
    """Runs the subtasks one after the other, in their order.

    Args:
        batch_rows: The largest batch that a function gets.
        narrows: Of a source no other columns are read than those that the stage looks at.
    """

    def __init__(self, batch_rows: int = 65_536, *, narrows: bool = True) -> None:
        self._batch_rows, self._narrows = batch_rows, narrows

    def columns(self, stage: Stage, input: Input, schema: pa.Schema, where: str) -> pa.Schema:
        if input.transform is not None:
            raise PipelineError(f"The transform of {stage.uid} needs Spark.", where=where, next="Run it on Spark.")
        return filtered(stage, input, frames.canonical(schema.empty_table())).schema

    def run(self, task: KeyedTask, rows: InputRows | None, columns: pa.Schema, deadline: Deadline) -> list[Ack]:
        read = partial(self._seen, task.stage)
        seen = [] if rows is None else list(direct_read.of_inputs(task.stage, rows, read))
        table = pa.concat_tables(seen or [columns.empty_table()])
        parts = routed(task.stage, table, task.parallelism, task.max_parallelism, self._batch_rows)
        acks = []
        for subtask, batches in enumerate(parts):
            if time.monotonic() >= deadline():
                raise TransientError(f"Subtask {subtask} of {task.stage.uid} was not begun: the epoch's time is up.")
            # Through JSON, as from an executor: an ack that could not travel must not pass here.
            acks.append(Ack.from_json(run_task.run(task, subtask, iter(batches)).to_json()))
        return acks

    def _seen(self, stage: Stage, input: Input, rows: Landed | Channel) -> list[pa.Table]:
        """Return the rows of an input as the stage's function sees them."""
        rows = direct_read.narrowed(stage, input, rows) if self._narrows else rows
        table = pa.concat_tables([rows.schema.empty_table(), *direct_read.tables(rows, self._batch_rows)])
        return [table if rows.as_seen else filtered(stage, input, table)]

    def cancel(self) -> None:
        """Subtasks run to their end here: they are short."""


def routed(
    stage: Stage, rows: pa.Table, parallelism: int, max_parallelism: int, batch_rows: int
) -> list[list[pa.RecordBatch]]:
    """Return each subtask's batches, as Spark's shuffle and sort hand them out."""
    if not rows.num_rows:
        return [[] for _ in range(parallelism)]
    if not stage.key:
        ends = [rows.num_rows * end // parallelism for end in range(parallelism + 1)]
        shares = [rows.slice(begin, end - begin) for begin, end in itertools.pairwise(ends)]
        return [share.combine_chunks().to_batches(max_chunksize=batch_rows) for share in shares]
    rows, owners = direct_read.with_owners(stage.key, rows, parallelism, max_parallelism)
    order = np.arange(rows.num_rows)
    if stage.order_by:
        order = ordered(rows, [*stage.key, *stage.order_by])
    parts = [rows.take(order[owners[order] == subtask]) for subtask in range(parallelism)]
    return [part.combine_chunks().to_batches(max_chunksize=batch_rows) for part in parts]


def filtered(stage: Stage, input: Input, rows: pa.Table) -> pa.Table:
    """Return the rows that the `where` of an input keeps, in its columns."""
    try:
        return direct_read.seen(input, rows)
    except where.Refused as error:
        raise PipelineError(
            f"The {input.sql_named} of {stage.uid} is not evaluated without Spark, since Spark might understand it"
            f" otherwise: {error}",
            where=f"stage {stage.uid}, {input.sql_written}",
            next=("Run it on Spark; or write it in what weir.testing lists, or test the function without the where."),
        ) from error
    except where.Fails as error:
        raise InputError(
            f"Spark cannot evaluate the {input.sql_named} of {stage.uid} for a row: {error}",
            where=f"stage {stage.uid}, {input.sql_written}",
            next="Repair the input, or let the expression tolerate such values; nothing of this epoch was applied.",
        ) from error
