"""Publishing committed rows into the sink tables of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pipelines.runtime.ownership.context import RunContext
from pipelines.runtime.sinks import delta, replace_where, restore_version
from state_ops.checkpoints.checkpoint import (
    OUTPUT,
    TAKES_BACK,
    Checkpoint,
    StateFile,
)
from state_ops.checkpoints.registry import Publication, Registry
from state_ops.storage.transfers import at_once


def publish_missing(context: RunContext, checkpoints: Sequence[Checkpoint]) -> list[Publication]:
    """Publish what some sink lacks, oldest checkpoint first; what is there already is a no-op."""
    published: list[Publication] = []
    for checkpoint in sorted(checkpoints, key=lambda row: row.id):
        sinks = [sink for sink, ids in checkpoint.sinks.items() if ids["id"] == checkpoint.id]
        staged: dict[str, list[StateFile]] = {sink: [] for sink in sinks if checkpoint.kind in TAKES_BACK}
        for file in context.registry.files(checkpoint):
            if file.kind == OUTPUT and file.sink:
                staged.setdefault(file.sink, []).append(file)
        publishing = [partial(_publish, context, checkpoint, sink, files) for sink, files in sorted(staged.items())]
        published += at_once(publishing)
    context.registry.record_publications(context.generation, published)
    return published


def _publish(context: RunContext, checkpoint: Checkpoint, sink: str, files: Sequence[StateFile]) -> Publication:
    before = checkpoint.sinks[sink]["before"]
    if checkpoint.kind in TAKES_BACK:
        context.tables.pop(sink, None)
        if "column" in checkpoint.sinks[sink]:
            scratch = context.settings.work_dir
            return replace_where.overwrite(context.storage, context.pipeline.app_id, sink, checkpoint, files, scratch)
        return restore_version.rewind(context.storage, context.pipeline.app_id, sink, checkpoint, files)
    return delta.publish(context.storage, context.pipeline.app_id, sink, checkpoint, before, files, context.tables)


def unpublished(registry: Registry, *, own: bool = False) -> list[Checkpoint]:
    """Retained checkpoints whose rows some sink lacks, as far as the registry knows: publishing may have been cut off.

    own: as the registry's reads.
    """
    published = {(row.checkpoint_id, row.sink) for row in registry.publications(own=own)}
    return [
        row
        for row in registry.checkpoints(own=own)
        if any((row.id, sink) not in published for sink, ids in row.sinks.items() if ids["id"] == row.id)
    ]
