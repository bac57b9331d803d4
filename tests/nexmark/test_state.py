"""The state of queries with windows or watermarks is as large after all of the input as after some of it."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import count
from types import SimpleNamespace

import pytest

from benchmarks.nexmark.generate import Options as Events
from benchmarks.nexmark.generate import generate
from benchmarks.nexmark.run import Options, played
from benchmarks.nexmark.state import BOUNDED, curve, growth
from weir.epoch import scheduler
from weir.execution.in_process import InMemoryExecutor

pytestmark = pytest.mark.long

EPOCHS = 30


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """Eight hours of event time: what waits for an hour is there again and again."""
    root = tmp_path_factory.mktemp("nexmark-state")
    generate(Events(60_000, files=EPOCHS, rate=60_000 / (8 * 3600)), root / "input")
    return root / "input"


@pytest.mark.parametrize("query", BOUNDED)
def test_state_is_bounded(monkeypatch, events, tmp_path, query):
    ticks = count()  # five seconds of processing time at each look, however slow the machine is
    now = SimpleNamespace(now=lambda zone: datetime(2026, 1, 1, tzinfo=zone) + timedelta(seconds=5 * next(ticks)))
    monkeypatch.setattr(scheduler, "datetime", now)
    stages = curve(played(query, events, tmp_path / "work", Options(files=1), InMemoryExecutor()))
    for uid in BOUNDED[query]:
        sizes = stages[uid]["bytes"]
        assert len(sizes) >= EPOCHS
        assert growth(sizes) < 2, (uid, sizes)
        assert growth(stages[uid]["entries"]) < 2, (uid, stages[uid]["entries"])


def test_state_that_keeps_all_is_seen(events, tmp_path):
    stages = curve(played("q18", events, tmp_path / "work", Options(files=1), InMemoryExecutor()))
    assert growth(stages["last_bids"]["bytes"]) > 2.5
    assert growth(stages["last_bids"]["entries"]) > 2.5
