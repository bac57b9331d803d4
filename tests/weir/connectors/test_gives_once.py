"""A source that gives each row once passes the suite of all sources, whose tests read nothing of it twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.queue_source import Queue, QueueSource
from weir.testing import SourceContract, SourceSystem


class QueueSystem(SourceSystem):
    number = "n"
    starts_at_times = False

    def __init__(self, root: Path) -> None:
        self._queue, self._count = Queue(str(root / "queue.db")), 0
        self._source = QueueSource(name="in", path=str(root / "queue.db"))

    @property
    def source(self) -> QueueSource:
        return self._source

    def append(self, count: int) -> None:
        self._queue.put([(f"k{number % 3}", number) for number in range(self._count, self._count + count)])
        self._count += count


class TestQueue(SourceContract):
    @pytest.fixture
    def system(self, tmp_path: Path) -> QueueSystem:
        return QueueSystem(tmp_path)
