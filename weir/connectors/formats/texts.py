"""Text to values: each is what Spark reads there, or is refused. Whole columns at a time.

Spark takes more (docs/how-to/source-files.md lists it): what is refused here is what people would not agree about.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from state_ops.errors import PipelineError

_NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
_SYNTAX = {
    "int": r"^[+-]?[0-9]+$",
    "float": rf"^([+-]?{_NUMBER}|NaN|-?Inf|-?Infinity)$",
    "decimal": rf"^[+-]?{_NUMBER}$",
    "date": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
    "timestamp": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}(:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?"
    r"(Z|[+-](0[0-9]|1[0-7])(:?[0-5][0-9])?|[+-]18(:?00)?)?)?)?)?$",
}
_SYNTAX_OF_ONE = {kind: re.compile(syntax, re.ASCII) for kind, syntax in _SYNTAX.items()}
_ZONE = r"(Z|[ T][0-9:.]+[+-][0-9:]+)$"
_STRANGE_ZONE = r"[+-](1[89]|2[0-9])(:?[0-9]{2})?$|[ T][0-9]{2}(:[0-9]{2})?(Z|[+-].*)$"  # too far, or without seconds
_EXPONENT = re.compile("[eE]")
_DIGITS = 38
_SURE = 15  # significant digits that each float64 holds
_MOST_OF_FLOAT = 800  # significant digits: the longest float64 has 767
_LEAST_NORMAL = 2.3e-308
_FIRST = 16
_SHORT = len("2024-01-01T00:00Z")
_LEAST, _MOST = -62_135_596_800_000_000, 253_402_300_799_999_999  # microseconds: the years 1 to 9999
_DAY = 86_400_000_000
_MOMENT = pa.timestamp("us", tz="UTC")
_BOOLEANS = pa.array(["false", "true"])
NOWHERE = np.zeros(0, np.int64)
INFERRED = (pa.bool_(), pa.int64(), pa.float64(), pa.date32(), _MOMENT)
"""The types that texts can have by themselves, the first that fits."""
NO_LONGER = "has more digits than double holds; declare it in schema="
"""What is said of a number that a column without a declared type would shorten."""


T = TypeVar("T")


class _UnfitError(Exception):
    """Some text is no value of its type."""


def check(type: pa.DataType, where: str) -> None:
    """Raise PipelineError for a canonical type that text has no values of."""
    if _kind(type) is None and not (pa.types.is_string(type) or pa.types.is_binary(type) or pa.types.is_boolean(type)):
        raise PipelineError(
            f"Text has no values of the type {type}.", where=where, next="Declare the column as text, and convert it."
        )


def fits(texts: pa.Array, type: pa.DataType) -> bool:
    """Return whether all of some texts are values of a type, and no digit of theirs is lost as such.

    The first few are looked at by Python: most types are ruled out there, at a thousandth of the cost.
    """
    if not all(_fits(text, type) for text in texts[:_FIRST].to_pylist() if text):
        return False
    if len(texts) <= _FIRST:
        return True
    return all(not len(converted(part, type)[1]) and not len(shortened(part, type)) for part in (texts[:256], texts))


def _fits(text: str, type: pa.DataType) -> bool:
    if pa.types.is_boolean(type):
        return text.lower() in ("true", "false")
    return value(text, type) is not None and (type != pa.float64() or keeps_digits(text))


def shortened(texts: pa.Array, type: pa.DataType) -> np.ndarray:
    """Return the places of the texts that are numbers with more digits than their type holds; none but of float64.

    Args:
        texts: Texts that are values of the type, and others, which are not among the places.
    """
    if type != pa.float64():
        return NOWHERE
    is_short = pc.and_(
        pc.less_equal(pc.binary_length(texts), _SURE), pc.invert(pc.match_substring(texts, "e", ignore_case=True))
    )
    places = pc.indices_nonzero(pc.fill_null(pc.invert(is_short), False))
    if not len(places):
        return NOWHERE
    lost, is_number = [], _SYNTAX_OF_ONE["float"].fullmatch
    numbers = converted(texts.take(places), type)[0].to_pylist()
    for place, text, written in zip(
        places.to_pylist(), texts.take(places).to_pylist(), map(repr, numbers), strict=True
    ):
        if text != written and is_number(text) and not keeps_digits(text):
            lost.append(place)
    return np.array(lost, np.int64)


def keeps_digits(text: str) -> bool:
    """Return whether a number is the same one if it is read as float64, and written again with as many digits.

    Example:
        >>> from weir.connectors.formats.texts import keeps_digits
        >>> keeps_digits("0.1"), keeps_digits("9007199254740993")
        (True, False)
    """
    number = float(text)
    if not math.isfinite(number):
        return _is_word(text)
    digits = len(_EXPONENT.split(text)[0].replace(".", "").lstrip("+-0").rstrip("0"))
    if number == 0 or digits == 0:
        return digits == 0
    if digits <= _SURE and abs(number) > _LEAST_NORMAL:
        return True
    return digits <= _MOST_OF_FLOAT and Decimal(f"{number:.{digits - 1}e}") == Decimal(text)


def converted(texts: pa.Array, type: pa.DataType) -> tuple[pa.Array, np.ndarray]:
    """Texts as values of a canonical type, and at which of them there is none: null stands there."""
    if pa.types.is_string(type):
        return texts, NOWHERE
    if pa.types.is_binary(type):
        return texts.cast(type), NOWHERE
    if pa.types.is_boolean(type):
        valued = _valued(texts)
        places = pc.index_in(pc.utf8_lower(valued), _BOOLEANS)
        return pc.equal(places, 1), _lost(valued, places)
    try:
        return _cast(texts, type), NOWHERE
    except (_UnfitError, pa.ArrowInvalid):
        return _converted_slowly(texts, type)


def value(text: str, type: pa.DataType) -> Any:
    """Return one text converted as by `converted`, in Python; None: it is no value of the type."""
    kind = str(_kind(type))
    if not _SYNTAX_OF_ONE[kind].fullmatch(text):
        return None
    if kind == "date":
        return _or_none(lambda: date.fromisoformat(text))
    if kind == "timestamp":
        moment = _or_none(lambda: datetime.fromisoformat(text))
        return moment and _or_none(lambda: (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC))
    if kind == "decimal":
        return _decimal(text, type)
    if type == pa.float64():
        number = float(text)
        return None if math.isinf(number) and not _is_word(text) else number
    return converted(pa.array([text]), type)[0][0].as_py()


def _is_word(text: str) -> bool:
    """Return whether a float is written as a word: NaN or Infinity, which 1e400 is not."""
    return "n" in text.lower()


def _or_none(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except (ValueError, OverflowError):
        return None


def _decimal(text: str, type: pa.DataType) -> Decimal | None:
    exact = Context(prec=type.precision, traps=[InvalidOperation, Inexact])
    try:
        return Decimal(text).quantize(Decimal(1).scaleb(-type.scale), context=exact)
    except (InvalidOperation, Inexact):
        return None


def _plain(text: str | None, type: pa.DataType) -> str | None:
    """Return a number without an exponent; None if it does not fit."""
    number = None if text is None else _decimal(text, type)
    return None if number is None else f"{number:f}"


def _kind(type: pa.DataType) -> str | None:
    kinds = {
        "int": pa.types.is_integer, "float": pa.types.is_floating, "decimal": pa.types.is_decimal,
        "date": pa.types.is_date, "timestamp": pa.types.is_timestamp,
    }  # fmt: skip
    return next((name for name, is_kind in kinds.items() if is_kind(type)), None)


def _valued(texts: pa.Array) -> pa.Array:
    """Return the texts without those that are quoted and empty, which are null for all that is no text."""
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)


def _lost(texts: pa.Array, values: pa.Array) -> np.ndarray:
    if values.null_count == texts.null_count:
        return NOWHERE
    lost: np.ndarray = pc.and_(values.is_null(), texts.is_valid()).to_numpy(zero_copy_only=False)
    return np.flatnonzero(lost)


def _cast(texts: pa.Array, type: pa.DataType) -> pa.Array:
    """Return all texts, by Arrow. Raises ArrowInvalid, and _UnfitError for what Arrow takes and Spark does not."""
    if pa.types.is_integer(type) and _has(texts, b"xX"):  # hexadecimal
        raise _UnfitError
    if pa.types.is_floating(type) and _has(texts, b"nN"):  # "inf" and "nan" in any case
        raise _UnfitError
    if pa.types.is_decimal(type) and (_has(texts, b"eE") or _longest(texts) > _DIGITS):  # of some Arrow makes 0
        raise _UnfitError
    if pa.types.is_timestamp(type):
        return _in_years(_moments(texts), _LEAST, _MOST)
    values = texts.cast(type)
    if pa.types.is_floating(type) and pc.any(pc.is_inf(values)).as_py():  # beyond the largest, since no text is a word
        raise _UnfitError
    return _in_years(values, _LEAST // _DAY, _MOST // _DAY) if pa.types.is_date(type) else values


def _has(texts: pa.Array, letters: bytes) -> bool:
    data = texts.buffers()[2]
    return data is not None and any(bytes([letter]) in memoryview(data).tobytes() for letter in letters)


def _longest(texts: pa.Array) -> int:
    return pc.max(pc.binary_length(texts)).as_py() or 0


def _moments(texts: pa.Array) -> pa.Array:
    try:
        values = texts.cast(_MOMENT)
    except pa.ArrowInvalid:
        return texts.cast(pa.timestamp("us")).cast(_MOMENT)
    is_usual = pc.and_(pc.ends_with(texts, "Z"), pc.greater(pc.binary_length(texts), _SHORT))
    if not pc.all(is_usual).as_py() and pc.any(pc.match_substring_regex(texts, _STRANGE_ZONE)).as_py():
        raise _UnfitError
    return values


def _in_years(values: pa.Array, least: int, most: int) -> pa.Array:
    extremes = pc.min_max(values.cast(pa.int64() if pa.types.is_timestamp(values.type) else pa.int32()))
    if extremes["min"].is_valid and not (least <= extremes["min"].as_py() and extremes["max"].as_py() <= most):
        raise _UnfitError
    return values


def _converted_slowly(texts: pa.Array, type: pa.DataType) -> tuple[pa.Array, np.ndarray]:
    """Return each text that is written as a value of its kind, in the spelling that Arrow takes.

    Some of them may be too large, or no day of the calendar.
    """
    kind = _kind(type)
    valued = _valued(texts)
    spelled = pc.if_else(pc.match_substring_regex(valued, _SYNTAX[str(kind)]), valued, pa.scalar(None, valued.type))
    unfit = _lost(valued, spelled)
    if kind in ("int", "float"):
        spelled = pc.replace_substring_regex(spelled, r"^\+", "")
    if kind == "decimal":
        spelled = pa.array([_plain(text, type) for text in spelled.to_pylist()], pa.string())
    if kind == "timestamp":
        spelled = pc.replace_substring_regex(spelled, r"(\.[0-9]{6})[0-9]+", r"\1")
        spelled = pc.replace_substring_regex(spelled, r"^([0-9-]{10})$", r"\1T00")
        has_zone = pc.match_substring_regex(spelled, _ZONE)
        spelled = pc.if_else(has_zone, spelled, pc.binary_join_element_wise(spelled, "Z", ""))
    values = pa.concat_arrays(_by_halves(spelled, type))
    if kind == "float":
        is_beyond = pc.and_(pc.is_inf(values), pc.invert(pc.match_substring(spelled, "n", ignore_case=True)))
        values = pc.if_else(is_beyond, pa.scalar(None, type), values)
    return values, np.union1d(unfit, _lost(valued, values))


def _by_halves(spelled: pa.Array, type: pa.DataType) -> list[pa.Array]:
    try:
        if pa.types.is_timestamp(type):
            return [_in_years(spelled.cast(_MOMENT), _LEAST, _MOST)]
        values = spelled.cast(type)
        return [_in_years(values, _LEAST // _DAY, _MOST // _DAY) if pa.types.is_date(type) else values]
    except (_UnfitError, pa.ArrowInvalid):
        if len(spelled) == 1:
            return [pa.nulls(1, type)]
        middle = len(spelled) // 2
        return [*_by_halves(spelled[:middle], type), *_by_halves(spelled[middle:], type)]
