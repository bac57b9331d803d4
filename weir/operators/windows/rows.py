"""Rows of windows, open and closed.

Windows and sessions are handed out, and shown while they are open, by the same functions: a frame with the key columns,
`window_start` and `window_end` in microseconds since 1970 UTC, and the fields of the aggregates.
"""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.unfit_values import FIRST_MICRO, LAST_MICRO
from state_ops.schema.state_schema import StateSchema
from weir.definition import LATE, MAIN, Shapes, Stage
from weir.operators.base import check_storable
from weir.operators.event_time import EventTimeOperator
from weir.operators.windows import END, START, AnyWindow

_BOUND = pa.timestamp("us", tz="UTC")


class WindowsOperator(EventTimeOperator):
    """An operator that closes windows."""

    def _closed(self, window: AnyWindow, closed: pl.DataFrame) -> pa.Table:
        """Return the output of windows that have closed."""
        newest: int = closed[END].max()  # type: ignore[assignment]
        self.closed_upto = newest if self.closed_upto is None else max(self.closed_upto, newest)
        return frames.arrow(_results(self._stage, window, closed)).cast(self._shapes.outputs[MAIN])


def as_people_see(stage: Stage, window: AnyWindow, opened: pl.DataFrame) -> pa.Table:
    """Return windows that are open with bounds that are moments."""
    results = _results(stage, window, opened)
    return frames.arrow(results.with_columns(pl.col(START, END).cast(pl.Datetime("us", "UTC"))))


def shapes_of(
    stage: Stage,
    window: AnyWindow,
    rows: pa.Schema,
    keys: pa.Schema,
    state: StateSchema,
    opened: pl.DataFrame,
) -> Shapes:
    """Return the output: key columns, window_start, window_end, the aggregates; late rows keep their columns.

    Args:
        rows: The columns of the input.
        opened: No windows, with their columns.
    """
    where = f"window {stage.uid}"
    inferred = frames.arrow(_results(stage, window, opened)).schema
    output = pa.schema([(field.name, _BOUND if field.name in (START, END) else field.type) for field in inferred])
    check_storable(output, where, "Cast the column that it is made from in select= or transform=")
    if window.late is not None:
        check_storable(rows, f"{where}, late={window.late.name}", "Cast or drop it in select= or transform=")
    return Shapes(keys, state, {MAIN: output, LATE: rows})


def _results(stage: Stage, window: AnyWindow, windows: pl.DataFrame) -> pl.DataFrame:
    results = [agg.result(name) for name, agg in window.aggregates]
    # A window of the first or last rows that a table can hold may begin before the year 1 or end after 9999.
    bounds = [bound.clip(FIRST_MICRO, LAST_MICRO) for bound in (pl.col(START), pl.col(END) - window.end_before)]
    return windows.sort([END, *stage.key]).select(*stage.key, *bounds, *results)
