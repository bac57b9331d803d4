"""Partials of one epoch that do not fit into memory: on the local disk until the barrier, split by ranges of key
groups.

    <directory>/spill/<range>-<number>.arrow    in the order in which they came; gone after the barrier, or with the
                                                attempt's directory

All partials of a key lie in one range, so ranges go to state one after the other, and each key is read from state and
written to it once an epoch, however many rows it has (external hash aggregation: Graefe, Query Evaluation Techniques
for Large Databases, 1993)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from state_ops.schema.descriptors import GROUP

RANGES = 16
_RANGE = "__weir_range"


class Spill:
    """Rows on the local disk, in ranges of key groups, until one range after the other is read back.

    Args:
        groups: The key groups of the subtask.
    """

    def __init__(self, directory: Path, groups: range) -> None:
        self._directory, self._groups = directory / "spill", groups
        self._ranges: dict[int, list[Path]] = {}
        self._number = 0

    def __len__(self) -> int:
        """How often something was added."""
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
        """The rows of one range after the other, as they were added; then it is empty."""
        for number in sorted(self._ranges):
            files = self._ranges.pop(number)
            yield [pl.read_ipc(file.read_bytes()) for file in files]  # a copy: nothing of a mapped file stays in memory
            for file in files:
                file.unlink()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._number = 0
