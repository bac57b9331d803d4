"""The places of a run's files on the local disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

from state_ops.snapshots.object_cache import ObjectCache
from state_ops.storage.storage import Storage
from weir.definition import Pipeline
from weir.ownership.context import RunContext
from weir.settings.configuration import Settings


def work_dir(context: RunContext) -> Path:
    """Return the directory of the local files of the pipeline's subtasks, on each host."""
    return local_directory(context.settings, context.pipeline, context.storage)


def local_directory(settings: Settings, pipeline: Pipeline, storage: Storage) -> Path:
    """Return the directory of `work_dir` for a pipeline that this process does not run."""
    where = hashlib.sha256(storage.uri.encode()).hexdigest()[:8]
    return settings.work_dir / f"{pipeline.name}-{where}"


def objects(settings: Settings) -> ObjectCache:
    """Return the cache of fetched objects on this host, which all pipelines share."""
    return ObjectCache(settings.work_dir / "objects", settings.local.objects_mb << 20)
