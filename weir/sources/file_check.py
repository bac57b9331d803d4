"""Check one file as the next of its source: its name, its columns and their types, its event time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from state_ops.arrow import frames
from state_ops.arrow.frames import wider_type
from state_ops.arrow.unfit_values import FIRST_MICRO, LAST_MICRO
from state_ops.errors import InputError
from weir.connectors.formats import hive
from weir.connectors.formats.spelling import check_spelling
from weir.connectors.parquet.footers import by_arrow, enums, nanos, times, unnameable
from weir.connectors.parquet.rows import NO_ROWS
from weir.definition.source import ADD, Source
from weir.sources.parquet.parquet_files import retyped
from weir.sources.slices import SourceFile
from weir.sources.source_directory import LandingDirectory

_LOOKED_AT = 1 << 20  # rows at a time


@dataclass(frozen=True, slots=True)
class FileCheck:
    """One file with its footer.

    Attributes:
        landing: Where its Parquet file lies.
        where: Its place as people know it.
        stored: The columns as Arrow stores them.
        columns: The same in canonical types.
    """

    source: Source
    landing: LandingDirectory
    file: SourceFile
    footer: pq.FileMetaData
    stored: pa.Schema
    columns: pa.Schema
    where: str

    @classmethod
    def opened(cls, source: Source, landing: LandingDirectory, file: SourceFile, where: str) -> FileCheck:
        """Read a file's footer. Raises InputError for a name that Spark cannot take, and where there is no footer."""
        landing.check_name(file)
        footer, stored = landing.parquet.footer(file)
        columns = frames.canonical_schema(retyped(stored, enums(footer, stored)))
        problems = unnameable(stored)
        columns = pa.schema([field for field in columns if field.name not in problems])
        checked = cls(source, landing, file, footer, stored, columns, where)
        return replace(checked, columns=checked._with_partitions()) if file.partitions else checked

    @property
    def rows(self) -> int:
        return int(self.footer.num_rows)

    def schema(self, expected: pa.Schema | None) -> pa.Schema:
        """Return the columns that are read from now on, and what is read of this file. With `evolve="add"` they are
        those that any file has, each in its widest type.

        Args:
            expected: Those of earlier files; None for the first one.

        Raises:
            InputError: The file does not have them, or has them in types that no stage can have.
        """
        problems = unnameable(self.stored)
        if asked := [
            name for name in problems if expected is None or name in expected.names or self.source.evolve == ADD
        ]:
            raise self._unfit(f"The input file {self.file.name} has {problems[asked[0]]}.")
        schema = self.columns if expected is None else self._common(expected)
        if not schema.names:
            raise self._unfit(f"The input file {self.file.name} has no columns.")
        self._check_types(set(schema.names))
        self._check_event_time()
        return schema

    def planned(self, read: pa.Schema) -> SourceFile:
        """Return the file with what its footer says.

        Args:
            read: The columns that are read.
        """
        there = set(self.columns.names)
        names = there.intersection(read.names).difference(dict(self.file.partitions))
        by_nanos = tuple(name for name in nanos(self.footer, self.stored) if name in names)
        # Spark does not read every type as every wider one.
        is_widened = any(wider_type(self.columns.field(name).type, read.field(name).type) for name in names)
        return replace(
            self.file,
            rows=self.rows,
            nanos=by_nanos,
            by_arrow=is_widened or by_arrow(self.footer, self.stored, names),
            lacks=tuple(name for name in read.names if name not in there),
        )

    def newest(self, without: np.ndarray = NO_ROWS) -> int | None:
        """Return the newest event time in the file: by its statistics, or by its rows where these do not tell.

        Args:
            without: Numbers of rows that do not count.

        Raises:
            InputError: An event time lies outside of the years 1 to 9999.
        """
        column = self.source.event_time
        if column is None or not self.rows:
            return None
        told = times(self.footer, column)
        if told is not None and not len(without) and told.least >= FIRST_MICRO and told.greatest <= LAST_MICRO:
            return told.greatest
        parts = [greatest(part) for part in self.landing.parquet.column(self.file, column, _LOOKED_AT, without)]
        return max((newest for newest in parts if newest is not None), default=None)

    def _with_partitions(self) -> pa.Schema:
        """Return the columns with those of the file's directories."""
        files = self.source.capabilities.files
        types = {name: hive.TYPES[type] for name, type in (files.partitions if files is not None else ())}
        columns = self.columns
        for name, text in self.file.partitions:
            field = pa.field(name, self._partition_type(name, text, types.get(name, pa.null())))
            at = columns.get_field_index(name)
            columns = columns.append(field) if at < 0 else columns.remove(at).append(field)
        return columns

    def _partition_type(self, name: str, text: str | None, expected: pa.DataType) -> pa.DataType:
        """Return the type of a column of the file's directories. expected: that of earlier files; null: none has said
        it."""
        if pa.types.is_null(expected):
            return hive.type_of(text)
        if not hive.fits(text, expected):
            raise self._unfit(
                f"The directory of the input file {self.file.name} says {name}={text}, which is no {expected} as of "
                f"earlier files."
            )
        return expected

    def _common(self, expected: pa.Schema) -> pa.Schema:
        as_bytes = frames.canonical_schema(self.stored)  # as earlier releases took the names of enums
        fields, partitions, there = [], dict(self.file.partitions), set(self.columns.names)
        for field in expected:
            if field.name in partitions:
                fields.append(field.with_type(self._partition_type(field.name, partitions[field.name], field.type)))
                continue
            if field.name not in there:
                check_spelling(expected.names, self.columns.names, f"The input file {self.file.name}", self.where)
                if self.source.evolve == ADD:
                    fields.append(field)
                    continue
                raise self._unfit(
                    f"The input file {self.file.name} has no column {field.name!r} ({field.type}), which earlier "
                    f"files have."
                )
            other = self.columns.field(field.name).type
            same = as_bytes.field(field.name).type == field.type
            common = field.type if same else frames.common_type(field.type, other)
            if common is None and self.source.evolve == ADD:
                common = wider_type(field.type, other)
            if common is None:
                raise self._unfit(
                    f"The column {field.name!r} of the input file {self.file.name} is {other}; earlier files have "
                    f"{field.type}."
                )
            fields.append(field.with_type(common))
        if self.source.evolve == ADD:
            before = set(expected.names)
            fields += [field for field in self.columns if field.name not in before]
        return pa.schema(fields)

    def _check_types(self, names: Collection[str]) -> None:
        unreadable = self.landing.parquet.unreadable
        for field in frames.canonical_schema(self.stored):
            if field.name in names and (part := frames.unreadable(field.type)) is not None:
                what = f"is {field.type}" if part == field.type else f"is {field.type}, with {part}"
                raise unreadable(self.file, field.name, f"{what}, a type that no stage can have")

    def _check_event_time(self) -> None:
        column = self.source.event_time
        if column is None:
            return
        kind = self.columns.field(column).type if column in self.columns.names else None
        if kind is None or not pa.types.is_timestamp(kind):
            raise InputError(
                f"The event time column {column!r} of the source {self.source.name} "
                + (f"is {kind}, not a timestamp." if kind else "is not in the file."),
                where=self.where,
                next=f"{self._advice}, or correct event_time= of the source.",
            )

    def _unfit(self, what: str) -> InputError:
        return InputError(
            what,
            where=self.where,
            next=f"{self._advice}; nothing of this epoch was applied.",
        )

    @property
    def _advice(self) -> str:
        if self.file.part is not None:
            return "Correct what fills the source, or declare its schema="
        return f"Repair it, or move it out of {self.where.rpartition('/')[0]}"


def greatest(moments: pa.ChunkedArray) -> int | None:
    """Return the greatest of some moments as a number; None if there is none."""
    newest: int | None = pc.max(moments.cast(pa.int64())).as_py()
    return newest
