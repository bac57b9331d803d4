"""Functions that operators by event time share: they find late rows and closed windows, and lay out rows of windows.

Windows and sessions are handed out, and shown while they are open, by the same functions: a frame with the key columns,
`window_start` and `window_end` in microseconds since 1970 UTC, and the fields of the aggregates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.arrow.unfit_values import FIRST_MICRO, LAST_MICRO
from state_ops.backends.base import Backend
from state_ops.rows import time_index
from state_ops.schema.state_schema import StateSchema
from weir.definition import SessionWindow, Stage, Window
from weir.operators.base import LATE, MAIN, Progress, Shapes, check_storable, event_times

END, START = "window_end", "window_start"
_BOUND = pa.timestamp("us", tz="UTC")


class EventTimeOperator:
    """One subtask's operator by event time for one epoch, without what it does to rows.

    Args:
        groups: Its key groups.

    Attributes:
        due: The processing time at which it has something to do without rows; None: there is none.
    """

    def __init__(
        self, name: str, stage: Stage, shapes: Shapes, backend: Backend, progress: Progress, groups: range
    ) -> None:
        self._stage, self._shapes, self._backend = stage, shapes, backend
        self._progress, self._groups, self._where = progress, groups, f"{name} {stage.uid}"
        self.rows_late = self.rows_deferred = 0
        self.closed_upto: int | None = None
        self.due: int | None = None

    def _times_of(self, rows: pa.Table, on: str | None) -> np.ndarray:
        """Return int64[n], the rows' times in microseconds, by a column, or by the epoch's processing time."""
        if on is not None:
            return event_times(rows, on, self._where)
        assert self._progress.now is not None, "processing time is known before an epoch begins"
        return np.full(rows.num_rows, self._progress.now)

    def _note_due(self, sort: int, ends: Callable[[], pl.Series | None]) -> None:
        """Note when the next window by processing time ends, of those in state.

        Args:
            sort: The id of the state whose entries begin with an end.
            ends: int64[n], when all open windows end, as far as they are in memory; None: asked of the state.
        """
        if not self._stage.by_clock:
            return
        assert self._progress.now is not None, "processing time is known before an epoch begins"
        open_until = ends()
        if open_until is None:
            self.due = time_index.earliest(self._backend, self._groups, sort, self._progress.now)
        else:
            self.due = open_until.filter(open_until > self._progress.now).min()  # type: ignore[assignment]

    def _late(self, rows: pa.Table, late: np.ndarray) -> Iterator[tuple[str, pa.Table]]:
        """Count the rows that are late, and hand them out if they are whole (`Stage.reads`). late: bool[n]."""
        if late.any():
            self.rows_late += int(late.sum())
            if rows.num_columns > len(self._shapes.outputs[LATE]):  # the key group is one more
                yield LATE, self._shaped(rows.filter(pa.array(late)), LATE)

    def _shaped(self, rows: pa.Table, output: str) -> pa.Table:
        """Return the input's rows in the types in which they came:

        Polars returns maps, times and others in another type.
        """
        shape = self._shapes.outputs[output]
        return rows.select(shape.names).cast(shape)

    def _closed(self, window: Window | SessionWindow, closed: pl.DataFrame) -> pa.Table:
        """Return the output of windows that have closed."""
        newest: int = closed[END].max()  # type: ignore[assignment]
        self.closed_upto = newest if self.closed_upto is None else max(self.closed_upto, newest)
        return frames.arrow(_results(self._stage, window, closed)).cast(self._shapes.outputs[MAIN])


def shown(stage: Stage, window: Window | SessionWindow, opened: pl.DataFrame) -> pa.Table:
    """Windows that are open, as people see them: their bounds are moments."""
    results = _results(stage, window, opened)
    return frames.arrow(results.with_columns(pl.col(START, END).cast(pl.Datetime("us", "UTC"))))


def window_shapes(
    stage: Stage,
    window: Window | SessionWindow,
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


def _results(stage: Stage, window: Window | SessionWindow, windows: pl.DataFrame) -> pl.DataFrame:
    results = [agg.result(name) for name, agg in window.aggregates]
    end = pl.col(END) - 1 if isinstance(window, SessionWindow) and window.included else pl.col(END)
    # A window of the first or last rows that a table can hold may begin before the year 1 or end after 9999.
    bounds = [bound.clip(FIRST_MICRO, LAST_MICRO) for bound in (pl.col(START), end)]
    return windows.sort([END, *stage.key]).select(*stage.key, *bounds, *results)
