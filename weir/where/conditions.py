"""Conditions: nulls by three-valued logic, NaN equal to itself and larger than all other numbers."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal

import polars as pl
from polars.exceptions import PolarsError

from weir.where.expressions import (
    BOOLEAN,
    DATE,
    DAY,
    DECIMAL,
    DOUBLE,
    FLOAT,
    HELD,
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
    nulls,
    strict,
    where_asked,
)

MOST_DIGITS = 38
EXACT_DIGITS = 34  # of a decimal whose sign Spark changes
_EXACT_IN_FLOAT = 1 << 24
_EXACT_IN_DOUBLE = 15  # digits
_IN_SET = 10  # longer lists are looked up by Spark in a set, which tells -0.0 from 0.0
_MOMENT = re.compile(r"(\d{4})-(\d{2})-(\d{2})(?:[ T](\d{2}):(\d{2}):(\d{2})(?:\.(\d{1,6}))?)?", re.ASCII)
_MOST_DAYS = (1 << 63) // DAY
COMPARISONS: dict[str, Callable[[pl.Series, pl.Series], pl.Series]] = {
    "=": operator.eq,
    "==": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def check_boolean(expression: Expression) -> None:
    """Raise Refused for an expression that is no condition."""
    if expression.type.kind not in (BOOLEAN, NULL):
        raise Refused(f"{expression.text} is {expression.type}, not a condition")


def logical(decides: bool, operands: Sequence[Expression], text: str) -> Expression:
    """AND, which false decides, or OR, which true decides. Spark does not look further where an operand decides, and
    what it does not look at may fail."""
    for operand in operands:
        check_boolean(operand)

    def of(rows: pl.DataFrame) -> pl.Series:
        values = operands[0].of(rows)
        for operand in operands[1:]:
            undecided = values.fill_null(not decides) != decides
            other = where_asked(operand, rows, undecided)
            values = values | other if decides else values & other
        return values

    conjuncts = () if decides else tuple(operands)
    return Expression(Type(BOOLEAN), of, text, any_fails(operands), conjuncts=conjuncts)


def negated(inner: Expression, text: str) -> Expression:
    """NOT."""
    check_boolean(inner)
    return Expression(Type(BOOLEAN), lambda rows: ~inner.of(rows), text, inner.may_fail)


def truth(inner: Expression, wanted: bool | None, text: str) -> Expression:
    """IS TRUE, IS FALSE, and IS UNKNOWN by None."""
    check_boolean(inner)
    if wanted is None:
        return is_null(inner, text)
    return Expression(Type(BOOLEAN), lambda rows: (inner.of(rows) == wanted).fill_null(False), text, inner.may_fail)


def is_null(inner: Expression, text: str) -> Expression:
    """IS NULL."""
    return Expression(Type(BOOLEAN), lambda rows: inner.of(rows).is_null(), text, inner.may_fail)


def common(operands: Sequence[Expression], text: str) -> list[Expression]:
    """Return the operands as values of one type that can be compared, nulls among them. Raises Refused."""
    kinds = {operand.type.kind for operand in operands} - {NULL}
    if OTHER in kinds:
        raise Refused(f"{text}: columns of this type are not compared here")
    if len(kinds) <= 1 and DECIMAL not in kinds:
        alike = list(operands)
    elif kinds <= {INTEGER, DECIMAL}:
        alike = _of_one_scale(operands, text)
    elif kinds <= set(NUMBERS):
        alike = [as_double(operand, FLOAT in kinds and DOUBLE not in kinds, text) for operand in operands]
    elif kinds <= {DATE, TIMESTAMP}:
        alike = [_midnight(operand) for operand in operands]
    else:
        alike = _with_moments(operands, kinds, text)
    kind = next((operand.type for operand in alike if operand.type.kind != NULL), Type(BOOLEAN))
    return [literal(kind, None, operand.text) if operand.type.kind == NULL else operand for operand in alike]


def _of_one_scale(operands: Sequence[Expression], text: str) -> list[Expression]:
    typed = [as_decimal(operand.type) for operand in operands if operand.type.kind != NULL]
    scale = max(kind.scale for kind in typed)
    check_digits(max(kind.size - kind.scale for kind in typed), scale, text)
    return [operand if operand.type.kind == NULL else rescaled(operand, scale) for operand in operands]


def _midnight(operand: Expression) -> Expression:
    if operand.type.kind != DATE:
        return operand
    if operand.literal:
        return literal(Type(TIMESTAMP), operand.value * DAY, operand.text)
    return Expression(Type(TIMESTAMP), strict(micros_of(operand.text), operand), operand.text, may_fail=True)


def micros_of(text: str) -> Callable[[pl.Series], pl.Series]:
    """Microseconds of days since 1970; it fails where these are too many."""

    def micros(days: pl.Series) -> pl.Series:
        if ((days > _MOST_DAYS) | (days < -_MOST_DAYS)).any():
            raise Fails(f"[DATETIME_OVERFLOW] {text} is no timestamp")
        return days * DAY

    return micros


def _with_moments(operands: Sequence[Expression], kinds: set[str], text: str) -> list[Expression]:
    """Texts that are written out beside a date or a timestamp are read as one."""
    kind, *more = sorted(kinds - {STRING})
    if (
        kind in (DATE, TIMESTAMP)
        and not more
        and all(operand.literal for operand in operands if operand.type.kind == STRING)
    ):
        return [
            literal(Type(kind), moment(operand.value, kind, text), operand.text)
            if operand.type.kind == STRING
            else operand
            for operand in operands
        ]
    listed = ", ".join(f"{operand.text} is {operand.type}" for operand in operands if operand.type.kind != NULL)
    raise Refused(f"{text}: {listed}, of which Spark makes one type by a rule that is not followed here; write a CAST")


def moment(text: str, kind: str, whole: str) -> int:
    """Days, or microseconds in UTC, since 1970, of a date or a timestamp as it is usually written."""
    match = _MOMENT.fullmatch(text)
    if match is None or (kind == DATE and match[4] is not None):
        raise Refused(f"{whole}: {text!r} is not written as {'2026-01-31' if kind == DATE else '2026-01-31 23:59:59'}")
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    try:
        at = datetime(year, month, day, hour, minute, second, int((match[7] or "0").ljust(6, "0")))
    except ValueError as error:
        raise Refused(f"{whole}: {text!r} is no moment") from error
    micros = (at - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    return micros // DAY if kind == DATE else micros


def as_decimal(kind: Type) -> Type:
    """Return the decimal that holds an integer."""
    return Type(DECIMAL, {8: 3, 16: 5, 32: 10, 64: 20}[kind.size], 0) if kind.kind == INTEGER else kind


def check_digits(whole: int, scale: int, text: str) -> None:
    """Raise Refused for decimals that Spark rounds."""
    if whole + scale > MOST_DIGITS:
        raise Refused(f"{text} needs decimals of more than {MOST_DIGITS} digits, which Spark rounds")


def rescaled(operand: Expression, scale: int) -> Expression:
    """Return an integer or a decimal as a decimal of at least as many digits behind the point."""
    kind = as_decimal(operand.type)
    if kind == operand.type and kind.scale == scale:
        return operand
    factor = 10 ** (scale - kind.scale)
    to = Type(DECIMAL, kind.size + scale - kind.scale, scale)
    if operand.literal:
        return literal(to, None if operand.value is None else operand.value * factor, operand.text)
    by = pl.Series([factor], dtype=pl.Int128)
    return Expression(to, lambda rows: operand.of(rows).cast(pl.Int128) * by, operand.text, operand.may_fail)


def as_double(operand: Expression, single: bool, text: str) -> Expression:
    """Return a number as a double.

    Args:
        single: The widest of the others is a float of 32 bits, which need not hold a whole number.
    """
    kind = operand.type.kind
    if single and kind == INTEGER and not (operand.literal and abs(operand.value) <= _EXACT_IN_FLOAT):
        raise Refused(f"{text}: {operand.text} may not fit a float; write CAST(... AS double)")
    if kind not in (INTEGER, DECIMAL):
        return operand
    convert = to_double(operand.type)
    return Expression(Type(DOUBLE), lambda rows: convert(operand.of(rows)), operand.text, operand.may_fail)


def to_double(kind: Type) -> Callable[[pl.Series], pl.Series]:
    """Return the double that is nearest to a number: what is divided is exact where there are few digits, and else
    Polars reads them as they are written."""
    if kind.kind != DECIMAL:
        return lambda values: values.cast(pl.Float64)
    if kind.size <= _EXACT_IN_DOUBLE:
        powers = pl.Series([10.0**kind.scale])  # as many as values: by one number Polars does not divide exactly
        return lambda values: values.cast(pl.Float64) / powers.new_from_index(0, len(values))
    return lambda values: (values.cast(pl.String) + f"e-{kind.scale}").cast(pl.Float64)


def compared(comparison: str, left: Expression, right: Expression, text: str) -> Expression:
    """Return one of the comparisons that are null if an operand is null."""
    _check_range(comparison, left, right, text)
    operands = common([left, right], text)
    result = Expression(Type(BOOLEAN), strict(COMPARISONS[comparison], *operands), text, any_fails(operands))
    return folded(result, *operands)


def _check_range(comparison: str, left: Expression, right: Expression, text: str) -> None:
    """Refuse what Spark's DecimalPrecision takes for true or false without a look at the row, which may be null."""
    for operand, other in ((left, right), (right, left)):
        if comparison[0] in "<>" and comparison != "<>" and other.literal and operand.type.kind == INTEGER:
            scaled = other.value if other.type.kind == DECIMAL else 0
            if not -(1 << 63) * 10**other.type.scale <= scaled <= ((1 << 63) - 1) * 10**other.type.scale:
                raise Refused(f"{text}: no bigint is as large as {other.text}, where Spark forgets nulls")


