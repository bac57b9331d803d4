"""Forks: how long, and how many bytes, beside plainly copying the state that the branch has then.

    python -m benchmarks.storage.fork                        states of 1 and 5 GB; about five minutes and 12 GB of disk
    python -m benchmarks.storage.fork --sizes 0.2 --reps 2 --results /tmp/fork

No Spark: a pipeline of 1 KB values, as benchmarks.storage.restore has it, storage and work directory on one local disk.
Repetitions alternate, medians count.

- copy: the checkpoint's objects copied file by file, in as many threads as a restore uses.
- fork: `forks.fork` of the newest checkpoint; bytes: what lies below the branch's directory afterwards.
- first epoch: from the call of `run` of the branch to its first report, of one row; nothing of it is on the host.
- drop: `forks.drop`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import typer

from benchmarks import harness
from benchmarks.harness import seconds
from benchmarks.storage.restore import PIPELINE, Site, copied
from configs.settings import Settings
from pipelines.runtime.execution.in_process import InMemoryExecutor
from pipelines.runtime.operations import forks

TARGET = 1.0  # seconds, whatever the size


def first_epoch(settings: Settings) -> None:
    """Of the branch, on a host that has nothing of it."""
    next(harness.epochs(forks.branched(PIPELINE, settings, "one"), settings, InMemoryExecutor()))


def of_size(root: Path, gigabytes: float, reps: int) -> dict[str, float]:
    """Medians in seconds, and bytes, of one size."""
    site = Site(root / "site", int(gigabytes * 1e9 / 1024), 1024)
    site.fill()
    settings, head = site.settings(), site.head()
    figures: dict[str, list[float]] = defaultdict(list)
    branches = site.root / "storage" / PIPELINE.name / "branches"
    for rep in range(reps):
        figures["copy"].append(copied(site))
        figures["fork"].append(seconds(lambda: forks.fork(PIPELINE, settings, "one", int(head.id))))
        figures["bytes"].append(sum(file.stat().st_size for file in branches.rglob("*") if file.is_file()))
        if rep == 0:
            site.land(np.array([0]), 1)
            site.epochs()  # the branch reads what its pipeline has read
        figures["first epoch"].append(seconds(lambda: first_epoch(settings)))
        figures["drop"].append(seconds(lambda: forks.drop(PIPELINE, settings, "one")))
    return {"state": head.bytes_total, **harness.medians_of(figures)}


def main(sizes: str = "1,5", reps: int = 3, results: Path = harness.RESULTS / "fork") -> None:
    """Forks beside plainly copying the state that the branch has then. sizes: in GB."""
    figures = {
        "machine": harness.machine(),
        "sizes": {size: harness.in_scratch(of_size, float(size), reps) for size in sizes.split(",")},
    }
    page = harness.render("fork", **figures, reps=reps, load=os.getloadavg()[0], target=TARGET)
    harness.publish(results, figures, page)


if __name__ == "__main__":
    typer.run(main)
