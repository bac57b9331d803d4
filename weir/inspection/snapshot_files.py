"""Snapshots of completed checkpoints, fetched into temporary directories and opened for reading."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from state_ops.backends import composite
from state_ops.backends.base import Backend, BackendOptions
from state_ops.backends.loader import named
from state_ops.records.snapshot_files import Snapshot, StateFile
from state_ops.snapshots import snapshot
from state_ops.storage import disks
from state_ops.storage.storage import Storage


@contextmanager
def opened(
    storage: Storage, options: BackendOptions, taken: Snapshot, backend_name: str, below: Path | None = None
) -> Iterator[Backend]:
    """Yield a snapshot, fetched and verified, open in the backend that wrote it.

    Args:
        below: Where its files go, by default among those that are temporary.
    """
    with tempfile.TemporaryDirectory(prefix="weir-state-", dir=below) as scratch:
        snapshot.fetch(storage, taken, Path(scratch))
        backend = composite.opened(named(backend_name), Path(scratch), options)
        try:
            yield backend
        finally:
            backend.close()


@dataclass
class SnapshotCache:
    """Opens snapshots of one storage one after the other; objects that one shares with the one before are not fetched
    again.

    Attributes:
        root: An empty directory of its own. It holds the files of two snapshots at most.
    """

    root: Path
    _before: dict[str, Path] = field(default_factory=dict)  # by object, where it is
    _opened: int = 0

    @contextmanager
    def opened(
        self, storage: Storage, options: BackendOptions, taken: Snapshot, backend_name: str
    ) -> Iterator[Backend]:
        """Yield the snapshot as `opened` does. Only files that backends never change in place are shared, by hard
        links."""
        factory = named(backend_name)
        is_immutable = composite.is_immutable(factory)
        here = self.root / str(self._opened)
        here.mkdir()
        self._opened += 1
        pristine = self.root / f"{here.name}.files"  # the backend deletes what it has no use for
        pristine.mkdir()
        missing = tuple(file for file in taken.files if not self._linked(file, here))
        snapshot.fetch(storage, replace(taken, files=missing), here)
        kept = {}
        for file in taken.files:
            if is_immutable(file.name):
                disks.link(here / file.name, pristine / file.name)
                kept[file.path] = pristine / file.name
        for directory in self.root.iterdir():
            if directory not in (here, pristine):
                shutil.rmtree(directory)
        self._before = kept
        backend = composite.opened(factory, here, options)
        try:
            yield backend
        finally:
            backend.close()

    def _linked(self, file: StateFile, target: Path) -> bool:
        source = self._before.get(file.path)
        if source is None:
            return False
        disks.link(source, target / file.name)
        return True
