"""Delta tables as sinks: definitions alone. The room `sinks` commits to their logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from state_ops.errors import InputError, PipelineError
from weir.connectors.sink import Capabilities, Sink
from weir.connectors.source import ADD, FIX

APPEND, UPSERT, PARTITIONS, WHERE = "append", "upsert", "partitions", "where"  # as checkpoints record them
_LISTS = ("key", "order_by", "partition_by")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSink(Sink):
    """A Delta table to which rows are appended, and that only Weir writes.

    Attributes:
        name: The table's name, and its directory below the pipeline's `tables/`.
        event_time: The timestamp or date column by which its rows belong to a day. None: the window's start, or the
            source's event time.
        partition_by: Columns of which each file has one value, and readers skip files by it.
        evolve: Columns that rows have and the table has not are refused ("fix") or added to it ("add").
        at: Where it lies instead: a directory or a URI, with {placeholders} from the configuration. It may be there
            already.
        descriptions: By column, what it is, for people. They count for nothing else.
    """

    event_time: str | None = None
    partition_by: tuple[str, ...] = ()
    at: str | None = None
    evolve: str = FIX
    descriptions: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.evolve not in (FIX, ADD):
            raise PipelineError(
                f"evolve={self.evolve!r} is no policy.", where=f"table {self.name}", next=f'Say "{FIX}" or "{ADD}".'
            )

    @property
    def stays(self) -> None:
        return None

    @property
    def capabilities(self) -> Capabilities:
        return self._table(takes_files=True)

    def _table(self, **more: Any) -> Capabilities:
        return Capabilities(
            has_versions=True,
            partition_by=self.partition_by,
            evolves=self.evolve == ADD,
            event_time=self.event_time,
            at=self.at,
            descriptions=self.descriptions,
            **more,
        )

    def publishes_by(self, resolve: Callable[[str], str]) -> dict[str, Any]:  # noqa: ARG002
        return self._recorded(APPEND)

    def _recorded(self, by: str, where: str | None = None) -> dict[str, Any]:
        facts: dict[str, Any] = {name: list(getattr(self, name, ())) for name in _LISTS}
        facts |= {"where": where, "at": self.at, "evolve": self.evolve if self.evolve != FIX else None}
        return {"as": by, **{name: value for name, value in facts.items() if value}}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpsertSink(DeltaSink):
    """A Delta table with one row per key: the newest.

    Attributes:
        key: Columns that are null in no row.
        order_by: By which the newest row of a key is found within an epoch. None are needed where the key contains the
            stage's: then it is the one that was handed out last.
    """

    key: tuple[str, ...]
    order_by: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "delta"

    @property
    def capabilities(self) -> Capabilities:
        return self._table(newest_of=self.key, newest_by=self.order_by)

    def publishes_by(self, resolve: Callable[[str], str]) -> dict[str, Any]:  # noqa: ARG002
        return self._recorded(UPSERT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceSink(DeltaSink):
    """A Delta table with the newest rows: an epoch's replace the partitions that they have, or what a condition keeps.

    Attributes:
        where: The condition, which every row satisfies. None: partitions are replaced.
    """

    where: str | None = None

    @property
    def kind(self) -> str:
        return "delta"

    @property
    def capabilities(self) -> Capabilities:
        return self._table(takes_files=True, replaces=True, replaces_where=self.where)

    def publishes_by(self, resolve: Callable[[str], str]) -> dict[str, Any]:  # noqa: ARG002
        return self._recorded(PARTITIONS if self.where is None else WHERE, self.where)


def recorded_table(name: str, how: Mapping[str, Any]) -> DeltaSink:
    """Return the sink of a table as a checkpoint has recorded it.

    Args:
        how: What `publishes_by` returned then.

    Raises:
        KeyError: It is of no kind that is known here.
    """
    common: dict[str, Any] = {
        "name": name,
        "at": how.get("at"),
        "partition_by": tuple(how.get("partition_by", ())),
        "evolve": how.get("evolve", FIX),
    }
    if how["as"] == UPSERT:
        return UpsertSink(**common, key=tuple(how["key"]), order_by=tuple(how.get("order_by", ())))
    if how["as"] in (PARTITIONS, WHERE):
        return ReplaceSink(**common, where=how.get("where"))
    return DeltaSink(**common)


CHANGE_TYPE = "_change_type"  # a column of rows that say what became of their key, as in Delta's change data feed
INSERT, UPDATE_BEFORE, UPDATE, DELETE = "insert", "update_preimage", "update_postimage", "delete"
CHANGES = (INSERT, UPDATE_BEFORE, UPDATE, DELETE)
SAY_A_CHANGE = f"Say one of {', '.join(CHANGES)}."
TAKEN_BACK = (UPDATE_BEFORE, DELETE)  # what rows say that are no more
VERSION, EPOCH = "_commit_version", "epoch"  # columns that all rows of one change have alike: of tables, of aggregates
COMMIT_TIME = "_commit_timestamp"  # another one of tables


def check_changes(rows: pa.Table, where: str) -> None:
    """Raise InputError unless each row says what became of it.

    Args:
        where: For errors.
    """
    unknown = unknown_changes(rows)
    if pc.any(unknown).as_py():
        raise InputError(f"A row {without_change(rows, unknown)}.", where=where, next=SAY_A_CHANGE)


def unknown_changes(rows: pa.Table) -> pa.ChunkedArray:
    """Return a mask of the rows that do not say what became of them."""
    return pc.invert(pc.is_in(rows.column(CHANGE_TYPE), pa.array(CHANGES)))


def without_change(rows: pa.Table, unknown: pa.ChunkedArray) -> str:
    """Return, as a clause, the value that the first row of a mask has in place of a known change."""
    return f"has {CHANGE_TYPE} {pc.filter(rows.column(CHANGE_TYPE), unknown)[0].as_py()!r}"


def refuse_replaced(sink: Sink, where: str) -> None:
    """Refuse changes for a table whose rows those of an epoch replace: they are not all that it is to have.

    Args:
        where: For errors.
    """
    if sink.capabilities.replaces:
        raise PipelineError(
            f"The rows of an epoch would replace those of the table {sink.name}, and they are changes, which say by "
            f"{CHANGE_TYPE} what became of a row.",
            where=where,
            next="delta.upsert applies changes, and delta.append keeps them as they are.",
        )


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
