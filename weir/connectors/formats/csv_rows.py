"""CSV: blocks of records to rows. Arrow cuts all columns out as text, and `texts` makes values of it."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from state_ops.errors import InputError, PipelineError
from weir.connectors.formats import texts
from weir.connectors.formats.records import UNCLOSED, Record, Records
from weir.connectors.formats.spelling import there_of
from weir.connectors.formats.stream import Block, Bytes, is_utf8, last_line, line_ends
from weir.definition.source import Batch, Rejected

_RAW = 4096  # characters of a bad row that are kept
_MOST_COLUMNS = 10_000


@dataclass(frozen=True, slots=True)
class CsvOptions:
    """The way in which a CSV file is written.

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
        keeps_digits: A number with more digits than float64 holds makes a bad row.
    """

    def __init__(
        self,
        file: Bytes,
        schema: pa.Schema | None,
        options: CsvOptions,
        block_bytes: int,
        *,
        partial: bool = False,
        keeps_digits: bool = False,
    ) -> None:
        self._file, self._options, self._keeps_digits = file, options, keeps_digits
        self._records = Records(options.delimiter.encode(), options.quote.encode(), options.multiline)
        bounds = self._records.last if options.multiline else last_line
        self._blocks = file.blocks(block_bytes, bounds)
        self._names = self._named(schema)
        self.schema = schema if schema is not None else pa.schema([(name, pa.string()) for name in self._names])
        self.schema = there_of(self.schema, self._names, file.where, partial=partial)
        self._check_names()

    def blocks(self) -> Iterator[Block]:
        """Return the file's records, without the header."""
        return self._blocks

    def decoded(self, block: Block) -> Batch:
        """Return the rows of a block. May be called from any thread."""
        data, records = block.data, None
        if not (self._records.is_regular(data) and is_utf8(data)):
            records = self._checked(block)
            data = b"".join(data[record.start : record.end] + b"\n" for record in records if record.reason is None)
        if data.startswith(BOM_UTF8):  # a value's own: Arrow leaves out the first one of what it is given
            data = BOM_UTF8 + data
        unfit: list[pcsv.InvalidRow] = []
        table = self._cut_out(data, self._names, self.schema.names, self._options.null, unfit)
        columns, reasons = [], dict[int, str]()
        for field in self.schema:
            values, lost = texts.converted(table.column(field.name), field.type)
            columns.append(values)
            if self._keeps_digits:  # first, since that says what helps
                for row in texts.shortened(table.column(field.name), field.type):
                    reasons.setdefault(int(row), f"column {field.name!r} {texts.NO_LONGER}")
            for row in lost:
                reasons.setdefault(int(row), f"column {field.name!r} is no {field.type}")
        rows = pa.table(columns, schema=self.schema)
        if records is None and not unfit and not reasons:
            return Batch(rows, numbers=lambda: _lines(block, self._records.split(block.data)))
        records = records if records is not None else list(self._records.split(block.data))
        return self._without(rows, block, records, unfit, reasons)

    def _cut_out(
        self, data: bytes, names: list[str], wanted: list[str], null: Sequence[str], unfit: list[pcsv.InvalidRow]
    ) -> pa.RecordBatch:
        """Return the wanted columns as text.

        Args:
            names: Those of all columns.
            null: Texts that are null.
            unfit: Gets the records with more or fewer values than there are columns.
        """

        def skip(row: pcsv.InvalidRow) -> str:
            unfit.append(row)
            return "skip"

        options = self._options
        if not data.strip(b"\r\n"):
            return pa.record_batch([pa.array([], pa.string()) for _ in wanted], names=wanted)
        table = pcsv.read_csv(
            pa.BufferReader(data),
            pcsv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
            pcsv.ParseOptions(
                delimiter=options.delimiter, quote_char=options.quote or False, newlines_in_values=options.multiline,
                invalid_row_handler=skip,
            ),
            pcsv.ConvertOptions(
                column_types=dict.fromkeys(wanted, pa.string()), include_columns=wanted, check_utf8=False,
                null_values=list(null), strings_can_be_null=True, quoted_strings_can_be_null=False,
            ),
        )  # fmt: skip
        whole = table.combine_chunks()
        return pa.record_batch(
            [whole.column(name).chunk(0) if len(whole) else pa.array([], pa.string()) for name in wanted], names=wanted
        )

    def _checked(self, block: Block) -> list[Record]:
        """Return the records of an irregular block."""
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
        """Return the rows without those that have a reason, which are told by the lines of their records."""
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
        """Return the names of the file's columns, as read by the rules of rows: a column without a name is `_c` and its
        place, as Spark calls it. Reads the header.

        Raises:
            InputError: The header is no row, or has too many columns.
        """
        first = next(self._blocks, None)
        if first is None:
            return schema.names if schema is not None else []
        if not self._options.header and schema is not None:
            self._blocks = _chained(first, self._blocks)
            return list(schema.names)
        records = list(self._records.split(first.data)) if not self._options.header else []
        rows = (record for record in records if record.reason is None)
        record = next(rows, None) or next(self._records.split(first.data), None)
        if record is None:
            return self._named(schema)
        text, line = first.data[record.start : record.end], first.first + line_ends(first.data[: record.start])
        if self._options.header:
            end = record.end + (2 if first.data.startswith(b"\r\n", record.end) else 1)
            first = Block(first.data[end:], first.first + line_ends(first.data[:end]))
        self._blocks = _chained(first, self._blocks)
        if self._options.header and text[:4].lower() == b"sep=" and len(text) == 5:  # a line for Excel
            self._check_separator(text[4:].decode())
            return self._named(schema)
        names = self._values(text, record.reason, line)
        if not self._options.header:
            return [f"_c{at}" for at in range(len(names))]
        has_nameless = schema is not None and "" in schema.names  # earlier releases called it so
        return [name if name or has_nameless else f"_c{at}" for at, name in enumerate(names)]

    def _values(self, text: bytes, reason: str | None, line: int) -> list[str]:
        """Return the values of the first record."""
        if reason is None and not is_utf8(text):
            reason = "it is no UTF-8, so give the source its encoding="
        if reason is None and b"\0" in text:
            reason = "it has the character NUL, as UTF-16 read as another encoding; give the source its encoding="
        if reason is None and (most := text.count(self._options.delimiter.encode()) + 1) > _MOST_COLUMNS:
            reason = f"it has {most} columns, more than {_MOST_COLUMNS}"
        if reason is not None:
            raise self._refused(f"The first row of an input file, at line {line}, cannot be read: {reason}.")
        unfit: list[pcsv.InvalidRow] = []
        places = [str(at) for at in range(most)]
        row = self._cut_out(text, places, places, (), unfit)
        if unfit:  # a delimiter is quoted
            places = places[: unfit[0].actual_columns]
            row = self._cut_out(text, places, places, (), [])
        return [column[0].as_py() or "" for column in row.columns]

    def _check_separator(self, separator: str) -> None:
        if separator != self._options.delimiter:
            raise InputError(
                f"The first line of an input file is sep={separator}, a note for Excel, and the source reads columns "
                f"by {self._options.delimiter!r}.",
                where=self._file.where,
                next=f"Read such files by a source with delimiter={separator!r}.",
            )

    def _refused(self, what: str) -> InputError:
        return InputError(
            what,
            where=self._file.where,
            next="Repair the file, move it away, or correct the source's options and schema; nothing of this epoch was "
            "applied.",
        )

    def _check_names(self) -> None:
        """Raise InputError if the header is not what the schema needs."""
        there, wanted = Counter(self._names), set(self.schema.names)
        twice = sorted(name for name in wanted if there[name] > 1)
        absent = [name for name in self.schema.names if name not in there]
        extra = [name for name in self._names if name not in wanted] if self._options.extra == "fail" else []
        problems = (
            (twice, "names columns twice"),
            (absent, "lacks columns"),
            (extra, "names columns that the schema lacks"),
        )
        for names, problem in problems:
            if names and self._names:
                raise self._refused(f"The header of an input file {problem}: {', '.join(map(repr, names))}.")


