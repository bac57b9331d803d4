"""Trace the columns that a stage's SQL makes to the columns of the stage's input.

A column comes from one or more columns of the input, or is one of them as it is, under its own or another name.

It is read by its words, since Spark's SQL has more than Weir evaluates by itself: a column of the input is read where
its name stands, unless that is a function's, a type's, a field's of a struct, or in a text or a comment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_TOKEN = re.compile(
    r"""'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | --[^\n]* | /\*.*?\*/ | `(?:[^`]|``)*` | \d[\w.]* | \w+ | \S""",
    re.VERBOSE | re.DOTALL,
)
_KEYWORDS = frozenset(
    "and or not is in like ilike rlike regexp between div mod case when then else end null true false distinct from"  # noqa: SIM905
    " escape interval as except".split()
)


def before(columns: Sequence[str], name: str) -> str | None:
    """Return the name that a column of the stage has in the stage's input, or None where SQL computes the column.

    Args:
        columns: As in `Stage.columns`; none: all as they are.
    """
    computed = False
    for sql in columns:
        value, made = _named(sql)
        if made == name and len(value) == 1 and _is_name(value[0]):
            return _bare(value[0])
        computed |= made == name
    return name if not columns or (has_all(columns) and not computed) else None


def keeps(columns: Sequence[str], name: str) -> bool:
    """Return whether the stage sees a column of its input unchanged, if the input has that column."""
    return before(columns, name) == name


def seen_as(columns: Sequence[str], name: str) -> str | None:
    """Return the name under which the stage sees a column of its input unchanged, or None if it does not see it so."""
    renamed = [made for value, made in map(_named, columns) if made is not None and [*map(_bare, value)] == [name]]
    return next((seen for seen in [name, *renamed] if before(columns, seen) == name), None)


def has_all(columns: Sequence[str]) -> bool:
    """Return whether SQL asks for all columns of the input, with or without exceptions."""
    return any(_tokens(sql)[:1] == ["*"] for sql in columns)


def has(columns: Sequence[str], name: str) -> bool:
    """Return whether the stage sees a column of this name, if its input has one."""
    return not columns or any(_has(sql, name) for sql in columns)


def _has(sql: str, name: str) -> bool:
    value, made = _named(sql)
    if value[:1] == ["*"]:
        return not _read(value, [name])  # "* EXCEPT (...)" names the others
    return made is not None and made.lower() == name.lower()


def made_of(columns: Sequence[str], given: Sequence[str]) -> dict[str, list[str]]:
    """Return by column that a stage sees the columns of its input that it is made of.

    Args:
        given: The columns of its input.
    """
    if not columns:
        return {name: [name] for name in given}
    origins: dict[str, list[str]] = {}
    for sql in columns:
        value, made = _named(sql)
        named = _read(value, given)
        if value[:1] == ["*"]:
            origins |= {name: [name] for name in given if name not in named}
        elif made is not None:
            origins[made] = named
    return origins


def read_by(sql: str, given: Sequence[str]) -> list[str]:
    """Return the columns of a stage's input that a condition reads. given: all that there are."""
    return _read(_tokens(sql), given)


def tokens(sql: str) -> tuple[str, ...]:
    """Return the words of SQL without comments, in small letters where capitals mean nothing."""
    return tuple(token if token[0] in "'\"`" else token.lower() for token in _tokens(sql))


def name_of(sql: str) -> str | None:
    """Return the name of a column that SQL makes; None: it makes several, or Spark gives it one."""
    value, made = _named(sql)
    return None if made is None or value[:1] == ["*"] else made.lower()


def value_of(columns: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the words of SQL that make a column; its name, if it stays what it is."""
    for sql in columns:
        value, made = _named(sql)
        if made is not None and made.lower() == name.lower() and value[:1] != ["*"]:
            words = tokens(" ".join(value))
            return (name,) if [*map(bare, words)] == [name.lower()] else words
    return (name,)


def bare(token: str) -> str:
    """Return a column's name without backquotes, in small letters."""
    return _bare(token).lower()


def _named(sql: str) -> tuple[list[str], str | None]:
    """Return the tokens of a column's value, and its name; None: Spark makes one of the value."""
    tokens = _tokens(sql)
    if len(tokens) > 1 and _is_name(tokens[-1]):
        ahead = tokens[-2]
        if ahead.lower() == "as":
            return tokens[:-2], _bare(tokens[-1])
        if ahead == ")" or ahead[0] in "'\"" or _is_name(ahead) or ahead[0].isdigit():
            return tokens[:-1], _bare(tokens[-1])
    of_field = len(tokens) > 2 and tokens[-2] == "."
    is_path = tokens and all(map(_is_name, tokens[::2])) and all(token == "." for token in tokens[1::2])
    return tokens, _bare(tokens[-1]) if is_path and (of_field or len(tokens) == 1) else None


def _read(tokens: Sequence[str], given: Sequence[str]) -> list[str]:
    names = {
        _bare(token).lower()
        for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False)
        if _is_name(token)
        and before != "."
        and before.lower() != "as"
        and not before[:1].isdigit()
        and (token[0] == "`" or after[:1] not in ("(", "'", '"'))  # a function, a typed literal
    }
    return [name for name in given if name.lower() in names]


def _tokens(sql: str) -> list[str]:
    return [token for token in _TOKEN.findall(sql) if not token.startswith(("--", "/*"))]


def _is_name(token: str) -> bool:
    """Return whether a token may name a column: a word that is not a keyword of SQL, or a word in backquotes."""
    return token[0] == "`" or ((token[0].isalpha() or token[0] == "_") and token.lower() not in _KEYWORDS)


def _bare(token: str) -> str:
    return token[1:-1].replace("``", "`") if token[0] == "`" else token
