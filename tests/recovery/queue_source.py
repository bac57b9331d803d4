"""A source for tests that gives each row once: reading a part takes its rows out of a database of SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from state_ops.errors import PipelineError
from weir.definition.source import Batch, Connector, Lag, Limits, Opening, Part, Planned, Position, Source

SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSource(Source):
    """path: of the database, with {placeholders}."""

    path: str = "{landing}/queue.db"

    @property
    def replayable(self) -> bool:
        return False

    def open(self, opening: Opening) -> Connector:
        return Queue(opening.resolve(self.path))


class Queue:
    """Positions name the last row that was planned, parts the rows from one number to another."""

    def __init__(self, path: str) -> None:
        self._path = path
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS queue (id TEXT, n INTEGER PRIMARY KEY)")

    def put(self, rows: Sequence[tuple[str, int]]) -> None:
        with sqlite3.connect(self._path) as connection:
            connection.executemany("INSERT INTO queue VALUES (?, ?)", rows)

    def begin(self, start: str | datetime | Position) -> Position:
        if isinstance(start, Mapping) and isinstance(start.get("n"), int):
            return start
        if start == "latest":
            return {"n": self._all("SELECT COALESCE(MAX(n), -1) FROM queue")[0][0]}
        if start != "earliest":
            next = 'Say "earliest" or "latest".'
            raise PipelineError(f"A queue does not begin there: {start}.", where=self._path, next=next)
        return {"n": -1}

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        waiting = self._all("SELECT n FROM queue WHERE n > ? ORDER BY n", position["n"])
        taken = [number for (number,) in waiting[: limits.rows]]
        if not taken or hold or upto is not None:
            return Planned((), position, ends={"queue": True})
        part = Part(f"{taken[0]}-{taken[-1]}", "queue", {"from": taken[0], "to": taken[-1]}, len(taken))
        done = len(taken) == len(waiting)
        return Planned((part,), {"n": taken[-1]}, not done, {"queue": done})

    def read(self, part: Part) -> Iterator[Batch]:
        rows = self._all("DELETE FROM queue WHERE n BETWEEN ? AND ? RETURNING id, n", *part.place.values())
        yield Batch(
            pa.Table.from_pylist([{"id": id, "n": n} for id, n in sorted(rows, key=lambda row: row[1])], SCHEMA)
        )

    def verify(self, parts: Sequence[Part]) -> None:  # noqa: ARG002  the signature is the Protocol's
        raise AssertionError("what can be read once is there no more")

    def lag(self, position: Position) -> Lag:
        return Lag(rows=self._all("SELECT COUNT(*) FROM queue WHERE n > ?", position["n"])[0][0])

    def where(self, part: Part) -> str:
        return f"{self._path}, rows {part.name}"

    def committed(self, position: Position) -> None: ...

    def close(self) -> None: ...

    def _all(self, query: str, *arguments: Any) -> list[Any]:
        with sqlite3.connect(self._path) as connection:
            return connection.execute(query, arguments).fetchall()
