"""Forks: how long, and how many bytes, beside plainly copying the state that the branch has then.

    python -m benchmarks.fork                        states of 1 and 5 GB; about five minutes and 12 GB of disk
    python -m benchmarks.fork --sizes 0.2 --reps 2 --results /tmp/fork

No Spark: a pipeline of 1 KB values, as benchmarks.restore has it, storage and work directory on one local disk. Repetitions alternate, medians count.

- copy: the checkpoint's objects copied file by file, in as many threads as a restore uses.
- fork: `forks.fork` of the newest checkpoint; bytes: what lies below the branch's directory afterwards.
- first epoch: from the call of `run` of the branch to its first report, of one row; nothing of it is on the host.
- drop: `forks.drop`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.restore import PIPELINE, Site, copied, seconds
from configs.settings import Settings
from pipelines.runtime.execution.in_process import InMemoryExecutor
from pipelines.runtime.operations import forks
from pipelines.runtime.ownership.pipeline_storage import open_storage
from pipelines.runtime.run.run import RunOptions, run

_RESULTS = Path(__file__).parent / "results" / "fork"
TARGET = 1.0  # seconds, whatever the size


def first_epoch(settings: Settings) -> None:
    """Of the branch, on a host that has nothing of it."""
    branch = forks.branched(PIPELINE, settings, "one")
    next(iter(run(branch, settings, RunOptions(until_caught_up=True), InMemoryExecutor())))


def of_size(root: Path, gigabytes: float, reps: int) -> dict[str, float]:
    """Medians in seconds, and bytes, of one size."""
    site = Site(root, int(gigabytes * 1e9 / 1024), 1024)
    site.fill()
    settings = site.settings()
    _, registry = open_storage(PIPELINE, settings)
    head = registry.head()
    assert head is not None
    found: dict[str, list[float]] = {}
    for rep in range(reps):
        found.setdefault("copy", []).append(seconds(lambda: copied(site)))
        shutil.rmtree(site.root / "copy")
        found.setdefault("fork", []).append(seconds(lambda: forks.fork(PIPELINE, settings, "one", int(head.id))))
        below = site.root / "storage" / PIPELINE.name / "branches"
        found.setdefault("bytes", []).append(sum(file.stat().st_size for file in below.rglob("*") if file.is_file()))
        if rep == 0:
            site.land(np.array([0]), 1)
            site.epochs()  # the branch reads what its pipeline has read
        found.setdefault("first epoch", []).append(seconds(lambda: first_epoch(settings)))
        found.setdefault("drop", []).append(seconds(lambda: forks.drop(PIPELINE, settings, "one")))
    return {"state": head.bytes_total, **{name: statistics.median(took) for name, took in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="1,5", help="GB")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--results", type=Path, default=_RESULTS)
    arguments = parser.parse_args()
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    sizes = {}
    for size in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory(prefix="weir-fork-") as root:
            sizes[size] = of_size(Path(root) / "site", float(size), arguments.reps)
    lines = [
        "# Forks",
        "",
        f"{machine}, medians of {arguments.reps}, load average {os.getloadavg()[0]:.1f} at the end; `python -m benchmarks.fork`. "
        f"Target: below {TARGET:g} s, whatever the size.",
        "",
        "| state | copy, s | fork, s | of a copy's time | bytes below the branch | its first epoch, nothing local, s | drop, s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in sizes.values():
        lines.append(
            f"| {one['state'] / 1e9:.2f} GB | {one['copy']:.2f} | {one['fork']:.2f} | {one['fork'] / one['copy']:.1%} | "
            f"{one['bytes']:,.0f} | {one['first epoch']:.2f} | {one['drop']:.2f} |"
        )
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.with_suffix(".md").write_text("\n".join(lines) + "\n")
    arguments.results.with_suffix(".json").write_text(json.dumps({"machine": machine, "sizes": sizes}, indent=1) + "\n")
    print(arguments.results.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
