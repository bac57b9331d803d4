"""The protocol of what runs the subtasks of a stage: Spark (`spark`) or this process (`in_process`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.errors import DamageError, TransientError, VanishedError, WeirError, first_line
from state_ops.records.acks import Ack
from state_ops.records.snapshot_files import StagedFile, StateFile
from state_ops.storage.storage import Storage
from weir.definition import ROW, Input, Stage
from weir.sources.reader import SourceReader
from weir.sources.slices import SourceFile
from weir.task.run_task import KeyedTask

Deadline = Callable[[], float]
"""It may be moved while the work goes on."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Rows of a source's slice.

    Attributes:
        schema: The columns that every file has, in canonical types; and `ROW`, if the stage needs to know where its
            rows come from.
        left_out: Positions that nobody gets to see, ascending.
    """

    schema: pa.Schema
    reader: SourceReader
    files: tuple[SourceFile, ...]
    left_out: tuple[int, ...] = ()
    as_seen: ClassVar[bool] = False

    @property
    def where(self) -> str:
        return self.reader.uri(self.files[0])

    @property
    def tracked(self) -> bool:
        return ROW in self.schema.names


@dataclass(frozen=True, slots=True)
class Channel:
    """Rows that wait for a stage, uploaded or not: the stage before has staged them, or it has left them itself.

    Attributes:
        schema: Their columns.
        as_seen: They are as the stage's function sees rows: its where and its transform have been applied.
    """

    schema: pa.Schema
    storage: Storage
    files: tuple[StagedFile | StateFile, ...]
    as_seen: bool = False

    @property
    def where(self) -> str:
        return uri(self.storage, self.files[0])


@dataclass(frozen=True, slots=True)
class InputRows:
    """The rows of a stage's inputs in an epoch.

    Attributes:
        schema: The columns in which they reach the stage's subtasks; of several inputs, as `operators.sides` has them.
        parts: By the number of an input that has rows, what is read of it.
    """

    schema: pa.Schema
    parts: tuple[tuple[int, Landed | Channel], ...]

    @classmethod
    def of(cls, rows: Landed | Channel) -> Self:
        """Return the rows of the only input."""
        return cls(rows.schema, ((0, rows),))


def uri(storage: Storage, file: StagedFile | StateFile) -> str:
    """Return the place of staged rows: the disk that their subtask shares with the coordinator, or storage."""
    return file.local if isinstance(file, StagedFile) else storage.full(file.path)


def staged_table(storage: Storage, file: StagedFile | StateFile, columns: Sequence[str] | None = None) -> pa.Table:
    """Staged rows, read in this process.

    Raises VanishedError if they are gone, and TransientError or DamageError if they are damaged: on a local disk, from
    which a replay writes them anew, or in storage.

    Args:
        columns: Only those of them that are there.
    """
    with _staged(storage, file) as parquet:
        names = [name for name in parquet.schema_arrow.names if columns is None or name in columns]
        # Without threads: see state_ops.delta.fenced_table. For "a.b" Arrow also reads the field b of a struct a.
        return parquet.read(None if columns is None else names, use_threads=False).select(names)


def staged_tables(
    storage: Storage, file: StagedFile | StateFile, columns: Sequence[str], rows: int
) -> Iterator[pa.Table]:
    """Yield some columns of staged rows, so many rows at a time; raises as `staged_table`."""
    with _staged(storage, file) as parquet:
        for batch in parquet.iter_batches(rows, columns=list(columns), use_threads=False):
            yield pa.Table.from_batches([batch]).select(columns)


@contextmanager
def _staged(storage: Storage, file: StagedFile | StateFile) -> Iterator[pq.ParquetFile]:
    """Return a file of staged rows.

    An error while it is read is about its bytes.
    """
    try:
        if isinstance(file, StagedFile):
            source = pa.OSFile(file.local)
        else:
            content = storage.read_bytes(file.path)
            source = None if content is None else pa.BufferReader(content)
    except FileNotFoundError:
        source = None
    if source is None:
        raise VanishedError(
            "A file that was there when the epoch was planned is gone.",
            where=uri(storage, file),
            next="Run again, which plans anew; the epoch was declined.",
        )
    try:
        with source, pq.ParquetFile(source, page_checksum_verification=True) as parquet:
            yield parquet
    except (pa.ArrowException, OSError) as error:
        raise unreadable(storage, file, first_line(error)) from error


def unreadable(storage: Storage, file: StagedFile | StateFile, problem: str) -> WeirError:
    """Return the error to raise for staged rows that are there and damaged; see `staged_table`."""
    what, where = f"Rows that a stage has staged cannot be read: {problem}", uri(storage, file)
    if isinstance(file, StagedFile):
        advice = "The epoch was declined and is replayed. Look at that disk if it happens again."
        return TransientError(what, where=where, next=advice)
    advice = "Nothing was applied. `weir fsck` says what else is damaged; put the object back, or rewind."
    return DamageError(what, where=where, next=advice)


class Executor(Protocol):
    """Runs a stage's stateless part and its keyed tasks."""

    def columns(self, stage: Stage, input: Input, schema: pa.Schema, where: str) -> pa.Schema:
        """Return the columns that the stage's function sees of an input whose rows have `schema`, canonical.

        Args:
            where: Whose schema that is.

        Raises:
            PipelineError: Where the input's where or transform does not fit them.
        """
        ...

    def run(self, task: KeyedTask, rows: InputRows | None, columns: pa.Schema, deadline: Deadline) -> list[Ack]:
        """Run every subtask of the stage to its ack, a decline included; a subtask that died has none.

        Raises the WeirError that says what the operator should do when the job as a whole failed.

        Args:
            rows: None for an epoch without data.
            columns: As `columns` said.
            deadline: Says when, on time.monotonic(), the work is cancelled.
        """
        ...

    def cancel(self) -> None:
        """End what runs, soon: nobody waits for its result. From any thread."""
        ...
