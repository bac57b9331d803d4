"""A source of several partitions whose rows a test puts into a directory: one JSON file a partition, one row a line."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from state_ops.errors import LostError
from weir.definition.source import (
    Batch,
    Connector,
    Lag,
    Limits,
    Lost,
    Opening,
    Part,
    Planned,
    Position,
    Rejected,
    Source,
)

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsSource(Source):
    """root: the directory, with {placeholders}."""

    root: str = "{landing}"

    def open(self, opening: Opening) -> Connector:
        return Partitions(self, Path(opening.resolve(self.root)))


class Partitions:
    """Rows that cannot be parsed are bad ones; a partition's file may be cut off at the front (`<name>.gone` says up to
    where). Positions name what has been read of each partition."""

    def __init__(self, source: PartitionsSource, root: Path) -> None:
        self._source, self._root = source, root

    def begin(self, start: str | datetime | Position) -> Position:
        if isinstance(start, Mapping):
            return start
        return {} if start == "earliest" else {name: len(self._lines(name)) for name in self._names()}

    def plan(
        self, position: Position, limits: Limits, upto: Position | None = None, hold: Collection[str] = ()
    ) -> Planned:
        parts, lost, ends, at = [], [], {}, dict(position)
        rows = 0
        for name in self._names():
            begin, there = position.get(name, 0), len(self._lines(name))
            gone = self._gone(name)
            if begin < gone:
                if self._source.on_lost == "fail":
                    raise LostError(f"{gone - begin} rows of {name} are gone.", where=name, next="Skip them.")
                lost.append(Lost(name, f"{gone - begin} rows are gone"))
                begin = gone
            end = min(there, begin + limits.rows - rows, (upto or {}).get(name, 0) if upto is not None else there)
            if end > begin and name not in hold and len(parts) < limits.parts:
                parts.append(Part(f"{name}-{begin}-{end}", name, {"from": begin, "to": end}, end - begin))
                rows += end - begin
            else:
                end = begin
            at[name], ends[name] = end, end == there
        return Planned(tuple(parts), at, not all(ends.values()) and bool(parts), ends, tuple(lost))

    def read(self, part: Part) -> Iterator[Batch]:
        good, bad = [], []
        lines = self._lines(part.partition)
        for number in range(part.place["from"], part.place["to"]):
            line = lines[number]
            try:
                row = json.loads(line)
                good.append({**row, "at": datetime.fromisoformat(row["at"])})
            except ValueError as error:
                bad.append(Rejected(number, str(error), line))
        yield Batch(pa.Table.from_pylist(good, SCHEMA), tuple(bad))

    def verify(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.place["from"] < self._gone(part.partition):
                raise LostError(f"{part.name} is gone.", where=part.partition, next="Skip it.")

    def lag(self, position: Position) -> Lag:
        return Lag(rows=sum(len(self._lines(name)) - position.get(name, 0) for name in self._names()))

    def where(self, part: Part) -> str:
        return f"{self._root}/{part.partition}"

    def committed(self, position: Position) -> None:
        (self._root / ".committed").write_text(json.dumps(position))

    def close(self) -> None: ...

    def _names(self) -> list[str]:
        return sorted(file.stem for file in self._root.glob("*.rows"))

    def _lines(self, name: str) -> list[str]:
        return (self._root / f"{name}.rows").read_text().splitlines()

    def _gone(self, name: str) -> int:
        file = self._root / f"{name}.gone"
        return int(file.read_text()) if file.exists() else 0


def row(id: str, n: int, minutes: float) -> dict[str, Any]:
    return {"id": id, "n": n, "at": (NOON + timedelta(minutes=minutes)).isoformat()}


def put(root: Path, partition: str, *rows: dict[str, Any] | str) -> None:
    """Append rows, or lines as they are, to a partition."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{partition}.rows").open("a") as file:
        file.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows)
