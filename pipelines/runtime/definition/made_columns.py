"""Which columns that a stage's SQL makes are columns of its input as they are, under their own or another name."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PLAIN = re.compile(r"\s*(\w+|`[^`]+`)(?:\s+(?:as\s+)?(\w+|`[^`]+`))?\s*", re.IGNORECASE)
_LAST = re.compile(r"(\w+|`[^`]+`)\s*\Z")
_ALL = re.compile(r"\s*\*(.*)", re.DOTALL)
_NAME = re.compile(r"\w+|`[^`]+`")


def before(columns: Sequence[str], name: str) -> str | None:
    """What a column that a stage sees is called in its input; None where SQL computes it.

    Args:
        columns: As in `Stage.columns`; none: all as they are.
    """
    computed = False
    for sql in columns:
        if plain := _PLAIN.fullmatch(sql):
            if _bare(plain[2] or plain[1]) == name:
                return _bare(plain[1])
        elif last := _LAST.search(sql):
            computed |= _bare(last[1]) == name
    return name if not columns or (has_all(columns) and not computed) else None


def keeps(columns: Sequence[str], name: str) -> bool:
    """Whether a column of the input is the same in what a stage sees, if it is there."""
    return before(columns, name) == name


def seen_as(columns: Sequence[str], name: str) -> str | None:
    """What a column of a stage's input is called where the stage sees it as it is; None where it does not."""
    plain = [match for sql in columns if (match := _PLAIN.fullmatch(sql))]
    names = [name, *(_bare(match[2] or match[1]) for match in plain if _bare(match[1]) == name)]
    return next((seen for seen in names if before(columns, seen) == name), None)


def has_all(columns: Sequence[str]) -> bool:
    """Whether SQL asks for all columns of the input, perhaps but for some."""
    return any(_left_out(sql) is not None for sql in columns)


def has(columns: Sequence[str], name: str) -> bool:
    """Whether what a stage sees has a column of a name, if its input has one."""
    return not columns or any(_has(sql, name) for sql in columns)


def _has(sql: str, name: str) -> bool:
    left_out, last = _left_out(sql), _LAST.search(sql)
    if left_out is not None:
        return name.lower() not in left_out
    return last is not None and _bare(last[1]).lower() == name.lower()


def _left_out(sql: str) -> list[str] | None:
    """In small letters, the columns of the input that `*` leaves out; None of other SQL."""
    every = _ALL.fullmatch(sql)
    return None if every is None else [_bare(name).lower() for name in _NAME.findall(every[1])[1:]]


def _bare(name: str) -> str:
    return name.strip("`")
