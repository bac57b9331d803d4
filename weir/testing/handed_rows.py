"""The rows of a sink's contract as the engine hands them over: as they are, or as files of a checkpoint."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow.parquet import PARTITION, WHERE, staged_writer
from state_ops.ids import CheckpointId, Generation, epoch_dir, new_attempt_id
from state_ops.records.checkpoint import EPOCH, PROMOTION, REWIND, Checkpoint
from state_ops.records.sink_link import SinkLink
from state_ops.records.snapshot_files import OUTPUT, StateFile
from state_ops.storage.paths import data_directory
from state_ops.storage.storage import Storage
from weir.connectors.staged_rows import StagedRows
from weir.definition.sink import Rows, Sink, SinkOpening

_NOW = datetime(2026, 1, 1, tzinfo=UTC)


def handed(sink: Sink, opening: SinkOpening, previous: int | None, checkpoint: int, rows: Rows) -> Rows:
    """Return the rows of an epoch for a sink."""
    if opening.storage is None:
        return rows
    return _staged(sink, opening, opening.storage, _row(sink, EPOCH, previous, checkpoint), rows)


def handed_back(
    sink: Sink, opening: SinkOpening, previous: int | None, checkpoint: int, to: int | None, rows: Rows
) -> Rows:
    """Return the rows of a rewind, which are none, or of a promotion."""
    if opening.storage is None:
        return rows
    kind = PROMOTION if rows.count else REWIND
    row = _row(sink, kind, previous, checkpoint, to=to, at=0, **({"branch": "b"} if rows.count else {}))
    return _staged(sink, opening, opening.storage, row, rows)


def _row(sink: Sink, kind: str, previous: int | None, checkpoint: int, **more: object) -> Checkpoint:
    before = CheckpointId(previous) if previous is not None else None
    link = SinkLink(CheckpointId(checkpoint), before)
    return Checkpoint(
        id=CheckpointId(checkpoint), parent_id=before, kind=kind, generation=Generation(1), commit_id=f"c{checkpoint}",
        triggered_at=_NOW, completed_at=_NOW, epoch_now=_NOW, trigger="manual", reason="", offsets={}, slice={},
        watermarks={}, operators={}, sinks={sink.name: link.updated(**more) if more else link}, inputs={}, ms={},
        totals={}, files=0, bytes_total=0, bytes_new=0,
    )  # fmt: skip


def _staged(sink: Sink, opening: SinkOpening, storage: Storage, checkpoint: Checkpoint, rows: Rows) -> StagedRows:
    directory = f"outputs/{sink.name}"
    if sink.capabilities.takes_files:
        directory = data_directory(sink.name, opening.app_id.removesuffix(f"/{sink.name}"), elsewhere=False)
    assert opening.scratch is not None, "a sink that is given files has a directory for them"
    files = []
    for part in _parts(sink, rows):
        attempt = new_attempt_id()
        path = f"{directory}/{epoch_dir(checkpoint.generation, checkpoint.id)}/0-{attempt}.parquet"
        with tempfile.TemporaryDirectory(dir=opening.scratch) as local:
            with staged_writer(Path(local) / "rows", part.schema) as writer:
                writer.write_table(part)
            size, digest = storage.put_file(Path(local) / "rows", path)
        number = part.num_rows
        files.append(
            StateFile("stage", 0, OUTPUT, "main", path, size, digest, True, attempt, sink=sink.name, rows=number)
        )
    return StagedRows(storage, files, opening.scratch, checkpoint)


def _parts(sink: Sink, rows: Rows) -> Iterator[pa.Table]:
    """Yield the rows of each file, whose footer says what the file is."""
    batches = list(rows.batches())
    if not batches:
        return
    table, can = pa.Table.from_batches(batches), sink.capabilities
    if can.replaces_where is not None:
        yield table.replace_schema_metadata({WHERE: can.replaces_where})
    elif not can.partition_by:
        yield table
    else:
        (column,) = can.partition_by
        for value in pc.unique(table.column(column)).to_pylist():
            part = table.filter(pc.equal(table.column(column), pa.scalar(value, table.schema.field(column).type)))
            yield part.replace_schema_metadata({PARTITION: json.dumps({column: str(value)})})
