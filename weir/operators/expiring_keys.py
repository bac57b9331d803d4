"""Keys that say in state when they are forgotten, and the index of them by that moment."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from state_ops.arrow import frames
from state_ops.keyed.keyed_state import GROUP
from state_ops.rows import time_index
from weir.operators.forgotten import EXPIRES


def remembered(rows: pa.Table, before: int | None) -> pa.Table:
    """Return the rows of state that have not expired.

    Args:
        rows: Of the state, with the column `expires`.
        before: What the next epoch judges by, in microseconds since 1970 UTC; None: nothing has expired yet.
    """
    if before is None:
        return rows
    moment = pa.scalar(before, pa.int64()).cast(rows.schema.field(EXPIRES).type)
    return rows.filter(pc.or_kleene(pc.is_null(rows.column(EXPIRES)), pc.greater(rows.column(EXPIRES), moment)))


def index_changes(
    keys: pl.DataFrame, types: pa.Schema, before: pl.DataFrame, after: pl.DataFrame
) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Return the changes of the index by time that follow when rows of state replace others.

    Args:
        keys: Key columns and the key group of each row.
        types: The key columns' types.
        before: The rows that were there, in the order of the keys; with the fields' defaults where there was none.
        after: The rows that are there now.

    Returns:
        Entries to put, and entries to delete first.
    """

    def entries(rows: pl.DataFrame) -> list[bytes]:
        ends = rows[EXPIRES].dt.epoch("us")
        ending = keys.filter(ends.is_not_null())
        columns = frames.arrow(ending.select(types.names)).cast(types).columns
        return time_index.entries(ends.drop_nulls().to_numpy(), columns, ending[GROUP].to_numpy().astype(np.uint16))

    return [(entry, b"") for entry in entries(after)], entries(before)
