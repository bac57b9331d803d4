"""Small slices without a shuffle: every subtask reads all of the rows and keeps those of its own key groups.

To decode half a million rows takes a subtask some tens of milliseconds; to send them through the JVM, its shuffle and
into Python takes both processors more than half a second. It pays while subtasks are few, since each reads all:
docs/adr/0035-small-slices.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import DISK_FULL, DiskFullError, PipelineError, is_full, plainly
from state_ops.keyed.keyed_state import GROUP
from state_ops.schema.key_groups import key_groups, subtask_of
from state_ops.snapshots.sweep import SORTING
from state_ops.storage.disks import disk
from state_ops.storage.temp_dirs import scratch
from weir import where
from weir.definition import ROW, Source, Stage
from weir.execution.executor import Channel, Landed, Several, staged_tables
from weir.execution.external_sort import in_order
from weir.operators import sides
from weir.sources.slices import WHOLE, Share, position

_MOST_SUBTASKS = 8
_BATCH_BYTES = 64 << 20  # from which on a batch has fewer rows: what a function gets at once has to fit into memory
_MOST_CELLS = 16_000_000  # rows x columns: how much small files may be when they are decoded
# Properties that ask Spark to evaluate a where in another way: rules for types, time zones and errors, or extensions.
_HOW_SPARK_JUDGES = "spark.sql."
_PLAIN = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_date32,
    pa.types.is_timestamp,
    pa.types.is_decimal128,
)


def looked_at(stage: Stage, columns: pa.Schema) -> pa.Schema:
    """Return the columns of a source that a stage looks at."""
    return columns if stage.reads is None else pa.schema([field for field in columns if field.name in stage.reads])


def narrowed(stage: Stage, rows: Landed | Channel) -> Landed | Channel:
    """Return these rows with only the columns that the stage and its where look at, or all where that is not known."""
    reads = frozenset[str]() if stage.columns else stage.reads
    if isinstance(rows, Channel) or reads is None or stage.transform is not None:
        return rows
    try:
        asked = _compile(stage, rows.schema) | reads
    except where.Refused:
        return rows
    fields = [field for field in rows.schema if field.name in asked]
    return replace(rows, schema=pa.schema(fields or [rows.schema.field(0)]))  # without a column there are no rows


def read_by(stages: Iterable[Stage], rows: Landed) -> frozenset[str]:
    """Return the columns of a source's rows that any of these stages reads, or their SQL."""
    lanes = [lane for stage in stages for lane in stage.sides or (stage,)]
    own = [lane for lane in lanes if isinstance(lane.input, Source) and lane.input.name == rows.reader.source.name]
    return frozenset(name for lane in own for name in narrowed(lane, rows).schema.names)


def can_read(stage: Stage, rows: Landed | Channel) -> bool:
    """Return whether tasks can read these rows themselves, exactly as Spark would hand them out.

    Not what Spark has to evaluate (a transform, and what `spark_alone` says of a where), nor nested types.
    """
    if not all(any(plain(type) for plain in _PLAIN) for type in rows.schema.types):
        return False
    if not rows.as_seen and (stage.transform is not None or spark_alone(stage, rows.schema) is not None):
        return False
    return isinstance(rows, Channel) or rows.reader.open_in_workers(rows.files[:1])


def spark_alone(stage: Stage, schema: pa.Schema, conf: Iterable[str] = ()) -> str | None:
    """Return why Spark alone can evaluate the stage's where and columns; None where Python can, or there are none.

    Args:
        schema: The columns of the rows that the stage reads, canonical.
        conf: Names of properties that Spark is given.
    """
    if stage.where is None and not stage.columns:
        return None
    if stage.transform is not None:
        return "a transform comes before it"
    if changing := [name for name in conf if name.startswith(_HOW_SPARK_JUDGES)]:
        return f"spark.conf has {changing[0]}"
    try:
        _compile(stage, schema)
    except where.Refused as error:
        return str(error)
    return None


