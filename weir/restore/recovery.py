"""From a claim to a pipeline that may go on: what a dead predecessor left is finished, and what is built on is proven
first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from state_ops.coordination import publishing_refused
from state_ops.errors import DamageError, FencedError, HoldingError, InputError, WeirError, plainly
from state_ops.logs import Logger
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import CHANNEL, STATE
from weir.definition import Pipeline
from weir.execution.executor import Executor
from weir.ownership import hold_causes
from weir.ownership.context import RunContext
from weir.ownership.fencing import raise_if_fenced
from weir.ownership.ownership import Ownership, claimed, remove_leftovers
from weir.ownership.prune import prune
from weir.ownership.publish import publish_missing, unpublished
from weir.restore import restore
from weir.settings.configuration import Settings
from weir.sinks.places import check_places

log = Logger("weir.run")


@contextmanager
def owning(
    pipeline: Pipeline,
    settings: Settings,
    executor: Executor | None = None,
    run_id: str | None = None,
    *,
    epochs: bool = True,
    publishes: bool | None = None,
    back_to: int | None = None,
    claimed_by: Callable[[Ownership], None] | None = None,
) -> Iterator[Ownership]:
    """Own the pipeline for as long as the `with` block lasts; what a dead predecessor left is finished or removed
    first.

    Args:
        executor: What runs stages, by default Spark, which the first epoch starts.
        epochs: Whether some may run; commands that only name, prune or end need no table to be where the newest
            checkpoint says, as after `weir cancel --delete` none is.
        publishes: Whether a sink that does not take what is committed ends this. None: only if epochs may run. A
            command that names or edits checkpoints goes on without.
        back_to: The checkpoint that the caller takes the pipeline back to. What came after it is not published first.
        claimed_by: Is told of the claim before anything is recovered, which may take long.

    Raises:
        BusyError: A coordinator is alive.
        FencedError: A newer one took over.
    """
    with claimed(pipeline, settings, executor, run_id) as owner:
        if claimed_by is not None:
            claimed_by(owner)
        try:
            yield recovered(owner, epochs, epochs if publishes is None else publishes, back_to)
        except HoldingError as error:
            context = owner.context
            if epochs and not _next_run_rewinds(context, error) and not _next_run_is_past(context, error):
                raise_if_fenced(context, error)
                hold_causes.note(context.storage, context.head, context.generation, context.run_id, error)
            raise


def _next_run_rewinds(context: RunContext, error: HoldingError) -> bool:
    """Return whether an epoch has met damage that the next run takes back by itself."""
    return (
        isinstance(error, DamageError) and error.epoch is not None and context.settings.restore.on_invalid == "rewind"
    )


def _next_run_is_past(context: RunContext, error: HoldingError) -> bool:
    """Return whether an epoch has met bad input that the next run does not read again."""
    return isinstance(error, InputError) and error.epoch is not None and context.pipeline.at_most_once


def recovered(owner: Ownership, epochs: bool, publishes: bool, back_to: int | None = None) -> Ownership:
    """Finish what a dead predecessor began: publish what a sink lacks, or take it back; prove what is to be built on;
    prune; remove what nothing names any more. Returns the ownership, at the rewind where the newest checkpoint was
    damaged and the settings want that. Arguments as of `owning`."""
    context = owner.context
    if epochs:
        check_places(context.pipeline, context.storage)
    if context.pipeline.branch is not None and owner.head is None:
        raise WeirError(
            f"The branch {context.pipeline.title} is not whole: it has no checkpoint.",
            where=context.storage.uri,
            next=f"Its creation, or its end, was cut off. Ask for it again: weir fork {context.pipeline.name} --name "
            f"{context.pipeline.branch.name}; "
            f"or drop it: weir fork {context.pipeline.name} --drop {context.pipeline.branch.name}",
        )
    _publish_what_was_left(context, publishes, back_to)
    head = context.registry.head()
    for sink in context.pipeline.sinks if epochs else ():
        context.sinks.renew(sink.name, head)
        context.sinks.check_chain(sink.name, head)
        context.sinks.check_rows(sink.name, head)
    if epochs:
        context.sinks.check_delivered(head, context.early_id)
        newest = context.sinks.newest((sink.name for sink in context.pipeline.sinks), head)
        owner = replace(owner, last_id=max(owner.last_id, newest))
    if epochs and head is not None:
        try:
            _check_objects(context, head)
            restore.prepare(context, head)
        except DamageError as damage:
            if context.settings.restore.on_invalid != "rewind":
                raise
            head = restore.back_to_valid(owner, damage)
            owner = replace(owner, head=head, last_id=head.id)
    prune(context)
    remove_leftovers(context)
    return owner


def _publish_what_was_left(context: RunContext, publishes: bool, back_to: int | None) -> None:
    """Publish what a sink lacks. Rows that stay must be there before a rewind; rows that are taken back need not come
    first, and a sink that refuses them must not keep anybody from that."""
    lacking = [row for row in unpublished(context.registry) if back_to is None or row.id <= back_to]
    if not lacking:
        return
    log.info("publishing what the last run left", checkpoints=[row.id for row in lacking])
    try:
        publish_missing(context, lacking)
    except FencedError:
        raise
    except Exception as error:
        if publishes or back_to is not None:
            raise
        log.warning("what the last run left is not published", error=plainly(error))
    else:
        publishing_refused.clear(context.storage)


def _check_objects(context: RunContext, head: Checkpoint) -> None:
    """Raise DamageError unless the objects that the newest checkpoint names are there, by names and sizes.

    This comes before anything is built on the checkpoint or pruned.

    Local copies would hide that it is not: checkpoint after checkpoint would re-reference what is gone, and none that
    could be restored would be left. A full checkpoint re-references no state, so it may be built on local copies; rows
    that wait it names again.
    """
    full = context.settings.checkpoints.mode == "full"
    kinds = {CHANNEL} if full else {STATE, CHANNEL}
    named = [file for file in context.registry.files(head) if file.kind in kinds]
    restore.check_stored(context.pipeline.title, context.storage, head, named)
