"""What runs the subtasks of a stage: Spark (`spark_executor`) or this very process (`in_memory`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from pipelines.runtime.definition import Stage
from pipelines.runtime.keyed_stage import KeyedTask
from pipelines.runtime.sources.files import FilesReader, SourceFile
from state_ops.checkpoint import Ack, StateFile
from state_ops.storage import Storage


@dataclass(frozen=True, slots=True)
class Landed:
    """Rows of a source's slice. schema: the columns that every file has, in canonical types."""

    schema: pa.Schema
    reader: FilesReader
    files: tuple[SourceFile, ...]

    @property
    def where(self) -> str:
        return self.reader.uri(self.files[0])


@dataclass(frozen=True, slots=True)
class Channel:
    """Rows that the stage before has staged in this epoch. schema: its output's."""

    schema: pa.Schema
    storage: Storage
    files: tuple[StateFile, ...]

    @property
    def where(self) -> str:
        return self.storage.full(self.files[0].path)


class Executor(Protocol):
    """Runs a stage's stateless part and its keyed tasks."""

    def columns(self, stage: Stage, schema: pa.Schema, where: str) -> pa.Schema:
        """The columns that the stage's function sees, canonical, for an input of `schema`. where: whose schema that is.

        Raises PipelineError where the stage's where or transform does not fit them.
        """
        ...

    def run(self, task: KeyedTask, rows: Landed | Channel | None, columns: pa.Schema, deadline: float) -> list[Ack]:
        """Run every subtask of the stage to its ack, a decline included; a subtask that died has none.

        rows: None for an epoch without data. columns: as `columns` said. deadline: on time.monotonic(), when the work is
        cancelled. Raises the WeirError that says what the operator should do when the job as a whole failed.
        """
        ...
