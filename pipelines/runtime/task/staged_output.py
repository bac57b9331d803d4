"""The rows that one attempt hands out, staged as Parquet files beside its snapshot, to be uploaded whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.runtime.connectors.delta_sink import CHANGE_TYPE, CHANGES
from pipelines.runtime.definition import ROW
from state_ops.arrow.parquet import staged_writer
from state_ops.checkpoints.checkpoint import CHANNEL, OUTPUT, StagedFile
from state_ops.errors import InputError
from state_ops.ids import epoch_dir
from state_ops.snapshots.attempt import Attempt
from state_ops.snapshots.stage_upload import MAIN, REST

POSITIONS = "positions"  # output: of each row that a tracked stage hands out, where it comes from


@dataclass(frozen=True, slots=True)
class Target:
    """Where an output goes.

    Attributes:
        sink: The sink's name.
        directory: In which its rows are staged, in the pipeline's storage.
        key: Columns that are null in no row; none: any may be.
    """

    sink: str
    directory: str
    key: tuple[str, ...] = ()


class StagedOutput:
    """A Parquet file for each output, written locally.

    Args:
        attempt: Whose rows these are.
        targets: By output, the sink that gets it.
        channel: An output without a sink is staged for the stages that read it, else dropped.
        tracked: Rows say where they come from, which is staged apart from them.
    """

    def __init__(self, attempt: Attempt, targets: Mapping[str, Target], channel: bool, tracked: bool) -> None:
        self._attempt, self._targets = attempt, targets
        self._channel, self._tracked = channel, tracked
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._rows: dict[str, int] = {}
        self._rest: list[StagedFile] = []

    def write(self, output: str, table: pa.Table) -> int:
        """Stage rows; returns how many count as the stage's output (side outputs do not)."""
        if not table.num_rows:
            return 0
        if output == MAIN and self._tracked:
            self._write(POSITIONS, table.select([ROW]))
            table = table.drop_columns([ROW])
        counted = table.num_rows if output == MAIN else 0
        if output not in self._targets and not (output == MAIN and self._channel):
            return counted
        if output in self._targets and (key := self._targets[output].key):
            attempt = self._attempt
            _check_keys(self._targets[output].sink, key, table, f"stage {attempt.operator}, epoch {attempt.epoch}")
        self._write(output, table)
        return counted

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
        return (*(self._file(output) for output in sorted(self._writers)), *self._rest)

    def _file(self, output: str) -> StagedFile:
        target = self._targets.get(output)
        place = self._place(target.directory if target is not None else f"channels/{self._attempt.operator}")
        path = f"{place}/{POSITIONS}.parquet" if output == POSITIONS else f"{place}.parquet"
        kind, sink = (OUTPUT, target.sink) if target is not None else (CHANNEL, None)
        local = self._local(output)
        return StagedFile(kind, output, str(local), path, local.stat().st_size, sink, self._rows[output])

    def _place(self, directory: str) -> str:
        attempt = self._attempt
        return f"{directory}/{epoch_dir(attempt.generation, attempt.epoch)}/{attempt.subtask}-{attempt.id}"

    def _local(self, output: str) -> Path:
        return self._attempt.directory / f"{output}.parquet"


def _check_keys(sink: str, key: Sequence[str], rows: pa.Table, where: str) -> None:
    """Whether rows that are handed out say which key they are of, and what becomes of it. Raises InputError."""
    for name in key:
        if missing := rows.column(name).null_count:
            raise InputError(
                f"{missing} rows for the table {sink} have no {name!r}, which is its key.",
                where=where,
                next="Leave them out in the stage's function, or give them a key: rows without one would be inserted "
                "again each time.",
            )
    if CHANGE_TYPE in rows.column_names:
        column = rows.column(CHANGE_TYPE)
        unknown = pc.filter(column, pc.invert(pc.is_in(column, pa.array(CHANGES))))
        if len(unknown):
            raise InputError(
                f"A row for the table {sink} has {CHANGE_TYPE} {unknown[0].as_py()!r}.",
                where=where,
                next=f"Say one of {', '.join(CHANGES)}.",
            )
