"""A source and a sink of somebody else, made with `weir.api` alone: lines of a file, and a SQLite database."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pyarrow as pa

from weir import (
    Batch,
    ConfigurationError,
    Connector,
    DamageError,
    InputError,
    Lag,
    Limits,
    LostError,
    Opening,
    Part,
    PipelineError,
    Planned,
    Position,
    Published,
    Publisher,
    Rows,
    Sink,
    SinkOpening,
    Source,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSource(Source):
    """A file to which lines with a number each are appended. path: of the file, with {placeholders}."""

    name: str = "counter"
    path: str

    def open(self, opening: Opening) -> Connector:
        return Counter(self, Path(opening.resolve(self.path)))


def lines_of(path: str) -> CounterSource:
    """The source by a function that takes nothing of what every source says."""
    return CounterSource(path=path)


class Counter:
    def __init__(self, source: CounterSource, path: Path) -> None:
        self._source, self._path = source, path

    def _lines(self) -> list[str]:
        try:
            return self._path.read_text().splitlines()
        except FileNotFoundError:
            raise LostError("The file is gone.", where=str(self._path), next="Bring it back.") from None

    def begin(self, start: str | datetime | Position) -> Position:
        if isinstance(start, Mapping):
            if set(start) != {"line"} or not isinstance(start["line"], int):
                raise ConfigurationError("This is no position.", where=str(self._path), next='Say {"line": 0}.')
            return start
        if start not in ("earliest", "latest"):
            raise PipelineError(f"A counter cannot start at {start!r}.", where=str(self._path))
        return {"line": len(self._lines()) if start == "latest" else 0}

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        begin, lines = position["line"], self._lines()
        if hold:  # it has one partition
            return Planned((), position, limited=begin < len(lines), ends={"file": False})
        end = len(lines) if upto is None else min(upto["line"], len(lines))
        most = begin + max(1, min(limits.rows, limits.bytes // 8))
        to = max(begin, min(end, most))
        parts = (self._part(begin, lines[begin:to]),) if to > begin else ()
        return Planned(parts, {"line": to}, limited=to < end, ends={"file": to >= len(lines)})

    def _part(self, begin: int, lines: Sequence[str]) -> Part:
        place = {"begin": begin, "lines": len(lines), "sum": sum(map(int, lines))}
        return Part(f"{begin}-{len(lines)}", "file", place, len(lines), 8 * len(lines))

    def read(self, part: Part) -> Iterator[Batch]:
        begin, count = part.place["begin"], part.place["lines"]
        lines = self._lines()[begin : begin + count]
        yield Batch(pa.table({"id": pa.array(map(int, lines), pa.int64())}))

    def verify(self, parts: Sequence[Part]) -> None:
        for part in parts:
            begin, count = part.place["begin"], part.place["lines"]
            if self._part(begin, self._lines()[begin : begin + count]) != part:
                raise InputError("Lines have changed.", where=self.where(part), next="Put them back.")

    def lag(self, position: Position) -> Lag:
        return Lag(len(self._lines()) - position["line"])

    def where(self, part: Part) -> str:
        return f"{self._path}, from line {part.place['begin'] + 1}"

    def committed(self, position: Position) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfSink(Sink):
    """A table of a SQLite database. path: of its file, with {placeholders}."""

    path: str

    @property
    def stays(self) -> None:
        return None

    def open(self, opening: SinkOpening) -> Publisher:
        return Shelf(opening.resolve(self.path), opening.app_id)


class Shelf:
    def __init__(self, path: str, app_id: str) -> None:
        self._path, self._app_id = path, app_id
        with closing(self._connected()) as shelf:
            shelf.execute("CREATE TABLE IF NOT EXISTS markers (app_id TEXT PRIMARY KEY, checkpoint INTEGER)")

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, isolation_level=None, timeout=60)

    def check(self, schema: pa.Schema) -> None:
        for field in schema:
            if pa.types.is_nested(field.type):
                raise PipelineError(f"The column {field.name} is a {field.type}.", where=self._path)

    def prepare(self, schema: pa.Schema) -> None:
        with closing(self._connected()) as shelf:
            shelf.execute(f"CREATE TABLE IF NOT EXISTS rows ({', '.join(schema.names)}, weir_checkpoint)")

    def marker(self) -> int | None:
        with closing(self._connected()) as shelf:
            return self._marker(shelf)

    def _marker(self, shelf: sqlite3.Connection) -> int | None:
        row = shelf.execute("SELECT checkpoint FROM markers WHERE app_id = ?", (self._app_id,)).fetchone()
        return row[0] if row else None

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:
        return self._moved(previous, checkpoint, None, rows)

    def take_back(self, previous: int | None, checkpoint: int, to: int | None, rows: Rows) -> Published:
        return self._moved(previous, checkpoint, to or 0, rows)

    def _moved(self, previous: int | None, checkpoint: int, to: int | None, rows: Rows) -> Published:
        with closing(self._connected()) as shelf:
            shelf.execute("BEGIN IMMEDIATE")  # closed without COMMIT, it is rolled back
            marker = self._marker(shelf)
            if marker is not None and marker >= checkpoint:
                return Published(0)
            if marker != previous:
                raise DamageError(f"The marker is {marker} instead of {previous}.", where=self._path)
            if to is not None:
                shelf.execute("DELETE FROM rows WHERE weir_checkpoint > ?", (to,))
            for batch in rows.batches():
                columns = [*(column.to_pylist() for column in batch.columns), [checkpoint] * batch.num_rows]
                places = ", ".join("?" * len(columns))
                shelf.executemany(f"INSERT INTO rows VALUES ({places})", list(zip(*columns, strict=True)))
            shelf.execute("REPLACE INTO markers VALUES (?, ?)", (self._app_id, checkpoint))
            shelf.execute("COMMIT")
        return Published(rows.count)

    def close(self) -> None:
        pass
