"""Starting a pipeline from another one's savepoint: its state, positions and watermarks, in storage of its own.

    weir run flights_v2 --from flights:before-upgrade
    weir run flights --from /old/bucket/flights:last

Every object is copied, its digest checked on the way, so nothing is shared: either pipeline may be dropped afterwards.
The copy is committed as the first checkpoint of the new one, which then goes on as from any other. Its ids go on above
the savepoint's, since the state knows those of the epochs that made it. Tables start empty: what the old pipeline has
published stays its own."""

from __future__ import annotations

import json

from state_ops.checkpoints.reader_holds import ReaderHold
from state_ops.checkpoints.registry import Registry
from state_ops.coordination import lease
from state_ops.errors import ConfigurationError, PipelineError, WeirError
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.records.checkpoint import START, STARTED, Checkpoint
from state_ops.records.pins import SAVEPOINT
from state_ops.storage.storage import Storage
from weir.ownership.context import RunContext
from weir.ownership.derived_checkpoint import copied, first_of, lasting
from weir.ownership.ownership import Ownership
from weir.settings.configuration import Settings

ORIGIN = "coordinator/origin.json"

log = Logger("weir.run")


def start(owner: Ownership, settings: Settings, origin: str) -> Checkpoint:
    """Make the savepoint `origin` this pipeline's first checkpoint.

    A pipeline that was started from there goes on from where it is, so that the same command can be given again.

    Args:
        origin: PIPELINE:NAME or the URI of a pipeline's storage:NAME.

    Raises:
        PipelineError: The pipeline has a checkpoint of another origin.
        WeirError: There is no such savepoint.
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
    saved = _savepoint(registry, source, name)
    epoch, reason = owner.begin(saved), f"from {origin}, its checkpoint {saved.id}"
    # Before the commit, and trusted only if the registry says that it came to one: this may be cut off in between.
    context.storage.put_bytes(ORIGIN, json.dumps({"origin": origin, "checkpoint": int(epoch)}).encode())
    checkpoint = seed(owner, settings, source, registry, saved, epoch, reason)
    log.info("started", pipeline=context.pipeline.title, origin=origin, checkpoint=saved.id, bytes=checkpoint.bytes_new)
    return checkpoint


def seed(
    owner: Ownership,
    settings: Settings,
    source: Storage,
    registry: Registry,
    saved: Checkpoint,
    epoch: CheckpointId,
    reason: str,
) -> Checkpoint:
    """Commit a copy of a checkpoint of another storage as the first one here, under the id `epoch`.

    Args:
        registry: Of that storage.

    Raises:
        DamageError: For an object that is not what it was.
        PrunedError: The checkpoint is pruned meanwhile.
    """
    context = owner.context
    listing = registry.files(saved)
    with ReaderHold(
        source, registry, saved, f"{context.pipeline.title} starts from it", settings.lease.heartbeat_seconds
    ) as hold:
        moved = copied(context, source, lasting(listing, saved.operators), epoch)
        hold.check()
    return first_of(context, saved, moved, epoch, kind=START, what=reason, beginning={STARTED: int(epoch)})


def _began_from(context: RunContext, head: Checkpoint, origin: str) -> bool:
    """Return whether the pipeline was started from this savepoint, as it was named then.

    The note of an earlier release was written before the start was committed, and names no checkpoint. While the
    chain's first row is retained, that row tells. Later the sum of epochs may tell: it is carried over from the
    savepoint, and such a pipeline counted its own ids from 1.

    If nothing tells, the pipeline goes on and says so. A refusal would stop a pipeline that is started by this command
    each time.
    """
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
        return bool(head.totals.get(STARTED) == note["checkpoint"])
    first = context.registry.checkpoints()[0]
    if first.parent_id is None:
        return first.kind == START
    if head.totals["epochs"] <= head.id:
        log.warning(
            "nobody can tell any more whether the pipeline was started from there; it goes on from where it is",
            pipeline=context.pipeline.title,
            origin=origin,
            checkpoint=int(head.id),
            next="If its state is not that savepoint's, start a pipeline of another name from it. Else leave --from "
            "away.",
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


def _savepoint(registry: Registry, source: Storage, name: str) -> Checkpoint:
    pins = [pin for pin in registry.pins() if pin.kind == SAVEPOINT]
    pin = next((pin for pin in pins if pin.name == name), None)
    saved = next((row for row in registry.checkpoints() if pin is not None and row.commit_id == pin.commit_id), None)
    if pin is None or saved is None:
        raise WeirError(
            f"There is no savepoint {name!r}.",
            where=source.uri,
            next=f"Its savepoints: {', '.join(pin.name for pin in pins) or 'none'}.",
        )
    return saved
