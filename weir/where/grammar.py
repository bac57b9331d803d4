"""The part of Spark SQL that a `where` may be written in, by Spark's own grammar: the loosest operators first."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial

import pyarrow as pa

from weir.where import conditions, patterns, values
from weir.where.expressions import (
    BOOLEAN,
    DATE,
    DOUBLE,
    INTEGER,
    NULL,
    NUMBERS,
    STRING,
    TIMESTAMP,
    Expression,
    NoColumn,
    Refused,
    Type,
    literal,
    type_of,
)

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
_KEYWORDS = frozenset(
    "and or not is in like rlike regexp between div escape case when then else end exists interval over".split()  # noqa: SIM905
)
_NO_COLUMN = re.compile(r"_metadata|current_\w+|localtimestamp|user|session_user|grouping__id", re.IGNORECASE)
"""What Spark knows beside columns, and by no parentheses."""
_ESCAPES = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a"}


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


class Parser:
    """Spark's grammar by recursive descent. Each rule is a method that returns a typed expression.

    Attributes:
        columns: The paths of those that have been named.
        everywhere: What can fail and stands before BETWEEN: Spark evaluates that first, whatever AND and OR decide.
    """

    def __init__(self, sql: str, schema: pa.Schema) -> None:
        self._sql, self._schema = sql, schema
        self._tokens, self._at = _tokens(sql), 0
        self.columns: list[tuple[str, ...]] = []
        self.everywhere: list[Expression] = []
        self._in_unknown = 0  # functions around what is read

    def whole(self) -> Expression:
        """Return the condition, which is all of the SQL."""
        condition = self._or()
        if self._next.kind != "end":
            raise Refused(f"{self._sql[self._next.start :]!r} is not understood")
        if condition.type.kind != BOOLEAN:
            raise Refused(f"{condition.text} is {condition.type}, not a condition")
        return condition

    def named_value(self) -> tuple[Expression, str, str | None]:
        """Return a value with AS and its name, or a column, which is all of the SQL; with the column's name if it is
        one."""
        value = self._or()
        path = next((path for path in self.columns if value.text in (".".join(path), f"`{path[-1]}`")), None)
        column = path[0] if path is not None and len(path) == 1 else None
        if self._word("as"):
            token = self._next
            if token.kind not in ("name", "quoted"):
                raise Refused(f"{self._sql[token.start :]!r} is not understood")
            self._at += 1
            name = token.value.replace("``", "`")
        elif path is None:
            raise Refused(f"{value.text} has no name: write AS and one behind it")
        else:
            name = path[-1]
        if self._next.kind != "end":
            raise Refused(f"{self._sql[self._next.start :]!r} is not understood")
        return value, name, column

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
        return self._logical("or", self._and)

    def _and(self) -> Expression:
        return self._logical("and", self._not)

    def _logical(self, word: str, operand: Callable[[], Expression]) -> Expression:
        start, operands = self._next.start, [operand()]
        while self._word(word):
            operands.append(operand())
        if len(operands) == 1:
            return operands[0]
        return conditions.logical(word == "or", operands, self._text_since(start))

    def _not(self) -> Expression:
        start = self._next.start
        if self._word("not"):
            return conditions.negated(self._not(), self._text_since(start))
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
                self.everywhere += [left] if left.may_fail else []
                bounds = conditions.compared(">=", left, low, text), conditions.compared("<=", left, high, text)
                predicate = conditions.logical(False, bounds, text)
            elif self._word("in"):
                self._expect("(")
                items = [self._or()]
                while self._operator(","):
                    items.append(self._or())
                self._expect(")")
                predicate = conditions.contained(left, items, self._text_since(start))
            elif self._word("like"):
                pattern, escape = self._comparison(), "\\"
                if self._word("escape"):
                    if self._next.kind != "text":
                        raise Refused(f"{self._text_since(start)} is not understood")
                    escape = _unescaped(self._next.value)
                    self._at += 1
                predicate = conditions.like(left, pattern, escape, self._text_since(start))
            elif self._word("rlike") or self._word("regexp"):
                predicate = patterns.matched(left, self._comparison(), self._text_since(start))
            elif negated:
                raise Refused(f"{self._sql[start:]!r} is not understood")
            else:
                return left
        return conditions.negated(predicate, self._text_since(start)) if negated else predicate

    def _is(self, left: Expression, start: int) -> Expression:
        if self._word("null"):
            return conditions.is_null(left, self._text_since(start))
        truth = self._operator("true", "false", "unknown")
        if truth is not None:
            return conditions.truth(left, {"true": True, "false": False}.get(truth), self._text_since(start))
        if self._word("distinct", "from"):
            right = self._comparison()
            text = self._text_since(start)
            return conditions.negated(conditions.same(left, right, text), text)
        raise Refused(f"{self._sql[start:]!r} is not understood")

    def _comparison(self) -> Expression:
        return self._joined(self._sum, "<=>", *conditions.COMPARISONS)

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
        if value.type.kind not in NUMBERS:
            raise Refused(f"{self._text_since(start)}: {value.text} is {value.type}, not a number")
        if sign == "+":
            return replace(value, text=self._text_since(start))
        return values.minus(value, self._text_since(start))

    def _primary(self) -> Expression:
        token = self._next
        if token.kind == "number":
            return self._number("", token.start)
        if token.kind == "text":
            self._at += 1
            if self._next.kind == "text":
                raise Refused(f"{self._text_since(token.start)} {self._next.value} is not understood")
            return literal(Type(STRING), _unescaped(token.value), token.value)
        if self._operator("("):
            inner = self._or()
            self._expect(")")
            return replace(inner, text=self._text_since(token.start))
        if self._word("case"):
            return self._case(token.start)
        if token.kind == "quoted":
            self._at += 1
            return self._column(token.value.replace("``", "`"), token.start)
        if token.kind != "name" or token.value.lower() in _KEYWORDS:
            raise Refused(f"{self._sql[token.start :]!r} is not understood")
        self._at += 1
        return self._named(token)

    def _named(self, token: _Token) -> Expression:
        """Read the part that begins with a name: a constant, a typed literal, a function or a column."""
        word = token.value.lower()
        if word in ("true", "false"):
            return literal(Type(BOOLEAN), word == "true", token.value)
        if word == "null":
            return literal(Type(NULL), None, token.value)
        if self._next.kind == "text":
            if word not in (DATE, TIMESTAMP):
                raise Refused(f"the literal {token.value} {self._next.value} is not understood")
            self._at += 1
            written = self._tokens[self._at - 1].value
            text = self._text_since(token.start)
            return literal(Type(word), conditions.moment(_unescaped(written), word, text), text)
        if self._operator("("):
            if word in ("cast", "try_cast"):
                return self._cast(token.start, tries=word == "try_cast")
            self._in_unknown += word not in values.KNOWN
            arguments = [] if self._operator(")") else [self._or()]
            while arguments and self._operator(","):
                arguments.append(self._or())
            if arguments:
                self._expect(")")
            self._in_unknown -= word not in values.KNOWN
            return values.called(word, arguments, self._text_since(token.start))
        return self._column(token.value, token.start)

    def _column(self, name: str, start: int) -> Expression:
        """Return a column, or a field of one that is a struct."""
        if self._schema.names.count(name) != 1:
            if self._may_be_sparks(name):
                raise Refused(f"{name} is not understood")
            raise NoColumn(name, self._schema.names)
        path, kind = [name], self._schema.field(name).type
        while self._operator("."):
            token = self._next
            field = token.value.replace("``", "`")
            if token.kind not in ("name", "quoted") or not pa.types.is_struct(kind) or kind.names.count(field) != 1:
                raise Refused(f"{self._sql[start:]!r}: {'.'.join(path)} has no such field")
            self._at += 1
            path.append(field)
            kind = kind.field(field).type
        if tuple(path) not in self.columns:
            self.columns.append(tuple(path))
        at = str(self.columns.index(tuple(path)))
        return Expression(type_of(kind), lambda rows: rows[at], self._text_since(start))

    def _may_be_sparks(self, name: str) -> bool:
        """Return whether a name that is no column may mean something to Spark where it stands.

        It may be a unit, a function's keyword, a parameter (`x -> ...`), a function without parentheses, or a column
        that Spark hides.
        """
        ahead = self._tokens[self._at]
        is_parameter = self._sql.startswith("->", ahead.start)
        goes_on = ahead.kind == "name" and ahead.value.lower() not in _KEYWORDS | {"as"}
        return is_parameter or goes_on or self._in_unknown > 0 or bool(_NO_COLUMN.fullmatch(name))

    def _number(self, sign: str, start: int) -> Expression:
        token = self._next
        self._at += 1
        written, suffix, text = sign + token.value, token.suffix.upper(), self._text_since(start)
        if suffix == "D" or (not suffix and "e" in token.value.lower()):
            if math.isinf(float(written)):
                raise Refused(f"{text} is no double")
            return literal(Type(DOUBLE), float(written), text)
        if suffix not in ("", "L") or (suffix and not token.value.isdigit()):
            raise Refused(f"{text} is not understood")
        if token.value.isdigit():
            number = int(written)
            for bits in (64,) if suffix else (32, 64):
                if values.fits(number, bits):
                    return literal(Type(INTEGER, bits), number, text)
            if suffix:
                raise Refused(f"{text} is no bigint")
        return conditions.decimal_literal(Decimal(written), text)

    def _case(self, start: int) -> Expression:
        """CASE WHEN condition THEN value ... ELSE value END, or CASE value WHEN equal to THEN value."""
        asked = None if self._word("when") else self._or()
        branches: list[tuple[Expression, Expression]] = []
        if asked is not None:
            self._expect_word("when")
        while True:
            begin = self._next.start
            given = self._or()
            text = self._text_since(begin)
            condition = given if asked is None else conditions.compared("=", asked, given, text)
            self._expect_word("then")
            branches.append((condition, self._or()))
            if not self._word("when"):
                break
        other = self._or() if self._word("else") else literal(Type(NULL), None, "NULL")
        self._expect_word("end")
        return values.case(branches, other, self._text_since(start))

    def _expect_word(self, word: str) -> None:
        if not self._word(word):
            raise Refused(f"{self._sql[self._next.start :]!r}: {word.upper()} is missing before it")

    def _cast(self, start: int, *, tries: bool) -> Expression:
        value = self._or()
        if not self._word("as") or self._next.kind != "name":
            raise Refused(f"{self._sql[start:]!r} is not understood")
        name = self._next.value.lower()
        self._at += 1
        self._expect(")")
        return values.cast(value, name, tries, self._text_since(start))


def _unescaped(written: str) -> str:
    r"""Return the meaning of a text. `\%` and `\_` stay as they are, for LIKE."""
    quote, inner = written[0], written[1:-1].replace(written[0] * 2, written[0])

    def meant(escape: re.Match[str]) -> str:
        if escape["octal"] or escape["unicode"]:
            raise Refused(f"{quote}{inner}{quote}: the escape {escape[0]} is not understood")
        character = escape["one"]
        return escape[0] if character in "%_" else _ESCAPES.get(character, character)

    return re.sub(r"\\(?:(?P<octal>[0-3][0-7]{2})|(?P<unicode>[uU])|(?P<one>.))", meant, inner, flags=re.DOTALL)


_JOINED: dict[str, Callable[[Expression, Expression, str], Expression]] = {
    "<=>": conditions.same,
    "||": values.concatenated,
    **{comparison: partial(conditions.compared, comparison) for comparison in conditions.COMPARISONS},
    **{sign: partial(values.calculated, sign) for sign in ("+", "-", "*", "/", "%", "div")},
}