def check_where(stage: Stage, schema: pa.Schema, conf: Iterable[str] = ()) -> None:
    """Refuse a where or columns that name a column which is not there, before Spark is asked. The arguments are
    `spark_alone`'s.

    Raises:
        PipelineError: The nearest names are in it.
    """
    if stage.transform is not None or any(name.startswith(_HOW_SPARK_JUDGES) for name in conf):
        return
    try:
        _compile(stage, schema)
    except where.NoColumn as error:
        name = error.args[0]
        near = get_close_matches(name, schema.names) or [of for of in schema.names if of.lower() == name.lower()]
        raise PipelineError(
            f"The {stage.sql_named} of {stage.uid} names {name!r}, which is no column of its input.",
            where=f"stage {stage.uid}, {stage.sql_written}",
            next=f"Did you mean {' or '.join(near)}? Capitals count."
            if near
            else f"It has: {', '.join(schema.names)}.",
        ) from error
    except where.Refused:  # Spark says what it is
        return


def _compile(stage: Stage, schema: pa.Schema) -> set[str]:
    """Return the columns that a stage's where and columns name; raises where.Refused if they are Spark's alone."""
    named = set(where.compiled(stage.where, schema).columns) if stage.where is not None else set()
    return named | {*where.projected(stage.columns, schema).columns} if stage.columns else named


def seen(stage: Stage, rows: pa.Table) -> pa.Table:
    """Return what the stage's where keeps of rows, and its columns make of that.

    Raises:
        where.Fails: Spark fails over a row.
        where.Refused: Spark alone can say what it does with a row, or with all of them (`spark_alone`).
    """
    rows = rows if stage.where is None else where.compiled(stage.where, rows.schema).kept(rows)
    return where.projected(stage.columns, rows.schema).of(rows) if stage.columns else rows


def seen_columns(stage: Stage, rows: Landed | Channel) -> pa.Schema:
    """Return the columns of rows as the stage's function sees them, of rows that `can_read`."""
    return rows.schema if rows.as_seen else seen(stage, rows.schema.empty_table()).schema


def as_seen(stage: Stage, rows: Landed | Channel, tables: Iterable[pa.Table]) -> Iterable[pa.Table]:
    """Return what the stage's function sees of these tables, which are read from `rows`; raises as `seen`."""
    return tables if rows.as_seen else (seen(stage, table) for table in tables)


def is_small(rows: Landed | Channel, parallelism: int, most_bytes: int) -> bool:
    """Return whether the rows are so few that each subtask may read all of them."""
    if parallelism > _MOST_SUBTASKS or sum(file.rows or 0 for file in rows.files) * len(rows.schema) > _MOST_CELLS:
        return False
    if isinstance(rows, Channel):
        return sum(file.bytes for file in rows.files) <= most_bytes
    return sum(file.size for file in rows.files) <= most_bytes and rows.reader.open_in_workers(rows.files)


