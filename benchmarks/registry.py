"""What the registry costs, epoch after epoch: the commit, the publications, the pruning, and what is left on disk.

    python -m benchmarks.registry                    20,000 epochs; writes benchmarks/results/registry.md
    python -m benchmarks.registry --epochs 500 --results /dev/stdout

No Spark and no objects: the real Registry on the real Storage of a local disk. Wall-clock times depend on the machine
and its neighbours; the trend is judged by CPU time too, which depends on neither.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from state_ops.checkpoints.checkpoint import STATE, Checkpoint, StateFile
from state_ops.checkpoints.registry import Publication, Registry
from state_ops.ids import AttemptId, CheckpointId, Generation
from state_ops.storage.storage import Storage

_APP = "weir/benchmark/main"
_RETAINED = 3
_FILES = 20
_BLOCK = 1000
_NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Block:
    """Means over a number of epochs, in milliseconds. cpu: of the whole process, all threads."""

    first: int
    last: int
    commit: float
    publications: float
    drop: float
    cpu: float

    @property
    def total(self) -> float:
        return self.commit + self.publications + self.drop


def files_of(number: int) -> tuple[StateFile, ...]:
    """A listing as 100 subtasks write it: names, digests and attempts of their real lengths."""
    attempts = [AttemptId(uuid.uuid4().hex) for _ in range(100)]
    return tuple(
        StateFile(
            operator="counts",
            subtask=index % 100,
            kind=STATE,
            name=f"{index:06d}.sst",
            path=f"state/counts/g1-e1/{index % 100}-{attempts[index % 100]}/{index:06d}.sst",
            bytes=64 * index,
            digest=hashlib.sha256(str(index).encode()).hexdigest(),
            new=index % 5 == 0,
            attempt=attempts[index % 100],
            snapshot=attempts[index % 100],
        )
        for index in range(number)
    )


def checkpoint_of(id: int, files: tuple[StateFile, ...]) -> Checkpoint:
    return Checkpoint(
        id=CheckpointId(id),
        parent_id=CheckpointId(id - 1) if id > 1 else None,
        kind="checkpoint",
        generation=Generation(1),
        commit_id=uuid.uuid4().hex,
        triggered_at=_NOON,
        completed_at=_NOON,
        epoch_now=_NOON,
        trigger="interval",
        reason="a benchmark",
        offsets={"landing": {"files": id, "last": f"{id:08d}.parquet", "seen": [], "floor": None}},
        slice={"landing": {"rows": 1000, "files": [{"name": f"{id:08d}.parquet", "bytes": 4096}]}},
        watermarks={"counts": 1_700_000_000_000_000 + id},
        operators={"counts": {"parallelism": 100, "files_total": len(files)}},
        sinks={"counts": {"id": id, "before": id - 1 or None}},
        inputs={},
        ms={"stage:counts": 1.5},
        totals={"epochs": id},
        files=len(files),
        bytes_total=sum(file.bytes for file in files),
        bytes_new=sum(file.bytes for file in files if file.new),
    )


def epochs(storage: Storage, registry: Registry, count: int) -> list[Block]:
    """Commit, publish and prune `count` epochs; one block per thousand of them."""
    listing = files_of(_FILES)
    blocks: list[Block] = []
    spent: dict[str, float] = defaultdict(float)
    cpu = time.process_time()
    first = 1
    for id in range(1, count + 1):
        files = tuple(replace(file, new=index < 4) for index, file in enumerate(listing))
        checkpoint = checkpoint_of(id, files)
        _timed(spent, "commit", lambda: registry.commit(checkpoint, files))  # noqa: B023 (called at once)
        row = Publication(CheckpointId(id), "counts", id, 1, 1000, _NOON, 2.0)
        _timed(spent, "publications", lambda: registry.record_publications(Generation(1), [row]))  # noqa: B023
        _timed(spent, "drop", lambda: _prune(storage, registry))
        if id % _BLOCK == 0 or id == count:
            size = id - first + 1
            now = time.process_time()
            means = {name: seconds * 1000 / size for name, seconds in spent.items()}
            blocks.append(Block(first, id, cpu=(now - cpu) * 1000 / size, **means))
            print(f"{first:>6} to {id:>6}: {blocks[-1].total:6.2f} ms, {blocks[-1].cpu:6.2f} ms CPU", flush=True)
            spent.clear()
            cpu, first = now, id + 1
    return blocks


def _prune(storage: Storage, registry: Registry) -> None:
    """As retention does it, without objects: the rows, then the listings that they leave."""
    beyond = [row.id for row in registry.checkpoints()[:-_RETAINED]]
    unnamed = registry.drop_rows(Generation(1), beyond)
    strays = registry.strays()
    if strays:
        unnamed += registry.drop_listings(Generation(1), strays)
    storage.delete_files(unnamed)


def commits(number: int, repeats: int) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of each commit of `number` files, and the median of each of its phases."""
    with tempfile.TemporaryDirectory() as root:
        registry = Registry(Storage(root), _APP)
        registry.take_over()
        phases: dict[str, list[float]] = defaultdict(list)
        _watch(registry._files, "write_table", "listing: Parquet file", phases)
        _watch(registry._files, "commit", "listing: Delta commit", phases)
        _watch(registry._checkpoints, "write_table", "row: Parquet file", phases)
        _watch(registry._checkpoints, "commit", "row: Delta commit", phases)
        files = files_of(number)
        totals = []
        for id in range(1, repeats + 2):
            checkpoint = checkpoint_of(id, files)
            started = time.perf_counter()
            registry.commit(checkpoint, files)
            totals.append((time.perf_counter() - started) * 1000)
        medians = {name: statistics.median(times[1:]) for name, times in phases.items()}
        medians["columns and the rest"] = statistics.median(totals[1:]) - sum(medians.values())
        started = time.perf_counter()
        assert Registry(Storage(root), _APP).files(checkpoint) == files
        medians["(reading the listing)"] = (time.perf_counter() - started) * 1000
        return totals[1:], medians


