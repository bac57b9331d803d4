"""Sites whose files are an epoch each, with rows that come out of order and late, for pipelines that run without Spark and
whose checkpoints wait for slow stages or do not.

Where they do not, each subtask applies one batch an epoch, so where stages stop is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.records.checkpoint import Checkpoint
from tests.recovery.harness import Site
from weir import Pipeline, files
from weir.execution.in_process import InMemoryExecutor
from weir.run import run
from weir.run.run import RunOptions

KEYS = 5
MINUTE = 60_000_000
SOURCE = files("{landing}/*.parquet", name="landing", event_time="at")


def site_of(root: Path, alignment: float | None, pipeline: Pipeline, module: str, **options: str) -> Site:
    """A site of two subtasks a stage. alignment: seconds that a checkpoint waits for a slow stage; None is to the end."""
    return Site(
        root,
        {
            "WEIR_EPOCH__MAX_FILES": "1",
            "WEIR_STATE__BACKEND": "memory",
            "WEIR_SPARK__PARALLELISM": "2",
            **({} if alignment is None else {"WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": str(alignment)}),
            **options,
        },
        pipeline,
        module,
    )


def land_rows(
    site: Site,
    numbers: Iterable[int],
    random: Callable[[int], np.random.Generator],
    values: int,
    first: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Files of 8 to 23 rows over 12 minutes and the 25 before them.

    Args:
        random: The generator of a file, by its number.
        values: How many values there are, from 0 on.
        first: By a file's number, the values of its first rows.
    """
    site.landing.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        rng = random(number)
        size = int(rng.integers(8, 24))
        minutes = number * 12 + rng.integers(-25, 12, size)
        given = (first or {}).get(number, ())
        rows = pa.table(
            {
                "k": [f"k{key}" for key in rng.integers(0, KEYS, size)],
                "v": [*given, *rng.integers(0, values, size)][:size],
                "at": pa.array(minutes * MINUTE, pa.timestamp("us", "UTC")),
            }
        )
        pq.write_table(rows, site.landing / f"{number:03}.parquet")


def epochs(site: Site, executor: Any = None, **options: Any) -> list[Checkpoint]:
    """Run until all files are read, in batches of four rows."""
    asked = RunOptions(**{"until_caught_up": True, **options})
    reports = run.run(site.pipeline, site.settings, asked, executor or InMemoryExecutor(4))
    return [report.checkpoint for report in reports]


def first_epoch(site: Site, executor: Any = None, **options: Any) -> Checkpoint | None:
    """The first epoch, if there is one, of a run that then ends: its rest is what the next run begins with."""
    asked = RunOptions(**{"until_caught_up": True, **options})
    reports = run.run(site.pipeline, site.settings, asked, executor or InMemoryExecutor(4))
    first = next(reports, None)
    reports.close()
    return first.checkpoint if first else None
