"""As of: each row of the left side, a fact, with the newest row of the right side, a version, that is not later.

State is that of a join: the facts that wait, and versions, each row under a number, and an index by the moment at which
a row is looked at. A fact is looked at once the watermark has passed its time, since until then a version for it may
come; without waiting, at the barrier of its epoch. A version is looked at once the watermark has passed it: of a key,
those younger than the watermark stay, and the newest older one, for the facts to come.

    moment of a fact        its time; without waiting the beginning of time
    moment of a version     its time, and if it stays then, the first moment at which it is too old for any fact
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from state_ops.arrow import frames
from state_ops.keyed.key_batch import KeyBatch
from state_ops.keyed.keyed_state import GROUP
from state_ops.keyed.list_state import expanded
from state_ops.rows import time_index
from weir.definition import LATE, Subtask
from weir.operators import sides
from weir.operators.joins import INNER, AsOf
from weir.operators.joins.join import EVICTED, NUMBER, READ_ROWS, JoinOperator, KeptSide, beside, decoded

_FACTS, _VERSIONS = 0, 1
_AT_ONCE = -(1 << 62)  # microseconds


class AsOfOperator(JoinOperator):
    """State: the facts that wait, and the versions that facts may still be joined with."""

    def __init__(self, as_of: AsOf, subtask: Subtask) -> None:
        super().__init__(as_of, subtask)
        self._as_of = as_of

    def process(self, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        for side in self._sides:
            arrived = sides.narrowed(self._stage, side.number, rows)
            if arrived.num_rows:
                yield from self._put(side, arrived)

    def barrier(self) -> Iterator[tuple[str, pa.Table]]:
        now, upto = self._progress.now, None if self._as_of.wait else _AT_ONCE
        if now is not None:
            upto = now - 1
        if self._progress.drain:
            upto = self._newest_fact(upto)
        if upto is not None:
            for piece in time_index.due(self._backend, self._groups, upto, EVICTED):
                yield from self._looked_at(piece, upto)
        self._counts.barrier()

    def _newest_fact(self, upto: int | None) -> int | None:
        """Return the moment up to which a drain looks at what is there: that of the newest fact that waits, or `upto`
        if that is later. Versions behind it stay as they are, and no fact behind it is late."""
        columns, newest = self._index_columns, upto
        for group in self._groups:
            for piece in time_index.pieces(self._backend, group, EVICTED):
                of_side = time_index.owners(piece, columns)[1].column(sides.SIDE).to_numpy()
                facts = np.flatnonzero(of_side == _FACTS)
                if len(facts):
                    newest = max(time_index.moment_of(piece[facts[-1]]), _AT_ONCE if newest is None else newest)
        if newest is not None and newest > _AT_ONCE and newest != upto:
            self.closed_upto = newest + 1
        return newest

    @property
    def _index_columns(self) -> pa.Schema:
        return pa.schema([*self._shapes.keys, (sides.SIDE, pa.int8()), (NUMBER, pa.int64())])

    def _put(self, side: KeptSide, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        """Put arriving rows of a side into state.

        Late facts are dropped. A late version is kept for the facts that are not late.
        """
        times = self._times(side, rows)
        if self._progress.before is not None and (late := times < self._progress.before).any():
            self.rows_late += int(late.sum())
            if LATE in self._shapes.outputs:
                yield self._late_of(side, rows.filter(pa.array(late)), times[late])
            if side.number == _FACTS:
                rows, times = rows.filter(pa.array(~late)), times[~late]
        if rows.num_rows:
            batch = KeyBatch(frames.from_arrow(rows.select([*self._stage.key, GROUP])), self._shapes.keys, self._where)
            codes = batch.codes(frames.from_arrow(rows.select(self._stage.key)), "as_of")
            counts = self._counted(batch)
            self._insert(batch, side, codes, rows, times, np.zeros(len(codes), bool), counts)
            self._count(batch, counts)

    def _moments(self, side: KeptSide, times: np.ndarray | None, count: int) -> np.ndarray | None:
        at_once = side.number == _FACTS and not self._as_of.wait
        return np.full(count, _AT_ONCE) if at_once else times

    def _looked_at(self, piece: list[bytes], upto: int) -> Iterator[tuple[str, pa.Table]]:
        """Hand out the facts that have become due, and forget the versions that no fact can be joined with any more.

        Args:
            upto: The moment up to which.
        """
        groups, entries = time_index.owners(piece, self._index_columns)
        keyed = frames.from_arrow(entries.select(self._stage.key)).with_columns(
            pl.Series(GROUP, groups.astype(np.int32))
        )
        batch = KeyBatch(keyed, self._shapes.keys, self._where)
        codes, counts = batch.codes(keyed, "as_of"), self._counted(batch)
        moments = np.fromiter(map(time_index.moment_of, piece), np.int64, len(piece))
        remaining = self._remaining(moments, groups, batch, upto)
        due = _Due(entries, codes, entries.column(sides.SIDE).to_numpy(), entries.column(NUMBER).to_numpy())
        deletes = list(piece)
        for first, last in _shares(counts["right_next"] - counts["right_first"]):
            versions = self._versions(batch, counts, first, last)
            yield from self._joined(batch, due.between(_FACTS, first, last), versions, deletes, counts)
            self._forget(batch, due.between(_VERSIONS, first, last), versions, remaining, deletes, counts)
        self._backend.write([], deletes)
        self._count(batch, counts)

    def _remaining(self, moments: np.ndarray, groups: np.ndarray, batch: KeyBatch, upto: int) -> np.ndarray:
        """Return int64[k], by key the time of the earliest facts that are still to be joined."""
        remaining = np.full(len(batch), upto + 1)
        if len(moments) == EVICTED:  # of the last group there may be more
            remaining[batch.groups == groups[-1]] = moments[-1]
        return remaining

    def _versions(self, batch: KeyBatch, counts: dict[str, np.ndarray], first: int, last: int) -> _Versions:
        """Return the versions of some of a batch's keys."""
        side, having = self._sides[_VERSIONS], np.arange(first, last)
        having = having[counts["right_rows"][first:last] > 0]
        owners, numbers = expanded(having, counts["right_first"][having], counts["right_next"][having])
        values = self._backend.multi_get(self._names(batch, side, owners, numbers))
        here = np.fromiter((value is not None for value in values), bool, len(values))
        rows = decoded(side, values)
        times = self._times(side, rows) if rows.num_rows else np.zeros(0, np.int64)
        return _Versions.of(owners[here], numbers[here], times, rows, [value for value in values if value is not None])

    def _joined(
        self, batch: KeyBatch, due: _Due, versions: _Versions, deletes: list[bytes], counts: dict[str, np.ndarray]
    ) -> Iterator[tuple[str, pa.Table]]:
        """Facts with their versions. They go: their names are added to `deletes`."""
        side = self._sides[_FACTS]
        names = self._names(batch, side, due.codes, due.numbers)
        values = self._backend.multi_get(names)
        here = np.fromiter((value is not None for value in values), bool, len(values))
        if not here.any():
            return
        facts = decoded(side, values)
        times, codes = self._times(side, facts), due.codes[here]
        places = versions.newest(codes, times, self._as_of.tolerance)
        whole = beside(due.entries.select(self._stage.key).filter(pa.array(here)), facts)
        if self._join.how == INNER:
            whole, places = whole.filter(pa.array(places >= 0)), places[places >= 0]
        if whole.num_rows:
            partners = versions.rows.take(pa.array(places, mask=places < 0))
            yield self._handed_out(side, whole, partners)
        deletes += names
        counts["left_rows"] -= np.bincount(codes, minlength=len(batch))
        emptied = counts["left_rows"] == 0
        counts["left_first"][emptied] = counts["left_next"][emptied]

    def _forget(
        self,
        batch: KeyBatch,
        due: _Due,
        versions: _Versions,
        remaining: np.ndarray,
        deletes: list[bytes],
        counts: dict[str, np.ndarray],
    ) -> None:
        """Forget versions that no fact of the remaining time can be joined with.

        Args:
            due: The entries of versions, which go. A version that stays has another one if it may become too old.
            remaining: int64[k]: by key, that time.
        """
        if not len(versions.owners):
            return
        side, tolerance, keys = self._sides[_VERSIONS], self._as_of.tolerance, np.unique(versions.owners)
        newest = np.full(len(batch), -1)
        newest[keys] = versions.newest(keys, remaining[keys])
        goes = np.arange(len(versions.owners)) < newest[versions.owners]
        if tolerance is not None:
            goes |= versions.times < remaining[versions.owners] - tolerance
        gone = versions.owners[goes], versions.numbers[goes]
        deletes += self._names(batch, side, *gone)
        if tolerance is not None:
            old = versions.times + tolerance + 1
            deletes += self._index(batch, side, *gone, old[goes])
            again = ~goes & due.has(versions.owners, versions.numbers)
            entries = self._index(batch, side, versions.owners[again], versions.numbers[again], old[again])
            self._backend.write([(entry, b"") for entry in entries])
        counts["right_rows"] -= np.bincount(gone[0], minlength=len(batch))
        oldest = counts["right_next"].copy()
        np.minimum.at(oldest, versions.owners[~goes], versions.numbers[~goes])
        counts["right_first"][keys] = oldest[keys]


