"""The rows of one Parquet file, those that cannot be handed on apart.

    batch of the file -> without rows that are left out -> converted -> `unfit` looks at it -> rows, and bad rows

A conversion that fails says nothing of which row is to blame, so its batch is halved until it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.arrow import frames
from state_ops.arrow.columns import array_of_fixed, fixed_values, nulls_of
from state_ops.arrow.unfit_values import UnfitValue, storable, unfit
from state_ops.parquet.footer import check, end_of
from state_ops.value_text import literal
from weir.connectors.formats.old_calendar import shifted, shifts_of
from weir.connectors.parquet import bounds

Convert = Callable[[pa.Table], pa.Table]
_DAY = 86_400  # seconds
_SHOWN = 4096  # characters of a row
NO_ROWS = np.array([], np.int64)
_INT32 = -(1 << 31), (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first value of a row that cannot be handed on.

    Attributes:
        row: The row's number in its file, from 0.
        column: As `UnfitValue` has it.
        problem: As `UnfitValue` has it.
        raw: The row as people read it.
    """

    row: int
    column: str
    problem: str
    raw: str

    @property
    def reason(self) -> str:
        """The reason why the row is bad, on one line."""
        return f"column {self.column!r} {self.problem}"


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Rows of a file, in its order.

    Attributes:
        table: Those that can be handed on, converted.
        numbers: int64, of each of them the number in the file, from 0.
        aside: The others, in their order, with null for what cannot be handed on.
        bad: What is wrong with each of those.
    """

    table: pa.Table
    numbers: np.ndarray
    aside: pa.Table
    bad: tuple[BadValue, ...] = ()


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """One open file.

    Attributes:
        source: What it is read from. Of a pa.BufferReader, pages are looked at before they are decompressed.
        size: In bytes.
        parquet: The file as pyarrow has it.
    """

    source: Any
    size: int
    parquet: pq.ParquetFile

    @classmethod
    def opened(cls, source: Any, size: int) -> ParquetRows:
        """Read a file's footer. Raises TooMuchError, pa.ArrowException and OSError."""
        end = end_of(source)
        check(end)
        parquet = _parquet(source, footer=_parquet(pa.BufferReader(end)).metadata)
        bounds.check(parquet.metadata, size)
        return cls(source, size, parquet)

    def read(
        self,
        names: Sequence[str],
        convert: Convert,
        rows: int,
        groups: range | None = None,
        without: np.ndarray = NO_ROWS,
    ) -> Iterator[DecodedRows]:
        """Yield rows, so many at a time or fewer where they are wide; once without a row if there is none.

        Args:
            names: The columns, each of which the file has once.
            convert: Brings them into the types that are handed on. pa.ArrowInvalid says that a value does not fit.
            groups: Numbers of row groups, neighbours. None: all.
            without: Numbers of rows that are left out before anything looks at their values.

        Raises:
            TooMuchError: They would take more memory than a file of this size may.
            ValueError, pa.ArrowException, OSError: The file is damaged.
        """
        parquet, footer = self.parquet, self.parquet.metadata
        groups = range(footer.num_row_groups) if groups is None else groups
        first = sum(footer.row_group(group).num_rows for group in range(groups.start))
        end = first + sum(footer.row_group(group).num_rows for group in groups)
        if first == end:
            nothing = convert(parquet.schema_arrow.empty_table().select(names))
            yield DecodedRows(nothing, NO_ROWS, nothing)
            return
        decoded = bounds.Decoding(self.size)
        at_once = bounds.rows_at_once(self.source, parquet, names, groups, rows, self.size)
        days, shifts = self._days_of_int96(names, groups, at_once), shifts_of(parquet)
        for batch in parquet.iter_batches(at_once, groups, list(names), use_threads=False):
            decoded.count(batch)
            table = pa.Table.from_batches([batch]).select(names)
            for at, name in enumerate(names):
                if name in shifts:
                    table = table.set_column(at, name, shifted(table.column(at), shifts[name]))
            numbers = np.arange(first, first + table.num_rows)
            yield _judged(table, numbers, convert, without, next(days, None))
            first += table.num_rows
        if first != end:
            raise pa.ArrowInvalid(f"{abs(end - first)} rows {'are missing' if first < end else 'are too many'}")

    def _days_of_int96(self, names: Sequence[str], groups: range, rows: int) -> Iterator[pa.Table]:
        """Yield the days of times of 96 bits, which as microseconds may have wrapped around."""
        stored, of_columns = self.parquet.schema, bounds.leaves(self.parquet.schema_arrow, names)
        timed = list(dict.fromkeys(name for name, at in of_columns if stored.column(at).physical_type == "INT96"))
        if not timed:
            return
        with _parquet(self.source, "s", self.parquet.metadata) as seconds:
            for batch in seconds.iter_batches(rows, groups, timed, use_threads=False):
                columns = [frames.with_leaves(column, _day) for column in batch.columns]
                yield pa.table(columns, names=batch.schema.names)


