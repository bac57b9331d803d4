"""Rows in a stage's order, on the local disk where they are more than memory may hold.

    tables -> sorted runs (files) -> ranges of the order, by samples of the runs -> one range after the other, sorted

A range is a part of each run, so it is read from them as it lies. Rows that are equal in all columns of the order need
no sorting, so however many of one value there are, memory holds no more than a range (distribution by regular samples:
Shi and Schaeffer, Parallel Sorting by Regular Sampling, 1992).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from weir.execution.row_order import ordered

MOST_BYTES = 64 << 20  # of rows that a subtask sorts in memory
_SAMPLES = 4  # of each run for each range
_BATCH_ROWS = 16_384


def in_order(
    tables: Iterable[pa.Table], columns: Sequence[str], directory: Path, most_bytes: int = MOST_BYTES
) -> Iterator[pa.Table]:
    """Yield all rows in Spark's order of some columns; rows that tie stay as they came.

    Args:
        tables: All of one schema.
        columns: By which the rows are ordered.
        directory: An empty one, for files that are gone afterwards.
        most_bytes: How much is sorted at once.

    Raises:
        OSError: The disk is full.
    """
    runs: list[Path] = []
    waiting: list[pa.Table] = []
    size = total = 0
    for table in tables:
        waiting.append(table)
        size += table.nbytes
        if size > most_bytes:
            runs.append(_write(_sorted(waiting, columns), directory / f"{len(runs)}.arrow"))
            size, total = 0, total + size
    if waiting and not runs:
        yield _sorted(waiting, columns)
    elif runs:
        if waiting:
            runs.append(_write(_sorted(waiting, columns), directory / f"{len(runs)}.arrow"))
        yield from _merged(runs, columns, ranges=-(-2 * (total + size) // most_bytes))
    for run in runs:
        run.unlink()


def _sorted(tables: list[pa.Table], columns: Sequence[str]) -> pa.Table:
    """Sort rows, whose tables are given up, so that one copy at a time is in memory."""
    whole = pa.concat_tables(tables)
    tables.clear()
    return whole.take(ordered(whole, columns))


def _write(rows: pa.Table, file: Path) -> Path:
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_file(stream, rows.schema) as writer:
        writer.write_table(rows, _BATCH_ROWS)
    return file


def _read(file: Path) -> pa.Table:
    """Return a run, of which no more is in memory than somebody looks at."""
    with pa.memory_map(str(file)) as stream, pa.ipc.open_file(stream) as reader:
        return reader.read_all()


def _merged(runs: Sequence[Path], columns: Sequence[str], ranges: int) -> Iterator[pa.Table]:
    """Yield the rows of sorted runs in order, a range at a time."""
    sampled = pa.concat_tables([_sample(_read(run).select(columns), _SAMPLES * ranges) for run in runs])
    sampled = sampled.take(ordered(sampled, columns))
    splitters = _sample(sampled, ranges)
    ends = [_ends(_read(run).select(columns), splitters, columns) for run in runs]
    for number in range(len(ends[0]) - 1):
        parts = [_read(run).slice(at[number], at[number + 1] - at[number]) for run, at in zip(runs, ends, strict=True)]
        if number % 2:  # all of them are equal to a splitter
            yield from (part for part in parts if part.num_rows)
        elif any(part.num_rows for part in parts):
            yield _sorted(parts, columns)


def _sample(rows: pa.Table, count: int) -> pa.Table:
    """So many rows at most, evenly spaced, none of them the first."""
    return rows.take(np.unique(np.arange(1, count) * rows.num_rows // count)) if rows.num_rows else rows


def _ends(run: pa.Table, splitters: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Return int64[2s + 2], the bounds of the ranges of a run.

    They are: before the first splitter, the rows equal to it, between it and the second, and so on.
    """
    count, rows = splitters.num_rows, run.num_rows
    order = ordered(pa.concat_tables([splitters, run, splitters]), columns)  # equal rows stay in this order
    before = np.cumsum((order >= count) & (order < count + rows))
    place = np.empty(len(order), np.int64)
    place[order] = before
    ends = np.empty(2 * count + 2, np.int64)
    ends[0], ends[-1] = 0, rows
    ends[1:-1:2], ends[2:-1:2] = place[:count], place[count + rows :]
    return np.maximum.accumulate(ends)  # two splitters may be equal
