"""One look at a pipeline's storage, for what watches pipelines: `weir top`, `weir report --html` and `weir metrics`.

A look reads the registry, the lease, the notes beside it and what waits in the sources. It asks no coordinator, so it also works while
Dagster is down and while no coordinator lives. It takes no right, starts no JVM and writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from state_ops.checkpoints import restore_log
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease, publishing_refused, restore_progress, results, suspension
from state_ops.coordination.gate_hold import GateHold
from state_ops.coordination.lease import DEAD_AFTER_HEARTBEATS, Lease
from state_ops.coordination.publishing_refused import RefusedPublication
from state_ops.coordination.restore_progress import Restoring
from state_ops.coordination.results import Checked, RecordedDrill
from state_ops.coordination.suspension import Suspension
from state_ops.errors import PrunedError
from state_ops.ids import CheckpointId
from state_ops.moments import to_micros
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.pins import Pin
from state_ops.records.publications import Publication, unpublished
from state_ops.records.restores import Restored
from state_ops.records.snapshot_files import StateFile
from state_ops.storage.storage import Storage
from weir.definition import Pipeline
from weir.loading import named
from weir.ownership import backlog, hold_causes
from weir.ownership.pipeline_storage import open_storage, readers
from weir.settings.configuration import Settings
from weir.sources.positions import Arrivals
from weir.sources.reader import SourceReader

_REST, _LISTING_SECONDS, _RESULTS_SECONDS = 20.0, 10.0, 30.0
_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class PipelineLook:
    """The facts that were read of one pipeline.

    Attributes:
        interval: `checkpoints.interval_seconds` of the configuration.
        alive: Whether a coordinator lives; None if this cannot be told yet.
        silent_seconds: For how long the lease's counter has been seen to stand still.
        generation: The one that owns the pipeline.
        retained: Its completed checkpoints, oldest first.
        arrived: By source, what waits beside the newest checkpoint.
        restored: The restore that was recorded last.
        hold: What holds the pipeline, if its cause stands.
        at: When this was read.
        files: Of a watched pipeline with `with_files`, the listing of the newest checkpoint, or of one not long before.
        suspended: That a person has ended the pipeline.
        restoring, missing, ahead: Only of a close look: the fetches of state that are going on, by source a landing
            directory that does not exist, and the sources that have read their `max_ahead` of event time more than
            slower ones.
        checked, drilled: What the last checks of the storage and the last drill have found.
        fsck_scheduled, drill_scheduled: Whether the configuration has these run by themselves.
        refused: By sink, why the last try to publish failed.
    """

    interval: float
    holder: Lease | None = None
    alive: bool | None = None
    generation: int = 0
    retained: Sequence[Checkpoint] = ()
    pins: Sequence[Pin] = ()
    publications: Sequence[Publication] = ()
    arrived: Mapping[str, Arrivals] = field(default_factory=dict)
    restored: Restored | None = None
    hold: GateHold | None = None
    suspended: Suspension | None = None
    restoring: Sequence[Restoring] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    ahead: frozenset[str] = frozenset()
    silent_seconds: float = 0.0
    files: Sequence[StateFile] = ()
    checked: Sequence[Checked] = ()
    drilled: RecordedDrill | None = None
    fsck_scheduled: bool = False
    drill_scheduled: bool = False
    refused: Mapping[str, RefusedPublication] = field(default_factory=dict)
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def head(self) -> Checkpoint | None:
        """The newest completed checkpoint."""
        return self.retained[-1] if self.retained else None

    @property
    def unpublished(self) -> list[tuple[CheckpointId, str]]:
        """Retained checkpoints with output that a sink lacks, each with the sink's name."""
        lacking = unpublished(self.retained, self.publications)
        return sorted((id, sink) for sink, ids in lacking.items() for id in ids)

    @property
    def hangs(self) -> bool:
        """True if the coordinator's process is there, and its heart stands still."""
        if not self.alive or self.holder is None:
            return False
        return self.silent_seconds >= DEAD_AFTER_HEARTBEATS * self.holder.heartbeat_seconds

    @property
    def in_flight(self) -> int:
        """The number of epochs that a living coordinator has begun since the newest checkpoint."""
        if not self.alive or self.holder is None:
            return 0
        return max(0, self.holder.last_id - (self.head.id if self.head is not None else 0))


