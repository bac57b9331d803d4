"""The shared state registry: how many checkpoints reference each object.

Counts are derived from the listings of the retained checkpoints each time they are needed. They are never stored: a
stored count drifts at the first crash between two writes, and a drifted count either leaks objects or deletes live
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from state_ops.records.snapshot_files import StateFile
from state_ops.storage.branches import is_inherited


def reference_counts(listings: Iterable[Iterable[StateFile]]) -> Counter[str]:
    """Return the number of checkpoints that reference each object, by storage path."""
    return Counter(path for files in listings for path in {file.path for file in files})


def unreferenced(dropped: Iterable[Iterable[StateFile]], kept: Iterable[Iterable[StateFile]]) -> list[StateFile]:
    """Objects that only the dropped listings name, each once.

    Published output belongs to its table, and inherited files of a branch belong to the pipeline that it was forked
    from: they are never listed.
    """
    counts = reference_counts(kept)
    gone = {
        file.path: file
        for files in dropped
        for file in files
        if not file.in_table and counts[file.path] == 0 and not is_inherited(file.path)
    }
    return sorted(gone.values(), key=lambda file: file.path)
