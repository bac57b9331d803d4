"""`where` without Spark: a part of Spark SQL that is evaluated as Spark evaluates it, and the rest of it refused by
name.

    rows          compiled(where, schema).kept(table): the positions of the rows that Spark would keep
    taken         comparisons, AND, OR, NOT, IS, IN, BETWEEN, LIKE, arithmetic, CAST and a few functions, on booleans,
                  numbers, texts,
                  dates and timestamps
    refused       everything else, with the expression and the reason; so is what Spark itself would refuse

Spark's rules that differ from what is usual elsewhere: nulls by three-valued logic; NaN equals
NaN and is the largest number; whole numbers divide to a double, DIV and CAST cut towards zero, % has the dividend's
sign; what overflows or divides by zero fails the epoch (ANSI mode, which Weir sets, as it sets that capitals count in
names); `\\` escapes in texts and in LIKE. Types are Spark's:
https://spark.apache.org/docs/latest/sql-ref-ansi-compliance.html"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Context, Decimal
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

BOOLEAN, INTEGER, FLOAT, DOUBLE, DECIMAL = "boolean", "integer", "float", "double", "decimal"
STRING, DATE, TIMESTAMP, NULL, OTHER = "string", "date", "timestamp", "null", "other"
_NUMBERS = (INTEGER, FLOAT, DOUBLE, DECIMAL)
_DAY = 86_400_000_000  # microseconds
_MOST_DIGITS = 38
_EXACT_IN_FLOAT = 1 << 24
_IN_SET = 10  # longer lists are looked up by Spark in a set, which tells -0.0 from 0.0

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")
  | (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)(?P<suffix>\w*)
  | (?P<name>[A-Za-z_]\w*)
  | `(?P<quoted>(?:[^`]|``)+)`
  | (?P<comment>--|/\*)
  | (?P<operator><=>|<=|>=|<>|!=|==|\|\||[=<>+\-*/%(),.])
    )""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_MOMENT = re.compile(r"(\d{4})-(\d{2})-(\d{2})(?:[ T](\d{2}):(\d{2}):(\d{2})(?:\.(\d{1,6}))?)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_COMPARISONS: dict[str, Callable[[int], bool]] = {
    "=": lambda order: order == 0,
    "==": lambda order: order == 0,
    "<>": lambda order: order != 0,
    "!=": lambda order: order != 0,
    "<": lambda order: order < 0,
    "<=": lambda order: order <= 0,
    ">": lambda order: order > 0,
    ">=": lambda order: order >= 0,
}
_KEYWORDS = frozenset(
    [
        "and",
        "or",
        "not",
        "is",
        "in",
        "like",
        "between",
        "div",
        "escape",
        "case",
        "when",
        "then",
        "else",
        "end",
        "exists",
        "interval",
        "over",
    ]
)
_BITS = {"tinyint": 8, "byte": 8, "smallint": 16, "short": 16, "int": 32, "integer": 32, "bigint": 64, "long": 64}
_ESCAPES = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a"}

_BLANK = "".join(map(chr, range(33)))  # what Spark takes away around a number
_EXACT = Context(prec=100)

_AT, _FIRST = "__weir_at", "__weir_first"

Row = tuple[Any, ...]
Function = Callable[[Row], Any]


class Refused(Exception):
    """Spark might give something else here, or refuses it as well. The message names the expression."""


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
        of: Its value for a row: a bool, an int, a float, a Decimal, a str, days or microseconds since 1970, or None for
            null.
        text: As it stands in the SQL.
        literal: Whether it is one.
    """

    type: Type
    of: Function
    text: str
    literal: bool = False


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on the rows of one schema. columns: those that it names."""

    columns: tuple[str, ...]
    condition: Function

    def kept(self, rows: pa.Table) -> np.ndarray:
        """int64[n], the positions of the rows that it keeps. Raises Fails where Spark fails over a row."""
        values = [_values(rows.column(name)) for name in self.columns]
        each = zip(*values, strict=True) if values else (() for _ in range(rows.num_rows))
        return np.array([index for index, row in enumerate(each) if self.condition(row) is True], dtype=np.int64)

    def mask(self, rows: pa.Table) -> np.ndarray:
        """bool[n], which rows it keeps. The condition is asked once of equal rows. Raises Fails."""
        if not self.columns:
            return np.full(rows.num_rows, self.condition(()) is True)
        named, mask = rows.select(self.columns), np.zeros(rows.num_rows, bool)
        if any(pa.types.is_floating(column.type) for column in named.columns):  # -0.0 is equal to 0.0, and another one
            mask[self.kept(named)] = True
            return mask
        values = pl.from_arrow(named)
        assert isinstance(values, pl.DataFrame)
        equal = values.with_row_index(_AT).group_by(self.columns).agg(pl.col(_AT), pl.col(_AT).first().alias(_FIRST))
        kept = self.kept(named.take(pa.array(equal[_FIRST].to_arrow())))
        mask[equal[_AT].gather(kept).explode().drop_nulls().to_numpy()] = True
        return mask


def compiled(where: str, schema: pa.Schema) -> Where:
    """Raises Refused."""
    parser = _Parser(where, schema)
    condition = parser.whole()
    return Where(tuple(parser.columns), condition.of)


def _values(column: pa.ChunkedArray) -> list[Any]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    elif pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    elif _type_of(kind).kind == OTHER:
        column = column.is_valid()
        return [True if valid else None for valid in column.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


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


def _type_of(kind: pa.DataType) -> Type:
    return next((type(kind) for matches, type in _KINDS if matches(kind)), Type(OTHER))


# -- SQL


@dataclass(frozen=True, slots=True)
class _Token:
    """One token of the SQL.

    Attributes:
        kind: text, number, name, quoted, operator or end.
        value: As it counts.
        start: Where it stands, with `end`.
        suffix: Of a number.
    """

    kind: str
    value: str
    start: int
    end: int
    suffix: str = ""


def _tokens(sql: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while sql[at:].strip():
        match = _TOKEN.match(sql, at)
        if match is None or match["comment"]:
            raise Refused(f"{sql[at:].strip()[:20]!r} is not understood")
        kind = match.lastgroup if match.lastgroup != "suffix" else "number"
        assert kind is not None
        value = match[kind]
        start = match.start(kind) - (kind == "quoted")
        if kind == "text" and tokens and tokens[-1].end == start and tokens[-1].value.lower() in ("r", "x"):
            raise Refused(f"the literal {tokens[-1].value}{value} is not understood")
        tokens.append(_Token(kind, value, start, match.end(), match["suffix"] or ""))
        at = match.end()
    tokens.append(_Token("end", "", len(sql), len(sql)))
    return tokens


class _Parser:
    """Spark's grammar by recursive descent, the loosest operators first; each rule gives a typed expression."""

    def __init__(self, sql: str, schema: pa.Schema) -> None:
        self._sql, self._schema = sql, schema
        self._tokens, self._at = _tokens(sql), 0
        self.columns: list[str] = []

    def whole(self) -> Expression:
        condition = self._or()
        if self._next.kind != "end":
            raise Refused(f"{self._sql[self._next.start :]!r} is not understood")
        if condition.type.kind != BOOLEAN:
            raise Refused(f"{condition.text} is {condition.type}, not a condition")
        return condition

    # -- tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _word(self, *words: str) -> bool:
        """Take the next tokens if they are these keywords."""
        ahead = self._tokens[self._at : self._at + len(words)]
        if [token.value.lower() for token in ahead if token.kind == "name"] != list(words):
            return False
        self._at += len(words)
        return True

    def _operator(self, *operators: str) -> str | None:
        """Take the next token if it is one of these operators, of which some are words."""
        token = self._next
        if token.kind not in ("operator", "name") or token.value.lower() not in operators:
            return None
        self._at += 1
        return token.value.lower()

    def _expect(self, operator: str) -> None:
        if self._operator(operator) is None:
            raise Refused(f"{self._sql[self._next.start :]!r} is not understood where {operator} is expected")

    def _text_since(self, start: int) -> str:
        return self._sql[start : self._tokens[self._at - 1].end].strip()

    # -- conditions

    def _joined(self, operand: Callable[[], Expression], *operators: str) -> Expression:
        """Operands with some of these operators between them, from left to right."""
        start, left = self._next.start, operand()
        while (operator := self._operator(*operators)) is not None:
            left = _JOINED[operator](left, operand(), self._text_since(start))
        return left

    def _or(self) -> Expression:
        return self._joined(self._and, "or")

    def _and(self) -> Expression:
        return self._joined(self._not, "and")

    def _not(self) -> Expression:
        start = self._next.start
        if self._word("not"):
            return _negated(self._not(), self._text_since(start))
        return self._predicate()

    def _predicate(self) -> Expression:
        start, left = self._next.start, self._comparison()
        if self._word("is"):
            negated = self._word("not")
            predicate = self._is(left, start)
        else:
            negated = self._word("not")
            if self._word("between"):
                low = self._comparison()
                if not self._word("and"):
                    raise Refused(f"{self._text_since(start)} is not understood")
                high, text = self._comparison(), self._text_since(start)
                predicate = _logical(False, _compared(">=", left, low, text), _compared("<=", left, high, text), text)
            elif self._word("in"):
                self._expect("(")
                items = [self._or()]
                while self._operator(","):
                    items.append(self._or())
                self._expect(")")
                predicate = _in(left, items, self._text_since(start))
            elif self._word("like"):
                pattern, escape = self._comparison(), "\\"
                if self._word("escape"):
                    if self._next.kind != "text":
                        raise Refused(f"{self._text_since(start)} is not understood")
                    escape = _unescaped(self._next.value)
                    self._at += 1
                predicate = _like(left, pattern, escape, self._text_since(start))
            elif negated:
                raise Refused(f"{self._sql[start:]!r} is not understood")
            else:
                return left
        return _negated(predicate, self._text_since(start)) if negated else predicate

    def _is(self, left: Expression, start: int) -> Expression:
        if self._word("null"):
            return Expression(Type(BOOLEAN), lambda row: left.of(row) is None, self._text_since(start))
        truth = self._operator("true", "false", "unknown")
        if truth is not None:
            _boolean(left)
            wanted = {"true": True, "false": False}.get(truth)
            return Expression(Type(BOOLEAN), lambda row: left.of(row) is wanted, self._text_since(start))
        if self._word("distinct", "from"):
            right = self._comparison()
            return _negated(_same(left, right, self._text_since(start)), self._text_since(start))
        raise Refused(f"{self._sql[start:]!r} is not understood")

    def _comparison(self) -> Expression:
        return self._joined(self._sum, "<=>", *_COMPARISONS)

    # -- values

    def _sum(self) -> Expression:
        return self._joined(self._product, "+", "-", "||")

    def _product(self) -> Expression:
        return self._joined(self._signed, "*", "/", "%", "div")

    def _signed(self) -> Expression:
        start = self._next.start
        sign = self._operator("-", "+")
        if sign is None:
            return self._primary()
        if sign == "-" and self._next.kind == "number":  # the least of each type is a literal too
            return self._number("-", start)
        value = self._signed()
        if value.type.kind not in _NUMBERS:
            raise Refused(f"{self._text_since(start)}: {value.text} is {value.type}, not a number")
        if sign == "+":
            return value
        zero = Expression(value.type, lambda _: Decimal(0) if value.type.kind == DECIMAL else 0, "0")
        if value.type.kind in (FLOAT, DOUBLE):
            return Expression(value.type, _strict(lambda number: -number, value), self._text_since(start))
        return _calculated("-", zero, value, self._text_since(start), value.type)

    def _primary(self) -> Expression:
        token = self._next
        if token.kind == "number":
            return self._number("", token.start)
        if token.kind == "text":
            self._at += 1
            if self._next.kind == "text":
                raise Refused(f"{self._text_since(token.start)} {self._next.value} is not understood")
            return _literal(Type(STRING), _unescaped(token.value), token.value)
        if self._operator("("):
            inner = self._or()
            self._expect(")")
            return Expression(inner.type, inner.of, self._text_since(token.start), inner.literal)
        if token.kind == "quoted":
            self._at += 1
            return self._column(token.value.replace("``", "`"), token.start)
        if token.kind != "name" or token.value.lower() in _KEYWORDS:
            raise Refused(f"{self._sql[token.start :]!r} is not understood")
        self._at += 1
        return self._named(token)

    def _named(self, token: _Token) -> Expression:
        """What begins with a name: a constant, a typed literal, a function or a column."""
        word = token.value.lower()
        if word in ("true", "false"):
            return _literal(Type(BOOLEAN), word == "true", token.value)
        if word == "null":
            return _literal(Type(NULL), None, token.value)
        if self._next.kind == "text":
            if word not in (DATE, TIMESTAMP):
                raise Refused(f"the literal {token.value} {self._next.value} is not understood")
            self._at += 1
            written = self._tokens[self._at - 1].value
            text = self._text_since(token.start)
            return _literal(Type(word), _moment(_unescaped(written), word, text), text)
        if self._operator("("):
            if word in ("cast", "try_cast"):
                return self._cast(token.start, tries=word == "try_cast")
            arguments = [] if self._operator(")") else [self._or()]
            while arguments and self._operator(","):
                arguments.append(self._or())
            if arguments:
                self._expect(")")
            return _called(word, arguments, self._text_since(token.start))
        return self._column(token.value, token.start)

    def _column(self, name: str, start: int) -> Expression:
        if self._operator("."):
            raise Refused(f"{self._sql[start:]!r}: a field of a column is not understood")
        if self._schema.names.count(name) != 1:
            raise Refused(f"{name} names no column; there are {', '.join(self._schema.names)}, and capitals count")
        if name not in self.columns:
            self.columns.append(name)
        index = self.columns.index(name)
        return Expression(_type_of(self._schema.field(name).type), lambda row: row[index], self._text_since(start))

    def _number(self, sign: str, start: int) -> Expression:
        token = self._next
        self._at += 1
        written, suffix, text = sign + token.value, token.suffix.upper(), self._text_since(start)
        if suffix == "D" or (not suffix and "e" in token.value.lower()):
            if math.isinf(float(written)):
                raise Refused(f"{text} is no double")
            return _literal(Type(DOUBLE), float(written), text)
        if suffix not in ("", "L") or (suffix and not token.value.isdigit()):
            raise Refused(f"{text} is not understood")
        if token.value.isdigit():
            number = int(written)
            for bits in (64,) if suffix else (32, 64):
                if _fits(number, bits):
                    return _literal(Type(INTEGER, bits), number, text)
            if suffix:
                raise Refused(f"{text} is no bigint")
        number_ = Decimal(written)
        _, digits, exponent = number_.as_tuple()
        assert isinstance(exponent, int)
        size = max(len(digits), -exponent)
        if size > _MOST_DIGITS:
            raise Refused(f"{text} has more than {_MOST_DIGITS} digits")
        return _literal(Type(DECIMAL, size, -exponent), number_, text)

    def _cast(self, start: int, *, tries: bool) -> Expression:
        value = self._or()
        if not self._word("as") or self._next.kind != "name":
            raise Refused(f"{self._sql[start:]!r} is not understood")
        name = self._next.value.lower()
        self._at += 1
        self._expect(")")
        return _cast(value, name, tries, self._text_since(start))


