"""The memory of `weir top` between looks: the last values of each pipeline, its epochs, and why it cannot be read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from state_ops.coordination.lease import FAILED, INTERRUPTED
from state_ops.errors import ConfigurationError, TransientError, WeirError
from state_ops.records.pins import SAVEPOINT
from weir.cli.status import CoordinatorFacts, coordinator_facts
from weir.cli.watching import figures
from weir.cli.watching.figures import EpochFigures, SinkFigures, StageFigures
from weir.cli.watching.pipeline_look import Looks, Outcome, PipelineLook, Watched
from weir.cli.watching.problems import Failure, Problem, last_failure, problems, unreadable
from weir.settings.configuration import Settings, load

_EPOCHS_KEPT = 120


class NewestCheckpoint(TypedDict):
    """The newest checkpoint of a pipeline."""

    id: int
    completed_at: str
    age_seconds: float


class SeenFacts(TypedDict, total=False):
    """The figures of a pipeline that could be read.

    Attributes:
        in_flight: Epochs that a living coordinator has begun since the newest checkpoint.
        restarts: Coordinators that followed another one, since the oldest of the epochs.
        last_failure: How a coordinator ended that nobody had asked to.
        lag: By source, how much waits: null where that cannot be told.
    """

    in_flight: int
    restarts: int
    last_failure: Failure | None
    held: dict[str, Any] | None
    lag: dict[str, int | None]
    units: dict[str, str]
    rows_per_second: float | None
    state_bytes: int
    state_growth_bytes_per_hour: float | None
    retained: int
    savepoints: int
    epochs: list[EpochFigures]
    stages: list[StageFigures]
    sinks: list[SinkFigures]


class WatchedFacts(SeenFacts):
    """A pipeline as `weir top` sees it.

    Attributes:
        state: Who runs it, in a word: running, unknown, idle, interrupted, stopped, drained, cancelled, HELD, DEAD,
            HANGS, FAILED, UNREAD.
        error: Why it cannot be read; then there are no figures.
    """

    pipeline: str
    storage: str | None
    state: str
    error: str | None
    problems: list[Problem]
    checkpoint: NewestCheckpoint | None
    coordinator: CoordinatorFacts | None


@dataclass
class Row:
    """One pipeline as it was seen last.

    Attributes:
        look: The last that succeeded; None: there was none yet.
        seen_at: When that was, on the monotonic clock in seconds.
        epochs: Those that were seen, oldest first, pruned ones among them.
        error: Why it cannot be read now; None: it can, or nobody has tried.
        problems: What is wrong, by the last look, and that it cannot be read.
    """

    name: str
    look: PipelineLook | None = None
    seen_at: float = 0.0
    epochs: list[EpochFigures] = field(default_factory=list)
    stages: list[StageFigures] = field(default_factory=list)
    sinks: list[SinkFigures] = field(default_factory=list)
    error: Exception | None = None
    problems: list[Problem] = field(default_factory=list)
    storage: str | None = None

    @property
    def state(self) -> str:
        """The runner of the pipeline, in a word; in capitals if somebody has to act."""
        look = self.look
        if look is None:
            return "reading" if self.error is None else "UNREAD"
        if look.hold is not None:
            return "HELD"
        if look.hangs:
            return "HANGS"
        if look.alive is not False:
            return "running" if look.alive else "unknown"
        if look.holder is not None and not look.holder.stopped:
            return "DEAD"
        if look.suspended is not None:
            return look.suspended.how
        outcome = look.holder.outcome if look.holder is not None else None
        return {FAILED: "FAILED", INTERRUPTED: INTERRUPTED}.get(outcome or "", "idle")

    def facts(self) -> WatchedFacts:
        """Return what `weir top --once --json` prints."""
        look = self.look
        facts: WatchedFacts = {
            "pipeline": self.name,
            "storage": self.storage,
            "state": self.state,
            "error": None if self.error is None else str(self.error),
            "problems": self.problems,
            "checkpoint": None,
            "coordinator": None,
        }
        if look is None:
            return facts
        holder, head = look.holder, look.head
        if head is not None:
            age = round((look.at - head.completed_at).total_seconds(), 1)
            facts["checkpoint"] = {"id": head.id, "completed_at": head.completed_at.isoformat(), "age_seconds": age}
        return facts | {
            "coordinator": coordinator_facts(holder, look.alive, look.generation),
            "in_flight": look.in_flight,
            "restarts": figures.restarts(self.epochs, look),
            "last_failure": last_failure(holder),
            "held": None if look.hold is None else look.hold.to_dict(),
            "lag": {name: None if of.problem else of.waiting for name, of in look.arrived.items()},
            "units": {name: of.unit for name, of in look.arrived.items()},
            "rows_per_second": figures.rows_per_second(self.epochs),
            "state_bytes": head.bytes_total if head else 0,
            "state_growth_bytes_per_hour": figures.growth_per_hour(self.epochs),
            "retained": len(look.retained),
            "savepoints": sum(pin.kind == SAVEPOINT for pin in look.pins),
            "epochs": self.epochs,
            "stages": self.stages,
            "sinks": self.sinks,
        }


class Monitor:
    """Looks at pipelines again and again, each at its own pace, and keeps what it saw.

    Args:
        names: The pipelines; empty: all of the configuration, which is read anew each time, so that pipelines appear and
            vanish.
    """

    def __init__(self, names: Sequence[str], settings: Settings) -> None:
        self._names, self._settings = list(dict.fromkeys(names)), settings
        self._looks = Looks()
        self._watched: dict[str, Watched] = {}
        self._begun: dict[str, float] = {}
        self.rows: dict[str, Row] = {}
        self.trouble: str | None = None
        self._follow(self._names or sorted(settings.pipelines))

    def begin(self) -> None:
        """Begin to look at each pipeline whose last look has ended."""
        if not self._names:
            try:
                self._settings, self.trouble = load(), None
            except ConfigurationError as error:  # somebody is editing it
                self.trouble = f"the configuration cannot be read, so it is taken as it was: {error.what}"
            self._follow(sorted(self._settings.pipelines))
        for name, watched in self._watched.items():
            if name not in self._looks.going:
                self._begun[name] = time.monotonic()
            self._looks.begin(watched)

    @property
    def at_rest(self) -> bool:
        """True if no look is going on."""
        return not self._looks.going

    def wait(self, seconds: float) -> None:
        """Wait until all looks have ended, or for so many seconds."""
        self._looks.wait(seconds)

    def collect(self, patience: float) -> None:
        """Take what looks have read that ended since.

        Args:
            patience: Seconds after which a look that has not ended is a problem of its pipeline's.
        """
        now = time.monotonic()
        for name, row in self.rows.items():
            outcome = self._looks.ended(name)
            if outcome is not None:
                try:
                    _take(row, outcome, now)
                except Exception as error:  # one whose figures make no sense takes no other from the page
                    row.look, row.error, row.problems = None, error, [unreadable(error)]
            elif name in self._looks.going and now - self._begun[name] >= patience:
                waited = now - self._begun[name]
                _fail(row, TransientError(f"storage has not answered for {waited:.0f} s", next="It is waited for."))

    def closely(self, name: str | None) -> None:
        """Look at one pipeline's subtasks, too, and at those of no other."""
        for watched in self._watched.values():
            watched.with_files = watched.name == name

    def _follow(self, names: Iterable[str]) -> None:
        wanted = list(names)
        kept = {name: watched for name, watched in self._watched.items() if watched.settings == self._settings}
        self._watched = {name: kept.get(name) or Watched(name, self._settings, closely=True) for name in wanted}
        self.rows = {name: self.rows.get(name) or Row(name) for name in wanted}