def _lines(block: Block, records: Iterable[Record]) -> list[int]:
    """Return the lines at which records of a block begin."""
    lines, line, before = [], block.first, 0
    for record in records:
        line, before = line + line_ends(block.data[before : record.start]), record.start
        lines.append(line)
    return lines


def _chained(first: Block, rest: Iterator[Block]) -> Iterator[Block]:
    yield first
    yield from rest


def inferred(reader: CsvReader) -> pa.Schema:
    """Return the type of each column of a file that is read as text: the first one that all its values have, or text.

    It is text as well if a number would lose digits as float64, and if no value but empty texts tells a type.
    """
    candidates = {name: list(texts.INFERRED) for name in reader.schema.names}
    valued, with_points = set[str](), set[str]()
    for block in reader.blocks():
        rows = reader.decoded(block).rows
        if not rows.num_rows:
            continue
        for name, types in candidates.items():
            column = rows.column(name).chunk(0)
            if not types or not (pc.max(pc.binary_length(column)).as_py() or 0):
                continue
            valued.add(name)
            candidates[name] = [type for type in types if texts.fits(column, type)]
            if name not in with_points and pc.any(pc.match_substring_regex(column, "[^0-9+-]")).as_py():
                with_points.add(name)
    schema = {name: types[0] if types and name in valued else pa.string() for name, types in candidates.items()}
    # Whole numbers beyond int64 are no float64, though it may have a place for some of them.
    whole = {name for name, type in schema.items() if type == pa.float64()} - with_points
    return pa.schema([(name, pa.string() if name in whole else type) for name, type in schema.items()])
