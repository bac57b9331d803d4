"""Regular expressions as Java has them, for what Rust's crate, which Polars uses, finds alike: RLIKE and
regexp_extract.

    taken         texts, ^ at the beginning, ., [classes] with ranges, \\d \\w \\s and what they are not, (groups),
                  (?:groups), |, * + ? {n,m}, greedy and lazy
    refused       all else: $ and \\b, which Java reads otherwise; lookaround, references and possessive repetitions,
                  which Rust has not; a group that is repeated, over which Java's stack may overflow

Java's classes are of ASCII letters and digits: https://docs.oracle.com/en/java/javase/17/docs/api/java.base/java/util/regex/Pattern.html
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import polars as pl

from weir.where.expressions import BOOLEAN, INTEGER, STRING, Expression, Refused, Type
from weir.where.texts import empty_where_none

_CLASSES = {"d": "0-9", "w": "a-zA-Z_0-9", "s": r" \t\n\x0B\x0C\r"}
_NO_LINE_END = r"[^\n\r\x{85}\x{2028}\x{2029}]"
_META = frozenset(r"\.+*?()|[]{}^$")
_MOST_REPEATED = 255


class _Translation:
    """One pass over a pattern, which writes it as Rust has it.

    Attributes:
        groups: How many it has that are remembered.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0
        self.groups = 0

    def whole(self) -> str:
        """Return the pattern. Raises Refused."""
        written, _ = self._alternatives()
        if self._at < len(self._pattern):
            raise Refused(") without (")
        return written

    def _take(self, *texts: str) -> str:
        """Take the first of these texts that is next; "" if none is."""
        for text in texts:
            if self._pattern.startswith(text, self._at):
                self._at += len(text)
                return text
        return ""

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise Refused("it ends too soon")
        self._at += 1
        return self._pattern[self._at - 1]

    def _alternatives(self) -> tuple[str, bool]:
        """Until the end or a parenthesis; and whether it finds the empty text."""
        written, empty = self._sequence()
        while self._take("|"):
            more, also = self._sequence()
            written, empty = f"{written}|{more}", empty or also
        return written, empty

    def _sequence(self) -> tuple[str, bool]:
        written, empty = "", True
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            if self._take("^"):
                written += "^"
                if self._repetition():
                    raise Refused("^ is repeated")
                continue
            is_group = bool(self._take("("))
            part, finds_empty = self._group() if is_group else (self._character(), False)
            repetition = self._repetition()
            if is_group and repetition and (repetition != "?" or finds_empty):
                raise Refused("a group is repeated")
            written += part + repetition
            empty &= finds_empty or repetition[:1] in ("*", "?") or repetition.startswith(("{0,", "{0}"))
        return written, empty

    def _group(self) -> tuple[str, bool]:
        remembered = not self._take("?:")
        if remembered and self._take("?"):
            raise Refused("(? is followed by a colon here, or not at all")
        self.groups += remembered
        inner, empty = self._alternatives()
        if self._next() != ")":
            raise Refused("( without )")
        return f"({'' if remembered else '?:'}{inner})", empty

    def _character(self) -> str:
        """Read one character, or a class of some."""
        character = self._next()
        if character == ".":
            return _NO_LINE_END
        if character == "[":
            return self._class()
        if character == "\\":
            escaped = self._next()
            if escaped.lower() in _CLASSES:
                return f"[{'^' if escaped.isupper() else ''}{_CLASSES[escaped.lower()]}]"
            return _literal(self._punctuation(escaped))
        if character in _META:
            raise Refused(f"{character} at this place")
        return _literal(character)

    def _punctuation(self, escaped: str) -> str:
        if escaped not in string.punctuation:
            raise Refused(f"\\{escaped}")
        return escaped

    def _class(self) -> str:
        written, first = "[^" if self._take("^") else "[", True
        while not self._take("]"):
            if self._take("\\d", "\\w", "\\s"):
                written += _CLASSES[self._pattern[self._at - 1]]
                if self._pattern.startswith("-", self._at):
                    raise Refused("a range of classes")
            else:
                low = self._of_class(first)
                written += _in_class(low)
                if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                    self._at += 1
                    high = self._of_class(False)
                    if high < low or "-" in (low, high):
                        raise Refused(f"the range {low}-{high}")
                    written += f"-{_in_class(high)}"
            first = False
        if first:
            raise Refused("an empty class")
        return f"{written}]"

    def _of_class(self, first: bool) -> str:
        """Return a character in a class. first: it is the first one."""
        character = self._next()
        if character == "\\":
            return self._punctuation(self._next())
        at_an_end = first or self._pattern.startswith("]", self._at)
        if character in "[^]" or (character == "-" and not at_an_end) or (character == "&" and self._take("&")):
            raise Refused(f"{character} in a class")
        return character

    def _repetition(self) -> str:
        written = self._take("*", "+", "?")
        if self._take("{"):
            end = self._pattern.find("}", self._at)
            least, comma, most = self._pattern[self._at : end].partition(",") if end >= 0 else ("", "", "")
            counts = [number for number in (least, most) if number]
            if not least or not all(number.isascii() and number.isdigit() for number in counts):
                raise Refused("{ at this place")
            if max(map(int, counts)) > _MOST_REPEATED or (most and int(most) < int(least)):
                raise Refused(f"{{{least}{comma}{most}}}")
            self._at = end + 1
            written = f"{{{least}{comma}{most}}}"
        if written:
            written += self._take("?")
            if self._take("+", "*", "?", "{"):
                raise Refused("a repetition is repeated")
        return written


def _literal(character: str) -> str:
    return pl.escape_regex(character)


def _in_class(character: str) -> str:
    return f"\\{character}" if character in r"\[]^-&~" else character


def _translated(text: Expression, pattern: Expression, sql: str) -> tuple[str, int]:
    """Return a pattern as Rust has it, and the number of its groups."""
    if text.type.kind != STRING or pattern.type.kind != STRING or not pattern.literal or pattern.value is None:
        raise Refused(f"{sql}: only a text is searched, for a pattern that is written out")
    translation = _Translation(pattern.value)
    try:
        written = translation.whole()
        pl.Series([""]).str.contains(written)
    except (Refused, pl.exceptions.PolarsError) as error:
        raise Refused(f"{sql}: the pattern is not understood: {error}") from error
    return written, translation.groups


def matched(text: Expression, pattern: Expression, sql: str) -> Expression:
    """Return the condition that a pattern is anywhere in a text: text RLIKE pattern, regexp_like(text, pattern)."""
    written, _ = _translated(text, pattern, sql)
    return Expression(Type(BOOLEAN), lambda rows: text.of(rows).str.contains(written), sql, text.may_fail)


def extracted(arguments: Sequence[Expression], sql: str) -> Expression:
    """Return regexp_extract(text, pattern, group): the group of the first match, "" if there is none."""
    text, pattern, *others = arguments
    written, groups = _translated(text, pattern, sql)
    group = others[0].value if others else 1
    if others and (others[0].type.kind != INTEGER or not others[0].literal):
        raise Refused(f"{sql}: the group is written out here")
    if group is None or not 0 <= group <= groups:
        raise Refused(f"{sql}: there is no such group, which Spark refuses")

    def part(values: pl.Series) -> pl.Series:
        return empty_where_none(values.str.extract(written, group), values)

    return Expression(Type(STRING), lambda rows: part(text.of(rows)), sql, text.may_fail)
