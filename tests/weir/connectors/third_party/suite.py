"""The contract suites, as the author of that package would run them. Collected by name alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cached_property
from pathlib import Path

import pytest

from weir import Sink, Source, sink, source
from weir.testing import SinkContract, SinkSystem, SourceContract, SourceSystem


class CounterSystem(SourceSystem):
    starts_at_times = False

    def __init__(self, path: Path) -> None:
        self._path, self._count = path, 0
        path.touch()

    @cached_property
    def source(self) -> Source:
        return source("counter", path=str(self._path))

    def append(self, count: int) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{number}\n" for number in range(self._count, self._count + count))
        self._count += count

    def alter(self) -> None:
        self._path.write_text("7" + self._path.read_text())


class ShelfSystem(SinkSystem):
    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def sink(self) -> Sink:
        return sink("shelf", name="out", path=str(self._path))

    def contents(self) -> list[tuple[int, str]]:
        return self._execute("SELECT id, text FROM rows") if self._execute("PRAGMA table_info(rows)") else []

    def break_marker(self) -> None:
        self._execute("DELETE FROM markers")

    def _execute(self, statement: str) -> list:
        with closing(sqlite3.connect(self._path, isolation_level=None)) as shelf:
            return shelf.execute(statement).fetchall()


class TestCounter(SourceContract):
    @pytest.fixture
    def system(self, tmp_path: Path) -> CounterSystem:
        return CounterSystem(tmp_path / "lines")


class TestShelf(SinkContract):
    @pytest.fixture
    def system(self, tmp_path: Path) -> ShelfSystem:
        return ShelfSystem(tmp_path / "shelf.db")