def _parquet(source: Any, unit: str = "us", footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    return pq.ParquetFile(
        source,
        metadata=footer,
        page_checksum_verification=True,
        coerce_int96_timestamp_unit=unit,
        schema_depth_limit=bounds.MOST_DEPTH,
    )


def _day(leaf: pa.Array) -> pa.Array:
    if not pa.types.is_timestamp(leaf.type) or leaf.type.unit != "s":
        return pa.array(np.zeros(len(leaf), np.int8))  # keys of maps cannot be null
    days = fixed_values(leaf) // _DAY
    return array_of_fixed(pa.date32(), np.clip(days, *_INT32).astype(np.int32), nulls_of(leaf))


def _judged(
    table: pa.Table, numbers: np.ndarray, convert: Convert, without: np.ndarray, days: pa.Table | None
) -> DecodedRows:
    kept = ~np.isin(numbers, without) if len(without) else None
    if kept is not None and not kept.all():
        table, numbers = table.filter(pa.array(kept)), numbers[kept]
        days = days.filter(pa.array(kept)) if days is not None else None
    bad: dict[int, UnfitValue] = {}
    converted = _converted(table, 0, convert, bad)
    there = np.delete(np.arange(table.num_rows), list(bad)) if bad else np.arange(table.num_rows)
    wrapped: dict[int, set[str]] = {}
    for name, column in zip(days.column_names, days.columns, strict=True) if days is not None else ():
        for value in unfit(pa.table({name: column})):
            bad.setdefault(value.row, value)
            wrapped.setdefault(value.row, set()).add(name)
    for value in unfit(converted):
        bad.setdefault(int(there[value.row]), value)
    if not bad:
        return DecodedRows(converted, numbers, converted.slice(0, 0))
    is_fit = ~np.isin(there, list(bad))
    rows = [_alone(table, row, row + 1) for row in sorted(bad)]
    shown = [
        BadValue(int(numbers[row]), bad[row].column, bad[row].problem, _raw(of))
        for row, of in zip(sorted(bad), rows, strict=True)
    ]
    aside = pa.concat_tables(
        [storable(_convertible(of, convert, wrapped.get(row, ()))) for row, of in zip(sorted(bad), rows, strict=True)]
    )
    return DecodedRows(converted.filter(pa.array(is_fit)), numbers[there[is_fit]], aside, tuple(shown))


def _converted(table: pa.Table, before: int, convert: Convert, bad: dict[int, UnfitValue]) -> pa.Table:
    """Return the rows that can be converted. Notes the others in `bad`. before: how many rows come before these."""
    try:
        return convert(table)
    except pa.ArrowInvalid as error:
        if table.num_rows == 1:
            column, problem = _to_blame(table, convert, error)
            bad[before] = UnfitValue(before, column, f"cannot be read: {problem}")
            return convert(table.slice(0, 0))
    half = table.num_rows // 2
    return pa.concat_tables(
        [
            _converted(_alone(table, 0, half), before, convert, bad),
            _converted(_alone(table, half, table.num_rows), before + half, convert, bad),
        ]
    )


def _alone(table: pa.Table, start: int, end: int) -> pa.Table:
    """Return some rows as a table of their own. A cast of a slice would convert the elements of all lists that the
    slice was cut from."""
    return table.take(np.arange(start, end))


def _to_blame(table: pa.Table, convert: Convert, error: pa.ArrowInvalid) -> tuple[str, str]:
    """Return the column of a row that cannot be converted, and why."""
    for name in table.column_names:
        try:
            convert(_null_but(table, name))
        except pa.ArrowInvalid as own:
            return name, _first_line(own)
    return table.column_names[0], _first_line(error)


def _convertible(row: pa.Table, convert: Convert, lost: Collection[str]) -> pa.Table:
    """Return one row, converted, with null for each value that cannot be converted.

    lost: Columns that are null anyway.
    """
    for at, name in enumerate(row.column_names):
        if name in lost or not _fits(_null_but(row, name), convert):
            row = row.set_column(at, row.field(at), pa.nulls(1, row.column(at).type))
    return convert(row)


def _fits(row: pa.Table, convert: Convert) -> bool:
    try:
        convert(row)
    except pa.ArrowInvalid:
        return False
    return True


def _null_but(table: pa.Table, name: str) -> pa.Table:
    columns = [table.column(field.name) if field.name == name else pa.nulls(1, field.type) for field in table.schema]
    return pa.table(columns, schema=table.schema)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _raw(row: pa.Table) -> str:
    """Return one row as people read it, with bytes that are no UTF-8 escaped."""
    columns = [
        pa.chunked_array([frames.with_leaves(chunk, _readable) for chunk in column.chunks]) for column in row.columns
    ]
    values = [frames.python_values(column)[0] for column in columns]
    return literal(dict(zip(row.column_names, values, strict=True)))[:_SHOWN]


def _readable(leaf: pa.Array) -> pa.Array:
    kinds = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    if leaf.type not in kinds:
        return leaf
    texts = leaf.view(kinds[leaf.type]).to_pylist()
    return pa.array(
        [None if text is None else text[:_SHOWN].decode("utf-8", "backslashreplace") for text in texts], pa.string()
    )
