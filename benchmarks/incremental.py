"""What a snapshot of a keyed stage costs: incremental against full, with compaction, epoch after epoch.

    python -m benchmarks.incremental                 5M keys; about ten minutes; writes benchmarks/results/incremental.*
    python -m benchmarks.incremental --keys 200000 --results /tmp/incremental

No Spark: real RocksDB databases of two subtasks, driven as the keyed task drives them (fork, write, take, upload), on
the real Storage of a local disk. Every changed share continues from the same first snapshot of all keys. In some epochs
the very same snapshot is also uploaded in full, so both are measured side by side.

Sync is what the barrier waits for: flush, merges that are due, hard links. Upload is the rest. Both are the sum over the
subtasks, one after the other. Objects that none of the last three snapshots names are deleted as the run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from state_ops.backends.rocksdb import RocksDBBackend
from state_ops.checkpoints.checkpoint import LocalSnapshot, Snapshot
from state_ops.ids import AttemptId, CheckpointId, Generation, new_attempt_id
from state_ops.keyed.keyed_state import VALUE_STATE
from state_ops.schema.key_codec import encode_keys
from state_ops.schema.key_groups import key_groups, subtask_of
from state_ops.snapshots import snapshot
from state_ops.snapshots.attempt import Attempt
from state_ops.storage.storage import Storage

_SUBTASKS = 2
_MAX_PARALLELISM = 128
_VALUE_BYTES = 64
_RETAINED = 3
_MEMORY_MB = 128  # as configs/sections.py has them
_BATCH = 65_536

# Percent of the keys that change per epoch: epochs, and every how many a full snapshot is taken beside it.
_PLAN = {1.0: (200, 20), 0.1: (200, 20), 10.0: (20, 5), 100.0: (3, 1)}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one snapshot of all subtasks: bytes and objects uploaded, milliseconds of wall clock and of CPU."""

    bytes: int
    objects: int
    sync_ms: float
    upload_ms: float
    sync_cpu_ms: float
    upload_cpu_ms: float

    @property
    def ms(self) -> float:
        return self.sync_ms + self.upload_ms

    @property
    def cpu_ms(self) -> float:
        return self.sync_cpu_ms + self.upload_cpu_ms


@dataclass(frozen=True, slots=True)
class Share:
    """One changed share: every epoch's incremental snapshot, and full ones by their epoch's position."""

    percent: float
    incremental: list[Cost]
    full: dict[int, Cost]


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


