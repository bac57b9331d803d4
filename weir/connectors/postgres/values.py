"""A Postgres table's rules for values beyond their types. Rows are judged by them before they are committed.

What the server alone knows stays for the publish: constraints, triggers, the size of an index entry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow.nested import elements
from state_ops.arrow.unfit_values import UnfitValue

_LONGEST = (1 << 30) - 1024  # bytes of a value; the server takes no message of 1 GiB
_LONGEST_JSONB = (1 << 28) - 1  # bytes
_WHOLE_DIGITS, _DECIMALS = 131_072, 16_383  # of a numeric
_HEX = "[0-9a-fA-F]{4}(?:-?[0-9a-fA-F]{4}){7}"
_UUID = rf"\A(?:\{{{_HEX}\}}|{_HEX})\z"
_SHOWN = 40
_CODECS = {
    "LATIN1": "latin-1", "LATIN2": "iso8859-2", "LATIN3": "iso8859-3", "LATIN4": "iso8859-4", "LATIN5": "iso8859-9",
    "LATIN6": "iso8859-10", "LATIN7": "iso8859-13", "LATIN8": "iso8859-14", "LATIN9": "iso8859-15",
    "LATIN10": "iso8859-16", "WIN866": "cp866", "WIN874": "cp874", "KOI8R": "koi8-r", "KOI8U": "koi8-u",
    "EUC_CN": "gb2312", "EUC_JP": "euc_jp", "EUC_KR": "euc_kr",
    **{f"WIN{number}": f"cp{number}" for number in range(1250, 1259)},
    **{f"ISO_8859_{number}": f"iso8859-{number}" for number in range(5, 9)},
}  # fmt: skip
_LARGE = ("euc_jp", "euc_kr")  # codecs of Python with letters that the encodings of Postgres do not have
_MOST_BYTES = 3  # of a letter; Python writes a syllable that EUC_KR lacks as four letters
_LACKING = frozenset("\xa2\xa3\xa5\xac\u2016\u203e\u2212\u301c")
_ALL = ("UTF8", "SQL_ASCII")


@dataclass(frozen=True, slots=True)
class TextRule:
    """A column's rule for texts.

    Attributes:
        type: The column's type: text, varchar, uuid, json, jsonb; of an enum "enum", of an array _text.
        longest: How many characters they have at most, blanks at the end apart; None: any number.
        labels: Those that there are, of an enum.
    """

    type: str
    longest: int | None = None
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PostgresRules:
    """The rules of a table's values, as `definition.sink.ValueRules`.

    Attributes:
        key: The columns of the key, which are null in no row.
        required: Other columns that are null in no row that is inserted.
        texts: By column that has texts, what it asks of them.
        encoding: The database's, as the server calls it.
        change: The column that says what became of a row, and the values with which rows go.
    """

    key: tuple[str, ...]
    required: tuple[str, ...]
    texts: tuple[tuple[str, TextRule], ...]
    encoding: str
    change: tuple[str, tuple[str, ...], tuple[str, ...]]

    def refused(self, rows: pa.Table) -> Iterator[UnfitValue]:
        """Yield what the table does not take."""
        yield from self._changes(rows)
        for name in (*self.key, *self.required):
            if name in rows.column_names and rows.column(name).null_count:
                missing = pc.is_null(rows.column(name))
                if name not in self.key:
                    missing = pc.and_(missing, self._comes(rows))
                is_key = name in self.key
                problem = f"is null, and {'the key of the sink' if is_key else 'NOT NULL in the table'}"
                yield from _where(missing, name, partial(_same, problem))
        for field in rows.schema:
            column = rows.column(field.name)
            if column.nbytes > _LONGEST and (pa.types.is_string(field.type) or pa.types.is_binary(field.type)):
                too_long = pc.greater(pc.binary_length(column), _LONGEST)
                yield from _where(too_long, field.name, lambda _: "has more than 1 GiB")
        for name, rule in self.texts:
            yield from self._texts(name, rows.column(name), rule)

    def _comes(self, rows: pa.Table) -> pa.ChunkedArray | pa.Scalar:
        """Return which rows are inserted."""
        name, _, goes = self.change
        return pc.invert(pc.is_in(rows.column(name), pa.array(goes))) if name in rows.column_names else pa.scalar(True)

    def _changes(self, rows: pa.Table) -> Iterator[UnfitValue]:
        name, known, _ = self.change
        if name in rows.column_names:
            column = rows.column(name)
            unknown = pc.invert(pc.is_in(column, pa.array(known)))
            yield from _where(unknown, name, lambda row: f"is {_shown(column[row].as_py())}, which is no change")

    def _texts(self, name: str, column: pa.ChunkedArray, rule: TextRule) -> Iterator[UnfitValue]:
        before = 0
        for chunk in column.chunks:
            values, owners = chunk, None
            if rule.type.startswith("_"):
                values, counts = elements(chunk)
                owners = counts.cumsum()
            for at, problem in _problems(values, rule, codec_of(self.encoding)):
                row = at if owners is None else int(owners.searchsorted(at, side="right"))
                yield UnfitValue(before + row, name, problem)
            before += len(chunk)


def _problems(texts: pa.Array, rule: TextRule, codec: str | None) -> Iterator[tuple[int, str]]:
    """Yield the places of texts that are refused, with the problem as a clause."""
    yield from _at(pc.match_substring(texts, "\0"), lambda _: "has a character NUL, which Postgres does not take")
    if codec is not None:
        yield from _each(texts, lambda text: _misencoded(text, codec))
    if rule.longest is not None:
        too_long = pc.greater(pc.utf8_length(pc.utf8_rtrim(texts, " ")), rule.longest)
        yield from _at(too_long, lambda _: f"has more than {rule.longest} characters, which the table's column holds")
    elif rule.type == "enum":
        unknown = pc.and_(pc.is_valid(texts), pc.invert(pc.is_in(texts, pa.array(rule.labels, pa.string()))))
        yield from _at(unknown, lambda at: f"is {_shown(texts[at].as_py())}, which is no value of the enum")
    elif rule.type == "uuid":
        matches = pc.match_substring_regex(texts, _UUID)
        yield from _at(pc.invert(matches), lambda at: f"is no uuid: {_shown(texts[at].as_py())}")
    elif rule.type == "json":
        yield from _each(texts, _no_json)
    elif rule.type == "jsonb":
        yield from _each(texts, lambda text: _no_jsonb(text, codec))


def _where(mask: pa.ChunkedArray, column: str, problem: Callable[[int], str]) -> Iterator[UnfitValue]:
    for row, text in _at(mask, problem):
        yield UnfitValue(row, column, text)


def _at(mask: pa.Array | pa.ChunkedArray, problem: Callable[[int], str]) -> Iterator[tuple[int, str]]:
    for at in pc.indices_nonzero(pc.fill_null(mask, False)).to_pylist():
        yield at, problem(at)


def _each(texts: pa.Array, problem: Callable[[str], str | None]) -> Iterator[tuple[int, str]]:
    for at, text in enumerate(texts.to_pylist()):
        if text is not None and (why := problem(text)) is not None:
            yield at, why


def _same(problem: str, _: int) -> str:
    return problem


def _shown(text: str | None) -> str:
    return repr(text if text is None or len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def codec_of(encoding: str) -> str | None:
    """Return Python's codec for an encoding of Postgres, or None for one that has all letters. Raises LookupError."""
    return None if encoding in _ALL else _CODECS[encoding]