def same(left: Expression, right: Expression, text: str) -> Expression:
    """Return `<=>`, for which null equals null."""
    first, second = operands = common([left, right], text)
    return Expression(Type(BOOLEAN), lambda rows: first.of(rows).eq_missing(second.of(rows)), text, any_fails(operands))


def contained(left: Expression, items: Sequence[Expression], text: str) -> Expression:
    """IN, which is null where the value is, or where it is none of the items and one of these is null."""
    value, *others = operands = common([left, *items], text)
    kind = value.type.kind
    if len(others) > _IN_SET and kind in (FLOAT, DOUBLE):
        raise Refused(f"{text}: Spark looks doubles up in longer lists in another way")

    def one_by_one(rows: pl.DataFrame) -> pl.Series:
        wanted = value.of(rows)
        matches = wanted != wanted
        for other in others:
            asked = wanted.is_not_null() & ~matches.fill_null(False)
            matches = matches | (wanted == where_asked(other, rows, asked))
        return matches

    if kind == DECIMAL or not all(other.literal for other in others) or kind in (FLOAT, DOUBLE):
        return Expression(Type(BOOLEAN), one_by_one, text, any_fails(operands))
    listed = pl.Series([other.value for other in others if other.value is not None], dtype=HELD[kind])
    null = nulls(BOOLEAN) if len(listed) < len(others) else pl.Series([False])
    return Expression(Type(BOOLEAN), lambda rows: value.of(rows).is_in(listed.implode()) | null, text, value.may_fail)


