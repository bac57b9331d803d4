"""What a snapshot of a keyed stage costs: incremental against full, with compaction, epoch after epoch.

    python -m benchmarks.storage.incremental        5M keys; about ten minutes; writes benchmarks/results/incremental.*
    python -m benchmarks.storage.incremental --keys 200000 --results /tmp/incremental

No Spark: real RocksDB databases of two subtasks, driven as the keyed task drives them (fork, write, take, upload), on
the real Storage of a local disk. Every changed share continues from the same first snapshot of all keys. In some epochs
the very same snapshot is also uploaded in full, so both are measured side by side.

Sync is what the barrier waits for: flush, merges that are due, hard links. Upload is the rest. Both are the sum over
the subtasks, one after the other. Objects that none of the last three snapshots names are deleted as the run goes on.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa
import typer
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.harness import Row, Stopwatch
from state_ops.backends.base import Compression
from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.ids import AttemptId, CheckpointId, Generation, new_attempt_id
from state_ops.keyed.keyed_state import VALUE_STATE
from state_ops.records.snapshot_files import Snapshot
from state_ops.schema.key_codec import encode_keys
from state_ops.schema.key_groups import key_groups, subtask_of
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.storage.storage import Storage

_SUBTASKS = 2
_MAX_PARALLELISM = 128
_VALUE_BYTES = 64
_RETAINED = 3
_MEMORY_MB = 128  # as weir/settings/sections.py has them
_BATCH = 65_536

# Percent of the keys that change per epoch: epochs, and every how many a full snapshot is taken beside it.
_PLAN = {1.0: (200, 20), 0.1: (200, 20), 10.0: (20, 5), 100.0: (3, 1)}


_COSTS = ("bytes", "objects", "sync_ms", "upload_ms", "sync_cpu_ms", "upload_cpu_ms")
"""Of one snapshot of all subtasks: bytes and objects uploaded, milliseconds of wall clock and of CPU."""


@dataclass(frozen=True, slots=True)
class Share:
    """One changed share: the costs of every epoch's incremental snapshot, and of full ones by their epoch's
    position."""

    percent: float
    incremental: list[Row]
    full: dict[int, Row]


class Link(Storage):
    """A local directory behind a link of so many megabytes a second, which all transfers of a subtask share."""

    def __init__(self, uri: str, megabytes: float) -> None:
        super().__init__(uri)
        self._megabytes, self._busy = megabytes, threading.Lock()

    def put_file(self, local: Path, path: str, **options: Any) -> Any:
        sent = super().put_file(local, path, **options)
        with self._busy:
            time.sleep(local.stat().st_size / 1e6 / self._megabytes)
        return sent


class SnapshotChain:
    """A subtask's database, which goes from snapshot to snapshot as the keyed task drives it."""

    def __init__(self, storage: Storage, home: Path, number: int = 0, compression: Compression = "lz4") -> None:
        self.storage, self.home, self.number, self.compression = storage, home, number, compression
        self.retained: list[Snapshot] = []

    @property
    def newest(self) -> Snapshot | None:
        return self.retained[-1] if self.retained else None

    def open(self, checkpoint: int) -> None:
        """Open a working copy of the newest snapshot as `backend`."""
        self.attempt = Attempt(
            self.home.parent.name,
            self.number,
            Generation(1),
            CheckpointId(checkpoint),
            AttemptId(new_attempt_id()),
            self.home,
        )
        self.copy = snapshot.working_copy(self.storage, self.attempt, self.newest)
        self.backend = RocksDBBackend(self.copy.db, _MEMORY_MB, compression=self.compression)

    def take(self) -> Stopwatch:
        """Take the next snapshot and close the database. Returns what the barrier waits for."""
        with Stopwatch() as sync:
            files = snapshot.take(self.attempt, self.backend)
        self.backend.close()
        self.prepared = snapshot.prepare(self.attempt, self.copy, files)
        return sync

    def upload(self) -> Stopwatch:
        """Upload the snapshot that was taken, and delete what none of the last three names."""
        with Stopwatch() as upload:
            self.retained.append(snapshot.upload(self.storage, self.attempt, self.prepared, self.newest))
        dropped, self.retained = self.retained[:-_RETAINED], self.retained[-_RETAINED:]
        for path in _paths(dropped) - _paths(self.retained):
            self.storage.delete(path)
        for directory in self.home.glob("*"):
            if not directory.name.endswith(self.retained[-1].attempt):
                shutil.rmtree(directory)
        return upload


def _paths(snapshots: list[Snapshot]) -> set[str]:
    return {file.path for each in snapshots for file in each.files}


