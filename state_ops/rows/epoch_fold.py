"""The rows of an epoch on their way into a state: reduced to a row a key as they come, and merged into the state at the
epoch's end, where each key is met once.

What does not fit into memory until then waits on the local disk (`state_ops.rows.spill`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import polars as pl

from state_ops.rows import key_aggregation
from state_ops.rows.key_aggregation import Aggregates, Partials
from state_ops.rows.row_store import PRESENT, RowStore
from state_ops.rows.spill import Spill

Merge = Callable[[pl.DataFrame, pl.DataFrame, pl.DataFrame], pl.DataFrame]
"""The new state of keys, from these, their state and their partials."""

Stay = Callable[[pl.DataFrame, pl.DataFrame], np.ndarray]
"""bool[n], which keys are kept with such state."""


class EpochFold:
    """One state's rows of one epoch.

    Args:
        aggregates: The fields of the partials.
        by: The columns that rows are grouped by: the key group and the key.
        rows: The state.
        spill: Where partials wait that do not fit into memory.
        where: For errors.
        partial_rows: How many partials may gather in memory.
        out_rows: How many keys are handed out at once, where too many have gathered.
        fixed: Columns that all keys of the state have, beside `by`.
    """

    def __init__(
        self,
        aggregates: Aggregates,
        by: Sequence[str],
        rows: RowStore,
        spill: Spill,
        where: str,
        partial_rows: int,
        out_rows: int,
        fixed: Sequence[pl.Expr] = (),
    ) -> None:
        self._aggregates, self._by, self._where = aggregates, list(by), where
        self._rows, self._spill, self._fixed = rows, spill, fixed
        self._partial_rows, self._out_rows = partial_rows, out_rows
        self._partials = Partials(aggregates, by, where, partial_rows)

    def add(self, rows: pl.DataFrame) -> None:
        """Take a batch of rows."""
        self._partials.add(rows)
        if self._partials.full:
            self._spill.add(self._partials.take())

    def folded(self, merge: Merge, stay: Stay, *, keep: bool = True) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
        """Merge all that has come into state, part by part: keys, with the state that they had before the epoch and
        `PRESENT`, and their new state.

        Args:
            keep: The state before the epoch is wanted; else only the keys are told.
        """
        if len(self._partials):
            rest = self._partials.take()
            if not len(self._spill):
                yield from self._gathered([rest], merge, stay, keep)
            else:
                self._spill.add(rest)
        for gathered in self._spill.take():
            yield from self._gathered(gathered, merge, stay, keep)

    def _gathered(
        self, gathered: list[pl.DataFrame], merge: Merge, stay: Stay, keep: bool
    ) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
        """Yield all partials of some keys. Too many for memory are merged one after the other; their keys are read once
        more, to be handed out once."""
        if len(gathered) == 1 or not key_aggregation.have_gathered(gathered, self._partial_rows, 1):
            whole = key_aggregation.combined(self._aggregates, gathered, self._by, self._where)
            yield from self._merged(whole, merge, stay, keep)
            return
        folded = [before for some in gathered for before, _ in self._merged(some, merge, everything, keep)]
        for before in pl.concat(folded).unique(self._by, keep="first", maintain_order=True).iter_slices(self._out_rows):
            keys = self._keys(before)
            rows, _ = self._rows.get(keys)
            if not (kept := stay(keys, rows)).all():
                self._rows.put(keys, rows, kept)
            yield before, rows

    def _merged(
        self, gathered: pl.DataFrame, merge: Merge, stay: Stay, keep: bool
    ) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
        for fresh in key_aggregation.parts(gathered, self._by):
            keys = self._keys(fresh)
            old, existed = self._rows.get(keys)
            new = merge(keys, old, fresh)
            self._rows.put(keys, new, stay(keys, new), ascending=True)
            if keep:
                keys = pl.concat([keys, old.with_columns(pl.Series(PRESENT, existed))], how="horizontal")
            yield keys, new

    def _keys(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.select(*self._by, *self._fixed)


def everything(keys: pl.DataFrame, _: pl.DataFrame) -> np.ndarray:
    """Keep all keys."""
    return np.ones(len(keys), bool)