@dataclass(frozen=True, slots=True)
class _Due:
    """Entries of the index: their keys, the codes of these, and the side and the number of each row."""

    entries: pa.Table
    codes: np.ndarray
    of_side: np.ndarray
    numbers: np.ndarray

    def between(self, side: int, first: int, last: int) -> _Due:
        """Return the entries of one side whose codes lie between two codes."""
        mine = (self.of_side == side) & (self.codes >= first) & (self.codes < last)
        return _Due(self.entries.filter(pa.array(mine)), self.codes[mine], self.of_side[mine], self.numbers[mine])

    def has(self, owners: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return bool[n], the rows that are among them."""
        mine = set(zip(self.codes.tolist(), self.numbers.tolist(), strict=True))
        return np.fromiter((pair in mine for pair in zip(owners, numbers, strict=True)), bool, len(owners))


@dataclass(frozen=True, slots=True)
class _Versions:
    """Versions by key and time: the codes of their keys, their numbers in state, their times, and they themselves."""

    owners: np.ndarray
    numbers: np.ndarray
    times: np.ndarray
    rows: pa.Table

    @classmethod
    def of(
        cls, owners: np.ndarray, numbers: np.ndarray, times: np.ndarray, rows: pa.Table, values: list[bytes]
    ) -> _Versions:
        """Versions in any order. Of those with one time the last is told by their content, so it is always the same.

        Args:
            values: The rows as state has them.
        """
        order = np.lexsort((times, owners))
        same = (np.diff(owners[order]) == 0) & (np.diff(times[order]) == 0)
        if same.any():
            contents = np.empty(len(values), object)
            contents[:] = values
            order = order[np.lexsort((np.argsort(np.argsort(contents[order])), times[order], owners[order]))]
        return cls(owners[order], numbers[order], times[order], rows.take(pa.array(order)))

    def newest(self, codes: np.ndarray, times: np.ndarray, tolerance: int | None = None) -> np.ndarray:
        """Return int64[n], for each key the place of the newest version that is not later than a time; -1: there is
        none.

        Args:
            tolerance: How much older it may be, in microseconds.
        """
        if not len(self.owners):
            return np.full(len(codes), -1)
        distinct = np.unique(self.times)
        span = len(distinct) + 1
        ranks = self.owners * span + np.searchsorted(distinct, self.times)
        places = np.searchsorted(ranks, codes * span + np.searchsorted(distinct, times, "right"), "left") - 1
        fits = (places >= 0) & (self.owners[places] == codes)
        if tolerance is not None:
            fits &= self.times[places] >= times - tolerance
        return np.where(fits, places, -1)


def _shares(counts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of keys that have not too many versions together."""
    ends, first = np.cumsum(counts), 0
    while first < len(counts):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + READ_ROWS, "right")), first + 1)
        yield first, last
        first = last
