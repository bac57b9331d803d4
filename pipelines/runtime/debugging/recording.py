"""Plays some subtasks of each stage in this process, and keeps the rows that these get, with where each came from."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.runtime.definition import LATE, ROW, Stage
from pipelines.runtime.execution import direct_read
from pipelines.runtime.execution.executor import Channel, Deadline, Landed, Several
from pipelines.runtime.execution.in_process import InMemoryExecutor, filtered, routed
from pipelines.runtime.operators.joins import sides
from pipelines.runtime.task import run_task
from pipelines.runtime.task.run_task import KeyedTask
from state_ops.checkpoints.checkpoint import Ack, PendingUpload
from state_ops.errors import TransientError
from state_ops.ids import new_attempt_id
from state_ops.keyed.keyed_state import GROUP

INPUT, FILE, FILE_ROW = "_input", "_file", "_row"  # columns beside a row's own: where it came from
_BATCH_ROWS = 65_536
_FROM, _AT = "__weir_from", "__weir_at"

Wrapping = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What an author's function is called by."""


@dataclass
class Recording(InMemoryExecutor):
    """Runs subtasks one after the other.

    Attributes:
        plays: By stage, the subtasks that run; the others hand out nothing.
        reads: Stages of which rows are only kept, and no subtask runs.
        wrap: By stage, what is put around its functions.
        rows: By stage and subtask, the rows that it got, with `INPUT`, `FILE` and `FILE_ROW`.
    """

    plays: Mapping[str, Collection[int]]
    reads: Collection[str] = ()
    wrap: Mapping[str, Wrapping] = field(default_factory=dict)
    rows: dict[tuple[str, int], pa.Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(_BATCH_ROWS)

    def run(
        self, task: KeyedTask, rows: Landed | Channel | Several | None, columns: pa.Schema, deadline: Deadline
    ) -> list[Ack]:
        stage, uid = task.stage, task.stage.uid
        origins = _Origins(stage)
        none = pa.schema([*columns, (_FROM, pa.int32()), (_AT, pa.int64())]).empty_table()
        table = pa.concat_tables((origins.of_inputs(rows) if rows is not None else []) or [none])
        parts = routed(stage, table, task.parallelism, task.max_parallelism, _BATCH_ROWS)
        task = replace(task, stage=self._wrapped(stage), channels=frozenset((*stage.returned, LATE)), patience=None)
        acks = []
        for subtask, batches in enumerate(parts):
            if time.monotonic() >= deadline():
                raise TransientError(f"Subtask {subtask} of {uid} was not begun: the epoch's time is up.")
            if subtask not in self.plays.get(uid, ()):
                acks.append(_idle(task, subtask))
                continue
            self.rows[uid, subtask] = origins.named(pa.Table.from_batches(batches) if batches else table.slice(0, 0))
            if uid in self.reads:
                acks.append(_idle(task, subtask))
                continue
            plain = iter([batch.drop_columns([_FROM, _AT]) for batch in batches])
            acks.append(run_task.run(task, subtask, plain))
        return acks

    def _wrapped(self, stage: Stage) -> Stage:
        """The stage with what stops in its functions, or looks at their errors."""
        if stage.uid not in self.wrap or stage.function is None:
            return stage
        wrap = self.wrap[stage.uid]
        on_timer = None if stage.on_timer is None else functools.wraps(stage.on_timer)(wrap(stage.on_timer))
        return replace(stage, function=functools.wraps(stage.function)(wrap(stage.function)), on_timer=on_timer)


class _Origins:
    """Reads rows with where each is from: the number of an entry of `places`, and the row's own in that."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._places: list[tuple[str, str | None]] = []  # the input's name, and the file's

    def of_inputs(self, rows: Landed | Channel | Several) -> list[pa.Table]:
        """As `direct_read.of_inputs`."""
        if not isinstance(rows, Several):
            return self.read(self._stage, rows)
        tables = []
        for side, part in rows.parts:
            for table in self.read(self._stage.sides[side], part):
                plain = table.drop_columns([_FROM, _AT])
                wide = sides.widened(self._stage, side, plain, rows.schema)
                tables.append(wide.append_column(_FROM, table.column(_FROM)).append_column(_AT, table.column(_AT)))
        return tables

    def read(self, lane: Stage, rows: Landed | Channel) -> list[pa.Table]:
        """The rows as the stage's function sees them."""
        tables = []
        name = lane.input.uid if isinstance(lane.input, Stage) else lane.input.name
        if not isinstance(rows, Landed):
            self._places.append((name, None))
            for table in direct_read.tables(rows, _BATCH_ROWS):
                table = _with(table, len(self._places) - 1, pa.nulls(table.num_rows, pa.int64()))
                tables.append(table if rows.as_seen else _filtered(lane, table))
            return tables
        first = len(self._places)
        self._places += [(name, file.name) for file in rows.files]
        tracked = rows if rows.tracked else replace(rows, schema=pa.schema([*rows.schema, (ROW, pa.int64())]))
        for number in range(len(rows.files)):
            for table in direct_read.file_tables(tracked, number, _BATCH_ROWS):
                at = pa.array(table.column(ROW).to_numpy() & ((1 << 40) - 1))
                table = table if rows.tracked else table.drop_columns([ROW])
                tables.append(_filtered(lane, _with(table, first + number, at)))
        return tables

    def named(self, table: pa.Table) -> pa.Table:
        """Rows with the names of what they are from."""
        places = pl.Series(_FROM, table.column(_FROM).to_numpy() if table.num_rows else [], dtype=pl.Int32).to_list()
        names = [self._places[place] if place is not None and place >= 0 else ("", None) for place in places]
        table = table.append_column(INPUT, pa.array([name for name, _ in names], pa.string()))
        table = table.append_column(FILE, pa.array([file for _, file in names], pa.string()))
        table = table.append_column(FILE_ROW, table.column(_AT))
        return table.drop_columns([name for name in (_FROM, _AT, GROUP) if name in table.column_names])


def _with(table: pa.Table, place: int, at: pa.Array) -> pa.Table:
    places = pa.array(np.full(table.num_rows, place, np.int32))
    return table.append_column(_FROM, places).append_column(_AT, at)


def _filtered(lane: Stage, table: pa.Table) -> pa.Table:
    """What the stage's where and columns leave: columns are made row by row, of those that its where has kept."""
    if not lane.columns:
        return filtered(lane, table)
    kept = filtered(replace(lane, columns=()), table)
    columns = filtered(replace(lane, where=None), kept.drop_columns([_FROM, _AT]))
    return columns.append_column(_FROM, kept.column(_FROM)).append_column(_AT, kept.column(_AT))


def _idle(task: KeyedTask, subtask: int) -> Ack:
    """The ack of a subtask that does not run."""
    base, attempt = task.bases.get(subtask), new_attempt_id()
    nowhere = str(task.work_dir / task.stage.uid / str(subtask) / attempt)
    pending = PendingUpload(base.attempt if base else None, None, (), nowhere)
    return Ack(task.stage.uid, subtask, attempt, task.epoch, task.generation, handover=pending)


def of_input(stage: Stage, side: int, rows: pa.Table) -> pa.Table:
    """Of recorded rows those of one input, in its own columns."""
    if not stage.sides:
        return rows
    rows = rows.filter(pa.array(rows.column(sides.SIDE).to_numpy() == side)) if rows.num_rows else rows
    if not stage.key:
        return rows.drop_columns([sides.SIDE])
    lane, mark = stage.sides[side], sides.column(side, "")
    names = dict(zip(stage.key, lane.key, strict=True))
    columns = [name for name in rows.column_names if name in names or name.startswith(mark)]
    beside = [INPUT, FILE, FILE_ROW]
    of_side = rows.select([*columns, *beside])
    return of_side.rename_columns([*(names.get(name, name.removeprefix(mark)) for name in columns), *beside])
