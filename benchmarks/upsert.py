"""Upserts: a publish of changes to 1 % of a table's keys, beside the MERGE of the same rows by Spark and by delta-rs.

    python -m benchmarks.upsert                       tables of 3M and 20M rows; ten minutes and 10 GB of disk
    python -m benchmarks.upsert --rows 500000 --reps 2 --results /tmp/upsert

Each way has a copy of the table on the local disk: keys are integers with 64 bytes of text and a number beside them, in
files of a million rows that are sorted by key. Spark is `local[2]` and has merged once before. Repetitions alternate,
medians count. All changes are updates; afterwards all three tables have to be the same.

- clustered: the changed keys lie next to each other. uniform: anywhere, so every file has some.
- publish: `upsert.publish` of the staged rows, from their file to the commit. merge: `DeltaTable.merge` of the same
  rows. spark: delta-spark's `MERGE INTO` of the same rows, from a Parquet file. Both have bounds of the key in their
  predicates. bytes: what the new version's files have that the one before had not.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from deltalake import CommitProperties, DeltaTable, Transaction

from benchmarks import harness
from benchmarks.harness import cpu_seconds, seconds
from state_ops.delta.log_entries import DataFile
from state_ops.ids import AttemptId, CheckpointId, Generation
from state_ops.records.checkpoint import Checkpoint
from state_ops.records.snapshot_files import OUTPUT, StateFile
from state_ops.storage.storage import Storage
from weir import delta as sinks
from weir.connectors.delta import append, upsert
from weir.connectors.delta.statistics import statistics
from weir.connectors.delta.table_commit import TableChange, commit

SCHEMA = pa.schema([("key", pa.int64()), ("text", pa.string()), ("n", pa.int64())])
SINK = sinks.upsert("out", "key")
APP = "weir/bench/main"
_FILE_ROWS = 1_000_000
_SHARE = 0.01
WAYS = ("publish", "merge", "spark")
_NOW = datetime(2026, 1, 1, tzinfo=UTC)


def checkpoint(number: int) -> Checkpoint:
    """One whose publishing alone is looked at."""
    return Checkpoint(
        id=CheckpointId(number),
        parent_id=None,
        kind="checkpoint",
        generation=Generation(1),
        commit_id="",
        triggered_at=_NOW,
        completed_at=_NOW,
        epoch_now=_NOW,
        trigger="",
        reason="",
        offsets={},
        slice={},
        watermarks={},
        operators={},
        sinks={},
        inputs={},
        ms={},
        totals={},
        files=0,
        bytes_total=0,
        bytes_new=0,
    )


class Table:
    """A table of so many rows, to which changes are made; or a copy of one."""

    def __init__(self, root: Path, rows: int, like: Table | None = None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        if like is not None:
            shutil.copytree(like.storage.uri, root / "p")
        self.storage, self.rows, self._scratch = Storage(str(root / "p")), rows, root / "scratch"
        self._scratch.mkdir()
        self._draw, self._last = np.random.default_rng(1), 1
        if like is None:
            self._fill(root / "file")

    def _fill(self, local: Path) -> None:
        append.ensure(self.storage, "out", SCHEMA)
        files = []
        for start in range(0, self.rows, _FILE_ROWS):
            rows = self._some(np.arange(start, min(start + _FILE_ROWS, self.rows)))
            pq.write_table(rows, local, compression="zstd")
            path = f"data/g1-e1/{start}-a.parquet"
            size, _ = self.storage.put_file(local, f"tables/out/{path}")
            footer = pq.read_metadata(local)
            files.append(DataFile(path, size, footer.num_rows, statistics=statistics(footer)))
        rows = TableChange(files)
        commit(self.storage, APP, "out", checkpoint(1), None, lambda _: rows, lambda why: AssertionError(why))  # type: ignore[arg-type,return-value]

    def _some(self, keys: np.ndarray) -> pa.Table:
        texts = pl.Series(self._draw.integers(0, 1 << 60, len(keys))).cast(pl.String).str.pad_start(64, "x").to_arrow()
        return pa.table([keys, texts.cast(pa.string()), self._draw.integers(0, 1 << 40, len(keys))], schema=SCHEMA)

    def changes(self, clustered: bool) -> pa.Table:
        """New rows of a share of the keys."""
        number = int(self.rows * _SHARE)
        if clustered:
            start = int(self._draw.integers(0, self.rows - number))
            return self._some(np.arange(start, start + number))
        return self._some(self._draw.choice(self.rows, number, replace=False))

    def files(self) -> dict[str, int]:
        """Bytes by file."""
        actions = pa.table(self._handle().get_add_actions(flatten=True))
        return dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))

    def _handle(self) -> DeltaTable:
        return DeltaTable(self.storage.full("tables/out"))

    def publish(self, changes: pa.Table) -> None:
        """As a checkpoint's rows."""
        number = self._last + 1
        local, path = self._scratch / "staged", f"outputs/out/g1-e{number}/0-a.parquet"
        pq.write_table(changes, local, compression="zstd")
        size, digest = self.storage.put_file(local, path)
        file = StateFile("", 0, OUTPUT, "main", path, size, digest, True, AttemptId("a"), None, "out", len(changes))
        upsert.publish(self.storage, APP, SINK, checkpoint(number), self._last, [file], self._scratch)
        self._last = number

    def merge(self, changes: pa.Table) -> None:
        """By delta-rs, with the transaction's id and version in its commit."""
        number = self._last + 1
        properties = CommitProperties(app_transactions=[Transaction(f"{APP}/out", number)])
        within = _condition(changes)
        merger = self._handle().merge(changes, within, source_alias="s", target_alias="t", commit_properties=properties)
        merger.when_matched_update_all().when_not_matched_insert_all().execute()
        self._last = number

    def spark(self, changes: pa.Table, session: Any) -> None:
        """By Spark."""
        pq.write_table(changes, self._scratch / "changes", compression="zstd")
        session.read.parquet(str(self._scratch / "changes")).createOrReplaceTempView("changes")
        session.sql(
            f"MERGE INTO delta.`{self.storage.full('tables/out')}` t USING changes s ON {_condition(changes)} "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )

    def sums(self) -> tuple[int, ...]:
        """What tells whether it has the same rows as another one."""
        rows = pl.scan_parquet(self._handle().file_uris())
        return rows.select(pl.len(), pl.col("key").n_unique().alias("keys"), pl.col("n").sum()).collect().row(0)


