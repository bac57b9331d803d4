"""Arithmetic, casts and functions in ANSI mode, in which an overflow or a division by zero fails the epoch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import polars as pl

from weir.where import conditions, patterns, texts
from weir.where.expressions import (
    BOOLEAN,
    DATE,
    DAY,
    DECIMAL,
    DOUBLE,
    FLOAT,
    INTEGER,
    NULL,
    NUMBERS,
    OTHER,
    STRING,
    TIMESTAMP,
    Expression,
    Fails,
    Refused,
    Type,
    any_fails,
    folded,
    literal,
    null,
    nulls,
    repeated,
    strict,
    typed_null,
    where_asked,
)

Operation = Callable[[pl.Series, pl.Series], pl.Series]

BITS = {"tinyint": 8, "byte": 8, "smallint": 16, "short": 16, "int": 32, "integer": 32, "bigint": 64, "long": 64}
_BLANK = "".join(map(chr, [*range(33), 127]))  # what Spark takes away around a number
_EXACT: dict[str, Operation] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def fits(number: int, bits: int) -> bool:
    """Return whether an integer of so many bits holds a number."""
    return -(1 << bits - 1) <= number < 1 << bits - 1


def _outside(numbers: pl.Series, bits: int) -> pl.Series:
    return (numbers < -(1 << bits - 1)) | (numbers > (1 << bits - 1) - 1)


# -- arithmetic


def calculated(sign: str, left: Expression, right: Expression, text: str, result: Type | None = None) -> Expression:
    """Two numbers with +, -, *, /, % or DIV between them.

    Args:
        result: Its type, where that is known.
    """
    left, right = typed_null(left, right.type), typed_null(right, left.type)
    return folded(_calculated(sign, left, right, text, result), left, right)


def _calculated(sign: str, left: Expression, right: Expression, text: str, result: Type | None) -> Expression:
    kinds = {left.type.kind, right.type.kind}
    if not kinds <= set(NUMBERS):
        wrong = left if left.type.kind not in NUMBERS else right
        raise Refused(f"{text}: {wrong.text} is {wrong.type}, not a number")
    if kinds == {INTEGER}:
        return _of_integers(sign, left, right, text)
    if kinds <= {INTEGER, DECIMAL}:
        return _of_decimals(sign, left, right, text, result)
    if kinds == {FLOAT} and sign != "/":
        raise Refused(f"{text}: Spark calculates in 32 bits; write CAST(... AS double)")
    if sign == "div":
        raise Refused(f"{text}: DIV is of whole numbers here")
    first, second = (
        conditions.as_double(operand, FLOAT in kinds and DOUBLE not in kinds, text) for operand in (left, right)
    )
    if sign in _EXACT:
        return Expression(Type(DOUBLE), strict(_EXACT[sign], first, second), text, any_fails([first, second]))
    function = _by_numpy(_quotient if sign == "/" else _remainder)
    return _divided(Type(DOUBLE), function, sign, first, second, text)


def _divided(kind: Type, function: Operation, sign: str, left: Expression, right: Expression, text: str) -> Expression:
    """Spark evaluates the divisor first, and the dividend only where that is not null."""
    zero = "REMAINDER_BY_ZERO" if sign == "%" else "DIVIDE_BY_ZERO"

    def divide(divisor: pl.Series, dividend: pl.Series) -> pl.Series:
        if ((divisor == 0) & dividend.is_not_null()).any():
            raise Fails(f"[{zero}] {text}")
        return function(dividend, divisor)

    safe = right.literal and right.value not in (0, None, -1 if sign == "div" else 0)
    return Expression(kind, strict(divide, right, left), text, left.may_fail or not safe)


def _by_numpy(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Operation:
    """Return an operation that NumPy computes, since Polars has none or no exact one. Nulls stay."""

    def of(left: pl.Series, right: pl.Series) -> pl.Series:
        with np.errstate(all="ignore"):
            result = pl.Series(function(left.fill_null(1).to_numpy(), right.fill_null(1).to_numpy()))
        present = left.is_not_null() & right.is_not_null()
        return result.zip_with(present, pl.Series([None], dtype=result.dtype))

    return of


def _quotient(dividend: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """Return the nearest double. By one number Polars divides by multiplying with 1 through it, which is often
    another."""
    result: np.ndarray = np.true_divide(dividend, divisor)
    return result


def _remainder(dividend: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """Return the remainder, with the sign of the dividend."""
    result: np.ndarray = np.fmod(dividend, divisor)
    return result


def _cut(dividend: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """Divided, towards zero."""
    result: np.ndarray = (dividend - np.fmod(dividend, divisor)) // divisor
    return result


def _of_integers(sign: str, left: Expression, right: Expression, text: str) -> Expression:
    if sign == "/":
        quotient: Operation = lambda a, b: _by_numpy(_quotient)(a.cast(pl.Float64), b.cast(pl.Float64))  # noqa: E731
        return _divided(Type(DOUBLE), quotient, sign, left, right, text)
    bits = 64 if sign == "div" else max(left.type.size, right.type.size)
    kind = Type(INTEGER, bits)
    overflow = f"[ARITHMETIC_OVERFLOW] {text} is no {kind}"
    if sign == "%":
        return _divided(kind, _by_numpy(_remainder), sign, left, right, text)
    if sign == "div":

        def cut(dividend: pl.Series, divisor: pl.Series) -> pl.Series:
            if ((dividend == -(1 << 63)) & (divisor == -1)).any():
                raise Fails(overflow)
            return _by_numpy(_cut)(dividend, divisor)

        return _divided(kind, cut, sign, left, right, text)
    wide = pl.Int128 if bits == 64 else pl.Int64

    def of(first: pl.Series, second: pl.Series) -> pl.Series:
        numbers = _EXACT[sign](first.cast(wide), second.cast(wide))
        if _outside(numbers, bits).any():
            raise Fails(overflow)
        return numbers.cast(pl.Int64)

    return Expression(kind, strict(of, left, right), text, may_fail=True)


def _of_decimals(sign: str, left: Expression, right: Expression, text: str, result: Type | None) -> Expression:
    """Return the arithmetic of two decimals, for which no digit may be rounded."""
    a, b = conditions.as_decimal(left.type), conditions.as_decimal(right.type)
    if sign == "*":
        whole, scale = a.size - a.scale + b.size - b.scale + 1, a.scale + b.scale
        operands = [conditions.rescaled(left, a.scale), conditions.rescaled(right, b.scale)]
    elif sign in ("+", "-"):
        whole, scale = max(a.size - a.scale, b.size - b.scale) + 1, max(a.scale, b.scale)
        operands = [conditions.rescaled(left, scale), conditions.rescaled(right, scale)]
    else:
        raise Refused(f"{text}: Spark rounds decimals by rules that are not followed here; write CAST(... AS double)")
    kind = Type(DECIMAL, whole + scale, scale) if result is None else result
    conditions.check_digits(kind.size - kind.scale, kind.scale, text)
    return Expression(kind, strict(_EXACT[sign], *operands), text, any_fails(operands))


def concatenated(left: Expression, right: Expression, text: str) -> Expression:
    """Two texts with || between them."""
    left, right = typed_null(left, right.type), typed_null(right, left.type)
    for operand in (left, right):
        if operand.type.kind != STRING:
            raise Refused(f"{text}: {operand.text} is {operand.type}, not a text")
    joined = Expression(Type(STRING), strict(operator.add, left, right), text, any_fails([left, right]))
    return folded(joined, left, right)


# -- casts


@dataclass(frozen=True, slots=True)
class _Cast:
    """The conversion of values of one type into another.

    Attributes:
        convert: Gives a value for each, of any kind where it fails.
        failing: Where it fails; None for nowhere.
        condition: Spark's name of the error.
    """

    convert: Callable[[pl.Series], pl.Series]
    failing: Callable[[pl.Series], pl.Series] | None = None
    condition: str = "CAST_OVERFLOW"


def cast(value: Expression, name: str, tries: bool, text: str) -> Expression:
    """CAST, or TRY_CAST.

    Args:
        name: Of the type, as it stands in the SQL.
        tries: Null instead of a failure.
    """
    to = BOOLEAN if name == "boolean" else INTEGER if name in BITS else name
    kind = Type(to, BITS.get(name, 0))
    if value.type.kind == NULL and to in (BOOLEAN, INTEGER, FLOAT, DOUBLE, STRING, DATE, TIMESTAMP):
        return null(kind, text)
    return folded(_cast(value, name, kind, tries, text), value)


def _cast(value: Expression, name: str, kind: Type, tries: bool, text: str) -> Expression:
    to = kind.kind
    if value.type.kind == to and to in (DOUBLE, STRING, BOOLEAN, DATE, TIMESTAMP):
        return Expression(value.type, value.of, text, value.may_fail)
    way = _ways(value.type, kind, text).get((value.type.kind, to))
    if way is None:
        raise Refused(f"{text}: a cast from {value.type} to {name} is not followed here")
    convert, failing = way.convert, way.failing
    if failing is None:
        return Expression(kind, lambda rows: convert(value.of(rows)), text, value.may_fail)

    def of(rows: pl.DataFrame) -> pl.Series:
        given = value.of(rows)
        fails = failing(given)
        if not fails.any():
            return convert(given)
        if not tries:
            raise Fails(f"[{way.condition}] {text}: {given.filter(fails)[0]!r} is no {kind}")
        return convert(given).zip_with(~fails, nulls(to))

    return Expression(kind, of, text, value.may_fail or not tries)


def _ways(given: Type, to: Type, text: str) -> dict[tuple[str, str], _Cast]:
    whole = _Cast(lambda numbers: numbers.cast(pl.Int64, strict=False), partial(_no_integer, given, to, text))
    return {
        (INTEGER, INTEGER): _Cast(lambda numbers: numbers, lambda numbers: _outside(numbers, to.size)),
        (DOUBLE, INTEGER): whole,
        (FLOAT, INTEGER): whole,
        (STRING, INTEGER): _Cast(_read, lambda texts: _unreadable(texts, to.size), "CAST_INVALID_INPUT"),
        (BOOLEAN, INTEGER): _Cast(lambda values: values.cast(pl.Int64)),
        **dict.fromkeys(
            [(INTEGER, DOUBLE), (FLOAT, DOUBLE), (DECIMAL, DOUBLE), (BOOLEAN, DOUBLE)],
            _Cast(conditions.to_double(given)),
        ),
        (INTEGER, STRING): _Cast(lambda numbers: numbers.cast(pl.String)),
        (BOOLEAN, STRING): _Cast(lambda values: values.cast(pl.String)),
        (INTEGER, BOOLEAN): _Cast(lambda numbers: numbers != 0),
        (TIMESTAMP, DATE): _Cast(lambda micros: micros // DAY),
        (DATE, TIMESTAMP): _Cast(conditions.micros_of(text)),
    }


def _no_integer(given: Type, to: Type, text: str, numbers: pl.Series) -> pl.Series:
    """Return for each double whether its integer part needs more bits than the type has."""
    end = 2.0 ** (to.size - 1)
    if (to.size == 64 or (given.kind == FLOAT and to.size == 32)) and (numbers == end).any():
        raise Refused(f"{text}: Spark takes a number for its neighbour here")
    return numbers.is_nan() | (numbers >= end) | ((numbers < -end) if to.size == 64 else (numbers <= -end - 1))


def _read(texts: pl.Series) -> pl.Series:
    return texts.str.strip_chars(_BLANK).cast(pl.Int128, strict=False).cast(pl.Int64, strict=False)


def _unreadable(texts: pl.Series, bits: int) -> pl.Series:
    written = texts.str.strip_chars(_BLANK).str.contains(r"\A[+-]?[0-9]+\z")
    numbers = _read(texts)
    return texts.is_not_null() & ~(written & numbers.is_not_null() & ~_outside(numbers, bits))


# -- functions

_LENGTHS = ("length", "char_length", "character_length", "len")
_PARTS = ("contains", "startswith", "endswith")
_OF_DATES = ("year", "month", "day", "dayofmonth")
_OF_TIMES = ("hour", "minute", "second")
_ANY = (BOOLEAN, *NUMBERS, STRING, DATE, TIMESTAMP, NULL, OTHER)
_FUNCTIONS = {
    **dict.fromkeys(("isnull", "isnotnull"), _ANY),
    **dict.fromkeys((*_LENGTHS, "lower", "upper", "lcase", "ucase", "trim"), (STRING,)),
    **dict.fromkeys(_OF_DATES, (DATE, TIMESTAMP)),
    **dict.fromkeys(_OF_TIMES, (TIMESTAMP,)),
    "isnan": (DOUBLE, FLOAT),
    "abs": NUMBERS,
    "unix_micros": (TIMESTAMP,),
    "timestamp_micros": (INTEGER,),
}
"""Functions of one argument, with the types that it may have."""
_MAKING_TEXTS: dict[str, tuple[Sequence[int], Callable[[Sequence[Expression], str], Expression]]] = {
    "replace": ((3,), texts.replaced),
    "split_part": ((3,), texts.split_part),
    "date_format": ((2,), texts.date_formatted),
    "regexp_extract": ((2, 3), patterns.extracted),
}
"""Functions of so many arguments."""
KNOWN = frozenset((*_FUNCTIONS, *_PARTS, *_MAKING_TEXTS, "regexp_like", "coalesce", "nvl", "ifnull", "date"))
"""All functions whose arguments are what they look like."""


def called(name: str, arguments: Sequence[Expression], text: str) -> Expression:
    """Return a function by its name."""
    if (name == "coalesce" and arguments) or (name in ("nvl", "ifnull") and len(arguments) == 2):
        return _first(arguments, text)
    result = _called(name, arguments, text)
    return result if name in ("isnull", "isnotnull", "isnan") else folded(result, *arguments)


def _called(name: str, arguments: Sequence[Expression], text: str) -> Expression:
    kinds = [argument.type.kind for argument in arguments]
    if name in _PARTS and len(arguments) == 2:
        return conditions.part_of_text(name, arguments[0], arguments[1], text)
    if name == "regexp_like" and len(arguments) == 2:
        return patterns.matched(arguments[0], arguments[1], text)
    if name in _MAKING_TEXTS and len(arguments) in _MAKING_TEXTS[name][0]:
        return _MAKING_TEXTS[name][1](arguments, text)
    if name == "date" and kinds in ([DATE], [TIMESTAMP]):
        return cast(arguments[0], name, False, text)
    if len(arguments) != 1 or kinds[0] not in _FUNCTIONS.get(name, ()):
        raise Refused(f"{text} is not understood")
    (argument,) = arguments
    if name == "isnull":
        return conditions.is_null(argument, text)
    if name == "isnotnull":
        return conditions.negated(conditions.is_null(argument, text), text)
    kind, may_fail = argument.type, argument.may_fail
    function: Callable[[pl.Series], pl.Series]
    if name == "isnan":
        kind, function = Type(BOOLEAN), lambda values: values.is_nan().fill_null(False)
    elif name == "abs":
        function, may_fail = _magnitude(kind, text), may_fail or kind.kind == INTEGER
    elif name in _LENGTHS:
        kind, function = Type(INTEGER, 32), lambda values: values.str.len_chars().cast(pl.Int64)
    elif name in (*_OF_DATES, *_OF_TIMES):
        function, may_fail, kind = _part_of_moment(name, kind, text), True, Type(INTEGER, 32)
    elif name in ("unix_micros", "timestamp_micros"):  # moments are held as microseconds
        kind, function = Type(INTEGER, 64) if name[0] == "u" else Type(TIMESTAMP), lambda values: values
    elif name == "trim":
        function = lambda values: values.str.strip_chars(" ")  # noqa: E731
    else:
        function, may_fail = _other_case(name[0] == "l", text), True
    return Expression(kind, lambda rows: function(argument.of(rows)), text, may_fail)


def _check_sign(kind: Type, text: str) -> None:
    if kind.kind == DECIMAL and kind.size > conditions.EXACT_DIGITS:
        raise Refused(f"{text}: Spark rounds a decimal of more than {conditions.EXACT_DIGITS} digits here")


def _magnitude(kind: Type, text: str) -> Callable[[pl.Series], pl.Series]:
    _check_sign(kind, text)

    def magnitude(numbers: pl.Series) -> pl.Series:
        if kind.kind == INTEGER and (numbers == -(1 << kind.size - 1)).any():
            raise Fails(f"[ARITHMETIC_OVERFLOW] {text} is no {kind}")
        return numbers.abs()

    return magnitude


def _part_of_moment(name: str, kind: Type, text: str) -> Callable[[pl.Series], pl.Series]:
    day, held = (DAY, pl.Datetime("us")) if kind.kind == TIMESTAMP else (1, pl.Date())

    def part(moments: pl.Series) -> pl.Series:
        texts.check_years(moments, day, text)
        parts = moments.cast(pl.Int64 if kind.kind == TIMESTAMP else pl.Int32).cast(held).dt
        numbers: pl.Series = getattr(parts, "day" if name == "dayofmonth" else name)()
        return numbers.cast(pl.Int64)

    return part


def _other_case(lower: bool, text: str) -> Callable[[pl.Series], pl.Series]:
    def changed(values: pl.Series) -> pl.Series:
        others = values.filter(values.str.len_bytes() != values.str.len_chars())
        if len(others):
            raise Refused(f"{text}: capitals beyond ASCII, as in {others[0]!r}, may be others in Spark")
        return values.str.to_lowercase() if lower else values.str.to_uppercase()

    return changed


def _of_one_type(arguments: Sequence[Expression], text: str) -> tuple[list[Expression], Type]:
    """Values of which a row gets one, and the type that it has then."""
    values = conditions.common(arguments, text)
    if all(operand.type.kind == NULL for operand in arguments) or values[0].type.kind == DECIMAL:
        raise Refused(
            f"{text}: of {', '.join(str(operand.type) for operand in arguments)} Spark makes one type by a rule that "
            f"is not followed here"
        )
    types = [operand.type for operand in values]
    double = next((kind for kind in types if kind.kind == DOUBLE), None)  # which a float beside it becomes
    return values, double or max(types, key=lambda kind: kind.size)


def case(branches: Sequence[tuple[Expression, Expression]], other: Expression, text: str) -> Expression:
    """CASE: the value of the first condition that holds. Spark looks no further than that.

    Args:
        branches: Conditions with their values.
        other: The value where none holds.
    """
    for condition, _ in branches:
        conditions.check_boolean(condition)
        if condition.type.kind == NULL:
            raise Refused(f"{text}: Spark takes no {condition.text} for a condition here")
    values, kind = _of_one_type([*(value for _, value in branches), other], text)

    def of(rows: pl.DataFrame) -> pl.Series:
        left, chosen = pl.Series([True]), nulls(kind.kind)
        for (condition, _), value in zip(branches, values, strict=False):
            holds = where_asked(condition, rows, left).fill_null(False) & left
            chosen = repeated(chosen, rows).zip_with(~repeated(holds, rows), _asked(value, rows, holds))
            left = left & ~holds
        return chosen.zip_with(~repeated(left, rows), _asked(values[-1], rows, left))

    def _asked(value: Expression, rows: pl.DataFrame, asked: pl.Series) -> pl.Series:
        return repeated(where_asked(value, rows, asked), rows)

    return Expression(kind, of, text, any_fails([*(condition for condition, _ in branches), *values]))


def _first(arguments: Sequence[Expression], text: str) -> Expression:
    """Return coalesce."""
    values, kind = _of_one_type(arguments, text)

    def of(rows: pl.DataFrame) -> pl.Series:
        chosen = repeated(values[0].of(rows), rows)
        for operand in values[1:]:
            missing = chosen.is_null()
            chosen = chosen.zip_with(~missing, repeated(where_asked(operand, rows, missing), rows))
        return chosen

    return Expression(kind, of, text, any_fails(values))


def minus(value: Expression, text: str) -> Expression:
    """Return a number with a minus before it."""
    if value.is_null:
        return replace(value, text=text)
    if value.type.kind in (FLOAT, DOUBLE):
        return Expression(value.type, lambda rows: -value.of(rows), text, value.may_fail)
    _check_sign(value.type, text)
    zero = literal(value.type, 0, "0")
    return calculated("-", zero, value, text, value.type)
