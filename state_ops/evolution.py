"""Rows of an older state schema as rows of a newer one."""

from __future__ import annotations

import pyarrow as pa

from state_ops.schema import StateSchema


def migrate(table: pa.Table, old: StateSchema, new: StateSchema) -> pa.Table:
    """The rows of `old` as rows of `new`."""
    return table if old == new else table.cast(new.arrow)
