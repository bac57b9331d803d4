"""The parts that operators by event time share: times of rows, late rows, and the moment of the next thing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.rows import time_index
from weir.definition import LATE, Subtask
from weir.operators.base import event_times


class EventTimeOperator:
    """One subtask's operator by event time for one epoch, without what it does to rows.

    Args:
        name: What errors call it.
    """

    def __init__(self, name: str, subtask: Subtask) -> None:
        self._stage, self._shapes, self._backend = subtask.stage, subtask.shapes, subtask.backend
        self._progress, self._groups, self._where = subtask.progress, subtask.groups, f"{name} {subtask.stage.uid}"
        self.rows_late = self.rows_deferred = 0
        self.closed_upto: int | None = None
        self.due: int | None = None
        self.swept: str | None = None
        self.has_timers: bool | None = None

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
