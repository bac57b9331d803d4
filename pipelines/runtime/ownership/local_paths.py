"""Where a run keeps its files on the local disk, and how the backend that uses them is configured."""

from __future__ import annotations

import hashlib
from pathlib import Path

from configs.settings import Settings
from pipelines.runtime.definition import Pipeline
from pipelines.runtime.ownership.context import RunContext
from state_ops.backends.base import BackendOptions
from state_ops.snapshots.object_cache import ObjectCache
from state_ops.storage.storage import Storage


def backend_options(settings: Settings) -> BackendOptions:
    state = settings.state
    return BackendOptions(state.memory_mb, state.max_state_size_mb, dict(state.options), compression=state.compression)


def work_dir(context: RunContext) -> Path:
    """Where the pipeline's subtasks have their local files, on each host."""
    return local_directory(context.settings, context.pipeline, context.storage)


def local_directory(settings: Settings, pipeline: Pipeline, storage: Storage) -> Path:
    """Return the directory of `work_dir` for a pipeline that this process does not run."""
    where = hashlib.sha256(storage.uri.encode()).hexdigest()[:8]
    return settings.work_dir / f"{pipeline.name}-{where}"


def objects(settings: Settings) -> ObjectCache:
    """What each host keeps of objects that it has fetched, for all pipelines together."""
    return ObjectCache(settings.work_dir / "objects", settings.local.objects_mb << 20)
