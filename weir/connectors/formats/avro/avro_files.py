"""Avro's container files: blocks of rows, which Polars decodes.

Polars reads no maps, no optional enums and no fields that are always null. But a map is written as an array of records
of a key and a value, an enum as a number, and null as nothing at all; so Polars is told that schema, and what it makes
of it is changed back.
"""

from __future__ import annotations

import bz2
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.unfit_values import unfit
from state_ops.errors import InputError, first_line
from weir.connectors.formats.avro.avro_schema import (
    WRITABLE,
    AvroColumn,
    AvroSchema,
    NoSchemaError,
    UnreadSchemaError,
    mistaken,
)
from weir.connectors.formats.avro.bounds import TOGETHER, TooMuchError, Weights
from weir.connectors.formats.avro.casts import cast
from weir.connectors.formats.avro.values import Symbols, restored, whole
from weir.connectors.formats.spelling import there_of
from weir.connectors.formats.stream import Block, Bytes
from weir.definition.source import MOST_REJECTED, Batch, Rejected

_MAGIC, _SYNC = b"Obj\x01", 16
_MOST_BYTES = 64 << 20  # of one block, packed and unpacked, and of a value in the header
_DICTIONARY = 256 << 20  # bytes that xz may take to unpack a block


@dataclass(frozen=True, slots=True)
class AvroOptions:
    """Avro files say themselves how they are written."""

    encoding = "utf-8"


