"""JSON lines: blocks of lines to rows. Arrow reads whole blocks; where it refuses one, halves of it, and so on. Python
reads the last few lines, and says what is wrong with them."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from state_ops.arrow import frames
from state_ops.arrow.types import mapped
from state_ops.errors import InputError
from weir.connectors.formats import texts
from weir.connectors.formats.spelling import respelled
from weir.connectors.formats.stream import (
    LONGEST_LINE,
    Block,
    Bytes,
    in_pieces,
    is_utf8,
    last_line,
    line_ends,
)
from weir.definition.source import Batch, Rejected

_RAW = 4096  # characters of a bad row that are kept
_BY_PYTHON = 256  # lines: a call of Arrow takes a millisecond
_BLANK = b" \t\r\n"
_LOOKED_AT = 4096  # bytes at the beginning of a line that is too long
_OPEN, _CLOSE, _LF = 123, 125, 10
_LONG = re.compile(rb"[0-9.]{16}|[0-9][eE][+-]?[0-9]")
_LONG_NUMBER = re.compile(rb"(?<![0-9.])(?:[0-9.]{16,}(?:[eE][+-]?[0-9]+)?|[0-9.]+[eE][+-]?[0-9]+)")
_DIGITS = 19  # of the greatest int64
_EXACT = 1 << 53  # whole numbers up to it are all float64
_MOST_VALUES = 4_000_000  # of one line that Python reads, in which each takes a hundred bytes
_MOST_CELLS = 8_000_000  # rows times columns of one block: `{}` has three bytes, whatever columns it lacks
_TINY = re.compile(rb"[0-9][eE]-[0-9]{2,}\s*[],}]|\.[0-9]{38}")
_WIDE = re.compile(rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff|[{\[]\0[^\0]\0|\0[{\[]\0[^\0]|[{\[]\0\0\0|\0\0\0[{\[]")
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class JsonOptions:
    """The way in which a file of JSON lines is written.

    Attributes:
        encoding: By its name in Python.
        extra: Fields that the schema lacks are left out ("ignore"), or make a line a bad row ("fail").
    """

    encoding: str = "utf-8"
    extra: str = "ignore"


class UnfitError(Exception):
    """Some lines cannot be read as they are, or not by Arrow. Of one line the message is the reason."""


class JsonLines:
    """Lines of JSON, wherever they come from.

    Args:
        schema: The columns that are read, in canonical types.
        keeps_digits: A number with more digits than float64 holds makes a bad row.
    """

    def __init__(self, schema: pa.Schema, options: JsonOptions, keeps_digits: bool = False) -> None:
        self.schema, self._options, self._keeps_digits = schema, options, keeps_digits
        leaves = [leaf for field in schema for leaf in _leaves(field.type)]
        self._has_float = any(map(pa.types.is_floating, leaves))
        self._has_decimal = any(map(pa.types.is_decimal, leaves))
        self._wire = None if any(_has_map(field.type) for field in schema) else _wire_schema(schema)
        self._names = {field.name: frozenset(_names(field)) for field in schema}

    def decoded(self, block: Block) -> Batch:
        """Return the rows of a block. May be called from any thread."""
        try:
            return Batch(self._by_arrow(block.data), numbers=lambda: _numbers(block))
        except UnfitError:
            pass
        tables, rejected = list[pa.Table](), list[Rejected]()
        if lines := list(lines_of(block)):
            self._by_halves(lines, tables, rejected)
        bad = {row.number for row in rejected}
        rows = pa.concat_tables([self.schema.empty_table(), *tables])
        return Batch(rows, tuple(rejected), lambda: [number for number, _ in lines if number not in bad])

    def _by_halves(self, lines: Sequence[tuple[int, bytes]], tables: list[pa.Table], rejected: list[Rejected]) -> None:
        try:
            tables.append(self._by_arrow(b"".join(text + b"\n" for _, text in lines)))
            return
        except UnfitError:
            pass
        if len(lines) > _BY_PYTHON and self._wire is not None:
            middle = len(lines) // 2
            self._by_halves(lines[:middle], tables, rejected)
            self._by_halves(lines[middle:], tables, rejected)
            return
        values = list[dict[str, Any]]()
        for number, text in lines:
            try:
                values.append(self._by_python(text))
            except UnfitError as error:
                try:  # Arrow judges fields that nobody reads, as it does in a block without a bad line
                    row = self._by_arrow(text + b"\n")
                except UnfitError:
                    rejected.append(Rejected(number, str(error), text.decode(errors="replace")[:_RAW]))
                    continue
                tables += [pa.Table.from_pylist(values, self.schema), row]
                values = []
        tables.append(pa.Table.from_pylist(values, self.schema))

    def _by_arrow(self, data: bytes) -> pa.Table:
        if self._wire is None:
            raise UnfitError("maps")
        if self._has_decimal and _TINY.search(data):  # Arrow makes 0 of it
            raise UnfitError("very small numbers")
        table = parsed(data, self._wire, self._options.extra)
        if self._keeps_digits and self._has_float and loses_digits(data, table):
            raise UnfitError("long numbers")
        absent = (name for name in self._names if table.column(name).null_count or pa.types.is_nested(self._type(name)))
        if may_be_respelled(data, frozenset[str]().union(*(self._names[name] for name in absent))):
            raise UnfitError("other capitals")
        columns = [_from_wire(table.column(field.name), field.type) for field in self.schema]
        return pa.table(columns, schema=self.schema)

    def _type(self, name: str) -> pa.DataType:
        return self.schema.field(name).type

    def _by_python(self, text: bytes) -> dict[str, Any]:
        return self._fields(loaded(text), self.schema, "")

    def _fields(self, raw: Mapping[str, Any], fields: Iterable[pa.Field], path: str) -> dict[str, Any]:
        by_name = {field.name: field.type for field in fields}
        if self._options.extra == "fail" and (more := next((name for name in raw if name not in by_name), None)):
            raise UnfitError(f"the field {path + more!r} is not in the schema")
        if (other := respelled(by_name, raw)) is not None:
            raise UnfitError(f"the field {path + other[1]!r} differs from {path + other[0]!r} by capitals alone")
        return {name: self._value(raw.get(name), type, path + name) for name, type in by_name.items()}

    def _value(self, raw: Any, type: pa.DataType, path: str) -> Any:
        """Return a value of JSON in a canonical type, as `pa.array` takes it."""
        if raw is None:
            return None
        if pa.types.is_struct(type) and isinstance(raw, dict):
            return self._fields(raw, type, f"{path}.")
        if pa.types.is_map(type) and isinstance(raw, dict):
            return [(name, self._value(value, type.item_type, f"{path}[]")) for name, value in raw.items()]
        if pa.types.is_list(type) and isinstance(raw, list):
            return [self._value(value, type.value_type, f"{path}[]") for value in raw]
        if not pa.types.is_nested(type):
            value = _scalar(raw, type)
            is_number = pa.types.is_floating(type) and isinstance(raw, int | Decimal) and not isinstance(raw, bool)
            if self._keeps_digits and is_number and (value is None or not texts.keeps_digits(str(raw))):
                raise UnfitError(f"the field {path!r} {texts.NO_LONGER}")
            if value is not None:
                return value
        raise UnfitError(f"the field {path!r} is no {type}")


class JsonReader(JsonLines):
    """One file of JSON lines; the arguments are those of `JsonLines`."""

    def __init__(
        self, file: Bytes, schema: pa.Schema, options: JsonOptions, block_bytes: int, keeps_digits: bool = False
    ) -> None:
        super().__init__(schema, options, keeps_digits)
        self._file, self._block_bytes = file, block_bytes
        self._most_lines = max(1, _MOST_CELLS // max(1, sum(1 for field in schema for _ in _leaves(field.type))))

    def blocks(self) -> Iterator[Block]:
        """Yield the file's lines."""
        for block in lines_or_refused(self._file, self._block_bytes):
            yield from in_pieces(block, self._most_lines)


