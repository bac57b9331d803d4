"""The publishers of Delta tables: rows appended, upserted by key, or put in place of others.

Each publish is one commit of the table's log (`table_commit`), with the checkpoint's id as transaction version. That is
the table's marker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pyarrow as pa

from state_ops.errors import DamageError, PipelineError
from state_ops.records.checkpoint import REWIND, Checkpoint
from state_ops.records.publications import Publication
from state_ops.storage.storage import Storage
from weir.connectors.delta import append, replace_partitions, replace_where, restore_version, upsert
from weir.connectors.delta.changes import check_columns, columns_of
from weir.connectors.delta.predicates import check_condition
from weir.connectors.staged_rows import StagedRows
from weir.definition.sink import Capabilities, Published, Rows, Sink, SinkOpening

_PARTITION_TYPES = (pa.types.is_string, pa.types.is_integer, pa.types.is_boolean, pa.types.is_date)


@dataclass
class TablePublisher:
    """The common base of the publishers of tables.

    Attributes:
        sink: The definition, of today or as a checkpoint recorded it.
        app_id: The pipeline's. The table's name is appended to it in the table's transactions.
        storage: The pipeline's, which reaches the table at `tables/<name>`.
        scratch: A directory for files that are read or written.
        left: The table by its name as this process has left it at its last publish, if it knows that.
    """

    sink: Sink
    app_id: str
    storage: Storage
    scratch: Path
    left: dict[str, append.PublishedTable] = field(default_factory=dict)

    @classmethod
    def of(cls, sink: Sink, opening: SinkOpening) -> Self:
        """Return the publisher of a table."""
        assert opening.storage is not None and opening.scratch is not None, "the pipeline's, in which the table lies"
        return cls(sink, opening.app_id.removesuffix(f"/{sink.name}"), opening.storage, opening.scratch)

    @property
    def can(self) -> Capabilities:
        return self.sink.capabilities

    def check(self, schema: pa.Schema) -> None:
        self._compared(schema, append.check_table)

    def prepare(self, schema: pa.Schema) -> None:
        self._compared(schema, append.ensure)

    def marker(self) -> int | None:
        return append.marker(self.storage, self.app_id, self.sink.name)

    def take_back(self, previous: int | None, checkpoint: int, to: int | None, rows: Rows) -> Published:  # noqa: ARG002
        """Take the table back to an earlier version. The rows of a promotion come in the same commit."""
        files, row = _committed(rows)
        self.left.clear()
        replaces = self.scratch if self.can.replaces else None
        return _published(
            restore_version.rewind(
                self.storage,
                self.app_id,
                self.sink.name,
                row,
                previous,
                files.files,
                replaces=replaces,
                evolves=self.can.evolves,
            )
        )

    def close(self) -> None:
        """Tables are opened anew for each look."""

    # -- what a sink with versions has besides

    def fits(self, schema: pa.Schema) -> bool:
        left = self.left.get(self.sink.name)
        return left is not None and append.fits(left, schema, evolves=self.can.evolves)

    def diverged(self, published: int | None, *, lacks: bool) -> str | None:
        return append.diverged(self.storage, self.app_id, self.sink.name, published, lacks=lacks)

    def check_rows(self) -> None:
        append.check_rows(self.storage, self.app_id, self.sink.name)

    def damaged(self, how: str, also: str = "") -> DamageError:
        return append.damaged(self.storage, self.sink.name, how, also)

    def replace_range(self, rows: Rows) -> Published:
        files, row = _committed(rows)
        self.left.clear()
        done = replace_where.overwrite(
            self.storage, self.app_id, self.sink.name, row, files.files, self.scratch, evolves=self.can.evolves
        )
        return _published(done)

    def _compared(self, schema: pa.Schema, compare: Callable[..., None]) -> None:
        """Check or create the table for rows of these columns."""
        compare(
            self.storage,
            self.sink.name,
            described(self.sink, schema),
            keyed=self.can.replaces,
            partition_by=self._partitions(schema),
            evolves=self.can.evolves,
        )

    def _partitions(self, schema: pa.Schema) -> tuple[str, ...]:
        """Return the partition columns of the table, by which its rows can be told apart."""
        for name in self.can.partition_by:
            type = schema.field(name).type if name in schema.names else None
            if type is None or not any(test(type) for test in _PARTITION_TYPES):
                what = f"is {type}" if type is not None else "is no column of its rows"
                raise PipelineError(
                    f"The table {self.sink.name} cannot be partitioned by {name}, which {what}.",
                    where=f"table {self.sink.name}",
                    next="Partition by texts, integers, booleans or dates; of a time make its date.",
                )
        return self.can.partition_by


class AppendPublisher(TablePublisher):
    """Staged files become the table's."""

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:  # noqa: ARG002
        staged, row = _committed(rows)
        done = append.publish(
            self.storage,
            self.app_id,
            self.sink.name,
            row,
            previous,
            staged.files,
            self.left,
            staged.footers,
            evolves=self.can.evolves,
        )
        return _published(done)