def _watch(target: Any, method: str, phase: str, phases: dict[str, list[float]]) -> None:
    real = getattr(target, method)

    def watched(*args, **kwargs):
        started = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            phases[phase].append((time.perf_counter() - started) * 1000)

    setattr(target, method, watched)


def _timed(spent: dict[str, float], name: str, act: Callable[[], None]) -> None:
    started = time.perf_counter()
    act()
    spent[name] += time.perf_counter() - started


def report(blocks: list[Block], storage: Storage, seconds: float) -> str:
    """The results as a page."""
    left = list(storage.list("registry"))
    tables = sorted({file.path.split("/")[1] for file in left})
    lines = [
        "# The registry",
        "",
        f"`python -m benchmarks.registry`, {datetime.now(UTC):%Y-%m-%d}: Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[1]:.1f} over five minutes, local disk.",
        "",
        f"## {blocks[-1].last:,} epochs",
        "",
        f"Each commits a checkpoint of {_FILES} files, records a publication and prunes to {_RETAINED} checkpoints. Mean milliseconds",
        f"per epoch; CPU: of the whole process. The run took {seconds:.0f} s.",
        "",
        "| epochs | commit | publications | prune | total | CPU |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for block in blocks:
        figures = (block.commit, block.publications, block.drop, block.total, block.cpu)
        lines.append(
            f"| {block.first:,} to {block.last:,} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"
        )
    if len(blocks) > 2:
        ratio, cpu = blocks[-1].total / blocks[1].total, blocks[-1].cpu / blocks[1].cpu
        lines += [
            "",
            f"Last block against the second: {ratio:.2f} in wall-clock time, {cpu:.2f} in CPU time (1.00 is flat).",
        ]
    lines += [
        "",
        f"Objects below `registry/` at the end: {len(left)}.",
        "",
        "| table | log entries | bytes of log |",
        "|---|---:|---:|",
    ]
    for table in tables:
        log = [file for file in left if file.path.startswith(f"registry/{table}/_delta_log/")]
        lines.append(f"| {table} | {len(log)} | {sum(file.bytes for file in log):,} |")
    for number, repeats in ((100, 20), (100_000, 5)):
        totals, phases = commits(number, repeats)
        lines += [
            "",
            f"## A commit of {number:,} files",
            "",
            f"Median of {repeats}: {statistics.median(totals):.1f} ms;",
        ]
        lines += [f"fastest {min(totals):.1f}, slowest {max(totals):.1f}.", "", "| phase | ms |", "|---|---:|"]
        lines += [f"| {name} | {ms:.1f} |" for name, ms in phases.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=20_000)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results") / "registry.md")
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        storage = Storage(root)
        registry = Registry(storage, _APP)
        registry.take_over()
        blocks = epochs(storage, registry, options.epochs)
        page = report(blocks, storage, time.perf_counter() - started)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
