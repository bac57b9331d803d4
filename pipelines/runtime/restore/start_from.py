"""Starting a pipeline from another one's savepoint: its state, positions and watermarks, in storage of its own.

    weir run flights_v2 --from flights:before-upgrade
    weir run flights --from /old/bucket/flights:last

Every object is copied, its digest checked on the way, so nothing is shared: either pipeline may be dropped afterwards.
The copy is committed as the first checkpoint of the new one, which then goes on as from any other. Its ids go on above
the savepoint's, since the state knows those of the epochs that made it. Tables start empty: what the old pipeline has
published stays its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow.parquet as pq
import structlog

from configs.settings import Settings
from pipelines.runtime.ownership.context import RunContext
from pipelines.runtime.ownership.ownership import Ownership
from pipelines.runtime.restore.derived_checkpoint import lasting, made_of, pointed
from state_ops.checkpoints.checkpoint import START, STARTED, STATE, Checkpoint, StateFile
from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import SAVEPOINT, Registry
from state_ops.coordination import lease
from state_ops.errors import ConfigurationError, PipelineError, WeirError
from state_ops.ids import AttemptId, CheckpointId, epoch_dir, new_attempt_id
from state_ops.storage.branches import is_inherited, own_of_parent
from state_ops.storage.storage import Storage

ORIGIN = "coordinator/origin.json"
_TRANSFERS = 4

log = structlog.get_logger("weir.run")


def start(owner: Ownership, settings: Settings, origin: str) -> Checkpoint:
    """Make the savepoint `origin` this pipeline's first checkpoint. origin: PIPELINE:NAME or the URI of a pipeline's
    storage:NAME.

    A pipeline that was started from there goes on from where it is, so that the same command can be given again. Raises
    PipelineError when it has a checkpoint of another origin, WeirError when there is no such savepoint.
    """
    context = owner.context
    place, _, name = origin.rpartition(":")
    if not place or not name or "/" in name:
        raise ConfigurationError(
            f"{origin!r} names no savepoint.",
            where="--from",
            next="Write PIPELINE:NAME, or the directory or URI of a pipeline's storage, a colon and the name.",
        )
    if owner.head is not None and _began_from(context, owner.head, origin):
        return owner.head
    if owner.head is not None:
        raise PipelineError(
            f"{context.pipeline.title} has checkpoint {owner.head.id} already, so it cannot start from elsewhere.",
            where=context.storage.uri,
            next="Leave --from away to go on from that; or give the pipeline another name or storage root.",
        )
    source = _storage(settings, place)
    registry = Registry(source, "")
    saved, _ = _savepoint(registry, source, name)
    epoch, reason = owner.begin(saved), f"from {origin}, its checkpoint {saved.id}"
    # Before the commit, and trusted only if the registry says that it came to one: this may be cut off in between.
    context.storage.put_bytes(ORIGIN, json.dumps({"origin": origin, "checkpoint": int(epoch)}).encode())
    made = seed(owner, settings, source, registry, saved, epoch, reason)
    log.info("started", pipeline=context.pipeline.title, origin=origin, checkpoint=saved.id, bytes=made.bytes_new)
    return made


def seed(
    owner: Ownership,
    settings: Settings,
    source: Storage,
    registry: Registry,
    saved: Checkpoint,
    epoch: CheckpointId,
    reason: str,
) -> Checkpoint:
    """Commit a copy of a checkpoint of another storage as the first one here, under the id `epoch`. registry: of that
    storage.

    Raises DamageError for an object that is not what it was, PrunedError when the checkpoint is pruned meanwhile.
    """
    context = owner.context
    listing = registry.files(saved)
    with ReaderHold(
        source, registry, saved, f"{context.pipeline.title} starts from it", settings.lease.heartbeat_seconds
    ) as hold:
        moved = copied(context, source, lasting(listing, saved.operators), epoch)
        hold.check()
    beginning = {STARTED: int(epoch)}
    return planted(owner, saved, epoch, moved, kind=START, trigger="savepoint", reason=reason, beginning=beginning)


def planted(
    owner: Ownership,
    saved: Checkpoint,
    epoch: CheckpointId,
    named: Sequence[tuple[StateFile, StateFile]],
    *,
    kind: str,
    trigger: str,
    reason: str,
    beginning: Mapping[str, int],
) -> Checkpoint:
    """Commit a checkpoint of another storage as the first one here, with no rows in any table. named: each of its files
    as it is named there, and here. beginning: how the chain begins, as `checkpoint.began` has it."""
    context, files = owner.context, [new for _, new in named]
    made = made_of(
        context,
        saved,
        epoch,
        files,
        after=None,
        parent=None,
        kind=kind,
        trigger=trigger,
        reason=reason,
        beginning=beginning,
        sinks={},
        operators=pointed(saved.operators, named),
    )
    context.registry.commit(made, files)
    return made


def _began_from(context: RunContext, head: Checkpoint, origin: str) -> bool:
    """Whether the pipeline was started from this savepoint, as it was named then.

    The note of an earlier release says it before its start was committed, and names no checkpoint. While the chain's
    first row is retained, that tells; later the sum of epochs may, which is carried over from the savepoint, where such
    a pipeline counted its own ids from 1. Where nothing
    tells, the pipeline goes on, and that is said: a refusal would stop one that is started by this very command each
    time."""
    raw = context.storage.read_bytes(ORIGIN)
    if raw is None:
        return False
    try:
        note = json.loads(raw)
        noted = str(note["origin"])
    except (ValueError, KeyError, TypeError) as error:
        advice = "Run without --from: the pipeline goes on from where it is."
        raise lease.unreadable(context.storage, ORIGIN, error, advice) from error
    if noted != origin:
        return False
    if "checkpoint" in note:
        return head.totals.get(STARTED) == note["checkpoint"]
    first = context.registry.checkpoints()[0]
    if first.parent_id is None:
        return first.kind == START
    if head.totals["epochs"] <= head.id:
        log.warning(
            "nobody can tell any more whether the pipeline was started from there; it goes on from where it is",
            pipeline=context.pipeline.title,
            origin=origin,
            checkpoint=int(head.id),
            next="If its state is not that savepoint's, start a pipeline of another name from it. Else leave --from away.",
        )
    return True


def _storage(settings: Settings, place: str) -> Storage:
    if place in settings.pipelines:
        return Storage(settings.storage_uri(place), settings.storage.s3)
    if "/" not in place:
        raise ConfigurationError(
            f"There is no pipeline {place!r} in the configuration.",
            where="--from",
            next="Name a configured pipeline, or the directory or URI of a pipeline's storage.",
        )
    return Storage(place, settings.storage.s3)


def _savepoint(registry: Registry, source: Storage, name: str) -> tuple[Checkpoint, tuple[StateFile, ...]]:
    pins = [pin for pin in registry.pins() if pin.kind == SAVEPOINT]
    pin = next((pin for pin in pins if pin.name == name), None)
    saved = next((row for row in registry.checkpoints() if pin is not None and row.commit_id == pin.commit_id), None)
    if pin is None or saved is None:
        raise WeirError(
            f"There is no savepoint {name!r}.",
            where=source.uri,
            next=f"Its savepoints: {', '.join(pin.name for pin in pins) or 'none'}.",
        )
    return saved, registry.files(saved)


def copied(
    context: RunContext, source: Storage, listing: Sequence[StateFile], epoch: CheckpointId, *, returning: bool = False
) -> list[tuple[StateFile, StateFile]]:
    """State and rows that wait for stages, each object beside its copy under a prefix of our own, one attempt for each
    subtask.

    returning: the source is a branch of this very pipeline: what it inherited is named again, and not copied.
    """
    attempts: dict[tuple[str, int], AttemptId] = {}
    for file in listing:
        attempts.setdefault((file.operator, file.subtask), new_attempt_id())

    def one(numbered: tuple[int, StateFile]) -> tuple[StateFile, StateFile]:
        number, file = numbered
        attempt = attempts[file.operator, file.subtask]
        snapshot = attempt if file.kind == STATE else None
        if returning and is_inherited(file.path):
            return file, replace(file, path=own_of_parent(file.path), new=False, snapshot=snapshot)
        top, name = ("state", file.name) if file.kind == STATE else ("channels", f"{number:06}.parquet")
        path = f"{top}/{file.operator}/{epoch_dir(context.generation, epoch)}/{file.subtask}-{attempt}/{name}"
        copy(context, source, file.path, path, file.digest)
        return file, replace(file, path=path, new=True, attempt=attempt, snapshot=snapshot)

    with ThreadPoolExecutor(_TRANSFERS) as pool:
        return list(pool.map(one, enumerate(listing)))


def copy(
    context: RunContext, source: Storage, there: str, here: str, digest: str | None = None
) -> tuple[int, str, int | None]:
    """Copy an object of another storage; returns its size in bytes, its sha256, and its rows if it is Parquet.

    digest: DamageError if it has another one.
    """
    with source.fetched(there, context.settings.work_dir, digest=digest) as local:
        rows = pq.read_metadata(local).num_rows if there.endswith(".parquet") else None
        return *context.storage.put_file(local, here), rows