def _misencoded(text: str, codec: str) -> str | None:
    try:
        text.encode(codec)
        if codec not in _LARGE:
            return None
        lacking = next((letter for letter in text if letter in _LACKING or len(letter.encode(codec)) > _MOST_BYTES), "")
    except UnicodeEncodeError as error:
        lacking = text[error.start]
    return f"has the character {lacking!r}, which the database's encoding does not have" if lacking else None


# -- JSON


def _no_json(text: str) -> str | None:
    """Why a text is none that the type json takes."""
    try:
        _LENIENT.decode(text)
    except RecursionError:
        return "is JSON that is nested too deep"
    except ValueError:
        return f"is no JSON: {_shown(text)}"
    return None


def _no_jsonb(text: str, codec: str | None) -> str | None:
    """Return the reason why the type jsonb does not take a text, or None if it does.

    It takes numbers and escapes only as far as it can store them.
    """
    if len(text) > _LONGEST_JSONB // 4 and len(text.encode()) > _LONGEST_JSONB:
        return "is longer than 256 MiB, which is the most that jsonb holds"
    try:
        value = (_OF_LONG_TEXTS if len(text) > _DECIMALS else _OF_SHORT_TEXTS).decode(text)
    except RecursionError:
        return "is JSON that is nested too deep"
    except _TooLargeError as error:
        return f"has the number {_shown(str(error))}, which jsonb cannot hold"
    except ValueError:
        return f"is no JSON: {_shown(text)}"
    return None if "\\u" not in text else _unstorable_escape(value, codec)


def _unstorable_escape(value: Any, codec: str | None) -> str | None:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, str):
            if "\0" in part:
                return "has the escape \\u0000, which jsonb does not take"
            if any("\ud800" <= letter <= "\udfff" for letter in part):
                return "has half of a surrogate pair as an escape, which jsonb does not take"
            if codec is not None and (why := _misencoded(part, codec)) is not None:
                return why
    return None


class _TooLargeError(ValueError):
    """A number is not one that a numeric holds."""


def _check_exponent(text: str) -> None:
    if "e" in text or "E" in text:
        _check_number(text)


def _check_number(text: str) -> None:
    number = Decimal(text)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), "JSON has no other numbers"
    if (number and number.adjusted() >= _WHOLE_DIGITS) or -exponent > _DECIMALS:
        raise _TooLargeError(text)


def _refuse(text: str) -> None:
    raise ValueError(text)


# A decoder takes longer to make than a text to decode.
_LENIENT = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_refuse)
_OF_SHORT_TEXTS = json.JSONDecoder(parse_int=len, parse_float=_check_exponent, parse_constant=_refuse)
_OF_LONG_TEXTS = json.JSONDecoder(parse_int=_check_number, parse_float=_check_number, parse_constant=_refuse)