class ReplacePublisher(TablePublisher):
    """Staged files become the table's, and the rows that they replace go."""

    def check(self, schema: pa.Schema) -> None:
        if self.can.replaces_where is not None:
            check_condition(self.sink.name, self.can.replaces_where, schema)
        super().check(schema)

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:  # noqa: ARG002
        staged, row = _committed(rows)
        done = replace_partitions.publish(
            self.storage,
            self.app_id,
            self.sink.name,
            row,
            previous,
            staged.files,
            staged.footers,
            scratch=self.scratch,
        )
        return _published(done)


class UpsertPublisher(TablePublisher):
    """Files of the table that have a changed key are written anew."""

    def check(self, schema: pa.Schema) -> None:
        check_columns(self.sink, schema)
        super().check(schema)

    def publish(self, previous: int | None, checkpoint: int, rows: Rows) -> Published:  # noqa: ARG002
        staged, row = _committed(rows)
        return _published(
            upsert.publish(self.storage, self.app_id, self.sink, row, previous, staged.files, self.scratch)
        )

    def take_back(self, previous: int | None, checkpoint: int, to: int | None, rows: Rows) -> Published:
        _, row = _committed(rows)
        if row.kind == REWIND:
            return super().take_back(previous, checkpoint, to, rows)
        return self.publish(previous, checkpoint, rows)  # a branch's changes, made to the table of then

    def _compared(self, schema: pa.Schema, compare: Callable[..., None]) -> None:
        columns = described(self.sink, columns_of(schema))
        compare(self.storage, self.sink.name, columns, keyed=True, partition_by=(), evolves=self.can.evolves)


def _committed(rows: Rows) -> tuple[StagedRows, Checkpoint]:
    """Return rows as the engine hands them to a sink with versions: with their files and their checkpoint."""
    assert isinstance(rows, StagedRows) and rows.checkpoint is not None, "as the engine stages them"
    return rows, rows.checkpoint


def _published(done: Publication) -> Published:
    return Published(done.rows, done.delta_version, done.files)


def described(sink: Sink, columns: pa.Schema) -> pa.Schema:
    """Return the columns of a table with what its author says of them, as Delta and Spark keep comments.

    Raises:
        PipelineError: One is described that the table has not.
    """
    texts = dict(sink.capabilities.descriptions)
    if unknown := [name for name in texts if name not in columns.names and not sink.capabilities.evolves]:
        raise PipelineError(
            f"describe= of the table {sink.name} says what {', '.join(unknown)} is, which its rows have not.",
            where=f"table {sink.name}",
            next=f"Its columns are: {', '.join(columns.names)}.",
        )
    commented = [
        column.with_metadata({**(column.metadata or {}), b"comment": texts[column.name].encode()})
        if column.name in texts
        else column
        for column in columns
    ]
    return pa.schema(commented, columns.metadata)