class Subtask(SnapshotChain):
    """One subtask's keys and databases."""

    def __init__(self, root: Path, number: int, keys: list[bytes], megabytes: float | None) -> None:
        place = str(root / "storage")
        storage = Storage(place) if megabytes is None else Link(place, megabytes)
        super().__init__(storage, root / "work" / "counts" / str(number), number)
        self.keys = keys

    def epoch(self, number: int, changed: np.ndarray, rng: np.random.Generator, full: bool) -> tuple[Row, Row | None]:
        """Write new values to the keys at `changed` and take a snapshot; with `full`, that one in full as well."""
        self.open(number)
        for entries in self._batches(changed, rng):
            self.backend.write(entries)
        sync = self.take()
        in_full = self._full(sync) if full else None
        upload = self.upload()
        return _cost(self.retained[-1], sync, upload), in_full

    def _full(self, sync: Stopwatch) -> Row:
        other = replace(self.attempt, id=AttemptId(new_attempt_id()))
        shutil.copytree(self.attempt.directory / "snapshot", other.directory / "snapshot", copy_function=os.link)
        with Stopwatch() as upload:
            whole = snapshot.upload(self.storage, other, self.prepared, self.newest, full=True)
        snapshot.discard(self.storage, other)
        shutil.rmtree(other.directory)
        return _cost(whole, sync, upload)

    def _batches(self, changed: np.ndarray, rng: np.random.Generator) -> Iterator[list[tuple[bytes, bytes]]]:
        for start in range(0, len(changed), _BATCH):
            part = changed[start : start + _BATCH].tolist()
            noise = rng.bytes(len(part) * _VALUE_BYTES)
            yield [
                (self.keys[key], noise[at : at + _VALUE_BYTES])
                for key, at in zip(part, range(0, len(noise), _VALUE_BYTES), strict=True)
            ]


def _cost(taken: Snapshot, sync: Stopwatch, upload: Stopwatch) -> Row:
    new = [file.bytes for file in taken.files if file.new]
    return dict(zip(_COSTS, (sum(new), len(new), sync.ms, upload.ms, sync.cpu_ms, upload.cpu_ms), strict=True))


def _sum(costs: list[Row]) -> Row:
    return {name: sum(cost[name] for cost in costs) for name in _COSTS}


def _subtasks(root: Path, keys: int, rng: np.random.Generator, megabytes: float | None) -> list[Subtask]:
    numbers = pa.array(rng.permutation(keys), pa.int64())
    groups = key_groups([numbers], _MAX_PARALLELISM)
    owner = subtask_of(groups, _SUBTASKS, _MAX_PARALLELISM)
    encoded = encode_keys([numbers], groups, VALUE_STATE)
    return [
        Subtask(root, number, [encoded[index] for index in np.flatnonzero(owner == number).tolist()], megabytes)
        for number in range(_SUBTASKS)
    ]


def measure(
    root: Path,
    keys: int,
    plan: dict[float, tuple[int, int]],
    megabytes: float | None,
    note: Callable[[Row, Share], None],
    seed: int = 1,
) -> None:
    """Run everything below `root`. Notes each share with the first snapshot's cost, whose bytes are the state."""
    rng = np.random.default_rng(seed)
    subtasks = _subtasks(root / "run", keys, rng, megabytes)
    first = _sum([subtask.epoch(1, np.arange(len(subtask.keys)), rng, False)[0] for subtask in subtasks])
    bases = [subtask.retained[-1] for subtask in subtasks]
    (root / "run").rename(root / "first")
    for percent, (epochs, every) in plan.items():
        shutil.copytree(root / "first", root / "run", copy_function=os.link)
        for subtask, base in zip(subtasks, bases, strict=True):
            subtask.retained = [base]
        share = Share(percent, [], {})
        for position in range(epochs):
            beside = position % every == every - 1
            costs, fulls = [], []
            for subtask in subtasks:
                number = len(subtask.keys)
                changed = rng.choice(number, max(1, round(number * percent / 100)), replace=False)
                cost, in_full = subtask.epoch(position + 2, changed, rng, beside)
                costs.append(cost)
                if in_full:
                    fulls.append(in_full)
            share.incremental.append(_sum(costs))
            if beside:
                share.full[position] = _sum(fulls)
                print(f"{percent:g} %: epoch {position + 1} of {epochs}", flush=True)
        shutil.rmtree(root / "run")
        note(first, share)


