"""A lookup's table in memory: its rows, and an index that finds those of many keys at once.

The index is the sorted hashes of the keys. A batch's keys are found among them by bisection, and compared afterwards,
since two keys may have one hash. So finding costs what the batch costs, however large the table is.

A process keeps what it has read, by table, version and key groups, for all subtasks and epochs that need it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

_PAIRS = 200_000  # at a time


class TooLargeError(Exception):
    """More rows than may be kept. bytes: how many there were so far."""

    def __init__(self, bytes: int) -> None:
        super().__init__(bytes)
        self.bytes = bytes


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """Rows of a table by key.

    Attributes:
        rows: Those that have a key.
        keys: The names of the key columns.
        hashes: uint64[n], of the rows' keys, sorted.
        order: int64[n], the numbers of the rows in this order.
        distinct: No two hashes are equal, as where the keys are the table's primary key.
    """

    rows: pa.Table
    keys: tuple[str, ...]
    hashes: np.ndarray
    order: np.ndarray
    distinct: bool

    @classmethod
    def of(cls, parts: Iterable[pa.Table], columns: pa.Schema, keys: tuple[str, ...], most_bytes: int) -> KeyIndex:
        """Index rows. Those of which a key column is null are left out, since they equal no key.

        Args:
            columns: Of all parts.
            most_bytes: How much rows and index may take.

        Raises:
            TooLargeError: They would take more.
        """
        kept, size = [columns.empty_table()], 0
        for part in parts:
            for key in keys:
                part = part.filter(pc.is_valid(part.column(key)))
            size += part.nbytes + 16 * part.num_rows
            if size > most_bytes:
                raise TooLargeError(size)
            kept.append(part)
        rows = pa.concat_tables(kept).combine_chunks()
        hashes = _hashes(rows.select(keys))
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        return cls(rows, keys, hashes, order, bool((hashes[1:] != hashes[:-1]).all()))

    @property
    def bytes(self) -> int:
        return int(self.rows.nbytes + self.hashes.nbytes + self.order.nbytes)

    def pairs(self, keys: pa.Table, *, outer: bool) -> Iterator[tuple[pa.Array, pa.Array]]:
        """Yield which rows of the table have which keys, in the order of the keys: numbers of keys, and of rows.

        Args:
            keys: The key columns, with the types and in the order of the table's.
            outer: A key that no row has comes once, with null for the row. One with a null in it is such a key.
        """
        hashes = _hashes(keys)
        first = np.searchsorted(self.hashes, hashes, "left")
        if self.distinct and len(self.hashes):  # a second bisection takes as long as the first
            first = np.minimum(first, len(self.hashes) - 1)
            counts = (self.hashes[first] == hashes).astype(np.int64)
        else:
            counts = np.searchsorted(self.hashes, hashes, "right") - first
        for column in keys.columns if keys.num_columns else ():
            if column.null_count:
                counts[~np.asarray(pc.is_valid(column))] = 0
        ends = np.cumsum(counts)
        start = 0
        while start < len(counts):
            before = int(ends[start - 1]) if start else 0
            stop = max(int(np.searchsorted(ends, before + _PAIRS, "right")), start + 1)
            stop = min(stop, start + _PAIRS)
            yield self._compared(keys, start, first[start:stop], counts[start:stop], outer)
            start = stop

    def _compared(
        self, keys: pa.Table, start: int, first: np.ndarray, counts: np.ndarray, outer: bool
    ) -> tuple[pa.Array, pa.Array]:
        """Return the pairs of some of the keys, those from number `start` on."""
        ends = np.cumsum(counts)
        total = int(ends[-1])
        of = np.repeat(np.arange(len(counts)), counts)
        rows = self.order[first[of] + np.arange(total) - (ends - counts)[of]]
        equal = np.ones(total, bool)
        for theirs, name in zip(keys.columns, self.keys, strict=True):
            wanted = theirs.take(pa.array(of + start))
            equal &= np.asarray(pc.equal(wanted, self.rows.column(name).take(pa.array(rows))))
        if not equal.all():
            of, rows = of[equal], rows[equal]
        if not outer:
            return pa.array(of + start), pa.array(rows)
        alone = np.ones(len(counts), bool)
        alone[of] = False
        unpaired = np.flatnonzero(alone)
        whole = np.concatenate([of, unpaired])
        order = np.argsort(whole, kind="stable")
        missing = np.concatenate([np.zeros(len(of), bool), np.ones(len(unpaired), bool)])[order]
        numbers = np.concatenate([rows, np.zeros(len(unpaired), np.int64)])[order]
        return pa.array(whole[order] + start), pa.array(numbers, mask=missing)


def _hashes(keys: pa.Table) -> np.ndarray:
    """Return uint64[n], equal for equal keys in one process."""
    frame = pl.DataFrame(pl.from_arrow(keys))
    return frame.hash_rows(seed=7).to_numpy() if len(frame) else np.zeros(0, np.uint64)


class Kept:
    """The tables that a process keeps in memory. The one that was used longest ago goes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading: dict[Hashable, threading.Lock] = {}
        self._kept: OrderedDict[Hashable, KeyIndex] = OrderedDict()

    def get(self, name: Hashable, read: Callable[[], KeyIndex], most_bytes: int) -> KeyIndex:
        """Return the index kept under a name. If there is none, it is read once, however many ask for it.

        Args:
            most_bytes: What all that is kept may take.
        """
        with self._lock:
            reading = self._reading.setdefault(name, threading.Lock())
        with reading:
            with self._lock:
                if name in self._kept:
                    self._kept.move_to_end(name)
                    return self._kept[name]
            index = read()
            with self._lock:
                self._kept[name] = index
                while len(self._kept) > 1 and sum(kept.bytes for kept in self._kept.values()) > most_bytes:
                    self._reading.pop(self._kept.popitem(last=False)[0], None)
            return index

    def __len__(self) -> int:
        return len(self._kept)


_process = Kept()
get = _process.get
