"""What the registry costs, epoch after epoch: the commit, the publications, the pruning, and what is left on disk.

    python -m benchmarks.storage.registry                    20,000 epochs; writes benchmarks/results/registry.md
    python -m benchmarks.storage.registry --epochs 500 --results /dev/stdout

No Spark and no objects: the real Registry on the real Storage of a local disk. Wall-clock times depend on the machine
and its neighbours; the trend is judged by CPU time too, which depends on neither.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks import harness
from benchmarks.harness import Row, Stopwatch, seconds
from state_ops.checkpoints.checkpoint import Checkpoint
from state_ops.checkpoints.registry import Publication, Registry
from state_ops.checkpoints.sink_link import SinkLink
from state_ops.ids import AttemptId, CheckpointId, Generation
from state_ops.records.operator_stats import OperatorStats
from state_ops.records.snapshot_files import STATE, StateFile
from state_ops.storage.storage import Storage

_APP = "weir/benchmark/main"
_RETAINED = 3
_FILES = 20
_BLOCK = 1000
_NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


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
        operators={"counts": OperatorStats(parallelism=100, files_total=len(files))},
        sinks={"counts": SinkLink(CheckpointId(id), CheckpointId(id - 1) if id > 1 else None)},
        inputs={},
        ms={"stage:counts": 1.5},
        totals={"epochs": id},
        files=len(files),
        bytes_total=sum(file.bytes for file in files),
        bytes_new=sum(file.bytes for file in files if file.new),
    )


def measure(root: Path, count: int) -> Row:
    """Commit, publish and prune `count` epochs: means by a thousand of them, and what is left below `registry/`."""
    storage = Storage(str(root))
    registry = Registry(storage, _APP)
    registry.take_over()
    listing = files_of(_FILES)
    blocks = []
    with Stopwatch() as whole:
        for first in range(1, count + 1, _BLOCK):
            last = min(first + _BLOCK - 1, count)
            with Stopwatch() as clock:
                spent = [_epoch(storage, registry, id, listing) for id in range(first, last + 1)]
            means = {name: sum(ms[name] for ms in spent) / len(spent) for name in spent[0]}
            blocks.append({"first": first, "last": last, **means, "total": sum(means.values())})
            blocks[-1]["cpu"] = clock.cpu_ms / len(spent)
            print(
                f"{first:>6} to {last:>6}: {blocks[-1]['total']:6.2f} ms, {blocks[-1]['cpu']:6.2f} ms CPU", flush=True
            )
    left = list(storage.list("registry"))
    logs: dict[str, list[int]] = defaultdict(list)
    for file in sorted(left, key=lambda file: file.path):
        table, directory = file.path.split("/")[1:3]
        logs[table] += [file.bytes] if directory == "_delta_log" else []
    return {"blocks": blocks, "seconds": whole.ms / 1e3, "objects": len(left), "logs": logs}


def _epoch(storage: Storage, registry: Registry, id: int, listing: tuple[StateFile, ...]) -> dict[str, float]:
    """Milliseconds of an epoch's steps."""
    files = tuple(replace(file, new=index < 4) for index, file in enumerate(listing))
    checkpoint = checkpoint_of(id, files)
    row = Publication(CheckpointId(id), "counts", id, 1, 1000, _NOON, 2.0)
    steps: dict[str, Callable[[], object]] = {
        "commit": lambda: registry.commit(checkpoint, files),
        "publications": lambda: registry.record_publications(Generation(1), [row]),
        "drop": lambda: _prune(storage, registry),
    }
    return {name: seconds(step) * 1e3 for name, step in steps.items()}


def _prune(storage: Storage, registry: Registry) -> None:
    """As retention does it, without objects: the rows, then the listings that they leave."""
    beyond = [row.id for row in registry.checkpoints()[:-_RETAINED]]
    unnamed = registry.drop_rows(Generation(1), beyond)
    orphan_listings = registry.orphan_listings()
    if orphan_listings:
        unnamed += registry.drop_listings(Generation(1), orphan_listings)
    storage.delete_files(unnamed)


def commits(root: Path, number: int, repeats: int) -> Row:
    """Milliseconds of each commit of `number` files, and the median of each of its phases."""
    registry = Registry(Storage(str(root)), _APP)
    registry.take_over()
    phases: dict[str, list[float]] = defaultdict(list)
    _watch(registry._files, "write_table", phases["listing: Parquet file"])
    _watch(registry._files, "commit", phases["listing: Delta commit"])
    _watch(registry._checkpoints, "write_table", phases["row: Parquet file"])
    _watch(registry._checkpoints, "commit", phases["row: Delta commit"])
    files = files_of(number)
    checkpoints = [checkpoint_of(id, files) for id in range(1, repeats + 2)]
    ms = [seconds(lambda: registry.commit(checkpoint, files)) * 1e3 for checkpoint in checkpoints][1:]  # noqa: B023
    medians = harness.medians_of({name: times[1:] for name, times in phases.items() if times})
    medians["columns and the rest"] = harness.medians_of({"all": ms})["all"] - sum(medians.values())
    with Stopwatch() as reading:
        assert Registry(Storage(str(root)), _APP).files(checkpoints[-1]) == files
    return {"files": number, "ms": ms, "phases": medians | {"(reading the listing)": reading.ms}}


def _watch(target: Any, method: str, times: list[float]) -> None:
    """Note how long each call of a method takes, in milliseconds."""
    original = getattr(target, method)

    def watched(*arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*arguments, **named)
        finally:
            times.append((time.perf_counter() - started) * 1000)

    setattr(target, method, watched)


def main(epochs: int = 20_000, results: Path = harness.RESULTS / "registry.md") -> None:
    """What the registry costs, epoch after epoch, and what a commit of many files does."""
    figures = harness.in_scratch(measure, epochs)
    page = harness.render(
        "registry",
        **figures,
        commits=[harness.in_scratch(commits, number, repeats) for number, repeats in ((100, 20), (100_000, 5))],
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=harness.machine(),
        load=os.getloadavg()[1],
        files=_FILES,
        retained=_RETAINED,
    )
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(page)
    print(page)


if __name__ == "__main__":
    typer.run(main)
