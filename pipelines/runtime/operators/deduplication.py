"""Deduplication: the first row of each key, handed out as it comes.

State has one value row per key: when it was first seen, and when it is forgotten. With a time to live, an index of keys
by that moment says what is over, so that a barrier reads what it forgets and nothing else. It forgets a bounded number
an epoch; what is over but not yet swept away is never consulted, so the bound changes no result.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.runtime.definition import Deduplication, Epoch, Stage
from pipelines.runtime.operators.base import (
    LATE,
    MAIN,
    Progress,
    Shapes,
    check_event_time,
    check_storable,
    event_times,
    refuse_clash,
)
from pipelines.runtime.operators.event_time import EventTimeOperator
from state_ops.arrow import frames
from state_ops.backends.base import Backend
from state_ops.checkpoints.checkpoint import to_micros
from state_ops.keyed.keyed_state import GROUP, VALUE_STATE
from state_ops.rows import time_index
from state_ops.rows.row_store import rows_of
from state_ops.schema.key_codec import encode_keys
from state_ops.schema.row_codec import encode_rows
from state_ops.schema.state_schema import StateSchema

SEEN, EXPIRES = "first_seen", "expires"
_STATE = StateSchema.build(
    [(SEEN, pa.timestamp("us", tz="UTC"), False, None), (EXPIRES, pa.timestamp("us", tz="UTC"), True, None)]
)
_SWEPT = 100_000


class DeduplicationOperator(EventTimeOperator):
    """State: per key when it was seen and when it expires. In event time both go by the column, else by `epoch.now`."""

    def __init__(
        self,
        stage: Stage,
        deduplication: Deduplication,
        shapes: Shapes,
        backend: Backend,
        epoch: Epoch,
        progress: Progress,
        groups: range,
    ) -> None:
        super().__init__("deduplicate", stage, shapes, backend, progress, groups)
        self._rule, self._now = deduplication, to_micros(epoch.now)
        # Before: what this epoch takes for expired. After: what the next one will, so that it may be swept away.
        by_event = deduplication.on is not None
        self._before, self._after = (progress.before, progress.now) if by_event else (self._now, self._now)

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        times = self._times(rows)
        if self._rule.on is not None and self._before is not None:
            assert self._rule.ttl is not None
            late = times + self._rule.ttl <= self._before
            yield from self._late(rows, late)
            rows, times = rows.filter(pa.array(~late)), times[~late]
        if not rows.num_rows:
            return
        first = frames.from_arrow(rows.select(self._stage.key)).select(pl.struct(pl.all()).is_first_distinct())
        kept = np.flatnonzero(first.to_series().to_numpy())
        groups = rows.column(GROUP).to_numpy().astype(np.uint16)[kept]
        keys = rows.select(self._stage.key).take(kept).cast(self._shapes.keys)
        encoded = encode_keys(keys.columns, groups, VALUE_STATE)
        old, seen = rows_of(self._shapes.state, self._backend.multi_get(encoded))
        expires = old[EXPIRES].dt.epoch("us").fill_null(_NEVER).to_numpy()
        expired = seen & (expires <= (_ALWAYS if self._before is None else self._before))
        new = np.flatnonzero(~seen | expired)
        if not len(new):
            return
        self._remember(keys, groups, encoded, times[kept], new, expires, expired)
        yield MAIN, self._shaped(rows.take(kept[new]), MAIN)

    def pause(self) -> Iterator[tuple[str, pa.Table]]:
        return iter(())  # nothing is swept: the epoch's other rows look at what is over afterwards

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        if self._after is not None:  # also without a time to live now: keys of before have an end
            each = max(1, _SWEPT // len(self._groups))  # of each group, so that none waits for the others
            due = [
                entry for group in self._groups for entry in time_index.first(self._backend, group, self._after, each)
            ]
            if due:
                groups, keys = time_index.owners(due, self._shapes.keys)
                self._backend.write([], due + encode_keys(keys.columns, groups, VALUE_STATE))
        return iter(())

    def _times(self, rows: pa.Table) -> np.ndarray:
        if self._rule.on is None:
            return np.full(rows.num_rows, self._now, np.int64)
        return event_times(rows, self._rule.on, self._where)

    def _remember(
        self,
        keys: pa.Table,
        groups: np.ndarray,
        encoded: list[bytes],
        times: np.ndarray,
        new: np.ndarray,
        expires: np.ndarray,
        expired: np.ndarray,
    ) -> None:
        """Store the rows `new` of these keys. Entries of those that had expired are replaced."""
        moment = self._shapes.state.arrow.field(SEEN).type
        ttl = self._rule.ttl
        ends = pa.nulls(len(new), moment) if ttl is None else pa.array(times[new] + ttl).cast(moment)
        table = pa.table([pa.array(times[new]).cast(moment), ends], schema=self._shapes.state.arrow)
        puts = list(zip([encoded[row] for row in new], encode_rows(self._shapes.state, table), strict=True))
        gone = np.flatnonzero(expired)
        deletes = time_index.entries(expires[gone], keys.take(gone).columns, groups[gone])
        if ttl is not None:
            index = time_index.entries(times[new] + ttl, keys.take(new).columns, groups[new])
            puts += [(entry, b"") for entry in index]
        self._backend.write(puts, deletes)


def remembered(rows: pa.Table, before: int | None) -> pa.Table:
    """The rows of state that have not expired.

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
    """What becomes of the index by time when rows of state take the place of others.

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


_ALWAYS, _NEVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def deduplication_shapes(stage: Stage, rule: Deduplication, rows: pa.Schema, keys: pa.Schema) -> Shapes:
    """The output, and the late rows: the input's columns."""
    where = f"deduplicate {stage.uid}"
    refuse_clash(stage, {SEEN, EXPIRES}, "a field of its state")
    if rule.on is not None:
        check_event_time(rows, rule.on, where)
    check_storable(rows, where, "Cast or drop it in transform=")
    return Shapes(keys, _STATE, {MAIN: rows, LATE: rows})
