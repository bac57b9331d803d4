"""Keys and entries by ranges of keys: the shards of one database, and databases side by side.

A range begins at its first key and ends where the next one begins; the first range also has what comes before its key.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise, starmap
from typing import TypeVar

from state_ops.backends.base import SortedRun

Entry = TypeVar("Entry", tuple[bytes], tuple[bytes, bytes], tuple[bytes, int])


def slices(ordered: Sequence[bytes], starts: Sequence[bytes]) -> Iterator[slice]:
    """Yield the slice of `ordered` that has the keys of each range.

    Args:
        starts: The ranges' first keys, in order.
    """
    return starmap(slice, pairwise([0, *(bisect_left(ordered, start) for start in starts[1:]), len(ordered)]))


def by_range(entries: Sequence[Entry], starts: Sequence[bytes]) -> Sequence[Sequence[Entry]]:
    """Entries range by range.

    Args:
        entries: Each begins with its key.
        starts: The ranges' first keys, in order.
    """
    if len(starts) == 1:
        return [entries]
    if isinstance(entries, SortedRun):
        return [entries[part] for part in slices(entries.ascending, starts)]
    parts: list[list[Entry]] = [[] for _ in starts]
    inner = starts[1:]
    for entry in entries:
        parts[bisect_right(inner, entry[0])].append(entry)
    return parts
