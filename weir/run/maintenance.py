"""The tasks of a generation's owner beside epochs: name checkpoints, drop names, prune, end a pipeline's checkpoints.

A process that wants one of these asks the running coordinator, which carries it out at its next barrier (`carry_out`),
or owns the pipeline for a moment where none lives (`asked`). No other process deletes anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from state_ops.checkpoints import retention
from state_ops.checkpoints.reader_holds import HoldWatcher
from state_ops.coordination import lease, requests
from state_ops.coordination.requests import FORK, NAME, REPAIR, UNFORK, UNNAME, UPKEEP, Request
from state_ops.errors import PrunedError, WeirError
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.fates import Fate, ObjectFate
from state_ops.records.pins import BRANCH, SAVEPOINT, Pin
from weir.definition import Pipeline
from weir.ownership.context import RunContext
from weir.ownership.ownership import remove_leftovers
from weir.ownership.pipeline_storage import open_storage
from weir.ownership.prune import kept_for_backfills, needed, prune
from weir.ownership.savepoints import check_free, pin_branch, save, unname
from weir.restore import restore
from weir.restore import rewind as rewinds
from weir.restore import seek as seeks
from weir.restore.recovery import owning
from weir.run import fsck
from weir.settings.configuration import Settings

log = Logger("weir.upkeep")
_LOOKS = 5


def carry_out(context: RunContext, request: Request) -> None:
    """Carry out one request that needs no epoch. An error ends the run, as it would beside an epoch; the next run is
    not asked again."""
    try:
        if request.kind == UNNAME:
            unname(context, SAVEPOINT, request.savepoint)
        elif request.kind == FORK:
            pin_branch(context, request)
        elif request.kind == UNFORK:
            unname(context, BRANCH, request.savepoint)
        elif request.kind == UPKEEP:
            prune(context)
            remove_leftovers(context)
        elif request.kind == REPAIR:
            fsck.repair(context)
        elif request.kind == requests.UNREADABLE:
            log.warning("a request that cannot be read is dropped", path=request.name, error=request.reason)
        else:
            log.warning("a request of a kind that this Weir does not know is dropped", kind=request.kind)
    finally:
        requests.take(context.storage, request)


def end(context: RunContext) -> None:
    """Delete every checkpoint that has no name, as `checkpoints.on_cancel: delete` wants it. Tables stay as they
    are."""
    dropped = prune(context, keep=0)
    log.info("checkpoints deleted", pipeline=context.pipeline.title, checkpoints=len(dropped))


def asked(
    pipeline: Pipeline, settings: Settings, request: Request, alone: Callable[[RunContext], Any], patience: float
) -> bool:
    """Have the running coordinator do something, asked by `request`; if none runs, do it here with `alone`.

    Returns whether the coordinator did it.

    Args:
        patience: Seconds to wait for its next barrier.

    Raises:
        WeirError: It ended or did not come to it in time; the request is withdrawn then.
    """
    storage, _ = open_storage(pipeline, settings)
    if not lease.watch(storage):
        with owning(pipeline, settings, epochs=False) as owner:
            alone(owner.context)
        return False
    sent = requests.send(storage, request)
    deadline = time.monotonic() + patience
    while storage.read_bytes(sent.name) is not None:
        if time.monotonic() > deadline or not lease.watch(storage):
            requests.take(storage, sent)
            raise WeirError(
                f"The coordinator of {pipeline.title} "
                + (
                    "did not come to a barrier in time." if time.monotonic() > deadline else "ended before its barrier."
                ),
                where=storage.uri,
                next=f"`weir status {pipeline.title}` shows what it does. Then ask again.",
            )
        time.sleep(settings.run.poll_seconds)
    return True


def savepoint(pipeline: Pipeline, settings: Settings, name: str, reason: str, patience: float) -> Pin:
    """Take a savepoint: of the next epoch where a coordinator runs, else of the newest checkpoint."""
    check_free(pipeline, settings, name)
    _, registry = open_storage(pipeline, settings)

    def alone(context: RunContext) -> None:
        head = context.registry.head()
        if head is None:
            raise WeirError(
                f"{pipeline.title} has no checkpoint that could be named.",
                next=f"Run it first: weir run {pipeline.title}",
            )
        save(context, head, name, reason)

    asked(pipeline, settings, Request(NAME, trigger="savepoint", reason=reason, savepoint=name), alone, patience)
    pin = registry.pinned(SAVEPOINT, name)
    if pin is None:
        raise WeirError(
            f"The coordinator of {pipeline.title} took no savepoint {name!r}.",
            next="Its epoch was declined: its log, and `weir status`, say why. Then ask again.",
        )
    return pin


def drop_savepoint(pipeline: Pipeline, settings: Settings, name: str, patience: float) -> Pin:
    """Take a savepoint's name away; what only it kept is pruned. Raises WeirError when there is none of that name."""
    _, registry = open_storage(pipeline, settings)
    pin = registry.pinned(SAVEPOINT, name)
    if pin is None:
        names = ", ".join(pin.name for pin in registry.pins() if pin.kind == SAVEPOINT) or "none"
        raise WeirError(f"{pipeline.title} has no savepoint {name!r}.", next=f"Its savepoints: {names}.")
    asked(
        pipeline,
        settings,
        Request(UNNAME, savepoint=name),
        lambda context: unname(context, SAVEPOINT, name),
        patience,
    )
    if pin in registry.pins():
        raise WeirError(
            f"The coordinator of {pipeline.title} did not drop the savepoint {name!r}.",
            next="It failed over that: its log, and `weir status`, say why. Then ask again.",
        )
    return pin