def _unescaped(written: str) -> str:
    """What a text means; `\\%` and `\\_` stay as they are, for LIKE."""
    quote, inner = written[0], written[1:-1].replace(written[0] * 2, written[0])

    def meant(escape: re.Match[str]) -> str:
        if escape["octal"] or escape["unicode"]:
            raise Refused(f"{quote}{inner}{quote}: the escape {escape[0]} is not understood")
        character = escape["one"]
        return escape[0] if character in "%_" else _ESCAPES.get(character, character)

    return re.sub(r"\\(?:(?P<octal>[0-3][0-7]{2})|(?P<unicode>[uU])|(?P<one>.))", meant, inner, flags=re.DOTALL)


def _moment(text: str, kind: str, whole: str) -> int:
    """Days, or microseconds in UTC, since 1970, of a date or a timestamp as it is usually written."""
    match = _MOMENT.fullmatch(text)
    if match is None or (kind == DATE and match[4] is not None):
        raise Refused(f"{whole}: {text!r} is not written as {'2026-01-31' if kind == DATE else '2026-01-31 23:59:59'}")
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    try:
        moment = datetime(year, month, day, hour, minute, second, int((match[7] or "0").ljust(6, "0")))
    except ValueError as error:
        raise Refused(f"{whole}: {text!r} is no moment") from error
    micros = (moment - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    return micros // _DAY if kind == DATE else micros


# -- meaning


def _literal(kind: Type, value: Any, text: str) -> Expression:
    return Expression(kind, lambda _: value, text, literal=True)


def _strict(function: Callable[..., Any], *operands: Expression) -> Function:
    """Null where an operand is."""

    def of(row: Row) -> Any:
        values = [operand.of(row) for operand in operands]
        return None if None in values else function(*values)

    return of


def _boolean(expression: Expression) -> None:
    if expression.type.kind not in (BOOLEAN, NULL):
        raise Refused(f"{expression.text} is {expression.type}, not a condition")


def _logical(decides: bool, left: Expression, right: Expression, text: str) -> Expression:
    """AND, which false decides, or OR, which true decides."""
    _boolean(left)
    _boolean(right)

    def of(row: Row) -> bool | None:
        first = left.of(row)
        if first is decides:  # Spark does not look at the other one then, which may fail
            return decides
        second = right.of(row)
        return decides if second is decides else None if first is None or second is None else not decides

    return Expression(Type(BOOLEAN), of, text)


def _negated(inner: Expression, text: str) -> Expression:
    _boolean(inner)
    return Expression(Type(BOOLEAN), _strict(lambda value: not value, inner), text)


def _common(operands: Sequence[Expression], text: str) -> list[Expression]:
    """The operands as values of one type that can be compared, nulls among them."""
    kinds = {operand.type.kind for operand in operands} - {NULL}
    if kinds <= {INTEGER, DECIMAL} or len(kinds) <= 1:
        if OTHER in kinds:
            raise Refused(f"{text}: columns of this type are not compared here")
        if DECIMAL in kinds:
            typed = [_as_decimal(operand.type) for operand in operands if operand.type.kind != NULL]
            _digits(
                max(operand.size - operand.scale for operand in typed), max(operand.scale for operand in typed), text
            )
        return list(operands)
    if kinds <= set(_NUMBERS):
        return [_as_double(operand, FLOAT in kinds and DOUBLE not in kinds, text) for operand in operands]
    if kinds <= {DATE, TIMESTAMP}:
        return [
            Expression(Type(TIMESTAMP), _strict(lambda value: value * _DAY, operand), operand.text)
            if operand.type.kind == DATE
            else operand
            for operand in operands
        ]
    if len(kinds) == 2 and STRING in kinds and kinds & {DATE, TIMESTAMP}:
        (kind,) = kinds - {STRING}
        if all(operand.literal for operand in operands if operand.type.kind == STRING):
            return [
                _literal(Type(kind), _moment(operand.of(()), kind, text), operand.text)
                if operand.type.kind == STRING
                else operand
                for operand in operands
            ]
    listed = ", ".join(f"{operand.text} is {operand.type}" for operand in operands if operand.type.kind != NULL)
    raise Refused(f"{text}: {listed}, of which Spark makes one type by a rule that is not followed here; write a CAST")


def _as_decimal(kind: Type) -> Type:
    return Type(DECIMAL, {8: 3, 16: 5, 32: 10, 64: 20}[kind.size], 0) if kind.kind == INTEGER else kind


def _digits(whole: int, scale: int, text: str) -> None:
    if whole + scale > _MOST_DIGITS:
        raise Refused(f"{text} needs decimals of more than {_MOST_DIGITS} digits, which Spark rounds")


def _as_double(operand: Expression, single: bool, text: str) -> Expression:
    """single: the widest of the others is a float of 32 bits, which need not hold a whole number."""
    if single and operand.type.kind == INTEGER and not (operand.literal and abs(operand.of(())) <= _EXACT_IN_FLOAT):
        raise Refused(f"{text}: {operand.text} may not fit a float; write CAST(... AS double)")
    if operand.type.kind in (INTEGER, DECIMAL):
        return Expression(Type(DOUBLE), _strict(float, operand), operand.text, operand.literal)
    return operand


def _order(left: Any, right: Any) -> int:
    """-1, 0 or 1; NaN is equal to itself and larger than all other numbers."""
    if isinstance(left, float) and (math.isnan(left) or math.isnan(right)):
        return int(math.isnan(left)) - int(math.isnan(right))
    return int(left > right) - int(left < right)


def _compared(operator: str, left: Expression, right: Expression, text: str) -> Expression:
    meant = _COMPARISONS[operator]
    return Expression(Type(BOOLEAN), _strict(lambda a, b: meant(_order(a, b)), *_common([left, right], text)), text)


def _same(left: Expression, right: Expression, text: str) -> Expression:
    first, second = _common([left, right], text)

    def of(row: Row) -> bool:
        a, b = first.of(row), second.of(row)
        return a is b if a is None or b is None else _order(a, b) == 0

    return Expression(Type(BOOLEAN), of, text)


def _in(left: Expression, items: Sequence[Expression], text: str) -> Expression:
    value, *others = _common([left, *items], text)
    if len(others) > _IN_SET and {value.type.kind, *(other.type.kind for other in others)} & {FLOAT, DOUBLE}:
        raise Refused(f"{text}: Spark looks doubles up in longer lists in another way")

    def of(row: Row) -> bool | None:
        wanted = value.of(row)
        if wanted is None:
            return None
        unknown = False
        for other in others:
            item = other.of(row)
            unknown |= item is None
            if item is not None and _order(wanted, item) == 0:
                return True
        return None if unknown else False

    return Expression(Type(BOOLEAN), of, text)


def _like(left: Expression, pattern: Expression, escape: str, text: str) -> Expression:
    if left.type.kind != STRING or pattern.type.kind != STRING or not pattern.literal or len(escape) != 1:
        raise Refused(
            f"{text}: only a text is compared, with a pattern and an escape of one character that are written out"
        )
    parts, characters = [], iter(pattern.of(()))
    for character in characters:
        if character == escape:
            following = next(characters, "")
            if following not in ("%", "_", escape) or not following:
                raise Refused(
                    f"{text}: the escape {escape} stands before none of %, _ and {escape}, which Spark refuses"
                )
            parts.append(re.escape(following))
        else:
            parts.append({"%": ".*", "_": "."}.get(character) or re.escape(character))
    fits = re.compile("".join(parts), re.DOTALL)
    return Expression(Type(BOOLEAN), _strict(lambda value: fits.fullmatch(value) is not None, left), text)


def _concatenated(left: Expression, right: Expression, text: str) -> Expression:
    for operand in (left, right):
        if operand.type.kind != STRING:
            raise Refused(f"{text}: {operand.text} is {operand.type}, not a text")
    return Expression(Type(STRING), _strict(lambda a, b: a + b, left, right), text)


def _fits(number: int, bits: int) -> bool:
    return -(1 << bits - 1) <= number < 1 << bits - 1


def _calculated(
    operator: str, left: Expression, right: Expression, text: str, result: Type | None = None
) -> Expression:
    kinds = {left.type.kind, right.type.kind}
    if not kinds <= set(_NUMBERS):
        wrong = left if left.type.kind not in _NUMBERS else right
        raise Refused(f"{text}: {wrong.text} is {wrong.type}, not a number")
    if kinds == {INTEGER}:
        return _of_integers(operator, left, right, text)
    if kinds <= {INTEGER, DECIMAL}:
        return _of_decimals(operator, left, right, text, result)
    if kinds == {FLOAT} and operator != "/":
        raise Refused(f"{text}: Spark calculates in 32 bits; write CAST(... AS double)")
    if operator == "div":
        raise Refused(f"{text}: DIV is of whole numbers here")
    first, second = (_as_double(operand, FLOAT in kinds and DOUBLE not in kinds, text) for operand in (left, right))
    return Expression(Type(DOUBLE), _strict(_DOUBLES[operator](text), first, second), text)


def _division(text: str, zero: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def divide(a: Any, b: Any) -> Any:
        if b == 0:
            raise Fails(f"[{zero}] {text}")
        return function(a, b)

    return divide


def _remainder(a: float, b: float) -> float:
    return math.nan if math.isinf(a) or math.isnan(a) or math.isnan(b) else math.fmod(a, b)


_DOUBLES: dict[str, Callable[[str], Callable[[Any, Any], Any]]] = {
    "+": lambda _: lambda a, b: a + b,
    "-": lambda _: lambda a, b: a - b,
    "*": lambda _: lambda a, b: a * b,
    "/": lambda text: _division(text, "DIVIDE_BY_ZERO", lambda a, b: a / b),
    "%": lambda text: _division(text, "REMAINDER_BY_ZERO", _remainder),
}


def _cut(a: int, b: int) -> int:
    """Divided, towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _of_integers(operator: str, left: Expression, right: Expression, text: str) -> Expression:
    if operator == "/":
        divide = _division(text, "DIVIDE_BY_ZERO", lambda a, b: float(a) / float(b))
        return Expression(Type(DOUBLE), _strict(divide, left, right), text)
    bits = 64 if operator == "div" else max(left.type.size, right.type.size)
    functions: dict[str, Callable[[int, int], int]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "div": _division(text, "DIVIDE_BY_ZERO", _cut),
        "%": _division(text, "REMAINDER_BY_ZERO", lambda a, b: a - _cut(a, b) * b),
    }
    function = functions[operator]

    def of(a: int, b: int) -> int:
        number = function(a, b)
        if not _fits(number, bits):
            raise Fails(f"[ARITHMETIC_OVERFLOW] {text} is no {Type(INTEGER, bits)}")
        return number

    return Expression(Type(INTEGER, bits), _strict(of, left, right), text)


def _of_decimals(operator: str, left: Expression, right: Expression, text: str, result: Type | None) -> Expression:
    """Where no digit is rounded. result: its type, where that is known."""
    a, b = _as_decimal(left.type), _as_decimal(right.type)
    if operator == "*":
        whole, scale = a.size - a.scale + b.size - b.scale + 1, a.scale + b.scale
    elif operator in ("+", "-"):
        whole, scale = max(a.size - a.scale, b.size - b.scale) + 1, max(a.scale, b.scale)
    else:
        raise Refused(f"{text}: Spark rounds decimals by rules that are not followed here; write CAST(... AS double)")
    kind = Type(DECIMAL, whole + scale, scale) if result is None else result
    _digits(kind.size - kind.scale, kind.scale, text)
    function = {"+": _EXACT.add, "-": _EXACT.subtract, "*": _EXACT.multiply}[operator]
    return Expression(kind, _strict(lambda x, y: function(Decimal(x), Decimal(y)), left, right), text)


def _cast(value: Expression, name: str, tries: bool, text: str) -> Expression:
    """tries: null instead of a failure."""
    to = BOOLEAN if name == "boolean" else INTEGER if name in _BITS else name
    function = _casts(to, _BITS.get(name, 0), text).get((value.type.kind, to))
    if value.type.kind == to and to in (DOUBLE, STRING, BOOLEAN, DATE, TIMESTAMP):
        return Expression(value.type, value.of, text)
    if function is None:
        raise Refused(f"{text}: a cast from {value.type} to {name} is not followed here")

    def of(given: Any) -> Any:
        try:
            return function(given)
        except Fails:
            if tries:
                return None
            raise

    return Expression(Type(to, _BITS.get(name, 0)), _strict(of, value), text)


def _casts(to: str, bits: int, text: str) -> dict[tuple[str, str], Callable[[Any], Any]]:
    def whole(number: int, condition: str = "CAST_OVERFLOW") -> int:
        if not _fits(number, bits):
            raise Fails(f"[{condition}] {text}: {number} is no {Type(INTEGER, bits)}")
        return number

    def cut(number: float) -> int:
        if math.isnan(number) or math.isinf(number):
            raise Fails(f"[CAST_OVERFLOW] {text}: {number} is no {Type(INTEGER, bits)}")
        return whole(math.trunc(number))

    def read(written: str) -> int:
        match = _WHOLE.fullmatch(written.strip(_BLANK))
        if match is None:
            raise Fails(f"[CAST_INVALID_INPUT] {text}: {written!r} is no {Type(INTEGER, bits)}")
        return whole(int(match[0]), "CAST_INVALID_INPUT")

    return {
        (INTEGER, INTEGER): whole,
        (DOUBLE, INTEGER): cut,
        (FLOAT, INTEGER): cut,
        (STRING, INTEGER): read,
        (BOOLEAN, INTEGER): int,
        (INTEGER, DOUBLE): float,
        (FLOAT, DOUBLE): float,
        (DECIMAL, DOUBLE): float,
        (BOOLEAN, DOUBLE): float,
        (INTEGER, STRING): str,
        (BOOLEAN, STRING): lambda value: "true" if value else "false",
        (INTEGER, BOOLEAN): lambda value: value != 0,
        (TIMESTAMP, DATE): lambda micros: micros // _DAY,
        (DATE, TIMESTAMP): lambda days: days * _DAY,
    }


_LENGTHS = ("length", "char_length", "character_length", "len")
_ANY = (BOOLEAN, *_NUMBERS, STRING, DATE, TIMESTAMP, NULL, OTHER)
_FUNCTIONS = {
    **dict.fromkeys(("isnull", "isnotnull"), _ANY),
    **dict.fromkeys((*_LENGTHS, "lower", "upper", "lcase", "ucase", "trim"), (STRING,)),
    "isnan": (DOUBLE, FLOAT),
    "abs": _NUMBERS,
}
"""Functions of one argument, with the types that it may have."""


def _called(name: str, arguments: Sequence[Expression], text: str) -> Expression:
    kinds = [argument.type.kind for argument in arguments]
    if name == "coalesce" and arguments:
        return _first(arguments, text)
    if len(arguments) != 1 or kinds[0] not in _FUNCTIONS.get(name, ()):
        raise Refused(f"{text} is not understood")
    (argument,) = arguments
    if name in ("isnull", "isnotnull"):
        return Expression(Type(BOOLEAN), lambda row: (argument.of(row) is None) == (name == "isnull"), text)
    if name == "isnan":
        return Expression(
            Type(BOOLEAN), lambda row: (value := argument.of(row)) is not None and math.isnan(value), text
        )
    if name == "abs":
        return Expression(argument.type, _strict(_magnitude(argument.type, text), argument), text)
    if kinds[0] == STRING and name in _LENGTHS:
        return Expression(Type(INTEGER, 32), _strict(len, argument), text)
    change = (lambda value: value.strip(" ")) if name == "trim" else _other_case(name[0] == "l", text)
    return Expression(Type(STRING), _strict(change, argument), text)


def _magnitude(kind: Type, text: str) -> Callable[[Any], Any]:
    def magnitude(number: Any) -> Any:
        if kind.kind == INTEGER and not _fits(abs(number), kind.size):
            raise Fails(f"[ARITHMETIC_OVERFLOW] {text} is no {kind}")
        return abs(number)

    return magnitude


def _first(arguments: Sequence[Expression], text: str) -> Expression:
    values = _common(arguments, text)
    typed = [operand.type for operand in values if operand.type.kind != NULL]
    if not typed or DECIMAL in {operand.kind for operand in typed} or len({operand.kind for operand in typed}) > 1:
        raise Refused(
            f"{text}: of {', '.join(str(operand.type) for operand in arguments)} Spark makes one type by a rule that "
            f"is not followed here"
        )

    def of(row: Row) -> Any:
        for operand in values:
            value = operand.of(row)
            if value is not None:
                return value
        return None

    return Expression(max(typed, key=lambda operand: operand.size), of, text)


def _other_case(lower: bool, text: str) -> Callable[[str], str]:
    def changed(value: str) -> str:
        if not value.isascii():
            raise Refused(f"{text}: capitals beyond ASCII, as in {value!r}, may be others in Spark")
        return value.lower() if lower else value.upper()

    return changed


_JOINED: dict[str, Callable[[Expression, Expression, str], Expression]] = {
    "or": partial(_logical, True),
    "and": partial(_logical, False),
    "<=>": _same,
    "||": _concatenated,
    **{operator: partial(_compared, operator) for operator in _COMPARISONS},
    **{operator: partial(_calculated, operator) for operator in ("+", "-", "*", "/", "%", "div")},
}
