"""CSV: blocks of records to rows. Arrow cuts all columns out as text, and `texts` makes values of it."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv

from pipelines.runtime.connectors.formats import texts
from pipelines.runtime.connectors.formats.records import UNCLOSED, Record, Records
from pipelines.runtime.connectors.formats.spelling import there_of
from pipelines.runtime.connectors.formats.stream import Block, Bytes, is_utf8, last_line, line_ends
from pipelines.runtime.connectors.source import Batch, Rejected
from state_ops.errors import InputError, PipelineError

_RAW = 4096  # characters of a bad row that are kept


@dataclass(frozen=True, slots=True)
class CsvOptions:
    """How a CSV file is written.

    Attributes:
        header: The first line has the columns' names. Without it they are those of the schema, in its order.
        delimiter: One character.
        quote: One character, doubled where it stands inside a quoted value. "": nothing is quoted.
        null: Texts that are null where they are not quoted.
        multiline: A quoted value may have several lines. One quote too many then spoils the rest of a file, and without
            it one line.
        encoding: By its name in Python.
        extra: Columns that the schema lacks are left out ("ignore") or fail the file ("fail").
    """

    header: bool = True
    delimiter: str = ","
    quote: str = '"'
    null: tuple[str, ...] = ("",)
    multiline: bool = False
    encoding: str = "utf-8"
    extra: str = "ignore"

    def __post_init__(self) -> None:
        for name, value, is_right in (
            ("delimiter", self.delimiter, len(self.delimiter.encode()) == 1 and self.delimiter not in "\r\n"),
            ("quote", self.quote, len(self.quote.encode()) <= 1 and self.quote not in ("\r", "\n", self.delimiter)),
        ):
            if not is_right:
                raise PipelineError(f"{name}={value!r} cannot be read.", next="Give one character of ASCII.")


class CsvReader:
    """One CSV file.

    Args:
        file: Its bytes.
        schema: The columns that are read, in canonical types; None: all, as text.
    """

    def __init__(
        self, file: Bytes, schema: pa.Schema | None, options: CsvOptions, block_bytes: int, *, partial: bool = False
    ) -> None:
        self._file, self._options = file, options
        self._records = Records(options.delimiter.encode(), options.quote.encode(), options.multiline)
        bounds = self._records.last if options.multiline else last_line
        self._blocks = file.blocks(block_bytes, bounds)
        self._names = self._named(schema)
        self.schema = schema if schema is not None else pa.schema([(name, pa.string()) for name in self._names])
        if partial:
            self.schema = there_of(self.schema, self._names, file.where)
        self._check_names()

    def blocks(self) -> Iterator[Block]:
        """The file's records, without the header."""
        return self._blocks

    def decoded(self, block: Block) -> Batch:
        """The rows of a block. May be called from any thread."""
        data, records = block.data, None
        if not (self._records.is_regular(data) and is_utf8(data)):
            records = self._checked(block)
            data = b"".join(data[record.start : record.end] + b"\n" for record in records if record.reason is None)
        unfit: list[pcsv.InvalidRow] = []
        table = self._cut_out(data, unfit)
        columns, reasons = [], dict[int, str]()
        for field in self.schema:
            values, lost = texts.converted(table.column(field.name), field.type)
            columns.append(values)
            for row in lost:
                reasons.setdefault(int(row), f"column {field.name!r} is no {field.type}")
        rows = pa.table(columns, schema=self.schema)
        if records is None and not unfit and not reasons:
            return Batch(rows, numbers=lambda: _lines(block, self._records.split(block.data)))
        records = records if records is not None else list(self._records.split(block.data))
        return self._without(rows, block, records, unfit, reasons)

    def _cut_out(self, data: bytes, unfit: list[pcsv.InvalidRow]) -> pa.RecordBatch:
        """The columns as text. unfit: gets the records with more or fewer values than there are columns."""

        def skip(row: pcsv.InvalidRow) -> str:
            unfit.append(row)
            return "skip"

        wanted, options = self.schema.names, self._options
        if not data.strip(b"\r\n"):
            return pa.record_batch([pa.array([], pa.string()) for _ in wanted], names=wanted)
        table = pcsv.read_csv(
            pa.BufferReader(data),
            pcsv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self._names),
            pcsv.ParseOptions(
                delimiter=options.delimiter, quote_char=options.quote or False, newlines_in_values=options.multiline,
                invalid_row_handler=skip,
            ),
            pcsv.ConvertOptions(
                column_types=dict.fromkeys(wanted, pa.string()), include_columns=wanted, check_utf8=False,
                null_values=list(options.null), strings_can_be_null=True, quoted_strings_can_be_null=False,
            ),
        )  # fmt: skip
        whole = table.combine_chunks()
        return pa.record_batch(
            [whole.column(name).chunk(0) if len(whole) else pa.array([], pa.string()) for name in wanted], names=wanted
        )

    def _checked(self, block: Block) -> list[Record]:
        """The records of an irregular block."""
        records = []
        for record in self._records.split(block.data):
            if record.reason is UNCLOSED and self._options.multiline:
                line = block.first + line_ends(block.data[: record.start])
                raise self._file.damaged(f"a quote that opens in the row at line {line} is not closed")
            text = block.data[record.start : record.end]
            if record.reason is None and not is_utf8(text):
                record = Record(record.start, record.end, "it is no UTF-8")
            records.append(record)
        return records

    def _without(
        self, rows: pa.Table, block: Block, records: list[Record], unfit: list[pcsv.InvalidRow], reasons: dict[int, str]
    ) -> Batch:
        """The rows without those that have a reason, which are told by the lines of their records."""
        whole = [at for at, record in enumerate(records) if record.reason is None]
        bad = {at: record.reason for at, record in enumerate(records) if record.reason is not None}
        for row in unfit:
            values = "value" if row.actual_columns == 1 else "values"
            bad[whole[row.number - 1]] = f"it has {row.actual_columns} {values} for {row.expected_columns} columns"
        skipped = {row.number - 1 for row in unfit}
        read = [at for number, at in enumerate(whole) if number not in skipped]
        bad |= {read[row]: reason for row, reason in reasons.items()}
        kept = np.ones(len(rows), bool)
        kept[list(reasons)] = False
        rejected, lines = [], _lines(block, records)
        for at in sorted(bad):
            raw = block.data[records[at].start : records[at].end].decode(errors="replace")[:_RAW]
            rejected.append(Rejected(lines[at], bad[at], raw))
        numbers = [lines[at] for row, at in enumerate(read) if kept[row]]
        return Batch(rows.filter(pa.array(kept)), tuple(rejected), lambda: numbers)

    def _named(self, schema: pa.Schema | None) -> list[str]:
        """The names of the file's columns. Reads the header."""
        first = next(self._blocks, None)
        if first is None:
            return schema.names if schema is not None else []
        record = next(self._records.split(first.data), None)
        if record is None:
            return self._named(schema)
        text = first.data[record.start : record.end].decode(errors="replace")
        values = next(csv.reader([text], delimiter=self._options.delimiter, **self._dialect))  # type: ignore[arg-type]
        if self._options.header:
            end = record.end + (2 if first.data.startswith(b"\r\n", record.end) else 1)
            first = Block(first.data[end:], first.first + line_ends(first.data[:end]))
        self._blocks = _chained(first, self._blocks)
        if self._options.header:
            return values
        return schema.names if schema is not None else [f"_c{at}" for at in range(len(values))]

    @property
    def _dialect(self) -> dict[str, object]:
        quote = self._options.quote
        return {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}

    def _check_names(self) -> None:
        """Raises InputError if the header is not what the schema needs."""
        twice = sorted({name for name in self.schema.names if self._names.count(name) > 1})
        absent = [name for name in self.schema.names if name not in self._names]
        extra = [name for name in self._names if name not in self.schema.names] if self._options.extra == "fail" else []
        problems = (
            (twice, "names columns twice"),
            (absent, "lacks columns"),
            (extra, "names columns that the schema lacks"),
        )
        for names, problem in problems:
            if names and self._names:
                raise InputError(
                    f"The header of an input file {problem}: {', '.join(map(repr, names))}.",
                    where=self._file.where,
                    next="Repair the file, move it away, or correct the source's schema; nothing of this epoch was "
                    "applied.",
                )


def _lines(block: Block, records: Iterable[Record]) -> list[int]:
    """The lines at which records of a block begin."""
    lines, line, before = [], block.first, 0
    for record in records:
        line, before = line + line_ends(block.data[before : record.start]), record.start
        lines.append(line)
    return lines


def _chained(first: Block, rest: Iterator[Block]) -> Iterator[Block]:
    yield first
    yield from rest


def inferred(reader: CsvReader) -> pa.Schema:
    """The type of each column of a file that is read as text: the first one that all its values have, or text."""
    candidates = {name: list(texts.INFERRED) for name in reader.schema.names}
    valued = set[str]()
    for block in reader.blocks():
        rows = reader.decoded(block).rows
        for name, types in candidates.items():
            column = pa.concat_arrays(rows.column(name).chunks) if rows.num_rows else pa.array([], pa.string())
            if column.null_count < len(column):
                valued.add(name)
                candidates[name] = [type for type in types if texts.fits(column, type)]
    return pa.schema(
        [(name, types[0] if types and name in valued else pa.string()) for name, types in candidates.items()]
    )
