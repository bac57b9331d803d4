"""Files of ascending entries that are written beside an open database, which takes them over at the snapshot.

    run-<number of the shard>.unfinished    in the attempt's directory; gone when it is handed over, or with the attempt

It costs half of what the way through a memtable costs, and gives one file a shard and epoch, however much is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rocksdict import Options, SstFileWriter

from state_ops.backends.base import BEYOND, SortedRun
from state_ops.backends.key_ranges import slices

_FILE = "run-{}.unfinished"


class RunFiles:
    """Ascending puts and deletes of one epoch in files beside the database, one for each shard that they touch.

    Args:
        options: Of a shard's files, by its number.
    """

    def __init__(self, directory: Path, options: Callable[[int], Options]) -> None:
        self._directory, self._options = directory, options
        self._shards: list[int] = []  # those that have files, of which the last one's is open
        self._file: SstFileWriter | None = None
        self.entries = 0
        self.last = b""

    def ends_below(self, run: SortedRun, deletes: Sequence[bytes]) -> bool:
        """Return whether all of these keys lie above the keys in the files."""
        return self.last < min([*run.ascending[:1], *deletes[:1]], default=BEYOND)

    def add(self, run: SortedRun, deletes: Sequence[bytes], starts: Sequence[bytes]) -> None:
        """Write what lies above everything that is in the files. starts: The first key of each shard."""
        parts = zip(slices(run.ascending, starts), slices(deletes, starts), strict=True)
        for index, (part, gone) in enumerate(parts):
            if part.start == part.stop and gone.start == gone.stop:
                continue
            file = self._file_of(index)
            if gone.start == gone.stop:
                deque(map(file.__setitem__, run.ascending[part], run.values[part]), maxlen=0)
            else:
                _fill(file, run[part], deletes[gone])
        self.entries += len(run)
        self.last = max([self.last, *run.ascending[-1:], *deletes[-1:]])

    def finished(self) -> Iterator[tuple[int, str]]:
        """Yield the shard's number and the path of each file, complete."""
        if self._file is not None:
            self._file.finish()
        for index in self._shards:
            yield index, self._path(index)

    def _file_of(self, index: int) -> SstFileWriter:
        if self._file is None or index != self._shards[-1]:
            if self._file is not None:
                self._file.finish()
            self._file = SstFileWriter(self._options(index))
            self._file.open(self._path(index))
            self._shards.append(index)
        return self._file

    def _path(self, index: int) -> str:
        return str(self._directory / _FILE.format(index))


def _fill(file: SstFileWriter, puts: SortedRun, deletes: Sequence[bytes]) -> None:
    """Write puts and deletes, both in key order, in the key order of all; a key that is in both is put."""
    put, delete = file.__setitem__, file.__delitem__
    ascending = iter([*deletes, BEYOND])
    gone = next(ascending)
    for key, value in puts:
        while gone <= key:
            if gone < key:
                delete(gone)
            gone = next(ascending)
        put(key, value)
    while gone != BEYOND:
        delete(gone)
        gone = next(ascending)
