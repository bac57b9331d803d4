"""The replayer: an epoch is played again as its checkpoint records it.

    checkpoint before it -> slices as recorded -> the steps of `weir run` -> beside what its checkpoint has

Every replay has its plan from `plan_again`, and its storage and work directory by `settings_below`. `Replayer` plays
whole epochs up to their commits, for a drill and for a pull request. `replay` plays some subtasks of a stage and
commits nothing, for `weir debug` and `weir explain`. A backfill reads today's input in epochs of its own, so it runs
its branch as any pipeline is run.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.errors import PrunedError, TransientError, WeirError
from state_ops.ids import CheckpointId
from state_ops.records.checkpoint import EPOCH, FORK, FORKED, Checkpoint
from state_ops.records.snapshot_files import StateFile
from state_ops.records.triggers import Trigger
from state_ops.storage.branches import Branch
from state_ops.storage.storage import Storage
from weir.connectors.lookups.lookup_table import Version
from weir.definition import Pipeline
from weir.definition.source import RUNNING
from weir.epoch.model import EpochReport, SourceOffsets
from weir.epoch.scheduler import EpochScheduler
from weir.epoch.step_runner import Threads
from weir.execution.executor import Executor
from weir.inspection.state_reader import At, held
from weir.ownership.derived_checkpoint import copied, first_of
from weir.ownership.ownership import Ownership, claimed
from weir.ownership.pipeline_storage import readers
from weir.run.run import RunOptions, check_fits, coordinator_of
from weir.settings.configuration import Settings
from weir.sources.reader import SourceReader
from weir.sources.slices import EpochPlan, Slice


def not_playable(checkpoint: Checkpoint, parent: Checkpoint | None) -> str | None:
    """Why an epoch cannot be played again, in words; None: it can, if its input is still there.

    Args:
        parent: The checkpoint that it was begun on, if that is retained.
    """
    if checkpoint.kind != EPOCH:
        return f"checkpoint {checkpoint.id} is no epoch but a {checkpoint.kind}"
    if parent is None and checkpoint.parent_id is not None:
        return f"checkpoint {checkpoint.parent_id}, which it was begun on, is not retained"
    return None


def played_from(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return those checkpoints whose epochs can be played again, oldest first."""
    rows = {row.id: row for row in checkpoints}
    return [row for row in checkpoints if not_playable(row, rows.get(row.parent_id or CheckpointId(0))) is None]


@contextmanager
def held_with_parent(
    pipeline: Pipeline, settings: Settings, at: At, purpose: str
) -> Iterator[tuple[Storage, Registry, Checkpoint, Checkpoint | None]]:
    """Yield a checkpoint, and the one that it was begun on if that is retained. Neither is pruned meanwhile.

    Args:
        at, purpose: As in `held`.
    """
    with ExitStack() as stack:
        while True:
            storage, registry, checkpoint = stack.enter_context(held(pipeline, settings, at, purpose))
            parent = next((row for row in registry.checkpoints() if row.id == checkpoint.parent_id), None)
            try:
                if parent is not None:
                    beat = settings.lease.heartbeat_seconds
                    stack.enter_context(ReaderHold(storage, registry, parent, purpose, beat))
                break
            except PrunedError:  # newer checkpoints were completed meanwhile
                stack.pop_all().close()
        yield storage, registry, checkpoint, parent


def spark_here(settings: Settings) -> Settings:
    """Return the settings with Spark in this process: executors of production's cluster would neither see the directory
    in which everything is written, nor have to."""
    if settings.spark.master.startswith("local"):
        return settings
    return settings.model_copy(update={"spark": settings.spark.model_copy(update={"master": "local[*]"})})


def waits(checkpoint: Checkpoint) -> bool:
    """Return whether rows wait in front of a stage. How far the stage came depended on the clock."""
    return any(stats.waiting for stats in checkpoint.operators.values())


def working_in(settings: Settings, directory: Path) -> Settings:
    """Return the same settings with a work directory of its own, in which no object of another process is found."""
    local = settings.local.model_copy(update={"work_dir": str(directory), "objects_mb": 0})
    return settings.model_copy(update={"local": local})


def settings_below(settings: Settings, directory: Path, **checkpoints: Any) -> Settings:
    """Return the same settings with storage and work directory below a directory, for epochs that come to their ends.

    Args:
        checkpoints: What else is different in the section of that name.
    """
    there = {
        "storage": settings.storage.model_copy(update={"root": str(directory / "storage")}),
        "checkpoints": settings.checkpoints.model_copy(update={"alignment_timeout_seconds": None, **checkpoints}),
    }
    return working_in(settings, directory / "work").model_copy(update=there)


def branch_of(pipeline: Pipeline, name: str) -> Pipeline:
    """Return the pipeline as a branch that only one replay knows."""
    return replace(pipeline, branch=Branch(name, uuid.uuid4().hex))


