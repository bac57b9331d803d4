"""Rows in the order in which Spark sorts them, without Spark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from state_ops import frames

_ROW = "__weir_row"


def ordered(rows: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """The rows' numbers in Spark's ascending order: nulls first, NaN last; rows that tie stay as they are."""
    frame = frames.polars(rows.select(list(columns)))
    return (
        frame.with_row_index(_ROW)
        .sort(list(columns), nulls_last=False, maintain_order=True)[_ROW]
        .to_numpy()
        .astype(np.int64)
    )
