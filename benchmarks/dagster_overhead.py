"""What Dagster adds: to an epoch, at a tick, and to its database over a day of 10-second epochs.

    make bench-dagster                     about three minutes; writes benchmarks/results/dagster.md

- epoch: the same epochs of a small pipeline, without Spark, once through the public generator alone and once within a Dagster run, on an
  instance with SQLite files, every epoch observed. The two take turns; what is reported is the difference of their medians, per epoch.
- tick: the checkpoint sensor and the watchdog as the daemon evaluates them, on storage with a backlog and a living coordinator.
- day: 8,640 epochs are reported to a fresh instance as a run reports them; then its size, and how long the pages' questions take.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

from assets import coordination, history
from assets.factory import weir_definitions
from assets.names import CHECKPOINT, key
from configs.settings import Settings
from pipelines.api import Pipeline, agg, aggregate, delta, files
from pipelines.runtime import run as runtime
from pipelines.runtime import tenure
from pipelines.runtime.in_memory import InMemoryExecutor
from pipelines.runtime.run import RunOptions
from pipelines.runtime.workshop import EpochReport

_totals = aggregate(
    "totals",
    files("{landing}/*.parquet", name="landing"),
    key="key",
    n=agg.count(),
    total=agg.sum("value"),
    sink=delta.append("totals"),
)
_often = aggregate("often", _totals, key="n", keys=agg.count(), sink=delta.append("often"))
PIPELINE = Pipeline("measured", (_totals, _often))

_DAY = 8_640


def settings(root: Path) -> Settings:
    """Every file is an epoch of its own, and every epoch is observed."""
    return Settings.model_validate(
        {
            "storage": {"root": str(root / "storage")},
            "local": {"work_dir": str(root / "work")},
            "epoch": {"max_files": 1},
            "run": {"linger_seconds": 0},
            "dagster": {"observe_seconds": 0},
            "pipelines": {
                "measured": {
                    "object": "benchmarks.dagster_overhead:PIPELINE",
                    "params": {"landing": str(root / "landing")},
                }
            },
        }
    )


def land(root: Path, count: int) -> None:
    """So many files, after those that are there."""
    landing = root / "landing"
    landing.mkdir(parents=True, exist_ok=True)
    first = len(list(landing.glob("*.parquet")))
    rows = pa.table({"key": list(range(1000)), "value": list(range(1000))})
    for number in range(first, first + count):
        pq.write_table(rows, landing / f".{number}")
        (landing / f".{number}").rename(landing / f"{number:06}.parquet")


def instance(root: Path) -> dg.DagsterInstance:
    """One with SQLite files, as `make ui` has."""
    (root / "home").mkdir(parents=True, exist_ok=True)
    (root / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    return dg.DagsterInstance.from_config(str(root / "home"))


def epochs(root: Path, count: int, turns: int) -> dict[str, list[float]]:
    """Milliseconds per epoch, alone and in Dagster, for each turn."""
    found: dict[str, list[float]] = {"alone": [], "in Dagster": []}
    tenure.SparkExecutor = lambda *_, **__: InMemoryExecutor()  # type: ignore[assignment, misc]
    with instance(root) as made:
        for turn in range(turns + 1):
            for way in found:
                where = root / way.replace(" ", "-")
                land(where, count)
                chosen = settings(where)
                clock = time.perf_counter()
                if way == "alone":
                    done = len(list(runtime.run(PIPELINE, chosen, RunOptions(until_caught_up=True))))
                else:
                    job = weir_definitions([PIPELINE], chosen).resolve_job_def("measured_job")
                    clock = time.perf_counter()
                    done = count if job.execute_in_process(instance=made).success else 0
                took = (time.perf_counter() - clock) * 1000 / count
                assert done == count, f"{done} epochs instead of {count}"
                if turn:  # the first one warms up
                    found[way].append(took)
    return found


def ticks(root: Path, count: int) -> dict[str, list[float]]:
    """Milliseconds per tick of the sensors, with ten files waiting."""
    land(root / "alone", 10)
    chosen = settings(root / "alone")
    defs = weir_definitions([PIPELINE], chosen)
    found: dict[str, list[float]] = {}
    with instance(root) as made:
        for name in ("measured_checkpoint_sensor", "measured_lease_watchdog"):
            (sensor,) = [one for one in defs.sensors or () if one.name == name]
            cursor = None
            for _ in range(count):
                context = dg.build_sensor_context(instance=made, cursor=cursor, definitions=defs)
                clock = time.perf_counter()
                cursor = sensor.evaluate_tick(context).cursor
                found.setdefault(name.removeprefix("measured_"), []).append((time.perf_counter() - clock) * 1000)
    return found


class _Reporting:
    """What a Dagster run offers to who shows epochs, recording events like a run of its own."""

    def __init__(self, made: dg.DagsterInstance) -> None:
        self.instance = made

    def log_event(self, event: Any) -> None:
        self.instance.report_runless_asset_event(event)


def day(root: Path, report: EpochReport) -> dict[str, float]:
    """A day of 10-second epochs, as a run of an hour each reports them: how long that takes, how large it is, how fast it is read."""
    chosen = settings(root / "alone").model_copy(update={"dagster": Settings().dagster})
    (root / "day").mkdir()
    with instance(root / "day") as made:
        clock, worst, now = time.perf_counter(), 0.0, [0.0]
        coordination.time = _Clock(now)  # type: ignore[attr-defined, assignment]
        for number in range(_DAY):
            if number % 360 == 0:
                watcher = coordination.Watcher(_Reporting(made), PIPELINE, chosen)  # type: ignore[arg-type]
            now[0] += 10.0
            row = dataclasses.replace(report.checkpoint, id=report.checkpoint.id + number)
            begun = time.perf_counter()
            watcher.see(dataclasses.replace(report, checkpoint=row))
            worst = max(worst, time.perf_counter() - begun)
            if number % 360 == 359:
                watcher.end()
                for materialized in watcher.materializations():
                    made.report_runless_asset_event(materialized)
        reported = time.perf_counter() - clock
        own = key(PIPELINE, CHECKPOINT)
        asked: dict[str, Any] = {
            "ms for the last 60 observations": lambda: history.points(made, own),
            "ms for the 100 newest events of the checkpoint": lambda: made.fetch_observations(own, limit=100),
            "ms for the newest materialization": lambda: made.fetch_materializations(own, limit=1),
        }
        found = {"ms per epoch": reported * 1000 / _DAY, "ms for the slowest epoch": worst * 1000}
        for name, ask in asked.items():
            took = []
            for _ in range(5):
                begun = time.perf_counter()
                ask()
                took.append((time.perf_counter() - begun) * 1000)
            found[name] = statistics.median(took)
    size = sum(path.stat().st_size for path in (root / "day").rglob("*") if path.is_file())
    return {**found, "MiB of Dagster's files": size / (1 << 20)}


class _Clock:
    """The time of the simulated day."""

    def __init__(self, now: list[float]) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now[0]


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        root = Path(scratch)
        by_way = epochs(root, asked.epochs, asked.turns)
        by_sensor = ticks(root, 20)
        land(root / "alone", 1)
        *_, last = runtime.run(PIPELINE, settings(root / "alone"), RunOptions(until_caught_up=True))
        of_day = day(root, last)
    alone, within = (statistics.median(by_way[way]) for way in ("alone", "in Dagster"))
    lines = [
        "# What Dagster adds",
        "",
        f"Medians of {asked.turns} turns of {asked.epochs} epochs, two stages, without Spark; SQLite; `python -m benchmarks.dagster_overhead`.",
        "",
        "| | |",
        "|---|---:|",
        f"| ms per epoch, alone | {alone:.1f} |",
        f"| ms per epoch, in a Dagster run that observes each | {within:.1f} |",
        f"| **ms that Dagster adds to an epoch** (target below 50) | **{within - alone:.1f}** |",
        *[
            f"| ms per tick, {name} (median; slowest {max(took):.0f}) | {statistics.median(took):.0f} |"
            for name, took in by_sensor.items()
        ],
        "",
        f"A day of 10-second epochs ({_DAY:,}, runs of an hour):",
        "",
        "| | |",
        "|---|---:|",
        *[f"| {name} | {value:,.1f} |" for name, value in of_day.items()],
        "",
    ]
    target = Path(__file__).parent / "results" / "dagster.md"
    target.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