def _scalar(raw: Any, type: pa.DataType) -> Any:
    """Return a value of that type; None: it is not of that type."""
    is_number = isinstance(raw, int | Decimal | float) and not isinstance(raw, bool)
    if pa.types.is_boolean(type):
        return raw if isinstance(raw, bool) else None
    if pa.types.is_integer(type):
        bound = 1 << (type.bit_width - 1)
        return raw if isinstance(raw, int) and is_number and -bound <= raw < bound else None
    if pa.types.is_string(type):
        return raw if isinstance(raw, str) else None
    if pa.types.is_binary(type):
        return _unpacked(raw) if isinstance(raw, str) else None
    if pa.types.is_floating(type) and isinstance(raw, str | float):
        return _WORDS.get(raw) if isinstance(raw, str) else raw
    if pa.types.is_temporal(type):
        return texts.value(raw, type) if isinstance(raw, str) else None
    if not (is_number or (isinstance(raw, str) and pa.types.is_decimal(type))):
        return None
    return texts.value(str(raw), type)


def _unpacked(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def lines_of(block: Block) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a block that are not blank, with their numbers, without blanks around them."""
    if not block.data.strip(_BLANK):
        return
    number = block.first
    for line in block.data.splitlines(keepends=True):  # bytes: at line feeds and carriage returns alone
        if text := line.strip(_BLANK):
            yield number, text
        number += line_ends(line)


def _numbers(block: Block) -> list[int]:
    """Return the numbers of a block's lines, where each is an object."""
    lines = block.data.removesuffix(b"\n").split(b"\n")
    return list(accumulate((line_ends(line + b"\n") for line in lines[:-1]), initial=block.first))


def loaded(text: bytes) -> dict[str, Any]:
    """Return a line by Python: numbers with a point are decimals, so that nothing is lost. Raises UnfitError."""
    try:
        if len(text) > _MOST_VALUES and text.count(b",") + text.count(b"[") + text.count(b"{") > _MOST_VALUES:
            raise UnfitError(f"it has more than {_MOST_VALUES} values")
        raw = json.loads(
            text.decode(), object_pairs_hook=_no_pair_twice, parse_float=Decimal, parse_constant=_WORDS.get
        )
        if b"\\u" in text:
            json.dumps(raw, default=str, ensure_ascii=False).encode()  # half a pair of surrogates is no text
    except UnicodeError as error:
        raise UnfitError("it is no UTF-8") from error
    except json.JSONDecodeError as error:
        raise UnfitError(f"it is no JSON: {error.msg} at character {error.colno}") from error
    except RecursionError as error:
        raise UnfitError("it is nested too deep") from error
    except (ValueError, InvalidOperation) as error:
        raise UnfitError("it has a number that is too long") from error
    if not isinstance(raw, dict):
        raise UnfitError("it is no JSON object")
    return raw


def _no_pair_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise UnfitError(f"the field {twice!r} is given twice")
    return values


def lines_or_refused(file: Bytes, block_bytes: int) -> Iterator[Block]:
    """Yield a file's lines. Raises InputError for a JSON document that is no lines of objects: an array, or one object
    that people have laid out; and for lines in UTF-16 or UTF-32."""
    blocks = file.blocks(block_bytes, lambda data, is_end: _last_line(file, data, is_end))
    for block in blocks:
        if block.first == 1 and _WIDE.match(block.data):
            raise InputError(
                "An input file is UTF-16 or UTF-32, and is read as UTF-8.",
                where=file.where,
                next="Give the source its encoding=, or write the file anew; nothing of this epoch was applied.",
            )
        lines = block.data.lstrip(_BLANK).splitlines()
        if lines and lines[0][:1] == b"[" and _is_json(lines[0]) and not any(map(bytes.strip, lines[1:])):
            following = next(blocks, None)  # an array alone in its line: a bad row if others follow
            if following is None:
                raise _document(file, "array")
            yield from (block, following)
            break
        if lines and lines[0][:1] == b"[" and not _is_json(lines[0]):
            raise _document(file, "array")
        if lines and lines[0].strip(_BLANK) == b"{":
            raise _document(file, "document of several lines")
        yield block
        if lines:
            break
    yield from blocks


def _last_line(file: Bytes, data: bytes, is_end: bool) -> int:
    """Return what `last_line` does. Raises InputError for an array that is longer than any line may be."""
    end = last_line(data, is_end)
    if not end and len(data) > LONGEST_LINE and data[:_LOOKED_AT].lstrip(BOM_UTF8 + _BLANK)[:1] == b"[":
        raise _document(file, "array")
    return end


def _document(file: Bytes, what: str) -> InputError:
    return InputError(
        f"An input file is a JSON {what}, and a source reads JSON lines: an object a line.",
        where=file.where,
        next="Write one object a line, for example by `jq -c '.[]'`, or by `jq -c .` where it is one object; "
        "nothing of this epoch was applied.",
    )


def _is_json(text: bytes) -> bool:
    """Return whether a line that is not very long is JSON."""
    try:
        return len(text) < 1 << 20 and json.loads(text) is not None
    except (ValueError, RecursionError):
        return False


def may_be_respelled(data: bytes, names: Collection[str]) -> bool:
    """Return whether some lines may have one of these fields in other capitals. A text that is such a name counts too.

    Args:
        data: The lines.
        names: Of fields that some lines lack.
    """
    if not names:
        return False
    if all(name.isascii() for name in names):
        lower = data.lower()
        return any(lower.count(f'"{name.lower()}"'.encode()) > data.count(f'"{name}"'.encode()) for name in names)
    exact, any_of = {f'"{name}"' for name in names}, "|".join(map(re.escape, names))
    return any(found not in exact for found in re.findall(f'"(?:{any_of})"', data.decode(), re.IGNORECASE))


def loses_digits(data: bytes, table: pa.Table) -> bool:
    """Return whether a number of some lines may have more digits than float64 holds.

    Args:
        data: The lines.
        table: What Arrow has made of them. Whole numbers beyond 2**53 are told by its columns, since a column of int64
            keeps them; numbers with a point are told by the lines.
    """
    is_far = any(_is_far(chunk) for column in table.columns for chunk in column.chunks)
    if not is_far and not _LONG.search(data):
        return False
    numbers = pa.array(_LONG_NUMBER.findall(data), pa.binary()).cast(pa.string())
    if not is_far:
        numbers = numbers.filter(pc.match_substring_regex(numbers, "[.eE]"))
    return bool(len(texts.shortened(numbers, pa.float64())))


def has_large_whole(data: bytes, table: pa.Table) -> bool:
    """Return whether some lines may have a whole number beyond int64, of which Arrow makes a float64. The arguments are
    those of `loses_digits`."""
    if not any(_is_far(chunk) for column in table.columns for chunk in column.chunks):
        return False
    whole = (text for text in _LONG_NUMBER.findall(data) if text.isdigit())
    return any(len(text) > _DIGITS or int(text) >= 1 << 63 for text in whole)


def _is_far(array: pa.Array) -> bool:
    if pa.types.is_struct(array.type):
        return any(map(_is_far, array.flatten()))
    if pa.types.is_list(array.type):
        return _is_far(array.flatten())
    if not pa.types.is_floating(array.type):
        return False
    ends = pc.min_max(array)
    return bool(ends["max"].is_valid) and max(abs(ends["min"].as_py()), abs(ends["max"].as_py())) >= _EXACT


def parsed(data: bytes, schema: pa.Schema | None, extra: str = "infer") -> pa.Table:
    """Lines by Arrow. Raises UnfitError where it refuses them, and where it would take them for something else."""
    if not data or not is_utf8(data):
        raise UnfitError("no UTF-8")
    if data.count(b"\r") != data.count(b"\r\n"):  # a line ends there; for Arrow it is a blank
        raise UnfitError("carriage returns")
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == _LF)
    if array[-1] != _LF:
        ends = np.append(ends, len(array))
    # An object a line. Without the first look, `null` ends the process.
    starts = np.append(0, ends[:-1] + 1)
    last = array[ends - 1]
    last = np.where((last == 13) & (ends > 1), array[np.maximum(ends - 2, 0)], last)
    if not ((array[starts] == _OPEN).all() and (last == _CLOSE).all()):
        raise UnfitError("not an object a line")
    try:
        table = pj.read_json(
            pa.BufferReader(data),
            pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error" if extra == "fail" else extra),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UnfitError(str(error)) from error
    if table.num_rows != len(ends):
        raise UnfitError("several objects in a line")
    return table


def _wire_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_wire(field.type)) for field in schema])


