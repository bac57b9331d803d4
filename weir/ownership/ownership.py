"""The time for which a process owns a pipeline: claim the generation, let the lease's heart beat, finish what a dead
predecessor left.

`run` coordinates epochs under one; commands that delete or name something (`weir prune`, `savepoint`, `cancel`,
`fsck --repair`) take a short one where no coordinator lives, since only the generation's owner may.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from state_ops.checkpoints import retention
from state_ops.checkpoints.coordinator import next_id
from state_ops.checkpoints.reader_holds import HeldCommits
from state_ops.coordination import lease, requests, restore_progress
from state_ops.coordination.lease import Heartbeat
from state_ops.errors import BusyError
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.records.checkpoint import POSITIONS, Checkpoint
from state_ops.records.pins import BRANCH
from state_ops.records.snapshot_files import INPUT
from state_ops.storage.branches import BRANCHES, pinned
from state_ops.storage.storage import Storage
from state_ops.storage.temp_dirs import make_private
from weir.definition import Pipeline
from weir.definition.source import RUNNING
from weir.execution.executor import Executor
from weir.execution.spark.spark_executor import SparkExecutor
from weir.ownership.context import RunContext
from weir.ownership.fencing import raise_if_fenced
from weir.ownership.leftovers import delete_rows, unpublishable
from weir.ownership.pipeline_storage import open_storage, readers, storage_errors
from weir.settings.configuration import Settings
from weir.sources.landed_files import LANDED

log = Logger("weir.run")


@dataclass(frozen=True, slots=True)
class Ownership:
    """The context of an owner, and the state of the pipeline when its ownership began.

    Attributes:
        head: The newest checkpoint when it began.
        last_id: The highest id ever begun.
        predecessor: The lease as it was before.
    """

    context: RunContext
    heartbeat: Heartbeat
    head: Checkpoint | None
    last_id: CheckpointId
    predecessor: lease.Lease | None = None

    def begin(self, *beyond: Checkpoint | None) -> CheckpointId:
        """Take the id of a checkpoint that no epoch makes: a start, a rewind, a promotion, an edit.

        Args:
            beyond: Checkpoints whose ids it must exceed. That includes those of other pipelines and branches whose
                state or rows it takes
                over: these carry the ids of their epochs (timers that are held, `epoch` columns), which must not come
                    again here.

        Returns:
            An id above those, and above every one that this pipeline has ever begun. The lease says that it is taken.
        """
        id = next_id(None, [self.last_id, *(row.id for row in beyond if row is not None)])
        self.heartbeat.begin(id)
        return id


@contextmanager
def claimed(
    pipeline: Pipeline, settings: Settings, executor: Executor | None = None, run_id: str | None = None
) -> Iterator[Ownership]:
    """Own the pipeline as it is: nothing is published, pruned or removed. An operation uses it to carry out the plan
    that it has shown, and nothing else."""
    settings = settings.of(pipeline.name)
    storage, registry = open_storage(pipeline, settings)
    make_private(settings.work_dir)
    sources = readers(pipeline, settings, RUNNING, storage.request_counts)
    with storage_errors(pipeline, settings, storage):
        before, predecessor = registry.generation(), lease.read(storage)
        if lease.watch(storage):
            raise busy(pipeline, predecessor)
        generation = registry.take_over(after=before)  # who took over since lives: `weir prune` must not end its run
        # Again: who was taken for dead may have begun an id since, and proven then that it owned the pipeline.
        predecessor = lease.read(storage)
        _drop_stale_stops(storage)
        lease.remove_unfinished(storage)
        restore_progress.clear(storage)
        head = registry.head()
        last_id = CheckpointId(max([head.id if head else 0, predecessor.last_id if predecessor else 0]))
        early_id = early_id_of(predecessor, head)
        with Heartbeat(storage, generation, last_id, settings.lease.heartbeat_seconds, run_id, early_id) as heartbeat:
            runs = executor or SparkExecutor(settings, app=f"weir {pipeline.title}")
            context = RunContext(pipeline, settings, storage, registry, generation, runs, sources, run_id, head)
            context.requested_before = dict(head.totals) if head else {}
            context.early_id = early_id
            try:
                yield Ownership(context, heartbeat, head, last_id, predecessor)
            except Exception as error:
                raise_if_fenced(context, error)
                raise
            finally:
                context.sinks.close()
                for reader in sources.values():
                    reader.close()


def early_id_of(predecessor: lease.Lease | None, head: Checkpoint | None) -> int:
    """Return the highest id of an epoch that was begun and whose rows go to sinks before its commit; 0: none is known
    of."""
    if predecessor is None:
        return 0
    if predecessor.early_id is not None:
        return predecessor.early_id
    if head is None or head.kind == POSITIONS or not any(link.delivered for link in head.sinks.values()):
        return 0
    return predecessor.last_id


def remove_leftovers(context: RunContext) -> int:
    """Remove what attempts of older generations, or a crash between two steps, left and nothing names; returns how many
    objects.

    Raises FencedError, with nothing removed, where a newer coordinator took over: what it dropped meanwhile is not left
    over."""
    there = context.storage.list_dirs(BRANCHES)  # before the pins: a branch has its pin before its directory
    held = HeldCommits(context.watcher.live(context.storage))
    orphan_listings = context.registry.orphan_listings()
    completed = context.registry.checkpoints()
    listings = [context.registry.files(row) for row in completed]
    listings += [orphan.files for orphan in orphan_listings if orphan.commit_id in held]
    gone = retention.orphans(context.storage, listings, context.generation)
    rows = unpublishable(context, completed[-1] if completed else None)
    # All of that was read while the pipeline was ours. Without checkpoints, as after `weir cancel --delete`, published
    # rows would look like those of epochs that never completed.
    branches = {pinned(pin.name, pin.reason).id for pin in context.registry.pins() if pin.kind == BRANCH}
    context.registry.prove(context.generation)
    for left in set(there) - branches:  # what somebody wrote who ran a branch that was dropped
        context.storage.delete_tree(f"{BRANCHES}/{left}")
    context.registry.drop_listings(
        context.generation, [orphan for orphan in orphan_listings if orphan.commit_id not in held]
    )
    context.registry.drop_lost_names(context.generation)
    context.registry.remove_unnamed(context.generation)  # with what those listings were in
    archived = {file.path for listing in listings for file in listing if file.kind == INPUT}
    landed = [file.path for file in context.storage.list(LANDED, unfinished=True) if file.path not in archived]
    for path in (*(orphan.path for orphan in gone), *landed):
        context.storage.delete(path)
    return len(gone) + delete_rows(context, rows) + len(landed)


def _drop_stale_stops(storage: Storage) -> None:
    """Drop stops that nobody has taken: they must not stop the next run at once. For the owner: another one's stops are
    not ours."""
    for request in requests.pending(storage):
        if request.kind == requests.UNREADABLE:
            log.warning("a request that cannot be read is dropped", path=request.name, error=request.reason)
        if request.kind in ("stop", requests.UNREADABLE):
            requests.take(storage, request)


def raise_if_busy(pipeline: Pipeline, storage: Storage) -> None:
    """Raise BusyError if a coordinator of the pipeline is alive."""
    if lease.watch(storage):
        raise busy(pipeline, lease.read(storage))


def busy(pipeline: Pipeline, holder: lease.Lease | None) -> BusyError:
    who = f"process {holder.pid} on {holder.host}, generation {holder.generation}" if holder else "unknown"
    return BusyError(
        f"A coordinator of {pipeline.title} is running.",
        where=who,
        next=(
            f"`weir stop {pipeline.title}` ends it at its next barrier; `weir status {pipeline.title}` shows what it"
            " does."
        ),
    )