class AvroReader:
    """One Avro file.

    Args:
        file: Its bytes.
        schema: The columns that are read, in canonical types; None: all.
    """

    def __init__(self, file: Bytes, schema: pa.Schema | None, block_bytes: int, *, partial: bool = False) -> None:
        self._file, self._bytes, self._block_bytes = file, _Exact(file), block_bytes
        if self._bytes.read(len(_MAGIC)) != _MAGIC:
            raise file.damaged("it is no Avro file")
        facts = self._facts()
        self._sync = self._bytes.read(_SYNC)
        self._codec = facts.get("avro.codec", b"null").decode(errors="replace")
        self._columns = self._columns_of(facts["avro.schema"])
        self._written = [name for name, column in self._columns.items() if column.read_as is not None]
        if not self._written:
            raise file.damaged("its schema has no fields that are written")
        self._header = _header(self._columns, self._sync)
        self._least = sum(_least(self._columns[name].read_as) for name in self._written)
        self._packed = self._whole = 0
        self.stored = frames.canonical_schema(pa.schema([(name, of.type) for name, of in self._columns.items()]))
        if schema is None:
            self._check_types()
        self.schema = self.stored if schema is None else schema
        self.schema = there_of(self.schema, self._columns, file.where, partial=partial)
        absent = [name for name in self.schema.names if name not in self._columns]
        if absent:
            raise InputError(
                f"An input file has no field {', '.join(map(repr, absent))}.",
                where=file.where,
                next="Repair the file, move it away, or correct the source's schema; nothing of this epoch was "
                "applied.",
            )
        self._check_meanings()
        wanted = (name for name in self.schema.names if self._columns[name].read_as is not None)
        self._read = list(wanted) or self._written[:1]

    def blocks(self) -> Iterator[Block]:
        """Yield the file's blocks of rows, unpacked, some together; first: the number of the first row."""
        waiting, rows, first, heavy = list[bytes](), 0, 1, 0
        weights = Weights(self._columns, self._read)
        while not self._bytes.is_end():
            count, size = self._bytes.number(), self._bytes.number()
            if not (count >= 0 and 0 <= size <= _MOST_BYTES):
                raise self._damaged(first + rows, f"a block has {count} rows in {size} bytes")
            data = self._unpacked(self._bytes.read(size), first + rows)
            if self._bytes.read(_SYNC) != self._sync:
                raise self._damaged(first + rows)
            if count * self._least > len(data):
                raise self._damaged(first + rows, f"a block has {count} rows in {len(data)} bytes")
            try:
                weight = weights.of(count, data)
            except TooMuchError as error:
                raise self._damaged(first + rows, str(error)) from error
            if waiting and heavy + weight > TOGETHER:
                yield Block(b"".join(waiting), first, heavy)
                waiting, rows, first, heavy = [], 0, first + rows, 0
            if count:
                waiting.append(_number(count) + _number(len(data)) + data + self._sync)
            rows, heavy = rows + count, heavy + weight
            if sum(map(len, waiting)) >= self._block_bytes:
                yield Block(b"".join(waiting), first, heavy)
                waiting, rows, first, heavy = [], 0, first + rows, 0
        if waiting:
            yield Block(b"".join(waiting), first, heavy)

    def decoded(self, block: Block) -> Batch:
        """Return the rows of some blocks. May be called from any thread."""
        wanted = {name: self._columns[name] for name in self.schema.names}
        try:
            frame = pl.read_avro(io.BytesIO(self._header + block.data), columns=self._read)
            table = frames.exported(frame)
            symbols = Symbols()
            stored = {
                name: restored(whole(table.column(name)), column, symbols)
                if column.read_as is not None
                else pa.nulls(len(table))
                for name, column in wanted.items()
            }
        except (
            pl.exceptions.PolarsError,
            pl.exceptions.PanicException,
            pa.ArrowException,
            OSError,
            IndexError,
        ) as error:
            raise self._file.damaged(f"the rows from {block.first} on are no rows ({first_line(error)})") from error
        columns, is_lost, reasons = [], np.zeros(len(table), bool), dict[int, str]()
        for field in self.schema:
            values, misfits = cast(stored.pop(field.name), field.type)
            columns.append(values)
            is_lost[misfits] = True
            for row in misfits[: MOST_REJECTED + 1].tolist():
                reasons.setdefault(row, f"the field {field.name!r} is no {field.type}")
        rows = pa.table(columns, schema=self.schema)
        for value in unfit(rows):
            is_lost[value.row] = True
            if len(reasons) <= MOST_REJECTED:
                reasons.setdefault(value.row, f"the field {value.column!r} {value.problem}")
        if not reasons:
            return Batch(rows, numbers=lambda: range(block.first, block.first + len(rows)))
        kept = np.flatnonzero(~is_lost)
        rejected = tuple(Rejected(block.first + row, reasons[row]) for row in sorted(reasons)[: MOST_REJECTED + 1])
        return Batch(rows.take(pa.array(kept)), rejected, lambda: (block.first + kept).tolist())

    def _facts(self) -> dict[str, bytes]:
        facts = {}
        while count := self._bytes.number():
            if count < 0:
                count, _ = -count, self._bytes.number()
            for _ in range(count):
                name = self._bytes.read(self._bytes.number()).decode(errors="replace")
                value = self._bytes.read(self._bytes.number())
                if name in ("avro.schema", "avro.codec"):
                    facts[name] = value
        if "avro.schema" not in facts:
            raise self._file.damaged("it has no schema")
        return facts

    def _columns_of(self, schema: bytes) -> Mapping[str, AvroColumn]:
        try:
            return AvroSchema().columns(schema)
        except NoSchemaError as error:
            raise self._file.damaged("its schema is none of Avro") from error
        except UnreadSchemaError as error:
            raise InputError(
                f"An Avro file has a type that cannot be read: {error}", where=self._file.where, next=WRITABLE
            ) from error

    def _check_types(self) -> None:
        """Raise InputError for a field that no column can have by itself."""
        for field in self.stored:
            part = frames.unreadable(field.type)
            if part is not None:
                raise InputError(
                    f"The field {field.name!r} of an Avro file is {part}, which no column can have.",
                    where=self._file.where,
                    next="Declare the source's columns in schema=, that field among them in another type (a decimal of "
                    "up to 38 digits), or not at all.",
                )

    def _check_meanings(self) -> None:
        """Raise InputError for a field that would be read as something else than what was written."""
        stored = {field.name: field.type for field in self.stored}
        for field in self.schema:
            if field.name in stored:
                problem = mistaken(stored[field.name], field.type, field.name)
                if problem is not None:
                    raise InputError(
                        f"An input file cannot be read as earlier ones, or as schema= says: {problem}.",
                        where=self._file.where,
                        next="Repair the file, move it away, or correct the source's schema; nothing of this epoch was "
                        "applied.",
                    )

    def _unpacked(self, data: bytes, row: int) -> bytes:
        try:
            unpacked = _unpacked(data, self._codec)
        except (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            raise self._damaged(row) from error
        if unpacked is not None:
            if len(unpacked) > _MOST_BYTES:
                raise self._damaged(row, f"a block has more than {_MOST_BYTES >> 20} MiB unpacked")
            self._packed, self._whole = self._packed + len(data), self._whole + len(unpacked)
            self._file.check_size(self._whole, self._packed)
            return unpacked
        raise InputError(
            f"An Avro file is compressed by {self._codec}, which cannot be read.",
            where=self._file.where,
            next="Write it with one of null, deflate, snappy, zstandard, bzip2 and xz.",
        )

    def _damaged(self, row: int, why: str = "") -> InputError:
        return self._file.damaged(f"the rows from {row} on cannot be read{why and ': '}{why}")


def _unpacked(data: bytes, codec: str) -> bytes | None:
    """Return a block's bytes, no more than one beyond the most that it may have; None: nobody can unpack it."""
    if codec == "null":
        return data
    if codec == "zstandard":
        return bytes(pa.CompressedInputStream(pa.BufferReader(data), "zstd").read(_MOST_BYTES + 1))
    if codec == "snappy":
        size = _Exact(io.BytesIO(data)).varint()
        if size > _MOST_BYTES:
            raise ValueError("size")
        unpacked = bytes(pa.decompress(data[:-4], size, "snappy"))
        if zlib.crc32(unpacked) != int.from_bytes(data[-4:], "big"):
            raise ValueError("checksum")
        return unpacked
    unpackers: dict[str, Callable[[], Any]] = {
        "deflate": lambda: zlib.decompressobj(-15),
        "bzip2": bz2.BZ2Decompressor,
        "xz": lambda: lzma.LZMADecompressor(memlimit=_DICTIONARY),
    }
    if codec not in unpackers:
        return None
    unpacker = unpackers[codec]()
    unpacked = bytes(unpacker.decompress(data, _MOST_BYTES + 1))
    if not unpacker.eof and len(unpacked) <= _MOST_BYTES:
        raise EOFError
    return unpacked


class _Exact:
    """Reads so many bytes as are asked for, and Avro's numbers."""

    def __init__(self, file: Bytes | io.BytesIO) -> None:
        self._file, self._waiting, self._at = file, b"", 0

    def is_end(self) -> bool:
        return not self._has(1)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MOST_BYTES or not self._has(size):
            if isinstance(self._file, Bytes):
                raise self._file.damaged("it ends too early")
            raise EOFError
        data = self._waiting[self._at : self._at + size]
        self._at += size
        return data

    def varint(self) -> int:
        number, shift = 0, 0
        while True:
            byte = self.read(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80 or shift > 63:
                return number
            shift += 7

    def number(self) -> int:
        """Return a whole number with its sign, as Avro writes it."""
        number = self.varint()
        return (number >> 1) ^ -(number & 1)

    def _has(self, size: int) -> bool:
        while len(self._waiting) - self._at < size:
            data = self._file.read(max(1 << 20, size))
            if not data:
                return False
            self._waiting, self._at = self._waiting[self._at :] + data, 0
        return True


def _number(value: int) -> bytes:
    """Return the inverse of `_Exact.number` for what is not negative."""
    value, data = value << 1, bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _least(read_as: Any) -> int:
    """Return the fewest bytes that a value of a type has."""
    if isinstance(read_as, dict) and read_as["type"] == "record":
        return sum(_least(field["type"]) for field in read_as["fields"])
    if isinstance(read_as, dict) and read_as["type"] == "fixed":
        return int(read_as["size"])
    return {"float": 4, "double": 8}.get(read_as, 1) if isinstance(read_as, str) else 1


def _header(columns: Mapping[str, AvroColumn], sync: bytes) -> bytes:
    fields = [{"name": name, "type": column.read_as} for name, column in columns.items() if column.read_as is not None]
    schema = json.dumps({"type": "record", "name": "top", "fields": fields}).encode()
    name = b"avro.schema"
    return _MAGIC + _number(1) + _number(len(name)) + name + _number(len(schema)) + schema + b"\0" + sync
