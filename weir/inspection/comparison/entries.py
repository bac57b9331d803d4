"""The entries of two states of a stage side by side, in key order. Bytes are compared, so nothing is decoded.

Files, compaction, parallelism and the number of databases make no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from state_ops.backends.base import Backend
from state_ops.keyed.owners import GROUP_BYTES
from state_ops.rows.time_index import MOMENTS
from state_ops.schema import descriptors
from state_ops.snapshots.rescale import first_key
from weir.inspection.view import View

TIMERS = {descriptors.EVENT_TIMERS: "event time", descriptors.PROCESSING_TIMERS: "processing time"}
"""By their kind, the clocks of entries that are timers."""
HIDDEN = {
    **dict.fromkeys((*TIMERS, descriptors.EVENT_TIMERS_OF_KEY, descriptors.PROCESSING_TIMERS_OF_KEY), "a timer"),
    MOMENTS: "when it is due",
    descriptors.WINDOW_VALUES: "distinct values",
}
"""By their kind, entries of a key's state that no row shows."""

Pair = tuple[bytes, bytes | None, bytes | None]
"""An entry's key, and its value on both sides; None: that side has no such entry."""


def kind_of(key: bytes) -> int:
    """Return the kind of an entry, as `state_ops.schema.descriptors` has them."""
    return key[GROUP_BYTES]


def differs(pair: Pair) -> bool:
    """Return whether an entry is otherwise on the two sides."""
    key, first, second = pair
    if first is not None and second is not None and kind_of(key) in TIMERS:
        return False  # its value says in whose barrier the timer did not fire, which is over
    return first != second


def paired(
    first: Backend | None, second: Backend | None, groups: range, kinds: Sequence[int] = (), *, equal: bool = False
) -> Iterator[Pair]:
    """Yield the entries that differ between two states, in key order.

    Args:
        first, second: Each may be None, which has no entries.
        groups: The key groups that are looked into.
        kinds: The kinds of entries; by default all.
        equal: Whether entries that do not differ are yielded too.
    """
    entries, others = _entries(first, groups, kinds), _entries(second, groups, kinds)
    entry, other = next(entries, None), next(others, None)
    while entry is not None or other is not None:
        if entry == other and not equal:
            entry, other = next(entries, None), next(others, None)
        elif other is None or (entry is not None and entry[0] < other[0]):
            assert entry is not None
            yield *entry, None
            entry = next(entries, None)
        elif entry is None or other[0] < entry[0]:
            yield other[0], None, other[1]
            other = next(others, None)
        else:
            if equal or differs((*entry, other[1])):
                yield *entry, other[1]
            entry, other = next(entries, None), next(others, None)


def _entries(backend: Backend | None, groups: range, kinds: Sequence[int]) -> Iterator[tuple[bytes, bytes]]:
    if backend is None:
        return iter(())
    if not kinds:
        return iter(backend.scan(first_key(groups.start), first_key(groups.stop)))
    starts = (first_key(group) + bytes([kind]) for group in groups for kind in sorted(kinds))
    return chain.from_iterable(backend.scan(start, start[:-1] + bytes([start[-1] + 1])) for start in starts)


def paired_views(a: View, b: View, kinds: Sequence[int] = (), *, equal: bool = False) -> Iterator[Pair]:
    """Yield the entries that differ between two states, as `paired` does. Subtasks are opened one by one."""
    for subtask in range(a.parallelism):
        with a.opened(subtask) as first:
            for other in range(b.parallelism):
                ours, theirs = a.groups(subtask), b.groups(other)
                shared = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
                if shared:
                    with b.opened(other) as second:
                        yield from paired(first, second, shared, kinds, equal=equal)
