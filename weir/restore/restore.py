"""Validated restore: nothing of a checkpoint is used before it is proven to be what was committed.

    plan     which files, and where they are: in this subtask's local snapshot, among the objects of this host, or in
             storage
    fetch    in parallel, every digest checked on the way
    open     each snapshot in the backend that wrote it; its entries lie in the subtask's key groups, and in no others
    use      the snapshot becomes the subtask's local one, which the next run forks by hard links

A run does this for what it does not find on this host, before its first epoch; `weir restore` does it beforehand, and
again for what is here; a rewind does it for the checkpoint that it goes back to. Each verdict is a row of
`registry/restores`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

from state_ops.backends import composite
from state_ops.backends.base import BEYOND
from state_ops.backends.loader import named
from state_ops.checkpoints import restore_log
from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.coordination.restore_progress import RestoreProgress, Restoring, described
from state_ops.counts import counted
from state_ops.errors import DamageError, GateError
from state_ops.facts import HIDDEN, Facts, Named, fact
from state_ops.ids import epoch_dir
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint, abandoned
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.restores import Restored
from state_ops.records.snapshot_files import CHANNEL, STATE, Snapshot, StateFile, is_reference, snapshots_of
from state_ops.schema.key_groups import group_range
from state_ops.snapshots import snapshot
from state_ops.snapshots.object_cache import ObjectCache
from state_ops.snapshots.rescale import first_key
from state_ops.snapshots.snapshot import Fetched
from state_ops.storage.branches import is_inherited
from state_ops.storage.storage import Arrived, Storage
from state_ops.storage.transfers import together
from weir.definition import Pipeline
from weir.gates import restore_gates
from weir.ownership.context import RunContext
from weir.ownership.derived_checkpoint import waiting_paths
from weir.ownership.local_paths import local_directory, objects
from weir.ownership.ownership import Ownership
from weir.ownership.pipeline_storage import backend_options
from weir.restore import rewind
from weir.settings.configuration import Settings

log = Logger("weir.restore")

_SUBTASKS_AT_ONCE = 4
_SAID_SECONDS = 10.0
_TOPS = {STATE: "state", CHANNEL: "channels"}


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """One subtask's snapshot in a checkpoint.

    Attributes:
        here: It lies whole on this host.
        stats: Of its stage, as recorded.
    """

    stage: str
    taken: Snapshot
    home: Path
    stats: OperatorStats
    here: bool

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.taken.files)

    @property
    def groups(self) -> range:
        return group_range(self.taken.subtask, self.stats.parallelism, self.stats.max_parallelism)


@dataclass(frozen=True, slots=True)
class StageFiles(Facts):
    """The files of a stage's state in a checkpoint.

    Attributes:
        bytes_local: Of those that lie whole on this host.
    """

    subtasks: int
    files: int
    bytes: int
    bytes_local: int


@dataclass(frozen=True, slots=True)
class RestorePlan(Facts):
    """The work of restoring a checkpoint on this host.

    Attributes:
        waiting: Files of rows that stages have not applied.
        cached: Bytes among the objects of this host.
        newest: No later checkpoint has been published.
        restored: The restore; None: a dry run.
    """

    checkpoint: Checkpoint
    parts: Annotated[tuple[StoredSnapshot, ...], HIDDEN]
    waiting: Annotated[tuple[StateFile, ...], HIDDEN]
    cached: Annotated[int, Named("bytes_cached")]
    newest: Annotated[bool, HIDDEN]
    restored: Restored | None = None

    @property
    @fact
    def completed_at(self) -> datetime:
        """The moment at which the checkpoint was completed."""
        return self.checkpoint.completed_at

    @property
    @fact
    def bytes(self) -> Annotated[int, Named("bytes_total")]:
        """All bytes of its state."""
        return sum(part.bytes for part in self.parts)

    @property
    @fact
    def local(self) -> Annotated[int, Named("bytes_local")]:
        """The bytes that lie in this host's snapshots."""
        return sum(part.bytes for part in self.parts if part.here)

    @property
    @fact
    def to_fetch(self) -> Annotated[int, Named("bytes_to_fetch")]:
        """The bytes that come from storage."""
        return self.bytes - self.local - self.cached

    @property
    @fact
    def stages(self) -> dict[str, StageFiles]:
        """The files of state, by the stage's uid."""
        by_stage: dict[str, list[StoredSnapshot]] = {}
        for part in self.parts:
            by_stage.setdefault(part.stage, []).append(part)
        return {
            uid: StageFiles(
                len(parts),
                sum(len(part.taken.files) for part in parts),
                sum(part.bytes for part in parts),
                sum(part.bytes for part in parts if part.here),
            )
            for uid, parts in by_stage.items()
        }

    @property
    @fact
    def files(self) -> int:
        return sum(len(part.taken.files) for part in self.parts) + len(self.waiting)


