"""The types that the fields of a file of JSON lines have by themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow import frames
from state_ops.arrow.types import mapped
from state_ops.errors import InputError
from state_ops.logs import Logger
from weir.connectors.formats import texts
from weir.connectors.formats.json_lines import (
    JsonLines,
    JsonOptions,
    UnfitError,
    has_large_whole,
    lines_of,
    lines_or_refused,
    loaded,
    loses_digits,
    parsed,
)
from weir.connectors.formats.stream import Block, Bytes, in_chunks

_DEEPEST = 64
_MOST_FIELDS = 10_000
_PIECE = 1 << 17  # bytes whose fields Arrow tells at once: each field takes memory for each line
_KEPT = 8 << 20  # bytes of bad lines, to see whether they would be read without their bad fields
_EXACT = 1 << 53  # whole numbers up to it are all float64
_LARGE = pa.decimal128(38, 0)
_STEPS = np.zeros(256, np.int8)  # brackets inside texts count too: then Python looks at the lines
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1
_TEXTS = (pa.date32(), pa.timestamp("us", tz="UTC"))
_STRUCT, _LIST = pa.struct([]), pa.list_(pa.null())
_KINDS = (
    (bool, pa.bool_()), (int, pa.int64()), (str, pa.string()), ((float, Decimal), pa.float64()), (dict, _STRUCT),
    (list, _LIST),
)  # fmt: skip

log = Logger("weir.source")


def inferred(file: Bytes, block_bytes: int) -> pa.Schema:
    """Return the fields of all lines in the order in which they come, with the type of the first value of each.

    Whole numbers become numbers with a point where one has one, and decimals where one is beyond int64. Texts are dates
    or times where all of them are. A field that has nothing but objects without fields is left out: it tells no type.

    Raises:
        InputError: The file is damaged, has no fields or too many, or a number has more digits than its type holds.
    """
    tree, untold, has_lines = _Tree(file), list[str](), False
    for block in lines_or_refused(file, block_bytes):
        tree.add(block)
        has_lines = has_lines or not block.data.isspace()
    schema = tree.schema(untold)
    if has_lines and not schema.names:
        raise tree.refused(
            "has no field with a value" + (f"; its line {tree.bad[0]} is bad: {tree.bad[1]}" if tree.bad else "")
        )
    tree.refuse_lost(schema)
    if untold:
        log.warning(f"fields that are empty objects in all lines are not read: {', '.join(untold)}", file=file.where)
    return schema


@dataclass(slots=True, eq=False)
class _Field:
    """The type of a field, of an object, or of the elements of a list, as far as the lines so far tell.

    Attributes:
        type: That of the first value; of what has parts only the kind. Null: no value has come.
        parts: The fields of an object.
        elements: Those of a list.
        moments: The types that all its texts are of.
        digits: Of the longest whole number beyond int64; 0: there is none.
        long: A number that float64 does not hold with all its digits.
    """

    type: pa.DataType = field(default_factory=pa.null)
    parts: dict[str, _Field] = field(default_factory=dict)
    elements: _Field | None = None
    moments: tuple[pa.DataType, ...] = _TEXTS
    digits: int = 0
    long: str | None = None

    def is_taken_as(self, type: pa.DataType) -> bool:
        """Take a value's type where none, or only a narrower one, has come before; return whether it is the field's."""
        is_untold = pa.types.is_null(self.type) or (self.type == _STRUCT and not self.parts)
        if is_untold or (self.type == pa.int64() and type == pa.float64()):
            self.type = type
        return bool(self.type == type)

    def add_texts(self, values: pa.Array) -> None:
        if values.null_count < len(values):
            self.moments = tuple(type for type in self.moments if texts.fits(values, type))

    def add_number(self, number: int | Decimal) -> None:
        text = str(number)
        if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
            self.digits = max(self.digits, len(text.lstrip("-")))
        if self.long is None and not texts.keeps_digits(text):
            self.long = text


class _Tree:
    """The fields of a file's lines.

    Args:
        file: For errors.

    Attributes:
        bad: The first line that cannot be read, by its number, and why.
    """

    def __init__(self, file: Bytes) -> None:
        self.bad: tuple[int, str] | None = None
        self._bad_lines, self._room = list[tuple[int, bytes, str]](), _KEPT
        self._file, self._root, self._count = file, _Field(_STRUCT), 0

    def add(self, block: Block) -> None:
        """Look at some lines, as far as they are JSON objects: by Arrow, or one by one where it refuses them."""
        for piece in in_chunks(block, _PIECE):
            try:
                self._add_table(piece.data)
            except UnfitError:
                self._add_lines(piece)

    def schema(self, untold: list[str]) -> pa.Schema:
        """Return the columns.

        Args:
            untold: Gets the fields that have no type.
        """
        named = [(name, self._named(part, name, untold)) for name, part in self._root.parts.items()]
        return pa.schema([(name, type) for name, type in named if type is not None])

    def refuse_lost(self, schema: pa.Schema) -> None:
        """Raise InputError for a bad line whose bad fields are not in the schema: it would be read without them."""
        lines = JsonLines(schema, JsonOptions())
        for number, text, reason in self._bad_lines:
            if not lines.decoded(Block(text, number)).rejected:
                raise self.refused(f"has a field that cannot be read in line {number}: {reason}")

    def refused(self, what: str) -> InputError:
        return InputError(
            f"An input file without a declared schema {what}.",
            where=self._file.where,
            next="Declare the columns in the source's schema=, or move the file away; nothing of this epoch was "
            "applied.",
        )

    def _add_table(self, data: bytes) -> None:
        if _is_deep(data):
            raise UnfitError("too deep")
        most = _MOST_FIELDS if len(data) > _PIECE else 4 * _MOST_FIELDS  # in one line, or in many short ones
        if data.count(b":") > most:  # Arrow takes long for each field, and counts none
            raise UnfitError("many fields in one line")
        told = parsed(data, None)
        if loses_digits(data, told) or has_large_whole(data, told):
            raise UnfitError("long numbers")
        schema = pa.schema([field.with_type(_as_text(field.type)) for field in told.schema])
        table = parsed(data, schema, "ignore") if schema != told.schema else told
        for name in table.column_names:
            part = self._part(self._root, name)
            for chunk in table.column(name).chunks:
                self._add_array(part, chunk)

    def _add_array(self, into: _Field, array: pa.Array) -> None:
        kind = _STRUCT if pa.types.is_struct(array.type) else _LIST if pa.types.is_list(array.type) else array.type
        if pa.types.is_null(kind) or not into.is_taken_as(kind):
            if kind == pa.int64() and into.type == pa.float64():
                _add_whole(into, array)
            return
        if kind == _STRUCT:
            for part, values in zip(array.type, array.flatten(), strict=True):
                self._add_array(self._part(into, part.name), values)
        elif kind == _LIST:
            self._add_array(self._elements(into), array.flatten())
        elif pa.types.is_string(kind):
            into.add_texts(array)
        elif kind == pa.int64():
            _add_whole(into, array)

    def _add_lines(self, block: Block) -> None:
        told: dict[_Field, list[str]] = {}
        for number, text in lines_of(block):
            try:
                raw = loaded(text)
                _check_depth(raw)
            except UnfitError as error:
                self.bad = self.bad or (number, str(error))
                if (room := self._room - len(text)) >= 0:
                    self._bad_lines.append((number, text, str(error)))
                    self._room = room
                continue
            self._add_value(self._root, raw, told)
        for into, values in told.items():
            into.add_texts(pa.array(values, pa.string()))

    def _add_value(self, into: _Field, raw: Any, told: dict[_Field, list[str]]) -> None:
        type = next((type for kind, type in _KINDS if isinstance(raw, kind)), None)
        is_number = isinstance(raw, int | Decimal) and not isinstance(raw, bool)
        if type is None or not (into.is_taken_as(type) or (is_number and into.type == pa.float64())):
            return
        if isinstance(raw, dict):
            for name, value in raw.items():
                self._add_value(self._part(into, name), value, told)
        elif isinstance(raw, list):
            for value in raw:
                self._add_value(self._elements(into), value, told)
        elif isinstance(raw, str):
            told.setdefault(into, []).append(raw)
        elif is_number:
            into.add_number(raw)

    def _part(self, of: _Field, name: str) -> _Field:
        if name not in of.parts:
            of.parts[name] = self._counted()
        return of.parts[name]

    def _elements(self, of: _Field) -> _Field:
        of.elements = of.elements or self._counted()
        return of.elements

    def _counted(self) -> _Field:
        self._count += 1
        if self._count > _MOST_FIELDS:
            raise self.refused(f"has more than {_MOST_FIELDS} fields")
        return _Field()

    def _named(self, of: _Field, path: str, untold: list[str]) -> pa.DataType | None:
        """Return the type of a field by all that is known of it; None: it has none."""
        if of.type == _STRUCT:
            parts = [(name, self._named(part, f"{path}.{name}", untold)) for name, part in of.parts.items()]
            told = [(name, type) for name, type in parts if type is not None]
            untold += [] if of.parts else [path]
            return pa.struct(told) if told else None
        if of.type == _LIST:
            type = self._named(of.elements or _Field(), f"{path}[]", untold)
            return None if type is None else pa.list_(type)
        if pa.types.is_null(of.type):
            return pa.string()
        if pa.types.is_string(of.type):
            return next(iter(of.moments), of.type)
        if of.type == pa.int64() and of.digits:
            if of.digits > _LARGE.precision:
                raise self.refused(f"has whole numbers of {of.digits} digits in the field {path!r}")
            return _LARGE
        if of.type == pa.float64() and of.long is not None:
            number = of.long if len(of.long) <= 60 else f"{of.long[:60]}..."
            raise self.refused(
                f"has {number} beside numbers with a point in the field {path!r}, and double would cut it"
            )
        return frames.canonical_type(of.type)


def _add_whole(into: _Field, values: pa.Array) -> None:
    """Look at the whole numbers that a float64 may not hold."""
    far = pc.or_(pc.greater(values, _EXACT), pc.less(values, -_EXACT))
    for number in values.filter(pc.fill_null(far, False)).to_pylist() if into.long is None else ():
        into.add_number(number)
        if into.long is not None:
            return


def _as_text(type: pa.DataType) -> pa.DataType:
    if pa.types.is_nested(type):
        return mapped(type, _as_text)
    return pa.string() if pa.types.is_temporal(type) else type


def _is_deep(data: bytes) -> bool:
    """Return whether values may be nested deeper than a type should be. Arrow has no such limit."""
    array = np.frombuffer(data, np.uint8)
    steps = _STEPS[array]
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0)) > _DEEPEST


def _check_depth(raw: Any, depth: int = 0) -> None:
    """Raise UnfitError for a value that is nested too deep."""
    if depth > _DEEPEST:
        raise UnfitError("it is nested too deep")
    for value in raw.values() if isinstance(raw, dict) else raw if isinstance(raw, list) else ():
        _check_depth(value, depth + 1)