class Subtask:
    """One subtask's databases, forked from snapshot to snapshot. megabytes: a second, None for a local disk."""

    def __init__(self, root: Path, number: int, keys: list[bytes], megabytes: float | None) -> None:
        place = str(root / "storage")
        self.storage = Storage(place) if megabytes is None else Link(place, megabytes)
        self.home = root / "work" / "counts" / str(number)
        self.number = number
        self.keys = keys
        self.retained: list[Snapshot] = []

    def epoch(self, number: int, changed: np.ndarray, rng: np.random.Generator, full: bool) -> tuple[Cost, Cost | None]:
        """Write new values to the keys at `changed` and take a snapshot; with `full`, that one in full as well."""
        base = self.retained[-1] if self.retained else None
        attempt = self._attempt(number)
        forked = snapshot.working_copy(self.storage, attempt, base)
        backend = RocksDBBackend(forked.db, _MEMORY_MB)
        for entries in self._batches(changed, rng):
            backend.write(entries)
        sync = _Clock()
        files = snapshot.take(attempt, backend)
        sync.stop()
        backend.close()
        prepared = snapshot.prepare(attempt, forked, files)
        in_full = self._full(attempt, prepared, base, sync) if full else None
        upload = _Clock()
        taken = snapshot.upload(self.storage, attempt, prepared, base)
        upload.stop()
        self._keep(taken)
        return _cost(taken, sync, upload), in_full

    def _full(self, attempt: Attempt, prepared: LocalSnapshot, base: Snapshot | None, sync: _Clock) -> Cost:
        other = replace(attempt, id=AttemptId(new_attempt_id()))
        shutil.copytree(attempt.directory / "snapshot", other.directory / "snapshot", copy_function=os.link)
        upload = _Clock()
        taken = snapshot.upload(self.storage, other, prepared, base, full=True)
        upload.stop()
        snapshot.discard(self.storage, other)
        shutil.rmtree(other.directory)
        return _cost(taken, sync, upload)

    def _batches(self, changed: np.ndarray, rng: np.random.Generator) -> Iterator[list[tuple[bytes, bytes]]]:
        for start in range(0, len(changed), _BATCH):
            part = changed[start : start + _BATCH].tolist()
            noise = rng.bytes(len(part) * _VALUE_BYTES)
            yield [
                (self.keys[key], noise[at : at + _VALUE_BYTES])
                for key, at in zip(part, range(0, len(noise), _VALUE_BYTES), strict=True)
            ]

    def _keep(self, taken: Snapshot) -> None:
        self.retained.append(taken)
        dropped = self.retained[:-_RETAINED]
        self.retained = self.retained[-_RETAINED:]
        self._prune(dropped)
        for directory in self.home.glob("*"):
            if not directory.name.endswith(taken.attempt):
                shutil.rmtree(directory)

    def _prune(self, dropped: list[Snapshot]) -> None:
        kept = {file.path for one in self.retained for file in one.files}
        for path in {file.path for one in dropped for file in one.files} - kept:
            self.storage.delete(path)

    def _attempt(self, number: int) -> Attempt:
        return Attempt(
            "counts", self.number, Generation(1), CheckpointId(number), AttemptId(new_attempt_id()), self.home
        )


class _Clock:
    """Wall clock and the CPU time of all threads of this process, in milliseconds."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.ms = (time.perf_counter() - self._wall) * 1e3
        self.cpu_ms = (time.process_time() - self._cpu) * 1e3


def _cost(taken: Snapshot, sync: _Clock, upload: _Clock) -> Cost:
    new = [file for file in taken.files if file.new]
    return Cost(sum(file.bytes for file in new), len(new), sync.ms, upload.ms, sync.cpu_ms, upload.cpu_ms)


def _sum(costs: list[Cost]) -> Cost:
    return Cost(*(sum(values) for values in zip(*(asdict(cost).values() for cost in costs), strict=True)))


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
    keys: int, plan: dict[float, tuple[int, int]], root: Path, megabytes: float | None, seed: int = 1
) -> Iterator[tuple[Cost, Share]]:
    """Run everything below `root`. Yields each share with the first snapshot's cost, whose bytes are the state."""
    rng = np.random.default_rng(seed)
    subtasks = _subtasks(root / "run", keys, rng, megabytes)
    first = _sum([one.epoch(1, np.arange(len(one.keys)), rng, False)[0] for one in subtasks])
    bases = [one.retained[-1] for one in subtasks]
    (root / "run").rename(root / "first")
    for percent, (epochs, every) in plan.items():
        shutil.copytree(root / "first", root / "run", copy_function=os.link)
        for one, base in zip(subtasks, bases, strict=True):
            one.retained = [base]
        share = Share(percent, [], {})
        for position in range(epochs):
            beside = position % every == every - 1
            costs, fulls = [], []
            for one in subtasks:
                number = len(one.keys)
                changed = rng.choice(number, max(1, round(number * percent / 100)), replace=False)
                cost, in_full = one.epoch(position + 2, changed, rng, beside)
                costs.append(cost)
                if in_full:
                    fulls.append(in_full)
            share.incremental.append(_sum(costs))
            if beside:
                share.full[position] = _sum(fulls)
                print(f"{percent:g} %: epoch {position + 1} of {epochs}", flush=True)
        shutil.rmtree(root / "run")
        yield first, share


