"""Make `tests/golden/registry-format-1`: a registry as the first release writes it, with two checkpoints.

It was made once, by the code of format 1, and is never made again: newer code must go on reading these very bytes. For
the next format run this with that release's code and give the directory that format's number.

    python tests/golden/make_registry.py <directory>
"""

from __future__ import annotations

import sys
from pathlib import Path

from state_ops.checkpoints.registry import Registry
from state_ops.ids import Generation
from state_ops.storage.storage import Storage
from tests.state_ops.checkpoints.test_registry import APP, a_checkpoint, a_file, published


def make(root: Path) -> None:
    registry = Registry(Storage(str(root)), APP)
    assert registry.take_over() == 1
    kept = a_file("1.sst")
    for id, files in ((1, [kept]), (2, [kept, a_file("2.sst", "a2"), a_file("rows.parquet", "a2", kind="output")])):
        registry.commit(a_checkpoint(id, id - 1 or None, files), files)
        registry.record_publications(Generation(1), [published(id)])


if __name__ == "__main__":
    make(Path(sys.argv[1]))
