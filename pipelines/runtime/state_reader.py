"""State at a completed checkpoint, read without Spark and without touching production.

The snapshot's files are fetched into a temporary directory, every digest checked, and opened there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.settings import Settings
from pipelines.runtime.definition import Pipeline, Stage
from pipelines.runtime.operators import open_windows
from pipelines.runtime.run import open_storage
from pipelines.runtime.stage_job import backend_options
from state_ops import evolution, snapshot
from state_ops.backends.base import Backend
from state_ops.backends.named import DEFAULT, named
from state_ops.checkpoint import Checkpoint, Snapshot, snapshots_of, to_micros
from state_ops.errors import ConfigurationError, DamageError, PrunedError, WeirError
from state_ops.key_groups import group_range, key_groups, subtask_of
from state_ops.kinds import Collection
from state_ops.registry import Registry
from state_ops.scans import scan_state
from state_ops.storage import Storage
from state_ops.ttl import Expiry
from state_ops.value_types import type_named


def get(pipeline: Pipeline, settings: Settings, uid: str, key: Sequence[str]) -> list[dict[str, Any]]:
    """The state of one key in the newest checkpoint: key columns, fields, lists and maps; what a TTL has forgotten is not in it.

    key: one text per key column, cast to its type. A stage's function has at most one row, a window one for each of its
    windows that are open. Raises ConfigurationError for a key that cannot be one.
    """
    while True:
        try:
            return _get(pipeline, settings, uid, key)
        except PrunedError:  # a newer checkpoint replaced it while it was read
            continue


def _get(pipeline: Pipeline, settings: Settings, uid: str, key: Sequence[str]) -> list[dict[str, Any]]:
    stage = pipeline.stage(uid)
    storage, registry = open_storage(pipeline, settings)
    head, figures = _head(pipeline, registry, stage)
    keys = _keys(figures)
    columns = _parsed(keys, key, uid)
    group = int(key_groups(columns, figures["max_parallelism"])[0])
    subtask = int(subtask_of(group, figures["parallelism"], figures["max_parallelism"]))
    rows = []
    with _retained(registry, head):
        found = _snapshots(registry, head, uid, [subtask])
        for table in _tables(storage, settings, stage, figures, found, range(group, group + 1), head.epoch_now):
            for name, column in zip(keys.names, columns, strict=True):
                table = table.filter(pc.equal(table.column(name), column[0]))
            rows += table.to_pylist()
    return rows


def scan(pipeline: Pipeline, settings: Settings, uid: str) -> Iterator[pa.Table]:
    """All state of one stage in the newest checkpoint, in tables of bounded size: as `get`.

    Raises PrunedError if the checkpoint is pruned before all of it was read.
    """
    stage = pipeline.stage(uid)
    storage, registry = open_storage(pipeline, settings)
    head, figures = _head(pipeline, registry, stage)
    with _retained(registry, head):
        for found in _snapshots(registry, head, uid, range(figures["parallelism"])):
            groups = group_range(found.subtask, figures["parallelism"], figures["max_parallelism"])
            yield from _tables(storage, settings, stage, figures, [found], groups, head.epoch_now)


@contextmanager
def _retained(registry: Registry, head: Checkpoint) -> Iterator[None]:
    """What looks like damage while a checkpoint is read may be that it was pruned meanwhile, by right."""
    try:
        yield
    except DamageError as error:
        if registry.holds(head):
            raise
        raise PrunedError(f"Checkpoint {head.id} was pruned while it was being read.", next="Look again.") from error


def _head(pipeline: Pipeline, registry: Registry, stage: Stage) -> tuple[Checkpoint, dict[str, Any]]:
    head = registry.head()
    figures = head.operators.get(stage.uid) if head else None
    if head is None or not figures or not figures["schema"]:
        raise WeirError(
            f"The stage {stage.uid} of {pipeline.name} has no state yet.",
            next=f"Run the pipeline first: weir run {pipeline.name}",
        )
    return head, figures


def _snapshots(registry: Registry, head: Checkpoint, uid: str, subtasks: Sequence[int]) -> list[Snapshot]:
    found = snapshots_of(registry.files(head), uid)
    return [found[subtask] for subtask in subtasks if subtask in found]


def _keys(figures: dict[str, Any]) -> pa.Schema:
    return pa.schema([(name, type_named(kind)) for name, kind in figures["keys"]])


def _parsed(keys: pa.Schema, key: Sequence[str], uid: str) -> list[pa.Array]:
    if len(key) != len(keys):
        raise ConfigurationError(
            f"The key of {uid} has {len(keys)} column{'s' if len(keys) > 1 else ''} ({', '.join(keys.names)}), not {len(key)}.",
            next="Give one --key for each, in this order.",
        )
    columns = []
    for field, text in zip(keys, key, strict=True):
        try:
            columns.append(pa.array([text]).cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ConfigurationError(
                f"{text!r} is no {field.type}, which the key column {field.name!r} of {uid} is.", next=str(error)
            ) from error
    return columns


def _tables(
    storage: Storage,
    settings: Settings,
    stage: Stage,
    figures: dict[str, Any],
    found: Sequence[Snapshot],
    groups: range,
    now: datetime,
) -> Iterator[pa.Table]:
    keys, schema = _keys(figures), evolution.from_record(figures)
    expiry = Expiry(stage.ttl, to_micros(now)) if stage.ttl else None
    for one in found:
        with opened(storage, settings, one, figures.get("backend", DEFAULT)) as backend:
            if stage.window is not None:
                yield from open_windows(stage, keys, schema, backend, groups)
            else:
                yield from scan_state(backend, schema, _collections(figures), keys, groups, expiry)


def _collections(figures: dict[str, Any]) -> tuple[Collection, ...]:
    return tuple(
        Collection(name, one["kind"], type_named(one["key"]) if one["key"] else None, evolution.from_record(one), None)
        for name, one in (figures.get("collections") or {}).items()
    )


@contextmanager
def opened(storage: Storage, settings: Settings, found: Snapshot, backend_name: str) -> Iterator[Backend]:
    """A snapshot, fetched and verified, open in the backend that wrote it for as long as the `with` block lasts."""
    with tempfile.TemporaryDirectory(prefix="weir-state-") as scratch:
        snapshot.fetch(storage, found, Path(scratch))
        backend = named(backend_name).open(Path(scratch), backend_options(settings))
        try:
            yield backend
        finally:
            backend.close()