def like(left: Expression, pattern: Expression, escape: str, text: str) -> Expression:
    """LIKE with a pattern that is written out."""
    if left.type.kind != STRING or not _written_out(pattern) or len(escape) != 1:
        raise Refused(
            f"{text}: only a text is compared, with a pattern and an escape of one character that are written out"
        )
    parts, characters = [], iter(pattern.value)
    for character in characters:
        if character == escape:
            following = next(characters, "")
            if following not in ("%", "_", escape) or not following:
                raise Refused(
                    f"{text}: the escape {escape} stands before none of %, _ and {escape}, which Spark refuses"
                )
            parts.append(pl.escape_regex(following))
        else:
            parts.append({"%": ".*", "_": "."}.get(character) or pl.escape_regex(character))
    expression = rf"(?s)\A{''.join(parts)}\z"
    try:
        pl.Series([""]).str.contains(expression)
    except PolarsError as error:
        raise Refused(f"{text}: the pattern is too long") from error
    return _about_text(left, lambda values: values.str.contains(expression), text)


def _written_out(text: Expression) -> bool:
    return text.type.kind == STRING and text.literal


def _about_text(left: Expression, function: Callable[[pl.Series], pl.Series], text: str) -> Expression:
    return Expression(Type(BOOLEAN), lambda rows: function(left.of(rows)), text, left.may_fail)


def part_of_text(name: str, left: Expression, part: Expression, text: str) -> Expression:
    """Return contains, startswith and endswith."""
    if left.type.kind != STRING or not _written_out(part):
        raise Refused(f"{text}: only a text is searched, for another one that is written out")
    functions: dict[str, Callable[[pl.Series], pl.Series]] = {
        "contains": lambda values: values.str.contains(part.value, literal=True),
        "startswith": lambda values: values.str.starts_with(part.value),
        "endswith": lambda values: values.str.ends_with(part.value),
    }
    return _about_text(left, functions[name], text)


def decimal_literal(number: Decimal, text: str) -> Expression:
    """Return a number with a point, in the decimal that just holds it."""
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    size = max(len(digits), -exponent)
    if size > MOST_DIGITS:
        raise Refused(f"{text} has more than {MOST_DIGITS} digits")
    return literal(Type(DECIMAL, size, -exponent), int(number.scaleb(-exponent)), text)