def seen(watched: Watched) -> Row:
    """Return a pipeline as it is now. Raises what the look at it ends with."""
    row = Row(watched.name)
    look = watched.look()
    _take(row, Outcome(look, watched.opened, None, 0.0), time.monotonic())
    return row


def _take(row: Row, outcome: Outcome, now: float) -> None:
    look, opened = outcome.look, outcome.opened
    if look is None or opened is None:
        _fail(row, outcome.error or WeirError("nothing was read"))
        return
    if row.storage != opened.storage.uri:  # another branch has the name now
        row.epochs = []
    seen = {epoch.id: epoch for epoch in row.epochs}
    for checkpoint in look.retained:
        if checkpoint.id not in seen:
            seen[int(checkpoint.id)] = figures.of_epoch(checkpoint, opened.pipeline)
    row.epochs = [seen[id] for id in sorted(seen)][-_EPOCHS_KEPT:]
    row.look, row.seen_at, row.error, row.storage = look, now, None, opened.storage.uri
    row.stages = figures.of_stages(look.head, look.files) if look.head is not None else []
    row.sinks = figures.of_sinks(look, opened.pipeline)
    row.problems = problems(row.name, look, row.epochs)


def _fail(row: Row, error: Exception) -> None:
    before = [] if row.look is None else problems(row.name, row.look, row.epochs)
    row.error, row.problems = error, [unreadable(error), *before]