def plan_restore(
    pipeline: Pipeline, settings: Settings, storage: Storage, registry: Registry, checkpoint: Checkpoint
) -> RestorePlan:
    """Return where a checkpoint's files are, by names and sizes.

    Raises DamageError if its listing is not what was recorded.
    """
    listing = registry.files(checkpoint)
    parts: list[StoredSnapshot] = []
    for uid, stats in checkpoint.operators.items():
        taken = snapshots_of(listing, uid)
        recorded = (stats.files_total, stats.bytes_total)
        sizes = [file.bytes for part in taken.values() for file in part.files]
        if (len(sizes), sum(sizes)) != recorded or any(subtask >= stats.parallelism for subtask in taken):
            raise DamageError(
                f"Checkpoint {checkpoint.id} has {counted(recorded[0], 'state file')} of {uid} with "
                f"{recorded[1]} bytes, but "
                f"{len(sizes)} with {sum(sizes)} are listed.",
                where=storage.full("registry/state_files"),
                next=f"Nothing was used. `weir fsck {pipeline.title}` says what is damaged and which checkpoints are "
                "intact.",
            )
        for subtask, part in sorted(taken.items()):
            home = local_directory(settings, pipeline, storage) / uid / str(subtask)
            parts.append(StoredSnapshot(uid, part, home, stats, snapshot.is_here(home, part)))
    wanted = waiting_paths(checkpoint.operators)
    waiting = tuple(file for file in listing if file.kind == CHANNEL and file.path in wanted)
    cache = objects(settings)
    cached = sum(file.bytes for part in parts if not part.here for file in part.taken.files if cache.holds(file))
    head = registry.head()
    newest = head is not None and head.commit_id == checkpoint.commit_id
    return RestorePlan(checkpoint, tuple(parts), waiting, cached, newest)


def restore(
    pipeline: Pipeline,
    settings: Settings,
    storage: Storage,
    registry: Registry,
    checkpoint: Checkpoint,
    purpose: str = "restore",
    *,
    stored: bool = False,
) -> Restored:
    """Prove a checkpoint and leave it on this host, for the next run. Needs no right, and may go on beside a
    coordinator.

    Raises DamageError that names the file, PrunedError when the checkpoint is pruned meanwhile.

    Args:
        purpose: As `registry/restores` records it.
        stored: Read in storage what this host has copies of, too; else only its size is compared there, and the
            result's `bytes_unread` says of how much.
    """
    beat = settings.lease.heartbeat_seconds
    with ReaderHold(storage, registry, checkpoint, f"weir {purpose}", beat) as hold:
        decided = plan_restore(pipeline, settings, storage, registry, checkpoint)
        restored = _proven(pipeline, settings, storage, decided, purpose, stored=stored)
        hold.check()
    return restored


def verify(context: RunContext, checkpoint: Checkpoint, purpose: str = "rewind") -> Restored:
    """Prove a checkpoint as `restore` does, for the pipeline's owner, whose checkpoints no other process prunes."""
    decided = plan_restore(context.pipeline, context.settings, context.storage, context.registry, checkpoint)
    return _proven(context.pipeline, context.settings, context.storage, decided, purpose, context.run_id)


def prepare(context: RunContext, head: Checkpoint) -> Restored | None:
    """Fetch and prove the newest checkpoint's files that this host lacks, before a run's first epoch.

    None: it lacks none. If workers do not share this disk, each proves the files that it fetches. Then only
    `restore.on_invalid: rewind` has them read here too, because the result must be known beforehand.
    """
    shared = context.settings.spark.master.startswith("local")
    if not shared and context.settings.restore.on_invalid != "rewind":
        return None
    decided = plan_restore(context.pipeline, context.settings, context.storage, context.registry, head)
    stages = {stage.uid for stage in context.pipeline.stages}  # a retired one's state is not used
    missing = tuple(part for part in decided.parts if not part.here and part.stage in stages)
    if not missing:
        return None
    missing_only = RestorePlan(head, missing, (), decided.cached, decided.newest)
    return _proven(context.pipeline, context.settings, context.storage, missing_only, "run", context.run_id)