def _figures(share: Share, state: int) -> dict[str, float]:
    """Ratios first: full over incremental. Means are amortised: all epochs, those with large merges too."""
    one, full = share.incremental, list(share.full.values())

    def mean(values: Iterator[float]) -> float:
        return statistics.fmean(values)

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    full_bytes, full_ms = mean(cost.bytes for cost in full), mean(cost.ms for cost in full)
    return {
        "percent": share.percent,
        "epochs": len(one),
        "full_epochs": len(full),
        "bytes_ratio_amortised": full_bytes / mean(cost.bytes for cost in one),
        "bytes_ratio_of_state": state / mean(cost.bytes for cost in one),
        "bytes_ratio_median": median(cost.bytes for cost in full) / median(cost.bytes for cost in one),
        "ms_ratio_amortised": full_ms / mean(cost.ms for cost in one),
        "ms_ratio_median": median(cost.ms for cost in full) / median(cost.ms for cost in one),
        "cpu_ratio_amortised": mean(cost.cpu_ms for cost in full) / mean(cost.cpu_ms for cost in one),
        "upload_ms_ratio_amortised": mean(cost.upload_ms for cost in full) / mean(cost.upload_ms for cost in one),
        "worst_epoch_share": max(cost.bytes for cost in one) / state,
        "mean_epoch_share": mean(cost.bytes for cost in one) / state,
        "full_share": full_bytes / state,
        "objects_mean": mean(cost.objects for cost in one),
        "objects_max": max(cost.objects for cost in one),
        "full_objects_mean": mean(cost.objects for cost in full),
        "sync_ms_median": median(cost.sync_ms for cost in one),
        "sync_ms_mean": mean(cost.sync_ms for cost in one),
        "sync_ms_max": max(cost.sync_ms for cost in one),
        "upload_ms_median": median(cost.upload_ms for cost in one),
        "upload_ms_mean": mean(cost.upload_ms for cost in one),
        "upload_ms_max": max(cost.upload_ms for cost in one),
        "full_sync_ms_mean": mean(cost.sync_ms for cost in full),
        "full_upload_ms_mean": mean(cost.upload_ms for cost in full),
    }