def plan_again(
    at: Checkpoint,
    offsets: SourceOffsets,
    readers: Mapping[str, SourceReader],
    lookups: Mapping[str, Version],
    reason: str,
    *,
    trigger: Trigger = Trigger.MANUAL,
    anew: bool = False,
    reading: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    empty: Mapping[str, Slice] = MappingProxyType({}),
) -> EpochPlan:
    """Return the plan that an epoch had, of those sources that are still read: its slices, and its processing time.

    Args:
        at: The epoch's checkpoint.
        offsets: Where the sources stood before it.
        lookups: By stage, the version of its table.
        anew: Whether rows that gates have set aside are read again, so that today's gates decide.
        reading: Is entered for as long as the slice of a source is planned, by the source's name.
        empty: Slices of sources that are new since, of which the epoch reads nothing.

    Raises:
        InputError: Something cannot be read again.
    """
    slices = {}
    for name, reader in readers.items():
        if name in at.slice:
            part = {key: value for key, value in at.slice[name].items() if not anew or key != "excluded"}
            with reading(name):
                slices[name] = reader.plan_again(part, offsets.expected.get(name), offsets.offsets.get(name))
        elif name in empty:
            slices[name] = empty[name]
    drain = at.trigger == Trigger.DRAIN.value
    return EpochPlan(trigger, reason, slices, drain, at=at.triggered_at, now=at.epoch_now, lookups=lookups)


@dataclass(frozen=True, slots=True)
class Replayer:
    """Plays epochs of a pipeline again.

    Attributes:
        owner: Owns the branch.
        sources: By name, the readers of the branch's sources.
        purpose: What the epochs are played for, in words.
        anew: Whether today's gates decide which rows are set aside; else these are the rows that were.
    """

    owner: Ownership
    sources: Mapping[str, SourceReader]
    purpose: str
    anew: bool

    def begin(self, base: Checkpoint, storage: Storage, files: Sequence[StateFile]) -> None:
        """Begin the branch with the checkpoint from which the epochs go on.

        Args:
            storage: Where the files lie.
            files: What goes on from the checkpoint: its state, and rows that wait.

        Raises:
            PipelineError: The code has no place for the state.
        """
        context = self.owner.context
        self.owner.heartbeat.begin(base.id)
        moved = copied(context, storage, files, base.id)
        what = f"checkpoint {base.id} of {context.pipeline.name}, for {self.purpose}"
        row = first_of(context, base, moved, base.id, kind=FORK, what=what, beginning={FORKED: int(base.id)})
        check_fits(context.pipeline, row)

    def plan(
        self, at: Checkpoint, before: Checkpoint | None, empty: Mapping[str, Slice] = MappingProxyType({})
    ) -> EpochPlan:
        """Return an epoch's plan as it was.

        Args:
            before: The checkpoint that it was begun on; None: it was the first.
            empty: As in `plan_again`.

        Raises:
            InputError: Something cannot be read again.
        """
        context = self.owner.context
        expected = SourceOffsets.at(context.registry.head()).expected  # as the branch's own epochs have made them
        offsets = replace(SourceOffsets.at(before), expected=expected)
        lookups = context.lookups.again(at, context.head)
        reason = f"epoch {at.id} of {context.pipeline.name}, for {self.purpose}"
        return plan_again(at, offsets, self.sources, lookups, reason, anew=self.anew, empty=empty)

    def play(self, plan: EpochPlan, first: CheckpointId) -> EpochReport | None:
        """Play an epoch up to its commit and publications. Raises whatever it fails over.

        Args:
            first: The id under which it begins.

        Returns:
            None if gates set rows aside that were not, unless they decide anew.
        """
        context = self.owner.context
        coordinator = coordinator_of(context, RunOptions(), CheckpointId(first - 1))
        threads = Threads()
        scheduler = EpochScheduler(context, coordinator, self.owner.heartbeat, threads, _raised)
        reports: list[EpochReport] = []
        again: EpochPlan | None = plan
        try:
            while again is not None:
                if not scheduler.begin(again):
                    raise TransientError(
                        "An epoch could not be begun.", where=f"epoch {first}", next="The log says why. Ask again."
                    )
                while not scheduler.empty:
                    reports += scheduler.turn(context.settings.run.poll_seconds)
                again = scheduler.again if self.anew else None
        finally:
            scheduler.close()
            threads.close()
        return reports[-1] if reports else None


def _raised(_: int, error: WeirError) -> None:
    raise error


@contextmanager
def replaying(
    here: Pipeline,
    there: Settings,
    production: Settings,
    executor: Executor | None,
    purpose: str,
    *,
    anew: bool = False,
) -> Iterator[Replayer]:
    """Own a branch for as long as epochs are played on it.

    Args:
        here: The pipeline as `branch_of` has it, with the code that is played.
        there: As `settings_below` has them: rows and state go below their directory.
        production: Whose storage has what sources have archived.
        executor: What runs the stages; None: Spark.
        purpose, anew: As `Replayer` has them.
    """
    sources = readers(here, there, RUNNING, archived=production)
    try:
        with claimed(here, there, executor) as owner:
            owner.context.tells_sources = False
            yield Replayer(owner, sources, purpose, anew)
    finally:
        for reader in sources.values():
            reader.close()