def rewind(
    pipeline: Pipeline, settings: Settings, to: int, *, accepted: Collection[str] = (), reason: str = ""
) -> Checkpoint:
    """Take state, source positions and sink tables back to checkpoint `to`, or for 0 to before the first one; returns
    the rewind's own checkpoint, which the next run continues. The newest checkpoint is returned as it is if it is the
    one to go back to.

    Args:
        accepted: The obstacles of its plan that somebody was shown and does it in spite of.

    Raises:
        BusyError: A coordinator is alive.
        DamageError: An object of that checkpoint is missing or altered.
        WeirError: There is no such checkpoint or there are other obstacles; nothing is changed then.
    """
    with owning(pipeline, settings, epochs=False, back_to=to) as owner:
        context = owner.context
        target, head = rewinds.goal(pipeline, settings, context.registry, to), context.registry.head()
        assert head is not None, "the target is there"
        decided = rewinds.planned(pipeline, settings, context.sinks, context.storage, context.registry, head, target)
        if not decided.takes_back:
            return head
        rewinds.check(decided, pipeline.title, accepted)
        restore.verify(context, target)
        return rewinds.carry_out(owner, decided, reason)


def seek(
    pipeline: Pipeline, settings: Settings, source: str, to: str | datetime | Mapping[str, Any], reason: str = ""
) -> Checkpoint:
    """Let a source be read on from somewhere else; returns the checkpoint that says so, which the next run continues.

    Raises BusyError when a coordinator is alive, and what `seek.plan` raises."""
    seeks.plan(pipeline, settings, source, to)
    with owning(pipeline, settings, epochs=False) as owner:
        return seeks.carry_out(owner, source, to, reason)


def explain(pipeline: Pipeline, settings: Settings) -> tuple[list[Fate], list[ObjectFate]]:
    """Return the fate of each checkpoint and object if pruned now, with the reason. It only reads."""
    for _ in range(_LOOKS):
        with suppress(PrunedError):  # a coordinator that lives prunes while we read
            return _explained(pipeline, settings)
    return _explained(pipeline, settings)


def _explained(pipeline: Pipeline, settings: Settings) -> tuple[list[Fate], list[ObjectFate]]:
    storage, registry = open_storage(pipeline, settings)
    completed = registry.checkpoints()
    listings = {row.id: registry.files(row) for row in completed}
    also = needed(registry, HoldWatcher().live(storage))
    for id, reason in kept_for_backfills(pipeline, settings, completed).items():
        also.setdefault(id, []).append(reason)
    return retention.explain(completed, listings, settings.checkpoints.num_retained, registry.pins(), also)
