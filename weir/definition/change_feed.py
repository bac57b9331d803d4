"""Rows that say what became of their key, in columns named as in Delta's change data feed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from state_ops.errors import InputError, PipelineError
from state_ops.lazily import Lazily
from weir.definition.sink import Sink

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    pa, pc = Lazily("pyarrow"), Lazily("pyarrow.compute")

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
