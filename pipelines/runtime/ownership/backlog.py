"""What waits to be read or applied: the source files that have arrived and the rows in front of stages."""

from __future__ import annotations

from collections.abc import Mapping

from configs.settings import Settings
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.ownership.pipeline_storage import readers
from pipelines.runtime.sources.files import FilesReader
from pipelines.runtime.sources.positions import Arrivals
from state_ops.checkpoints.checkpoint import Checkpoint


def unapplied(head: Checkpoint | None) -> Mapping[str, int]:
    """Rows that stages have not applied yet (unaligned checkpoints), by stage; without those that have applied all."""
    return {uid: stats.rows_waiting for uid, stats in (head.operators if head else {}).items() if stats.waiting}


def arrivals(pipeline: Pipeline, settings: Settings, head: Checkpoint | None) -> Mapping[str, Arrivals]:
    """What has arrived beside the newest checkpoint, by source; one listing each."""
    offsets = head.offsets if head else {}
    return {name: reader.look(offsets.get(name)) for name, reader in readers(pipeline, settings).items()}


def lag(pipeline: Pipeline, settings: Settings, head: Checkpoint | None) -> Mapping[str, int]:
    """Files that wait, by source."""
    return {name: len(arrived.fresh) for name, arrived in arrivals(pipeline, settings, head).items()}


def missing(sources: Mapping[str, FilesReader], waiting: Mapping[str, int]) -> dict[str, str]:
    """The landing directories that do not exist, by source. waiting: files by source, of which a directory that is
    there alone has any."""
    return {
        name: reader.directory
        for name, reader in sources.items()
        if not waiting.get(name) and not reader.landing.exists()
    }