@dataclass(frozen=True, slots=True)
class Opened:
    """A pipeline whose storage and sources are open for reading."""

    pipeline: Pipeline
    storage: Storage
    registry: Registry
    sources: Mapping[str, SourceReader]


class Watched:
    """The memory of one pipeline between looks: its open storage, and since when the lease's counter stands still.

    Args:
        name: As the configuration has it, or PIPELINE@BRANCH.
        closely: Read what only people need, too. Since they look every few seconds, sources and the record of
            restores, which cost most, then rest for twenty times as long as reading them took, and results of checks
            and drills for half a minute.

    Attributes:
        with_files: Whether looks read a listing, too. That has a row for each file of state, so it is read at most every
            ten seconds.
    """

    def __init__(self, name: str, settings: Settings, *, closely: bool = False) -> None:
        self.name, self.settings, self._closely = name, settings, closely
        self.opened: Opened | None = None
        self._beat: tuple[int, int] | None = None
        self._since, self._has_moved = 0.0, False
        self._slow: tuple[Mapping[str, Arrivals], Mapping[str, str], Restored | None] = ({}, {}, None)
        self._results: tuple[Sequence[Checked], RecordedDrill | None] = ((), None)
        self._rests_until = self._results_rest_until = 0.0
        self.with_files = False
        self._files: tuple[str, Sequence[StateFile]] = ("", ())
        self._files_at = float("-inf")

    def look(self, now: Callable[[], float] = time.monotonic) -> PipelineLook:
        """Read the pipeline's storage. After an error, which is raised, the next call opens everything anew."""
        try:
            return self._look(now())
        except BaseException:
            self.opened = None
            raise

    def open(self) -> Opened:
        """Return the pipeline with its storage, which is opened at the first call."""
        if self.opened is None:
            pipeline = named(self.name, self.settings)
            self.opened = Opened(pipeline, *open_storage(pipeline, self.settings), readers(pipeline, self.settings))
            self._rests_until = self._results_rest_until = 0.0
        return self.opened

    def _look(self, now: float) -> PipelineLook:
        opened = self.open()
        holder, retained = _read(opened)
        if (
            not retained and opened.pipeline.branch is not None
        ):  # it was dropped; the name is another's now, or nobody's
            self.opened = None
            opened = self.open()
            holder, retained = _read(opened)
        storage, registry = opened.storage, opened.registry
        head = retained[-1] if retained else None
        if now >= self._rests_until:
            began = time.perf_counter()
            self._slow = self._look_slowly(opened, head)
            self._rests_until = now + (time.perf_counter() - began) * _REST if self._closely else 0.0
        arrived, missing, restored = self._slow
        if now >= self._results_rest_until:
            self._results = results.checked(storage), results.drilled(storage)
            self._results_rest_until = now + _RESULTS_SECONDS if self._closely else 0.0
        checked, drilled = self._results
        publications = registry.publications()
        return PipelineLook(
            interval=self.settings.of(self.name).checkpoints.interval_seconds,
            holder=holder,
            alive=self._alive(holder, now),
            silent_seconds=now - self._since,
            generation=registry.generation(),
            retained=retained,
            pins=registry.pins(),
            publications=publications,
            refused=publishing_refused.read(storage) if unpublished(retained, publications) else {},
            arrived=arrived,
            missing=missing,
            restored=restored,
            hold=hold_causes.standing(storage, head, opened.sources),
            suspended=suspension.read(storage),
            restoring=restore_progress.read(storage) if self._closely else (),
            ahead=_ahead(opened.pipeline, head) if self._closely and head is not None else frozenset(),
            files=self._listing(opened, head, now) if self.with_files and head is not None else (),
            checked=checked,
            drilled=drilled,
            fsck_scheduled=self.settings.dagster.upkeep_cron is not None,
            drill_scheduled=self.settings.dagster.drill_cron is not None,
        )

    def _listing(self, opened: Opened, head: Checkpoint, now: float) -> Sequence[StateFile]:
        if self._files[0] != head.commit_id and now - self._files_at >= _LISTING_SECONDS:
            with suppress(PrunedError):  # the next look has a newer one
                # A registry of its own, since one keeps every listing that it has read.
                listing = Registry(opened.storage, opened.pipeline.app_id).files(head)
                self._files, self._files_at = (head.commit_id, listing), now
        return self._files[1]

    def _look_slowly(
        self, opened: Opened, head: Checkpoint | None
    ) -> tuple[Mapping[str, Arrivals], Mapping[str, str], Restored | None]:
        arrived = backlog.looked_at(opened.sources, head)
        waiting = {name: arrivals.waiting for name, arrivals in arrived.items()}
        missing = backlog.missing(opened.sources, waiting) if self._closely else {}
        return arrived, missing, restore_log.newest(opened.storage)

    def _alive(self, holder: Lease | None, now: float) -> bool | None:
        """Return whether the coordinator lives, by the lease's rule; None if this cannot be told yet.

        A coordinator on another host is dead if its counter has not changed for 3 heartbeats, and lives if its counter was seen to change.
        """
        beat = None if holder is None else (holder.generation, holder.counter)
        if beat != self._beat:
            self._has_moved = self._beat is not None
            self._beat, self._since = beat, now
        alive = lease.alive(holder)
        if alive is not None or holder is None:
            return bool(alive)
        if now - self._since >= DEAD_AFTER_HEARTBEATS * holder.heartbeat_seconds:
            return False
        return True if self._has_moved else None


