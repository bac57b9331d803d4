"""The bounds of a CSV file's records, by its quotes.

Nearly all blocks are regular: each quote opens a value right behind a delimiter, or closes one right before the next.
NumPy sees that at a glance, and Arrow reads such a block as it is. Only the others are looked at value by value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_LF, _CR = 10, 13
UNCLOSED = "a quote is not closed (multiline=True reads values of several lines)"
_AFTER_QUOTE = "text stands behind a closing quote"


@dataclass(frozen=True, slots=True)
class Record:
    """One record of some bytes, without the end of its line.

    Attributes:
        reason: Why it is none, if it is none.
    """

    start: int
    end: int
    reason: str | None = None


class Records:
    """Cuts bytes into records.

    Args:
        delimiter: One byte.
        quote: One byte; empty: nothing is quoted.
        multiline: A quoted value may have several lines.
    """

    def __init__(self, delimiter: bytes, quote: bytes, multiline: bool) -> None:
        self._quote, self._multiline = quote, multiline
        self._beside = np.zeros(256, bool)
        self._beside[[*delimiter, *quote, _LF, _CR]] = True
        d, q = re.escape(delimiter), re.escape(quote)
        self._plain = re.compile(rb"[^%b\r\n]*" % d)
        self._quoted = re.compile(rb"%b(?:[^%b]+|%b%b)*+%b" % (q, q, q, q, q)) if quote else None
        self._next = re.compile(rb"%b|\r\n|\n|\r|\Z" % d)
        self._end = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r|\Z)")
        self._delimiter = delimiter

    def is_regular(self, data: bytes) -> bool:
        """Return whether Arrow cuts these whole lines into the records that they are."""
        return not self._quote or self._quote not in data or self._is_regular(data, self._quotes(data), is_end=True)

    def last(self, data: bytes, is_end: bool) -> int:
        """Return the end of the last whole record; see `stream.Bounds`.

        Records have one line unless they are `multiline`.
        """
        quotes = self._quotes(data)
        if not self._is_regular(data, quotes, is_end):
            ends = [self._line_end(data, record.end) for record in self.split(data)]
            if is_end:
                return ends[-1] if ends else len(data)
            return ends[-2] if len(ends) > 1 else 0
        if is_end and len(quotes) % 2 == 0:
            return len(data)
        lines = np.flatnonzero(np.frombuffer(data, np.uint8) == _LF)
        outside = lines[np.searchsorted(quotes, lines) % 2 == 0]
        return int(outside[-1]) + 1 if len(outside) else (len(data) if is_end else 0)

    def split(self, data: bytes) -> Iterator[Record]:
        """Yield the records, and what is none; empty lines are left out."""
        at = 0
        while at < len(data):
            start, reason = at, None
            while True:
                if self._quoted is not None and data.startswith(self._quote, at):
                    value = self._quoted.match(data, at)
                    if value is None or (not self._multiline and _has_line_end(value[0])):
                        at, reason = (len(data) if self._multiline else at), UNCLOSED
                        break
                    at = value.end()
                    if not self._next.match(data, at):
                        reason = _AFTER_QUOTE
                        break
                else:
                    at = self._plain.match(data, at).end()  # type: ignore[union-attr]
                if not data.startswith(self._delimiter, at):
                    break
                at += 1
            line = self._end.match(data, at)[0]  # type: ignore[index]
            end = at + len(line.rstrip(b"\r\n"))
            at += len(line)
            if end > start:
                yield Record(start, end, reason)

    def _line_end(self, data: bytes, end: int) -> int:
        return self._end.match(data, end).end()  # type: ignore[union-attr]

    def _quotes(self, data: bytes) -> np.ndarray:
        if not self._quote or self._quote not in data:
            return np.zeros(0, np.int64)
        return np.flatnonzero(np.frombuffer(data, np.uint8) == self._quote[0])

    def _is_regular(self, data: bytes, quotes: np.ndarray, is_end: bool) -> bool:
        if not len(quotes):
            return True
        if is_end and len(quotes) % 2:
            return False
        array = np.frombuffer(data, np.uint8)
        opening, closing = quotes[::2], quotes[1::2]
        before, after = array[opening - 1], array[np.minimum(closing + 1, len(array) - 1)]
        first = int(opening[0] == 0)  # of the first and the last byte there is nothing beside
        last = int(len(closing) > 0 and closing[-1] == len(array) - 1)
        if not self._beside[before[first:]].all() or not self._beside[after[: len(after) - last]].all():
            return False
        if self._multiline:
            return True
        lines = np.flatnonzero((array == _LF) | (array == _CR))
        return not (np.searchsorted(quotes, lines) % 2).any()


def _has_line_end(value: bytes) -> bool:
    return b"\n" in value or b"\r" in value
