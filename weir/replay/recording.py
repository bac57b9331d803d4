"""Plays some subtasks of each stage in this process, and keeps the rows that these get, with where each came from."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import PipelineError, TransientError
from state_ops.ids import new_attempt_id
from state_ops.keyed.keyed_state import GROUP
from state_ops.records.acks import Ack, PendingUpload
from weir.definition import LATE, ROW, Input, Stage
from weir.definition.column_lineage import has_all
from weir.execution import direct_read
from weir.execution.executor import Channel, Deadline, InputRows, Landed
from weir.execution.in_process import InMemoryExecutor, filtered, routed
from weir.operators import sides
from weir.task import run_task
from weir.task.run_task import KeyedTask

if TYPE_CHECKING:
    from weir.execution.spark.spark_executor import SparkExecutor

INPUT, FILE, FILE_ROW, PLACE = "_input", "_file", "_row", "_place"  # columns beside a row's own: where it came from
_BESIDE = (INPUT, FILE, FILE_ROW, PLACE)
_BATCH_ROWS = 65_536
_FROM, _AT = "__weir_from", "__weir_at"

Wrapping = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What an author's function is called by."""


def _nothing_left(_: Stage, __: int) -> pa.Table | None:
    return None


@dataclass
class Recording(InMemoryExecutor):
    """Runs subtasks one after the other.

    Attributes:
        plays: By stage, the subtasks that run; the others hand out nothing.
        left: By stage and subtask, rows that the epoch did not apply, as the stage's function sees them (unaligned).
        spark: Evaluates what Python does not; None: that is refused.
        reads: Stages of which rows are only kept, and no subtask runs.
        wrap: By stage, what is put around its functions.
        rows: By stage and subtask, the rows that it got, with `INPUT`, `FILE` and `FILE_ROW`; these have one `_` more
            where a row has a column of that name.
    """

    plays: Mapping[str, Collection[int]]
    left: Callable[[Stage, int], pa.Table | None] = _nothing_left
    spark: SparkExecutor | None = None
    reads: Collection[str] = ()
    wrap: Mapping[str, Wrapping] = field(default_factory=dict)
    rows: dict[tuple[str, int], pa.Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(_BATCH_ROWS)

    def columns(self, stage: Stage, input: Input, schema: pa.Schema, where: str) -> pa.Schema:
        if (spark := self._spark_for(stage, input, schema)) is not None:
            return spark.columns(stage, input, schema, where)
        return super().columns(stage, input, schema, where)

    def _spark_for(self, stage: Stage, input: Input, schema: pa.Schema) -> SparkExecutor | None:
        """Return what evaluates the rows of an input with these columns; None: Python does. Raises PipelineError where
        only Spark could."""
        why = "it has a transform" if input.transform is not None else direct_read.spark_alone(input, schema)
        if why is None:
            return None
        if self.spark is None:
            raise PipelineError(
                f"Spark has to evaluate the rows of {stage.uid}: {why}.",
                where=f"stage {stage.uid}, {input.sql_written or 'transform='}",
                next="Add --spark (spark=True in Python): Spark evaluates them then, all else stays in this process.",
            )
        return self.spark

    def _by_spark(self, stage: Stage, input: Input, rows: Landed | Channel) -> pa.Table | None:
        """Return the rows as the function of a stage sees them, where Spark has to evaluate them; None: Python does."""
        spark = None if rows.as_seen else self._spark_for(stage, input, rows.schema)
        return None if spark is None else spark.seen(stage, input, rows)

    def run(self, task: KeyedTask, rows: InputRows | None, columns: pa.Schema, deadline: Deadline) -> list[Ack]:
        stage, uid = task.stage, task.stage.uid
        origins = _Origins(stage, self._by_spark)
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
            given = pa.Table.from_batches(batches) if batches else table.slice(0, 0)
            left = self.left(stage, subtask)
            if left is not None:
                given, batches = _parted(given, left)
            self.rows[uid, subtask] = origins.named(given)
            if uid in self.reads:
                acks.append(_idle(task, subtask))
                continue
            plain = iter([batch.drop_columns([_FROM, _AT]) for batch in batches])
            # With no patience at all it stops behind its first batch, and leaves the others.
            given_up = task if left is None else replace(task, patience=0.0)
            acks.append(run_task.run(given_up, subtask, plain))
        return acks

    def _wrapped(self, stage: Stage) -> Stage:
        """Return the stage with what stops in its functions, or looks at their errors."""
        if stage.uid not in self.wrap or stage.function is None:
            return stage
        return replace(stage, operator=stage.operator.wrapped(self.wrap[stage.uid]))


class _Origins:
    """Reads rows with where each is from: the number of an entry of `places`, and the row's own in that.

    Args:
        by_spark: The rows of an input that Spark has to evaluate; None: Python does.
    """

    def __init__(self, stage: Stage, by_spark: Callable[[Stage, Input, Landed | Channel], pa.Table | None]) -> None:
        self._stage, self._by_spark = stage, by_spark
        self._places: list[_Origin] = []

    def of_inputs(self, rows: InputRows) -> list[pa.Table]:
        """Read the inputs as `direct_read.of_inputs` does."""
        tables = []
        for side, part in rows.parts:
            for table in self.read(self._stage.inputs[side], part):
                plain = table.drop_columns([_FROM, _AT])
                wide = sides.widened(self._stage, side, plain, rows.schema)
                tables.append(wide.append_column(_FROM, table.column(_FROM)).append_column(_AT, table.column(_AT)))
        return tables

    def read(self, input: Input, rows: Landed | Channel) -> list[pa.Table]:
        """Return the rows as the stage's function sees them."""
        tables, name, first = [], input.name, len(self._places)
        evaluated = self._by_spark(self._stage, input, rows)
        if evaluated is not None or not isinstance(rows, Landed):
            file = rows.files[0].name if isinstance(rows, Landed) and len(rows.files) == 1 else None
            self._places.append(_Origin(name, file))
            for table in direct_read.tables(rows, _BATCH_ROWS) if evaluated is None else [evaluated]:
                table = _with(table, first, pa.nulls(table.num_rows, pa.int64()))
                tables.append(table if rows.as_seen or evaluated is not None else self._filtered(input, table))
            return tables
        self._places += [_Origin(name, file.name, functools.partial(rows.reader.places, file)) for file in rows.files]
        tracked = rows if rows.tracked else replace(rows, schema=pa.schema([*rows.schema, (ROW, pa.int64())]))
        for number in range(len(rows.files)):
            for table in direct_read.file_tables(tracked, number, _BATCH_ROWS):
                at = pa.array(table.column(ROW).to_numpy() & ((1 << 40) - 1))
                table = table if rows.tracked else table.drop_columns([ROW])
                tables.append(self._filtered(input, _with(table, first + number, at)))
        return tables

    def _filtered(self, input: Input, table: pa.Table) -> pa.Table:
        """Return what the input's where and columns leave, and where each row of it is from."""
        if input.columns and not has_all(input.columns):
            input = replace(input, columns=(*input.columns, _FROM, _AT))
        rows = filtered(self._stage, input, table)
        return rows.select([*(name for name in rows.column_names if name not in (_FROM, _AT)), _FROM, _AT])

    def named(self, table: pa.Table) -> pa.Table:
        """Return rows with the names of the files or messages that they are from."""
        numbers = [place if place is not None else -1 for place in table.column(_FROM).to_pylist()]
        origins = [self._places[number] if number >= 0 else _Origin("") for number in numbers]
        beside = {
            INPUT: pa.array([origin.input for origin in origins], pa.string()),
            FILE: pa.array([origin.file for origin in origins], pa.string()),
            FILE_ROW: table.column(_AT),
        }
        places = {number: origin.places() for number, origin in enumerate(self._places) if number in numbers}
        if any(places.values()):
            at = zip(numbers, table.column(_AT).to_pylist(), strict=True)
            text = [places[number][row] if number >= 0 and places[number] else None for number, row in at]
            beside[PLACE] = pa.array(text, pa.string())
        table = table.drop_columns([name for name in (_FROM, _AT, GROUP) if name in table.column_names])
        for name, column in beside.items():
            table = table.append_column(_beside(name, table.column_names), column)
        return table


@dataclass(frozen=True, slots=True)
class _Origin:
    """The origin of rows.

    Attributes:
        input: The input's name.
        file: The file's or part's; None: it is not known.
        places: Says of each of its rows where people look it up, as `SourceReader.places`.
    """

    input: str
    file: str | None = None
    places: Callable[[], Sequence[str | None]] = tuple


def _parted(given: pa.Table, left: pa.Table) -> tuple[pa.Table, list[pa.RecordBatch]]:
    """Return the rows that were applied, and the batches of all: first one of those, then the rows that were left."""
    seen = frames.from_arrow(frames.canonical(given.select(left.column_names).cast(left.schema)))
    waits = Counter(frames.from_arrow(left).hash_rows().to_list())
    hashes = seen.hash_rows().to_list()
    is_left = np.zeros(len(hashes), bool)
    for row in range(len(hashes) - 1, -1, -1):  # of rows that are the same, the last
        if waits[hashes[row]] > 0:
            waits[hashes[row]] -= 1
            is_left[row] = True
    applied, rest = given.filter(pa.array(~is_left)), given.filter(pa.array(is_left))
    return applied, [*applied.combine_chunks().to_batches(), *rest.combine_chunks().to_batches()]


def _with(table: pa.Table, place: int, at: pa.Array) -> pa.Table:
    places = pa.array(np.full(table.num_rows, place, np.int32))
    return table.append_column(_FROM, places).append_column(_AT, at)


def _idle(task: KeyedTask, subtask: int) -> Ack:
    """Return the ack of a subtask that does not run."""
    base, attempt = task.bases.get(subtask), new_attempt_id()
    nowhere = str(task.work_dir / task.stage.uid / str(subtask) / attempt)
    pending = PendingUpload(base.attempt if base else None, None, (), nowhere)
    return Ack(task.stage.uid, subtask, attempt, task.epoch, task.generation, pending_upload=pending)


def _beside(name: str, columns: Collection[str]) -> str:
    """Return what a column beside a row's own is called, where the row may have one of that name."""
    return f"{name}_" if name in columns else name


def came_from(rows: pl.DataFrame, uid: str) -> pl.DataFrame:
    """Return those of a stage's input rows that came from a stage before it."""
    named = [name for name in (f"{INPUT}_", INPUT) if name in rows.columns]
    return rows.filter(pl.coalesce(named) == uid)


def of_input(stage: Stage, side: int, rows: pa.Table) -> pa.Table:
    """Return those of recorded rows that are of one input, in its own columns."""
    if not stage.is_of_several:
        return rows
    rows = rows.filter(pa.array(rows.column(sides.SIDE).to_numpy() == side)) if rows.num_rows else rows
    if not stage.key:
        return rows.drop_columns([sides.SIDE])
    mark = sides.column(side, "")
    names = dict(zip(stage.key, stage.inputs[side].key, strict=True))
    columns = [name for name in rows.column_names if name in names or name.startswith(mark)]
    of_side = [names.get(name, name.removeprefix(mark)) for name in columns]
    beside = {
        name: there
        for name in _BESIDE
        for there in (name, f"{name}_")
        if there in rows.column_names and there not in columns
    }
    selected = rows.select([*columns, *beside.values()])
    return selected.rename_columns([*of_side, *(_beside(name, of_side) for name in beside)])
