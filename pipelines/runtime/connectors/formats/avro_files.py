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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.runtime.connectors.formats import texts
from pipelines.runtime.connectors.formats.avro_schema import (
    WRITABLE,
    AvroColumn,
    AvroSchema,
    NoSchemaError,
    UnreadSchemaError,
    are_alike,
    mistaken,
)
from pipelines.runtime.connectors.formats.spelling import there_of
from pipelines.runtime.connectors.formats.stream import Block, Bytes
from pipelines.runtime.connectors.source import Batch, Rejected
from state_ops.arrow import frames
from state_ops.arrow.nested import elements, elements_type
from state_ops.arrow.unfit_values import unfit
from state_ops.errors import InputError, first_line

_MAGIC, _SYNC = b"Obj\x01", 16
_MOST_BYTES = 64 << 20  # of one block, packed and unpacked, and of a value in the header
_DICTIONARY = 256 << 20  # bytes that xz may take to unpack a block
_MOST_SYMBOLS = 256 << 20  # bytes that the symbols of enums may have in a block, in which each is a number
_ALL_WHOLE = pa.decimal128(19, 0)  # holds each int64


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

    def blocks(self) -> Iterator[Block]:
        """The file's blocks of rows, unpacked, some together; first: the number of the first row."""
        waiting, rows, first = list[bytes](), 0, 1
        while not self._bytes.is_end():
            count, size = self._bytes.number(), self._bytes.number()
            if not (count >= 0 and 0 <= size <= _MOST_BYTES):
                raise self._damaged(first + rows, f"a block has {count} rows in {size} bytes")
            data = self._unpacked(self._bytes.read(size), first + rows)
            if self._bytes.read(_SYNC) != self._sync:
                raise self._damaged(first + rows)
            if count * self._least > len(data):
                raise self._damaged(first + rows, f"a block has {count} rows in {len(data)} bytes")
            if count:
                waiting.append(_number(count) + _number(len(data)) + data + self._sync)
            rows += count
            if sum(map(len, waiting)) >= self._block_bytes:
                yield Block(b"".join(waiting), first)
                waiting, rows, first = [], 0, first + rows
        if waiting:
            yield Block(b"".join(waiting), first)

    def decoded(self, block: Block) -> Batch:
        """The rows of some blocks. May be called from any thread."""
        wanted = {name: self._columns[name] for name in self.schema.names}
        read = [name for name, column in wanted.items() if column.read_as is not None] or self._written[:1]
        try:
            frame = pl.read_avro(io.BytesIO(self._header + block.data), columns=read)
            table = frames.exported(frame)
            symbols = _Symbols()
            restored = {
                name: _restored(_whole(table.column(name)), column, symbols)
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
        columns, lost = [], dict[int, str]()
        for field in self.schema:
            values, misfits = _cast(restored[field.name], field.type)
            columns.append(values)
            for row in misfits:
                lost.setdefault(row, f"the field {field.name!r} is no {field.type}")
        rows = pa.table(columns, schema=self.schema)
        for value in unfit(rows):
            lost.setdefault(value.row, f"the field {value.column!r} {value.problem}")
        if not lost:
            return Batch(rows, numbers=lambda: range(block.first, block.first + len(rows)))
        kept = [row for row in range(len(rows)) if row not in lost]
        rejected = tuple(Rejected(block.first + row, lost[row]) for row in sorted(lost))
        return Batch(rows.take(pa.array(kept, pa.int64())), rejected, lambda: [block.first + row for row in kept])

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
        """Raises InputError for a field that no column can have by itself."""
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
        """Raises InputError for a field that would be read as something else than what was written."""
        for field in self.schema:
            if field.name in self.stored.names:
                problem = mistaken(self.stored.field(field.name).type, field.type, field.name)
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
            return unpacked
        raise InputError(
            f"An Avro file is compressed by {self._codec}, which cannot be read.",
            where=self._file.where,
            next="Write it with one of null, deflate, snappy, zstandard, bzip2 and xz.",
        )

    def _damaged(self, row: int, why: str = "") -> InputError:
        return self._file.damaged(f"the rows from {row} on cannot be read{why and ': '}{why}")


def _unpacked(data: bytes, codec: str) -> bytes | None:
    """A block's bytes, no more than one beyond the most that it may have; None: nobody can unpack it."""
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
        """A whole number with its sign, as Avro writes it."""
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
    """The inverse of `_Exact.number` for what is not negative."""
    value, data = value << 1, bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _least(read_as: Any) -> int:
    """The fewest bytes that a value of a type has."""
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


def _whole(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks)


class _Symbols:
    """The symbols that numbers of enums stand for, in one block: no more bytes of them than memory is meant for."""

    def __init__(self) -> None:
        self._left = _MOST_SYMBOLS

    def of(self, numbers: pa.Array, symbols: Sequence[str]) -> pa.Array:
        """Return each number's symbol. Raises ArrowCapacityError where they have too many bytes."""
        texts = pa.array(symbols, pa.string())
        self._left -= pc.sum(pc.binary_length(texts).cast(pa.int64()).take(numbers)).as_py() or 0
        if self._left < 0:
            raise pa.ArrowCapacityError(f"the symbols of its enums have more than {_MOST_SYMBOLS >> 20} MiB")
        return texts.take(numbers)


def _restored(array: pa.Array, column: AvroColumn, symbols: _Symbols) -> pa.Array:
    """Return the values that Polars has read, as the file's own schema has them."""
    mask = array.is_null() if array.null_count else None
    if column.symbols is not None:
        return symbols.of(array, column.symbols)
    if column.is_decimal:
        return _decimals(array.cast(pa.binary()), column.type)
    if pa.types.is_null(column.type):
        return pa.nulls(len(array))
    if pa.types.is_struct(column.type):
        stored = dict(zip(array.type.names, array.flatten(), strict=True))
        values = [
            _restored(stored[field.name], part, symbols) if part.read_as is not None else pa.nulls(len(array))
            for field, part in zip(column.type, column.parts, strict=True)
        ]
        return pa.StructArray.from_arrays(values, fields=list(column.type), mask=mask)
    if column.parts:
        values, counts = elements(array)
        offsets = _offsets(counts)
        if pa.types.is_map(column.type):
            keys, items = values.flatten()
            return pa.MapArray.from_arrays(
                offsets, keys.cast(pa.string()), _restored(items, column.parts[0], symbols), mask=mask
            )
        return pa.ListArray.from_arrays(offsets, _restored(values, column.parts[0], symbols), mask=mask)
    return array.cast(column.type) if array.type != column.type else array


def _offsets(counts: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())


def _decimals(array: pa.Array, type: pa.DataType) -> pa.Array:
    """Decimals of their digits as a whole number in bytes, the highest first. What is none, or too large for Arrow, is
    a number with more digits than the type has: `unfit` and casts find it."""
    width = type.bit_width // 8
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    data = np.frombuffer(array.buffers()[2] or b"", np.uint8)
    starts, ends = offsets[:-1], offsets[1:]
    is_number = ends > starts
    fill = np.zeros(len(array), np.uint8)
    fill[is_number] = np.where(data[starts[is_number]] >= 128, 255, 0)
    digits = np.repeat(fill[:, None], width, axis=1)
    for at in range(min(width, int((ends - starts).max(initial=0)))):
        has = ends - starts > at
        digits[has, at] = data[ends[has] - 1 - at]
    is_lost = ~is_number
    for row in np.flatnonzero(ends - starts > width):
        above = data[starts[row] : ends[row] - width]
        is_lost[row] = (above != fill[row]).any() or (digits[row, -1] >= 128) != (fill[row] == 255)
    digits[is_lost] = [*[255] * (width - 1), 127]
    buffers = [pa.array(array.is_valid()).buffers()[1], pa.py_buffer(digits.tobytes())]
    return pa.Array.from_buffers(type, len(array), buffers)


def _cast(array: pa.Array, type: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Values in a canonical type, and at which of them there is none: null stands there."""
    try:
        canonical = _whole(frames.canonical(pa.table({"": array})).column(0))
        return _as(canonical, type).cast(type), []
    except pa.ArrowNotImplementedError:  # no value of the one type is any of the other
        return pa.nulls(len(array), type), np.flatnonzero(array.is_valid()).tolist()
    except pa.ArrowInvalid:
        if len(array) > 1:
            middle = len(array) // 2
            (first, bad), (second, more) = _cast(array[:middle], type), _cast(array[middle:], type)
            return pa.concat_arrays([first, second]), [*bad, *(middle + row for row in more)]
        return pa.nulls(1, type), [0]


def _as(array: pa.Array, type: pa.DataType) -> pa.Array:
    """Return the values in another canonical type. Fields of records are taken by name.

    Raises:
        pa.ArrowInvalid: A value is none of that type.
        pa.ArrowNotImplementedError: No value can be.
    """
    if array.type == type or pa.types.is_null(array.type):
        return array if array.type == type else pa.nulls(len(array), type)
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(array.type) and pa.types.is_struct(type):
        stored = dict(zip(array.type.names, array.flatten(), strict=True))
        parts = [_as(stored.get(field.name, pa.nulls(len(array))), field.type) for field in type]
        return pa.StructArray.from_arrays(parts, names=type.names, mask=mask)
    if pa.types.is_nested(array.type) and are_alike(array.type, type):
        values, counts = elements(array)
        offsets, values = _offsets(counts), _as(values, elements_type(type).type)
        if pa.types.is_map(type):
            return pa.MapArray.from_arrays(offsets, *values.flatten(), mask=mask)
        return pa.ListArray.from_arrays(offsets, values, mask=mask)
    if pa.types.is_nested(array.type) or pa.types.is_nested(type):
        raise pa.ArrowNotImplementedError(f"{array.type} is no {type}")
    return _leaf_as(array, type)


def _leaf_as(array: pa.Array, type: pa.DataType) -> pa.Array:
    """`_as` for values without parts. Arrow rounds floats to decimals, makes infinity of large ones and another number
    of a decimal, takes no whole number as a decimal that is narrower than all of them, and reads texts by rules of its
    own."""
    if pa.types.is_integer(array.type) and pa.types.is_decimal(type):
        return array.cast(_ALL_WHOLE).cast(type)
    if pa.types.is_decimal(array.type) and pa.types.is_floating(type):
        return array.cast(pa.string()).cast(type)
    if pa.types.is_string(array.type) and not (pa.types.is_time(type) or pa.types.is_duration(type)):
        values, lost = texts.converted(array, type)
        is_kept = not len(lost) and values.null_count == array.null_count
    else:
        values, is_kept = array.cast(type), True
    if pa.types.is_floating(array.type) and pa.types.is_decimal(type):
        is_kept = pc.all(pc.equal(values.cast(array.type), array)).as_py() is not False
    elif pa.types.is_floating(array.type) and pa.types.is_floating(type):
        is_kept = pc.all(pc.equal(pc.is_inf(values), pc.is_inf(array))).as_py() is not False
    if not is_kept:
        raise pa.ArrowInvalid(f"a value is no {type}")
    return values
