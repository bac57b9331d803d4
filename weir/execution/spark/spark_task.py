"""The Python of a Spark task: the keyed task of the subtask that has its partition's number."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow import frames
from state_ops.errors import ConfigurationError, WeirError, from_report, to_report
from state_ops.keyed.keyed_state import GROUP
from state_ops.schema.key_groups import group_range
from state_ops.storage.storage import Storage
from weir import where
from weir.definition import Input
from weir.execution import direct_read, exchange, staged_blocks
from weir.execution.exchange import Pieces
from weir.execution.executor import Channel, InputRows, Landed
from weir.execution.spark.imports import load_pyspark
from weir.execution.staged_blocks import Extent
from weir.operators import sides
from weir.task import run_task
from weir.task.run_task import KeyedTask

if TYPE_CHECKING:
    from pyspark import TaskContext
    from pyspark.sql import Row

_TOLD = "<weir-error>"


def with_rows(task: KeyedTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one subtask, as Spark has routed them, to its ack (JSON), as one row with Spark's numbers of
    the stage and the task. The ack is null where the stage's where cannot be evaluated for a row but by Spark."""
    subtask = _context().partitionId()
    yield _acked(task, subtask, _routed(task, subtask, batches) if task.stage.key else batches, exchange.ROWS)


def with_blocks(
    task: KeyedTask,
    columns: Sequence[pa.Schema],
    whole: pa.Schema,
    batch_rows: int,
    way: str,
    blocks: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Yield the acks of the subtask for rows that come in blocks.

    Args:
        columns: Theirs by input, without the key group.
        whole: The columns that rows of all inputs have together.
    """
    yield _acked_blocks(task, whole, batch_rows, way, exchange.opened(blocks, columns))


def reading_blocks(
    task: KeyedTask, extents: Mapping[int, Sequence[Extent]], columns: Sequence[pa.Schema], whole: pa.Schema,
    batch_rows: int, way: str, numbers: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Yield the acks of the subtask for blocks that are in storage.

    Args:
        extents: By subtask, where its blocks are.
        numbers: As in `reading_rows`.
    """
    for _ in numbers:
        pass
    mine = extents.get(_context().partitionId(), ())
    opened = staged_blocks.opened(task.storage, mine, columns, task.seconds)
    yield _acked_blocks(task, whole, batch_rows, way, opened)


def _acked_blocks(
    task: KeyedTask,
    whole: pa.Schema,
    batch_rows: int,
    way: str,
    opened: Iterator[tuple[int, pa.Table]],
) -> pa.RecordBatch:
    subtask = _context().partitionId()
    tables = (sides.widened(task.stage, side, rows, whole) for side, rows in opened)
    batches = direct_read.in_batches(task.stage, tables, batch_rows, task.work_dir)
    return _acked(task, subtask, _routed(task, subtask, batches), way)


def reading_rows(
    task: KeyedTask, rows: InputRows | None, batch_rows: int, numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the acks of the subtask for rows that it reads by itself, or for none.

    They are read all the same: Spark ends a worker that leaves some of its input, and the next epoch would wait for
    another.

    Args:
        numbers: What made Spark start the tasks.
    """
    for _ in numbers:
        pass
    subtask, batches = _context().partitionId(), iter(())
    if rows is not None and not task.stage.key:
        batches = exchange.own_share(task.stage, rows, subtask, task.parallelism, batch_rows)
    elif rows is not None:
        batches = direct_read.own_batches(
            task.stage, rows, subtask, task.parallelism, task.max_parallelism, batch_rows, task.work_dir
        )
    yield _acked(task, subtask, batches, exchange.DIRECT if rows is not None else None)


def as_rows(acked: Iterator[pa.RecordBatch]) -> Iterator[Row]:
    """Acks as tasks of an RDD hand them over."""
    load_pyspark()
    from pyspark.sql import Row

    for batch in acked:
        yield from (Row(**ack) for ack in batch.to_pylist())


def read_blocks(
    input: Input, rows: Landed | Channel, pieces: Sequence[Pieces], layout: tuple[int, int, int],
    tasks: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Yield the blocks of what map tasks read, whose numbers stand in the batches of `tasks`.

    Args:
        layout: The parallelism, the greatest one, and the number of the input.
    """
    with _telling():
        for batch in tasks:
            for task in batch.column(0).to_pylist():
                yield from exchange.read_blocks(input, rows, pieces[task], *layout)


def cut_blocks(
    input: Input, layout: tuple[int, int, int], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the blocks of rows that Spark has read; as `read_blocks`."""
    with _telling():
        yield from exchange.cut(input, (frames.canonical(pa.Table.from_batches([batch])) for batch in batches), *layout)


def staging(
    storage: Storage, place: str, cut: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Put the blocks of a map task into storage, and hand on what `staged_blocks.SCHEMA` says.

    Args:
        place: As `staged_blocks.put` has it.
        cut: Gives the blocks of what the task gets.
    """
    with _telling():
        staged = staged_blocks.put(storage, place, _context().partitionId(), cut(batches))
        for _ in batches:  # as in `reading_rows`
            pass
    yield pa.RecordBatch.from_arrays([pa.array([staged], pa.string())], ["staged"])


def landed_rows(
    rows: Landed, pieces: Sequence[Pieces], batch_rows: int, tasks: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of some pieces of a slice's files, whose numbers in `pieces` stand in the batches of `tasks`."""
    with _telling():
        for batch in tasks:
            for task in batch.column(0).to_pylist():
                for file, share in pieces[task]:
                    for table in direct_read.file_tables(rows, file, batch_rows, share):
                        yield from table.combine_chunks().to_batches(max_chunksize=batch_rows)


@contextmanager
def _telling() -> Iterator[None]:
    """Let an error of ours be told by the text of what Spark raises: it tells of an exception by nothing else."""
    try:
        yield
    except WeirError as error:
        raise RuntimeError(f"{_TOLD}{json.dumps(to_report(error))}{_TOLD}") from error


def error_told(text: str) -> WeirError | None:
    """Return the error of a task in the text of what Spark raises; None if there is none."""
    _, mark, rest = text.partition(_TOLD)
    return from_report(json.loads(rest.partition(_TOLD)[0])) if mark else None


def _context() -> TaskContext:
    load_pyspark()
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "it runs in a Spark task"
    return context


def _acked(task: KeyedTask, subtask: int, batches: Iterator[pa.RecordBatch], way: str | None) -> pa.RecordBatch:
    unjudged: list[Exception] = []
    ack = run_task.run(task, subtask, _judged(batches, unjudged))
    ack = replace(ack, request_counts=task.storage.request_counts.take(), exchange=way)
    _settle()
    context = _context()
    numbers = {"stage": context.stageId(), "subtask": subtask, "task": context.taskAttemptId()}
    acks = pa.array([None if unjudged else ack.to_json()], pa.string())
    return pa.RecordBatch.from_pydict({"ack": acks, **{name: [number] for name, number in numbers.items()}})


def _judged(batches: Iterator[pa.RecordBatch], unjudged: list[Exception]) -> Iterator[pa.RecordBatch]:
    """Yield the batches; notes why there are no more of them where the stage's where cannot be evaluated for a row."""
    try:
        yield from batches
    except (where.Fails, where.Refused) as error:
        unjudged.append(error)
        raise


def _routed(task: KeyedTask, subtask: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches, none with a row of another subtask: state written for it here would never be found again.

    Raises ConfigurationError: that a partition's number is its subtask's holds as long as nothing changes Spark's plan,
    as adaptive execution does, which joins small partitions.
    """
    groups = group_range(subtask, task.parallelism, task.max_parallelism)
    for batch in batches:
        if batch.num_rows:
            ends = pc.min_max(batch.column(GROUP))
            low, high = ends["min"].as_py(), ends["max"].as_py()
            if low not in groups or high not in groups:
                raise ConfigurationError(
                    f"Spark gave the partition {subtask} rows of the key groups {low} to {high}, but that subtask owns"
                    f" {groups.start} to {groups.stop - 1}: it has changed the partitions of the shuffle.",
                    where=f"stage {task.stage.uid}, epoch {task.epoch}, subtask {subtask}",
                    next="Take out of spark.conf what changes plans (spark.sql.adaptive.*, spark.sql.extensions);"
                    " nothing of this epoch was applied.",
                )
        yield batch


@functools.cache
def _settle() -> None:
    """Once in a process: leave what it has by now, modules above all, out of all further garbage collections.

    Spark's daemon has a worker collect everything after each task (`pyspark/daemon.py`), which takes 50 to 80 ms for
    this many objects, and the next task waits for it.
    """
    gc.collect()  # what is frozen is never collected
    gc.freeze()