def back_to_valid(owner: Ownership, damage: DamageError) -> Checkpoint:
    """Rewind to the newest checkpoint that is whole, as `restore.on_invalid: rewind` wants it; returns the rewind.

    Raises the damage again when none is.
    """
    context, head = owner.context, owner.head
    assert head is not None, "it is what is damaged"
    log.warning("the newest checkpoint is damaged", checkpoint=int(head.id), what=damage.what, where=damage.where)
    for row in _earlier(context.registry.checkpoints(), head):
        try:
            verify(context, row)
        except DamageError as error:
            log.warning("an earlier checkpoint is damaged too", checkpoint=int(row.id), what=error.what)
            continue
        decided = rewind.planned(
            context.pipeline, context.settings, context.sinks, context.storage, context.registry, head, row
        )
        rewind.check(decided, context.pipeline.title, ())
        return rewind.carry_out(owner, decided, f"checkpoint {head.id} is damaged: {damage.what}")
    raise DamageError(
        f"{damage.what} No earlier checkpoint that is retained is whole.",
        where=damage.where,
        next=damage.next,
    ) from damage


def _earlier(completed: Sequence[Checkpoint], head: Checkpoint) -> Iterator[Checkpoint]:
    """Yield the completed checkpoints that the newest one continues, newest first."""
    left = abandoned(completed)
    yield from (row for row in reversed(completed) if row.id < head.id and row.id not in left)


def check_stored(pipeline: str, storage: Storage, checkpoint: Checkpoint, files: Sequence[StateFile]) -> None:
    """Raise DamageError, with the name of the first missing file, unless files of a checkpoint are in storage.

    Names and sizes are compared, not contents.
    """
    tops = sorted({_TOPS[file.kind] for file in files})
    stored: dict[str, int | None] = {file.path: file.bytes for top in tops for file in storage.list(top)}
    elsewhere = [file.path for file in files if is_inherited(file.path)]
    sizes = together(lambda path, _: storage.size(path), elsewhere, at_once=storage.transfers)
    stored |= dict(zip(elsewhere, sizes, strict=True))
    for file in files:
        size = stored.get(file.path)
        if size != file.bytes:
            problem = f"has {size} bytes instead of {file.bytes}" if size is not None else "is missing"
            raise DamageError(
                f"A file of checkpoint {checkpoint.id} {problem}.",
                where=storage.full(file.path),
                next=f"`weir fsck {pipeline}` says what else is, and which checkpoints are intact. Bring the file "
                "back from a "
                f"backup; or, where local.work_dir is whole, `WEIR_CHECKPOINTS__MODE=full weir run {pipeline}` "
                "uploads all of "
                f"the state anew; or go back to one that is intact: weir rewind {pipeline} --to N. "
                "docs/playbooks/corrupt-checkpoint.md",
            )


def _proven(
    pipeline: Pipeline,
    settings: Settings,
    storage: Storage,
    decided: RestorePlan,
    purpose: str,
    run_id: str | None = None,
    *,
    stored: bool = False,
) -> Restored:
    """Fetch and check all of a plan, evaluate the gates, and record the verdict. stored: as `restore` has it."""
    started, row = time.perf_counter(), decided.checkpoint
    verdict = partial(
        Restored, row.id, row.commit_id, purpose, files=decided.files, bytes_total=decided.bytes, run_id=run_id
    )
    try:
        if purpose != "run":  # which has looked already
            named_files = [file for part in decided.parts for file in part.taken.files] + list(decided.waiting)
            check_stored(pipeline.title, storage, row, named_files)
        fetched, check_seconds = _fetched(settings, storage, decided, purpose, stored)
        evaluated = restore_gates.evaluate(pipeline, settings, storage, row, newest=decided.newest)
    except (DamageError, GateError) as error:
        restore_log.record(storage, verdict(valid=False, problem=f"{error.what} {error.where or ''}".strip()))
        if isinstance(error, GateError):
            raise
        raise DamageError(
            f"Checkpoint {row.id} cannot be restored: {error.what}", where=error.where, next=_advice(pipeline)
        ) from error
    restored = verdict(
        valid=True,
        problem=None,
        bytes_fetched=fetched.stored,
        bytes_cached=fetched.cached,
        bytes_local=fetched.local,
        bytes_unread=0 if stored else fetched.cached + fetched.local,
        fetch_ms=round((time.perf_counter() - started) * 1000, 3),
        check_ms=round(check_seconds * 1000, 3),
        expectations=evaluated,
    )
    restore_log.record(storage, restored)
    return restored


