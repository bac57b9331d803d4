"""Rows in the order in which Spark sorts them, without Spark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from state_ops.arrow import frames


def ordered(rows: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Return the rows' numbers in Spark's ascending order: nulls first, NaN last; rows that tie stay as they are. A
    column may be named twice."""
    chosen = list(dict.fromkeys(columns))
    plain = [f"c{number}" for number in range(len(chosen))]  # Polars takes some names for patterns
    frame = frames.polars(rows.select(chosen).rename_columns(plain)).with_row_index("row")
    return frame.sort(plain, nulls_last=False, maintain_order=True)["row"].to_numpy().astype(np.int64)