def _read(opened: Opened) -> tuple[Lease | None, Sequence[Checkpoint]]:
    """Read the lease before the checkpoints: a coordinator that ends in between is seen alive once more."""
    return lease.read(opened.storage), opened.registry.checkpoints()


def _ahead(pipeline: Pipeline, head: Checkpoint) -> frozenset[str]:
    if all(source.length("max_ahead") is None for source in pipeline.sources):
        return frozenset()
    from weir.run.source_alignment import waiting_sources  # what few pipelines need

    return waiting_sources(pipeline, head.offsets, {}, to_micros(head.completed_at)).sources


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a look: the facts that it read, or an error.

    Attributes:
        opened: The pipeline that was looked at.
        seconds: How long it took.
    """

    look: PipelineLook | None
    opened: Opened | None
    error: Exception | None
    seconds: float


class Looks:
    """Looks at several pipelines at the same time. One whose storage does not answer holds up no other, and nobody asks
    it again before it has answered."""

    def __init__(self) -> None:
        self.going: dict[str, Future[Outcome]] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="weir-look")

    def begin(self, watched: Watched) -> None:
        """Begin a look, unless one at this pipeline is going on."""
        if watched.name not in self.going:
            self.going[watched.name] = self._threads.submit(_looked, watched)

    def wait(self, seconds: float) -> None:
        """Wait until all looks have ended, or for so many seconds."""
        wait(self.going.values(), seconds)

    def ended(self, name: str) -> Outcome | None:
        """Return how the look at a pipeline ended, once; None while it goes on, or if there is none."""
        look = self.going.get(name)
        if look is None or not look.done():
            return None
        del self.going[name]
        return look.result()


def _looked(watched: Watched) -> Outcome:
    began = time.perf_counter()
    try:
        look, error = watched.look(), None
    except Exception as raised:
        look, error = None, raised
    return Outcome(look, watched.opened, error, time.perf_counter() - began)
