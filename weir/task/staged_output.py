"""The rows that one attempt hands out, staged as Parquet files beside its snapshot, to be uploaded whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.arrow.parquet import PARTITION, WHERE, partition_json, staged_writer
from state_ops.errors import InputError, RefusedError
from state_ops.ids import epoch_dir
from state_ops.outputs import MAIN, PARTS, REST
from state_ops.records.snapshot_files import CHANNEL, OUTPUT, StagedFile
from state_ops.snapshots.attempt import Attempt
from state_ops.snapshots.stage_upload import channel_path
from weir.definition import POSITIONS, ROW
from weir.task.refusals import OutputTarget, RefusedRows, refusals

MOST_REFUSED = 10_000  # rows of an attempt of which it is told where they come from
_MAX_PARTITIONS = 500  # of which an attempt may write rows, each to a file of its own


class StagedOutput:
    """A Parquet file for each output, written locally.

    Args:
        attempt: Whose rows these are.
        targets: By output, the sink that gets it.
        channels: The outputs that other stages read. One that neither is among them nor has a sink is dropped.
        tracked: Rows of the main output say where they come from, which is staged apart from them.

    Attributes:
        handed_out: By output, how many rows have been written, those that were dropped among them.
    """

    def __init__(
        self, attempt: Attempt, targets: Mapping[str, OutputTarget], channels: Collection[str], tracked: bool
    ) -> None:
        self._attempt, self._targets = attempt, targets
        self._channels, self._tracked = channels, tracked
        self.handed_out: dict[str, int] = {}
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._rows: dict[str, int] = {}
        self._parts: dict[str, dict[str, tuple[str, int]]] = {}  # by output and partition: the local name, and rows
        self._rest: list[StagedFile] = []
        self._refused: RefusedRows | None = None  # the first one
        self._positions: dict[int, str] = {}  # of rows that are refused, with the reasons

    def write(self, output: str, table: pa.Table) -> None:
        """Stage rows."""
        if not table.num_rows:
            return
        positions: pa.ChunkedArray | None = None
        if output == MAIN and self._tracked:
            positions = table.column(ROW)
            self._write(POSITIONS, table.select([ROW]))
            table = table.drop_columns([ROW])
        self.handed_out[output] = self.handed_out.get(output, 0) + table.num_rows
        target = self._targets.get(output)
        if target is None and output not in self._channels:
            return
        if self._refuse(target, table, positions):
            return
        if target is not None and target.where is not None:
            table = table.replace_schema_metadata({WHERE: target.where})
        if target is not None and target.partition_by:
            self._write_parts(output, target, table)
            if output not in self._channels:
                return
        self._write(output, table)

    def _refuse(self, target: OutputTarget | None, table: pa.Table, positions: pa.ChunkedArray | None) -> bool:
        """Return whether rows are refused. Where they say where they come from, all of an attempt are gathered, for
        `check`. Else, and from one that says nothing on, raises RefusedError."""
        try:
            for refusal in refusals(target, table):
                self._refused = self._refused or refusal
                sources = pa.nulls(1) if positions is None else positions.take(pa.array(refusal.rows))
                if sources.null_count or len(self._positions) > MOST_REFUSED:
                    self._positions.clear()
                    raise self._error(refusal)
                self._positions.update((source.as_py(), refusal.what) for source in sources)
        except InputError as error:
            error.where = error.where or self._where
            raise
        return self._refused is not None

    def check(self) -> None:
        """Raise RefusedError if rows were refused."""
        if self._refused is not None:
            raise self._error(self._refused)

    def _error(self, refusal: RefusedRows) -> RefusedError:
        error = RefusedError(refusal.what, where=self._where, next=refusal.next)
        error.positions = dict(self._positions)
        return error

    @property
    def _where(self) -> str:
        return f"stage {self._attempt.operator}, epoch {self._attempt.epoch}"

    def _write_parts(self, output: str, target: OutputTarget, table: pa.Table) -> None:
        """Append each row to its partition's file. Rows of one partition keep their order."""
        parts = self._parts.setdefault(output, {})
        values = pl.from_arrow(table.select(target.partition_by))
        assert isinstance(values, pl.DataFrame)
        grouped = values.with_row_index(ROW).group_by(target.partition_by, maintain_order=True).agg(ROW)
        for group in grouped.iter_rows(named=True):
            rows = table.take(pa.array(group.pop(ROW)))
            partition = partition_json(group)
            name, before = parts.get(partition, (f"{output}{PARTS}-{len(parts):06}", 0))
            if not before:
                self._check_number(target, parts)
                schema = rows.schema.with_metadata({**(rows.schema.metadata or {}), PARTITION: partition})
                self._writers[name] = staged_writer(self._local(name), schema)
            self._writers[name].write_table(rows)
            parts[partition] = (name, before + rows.num_rows)

    def _check_number(self, target: OutputTarget, parts: Mapping[str, object]) -> None:
        if len(parts) >= _MAX_PARTITIONS:
            raise InputError(
                f"Rows for the table {target.sink} have more than {_MAX_PARTITIONS} partitions in one subtask's epoch.",
                where=self._where,
                next=f"Partition by something coarser than {', '.join(target.partition_by)}; or let fewer rows make an "
                "epoch (epoch.max_rows).",
            )

    def _write(self, output: str, table: pa.Table) -> None:
        if output not in self._writers:
            self._writers[output] = staged_writer(self._local(output), table.schema)
        self._writers[output].write_table(table)
        self._rows[output] = self._rows.get(output, 0) + table.num_rows

    def leave(self, tables: Iterable[pa.Table]) -> bool:
        """Stage rows of the input that have not been applied, a file for each batch; returns whether there were any."""
        before = len(self._rest)
        for table in tables:
            name = f"{len(self._rest):06}"
            local = self._local(f"{REST}-{name}")
            with staged_writer(local, table.schema) as writer:
                writer.write_table(table)
            path = f"{self._place(f'channels/{self._attempt.operator}')}/{name}.parquet"
            self._rest.append(StagedFile(CHANNEL, REST, str(local), path, local.stat().st_size, None, table.num_rows))
        return len(self._rest) > before

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def files(self) -> tuple[StagedFile, ...]:
        parts = [
            self._part(output, number, name, rows)
            for output, parts in sorted(self._parts.items())
            for number, (name, rows) in enumerate(parts.values())
        ]
        return (*(self._file(output) for output in sorted(self._rows)), *parts, *self._rest)

    def _part(self, output: str, number: int, name: str, rows: int) -> StagedFile:
        target, local = self._targets[output], self._local(name)
        path = f"{self._place(target.directory)}/{number:06}.parquet"
        return StagedFile(OUTPUT, f"{output}{PARTS}", str(local), path, local.stat().st_size, target.sink, rows)

    def _file(self, output: str) -> StagedFile:
        target = self._targets.get(output)
        if target is not None and target.partition_by:  # its rows are in files by partition; this one is for stages
            target = None
        path = channel_path(self._attempt, output) if target is None else f"{self._place(target.directory)}.parquet"
        kind, sink = (OUTPUT, target.sink) if target is not None else (CHANNEL, None)
        local = self._local(output)
        return StagedFile(kind, output, str(local), path, local.stat().st_size, sink, self._rows[output])

    def _place(self, directory: str) -> str:
        attempt = self._attempt
        return f"{directory}/{epoch_dir(attempt.generation, attempt.epoch)}/{attempt.subtask}-{attempt.id}"

    def _local(self, output: str) -> Path:
        return self._attempt.directory / f"{output}.parquet"
