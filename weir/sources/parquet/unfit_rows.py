"""Which rows of a slice's Parquet files have values that cannot be handed on: looked for once an epoch has met one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from state_ops.errors import InputError
from weir.connectors.parquet.rows import NO_ROWS
from weir.sources.parquet.parquet_files import ParquetFiles
from weir.sources.slices import BadRow, Slice, SourceFile

MOST_ROWS = 10_000  # of a slice: each of them stands in the checkpoint's row
_LOOKED_AT = 1 << 16  # rows at a time


def of_file(
    parquet: ParquetFiles, file: SourceFile, names: Sequence[str], most: int, without: np.ndarray = NO_ROWS
) -> list[BadRow]:
    """Return the rows of a file of which one of these columns cannot be handed on; none where there are more than
    `most`. Raises InputError for a file that cannot be read."""
    bad = list[BadRow]()
    for part in parquet.rows(file, names, _LOOKED_AT, without=without):
        bad += [BadRow(file.name, value.row, value.reason, None) for value in part.bad]
        if len(bad) > most:
            return []
    return bad


def of_slice(parquet: ParquetFiles, planned: Slice, blamed: SourceFile, read: Collection[str] | None) -> list[BadRow]:
    """Return the bad rows of a slice that are not known yet; none where the file that is to blame cannot be read, or
    has too many: then it is bad as a whole.

    Args:
        read: The columns that are looked at. None: all.
    """
    found, known = list[BadRow](), planned.without
    for file in sorted(planned.files, key=lambda file: file.name != blamed.name):
        names = [name for name in _stored(planned, file) if read is None or name in read]
        room = MOST_ROWS - len(planned.bad_rows) - len(found)
        try:
            more = of_file(parquet, file, names, room, known.get(file.name, NO_ROWS))
        except InputError:  # whoever reads that one says so
            more = []
        if not more and file.name == blamed.name:
            return []
        found += more
    return found


def again(parquet: ParquetFiles, planned: Slice, numbers: Mapping[str, Sequence[int]]) -> Iterator[BadRow]:
    """Yield the bad rows of a slice that was. numbers: by file, those that it has recorded."""
    for file in planned.files:
        if of_it := numbers.get(file.name, ()):
            found = {row.row: row for row in of_file(parquet, file, _stored(planned, file), file.rows)}
            yield from (found.get(number, BadRow(file.name, number, "", None)) for number in of_it)


def _stored(planned: Slice, file: SourceFile) -> list[str]:
    """Return the columns of a slice that stand in a file."""
    lacking = {*file.lacks, *(name for name, _ in file.partitions)}
    return [name for name in (planned.schema.names if planned.schema is not None else ()) if name not in lacking]
