"""Rows of a keyed state that are over at a moment, which one of their fields says.

Beside the rows the backend has an index of their keys by that moment (`time_index`), so that what is over is read and
nothing else. Where all rows are resident they say themselves what is over, and the index is only written: with the rows
that it is about, in one sorted run.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.backends.base import Backend, SortedRun
from state_ops.rows import key_order, time_index
from state_ops.rows.hash_table import CollisionError
from state_ops.rows.resident_table import Residence
from state_ops.rows.row_store import RowStore
from state_ops.schema.descriptors import GROUP
from state_ops.schema.state_schema import StateSchema


class ExpiringRows(RowStore):
    """The expiring rows of one subtask in one epoch.

    Args:
        moment: The field that says when a row is over, a timestamp in microseconds; where it is null, a row never is.
    """

    def __init__(
        self,
        backend: Backend,
        schema: StateSchema,
        keys: pa.Schema,
        state_id: int,
        residence: Residence,
        moment: str,
    ) -> None:
        super().__init__(backend, schema, keys, state_id, residence)
        self._moment, self._groups = pl.col(moment).dt.epoch("us"), residence.groups
        self._stale: list[bytes] = []  # entries of the index that are not to stay

    def replace(self, keys: pl.DataFrame, rows: pl.DataFrame, before: pl.DataFrame) -> None:
        """Set the rows of these keys, of each key once an epoch. before: the stored rows of these keys, keys and
        fields."""
        self._stale += self._index(before)
        self.put(keys, rows, np.ones(len(keys), bool))

    def forget(self, upto: int, most: int) -> None:
        """Forget rows that are over by then.

        Args:
            upto: In microseconds since 1970 UTC.
            most: How many of each key group at most where the index has to be read.
        """
        self._begin()
        over = self._moment <= upto
        taken = self.take(over)
        if taken is not None:
            self._stale += self._index(taken[1])
            return
        if self._pending is not None:
            self._take_pending(over)
        try:
            self._forget_by_index(upto, most)
        except CollisionError:
            self._go_without_tables()
            self._forget_by_index(upto, most)

    # -- how

    def _forget_by_index(self, upto: int, most: int) -> None:
        due = [entry for group in self._groups for entry in time_index.first(self._backend, group, upto, most)]
        if not due:
            return
        groups, owners = time_index.owners(due, self._keys)
        keys = self._typed(frames.from_arrow(owners).with_columns(pl.Series(GROUP, groups)))
        if self._pending is not None and len(self._pending):
            hashes = self._hashes(keys)
            order = np.argsort(hashes)
            at = np.sort(
                order[self._pending.find(hashes[order], keys[order]) < 0]
            )  # of the others there are newer rows
            keys, due = keys[at], [due[place] for place in at]
        self._stale += due
        self.put(keys, self._default[np.zeros(len(keys), np.int64)], np.zeros(len(keys), bool))

    def _beside(self, rows: pl.DataFrame) -> tuple[SortedRun, list[bytes]]:
        stale, self._stale = dict.fromkeys(sorted(self._stale)), []
        index = self._index(rows)
        return SortedRun(index, [b""] * len(index)), list(stale)

    def _index(self, rows: pl.DataFrame) -> list[bytes]:
        """Return the entries of rows that are over some day, ascending."""
        moments = rows.select(self._moment).to_series()
        if moments.null_count():
            rows, moments = rows.filter(moments.is_not_null()), moments.drop_nulls()
        groups = rows[GROUP].to_numpy().astype(np.uint16)
        columns = [pa.array(moments.to_numpy(), pa.int64()), *self._arrays(rows)]
        return key_order.ascending(columns, groups, time_index.MOMENTS)[1]
