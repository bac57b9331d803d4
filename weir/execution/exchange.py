"""Rows to the subtasks of their keys in columns: Spark's shuffle moves blocks of them instead of rows.

    map task: tables -> rows by owner -> one block a subtask (an Arrow batch) -> shuffle -> subtask: blocks opened

A map task reads files of the slice by itself, or gets the rows that Spark has filtered. It stays Spark's shuffle, with
its spilling, retries and hosts; only what it moves is columnar: docs/adr/0071-blocks-of-columns.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from state_ops.records.snapshot_files import StagedFile, StateFile
from weir import where
from weir.definition import Input, Stage
from weir.execution import direct_read
from weir.execution.executor import Channel, InputRows, Landed
from weir.sources.slices import Share, SourceFile

SCHEMA = "subtask int, side int, block binary"
"""What map tasks hand to Spark, as it writes the schema: blocks, each of one input's rows for one subtask."""

_COLUMNS = ["subtask", "side", "block"]

DIRECT, FILES, CUT, ROWS = "direct", "files", "cut", "rows"
"""How rows reach their subtasks: each subtask reads all and keeps its own; map tasks read files into blocks; map tasks
cut what Spark has read into blocks; Spark shuffles rows."""

STAGED = "-staged"
"""What follows FILES or CUT where the blocks go through storage instead of Spark's shuffle."""

AUTO, BLOCKS = "auto", "blocks"  # of the setting, beside ROWS

# Bytes of a row, about, up to which blocks cost less than Spark's own rows; and where Spark would have to sort these as
# well: measured, see benchmarks/results/exchange.md.
_MOST_WIDTH = {FILES: (256, 640), CUT: (96, 256)}
_TEXT = 16  # bytes of a value, if nothing is known of it
_CUT_ROWS, _ROWS_A_BLOCK = 32_768, 1_024
_CUT_BYTES = 8 << 20
_READ_ROWS = 8_192
_LEAST_SHARE, _MOST_SHARE = 1 << 20, 32 << 20  # bytes of a file, as it is stored


Pieces = Sequence[tuple[int, Share]]
"""What one map task reads: numbers of files in the slice, and which of their rows."""


def chosen(
    stage: Stage,
    input: Input,
    rows: Landed | Channel,
    parallelism: int,
    direct_bytes: int,
    setting: str,
    *,
    by_python: bool,
) -> str:
    """Return how rows reach their subtasks; CUT stands for ROWS as well, until `is_narrow` tells.

    Args:
        direct_bytes: Up to how many bytes of files each subtask reads all.
        setting: AUTO, BLOCKS or ROWS.
        by_python: Whether tasks may read files without Spark.
    """
    if not stage.key:  # there is no exchange: rows stay with who reads them
        return DIRECT if by_python and direct_read.can_read(input, rows) else ROWS
    if by_python and direct_read.can_read(input, rows):
        if direct_read.is_small(rows, parallelism, direct_bytes):
            return DIRECT
        columns = direct_read.seen_columns(input, rows)
        if setting == BLOCKS or (setting == AUTO and is_narrow(stage, rows, columns, FILES)):
            return FILES
    return ROWS if setting == ROWS else CUT