def _condition(changes: pa.Table) -> str:
    low, high = (int(bound) for bound in (pl.Series(changes["key"]).min(), pl.Series(changes["key"]).max()))  # type: ignore[arg-type]
    return f"t.key = s.key AND t.key >= {low} AND t.key <= {high}"


def of_size(root: Path, rows: int, reps: int, session: Any) -> dict[str, float]:
    """Medians of one size, by way and kind of changes."""
    figures: dict[str, list[float]] = defaultdict(list)
    first = Table(root / WAYS[0], rows)
    tables = {WAYS[0]: first, **{way: Table(root / way, rows, first) for way in WAYS[1:]}}
    figures["bytes"].append(sum(first.files().values()))
    for repetition in range(reps):
        for kind in ("clustered", "uniform"):
            changes = first.changes(kind == "clustered")
            for way in (*WAYS[repetition % 3 :], *WAYS[: repetition % 3]):
                table, before, cpu = tables[way], tables[way].files(), cpu_seconds()
                more = (session,) if way == "spark" else ()
                act = partial(getattr(table, way), changes, *more)
                figures[f"{way} {kind}"].append(seconds(act))
                figures[f"{way} {kind} cpu"].append(cpu_seconds() - cpu)
                new = {path: size for path, size in table.files().items() if path not in before}
                figures[f"{way} {kind} bytes"].append(sum(new.values()))
            print(f"{rows} {kind}", {way: round(figures[f"{way} {kind}"][-1], 1) for way in WAYS}, flush=True)
    if len({table.sums() for table in tables.values()}) > 1:
        raise RuntimeError("the tables differ")
    return harness.medians_of(figures)


def measured(sizes: Sequence[int], reps: int) -> dict[str, dict[str, float]]:
    """By number of rows, with one session of Spark that has merged before."""
    session = harness.spark("delta")
    harness.in_scratch(lambda root: Table(root, 1000).spark(Table(root / "other", 1000).changes(False), session))
    figures = {str(size): harness.in_scratch(of_size, size, reps, session) for size in sizes}
    session.stop()
    return figures


def main(rows: str = "3000000,20000000", reps: int = 3, results: Path = harness.RESULTS / "upsert") -> None:
    """A publish of changes beside the MERGE of them by Spark and by delta-rs. rows: of the tables."""
    load = os.getloadavg()[0]
    sizes = measured([int(size) for size in rows.split(",")], reps)
    figures = {"machine": harness.machine(), "reps": reps, "load": [load, os.getloadavg()[0]], "sizes": sizes}
    harness.publish(results, figures, harness.render("upsert", **figures))


if __name__ == "__main__":
    typer.run(main)