def _fetched(
    settings: Settings, storage: Storage, decided: RestorePlan, purpose: str, stored: bool
) -> tuple[Fetched, float]:
    """Bring all of a plan to this host and prove it.

    Returns:
        From where how many bytes came, and the seconds for which snapshots were open to be checked.

    Raises:
        DamageError: Something is not what was committed.
    """
    checking: list[float] = []
    cache = objects(settings)

    def fetch(part: StoredSnapshot, arrived: Arrived) -> Fetched:
        kept = any(is_reference(file.name) for file in part.taken.files)  # elsewhere, so it has to be opened
        if part.here and purpose != "run" and not kept and snapshot.is_sound(part.home, part.taken):
            arrived(part.bytes)
            fetched = Fetched(local=part.bytes)
        else:
            fetched = _brought(settings, storage, decided.checkpoint, part, cache, checking, arrived)
        if stored and fetched.stored < part.bytes:  # some of it came from copies on this host
            together(lambda file, _: storage.prove(file.path, file.digest), part.taken.files, at_once=storage.transfers)
        return fetched

    def check_rows(file: StateFile, _: object) -> None:
        if storage.digest(file.path) != file.digest:
            raise DamageError(
                f"Rows that {file.operator} has left in front of a stage are gone or have changed.",
                where=storage.full(file.path),
            )

    heard = _Heard(decided.checkpoint.id)
    with RestoreProgress(storage, Restoring(purpose), heard=heard).fetching(decided.bytes) as arrived:
        parts = together(lambda part, _: fetch(part, arrived), decided.parts, at_once=_SUBTASKS_AT_ONCE)
    together(check_rows, decided.waiting, at_once=storage.transfers)
    return sum(parts, Fetched()), sum(checking)


class _Heard:
    """Logs now and then how far a restore is."""

    def __init__(self, checkpoint: int) -> None:
        self._checkpoint, self._last = checkpoint, time.monotonic()

    def __call__(self, restoring: Restoring) -> None:
        if time.monotonic() - self._last >= _SAID_SECONDS:
            self._last = time.monotonic()
            log.info("state is being fetched", checkpoint=int(self._checkpoint), here=described([restoring]))


def _advice(pipeline: Pipeline) -> str:
    name = pipeline.title
    return (
        f"Nothing was used. `weir fsck {name}` says what else is damaged and which checkpoints are intact; bring the "
        "file back from a "
        f"backup, or go back to one that is intact: weir rewind {name} --to N. restore.on_invalid: rewind does that "
        "by itself. "
        "docs/playbooks/corrupt-checkpoint.md"
    )


def _brought(
    settings: Settings,
    storage: Storage,
    row: Checkpoint,
    part: StoredSnapshot,
    cache: ObjectCache,
    checking: list[float],
    arrived: Arrived,
) -> Fetched:
    kind = named(part.stats.backend)
    check: Callable[[Path], None] = partial(_checked, settings, storage, part, checking)
    part.home.mkdir(parents=True, exist_ok=True)
    return snapshot.bring_home(
        storage,
        part.home,
        part.taken,
        epoch_dir(row.generation, row.id),
        check,
        composite.is_immutable(kind),
        cache,
        arrived,
    )


def _checked(
    settings: Settings, storage: Storage, part: StoredSnapshot, checking: list[float], directory: Path
) -> None:
    """Open a working copy of a snapshot, and look whether its entries are the subtask's."""
    started = time.perf_counter()
    kind = named(part.stats.backend)
    backend = composite.opened(kind, directory, backend_options(settings))
    try:
        low, high = first_key(part.groups.start), first_key(part.groups.stop)
        for start, end in ((b"", low), (high, BEYOND)):
            outside = next(iter(backend.scan(start, end)), None)
            if outside is not None:
                raise DamageError(
                    f"The state of {part.stage}, subtask {part.taken.subtask}, holds a key of key group "
                    f"{int.from_bytes(outside[0][:2], 'big')}, but its key groups are {part.groups.start} to "
                    f"{part.groups.stop - 1}.",
                    where=storage.full(part.taken.files[0].path),
                )
    finally:
        backend.close()
    checking.append(time.perf_counter() - started)
