"""A stage's operators driven epoch by epoch over backends in memory: as fast as the code itself, and nothing else in
between."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pyarrow as pa

from state_ops.backends.memory import MemoryBackend
from state_ops.ids import CheckpointId
from state_ops.moments import from_micros
from state_ops.rows.resident_table import Residence
from state_ops.schema.key_groups import group_range
from weir.definition import Epoch, Progress, Stage, Subtask
from weir.execution.in_process import routed
from weir.operators.shapes import shapes

START = datetime(2024, 5, 1, tzinfo=UTC)
MAX_PARALLELISM = 8


class Driven:
    """schema: of the input. State is kept in one backend per subtask."""

    def __init__(self, stage: Stage, schema: pa.Schema, parallelism: int = 1, backends: list | None = None) -> None:
        self.stage, self.schema, self.parallelism = stage, schema, parallelism
        self.shapes = shapes(stage, schema)
        self.backends = backends or [MemoryBackend() for _ in range(parallelism)]
        self.swept: list[str | None] = [None] * parallelism
        self.closed_upto: list[int | None] = [None] * parallelism
        self.id = 0

    def epoch(
        self,
        rows: list[dict] | pa.Table,
        *,
        now: int = 0,
        watermark: int | None = None,
        drain: bool = False,
        batch_rows: int = 1 << 30,
        pause: bool = False,
        directory: Path = Path("nowhere"),
    ) -> pl.DataFrame:
        """One epoch. now, watermark: microseconds; the watermark is the one known before the job. pause: others of its
        rows come with the next one. directory: for what does not fit into memory."""
        self.id += 1
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, self.schema)
        parts = routed(self.stage, table, self.parallelism, MAX_PARALLELISM, batch_rows)
        out = [self.shapes.outputs["main"].empty_table()]
        for subtask, batches in enumerate(parts):
            epoch = Epoch(CheckpointId(self.id), from_micros(now), None, subtask, self.parallelism)
            operator = self.stage.operator.build(
                Subtask(
                    self.stage,
                    self.shapes.handed_out,
                    epoch,
                    Progress(None, watermark, drain),
                    self.groups(subtask),
                    MAX_PARALLELISM,
                    self.backends[subtask],
                    self.swept[subtask],
                    resident=Residence(None, directory, 0, self.groups(subtask)),
                    checkpoint=epoch.id,
                )
            )
            for batch in batches:
                out += [produced for _, produced in operator.process(pa.Table.from_batches([batch]))]
            out += [produced for _, produced in (operator.pause() if pause else operator.barrier())]
            self.swept[subtask] = operator.swept
            self.closed_upto[subtask] = operator.closed_upto
        return pl.from_arrow(pa.concat_tables(out))  # type: ignore[return-value]

    def groups(self, subtask: int) -> range:
        return group_range(subtask, self.parallelism, MAX_PARALLELISM)
