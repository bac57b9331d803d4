"""Run the steps of epochs beside each other. Each slot is a thread that runs one step at a time.

The coordinator alone decides what comes next. It starts steps and takes their results in one thread, so nothing that it
knows is ever touched by another; a step gets values and gives one back. A test that puts the steps in an order of its
own implements `StepRunner` without threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ended:
    """A step has run to its end.

    Attributes:
        error: What it raised, whatever that is; else result is what it returned.
    """

    slot: str
    result: object
    error: BaseException | None


class StepRunner(Protocol):
    """Runs steps."""

    def start(self, slot: str, step: Callable[[], object]) -> None:
        """Run a step in a slot that is free."""
        ...

    def next(self, seconds: float) -> Ended | None:
        """Return the next step that has ended; None if none does within so many seconds."""
        ...


class Threads:
    """Slots as daemon threads of this process: one that hangs in a client library must not keep the process alive."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._steps: dict[str, queue.SimpleQueue[Callable[[], object]]] = {}

    def start(self, slot: str, step: Callable[[], object]) -> None:
        if slot not in self._steps:
            self._steps[slot] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(slot,), name=f"weir-{slot}", daemon=True).start()
        self._steps[slot].put(step)

    def next(self, seconds: float) -> Ended | None:
        try:
            return self._ended.get(timeout=seconds) if seconds > 0 else self._ended.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Let threads end that have nothing to do."""
        for steps in self._steps.values():
            steps.put(_nothing_more)

    def _run(self, slot: str) -> None:
        for step in iter(self._steps[slot].get, _nothing_more):
            self._ended.put(run(slot, step))


def run(slot: str, step: Callable[[], object]) -> Ended:
    """Run a step here and now."""
    try:
        return Ended(slot, step(), None)
    except BaseException as error:  # the coordinator's thread raises it again
        return Ended(slot, None, error)


def _nothing_more() -> None: ...