def _report(keys: int, first: Cost, figures: list[dict[str, float]], machine: str) -> str:
    mb = first.bytes / 1e6
    lines = [
        "# Incremental against full snapshots",
        "",
        f"{keys:,} keys of 8 bytes with values of {_VALUE_BYTES} random bytes, {_SUBTASKS} subtasks: a state of {mb:,.0f} MB."
        f" {machine}. Made by `make bench`; what is measured and how to read it: `benchmarks/README.md`.",
        "",
        "Full over incremental, and the worst epoch. Amortised: the mean of all epochs, compaction included.",
        "",
        "| changed per epoch | epochs (full) | bytes, amortised | bytes, median | time, amortised | time, median | CPU time, amortised | worst epoch uploads |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in figures:
        lines.append(
            f"| {row['percent']:g} % | {row['epochs']} ({row['full_epochs']}) | {row['bytes_ratio_amortised']:.1f} x"
            f" | {row['bytes_ratio_median']:.1f} x | {row['ms_ratio_amortised']:.1f} x | {row['ms_ratio_median']:.1f} x"
            f" | {row['cpu_ratio_amortised']:.1f} x | {row['worst_epoch_share']:.1%} of the state |"
        )
    lines += [
        "",
        "Against one merged copy of the state instead of what a full snapshot really has (which holds old values too), the"
        " amortised bytes are less by: "
        + ", ".join(f"{row['bytes_ratio_of_state']:.1f} x at {row['percent']:g} %" for row in figures)
        + ".",
        "",
        "Milliseconds of wall clock for all subtasks one after the other; sync is what the barrier waits for.",
        "",
        "| changed per epoch | sync median / mean / max | upload median / mean / max | full: sync / upload mean | objects mean / max (full) | uploaded per epoch (full) |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in figures:
        lines.append(
            f"| {row['percent']:g} % | {row['sync_ms_median']:.0f} / {row['sync_ms_mean']:.0f} / {row['sync_ms_max']:.0f}"
            f" | {row['upload_ms_median']:.0f} / {row['upload_ms_mean']:.0f} / {row['upload_ms_max']:.0f}"
            f" | {row['full_sync_ms_mean']:.0f} / {row['full_upload_ms_mean']:.0f}"
            f" | {row['objects_mean']:.0f} / {row['objects_max']:.0f} ({row['full_objects_mean']:.0f})"
            f" | {row['mean_epoch_share']:.2%} of the state ({row['full_share']:.0%}) |"
        )
    return "\n".join([*lines, "", "![Uploaded per epoch, and time](incremental.png)", ""])


def _plot(shares: list[Share], state: int, target: Path) -> None:
    import matplotlib  # only here: the figures are worth having where it is not installed

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8), width_ratios=(3, 2), layout="constrained")
    for share in shares:
        epochs = np.arange(1, len(share.incremental) + 1)
        uploaded = [cost.bytes / state * 100 for cost in share.incremental]
        left.plot(
            epochs, uploaded, lw=1, marker="o" if len(epochs) < 20 else "", ms=3, label=f"{share.percent:g} % changed"
        )
    left.axhline(25, color="black", lw=0.8, ls="--")
    left.annotate("a quarter", (1, 26), fontsize=8)
    left.set(
        xlabel="epoch", ylabel="uploaded, % of the state", yscale="log", title="Incremental: bytes uploaded per epoch"
    )
    left.legend(fontsize=8)
    at = np.arange(len(shares))
    for offset, kind in ((-0.2, "full"), (0.2, "incremental")):
        costs = [list(share.full.values()) if kind == "full" else share.incremental for share in shares]
        sync = np.array([statistics.fmean(cost.sync_ms for cost in part) for part in costs])
        upload = np.array([statistics.fmean(cost.upload_ms for cost in part) for part in costs])
        shade = "tab:orange" if kind == "full" else "tab:blue"
        right.bar(at + offset, sync, 0.36, color=shade, alpha=0.5, label=f"{kind}: sync")
        right.bar(at + offset, upload, 0.36, bottom=sync, color=shade, label=f"{kind}: upload")
    right.set_xticks(at, [f"{share.percent:g} %" for share in shares])
    right.set(xlabel="keys changed per epoch", ylabel="ms, mean", title="Time of a snapshot")
    right.legend(fontsize=8)
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keys", type=int, default=5_000_000)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "incremental")
    parser.add_argument("--mb-per-second", type=float, help="put the storage behind a link; runs the 1 %% alone")
    arguments = parser.parse_args()
    link = arguments.mb_per_second
    plan = _PLAN if link is None else {1.0: (100, 20)}
    started = time.monotonic()
    shares: list[Share] = []
    with tempfile.TemporaryDirectory(prefix="weir-incremental-") as root:
        for first, share in measure(arguments.keys, plan, Path(root), link):
            shares = sorted([*shares, share], key=lambda share: share.percent)
            minutes = (time.monotonic() - started) / 60
            machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, {minutes:.0f} minutes"
            if link is not None:
                machine += f", storage behind {link:g} MB/s for each subtask"
            _write(arguments.results, arguments.keys, first, shares, machine)
    print(arguments.results.with_suffix(".md").read_text())


def _write(target: Path, keys: int, first: Cost, shares: list[Share], machine: str) -> None:
    figures = [_figures(share, first.bytes) for share in shares]
    raw = {
        "keys": keys,
        "state_bytes": first.bytes,
        "machine": machine,
        "figures": figures,
        "epochs": {
            f"{share.percent:g}": {
                "incremental": [asdict(cost) for cost in share.incremental],
                "full": {str(position + 1): asdict(cost) for position, cost in share.full.items()},
            }
            for share in shares
        },
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".md").write_text(_report(keys, first, figures, machine))
    target.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")
    _plot(shares, first.bytes, target.with_suffix(".png"))


if __name__ == "__main__":
    main()
