"""The phase that a replay is in, which is shown while it goes on, and how long each phase took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from state_ops.records.snapshot_files import StateFile
from state_ops.storage.storage import Arrived

Saying = Callable[[str], None]
_DOING = {
    "slices": "reading the slices again",
    "fetch": "fetching state",
    "play": "playing the epoch again",
    "compare": "comparing with what it made",
    "plan": "comparing the code with the newest checkpoint",
    "take": "copying what the epochs need",
    "replay": "playing the epochs again",
    "prove": "looking for the damage in storage",
}


def silent(_: str) -> None:
    """Nobody waits for it."""


@dataclass
class Phases:
    """The phases of a replay.

    Attributes:
        say: Is told what is done now.
        seconds: By phase, how long it took without others within it.
    """

    say: Saying = silent
    seconds: dict[str, float] = field(default_factory=dict)
    _within: list[float] = field(default_factory=list)
    _doing: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the time of a phase, without that of other phases within."""
        clock = time.perf_counter()
        self._doing.append(what)
        self.say(_DOING[what])
        self._within.append(0.0)
        try:
            yield
        finally:
            took, within = time.perf_counter() - clock, self._within.pop()
            self.seconds[what] = self.seconds.get(what, 0.0) + took - within
            self._doing.pop()
            if self._within:
                self._within[-1] += took
                self.say(_DOING[self._doing[-1]])

    def arriving(self, files: Iterable[StateFile]) -> Arrived:
        """Return what says how much of some files has come."""
        total, came = sum(file.bytes for file in files), 0

        def arrived(bytes: int, /) -> None:
            nonlocal came
            came += bytes
            self.say(f"fetching state, {came / 1e6:,.0f} of {total / 1e6:,.0f} MB")

        return arrived
