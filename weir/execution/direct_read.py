"""Small slices without a shuffle: every subtask reads all of the rows and keeps those of its own key groups.

To decode half a million rows takes a subtask some tens of milliseconds; to send them through the JVM, its shuffle and
into Python takes both processors more than half a second. It pays while subtasks are few, since each reads all:
docs/adr/0035-small-slices.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from weir.definition import ROW, Input, Source, Stage
from weir.execution.executor import Channel, InputRows, Landed, staged_tables
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
    """Return the columns of an input that a stage looks at."""
    return columns if stage.reads is None else pa.schema([field for field in columns if field.name in stage.reads])


def narrowed(stage: Stage, input: Input, rows: Landed | Channel) -> Landed | Channel:
    """Return rows of an input with only the columns that the stage and its where look at, or all where that is not
    known."""
    reads = frozenset[str]() if input.columns else stage.reads
    if isinstance(rows, Channel) or reads is None or input.transform is not None:
        return rows
    try:
        asked = _compile(input, rows.schema) | reads
    except where.Refused:
        return rows
    fields = [field for field in rows.schema if field.name in asked]
    return replace(rows, schema=pa.schema(fields or [rows.schema.field(0)]))  # without a column there are no rows


def read_by(stages: Iterable[Stage], rows: Landed) -> frozenset[str]:
    """Return the columns of a source's rows that any of these stages reads, or their SQL."""
    source = rows.reader.source.name
    inputs = [(stage, input) for stage in stages for input in stage.inputs if isinstance(input.origin, Source)]
    own = [narrowed(stage, input, rows) for stage, input in inputs if input.name == source]
    return frozenset(name for narrow in own for name in narrow.schema.names)


def can_read(input: Input, rows: Landed | Channel) -> bool:
    """Return whether tasks can read these rows themselves, exactly as Spark would hand them out.

    Not what Spark has to evaluate (a transform, and what `spark_alone` says of a where), nor nested types.
    """
    if not all(any(plain(type) for plain in _PLAIN) for type in rows.schema.types):
        return False
    if not rows.as_seen and (input.transform is not None or spark_alone(input, rows.schema) is not None):
        return False
    return isinstance(rows, Channel) or rows.reader.open_in_workers(rows.files[:1])


def spark_alone(input: Input, schema: pa.Schema, conf: Iterable[str] = ()) -> str | None:
    """Return why Spark alone can evaluate an input's where and columns; None where Python can, or there are none.

    Args:
        schema: The columns of the rows that are read, canonical.
        conf: Names of properties that Spark is given.
    """
    if input.where is None and not input.columns:
        return None
    if input.transform is not None:
        return "a transform comes before it"
    if changing := [name for name in conf if name.startswith(_HOW_SPARK_JUDGES)]:
        return f"spark.conf has {changing[0]}"
    try:
        _compile(input, schema)
    except where.Refused as error:
        return str(error)
    return None


def check_where(stage: Stage, input: Input, schema: pa.Schema, conf: Iterable[str] = ()) -> None:
    """Refuse a where or columns that name a column which is not there, before Spark is asked. The other arguments are
    `spark_alone`'s.

    Raises:
        PipelineError: The nearest names are in it.
    """
    if input.transform is not None or any(name.startswith(_HOW_SPARK_JUDGES) for name in conf):
        return
    try:
        _compile(input, schema)
    except where.NoColumn as error:
        name = error.args[0]
        near = get_close_matches(name, schema.names) or [of for of in schema.names if of.lower() == name.lower()]
        raise PipelineError(
            f"The {input.sql_named} of {stage.uid} names {name!r}, which is no column of its input.",
            where=f"stage {stage.uid}, {input.sql_written}",
            next=f"Did you mean {' or '.join(near)}? Capitals count."
            if near
            else f"It has: {', '.join(schema.names)}.",
        ) from error
    except where.Refused:  # Spark says what it is
        return


def _compile(input: Input, schema: pa.Schema) -> set[str]:
    """Return the columns that an input's where and columns name; raises where.Refused if they are Spark's alone."""
    named = set(where.compiled(input.where, schema).columns) if input.where is not None else set()
    return named | {*where.projected(input.columns, schema).columns} if input.columns else named


def seen(input: Input, rows: pa.Table) -> pa.Table:
    """Return what the input's where keeps of rows, and its columns make of that.

    Raises:
        where.Fails: Spark fails over a row.
        where.Refused: Spark alone can say what it does with a row, or with all of them (`spark_alone`).
    """
    rows = rows if input.where is None else where.compiled(input.where, rows.schema).kept(rows)
    return where.projected(input.columns, rows.schema).of(rows) if input.columns else rows


def seen_columns(input: Input, rows: Landed | Channel) -> pa.Schema:
    """Return the columns of rows as the stage's function sees them, of rows that `can_read`."""
    return rows.schema if rows.as_seen else seen(input, rows.schema.empty_table()).schema


def as_seen(input: Input, rows: Landed | Channel, tables: Iterable[pa.Table]) -> Iterable[pa.Table]:
    """Return what the stage's function sees of these tables, which are read from `rows`; raises as `seen`."""
    return tables if rows.as_seen else (seen(input, table) for table in tables)


def is_small(rows: Landed | Channel, parallelism: int, most_bytes: int) -> bool:
    """Return whether the rows are so few that each subtask may read all of them."""
    if parallelism > _MOST_SUBTASKS or sum(file.rows or 0 for file in rows.files) * len(rows.schema) > _MOST_CELLS:
        return False
    if isinstance(rows, Channel):
        return sum(file.bytes for file in rows.files) <= most_bytes
    return sum(file.size for file in rows.files) <= most_bytes and rows.reader.open_in_workers(rows.files)


def own_batches(
    stage: Stage,
    rows: InputRows,
    subtask: int,
    parallelism: int,
    max_parallelism: int,
    batch_rows: int,
    work_dir: Path,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one subtask's key groups with their group, as `in_batches`.

    Raises InputError for a file that is gone or damaged, TransientError if storage fails, and as `seen`.
    """

    def own(input: Input, part: Landed | Channel) -> Iterator[pa.Table]:
        for table in as_seen(input, part, tables(part, batch_rows)):
            grouped, owners = with_owners(input.key, table, parallelism, max_parallelism)
            yield grouped.filter(pa.array(owners == subtask))

    return in_batches(stage, of_inputs(stage, rows, own), batch_rows, work_dir)


def of_inputs(
    stage: Stage,
    rows: InputRows,
    read: Callable[[Input, Landed | Channel], Iterable[pa.Table]],
) -> Iterable[pa.Table]:
    """Return the rows of a stage's inputs as its operator gets them, in the columns that they have together.

    Args:
        read: Gives the rows of one input.
    """
    return (
        sides.widened(stage, side, table, rows.schema)
        for side, part in rows.parts
        for table in read(stage.inputs[side], part)
    )


def with_owners(
    key: Sequence[str], rows: pa.Table, parallelism: int, max_parallelism: int
) -> tuple[pa.Table, np.ndarray]:
    """Return the rows with their key group as the first column, and int64[n], the subtask that owns each."""
    groups = key_groups([rows.column(name) for name in key], max_parallelism)
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
