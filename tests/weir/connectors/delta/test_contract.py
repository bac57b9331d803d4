"""Tables pass the contract of every sink."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import pytest
from deltalake import DeltaTable

from state_ops.storage.storage import Storage
from weir import Sink, delta
from weir.connectors.delta.publishers import AppendPublisher
from weir.definition.sink import SinkOpening
from weir.testing import SinkContract, SinkSystem
from weir.testing.sink_contract import Row


class TableSystem(SinkSystem):
    """A table below a directory."""

    def __init__(self, directory: Path, definition: Sink) -> None:
        self._directory, self._definition = directory, definition
        (directory / "scratch").mkdir()

    @property
    def sink(self) -> Sink:
        return self._definition

    @cached_property
    def opening(self) -> SinkOpening:
        storage, scratch = Storage(str(self._directory / "storage")), self._directory / "scratch"
        return SinkOpening(
            "contract/main/out", str, {}, lambda: None, storage=storage, scratch=scratch, table=AppendPublisher.of
        )

    def contents(self) -> Iterable[Row]:
        place = self._directory / "storage" / "tables" / "out"
        if not place.exists():
            return []
        rows = DeltaTable(str(place)).to_pyarrow_table(columns=["id", "text"])
        return [(int(row["id"]), str(row["text"])) for row in rows.to_pylist()]


class TestAppend(SinkContract):
    @pytest.fixture
    def system(self, tmp_path: Path) -> TableSystem:
        return TableSystem(tmp_path, delta.append("out"))


class TestUpsert(SinkContract):
    @pytest.fixture
    def system(self, tmp_path: Path) -> TableSystem:
        system = TableSystem(tmp_path, delta.upsert("out", "id"))
        system.keyed = True
        return system


class TestReplace(SinkContract):
    """Partitions, of which no two publishes of the contract have the same."""

    @pytest.fixture
    def system(self, tmp_path: Path) -> TableSystem:
        return TableSystem(tmp_path, delta.replace("out", by="id"))


class TestReplaceWhere(SinkContract):
    """A condition that holds of no row of the contract."""

    @pytest.fixture
    def system(self, tmp_path: Path) -> TableSystem:
        return TableSystem(tmp_path, delta.replace("out", where="id < 0"))
