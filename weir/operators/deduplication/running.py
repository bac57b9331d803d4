"""Deduplication: the first row of each key, handed out as it comes.

State has one value row per key: when it was first seen, and when it is forgotten. With a time to live, an index of keys
by that moment says what is over, so that a barrier reads what it forgets and nothing else (`expiring_rows`). Where the
index is read, an epoch forgets a bounded number; what is over but not yet swept away is never consulted, so the bound
changes no result.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.keyed.keyed_state import GROUP, VALUE_STATE
from state_ops.moments import to_micros
from state_ops.rows.expiring_rows import ExpiringRows
from state_ops.schema.state_schema import StateSchema
from weir.definition import LATE, MAIN, Shapes, Stage, Subtask
from weir.operators.base import check_event_time, check_storable, event_times, refuse_clash
from weir.operators.deduplication import SEEN, Deduplication
from weir.operators.event_time import EventTimeOperator
from weir.operators.forgotten import EXPIRES

_STATE = StateSchema.build(
    [(SEEN, pa.timestamp("us", tz="UTC"), False, None), (EXPIRES, pa.timestamp("us", tz="UTC"), True, None)]
)
_SWEPT = 100_000


class DeduplicationOperator(EventTimeOperator):
    """State: per key when it was seen and when it expires. In event time both go by the column, else by `epoch.now`."""

    def __init__(self, deduplication: Deduplication, subtask: Subtask) -> None:
        super().__init__(deduplication.kind, subtask)
        shapes, progress = subtask.shapes, subtask.progress
        self._rule, self._now = deduplication, to_micros(subtask.epoch.now)
        # Before: what this epoch takes for expired. After: what the next one will, so that it may be swept away.
        by_event = deduplication.on is not None
        self._before, self._after = (progress.before, progress.now) if by_event else (self._now, self._now)
        self._rows = ExpiringRows(subtask.backend, shapes.state, shapes.keys, VALUE_STATE, subtask.residence, EXPIRES)
        self._added = 0

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        times = self._times(rows)
        if self._rule.on is not None and self._before is not None:
            assert self._rule.ttl is not None
            late = times + self._rule.ttl <= self._before
            yield from self._late(rows, late)
            rows, times = rows.filter(pa.array(~late)), times[~late]
        if not rows.num_rows:
            return
        keys = frames.from_arrow(rows.select([GROUP, *self._stage.key]))
        firsts = np.flatnonzero(keys.select(pl.struct(self._stage.key).is_first_distinct()).to_series().to_numpy())
        keys, times = keys[firsts], times[firsts]
        old, seen = self._rows.get(keys)
        over = pl.lit(False) if self._before is None else pl.col(EXPIRES).dt.epoch("us") <= self._before
        expired = old.with_columns(over.fill_null(False).alias(EXPIRES))[EXPIRES].to_numpy()
        new = np.flatnonzero(~seen | expired)
        if not len(new):
            return
        before = pl.concat([keys, old], how="horizontal").filter(seen & expired)
        self._added += len(new)
        self._rows.replace(keys[new], self._remembered(times[new]), before)
        yield MAIN, self._shaped(rows.take(firsts[new]), MAIN)

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        self._rows.barrier()  # nothing is swept: the epoch's other rows look at what is over afterwards
        return iter(())

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        if self._after is not None:  # also without a time to live now: keys of before have an end
            number = max(_SWEPT, 2 * self._added)  # more than come, else state would grow as long as rows do
            self._rows.forget(self._after, max(1, number // len(self._groups)))
        self._rows.barrier()
        return iter(())

    def _times(self, rows: pa.Table) -> np.ndarray:
        if self._rule.on is None:
            return np.full(rows.num_rows, self._now, np.int64)
        return event_times(rows, self._rule.on, self._where)

    def _remembered(self, times: np.ndarray) -> pl.DataFrame:
        """Return the rows of keys that are seen first at these moments."""
        ttl, moment = self._rule.ttl, pl.Datetime("us", "UTC")
        ends = pl.lit(None, moment) if ttl is None else pl.Series(times + ttl).cast(moment)
        return pl.DataFrame({SEEN: pl.Series(times).cast(moment)}).with_columns(ends.alias(EXPIRES))


def deduplication_shapes(stage: Stage, rule: Deduplication, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """Return the output, and the late rows: the input's columns."""
    where = f"deduplicate {stage.uid}"
    refuse_clash(stage, {SEEN, EXPIRES}, "a field of its state")
    if rule.on is not None:
        check_event_time(rows, rule.on, where)
    check_storable(rows, where, "Cast or drop it in select= or transform=")
    return Shapes(keys, _STATE, {MAIN: rows, LATE: rows})
