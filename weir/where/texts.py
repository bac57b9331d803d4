"""Functions that make texts of texts and moments, whose other arguments are literals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

from weir.where.expressions import (
    DATE,
    DAY,
    INTEGER,
    STRING,
    TIMESTAMP,
    Expression,
    Refused,
    Type,
)

FIRST_DAY, END = -719_162, 2_932_897
"""The years 1 to 9999, in days since 1970."""

_PARTS = {"yyyy": "%Y", "MM": "%m", "dd": "%d", "HH": "%H", "mm": "%M", "ss": "%S"}
_PATTERN = re.compile(r"(?:yyyy|MM|dd|HH|mm|ss|[-/:. ,])+")


def replaced(arguments: Sequence[Expression], text: str) -> Expression:
    """Return replace(text, search, by)."""
    value, (search, by) = _checked(arguments, (STRING, STRING, STRING), text)
    if not search:  # there Spark leaves the text as it is
        return value
    return _of(value, lambda values: values.str.replace_all(search, by, literal=True), text)


def split_part(arguments: Sequence[Expression], text: str) -> Expression:
    """Return split_part(text, delimiter, number), counted from 1, or from the end if the number is negative."""
    value, (delimiter, number) = _checked(arguments, (STRING, STRING, INTEGER), text)
    if not delimiter or not number:
        raise Refused(f"{text}: Spark has a rule of its own for an empty delimiter, and fails for part 0")
    at = number - 1 if number > 0 else number

    def part(values: pl.Series) -> pl.Series:
        return empty_where_none(values.str.split(delimiter).list.get(at, null_on_oob=True), values)

    return _of(value, part, text)


def date_formatted(arguments: Sequence[Expression], text: str) -> Expression:
    """Return date_format(moment, pattern), of a pattern of whole years, months, days, hours, minutes and seconds."""
    kind = arguments[0].type.kind
    moment, (pattern,) = _checked(arguments, (kind if kind in (DATE, TIMESTAMP) else TIMESTAMP, STRING), text)
    if not _PATTERN.fullmatch(pattern):
        raise Refused(f"{text}: only {', '.join(_PARTS)} with separators are followed here")
    written = re.sub("|".join(_PARTS), lambda match: _PARTS[match[0]], pattern)
    day = DAY if kind == TIMESTAMP else 1

    def shown(moments: pl.Series) -> pl.Series:
        check_years(moments, day, text)
        whole = moments if kind == TIMESTAMP else moments * DAY
        return whole.cast(pl.Datetime("us")).dt.strftime(written)

    return Expression(Type(STRING), lambda rows: shown(moment.of(rows)), text, may_fail=True)


def check_years(moments: pl.Series, day: int, text: str) -> None:
    """Refuse moments whose year Spark may show otherwise. day: the length of one, as they are held."""
    if ((moments < FIRST_DAY * day) | (moments >= END * day)).any():
        raise Refused(f"{text}: a year before 1 or after 9999")


def empty_where_none(parts: pl.Series, values: pl.Series) -> pl.Series:
    """Parts of texts, "" where a text has no such part, and null where there is no text."""
    return parts.fill_null("").zip_with(values.is_not_null(), values)


def _checked(arguments: Sequence[Expression], kinds: Sequence[str], text: str) -> tuple[Expression, list[Any]]:
    """Return the first argument, and the values of the others, which are literals."""
    if [argument.type.kind for argument in arguments] != list(kinds):
        raise Refused(f"{text} is not understood")
    first, *others = arguments
    if not all(other.literal for other in others):
        raise Refused(f"{text}: all arguments but the first are written out here")
    return first, [other.value for other in others]


def _of(value: Expression, function: Callable[[pl.Series], pl.Series], text: str) -> Expression:
    return Expression(Type(STRING), lambda rows: function(value.of(rows)), text, value.may_fail)
