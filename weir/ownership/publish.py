"""Publishing committed rows into the sinks of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from state_ops.checkpoints.registry import Registry
from state_ops.coordination import publishing_refused
from state_ops.errors import DamageError, FencedError, PipelineError, TransientError, WeirError
from state_ops.ids import CheckpointId
from state_ops.logs import Logger
from state_ops.records.checkpoint import TAKES_BACK, Checkpoint, began
from state_ops.records.publications import Publication
from state_ops.records.publications import unpublished as by_sink
from state_ops.records.snapshot_files import OUTPUT, StateFile
from state_ops.storage.transfers import at_once
from weir.connectors.delta.table_commit import publication
from weir.connectors.staged_rows import StagedRows
from weir.definition.sink import Published, Publisher, TakingBack, Versioned, no_rows
from weir.ownership.context import RunContext
from weir.sinks.open_sinks import marker_of

log = Logger("weir.sink")


def publish_missing(context: RunContext, checkpoints: Sequence[Checkpoint]) -> list[Publication]:
    """Publish what some sink lacks, oldest checkpoint first; what is there already is a no-op.

    A sink that refuses a checkpoint gets none of the later ones. The other sinks get theirs, which is recorded before
    the refusal is raised, so that nobody who looks takes their rows for missing.

    At most once: what the registry says was published is not published again, whatever became of it.
    """
    once: list[Publication] = []
    published: list[Publication] = []
    refused: dict[str, tuple[Checkpoint, Exception]] = {}
    for checkpoint in sorted(checkpoints, key=lambda row: row.id):
        # Taking back twice changes nothing, and input must not be read again before tables are without its rows.
        if context.pipeline.at_most_once and checkpoint.kind not in TAKES_BACK:
            once += _publish_once(context, checkpoint)
            continue
        sinks = [sink for sink, link in checkpoint.sinks.items() if link.id == checkpoint.id]
        staged: dict[str, list[StateFile]] = {sink: [] for sink in sinks if checkpoint.kind in TAKES_BACK}
        delivered = context.early.pop(checkpoint.id, None)
        if delivered is not None:
            published += delivered
            continue
        staged = _staged(context.registry.files(checkpoint), staged)
        done, failed = _tried(context, checkpoint, {sink: staged[sink] for sink in staged.keys() - refused.keys()})
        published += done
        refused |= {sink: (checkpoint, error) for sink, error in failed.items()}
    context.registry.record_publications(context.generation, published)
    if refused:
        publishing_refused.note(context.storage, {sink: (row.id, error) for sink, (row, error) in refused.items()})
    for sink, (checkpoint, error) in sorted(refused.items()):
        raise _with_a_way_on(context, checkpoint, sink, error)
    return [*once, *published]


def _tried(
    context: RunContext, checkpoint: Checkpoint, staged: dict[str, list[StateFile]]
) -> tuple[list[Publication], dict[str, Exception]]:
    """Publish a checkpoint to each sink; returns what was done, and by sink why not.

    Raises FencedError: another process owns the pipeline."""

    def one(sink: str) -> Publication | Exception:
        try:
            return _publish_all(context, checkpoint, {sink: staged[sink]})[0]
        except Exception as error:
            return error

    outcomes = dict(zip(sorted(staged), at_once([partial(one, sink) for sink in sorted(staged)]), strict=True))
    failed = {sink: outcome for sink, outcome in outcomes.items() if isinstance(outcome, Exception)}
    for error in failed.values():
        if isinstance(error, FencedError):
            raise error
    return [outcome for outcome in outcomes.values() if not isinstance(outcome, Exception)], failed


def _with_a_way_on(context: RunContext, checkpoint: Checkpoint, sink: str, error: Exception) -> Exception:
    """Return the error of a sink that has not got a committed checkpoint's rows, with what has become of them, and how
    to take that checkpoint back where the sink does not take them as they are. Other errors pass by themselves, or are
    of a place that has to be put back first."""
    if not isinstance(error, WeirError):
        return error
    title, name = context.pipeline.title, f"Checkpoint {checkpoint.id} is committed and not published in {sink}"
    if isinstance(error, TransientError | DamageError) or checkpoint.kind in TAKES_BACK:
        error.next = f"{error.next or ''} {name}: nothing is lost, and the next run tries again.".strip()
        return error
    back = (
        ""
        if began(checkpoint) and not checkpoint.parent_id
        else f": weir rewind {title} --to {checkpoint.parent_id or 0}"
    )
    way = f"{name}: no row is lost, and the next run tries again. Or correct the stage and take it back{back} "
    error.next = f"{error.next or ''} {way}(docs/playbooks/rows-refused.md).".strip()
    return error


def _publish_once(context: RunContext, checkpoint: Checkpoint) -> list[Publication]:
    """Record first that a checkpoint's rows are published, then hand them to the sinks: no sink gets them twice, nor
    what it got before a commit of the time when the pipeline delivered at least once."""
    recorded = {(row.checkpoint_id, row.sink) for row in context.registry.publications(as_owner=True)}
    staged = _staged(context.registry.files(checkpoint), {})
    lacking = {sink: files for sink, files in staged.items() if (checkpoint.id, sink) not in recorded}
    now = datetime.now(UTC)
    context.registry.record_publications(
        context.generation,
        [
            Publication(checkpoint.id, sink, None, len(files), sum(file.rows or 0 for file in files), now, 0.0)
            for sink, files in lacking.items()
        ],
    )
    waiting = {sink: files for sink, files in lacking.items() if not checkpoint.sinks[sink].delivered}
    try:
        return _publish_all(context, checkpoint, waiting)
    except Exception:
        log.warning("rows are lost that a sink did not take", checkpoint=int(checkpoint.id), sinks=sorted(waiting))
        raise


def deliver(context: RunContext, checkpoint: Checkpoint, files: Sequence[StateFile]) -> None:
    """Publish rows of an epoch before its commit, where they are delivered at least once.

    No id is ever used twice, and the lease says that this one is taken before the pipeline is proven to be ours. So a
    process that is not its owner any more delivers what nobody else will have under this id.
    """
    context.registry.prove(context.generation)
    context.early.setdefault(checkpoint.id, []).extend(_publish_all(context, checkpoint, _staged(files, {})))


def _staged(files: Sequence[StateFile], staged: dict[str, list[StateFile]]) -> dict[str, list[StateFile]]:
    """Return by sink the files of its rows."""
    for file in files:
        if file.kind == OUTPUT and file.sink:
            staged.setdefault(file.sink, []).append(file)
    return staged


def _publish_all(context: RunContext, checkpoint: Checkpoint, staged: dict[str, list[StateFile]]) -> list[Publication]:
    follows = context.pipeline.early or context.pipeline.at_most_once
    publish = _publish_behind if follows else _publish
    return at_once([partial(publish, context, checkpoint, sink, files) for sink, files in sorted(staged.items())])


def _publish_behind(context: RunContext, checkpoint: Checkpoint, sink: str, files: Sequence[StateFile]) -> Publication:
    """Publish behind what a sink has. A process that was taken for dead may publish an epoch of its own meanwhile,
    which is no damage."""
    while True:
        following = _behind_what_is_there(context, checkpoint, sink)
        try:
            return _publish(context, following, sink, files)
        except DamageError:
            if _behind_what_is_there(context, checkpoint, sink) == following:
                raise


def _behind_what_is_there(context: RunContext, checkpoint: Checkpoint, sink: str) -> Checkpoint:
    """Return a checkpoint that follows what a sink has: perhaps an epoch that failed after its rows were delivered; at
    most once, perhaps none of the epochs before, whose rows never came."""
    before = checkpoint.sinks[sink].before
    marker = context.sinks.marker(sink, checkpoint, before)
    lacks = context.pipeline.at_most_once and (marker or 0) < (before or 0)
    if lacks or (before or 0) < (marker or 0) < checkpoint.id:
        link = checkpoint.sinks[sink].updated(before=marker)
        return replace(checkpoint, sinks={**checkpoint.sinks, sink: link})
    return checkpoint


def _publish(context: RunContext, checkpoint: Checkpoint, sink: str, files: Sequence[StateFile]) -> Publication:
    """Publish to one sink, by its publisher. A rewind or a promotion moves its marker alone, where rows stay in it."""
    started, link = time.perf_counter(), checkpoint.sinks[sink]
    publisher, before, footers = context.sinks.publisher_of(sink, checkpoint), link.before, context.sinks.footers
    rows = StagedRows(context.storage, files, context.settings.work_dir, checkpoint, footers)
    if checkpoint.kind not in TAKES_BACK:
        published = publisher.publish(before, checkpoint.id, rows)
    elif link.column is not None and isinstance(publisher, Versioned):
        published = publisher.replace_range(rows)
    else:

        def move(marker: int | None) -> Published:
            if not link.takes_back and link.kind is not None:
                return publisher.publish(marker, checkpoint.id, no_rows())
            if isinstance(publisher, TakingBack):
                return publisher.take_back(marker, checkpoint.id, link.to, rows)
            raise PipelineError(
                f"Checkpoint {checkpoint.id} takes rows back from the sink {sink}, which its code cannot any more.",
                next="Put back the code with which that was decided, until it is done.",
            )

        chain = _chain(context.registry, sink)
        # A system that lacks what was published last was restored, perhaps to before its first rows.
        restored = before in link.lacks and not isinstance(publisher, Versioned)
        published = _move_marker(publisher, move, before, chain | {None} if restored else chain)
    for file in files:
        footers.pop(file.path, None)
    touched = published.files if published.files is not None else len(files)
    return publication(checkpoint, sink, published.version, touched, published.rows, started)


def _move_marker(
    publisher: Publisher, move: Callable[[int | None], Published], before: int | None, chain: frozenset[int | None]
) -> Published:
    """Move a sink's marker to a checkpoint that abandons others, so that none of these can be published any more.

    A process that has not heard of it may publish one of them at any moment, so each of their markers counts as the one
    that was expected.

    Args:
        move: Does it, from an expected marker.
    """
    while True:
        marker = marker_of(publisher, before)
        try:
            return move(marker if marker in chain else before)
        except DamageError:
            if marker_of(publisher, before) == marker:  # nobody was faster: it is not where any of them had left it
                raise


def _chain(registry: Registry, sink: str) -> frozenset[int | None]:
    """Return the markers that a sink may have, as far as the retained checkpoints tell: of all that were ever to be
    published in it, and none at all where nothing has been published yet."""
    links = [row.sinks[sink] for row in registry.checkpoints(as_owner=True) if sink in row.sinks]
    is_empty = all(row.sink != sink for row in registry.publications(as_owner=True))
    ids = frozenset(id for link in links for id in (link.id, link.before))
    return ids if is_empty else ids - {None}


def lacking_by_sink(registry: Registry, *, as_owner: bool = False) -> dict[str, tuple[CheckpointId, ...]]:
    """Return by sink the retained checkpoints whose rows it lacks, as far as the registry knows.

    Args:
        as_owner: Read the registry as the owner of the pipeline, without asking storage for a newer version.
    """
    publications = registry.publications(as_owner=as_owner)  # before the checkpoints, which come first
    return by_sink(registry.checkpoints(as_owner=as_owner), publications)


def unpublished(registry: Registry, *, as_owner: bool = False) -> list[Checkpoint]:
    """Retained checkpoints whose rows some sink lacks, as far as the registry knows: publishing may have been cut off.

    Args:
        as_owner: As for `lacking_by_sink`.
    """
    ids = {id for ids in lacking_by_sink(registry, as_owner=as_owner).values() for id in ids}
    return [row for row in registry.checkpoints(as_owner=as_owner) if row.id in ids]