def is_narrow(stage: Stage, rows: Landed | Channel, columns: pa.Schema, way: str = CUT) -> bool:
    """Return whether rows are so narrow that blocks of them cost less than Spark's rows.

    Args:
        rows: What they are read from.
        columns: What they are then.
        way: FILES or CUT, the latter of rows that leave the JVM for it and come back.
    """
    count = sum(file.rows or 0 for file in rows.files)
    stored = sum(stored_bytes(file) for file in rows.files)
    varying = [type for type in columns.types if not _is_fixed(type)]
    width = sum(max(type.bit_width // 8, 1) for type in columns.types if _is_fixed(type))
    if varying:
        width += max(stored // count if count else 0, _TEXT * len(varying))
    return bool(width <= _MOST_WIDTH[way][bool(stage.order_by)])


def stored_bytes(file: SourceFile | StagedFile | StateFile) -> int:
    """Return the stored size of a file, without columns that nobody reads where that is known."""
    return file.stored_bytes if isinstance(file, SourceFile) else file.bytes


def _rows_at_once(file: SourceFile | StagedFile | StateFile) -> int:
    """Return how many rows of a file are read at once.

    It is fewer of wide rows, so that a batch of them fits into memory.
    """
    return min(_READ_ROWS, max(1, _CUT_BYTES * (file.rows or 0) // max(1, stored_bytes(file))))


def _is_fixed(type: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(type) or pa.types.is_decimal(type))


def pieces(rows: Landed | Channel, tasks: int) -> list[Pieces]:
    """Return what each map task reads: neighbours in the slice's order, about as many bytes for each; fewer tasks than
    `tasks` where there is not so much."""
    sizes = [stored_bytes(file) for file in rows.files]
    most = min(max(sum(sizes) // (2 * tasks), _LEAST_SHARE), _MOST_SHARE)
    parts = [max(1, -(-size // most)) if isinstance(rows, Landed) else 1 for size in sizes]
    every = [(file, Share(part, count)) for file, count in enumerate(parts) for part in range(count)]
    weights = np.array([sizes[file] / share.parts + 1 for file, share in every])
    middle = np.cumsum(weights) - weights / 2
    task_of = (middle * min(tasks, len(every)) / weights.sum()).astype(int)
    by_task = [[piece for piece, at in zip(every, task_of, strict=True) if at == task] for task in range(tasks)]
    return [some for some in by_task if some]


def own_share(
    stage: Stage, rows: InputRows, subtask: int, parallelism: int, batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that one subtask of a stage without a key reads: its share of the files. Raises as
    `direct_read.own_batches`."""

    def own(input: Input, part: Landed | Channel) -> Iterable[pa.Table]:
        shares = pieces(part, parallelism)
        read = shares[subtask] if subtask < len(shares) else ()
        tables = (table for file, share in read for table in direct_read.file_tables(part, file, batch_rows, share))
        return direct_read.as_seen(input, part, tables)

    return direct_read.packed(direct_read.of_inputs(stage, rows, own), batch_rows)


def read_blocks(
    input: Input,
    rows: Landed | Channel,
    read: Pieces,
    parallelism: int,
    max_parallelism: int,
    side: int = 0,
) -> Iterator[pa.RecordBatch]:
    """Yield what one map task reads, as `SCHEMA` says; raises InputError and TransientError as
    `direct_read.own_batches`. Where the stage's where cannot be evaluated for a row, a block is null and the last one.
    """
    tables = (
        table
        for file, share in read
        for table in direct_read.file_tables(rows, file, _rows_at_once(rows.files[file]), share)
    )
    try:
        yield from cut(input, direct_read.as_seen(input, rows, tables), parallelism, max_parallelism, side)
    except (where.Fails, where.Refused):
        nothing = pa.array([0], pa.int32())
        yield pa.RecordBatch.from_arrays([nothing, nothing, pa.nulls(1, pa.binary())], _COLUMNS)


def cut(
    input: Input, tables: Iterable[pa.Table], parallelism: int, max_parallelism: int, side: int = 0
) -> Iterator[pa.RecordBatch]:
    """Yield rows as blocks, one for each subtask that has some of what is cut at once. side: of which input they
    are."""
    waiting: list[pa.Table] = []
    count = size = 0
    for table in (part for whole in tables for part in _small(whole)):
        waiting.append(table)
        count, size = count + table.num_rows, size + table.nbytes
        if count >= max(_CUT_ROWS, _ROWS_A_BLOCK * parallelism) or size >= _CUT_BYTES:
            yield from _blocks(input, pa.concat_tables(waiting), parallelism, max_parallelism, side)
            waiting, count, size = [], 0, 0
    if waiting:
        yield from _blocks(input, pa.concat_tables(waiting), parallelism, max_parallelism, side)


def _small(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield rows in parts of as many bytes as are cut at once, however wide some of them are."""
    if rows.nbytes <= _CUT_BYTES or rows.num_rows == 1:
        yield rows
    else:
        half = rows.num_rows // 2
        yield from _small(rows.slice(0, half))
        yield from _small(rows.slice(half))


def _blocks(
    input: Input, rows: pa.Table, parallelism: int, max_parallelism: int, side: int
) -> Iterator[pa.RecordBatch]:
    if not rows.num_rows:
        return
    rows, owners = direct_read.with_owners(input.key, rows, parallelism, max_parallelism)
    order = np.argsort(owners.astype(np.uint16), kind="stable")
    (batch,) = rows.take(pa.array(order)).combine_chunks().to_batches()
    ends = np.searchsorted(owners[order], np.arange(parallelism + 1))
    subtasks = np.flatnonzero(np.diff(ends))
    stream, offsets = pa.BufferOutputStream(), [0]
    for subtask in subtasks:
        stream.write(batch.slice(ends[subtask], ends[subtask + 1] - ends[subtask]).serialize())
        offsets.append(stream.tell())
    buffers = [None, pa.py_buffer(np.array(offsets, np.int32)), stream.getvalue()]
    blocks = pa.Array.from_buffers(pa.binary(), len(subtasks), buffers)
    sides = pa.array(np.full(len(subtasks), side, np.int32))
    yield pa.RecordBatch.from_arrays([pa.array(subtasks.astype(np.int32)), sides, blocks], _COLUMNS)


def opened(blocks: Iterable[pa.RecordBatch], columns: Sequence[pa.Schema]) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of blocks with the number of their input, their key group as the first column.

    Args:
        columns: By input, the others.

    Raises:
        where.Refused: A block is null.
    """
    schemas = block_schemas(columns)
    for batch in blocks:
        for side, block in zip(batch.column("side").to_pylist(), batch.column("block"), strict=True):
            if not block.is_valid:
                raise where.Refused("a map task has met a row that Spark alone can judge")
            yield side, opened_block(block.as_buffer(), schemas[side])


def block_schemas(columns: Sequence[pa.Schema]) -> list[pa.Schema]:
    """Return by input the schema of its blocks.

    The given columns are those without the key group.
    """
    return [direct_read.with_group(of) for of in columns]


def opened_block(block: pa.Buffer, schema: pa.Schema) -> pa.Table:
    """Return the rows of one block, a view of it."""
    return pa.Table.from_batches([pa.ipc.read_record_batch(block, schema)])
