"""Expressions of a `where`: Spark's types, how a column of each type is held, and when an operand is evaluated at all.

    type        held as
    boolean     Boolean
    integers    Int64, whatever their size
    float       Float64, as double
    decimal     Int128, the digits without the point
    string      String
    date        Int64, days since 1970
    timestamp   Int64, microseconds since 1970 in UTC
    others      Boolean, true: nothing is asked but whether they are null

A literal is a column of one row, which Polars repeats beside longer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

BOOLEAN, INTEGER, FLOAT, DOUBLE, DECIMAL = "boolean", "integer", "float", "double", "decimal"
STRING, DATE, TIMESTAMP, NULL, OTHER = "string", "date", "timestamp", "null", "other"
NUMBERS = (INTEGER, FLOAT, DOUBLE, DECIMAL)
DAY = 86_400_000_000
"""Microseconds."""

HELD: dict[str, type[pl.DataType]] = {
    **dict.fromkeys((BOOLEAN, NULL, OTHER), pl.Boolean),
    **dict.fromkeys((INTEGER, DATE, TIMESTAMP), pl.Int64),
    **dict.fromkeys((FLOAT, DOUBLE), pl.Float64),
    DECIMAL: pl.Int128,
    STRING: pl.String,
}

TOO_DEEP = "it is nested too deep"

Values = Callable[[pl.DataFrame], pl.Series]


class Refused(Exception):
    """Spark might give something else here, or refuses it as well. The message names the expression."""


class NoColumn(Refused):
    """It names a column that is not there, which Spark refuses as well. The first argument is the name."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        super().__init__(name, names)

    def __str__(self) -> str:
        name, names = self.args
        return f"{name} names no column; there are {', '.join(names)}, and capitals count"


class Fails(Exception):
    """Spark fails over a row; the message has Spark's name of the error."""


@dataclass(frozen=True, slots=True)
class Type:
    """One of Spark's types.

    Attributes:
        size: Bits of an integer, digits of a decimal.
        scale: Of a decimal.
    """

    kind: str
    size: int = 0
    scale: int = 0

    def __str__(self) -> str:
        if self.kind == INTEGER:
            return {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}[self.size]
        return f"decimal({self.size},{self.scale})" if self.kind == DECIMAL else self.kind


@dataclass(frozen=True, slots=True)
class Expression:
    """A typed expression.

    Attributes:
        of: Its values, held as the table above says, for rows of the columns that the condition names; or one value for
            all of them.
        text: As it stands in the SQL.
        may_fail: Whether it can fail over a row, so that rows matter over which Spark does not evaluate it.
        literal: Whether it is one.
        value: A literal's, as it is held.
        conjuncts: What AND stands between.
        is_null: Whether it is a null of a known type, whatever the row.
    """

    type: Type
    of: Values
    text: str
    may_fail: bool = False
    literal: bool = False
    value: Any = None
    conjuncts: tuple[Expression, ...] = ()
    is_null: bool = False


def literal(kind: Type, value: Any, text: str) -> Expression:
    """Return a constant.

    Args:
        value: As its type is held.
    """
    series = pl.Series([value], dtype=HELD[kind.kind])
    return Expression(kind, lambda _: series, text, literal=True, value=value)


def null(kind: Type, text: str) -> Expression:
    """Return a null of a type: `CAST(NULL AS bigint)`, and what Spark makes of it without a look at a row."""
    series = nulls(kind.kind)
    return Expression(kind, lambda _: series, text, is_null=True)


def typed_null(operand: Expression, kind: Type) -> Expression:
    """NULL as a null of a type; any other expression as it is."""
    return null(kind, operand.text) if operand.type.kind == NULL else operand


def folded(expression: Expression, *operands: Expression) -> Expression:
    """Return null if one of the operands is always null, otherwise the expression.

    No other operand is evaluated then, as in Spark:
    https://github.com/apache/spark/blob/master/sql/catalyst/src/main/scala/org/apache/spark/sql/catalyst/optimizer/expressions.scala
    """
    return null(expression.type, expression.text) if any(operand.is_null for operand in operands) else expression


def nulls(kind: str) -> pl.Series:
    """Return one null, for as many rows as there are."""
    return pl.Series([None], dtype=HELD[kind])


def repeated(values: pl.Series, rows: pl.DataFrame) -> pl.Series:
    """Return the values, as many as there are rows."""
    return values.new_from_index(0, rows.height) if len(values) == 1 else values


def where_asked(expression: Expression, rows: pl.DataFrame, asked: pl.Series) -> pl.Series:
    """Return an expression's values in the rows in which Spark evaluates it, and null in the others, over which it may
    not fail."""
    if not expression.may_fail or asked.all():
        return expression.of(rows)
    if not asked.any():
        return nulls(expression.type.kind)
    asked = repeated(asked, rows)
    part = rows.filter(asked)
    places = (asked.cast(pl.UInt32).cum_sum() - 1).zip_with(asked, pl.Series([None], dtype=pl.UInt32))
    return repeated(expression.of(part), part).gather(places)


def strict(function: Callable[..., pl.Series], *operands: Expression) -> Values:
    """Null where an operand is; an operand is not evaluated where one before it is null."""
    guarded = any(operand.may_fail for operand in operands[1:])

    def of(rows: pl.DataFrame) -> pl.Series:
        if not guarded:
            return function(*(operand.of(rows) for operand in operands))
        values, asked = [], pl.Series([True])
        for operand in operands:
            values.append(where_asked(operand, rows, asked))
            asked = asked & values[-1].is_not_null()
        return function(*values)

    return of


def any_fails(operands: Sequence[Expression]) -> bool:
    """Return whether one of the operands can fail over a row."""
    return any(operand.may_fail for operand in operands)


# -- columns

_KINDS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], Type]], ...] = (
    (pa.types.is_boolean, lambda _: Type(BOOLEAN)),
    (pa.types.is_signed_integer, lambda kind: Type(INTEGER, kind.bit_width)),
    (pa.types.is_float32, lambda _: Type(FLOAT)),
    (pa.types.is_float64, lambda _: Type(DOUBLE)),
    (pa.types.is_decimal128, lambda kind: Type(DECIMAL, kind.precision, kind.scale)),
    (pa.types.is_string, lambda _: Type(STRING)),
    (pa.types.is_large_string, lambda _: Type(STRING)),
    (pa.types.is_date32, lambda _: Type(DATE)),
    (pa.types.is_timestamp, lambda _: Type(TIMESTAMP)),
)


def type_of(kind: pa.DataType) -> Type:
    """Spark's type of an Arrow column, as far as it is told apart here."""
    return next((type(kind) for matches, type in _KINDS if matches(kind)), Type(OTHER))


def column(rows: pa.Table | pa.RecordBatch, path: Sequence[str]) -> pl.Series:
    """Return a column, or a field of a struct below it, held as its type is."""
    values = rows.column(path[0])
    for name in path[1:]:
        values = pc.struct_field(values, [values.type.get_field_index(name)])
    kind = type_of(values.type).kind
    if kind == OTHER:
        valid = pl.Series(values.is_valid())
        return valid.zip_with(valid, nulls(OTHER))
    if kind == TIMESTAMP:
        values = values.cast(pa.timestamp("us", values.type.tz))
    series = pl.Series(values)
    return series.to_physical().cast(HELD[kind]) if kind in (DATE, TIMESTAMP, DECIMAL) else series.cast(HELD[kind])
