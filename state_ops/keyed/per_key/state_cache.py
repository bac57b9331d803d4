"""A cache of value state for single keys: one layer, or two.

    function -> L1 (write-back) -> [L2 (write-through)] -> values to bytes -> backend

Between two barriers the state in the backend need not be up to date, so an update can stay in L1 until its entry is
evicted or the barrier comes. The larger L1, the fewer gets and puts, but the longer the barrier, which waits for the
flush of every dirty entry. L2 lifts that: an entry that L1 evicts is put at once and stays in L2 clean, so only the
small L1 is flushed; the price is a put for every time that a dirty entry leaves L1. (The idea, its figures and the
worked example are those of King's state cache for Flink.)

What holds at any time:
- a key is in one layer at most, and what neither layer knows is in the backend;
- dirty entries are in L1; an entry is dirty if and only if it was updated or deleted since it was last written;
- that a key has no value is an entry like any other, so that absent keys are not asked for again.

A write that fails is fatal to the attempt: the cache refuses every later one, so that no author's `except` can lead to
a snapshot that lacks an update.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Generic, TypeVar

from state_ops.backends.base import Backend
from state_ops.errors import PipelineError, StageError, TransientError, WeirError
from state_ops.logs import Logger

V = TypeVar("V")

_UNKNOWN: Any = object()
_OVERHEAD_BYTES, _GROWTH = 300, 4  # of an entry in Python, over its encoding

log = Logger("weir.cache")


@dataclass(frozen=True, slots=True)
class ValueStore(Generic[V]):
    """Value state by encoded key in a backend: bytes below, decoded values above. encode and decode take whole batches;
    decode gives None for what counts as absent."""

    backend: Backend
    encode: Callable[[Sequence[V]], Sequence[bytes]]
    decode: Callable[[Sequence[bytes]], Sequence[V | None]]

    def get(self, keys: Sequence[bytes]) -> list[V | None]:
        """Return the values of `keys` in their order, None where there is none; one multi-get."""
        stored = self.backend.multi_get(keys)
        values = iter(self.decode([value for value in stored if value is not None]))
        return [None if value is None else next(values) for value in stored]

    def write(self, changes: Mapping[bytes, V | None]) -> None:
        """Put every value, and delete the keys whose value is None: one batch, all or nothing."""
        kept = {key: value for key, value in changes.items() if value is not None}
        gone = [key for key, value in changes.items() if value is None]
        self.backend.write(list(zip(kept, self.encode(list(kept.values())), strict=True)), gone)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Entries in each layer; l2 = 0 is the one-layer cache. Raises PipelineError for sizes that make no cache."""

    l1: int
    l2: int = 0

    def __post_init__(self) -> None:
        if self.l1 < 1 or self.l2 < 0:
            raise PipelineError(
                f"A state cache of l1={self.l1} and l2={self.l2} entries cannot work.",
                next="Give l1 at least 1 and l2 0 (one layer) or more (two layers).",
            )


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """A cache's figures since the last barrier, in entries; sums over subtasks.

    Attributes:
        evicted: Dirty entries that were written before the barrier because L1 was full.
        flushed: Dirty entries that the barrier wrote.
    """

    l1_hits: int = 0
    l2_hits: int = 0
    misses: int = 0
    evicted: int = 0
    flushed: int = 0

    def __add__(self, other: CacheFigures) -> CacheFigures:
        return CacheFigures(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def hit_rate(self) -> float:
        """The share of reads that asked nothing of the backend, 0 to 1; 0 if nothing was read."""
        hits = self.l1_hits + self.l2_hits
        return hits / (hits + self.misses) if hits else 0.0

    def log(self, operator: str, checkpoint: int) -> None:
        """Return a line about one stage of one checkpoint, for debugging. The epoch's own line has the figures too."""
        log.debug(
            "state cache",
            operator=operator,
            checkpoint=checkpoint,
            **dataclasses.asdict(self),
            hit_rate=round(self.hit_rate, 4),
        )


@dataclass(frozen=True, slots=True)
class Contents(Generic[V]):
    """The entries of a cache without dirty ones, least recently used first: equal to the backend that was below it."""

    l1: OrderedDict[bytes, V | None]
    l2: OrderedDict[bytes, V | None]


class StateCache(Generic[V]):
    """At most sizes.l1 + sizes.l2 entries above `store`.

    Values are shared with the caller and must not be changed in place: give a new one to `update`.

    Args:
        warm: What the cache begins with, which must equal what the store holds.
    """

    def __init__(self, store: ValueStore[V], sizes: CacheSizes, warm: Contents[V] | None = None) -> None:
        self._store, self._l1_size, self._l2_size = store, sizes.l1, sizes.l2
        self._l1: OrderedDict[bytes, V | None] = OrderedDict()
        self._l2: OrderedDict[bytes, V | None] = OrderedDict()
        self._dirty: dict[bytes, None] = {}  # a set in the order of the updates
        self._failure: WeirError | None = None
        self._begin_figures()
        if warm is not None:
            self._l1, self._l2 = warm.l1, warm.l2
            self._make_room()
            self._bound_l2()

    def get(self, key: bytes) -> V | None:
        """Return the key's value; None if it has none."""
        value = self._l1.get(key, _UNKNOWN)
        if value is _UNKNOWN:
            return self.get_many([key])[0]
        self._l1.move_to_end(key)
        self._l1_hits += 1
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[V | None]:
        """Return the values of distinct keys, in their order: one multi-get for all that no layer has, and at most one
        write for what that evicts. Afterwards the keys are the most recently used ones, those just read last."""
        missing = []
        for key in keys:
            if key in self._l1:
                self._l1.move_to_end(key)
                self._l1_hits += 1
            elif key in self._l2:
                self._l1[key] = self._l2.pop(key)
                self._l2_hits += 1
            else:
                missing.append(key)
        if missing:
            self._misses += len(missing)
            self._l1.update(zip(missing, self._below(self._store.get, missing), strict=True))
        values = [self._l1[key] for key in keys]
        self._make_room()
        return values

    def update(self, key: bytes, value: V) -> None:
        """Set the key's value; the store learns of it when the entry is evicted, or at the barrier."""
        self.update_many({key: value})

    def delete(self, key: bytes) -> None:
        """Forget the key's value; the store learns of it when the entry is evicted, or at the barrier."""
        self.update_many({key: None})

    def update_many(self, changes: Mapping[bytes, V | None]) -> None:
        """Set several keys' values, or forget them where the value is None; at most one write for what that evicts."""
        for key, value in changes.items():
            self._l2.pop(key, None)
            self._l1[key] = value
            self._l1.move_to_end(key)
            self._dirty[key] = None
        self._make_room()

    def flush(self) -> None:
        """Write every dirty entry in one batch; all entries are clean then. Raises what made it fail, now or
        earlier."""
        if self._failure is not None:
            raise self._failure
        if self._dirty:
            self._flushed += len(self._dirty)
            self._write({key: self._l1[key] for key in self._dirty})

    def barrier(self) -> CacheFigures:
        """Flush, and begin to count anew; returns the figures since the last barrier."""
        self.flush()
        figures = CacheFigures(self._l1_hits, self._l2_hits, self._misses, self._evicted, self._flushed)
        self._begin_figures()
        return figures

    def size_bytes(self) -> int:
        """About what the entries take in memory: Python objects are some times larger than their encoding, of which a
        sample is taken."""
        sample = [value for value in islice(self._l1.values(), 64) if value is not None]
        encoded = sum(map(len, self._store.encode(sample))) // len(sample) if sample else 0
        return (len(self._l1) + len(self._l2)) * (_OVERHEAD_BYTES + _GROWTH * encoded)

    def contents(self) -> Contents[V]:
        """Return the cache's contents, to begin another one with. Call it only right after a flush: they must equal the
        store.
        """
        if self._dirty or self._failure is not None:
            raise RuntimeError("a state cache was asked for its contents while they differ from the store's")
        return Contents(self._l1, self._l2)

    # -- how

    def _make_room(self) -> None:
        """Let go what is too much in L1: into the store if it is dirty, and into L2 if there is one."""
        over = len(self._l1) - self._l1_size
        if over <= 0:
            return
        leaving = list(islice(self._l1.items(), over))
        dirty = {key: value for key, value in leaving if key in self._dirty}
        if dirty:
            self._evicted += len(dirty)
            self._write(dirty)
        for key, value in leaving:
            del self._l1[key]
            self._l2[key] = value
        self._bound_l2()

    def _bound_l2(self) -> None:
        while len(self._l2) > self._l2_size:
            self._l2.popitem(last=False)

    def _write(self, changes: dict[bytes, V | None]) -> None:
        self._below(self._store.write, changes)
        for key in changes:
            del self._dirty[key]

    def _below(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """Call the store. Its first failure is remembered and raised again from then on."""
        if self._failure is not None:
            raise self._failure
        try:
            return call(argument)
        except Exception as error:
            self._failure = _typed(error)
            if self._failure is error:
                raise
            raise self._failure from error

    def _begin_figures(self) -> None:
        self._l1_hits = self._l2_hits = self._misses = self._evicted = self._flushed = 0


def _typed(error: Exception) -> WeirError:
    if isinstance(error, WeirError):
        return error
    kind = TransientError if isinstance(error, OSError) else StageError
    return kind(
        f"The state cache could not reach the state below it: {type(error).__name__}: {error}",
        where="state cache",
        next="The epoch was declined and nothing of it was kept; it will be replayed.",
    )