def own_batches(
    stage: Stage,
    rows: Landed | Channel | Several,
    subtask: int,
    parallelism: int,
    max_parallelism: int,
    batch_rows: int,
    work_dir: Path,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one subtask's key groups with their group, as `in_batches`.

    Raises InputError for a file that is gone or damaged, TransientError if storage fails, and as `seen`.
    """

    def own(lane: Stage, part: Landed | Channel) -> Iterator[pa.Table]:
        for table in as_seen(lane, part, tables(part, batch_rows)):
            yield _rows_of_subtask(lane, table, subtask, parallelism, max_parallelism)

    return in_batches(stage, of_inputs(stage, rows, own), batch_rows, work_dir)


def of_inputs(
    stage: Stage,
    rows: Landed | Channel | Several,
    read: Callable[[Stage, Landed | Channel], Iterable[pa.Table]],
) -> Iterable[pa.Table]:
    """Return the rows of a stage's input as its operator gets them; of several inputs, in the columns that they have
    together.

    Args:
        read: Gives the rows of one input, for the stage as one that reads it alone.
    """
    if not isinstance(rows, Several):
        return read(stage, rows)
    return (
        sides.widened(stage, side, table, rows.schema)
        for side, part in rows.parts
        for table in read(stage.sides[side], part)
    )


def _rows_of_subtask(stage: Stage, rows: pa.Table, subtask: int, parallelism: int, max_parallelism: int) -> pa.Table:
    rows, owners = with_owners(stage, rows, parallelism, max_parallelism)
    return rows.filter(pa.array(owners == subtask))


def with_owners(stage: Stage, rows: pa.Table, parallelism: int, max_parallelism: int) -> tuple[pa.Table, np.ndarray]:
    """Return the rows with their key group as the first column, and int64[n], the subtask that owns each."""
    groups = key_groups([rows.column(name) for name in stage.key], max_parallelism)
    rows = rows.add_column(0, GROUP, pa.array(groups.astype(np.int32)))
    return rows, subtask_of(groups, parallelism, max_parallelism)


def with_group(columns: pa.Schema) -> pa.Schema:
    """Return the columns of rows that have their key group."""
    return pa.schema([(GROUP, pa.int32()), *columns])


def tables(rows: Landed | Channel, batch_rows: int) -> Iterator[pa.Table]:
    """Yield all rows, in the files' order, with their positions where these are asked for; raises as `own_batches`."""
    for number in range(len(rows.files)):
        yield from file_tables(rows, number, batch_rows)


def file_tables(rows: Landed | Channel, number: int, batch_rows: int, share: Share = WHOLE) -> Iterator[pa.Table]:
    """Yield the tables of one file of a slice, by its number in the slice.

    Args:
        share: Of a file of a source, which of its rows.
    """
    if isinstance(rows, Channel):
        for table in staged_tables(rows.storage, rows.files[number], rows.schema.names, batch_rows):
            yield frames.canonical(table).cast(rows.schema)
        return
    stored = pa.schema([field for field in rows.schema if field.name != ROW])
    begin, end = position(number, 0), position(number + 1, 0)
    without = np.array([place - begin for place in rows.left_out if begin <= place < end], np.int64)
    for numbers, table in rows.reader.batches(rows.files[number], stored, batch_rows, share, without):
        if rows.tracked:
            table = table.append_column(ROW, pa.array(begin + numbers))
        yield table.select(rows.schema.names)


def in_batches(stage: Stage, tables: Iterable[pa.Table], batch_rows: int, work_dir: Path) -> Iterator[pa.RecordBatch]:
    """Yield a subtask's rows in the stage's order, in batches of so many rows, or fewer where they are wide, and a last
    one.

    Args:
        work_dir: Where rows are sorted that are too many for memory.

    Raises:
        DiskFullError: They do not fit there.
    """
    if not stage.order_by:
        yield from packed(tables, batch_rows)
        return
    with scratch(work_dir, SORTING) as directory:
        try:
            yield from packed(in_order(tables, [*stage.key, *stage.order_by], directory), batch_rows)
        except OSError as error:
            if not is_full(error):
                raise
            raise DiskFullError(  # here, where it is still full: the directory goes at once
                f"The rows of a subtask do not fit on its local disk, where they are sorted: {plainly(error)}",
                where=f"stage {stage.uid}; {disk(directory)} (local.work_dir)",
                next=f"Make room on that disk: {DISK_FULL}. With a higher spark.parallelism a subtask sorts fewer rows."
                " The epoch was declined, and nothing of it was applied.",
            ) from error


def packed(tables: Iterable[pa.Table], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield rows in batches of so many, fewer if they are wide, and a last one."""
    waiting: list[pa.Table] = []
    count = size = 0
    for table in tables:
        waiting.append(table)
        count, size = count + table.num_rows, size + table.nbytes
        if count >= batch_rows or size >= _BATCH_BYTES:
            whole = pa.concat_tables(waiting).combine_chunks()
            full = count if size >= _BATCH_BYTES else count // batch_rows * batch_rows
            yield from whole.slice(0, full).to_batches(max_chunksize=batch_rows)
            waiting = [whole.slice(full)]
            count, size = count - full, waiting[0].nbytes
    if count:
        yield from pa.concat_tables(waiting).combine_chunks().to_batches(max_chunksize=batch_rows)
