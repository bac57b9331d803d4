"""The contract suites notice what they are for: each defect of a source or a sink fails a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.weir.connectors.test_third_party import PACKAGE
from weir import Part, Planned, Published
from weir.testing import SinkContract, SourceContract

sys.path.append(str(PACKAGE))
import suite
import weir_counter


def _forgets_the_last_row(counter: Any, part: Part) -> Any:
    for batch in READ(counter, part):
        yield replace(batch, rows=batch.rows.slice(0, max(0, batch.rows.num_rows - 1)))


def _differs_each_time(counter: Any, part: Part) -> Any:
    counter.reads = getattr(counter, "reads", 0) + 1
    return (replace(batch, rows=batch.rows.slice(counter.reads > 1)) for batch in READ(counter, part))


def _publishes_again(shelf: Any, previous: int | None, checkpoint: int, rows: Any) -> Published:
    marker = shelf.marker()
    return PUBLISH(shelf, marker, max(checkpoint, (marker or 0) + 1), rows)


def _takes_any_marker(shelf: Any, previous: int | None, checkpoint: int, rows: Any) -> Published:
    return PUBLISH(shelf, shelf.marker(), checkpoint, rows)


def _takes_back_first(shelf: Any, previous: int | None, checkpoint: int, to: int | None, rows: Any) -> Published:
    shelf._connected().execute("DELETE FROM rows WHERE weir_checkpoint > ?", (to or 0,))
    return TAKE_BACK(shelf, previous, checkpoint, to, rows)


def _publishes_rows_first(shelf: Any, previous: int | None, checkpoint: int, rows: Any) -> Published:
    for _ in rows.batches():
        shelf._connected().execute("INSERT INTO rows VALUES (77, 'x', NULL, 1)")
    return PUBLISH(shelf, previous, checkpoint, rows)


READ, PLAN, PUBLISH = weir_counter.Counter.read, weir_counter.Counter.plan, weir_counter.Shelf.publish
TAKE_BACK = weir_counter.Shelf.take_back
NO_LIMITS = weir_counter.Limits(1 << 30, 1 << 30, 1 << 50)
SOURCES: dict[str, tuple[str, Callable[..., Any]]] = {
    "rows are forgotten": ("read", _forgets_the_last_row),
    "rows differ each time": ("read", _differs_each_time),
    "limits are ignored": ("plan", lambda counter, position, _, *upto: PLAN(counter, position, NO_LIMITS, *upto)),
    "upto is ignored": ("plan", lambda counter, position, limits, *_: PLAN(counter, position, limits)),
    "more is never said": ("plan", lambda *given: replace(PLAN(*given), limited=False)),
    "the end is never said": ("plan", lambda *given: replace(PLAN(*given), ends={"file": False})),
    "the position stays": ("plan", lambda *given: replace(PLAN(*given), position=given[1])),
    "parts share a name": ("plan", lambda *given: _renamed(PLAN(*given), "part")),
    "names have slashes": ("plan", lambda *given: _renamed(PLAN(*given), "a/{}")),
    "lag is wrong": ("lag", lambda *_: weir_counter.Lag(1)),
    "nothing is verified": ("verify", lambda *_: None),
    "any start will do": ("begin", lambda *_: {"line": 0}),
}
SINKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a checkpoint is published again": ("publish", _publishes_again),
    "any marker will do": ("publish", _takes_any_marker),
    "rows come before the marker": ("publish", _publishes_rows_first),
    "no rows, no marker": ("publish", lambda *given: PUBLISH(*given) if given[-1].count else Published(0)),
    "rows are taken back before the marker": ("take_back", _takes_back_first),
    "nothing is taken back": ("take_back", lambda shelf, *given: PUBLISH(shelf, *given[:2], given[-1])),
    "all is taken back": ("take_back", lambda shelf, *given: TAKE_BACK(shelf, *given[:2], None, given[-1])),
    "one row too many is taken back": (
        "take_back",
        lambda shelf, *given: TAKE_BACK(shelf, *given[:2], (given[2] or 1) - 1, given[-1]),
    ),
    "any marker will do to take back": (
        "take_back",
        lambda shelf, *given: TAKE_BACK(shelf, shelf.marker(), *given[1:]),
    ),
    "types are not checked": ("check", lambda *_: None),
}


def _renamed(planned: Planned, name: str) -> Planned:
    return replace(planned, parts=tuple(replace(part, name=name.format(part.name)) for part in planned.parts))


def _failures(contract: type, system: Callable[[], Any]) -> list[str]:
    failed = []
    for name in dir(contract):
        if name.startswith("test_") and "another_process" not in name:
            try:
                getattr(contract(), name)(system())
            except pytest.skip.Exception:
                pass
            except Exception:
                failed.append(name)
    return failed


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], Path]:
    numbers = iter(range(1000))
    return lambda: tmp_path / str(next(numbers))


@pytest.mark.parametrize("defect", ["none", *SOURCES])
def test_defects_of_sources_are_noticed(defect: str, fresh: Callable[[], Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "source", lambda _, **arguments: weir_counter.CounterSource(**arguments))
    if defect != "none":
        monkeypatch.setattr(weir_counter.Counter, *SOURCES[defect])
    assert bool(_failures(SourceContract, lambda: suite.CounterSystem(fresh()))) == (defect != "none")


@pytest.mark.parametrize("defect", ["none", *SINKS])
def test_defects_of_sinks_are_noticed(defect: str, fresh: Callable[[], Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "sink", lambda _, **arguments: weir_counter.ShelfSink(**arguments))
    if defect != "none":
        monkeypatch.setattr(weir_counter.Shelf, *SINKS[defect])
    assert bool(_failures(SinkContract, lambda: suite.ShelfSystem(fresh()))) == (defect != "none")