def _figures(share: Share, state: int) -> Row:
    """Ratios first: full over incremental. Means are amortised: all epochs, those with large merges too."""

    def statistics(costs: list[Row]) -> tuple[Row, Row, Row]:
        frame = pl.DataFrame(costs).with_columns(
            ms=pl.col("sync_ms") + pl.col("upload_ms"), cpu_ms=pl.col("sync_cpu_ms") + pl.col("upload_cpu_ms")
        )
        return frame.mean().row(0, named=True), frame.median().row(0, named=True), frame.max().row(0, named=True)

    mean, median, most = statistics(share.incremental)
    full, full_median, _ = statistics(list(share.full.values()))
    return {
        "percent": share.percent,
        "epochs": len(share.incremental),
        "full_epochs": len(share.full),
        "bytes_ratio_amortised": full["bytes"] / mean["bytes"],
        "bytes_ratio_of_state": state / mean["bytes"],
        "bytes_ratio_median": full_median["bytes"] / median["bytes"],
        "ms_ratio_amortised": full["ms"] / mean["ms"],
        "ms_ratio_median": full_median["ms"] / median["ms"],
        "cpu_ratio_amortised": full["cpu_ms"] / mean["cpu_ms"],
        "upload_ms_ratio_amortised": full["upload_ms"] / mean["upload_ms"],
        "worst_epoch_share": most["bytes"] / state,
        "mean_epoch_share": mean["bytes"] / state,
        "full_share": full["bytes"] / state,
        "objects_mean": mean["objects"],
        "objects_max": most["objects"],
        "full_objects_mean": full["objects"],
        **{
            f"{phase}_ms_{name}": row[f"{phase}_ms"]
            for phase in ("sync", "upload")
            for name, row in (("median", median), ("mean", mean), ("max", most))
        },
        "full_sync_ms_mean": full["sync_ms"],
        "full_upload_ms_mean": full["upload_ms"],
    }


def report(figures: Row) -> str:
    """The Markdown of what was measured."""
    return harness.render("incremental", **figures, value_bytes=_VALUE_BYTES, subtasks=_SUBTASKS)


def _plot(shares: list[Share], state: int, target: Path) -> None:
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for share in shares:
        epochs = np.arange(1, len(share.incremental) + 1)
        uploaded = [cost["bytes"] / state * 100 for cost in share.incremental]
        marker = "o" if len(epochs) < 20 else ""
        left.plot(epochs, uploaded, lw=1, marker=marker, ms=3, label=f"{share.percent:g} % changed")
    left.axhline(25, color="black", lw=0.8, ls="--")
    left.annotate("a quarter", (1, 26), fontsize=8)
    left.set(
        xlabel="epoch", ylabel="uploaded, % of the state", yscale="log", title="Incremental: bytes uploaded per epoch"
    )
    at = np.arange(len(shares))
    for offset, kind, shade in ((-0.2, "full", "tab:orange"), (0.2, "incremental", "tab:blue")):
        costs = [list(share.full.values()) if kind == "full" else share.incremental for share in shares]
        sync, upload = (
            np.array([pl.DataFrame(part)[name].mean() for part in costs]) for name in ("sync_ms", "upload_ms")
        )
        right.bar(at + offset, sync, 0.36, color=shade, alpha=0.5, label=f"{kind}: sync")
        right.bar(at + offset, upload, 0.36, bottom=sync, color=shade, label=f"{kind}: upload")
    right.set_xticks(at, [f"{share.percent:g} %" for share in shares])
    right.set(xlabel="keys changed per epoch", ylabel="ms, mean", title="Time of a snapshot")
    for side in (left, right):
        side.legend(fontsize=8)
    figure.savefig(target, dpi=110)


def main(
    keys: int = 5_000_000,
    results: Path = harness.RESULTS / "incremental",
    mb_per_second: Annotated[float, typer.Option(help="put the storage behind a link; runs the 1 % alone")] = 0.0,
) -> None:
    """What a snapshot of a keyed stage costs: incremental against full, with compaction, epoch after epoch."""
    link = mb_per_second or None
    started = time.monotonic()
    shares: list[Share] = []

    def note(first: Row, share: Share) -> None:
        """Write the report of all shares so far."""
        shares.append(share)
        shares.sort(key=lambda share: share.percent)
        machine = f"{harness.machine()}, {(time.monotonic() - started) / 60:.0f} minutes"
        figures = {
            "keys": keys,
            "state_bytes": first["bytes"],
            "machine": machine + (f", storage behind {link:g} MB/s for each subtask" if link else ""),
            "figures": [_figures(share, first["bytes"]) for share in shares],
            "epochs": {
                f"{share.percent:g}": {
                    "incremental": share.incremental,
                    "full": {str(position + 1): cost for position, cost in share.full.items()},
                }
                for share in shares
            },
        }
        harness.publish(results, figures, report(figures))
        _plot(shares, first["bytes"], results.with_suffix(".png"))

    harness.in_scratch(measure, keys, _PLAN if link is None else {1.0: (100, 20)}, link, note)


if __name__ == "__main__":
    typer.run(main)