def _wire(type: pa.DataType) -> pa.DataType:
    """Return the type in which Arrow reads a value: text, if JSON has no such type."""
    if pa.types.is_nested(type):
        return mapped(type, _wire)
    return pa.string() if pa.types.is_temporal(type) or pa.types.is_binary(type) else type


def _names(field: pa.Field) -> Iterator[str]:
    """Yield the names of a field and of all those within it that are fields of JSON objects."""
    yield field.name
    for at in range(field.type.num_fields):
        within = field.type.field(at)
        yield from _names(within) if pa.types.is_struct(field.type) else list(_names(within))[1:]


def _has_map(type: pa.DataType) -> bool:
    return pa.types.is_map(type) or any(_has_map(type.field(at).type) for at in range(type.num_fields))


def _from_wire(column: pa.ChunkedArray, type: pa.DataType) -> pa.ChunkedArray:
    leaves = list(_leaves(type))
    chunks = [frames.with_leaves(chunk, _converter(iter(leaves))) for chunk in column.chunks]
    return pa.chunked_array(chunks, None if chunks else type).cast(type)


def _converter(types: Iterator[pa.DataType]) -> Callable[[pa.Array], pa.Array]:
    return lambda array: _leaf(array, next(types))


def _leaf(array: pa.Array, type: pa.DataType) -> pa.Array:
    if pa.types.is_floating(type) and not pc.all(pc.is_finite(array)).as_py() and len(array) > array.null_count:
        raise UnfitError("numbers that JSON does not have")
    if pa.types.is_decimal(type):
        try:
            array.validate(full=True)  # Arrow does not count the digits that the scale adds
        except pa.ArrowInvalid as error:
            raise UnfitError(f"no {type}") from error
    if array.type == type:
        return array
    if pa.types.is_binary(type):
        values = [_unpacked(text) if text is not None else None for text in array.to_pylist()]
        unpacked = pa.array(values, type)
        if unpacked.null_count > array.null_count:
            raise UnfitError("no base64")
        return unpacked
    values, lost = texts.converted(array, type)
    if len(lost) or values.null_count > array.null_count:
        raise UnfitError(f"no {type}")
    return values


def _leaves(type: pa.DataType) -> Iterator[pa.DataType]:
    """Return the leaves in the order of `frames.with_leaves`."""
    if not pa.types.is_nested(type):
        yield type
    for at in range(type.num_fields):
        yield from _leaves(type.field(at).type)
