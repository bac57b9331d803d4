"""Rows out of nothing, for tests, demos and benchmarks: row n is a function of the seed and of n alone.

So any range of numbers gives the same rows whoever reads it, in whatever pieces and as often as asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from state_ops.errors import InputError, PipelineError
from weir.definition.source import (
    EARLIEST,
    LATEST,
    Batch,
    Connector,
    Lag,
    Limits,
    Opening,
    Part,
    Planned,
    Position,
    Source,
    no_position,
)

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
_PARTITION = "0"
_PART_ROWS = 1 << 20
_BATCH_ROWS = 1 << 16
_ROW_BYTES = 32
_SECOND = 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSource(Source):
    """Generated rows with the columns `seq` (int64, the row's number from 0), `key` (int64), the event time (timestamp
    in UTC) and `value` (double, from 0 to 1).

    Attributes:
        rate: Rows in a second of event time.
        keys: How many keys there are; they are the numbers from 0.
        skew: 0: all keys come alike often. Above, key k comes in proportion to (k + 1) ** -skew, as by Zipf's law.
        late: The share of rows that come late.
        lateness: Microseconds by which such a row is late at most.
        end: How many rows there are; None: without end.
        first: The event time of row 0.
        paced: A row is there when the clock reaches its event time. Else all rows are there at once.
        seed: Other seeds give other keys, values and late rows.
    """

    name: str = "generator"
    event_time: str | None = "event_time"
    rate: float = 1000
    keys: int = 1000
    skew: float = 0
    late: float = 0
    lateness: int = 60 * _SECOND
    end: int | None = None
    first: datetime = FIRST
    paced: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for argument, holds, range_ in (
            ("rate", 0 < self.rate <= 1e9, "above 0 and at most a billion"),
            ("keys", 1 <= self.keys < 1 << 62, "at least 1"),
            ("skew", 0 <= self.skew <= 10, "from 0 to 10"),
            ("late", 0 <= self.late <= 1, "a share from 0 to 1"),
            ("lateness", self.lateness >= 0, "at least 0"),
            ("end", self.end is None or self.end >= 0, "a number of rows"),
            ("seed", 0 <= self.seed < 1 << 63, "at least 0"),
            ("first", self.first.tzinfo is not None, "a time with its zone"),
            ("event_time", self.event_time not in (None, "seq", "key", "value"), "the name of a column of its own"),
        ):
            if not holds:
                raise PipelineError(
                    f"{argument}={getattr(self, argument)!r} does not fit a generator.",
                    where=f"source {self.name}",
                    next=f"Make it {range_}.",
                )

    def open(self, opening: Opening) -> Connector:  # noqa: ARG002
        return _Generator(self)


class _Generator:
    """The rows of one definition. now: microseconds since 1970, for rows that are paced."""

    def __init__(self, source: GeneratorSource, now: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        self._source, self._now = source, now
        self._first = (source.first - _EPOCH) // timedelta(microseconds=1)
        shape = (source.event_time, float(source.rate), source.keys, float(source.skew), self._first, source.seed)
        self._rows_id = xxhash.xxh64_hexdigest(repr((*shape, float(source.late), source.lateness)).encode())
        self._schema = pa.schema(
            [
                ("seq", pa.int64()),
                ("key", pa.int64()),
                (source.event_time, pa.timestamp("us", "UTC")),
                ("value", pa.float64()),
            ]
        )

    def begin(self, start: str | datetime | Position) -> Position:
        if isinstance(start, Mapping):
            next = start.get("next")
            if set(start) != {"next"} or type(next) is not int or next < 0:
                raise no_position(start, '{"next": 0}', self._where())
            return _position(next)
        if isinstance(start, datetime):
            if start.tzinfo is None:
                start = start.replace(tzinfo=UTC)
            return _position(max(0, math.ceil((start - self._source.first).total_seconds() * self._source.rate)))
        if start == EARLIEST:
            return _position(0)
        available = self._available()
        if start != LATEST or available is None:
            raise PipelineError(
                f"A generator without end cannot start at {start!r}."
                if start == LATEST
                else f"start={start!r} is no place to begin.",
                where=self._where(),
                next='Say "earliest", a time, a position {"next": n}; or "latest" where it is paced or has an end.',
            )
        return _position(available)

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        begin = end = _next(position)
        available = self._available()
        bounds = [bound for bound in (available, None if upto is None else _next(upto)) if bound is not None]
        behind = min(bounds, default=None)
        most = 0 if _PARTITION in hold else max(1, min(limits.rows, limits.bytes // _ROW_BYTES))
        parts: list[Part] = []
        while len(parts) < max(1, limits.parts) and end - begin < most and (behind is None or end < behind):
            rows = min(_PART_ROWS, most - (end - begin), *([] if behind is None else [behind - end]))
            parts.append(self._part(end, end + rows))
            end += rows
        return Planned(
            tuple(parts),
            _position(end),
            limited=behind is None or end < behind,
            ends={_PARTITION: available is not None and end >= available},
        )

    def read(self, part: Part) -> Iterator[Batch]:
        begin, end = self._range(part)
        for start in range(begin, end, _BATCH_ROWS):
            yield Batch(self._rows(np.arange(start, min(end, start + _BATCH_ROWS), dtype=np.uint64)))

    def verify(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._range(part)

    def lag(self, position: Position) -> Lag:
        available = self._available()
        if available is None:
            return Lag()
        rows = max(0, available - _next(position))
        newest = self._first + round((available - 1) * _SECOND / self._source.rate) if rows else None
        return Lag(rows, rows * _ROW_BYTES, newest)

    def where(self, part: Part) -> str:
        begin, end = self._range(part)
        return f"{self._where()}, rows {begin:,} to {end - 1:,}"

    def committed(self, position: Position) -> None:
        pass

    def close(self) -> None:
        pass

    def _where(self) -> str:
        return f"source {self._source.name}"

    def _part(self, begin: int, end: int) -> Part:
        rows = end - begin
        place = {"begin": begin, "end": end, "of": self._rows_id}
        return Part(f"{self._rows_id}-{begin}-{end}", _PARTITION, place, rows, rows * _ROW_BYTES)

    def _range(self, part: Part) -> tuple[int, int]:
        if part.place["of"] != self._rows_id:
            raise InputError(
                "The generator was defined anew, so it does not make the rows again that an epoch has read.",
                where=f"{self._where()}, part {part.name}",
                next="Give it the arguments that it had, or a new name.",
            )
        return part.place["begin"], part.place["end"]

    def _available(self) -> int | None:
        """Return how many rows there are by now, or None if they have no end."""
        if not self._source.paced:
            return self._source.end
        passed = self._now() - self._first
        due = max(0, math.floor(passed * self._source.rate / _SECOND) + 1) if passed >= 0 else 0
        return due if self._source.end is None else min(due, self._source.end)

    def _rows(self, numbers: np.ndarray) -> pa.Table:
        source = self._source
        moments = self._first + np.rint(numbers * (_SECOND / source.rate)).astype(np.int64)
        if source.late and source.lateness:
            delays = (self._hash(numbers, 2) % np.uint64(source.lateness)).astype(np.int64) + 1
            moments -= np.where(_fractions(self._hash(numbers, 1)) < source.late, delays, 0)
        columns = [
            pa.array(numbers.astype(np.int64)),
            pa.array(self._keys(_fractions(self._hash(numbers, 0)))),
            pa.array(moments).cast(self._schema.field(2).type),
            pa.array(_fractions(self._hash(numbers, 3))),
        ]
        return pa.table(columns, schema=self._schema)

    def _keys(self, fractions: np.ndarray) -> np.ndarray:
        """Return the inverse of the distribution whose density at x from 1 to keys + 1 is proportional to x **
        -skew."""
        skew, above = self._source.skew, self._source.keys + 1
        if skew == 0:
            places = 1 + fractions * self._source.keys
        elif skew == 1:
            places = np.exp(fractions * math.log(above))
        else:
            power = 1 - skew
            places = (1 + fractions * (above**power - 1)) ** (1 / power)
        return np.clip(places.astype(np.int64) - 1, 0, self._source.keys - 1)

    def _hash(self, numbers: np.ndarray, column: int) -> np.ndarray:
        """Return 64 random bits for each row, by column.

        They are SplitMix64's output function of the row's number as the counter.
        """
        offset = xxhash.xxh64_intdigest(f"{self._source.seed}-{column}".encode())
        bits = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(offset)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))


def _fractions(bits: np.ndarray) -> np.ndarray:
    """Return fractions from 0 to below 1."""
    return (bits >> np.uint64(11)) * 2.0**-53


def _position(next_: int) -> dict[str, Any]:
    return {"next": next_}


def _next(position: Position) -> int:
    return int(position["next"])
