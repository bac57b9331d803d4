"""`decode` and `infer`: from the bytes of a file to batches of rows, whatever its format."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import IO, Any, Protocol

import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.errors import InputError, PipelineError, WeirError, first_line
from weir.connectors.formats import csv_rows, json_types, texts
from weir.connectors.formats.avro.avro_files import AvroOptions, AvroReader
from weir.connectors.formats.csv_rows import CsvOptions, CsvReader
from weir.connectors.formats.json_lines import JsonOptions, JsonReader
from weir.connectors.formats.stream import Block, Bytes
from weir.definition.source import Batch

CSV, JSON, AVRO = "csv", "json", "avro"
Options = CsvOptions | JsonOptions | AvroOptions
OPTIONS: dict[str, type[Options]] = {CSV: CsvOptions, JSON: JsonOptions, AVRO: AvroOptions}
BLOCK_BYTES = 4 << 20
_LARGE, _HEAVY = 16 << 20, 256 << 20  # bytes of a block, and those that it may take in memory
_THREADS = min(4, os.cpu_count() or 1)


class _Reader(Protocol):
    """One file of a format, opened. schema: the columns that it reads of the file."""

    schema: pa.Schema

    def blocks(self) -> Iterator[Block]: ...

    def decoded(self, block: Block) -> Batch: ...


def options_of(format: str, given: Mapping[str, Any]) -> Options:
    """Return the options of a format. Raises PipelineError for a format or an option that there is not, and for a value
    that an option cannot have."""
    kind = OPTIONS.get(format)
    if kind is None:
        raise PipelineError(f"There is no format {format!r}.", next=f"Give one of {', '.join(OPTIONS)}.")
    names = [field.name for field in fields(kind)]
    for name in given:
        if name not in names:
            raise PipelineError(
                f"Files of the format {format} have no option {name!r}.", next=f"Give one of {', '.join(names)}."
            )
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if isinstance(values.get("null"), str):
        values["null"] = (values["null"],)
    for name, value in values.items():
        is_right, next = _CHECKS[name]
        if not is_right(value):
            raise PipelineError(f"{name}={value!r} is nothing that files of the format {format} can have.", next=next)
    return kind(**values)


def _is_encoding(value: object) -> bool:
    """Return whether Python has a text encoding of this name."""
    try:
        return isinstance(value, str) and "".encode(value) is not None
    except LookupError:
        return False


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


_CHARACTER = (lambda value: isinstance(value, str), "Give one character of ASCII.")
_FLAG = (lambda value: isinstance(value, bool), "Say True or False.")
_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "header": _FLAG,
    "delimiter": _CHARACTER,
    "quote": _CHARACTER,
    "null": (_are_texts, 'Say texts, e.g. null=("", "NA").'),
    "multiline": _FLAG,
    "encoding": (_is_encoding, 'Say an encoding of text by its name in Python, e.g. "latin-1".'),
    "extra": (lambda value: value in ("ignore", "fail"), 'Say "ignore" or "fail".'),
}
"""By option, what it may be, and what to do about another value."""


def check_schema(format: str, schema: pa.Schema) -> None:
    """Raise PipelineError for a column that files of a format cannot have."""
    for field in schema:
        type = frames.canonical_type(field.type)
        if format == AVRO:
            if (part := frames.unreadable(type)) is not None:
                raise PipelineError(f"No stage can have the type {part}.", where=f"column {field.name!r}")
            continue
        for leaf in _leaves(type) if format == JSON else (type,):
            texts.check(leaf, f"column {field.name!r}")


def infer(
    format: str, options: Mapping[str, Any], stream: IO[bytes] | pa.NativeFile, where: str, block: int = BLOCK_BYTES
) -> pa.Schema:
    """Return the columns of a file, with the types that its values have. Reads all of it, once, in bounded memory; of
    Avro the schema.

    Args:
        stream: The file, opened for reading, compressed as its name says.
        where: The file's name and place as people know it.
        block: Bytes that are decoded at once.

    Raises:
        InputError: The file is damaged.
        TransientError: Storage fails.
    """
    chosen = options_of(format, options)
    with _foreseen(where):
        file = Bytes(stream, where, chosen.encoding)
        if isinstance(chosen, CsvOptions):
            return csv_rows.inferred(CsvReader(file, None, chosen, block))
        if isinstance(chosen, AvroOptions):
            return AvroReader(file, None, block).stored
        return json_types.inferred(file, block)


def decode(
    format: str,
    options: Mapping[str, Any],
    stream: IO[bytes] | pa.NativeFile,
    schema: pa.Schema,
    where: str,
    block: int = BLOCK_BYTES,
    *,
    partial: bool = False,
    keeps_digits: bool = False,
) -> Iterator[Batch]:
    """Yield the rows of a file in its order, and those that cannot be decoded.

    They are the same each time, in bounded memory. A file without rows gives one batch without rows.

    Args:
        stream: As for `infer`.
        schema: The columns that are read; batches have them in canonical types.
        where: As for `infer`.
        block: Bytes that are decoded at once.
        partial: The file may lack columns, which are null then, but not all of them. JSON lines always may.
        keeps_digits: The types are inferred, so a number of CSV or JSON with more digits than float64 holds makes a bad
            row. A declared float64 rounds.

    Raises:
        InputError: The file is damaged, or lacks a column; batches before that place have been handed out.
        TransientError: Storage fails.
    """
    chosen = options_of(format, options)
    check_schema(format, schema)
    with _foreseen(where):
        file, columns = Bytes(stream, where, chosen.encoding), frames.canonical_schema(schema)
        reader: _Reader
        if isinstance(chosen, CsvOptions):
            reader = CsvReader(file, columns, chosen, block, partial=partial, keeps_digits=keeps_digits)
        elif isinstance(chosen, AvroOptions):
            reader = AvroReader(file, columns, block, partial=partial)
        else:
            reader = JsonReader(file, columns, chosen, block, keeps_digits)
    rows, is_empty = _in_order(reader.decoded, reader.blocks()), True
    while True:
        with _foreseen(where):
            batch = next(rows, None)
        if batch is None:
            if is_empty and columns.names:
                yield Batch(columns.empty_table())
            return
        is_empty = False
        yield batch if reader.schema == columns else replace(batch, rows=frames.aligned(batch.rows, columns))


class UnforeseenInputError(InputError):
    """A file that cannot be decoded for a reason that no reader names: a library, or Weir itself, failed on it."""


@contextmanager
def _foreseen(where: str) -> Iterator[None]:
    """Let no error leave a reader that does not name its file, whichever library raises it."""
    try:
        yield
    except (WeirError, MemoryError):
        raise
    except (Exception, pl.exceptions.PanicException) as error:
        raise UnforeseenInputError(
            f"An input file cannot be decoded: {type(error).__name__}: {first_line(error)}",
            where=where,
            next="Repair the file, or move it away; nothing of this epoch was applied. Please report it with the file: "
            "its reader should say what is wrong with it.",
        ) from error


def _in_order(decoded: Callable[[Block], Batch], blocks: Iterator[Block]) -> Iterator[Batch]:
    """Blocks are decoded in threads, a few ahead of the one that is handed out."""
    waiting: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weir-decode") as pool:
        for block in blocks:
            waiting.append(pool.submit(decoded, block))
            is_large = len(block.data) > _LARGE or block.weight > _HEAVY  # then no other is in memory
            while len(waiting) > (0 if is_large else _THREADS):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _leaves(type: pa.DataType) -> Iterator[pa.DataType]:
    if pa.types.is_map(type):
        yield from _leaves(type.item_type)
    elif pa.types.is_nested(type):
        for at in range(type.num_fields):
            yield from _leaves(type.field(at).type)
    else:
        yield type
