"""Writes tests/golden/started-format-1: a pipeline that an early release started from a savepoint, so that its ids
began at 1 again.

It was run once, with that release, and is never run again: `python -m tests.golden.make_started <an empty directory>`.
Checkpoint 1 is the start, 2 the epoch of file 4. For each key the state holds a timer that epoch 3 of the savepoint's
pipeline had set and held.
"""

from __future__ import annotations

import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

from pipelines.runtime.run import maintenance

from tests.recovery import test_timers


def make(root: Path) -> None:
    """Run the two pipelines and keep the second one's storage, without what says where that was."""
    old = "tests.recovery.test_timers:ticking"
    small = {
        "WEIR_STATE__BACKEND": "filesystem",
        "WEIR_SPARK__PARALLELISM": "1",
        "WEIR_PIPELINES__PARKING__OBJECT": old,
    }
    lot = test_timers.Parking(root, test_timers.ticking, **small)
    lot.epochs(1, 2, 3)
    maintenance.savepoint(lot.site.pipeline, lot.site.settings, "held", "", 5)
    other = test_timers.Parking(root)
    other.site = replace(lot.site, pipeline=replace(test_timers.ticking, name="successor"))
    other.epochs(4, start_from="parking:held")
    shutil.copytree(other.site.storage, test_timers.GOLDEN)
    for entry in test_timers.GOLDEN.rglob("*.json"):
        entry.write_text(entry.read_text().replace(socket.gethostname(), "host"))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
