"""What rows on their way to subtasks cost, over widths and subtasks: in blocks of columns, and as Spark's rows.

    make bench-exchange        about a quarter of an hour; writes benchmarks/results/exchange.*

Real epochs of one stage on Spark, whose function counts a key's rows and looks at all columns. **read** is a slice that
Python can read; **evaluated** one with a transform, which Spark must run; **sorted** the same with an `order_by`. For
each, the processor time of all processes an epoch, with `spark.exchange` at `rows` and at `blocks`, and what `auto`
takes. No slice is so small that subtasks read all of it (`direct_read_mb: 0`).
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks import harness
from benchmarks.harness import Row
from weir import Epoch, Pipeline, State, ValueState, agg, files, stage

WIDTHS, SUBTASKS = (0, 32, 128, 512, 2048), (2, 16)
KINDS: dict[str, dict[str, Any]] = {
    "read": {},
    "evaluated": {"transform": lambda rows: rows},
    "sorted": {"transform": lambda rows: rows, "order_by": ("a",)},
}
_KEYS, _BYTES, _MOST_ROWS, _FILES, _WARM = 10_000, 60 << 20, 1_000_000, 4, 2


class Count(State):
    """Of a key."""

    n: int = 0


@stage("counts", source=files("{landing}/*.parquet"), key="key", state=Count)
def counts(rows: pl.DataFrame, state: ValueState, _: Epoch) -> None:
    """Counts the rows of each key."""
    state.fold(rows, n=agg.count())


def write(landing: Path, width: int, epochs: int, keys: int = _KEYS) -> int:
    """Slices of about the same bytes whatever their rows' width, and how many rows each has."""
    rows = min(_MOST_ROWS, _BYTES // (24 + width)) // _FILES * _FILES
    draw, landing_files = np.random.default_rng(width), epochs * _FILES
    landing.mkdir(parents=True)
    for number in range(landing_files):
        count = rows // _FILES
        columns = {
            "key": draw.integers(0, keys, count),
            "a": draw.integers(0, 1 << 40, count),
            "b": draw.random(count),
        }
        if width:
            letters = pa.py_buffer(draw.integers(97, 123, count * width, dtype=np.uint8).tobytes())
            fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), count, [None, letters])
            columns["text"] = fixed.cast(pa.binary()).cast(pa.string())
        pq.write_table(pa.table(columns), landing / f"{number:04d}.parquet", compression="zstd", row_group_size=65_536)
    return rows


def measured(scratch: Path, epochs: int) -> list[Row]:
    """A row for each cell of the grid: CPU seconds an epoch either way, medians, and what `auto` takes."""
    cells = []
    for width in WIDTHS:
        landing = scratch / f"landing-{width}"
        rows = write(landing, width, _WARM + epochs)
        for subtasks, kind in itertools.product(SUBTASKS, KINDS):
            cell: Row = {"width": width, "subtasks": subtasks, "kind": kind}
            pipeline = Pipeline("counting", (replace(counts, **KINDS[kind]),))
            for setting in ("rows", "blocks", "auto"):
                root = scratch / f"{width}-{subtasks}-{kind}-{setting}"
                spark = {"exchange": setting, "parallelism": subtasks, "direct_read_mb": 0}
                settings = harness.local_settings(
                    root, "counting", landing, spark=spark, epoch={"max_files": _FILES, "max_rows": 100 * _MOST_ROWS}
                )
                ran = list(harness.epochs(pipeline, settings))
                (stats,) = ran[-1].report.checkpoint.operators.values()
                assert len(ran) == _WARM + epochs and stats.rows_in == rows
                cell[setting] = float(np.median([epoch.cpu for epoch in ran[_WARM:]])) / 1e3
                cell["taken"] = stats.exchange
            print(cell, flush=True)
            cells.append(cell)
    return cells


def report(figures: dict[str, Any]) -> str:
    """The Markdown of the grid."""
    for cell in figures["cells"]:
        taken = cell["rows" if cell["taken"] == "rows" else "blocks"]
        cell["over"] = taken / min(cell["rows"], cell["blocks"]) - 1
    return harness.render("exchange", **figures)


def main(epochs: int = 3, results: Path = harness.RESULTS / "exchange") -> None:
    """Blocks of columns beside Spark's rows, over widths and subtasks."""
    load = os.getloadavg()[0]
    figures = {"machine": harness.machine(), "load": load, "epochs": epochs, "slice": _BYTES >> 20}
    figures["cells"] = harness.in_scratch(measured, epochs)
    harness.publish(results, figures, report(figures))


if __name__ == "__main__":
    typer.run(main)
