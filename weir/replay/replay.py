"""One epoch of a pipeline, played again from the checkpoint before it, below a temporary directory.

    slices as recorded -> the stages before the one in question -> that stage's subtasks, on their state of then

The steps are those of `weir run` (`epoch.stage_job`), and so are the keyed tasks, on the backend that wrote the state.
Of the state only snapshots of subtasks that are played are fetched. Nothing is committed or published.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends import composite, loader
from state_ops.backends.base import Backend
from state_ops.backends.loader import named
from state_ops.checkpoints.pending_checkpoint import PendingCheckpoint
from state_ops.checkpoints.registry import Registry
from state_ops.errors import DamageError, InputError, TransientError, WeirError
from state_ops.ids import CheckpointId, epoch_dir
from state_ops.records.acks import Ack
from state_ops.records.checkpoint import Checkpoint, stats_of
from state_ops.records.snapshot_files import Snapshot, StateFile, snapshots_of
from state_ops.records.triggers import Trigger
from state_ops.schema.key_groups import group_range
from state_ops.snapshots import snapshot
from state_ops.snapshots.sweep import attempts, owner
from state_ops.storage import disks
from state_ops.storage.read_only import ReadOnlyStorage
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import scratch
from weir.definition import Input, Pipeline, Stage, sources_of
from weir.definition.sink import Sink
from weir.epoch.model import InFlightEpoch, SourceOffsets, StageProgress
from weir.epoch.stage_job import applied_alone, bases
from weir.epoch.steps import figures_of
from weir.execution.executor import staged_table
from weir.inspection.view import View, view_of
from weir.ownership.context import RunContext
from weir.ownership.derived_checkpoint import waiting_paths
from weir.ownership.local_paths import objects, work_dir
from weir.ownership.pipeline_storage import backend_options, nothing_kept, readers
from weir.replay.phases import Phases, Saying, silent
from weir.replay.recording import Recording
from weir.replay.replayer import (
    held_with_parent,
    not_playable,
    plan_again,
    played_from,
    settings_below,
    spark_here,
    waits,
)
from weir.settings.configuration import Settings
from weir.sinks.open_sinks import Sinks

if TYPE_CHECKING:
    from weir.execution.spark.spark_executor import SparkExecutor

_SECONDS = 24 * 3600.0  # somebody may stand in a debugger
DIRECTORY = "debug"
_INSTEAD = (
    "`weir state get PIPELINE STAGE --key K --history` shows without input when the key changed and what it was; a "
    "source with archive=True keeps what it gives for as long as a checkpoint before it is retained."
)


@dataclass(frozen=True, slots=True)
class Playing:
    """The replay of a pipeline's epochs, one after the other, in this process.

    Attributes:
        spark: Whether Spark may evaluate what Python does not.
        say: Is told what is done now.
        purpose: Why the epochs' checkpoints are kept meanwhile; a person who asks sees it.
    """

    pipeline: Pipeline
    settings: Settings
    spark: bool = False
    say: Saying = silent
    purpose: str = "weir debug"

    @contextmanager
    def replaying(self, epoch: int) -> Iterator[EpochReplay]:
        """Make an epoch playable again for as long as the `with` block lasts. Its checkpoints stay meanwhile.

        Raises:
            WeirError: It is not retained, or cannot be played again, and why.
        """
        pipeline, settings = self.pipeline, self.settings
        with ExitStack() as stack:
            storage, registry, checkpoint, parent = stack.enter_context(
                held_with_parent(pipeline, settings, epoch, self.purpose)
            )
            if (why := not_playable(checkpoint, parent)) is not None:
                playable = [str(row.id) for row in played_from(registry.checkpoints())]
                raise WeirError(
                    f"Epoch {checkpoint.id} of {pipeline.title} cannot be played again: {why}.",
                    where=f"checkpoint {checkpoint.id}",
                    next=f"These epochs can be: {', '.join(playable) or 'none'}. "
                    f"More stay with checkpoints.num_retained; {_INSTEAD}",
                )
            root = stack.enter_context(scratch(settings.work_dir / DIRECTORY, f"{socket.gethostname()}-"))
            reading = ReadOnlyStorage.of(storage)
            registry = Registry(reading, pipeline.app_id)
            phases = Phases(lambda what: self.say(f"epoch {epoch}: {what}"))
            replay = EpochReplay(pipeline, settings, reading, registry, checkpoint, parent, root, self.spark, phases)
            try:
                with nothing_kept(replay.context.storage):
                    yield replay
            except (DamageError, TransientError):  # which speak of files of this replay; storage may be damaged
                replay.prove()
                raise
            finally:
                replay.close()


@dataclass
class EpochReplay:
    """An epoch that can be played again, stage by stage.

    Args:
        storage: The pipeline's, for reading.
        parent: The checkpoint that it was begun on; None: it was the first.
        root: A directory of its own.
        spark: Whether Spark may evaluate what Python does not.
        phases: What it does, and how long that takes.
    """

    pipeline: Pipeline
    settings: Settings
    storage: ReadOnlyStorage
    registry: Registry
    checkpoint: Checkpoint
    parent: Checkpoint | None
    root: Path
    spark: bool = False
    phases: Phases = field(default_factory=Phases)
    _plays: dict[str, Collection[int]] = field(default_factory=dict)
    _progress: dict[str, StageProgress] = field(default_factory=dict)
    _listed: dict[CheckpointId, tuple[StateFile, ...]] = field(default_factory=dict)
    _objects: dict[str, StateFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        epoch = self.checkpoint
        parallelism = max((stats.parallelism for stats in epoch.operators.values()), default=1)
        backend = next((epoch.operators[uid].backend for uid in epoch.stages_with_state), self.settings.state.backend)
        as_it_was: dict[str, Any] = {
            "spark": self.settings.spark.model_copy(update={"parallelism": parallelism}),
            "state": self.settings.state.model_copy(update={"backend": backend, "asynchronous_snapshots": False}),
        }
        there = settings_below(self.settings, self.root).model_copy(update=as_it_was)
        keeper = loader.keeper(backend, backend_options(there))
        scratch_storage = Storage(str(self.root / "storage"), keeper=keeper)
        self.readers = readers(self.pipeline, there, archived=self.settings)
        self.executor = Recording(self._plays, self._left, _spark(self.settings) if self.spark else None)
        registry = Registry(scratch_storage, self.pipeline.app_id)
        self.context = RunContext(
            self.pipeline, there, scratch_storage, registry, epoch.generation, self.executor, self.readers,
            head=self.parent,
        )  # fmt: skip
        self.context.sinks = _NoSinks(self.pipeline, there, scratch_storage)
        self.parallelism = parallelism
        self._here = self.root / "here"
        self._here.touch()

    @cached_property
    def epoch(self) -> InFlightEpoch:
        """The epoch in flight, with the slices that it read.

        Raises:
            InputError: A slice cannot be read again.
        """
        at, offsets, trigger = self.checkpoint, SourceOffsets.at(self.parent), Trigger(self.checkpoint.trigger)
        try:
            lookups = self.context.lookups.again(at, self.parent)
        except InputError as error:
            raise InputError(f"Epoch {at.id} cannot be played again: {error.what}", next=_INSTEAD) from error
        plan = plan_again(at, offsets, self.readers, lookups, at.reason, trigger=trigger, reading=self._reading)
        expected = {stage.uid: self.parallelism for stage in self.pipeline.stages}
        deadline = time.monotonic() + _SECONDS
        pending = PendingCheckpoint(at.id, at.parent_id, self.parent, at.generation, trigger, expected, deadline)
        after = offsets.after(plan.slices, self.readers, at.epoch_now)
        return InFlightEpoch(pending, plan, after, at.triggered_at, time.perf_counter(), deadline)

    @contextmanager
    def _reading(self, source: str) -> Iterator[None]:
        """Say of a slice that cannot be read again what is left to do."""
        try:
            with self.phases.timed("slices"):
                yield
        except InputError as error:
            raise InputError(
                f"Epoch {self.checkpoint.id} of {self.pipeline.title} cannot be played again: what it read of the "
                f"source {source} cannot be read as it was. {error.what}",
                where=error.where,
                next=f"Bring it back if you can. {_INSTEAD}",
            ) from error

    # -- playing

    def read(self, stage: Stage, subtasks: Collection[int]) -> dict[int, pa.Table]:
        """Return by subtask the rows that a stage had in the epoch, for which only the stages before it are played."""
        self.executor.reads = {stage.uid}
        self._played(stage, subtasks)
        rows = {subtask: self.rows(stage, subtask) for subtask in subtasks}
        return {subtask: table for subtask, table in rows.items() if table is not None}

    def play(self, stage: Stage, subtasks: Collection[int]) -> dict[int, Ack]:
        """Play subtasks of a stage, and before that what they read.

        Raises:
            WeirError: The typed error of a subtask that declines, or of what cannot be played again.
        """
        self.executor.reads = set()
        self._played(stage, subtasks)
        return {ack.subtask: ack for ack in self.epoch.acks[stage.uid] if ack.subtask in subtasks}

    def rows(self, stage: Stage, subtask: int) -> pa.Table | None:
        """Return what a subtask got; None: nothing has ever come."""
        return self.executor.rows.get((stage.uid, subtask))

    def _played(self, stage: Stage, subtasks: Collection[int]) -> None:
        for upstream in stage.stages_before:
            if upstream.uid in self._progress:
                continue
            may_feed = subtasks if self._keeps_keys(upstream, stage) and self._is_aligned else range(self.parallelism)
            self._played(upstream, may_feed)
        self._plays[stage.uid] = subtasks
        before = self._stands(stage, () if stage.uid in self.executor.reads else subtasks)
        with self.phases.timed("play"):
            left = self._waiting(self.checkpoint, stage)
            self._progress[stage.uid] = applied_alone(self.context, self.epoch, stage, before, self._here, left=left)

    def _keeps_keys(self, upstream: Stage, stage: Stage) -> bool:
        """Return whether rows of a subtask can only come from the same subtask of a stage before it, as far as that can
        be known without playing all: both have the same key, which no function of an author can have changed, nor what
        Spark evaluates between them."""
        read = inputs_from(stage, upstream)
        is_alike = all(input.key == upstream.key and input.transform is None and not input.columns for input in read)
        if not upstream.key or upstream.function is not None or not is_alike:
            return False
        if any(input.may_make_time for input in _inputs_from_sources(upstream)):
            return False  # another time may be in place of the source's: all subtasks tell then how far it is
        timed = [source for source in sources_of(upstream) if source.capabilities.files and source.event_time]
        slices = [self.epoch.plan.slices.get(source.name) for source in timed]  # else subtasks tell the event time
        return all(planned is None or not planned.rows or planned.newest is not None for planned in slices)

    @property
    def _is_aligned(self) -> bool:
        """True if every stage applied in the epoch exactly the rows that were handed on to it."""
        return not any(row is not None and waits(row) for row in (self.checkpoint, self.parent))

    def _waiting(self, checkpoint: Checkpoint | None, stage: Stage) -> set[str]:
        """Return where the rows are that a stage has not applied in a checkpoint."""
        return waiting_paths({stage.uid: stats_of(checkpoint, stage.uid)})

    def _left(self, stage: Stage, subtask: int) -> pa.Table | None:
        """Return the rows of its input that a subtask left to a later epoch, from its checkpoint; None: none."""
        waits = self._waiting(self.checkpoint, stage)
        written = f"/{epoch_dir(self.checkpoint.generation, self.checkpoint.id)}/"
        tables = [
            staged_table(self.storage, file)
            for file in self.files(self.checkpoint)
            if file.path in waits and written in file.path and (file.operator, file.subtask) == (stage.uid, subtask)
        ]
        return frames.canonical(pa.concat_tables(tables)) if tables else None

    # -- state

    def _stands(self, stage: Stage, subtasks: Collection[int]) -> StageProgress:
        """Return where a stage stood before the epoch, with the state of some subtasks on this disk."""
        parent, stored = self.parent, self._bases(stage)
        channels = {file.path: file for file in self.files(parent)} if parent is not None else {}
        for path in self._waiting(parent, stage):  # where the stage reads what is in storage
            data = self.storage.read_bytes(path)
            if data is not None:
                self.context.storage.put_bytes(path, data)
        for subtask in subtasks:
            if subtask in stored:
                self._here_is(stage, stored[subtask])
        return StageProgress.at(parent, stage, {of: stored[of] for of in subtasks if of in stored}, channels)

    def _bases(self, stage: Stage) -> dict[int, Snapshot]:
        parent = self.parent
        return bases(self.context, parent, self.files(parent), stage.uid) if parent is not None else {}

    def files(self, checkpoint: Checkpoint) -> tuple[StateFile, ...]:
        """Return what a checkpoint lists."""
        if checkpoint.id not in self._listed:
            self._listed[checkpoint.id] = self.registry.files(checkpoint)
        return self._listed[checkpoint.id]

    @property
    def fetched(self) -> int:
        """Bytes of state that were fetched, or opened where they lie if storage is on a disk of this host."""
        return sum(file.bytes for file in self._objects.values())

    def _here_is(self, stage: Stage, taken: Snapshot) -> Path:
        """Fetch a snapshot, but for objects that it shares with another one; returns where its files are."""
        kind, home = named(self.context.settings.state.backend), self._home(stage, taken.subtask)
        there = [directory for directory in attempts(home) if owner(directory) == taken.attempt]
        if not there:
            epoch, cache = epoch_dir(self.checkpoint.generation, self.checkpoint.id), objects(self.context.settings)
            missing = [file for file in taken.files if file.path not in self._objects]
            self._objects |= {file.path: file for file in missing}
            with self.phases.timed("fetch"):
                arrived, is_immutable = self.phases.arriving(missing), composite.is_immutable(kind)
                snapshot.bring_home(
                    self.storage, home, taken, epoch, _unchecked, is_immutable, cache, arrived, in_place=True
                )
            there = [directory for directory in attempts(home) if owner(directory) == taken.attempt]
        return there[0] / "snapshot"

    def _home(self, stage: Stage, subtask: int) -> Path:
        return work_dir(self.context) / stage.uid / str(subtask)

    def before(self, stage: Stage, subtask: int) -> AbstractContextManager[Backend | None]:
        """Open a subtask's state before the epoch; None: it had none."""
        base = self._bases(stage).get(subtask)
        return nullcontext() if base is None else self._opened(self._here_is(stage, base))

    def after(self, stage: Stage, subtask: int) -> AbstractContextManager[Backend | None]:
        """Open the state of a subtask that was played; None: it has none."""
        pending = next(ack.pending_upload for ack in self.epoch.acks[stage.uid] if ack.subtask == subtask)
        if pending is None or pending.snapshot is None:
            return self.before(stage, subtask)
        return self._opened(Path(pending.directory) / "snapshot")

    def recorded(self, stage: Stage, subtask: int) -> AbstractContextManager[Backend | None]:
        """Open a subtask's state as the epoch's checkpoint has it; None: it has none there."""
        taken = snapshots_of(self.files(self.checkpoint), stage.uid).get(subtask)
        if taken is None:
            return nullcontext()
        return self._opened(self._here_is(stage, taken), stats_of(self.checkpoint, stage.uid).backend)

    @contextmanager
    def _opened(self, source: Path, wrote: str | None = None) -> Iterator[Backend]:
        """Open a copy of local files, which a backend may change. wrote: Their backend; None: that of this replay."""
        kind = named(wrote or self.context.settings.state.backend)
        immutable = composite.is_immutable(kind)
        with scratch(self.root / "opened", "") as directory:
            for file in filter(Path.is_file, source.iterdir()):  # a folder is what several databases leave behind
                if immutable(file.name):
                    disks.link(file, directory / file.name)
                else:
                    (directory / file.name).write_bytes(file.read_bytes())
            backend = composite.opened(kind, directory, backend_options(self.context.settings))
            try:
                yield backend
            finally:
                backend.close()

    def groups(self, subtask: int) -> range:
        """Return the key groups of a subtask."""
        return group_range(subtask, self.parallelism, self.pipeline.max_parallelism)

    def view_before(self, stage: Stage) -> View | None:
        """Return how the state before the epoch is read."""
        return self._view(self.parent, stage) if self.parent is not None else None

    def view_recorded(self, stage: Stage) -> View | None:
        """Return how the state in the epoch's checkpoint is read."""
        return self._view(self.checkpoint, stage)

    def view_after(self, stage: Stage) -> View | None:
        """Return how the state of the stage that was played is read, by today's definition."""
        figures = figures_of(self.context, self.epoch, stage, stats_of(self.parent, stage.uid))
        return self._view(replace(self.checkpoint, operators={stage.uid: figures}), stage)

    def _view(self, checkpoint: Checkpoint, stage: Stage) -> View | None:
        if not stats_of(checkpoint, stage.uid).has_state:
            return None
        return view_of(self.pipeline, self.settings, self.storage, checkpoint, stage.uid, {})

    def prove(self) -> None:
        """Read the objects of state that were read where they lie, whose digests nobody has checked.

        Raises:
            DamageError: One is not what its checkpoint says: it is named, as it is in storage.
        """
        with self.phases.timed("prove"):
            for file in self._objects.values():
                if self.storage.on_disk(file.path) is not None:
                    self.storage.prove(file.path, file.digest)

    def close(self) -> None:
        """Give back connections."""
        for reader in self.readers.values():
            reader.close()


class _NoSinks(Sinks):
    """Nothing goes out, so no sink is asked whether it takes it."""

    def check(self, sink: Sink, schema: pa.Schema) -> None:
        """Any rows do."""


def inputs_from(stage: Stage, upstream: Stage) -> list[Input]:
    """Return the inputs of a stage that are rows of one before it."""
    return [input for input in stage.inputs if isinstance(input.origin, Stage) and input.name == upstream.uid]


def _inputs_from_sources(stage: Stage) -> Iterator[Input]:
    """Yield the inputs, of the stage and of those before it, by which rows of sources come to it."""
    for input in stage.inputs:
        if isinstance(input.origin, Stage):
            yield from _inputs_from_sources(input.origin)
        else:
            yield input


def _spark(settings: Settings) -> SparkExecutor:
    """Return Spark in this process, whatever the settings run the pipeline on."""
    from weir.execution.spark.spark_executor import SparkExecutor

    return SparkExecutor(spark_here(settings), "weir debug")


def _unchecked(_: Path) -> None:
    """Digests alone say whether files are whole."""
