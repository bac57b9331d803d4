"""Partials of one epoch that do not fit into memory: on the local disk until the barrier, split by ranges of key
groups.

    <directory>/<name>/<range>-<number>.arrow          in the order in which they came; gone after the barrier, or with
                                                       the attempt's directory
    <directory>/<name>/<range>-<number>-<part>.arrow   of a range that does not fit into memory either

All partials of a key lie in one range, so ranges go to state one after the other, and each key is read from state and
written to it once an epoch, however many rows it has (external hash aggregation: Graefe, Query Evaluation Techniques
for Large Databases, 1993). A range that is too large, since most keys are of one key group, is split by the hash of its
keys; its parts are not in the keys' order then, so state is written in more and smaller runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

from state_ops.rows import key_aggregation
from state_ops.schema.descriptors import GROUP

RANGES = 16
_RANGE = "__weir_range"


class Spill:
    """Rows on the local disk, in ranges of key groups, until one range after the other is read back.

    Args:
        groups: The key groups of the subtask.
        keys: Columns by which a range that is too large is split; without any, ranges stay whole.
        name: Of its own directory.
    """

    def __init__(self, directory: Path, groups: range, keys: Sequence[str] = (), name: str = "spill") -> None:
        self._directory, self._groups, self._keys = directory / name, groups, list(keys)
        self._ranges: dict[int, list[Path]] = {}
        self._number = 0

    def __len__(self) -> int:
        """Return how often something was added."""
        return self._number

    def add(self, rows: pl.DataFrame) -> None:
        """Write rows, which have their key groups. OSError on a full disk."""
        self._directory.mkdir(exist_ok=True)
        at = (pl.col(GROUP).cast(pl.Int64) - self._groups.start) * RANGES // len(self._groups)
        for (number,), part in rows.with_columns(at.alias(_RANGE)).partition_by(_RANGE, as_dict=True).items():
            file = self._directory / f"{number}-{self._number}.arrow"
            part.drop(_RANGE).write_ipc(file, compression="uncompressed")
            self._ranges.setdefault(int(number), []).append(file)
        self._number += 1

    def take(self) -> Iterator[list[pl.DataFrame]]:
        """Yield the rows of one range after the other, or of a part of it, as they were added; then it is empty."""
        for number in sorted(self._ranges):
            for files in self._parts(self._ranges.pop(number)):
                yield [_read(file) for file in files]
                for file in files:
                    file.unlink()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._number = 0

    def _parts(self, files: list[Path]) -> Iterator[list[Path]]:
        """Yield the files of a range, or those of its parts, which have the rows of some of its keys each."""
        size, most = sum(file.stat().st_size for file in files), key_aggregation.PARTIAL_BYTES
        if not self._keys or size <= most:
            yield files
            return
        number = 2 * size // most + 1
        parts: list[list[Path]] = [[] for _ in range(number)]
        for file in files:
            rows = _read(file)
            part_of = rows.select(self._keys).hash_rows() % number
            for (part,), some in rows.with_columns(part_of.alias(_RANGE)).partition_by(_RANGE, as_dict=True).items():
                parts[part].append(file.with_name(f"{file.stem}-{part}.arrow"))
                some.drop(_RANGE).write_ipc(parts[part][-1], compression="uncompressed")
            file.unlink()
        yield from filter(None, parts)


def _read(file: Path) -> pl.DataFrame:
    return pl.read_ipc(file.read_bytes())  # a copy: nothing of a mapped file stays in memory
