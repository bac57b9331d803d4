"""What the tests see of a pipeline from outside: its tables and its state at a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from state_ops.arrow.types import type_named
from state_ops.backends import composite
from state_ops.backends.base import BackendOptions
from state_ops.backends.loader import named
from state_ops.checkpoints.registry import Registry
from state_ops.keyed.keyed_state import scan_values
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.snapshot_files import snapshots_of
from state_ops.schema import evolution
from state_ops.schema.key_groups import group_range
from state_ops.snapshots import snapshot
from state_ops.storage.storage import Storage
from weir.definition import Stage


def table_at(storage: Storage, table: str, version: int | None = None) -> pl.DataFrame:
    """The rows of a sink's Delta table, read file by file as its log says."""
    handle = DeltaTable(storage.full(f"tables/{table}"), version=version)
    paths = [action["path"] for action in pa.table(handle.get_add_actions()).to_pylist()]
    empty = pa.schema(handle.schema().to_arrow()).empty_table()
    parts = [pq.ParquetFile(storage.full(f"tables/{table}/{path}")).read() for path in paths]
    if not parts:
        return pl.from_arrow(empty)  # type: ignore[return-value]
    return pl.from_arrow(pa.concat_tables(parts))  # type: ignore[return-value]


def without(stats: OperatorStats, name: str) -> OperatorStats:
    """What a checkpoint of a release records that did not know this field."""
    return OperatorStats.from_json({other: value for other, value in stats.to_json().items() if other != name})


def keys_of(storage: Storage, registry: Registry, checkpoint: Checkpoint, uid: str) -> Iterator[tuple[int, bytes]]:
    """Subtask and raw key of every entry that a stage's snapshots hold, whether they are the subtask's or not."""
    kind = named(checkpoint.operators[uid].backend)
    for subtask, taken in snapshots_of(registry.files(checkpoint), uid).items():
        with tempfile.TemporaryDirectory() as scratch:
            snapshot.fetch(storage, taken, Path(scratch))
            backend = composite.opened(kind, Path(scratch), BackendOptions(memory_mb=16))
            try:
                yield from ((subtask, key) for key, _ in backend.scan(b"", b"\xff" * 9))
            finally:
                backend.close()


def state_at(storage: Storage, registry: Registry, checkpoint: Checkpoint, stage: Stage) -> dict[tuple, dict[str, Any]]:
    """A stage's state in a checkpoint by key: fields by name, or of a window by (key, window_start) its aggregates so
    far."""
    stats = checkpoint.operators[stage.uid]
    keys = pa.schema([(name, type_named(kind)) for name, kind in stats.keys])
    schema = evolution.from_record(stats.schema_history)
    rows: dict[tuple, dict[str, Any]] = {}
    for subtask, taken in snapshots_of(registry.files(checkpoint), stage.uid).items():
        groups = group_range(subtask, stats.parallelism, stats.max_parallelism)
        with tempfile.TemporaryDirectory() as scratch:
            snapshot.fetch(storage, taken, Path(scratch))
            kind = named(stats.backend)
            backend = composite.opened(kind, Path(scratch), BackendOptions(memory_mb=16))
            try:
                if not stage.operator.closes:
                    tables = list(scan_values(backend, schema, keys, groups))
                else:
                    tables = list(stage.operator.opened(stage, keys, schema, backend, groups))
            finally:
                backend.close()
        for row in (row for table in tables for row in table.to_pylist()):
            key = tuple(row.pop(name) for name in keys.names)
            if stage.operator.closes:
                key = (*key, row.pop("window_start"))
                row.pop("window_end")
            assert key not in rows, f"{key} is in two places"
            rows[key] = row
    return rows
