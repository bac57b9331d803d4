"""What Dagster adds: to an epoch, at a tick, and to its database over a day of 10-second epochs.

    make bench-dagster                     about five minutes on a quiet machine; writes benchmarks/results/dagster.*
    python -m benchmarks.dagster_overhead --part epochs

- epoch: the same epochs of a small pipeline, without Spark, once through the public generator alone and once within a Dagster run, on an
  instance with SQLite files, every epoch observed. The two take turns. Per epoch is from the end of the first one to that of the last; per run is all
  the rest. The time in which the run waits until an epoch is shown is taken directly: what else runs on the machine changes it less than a difference.
- tick: the checkpoint sensor and the watchdog as the daemon evaluates them, on storage with a backlog and a living coordinator.
- day: 24 Dagster runs on a fresh instance report 360 epochs each, as a run reports them; then its size, and how long the pages' questions take.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
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
from pipelines.runtime.epoch.model import EpochReport
from pipelines.runtime.execution.in_process import InMemoryExecutor
from pipelines.runtime.ownership import ownership
from pipelines.runtime.run import run as runtime
from pipelines.runtime.run.run import RunOptions
from state_ops.ids import CheckpointId

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


def epochs(root: Path, count: int, turns: int) -> dict[str, list[dict[str, float]]]:
    """By way, of each turn: ms per epoch, from the first one's end to the last one's; ms in which the run waits for one to be shown, in the
    median; and ms of the run, all else it took."""
    found: dict[str, list[dict[str, float]]] = {"alone": [], "in Dagster": []}
    ownership.SparkExecutor = lambda *_, **__: InMemoryExecutor()  # type: ignore[assignment, misc]
    with instance(root) as made:
        for turn in range(turns + 1):
            for way in found:
                where = root / way.replace(" ", "-")
                land(where, count)
                chosen = settings(where)
                job = weir_definitions([PIPELINE], chosen).resolve_job_def("measured_job")
                with _told() as ended:
                    begun = time.perf_counter()
                    if way == "alone":
                        list(runtime.run(PIPELINE, chosen, RunOptions(until_caught_up=True)))
                    else:
                        assert job.execute_in_process(instance=made).success
                    took = (time.perf_counter() - begun) * 1000
                assert len(ended) == count, f"{len(ended)} epochs instead of {count}"
                per_epoch = (ended[-1][1] - ended[0][1]) * 1000 / (count - 1)
                shown = statistics.median(after - before for before, after in ended) * 1000
                if turn:  # the first one warms up
                    found[way].append({"epoch": per_epoch, "shown": shown, "run": took - per_epoch * count})
    return found


@contextmanager
def _told() -> Iterator[list[tuple[float, float]]]:
    """When the generator's consumer got each epoch and when it was done with it, which is shown by then; on time.perf_counter()."""
    ended: list[tuple[float, float]] = []
    own = runtime.run

    def timed(*given: Any, **named: Any) -> Iterator[EpochReport]:
        with closing(own(*given, **named)) as reports:  # type: ignore[type-var]
            for report in reports:
                begun = time.perf_counter()
                yield report
                ended.append((begun, time.perf_counter()))

    runtime.run = timed
    try:
        yield ended
    finally:
        runtime.run = own


def ticks(root: Path, count: int) -> dict[str, list[float]]:
    """Milliseconds per tick of the sensors, with ten files waiting."""
    _one_epoch(root)
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


def day(root: Path, report: EpochReport) -> dict[str, float]:
    """A day of 10-second epochs in runs of an hour: what reporting takes, how large it is, how fast pages have it.

    Every epoch is reported, by the same code as in production and as an event of a Dagster run; only what an epoch says is always the same
    but for its id, and time is the one of the day. Files are SQLite's.
    """
    chosen = settings(root / "alone").model_copy(update={"dagster": Settings().dagster})
    (root / "day").mkdir()
    took: list[float] = []
    clock = _Clock()
    with instance(root / "day") as made, _timed(clock):
        begun = time.perf_counter()
        runs = [_hour(chosen, report, hour, clock, took).execute_in_process(instance=made) for hour in range(24)]
        whole = time.perf_counter() - begun
        assert all(run.success for run in runs) and len(took) == _DAY, "every epoch is reported"
        own = key(PIPELINE, CHECKPOINT)
        asked: dict[str, Any] = {
            "ms for the last 60 observations, of which a picture is made": lambda: history.points(made, own),
            "ms for the 100 newest events of the checkpoint": lambda: made.fetch_observations(own, limit=100),
            "ms for the newest materialization": lambda: made.fetch_materializations(own, limit=1),
            "ms for the log of a run of an hour": lambda: made.all_logs(runs[-1].run_id),
        }
        found = {
            "ms an epoch, runs and all": whole * 1000 / _DAY,
            "ms to report an epoch, median": statistics.median(took),
            "ms to report the slowest epoch, with a picture": max(took),
            "events": float(sum(len(made.all_logs(run.run_id)) for run in runs)),
        }
        found |= {name: statistics.median(_milliseconds(ask) for _ in range(5)) for name, ask in asked.items()}
    sizes = {path: path.stat().st_size / (1 << 20) for path in (root / "day").rglob("*") if path.is_file()}
    index = sum(size for path, size in sizes.items() if path.name == "index.db")
    return {**found, "MiB of Dagster's files": sum(sizes.values()), "MiB, of which the index over all runs": index}


def _hour(chosen: Settings, report: EpochReport, hour: int, clock: _Clock, took: list[float]) -> dg.JobDefinition:
    """A run that reports an hour's epochs, and the materializations at its end, as `coordinate` does."""

    @dg.op(out={})
    def epochs_of_an_hour(context):  # type: ignore[no-untyped-def]
        watcher = coordination.Watcher(context, PIPELINE, chosen)
        for number in range(hour * 360, (hour + 1) * 360):
            clock.now += 10.0
            row = dataclasses.replace(report.checkpoint, id=CheckpointId(report.checkpoint.id + number))
            took.append(_milliseconds(partial(watcher.see, dataclasses.replace(report, checkpoint=row))))
        watcher.end()
        for materialized in watcher.materializations():
            context.log_event(materialized)

    @dg.job(name="measured_job", executor_def=dg.in_process_executor)
    def measured_job():  # type: ignore[no-untyped-def]
        epochs_of_an_hour()

    return measured_job


def _milliseconds(step: Callable[[], object]) -> float:
    begun = time.perf_counter()
    step()
    return (time.perf_counter() - begun) * 1000


@dataclasses.dataclass
class _Clock:
    """The time of the simulated day, in seconds."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@contextmanager
def _timed(clock: _Clock) -> Iterator[None]:
    """Reports go by this clock."""
    coordination.time = clock  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        coordination.time = time  # type: ignore[attr-defined]


def _spread(turns: list[float]) -> str:
    return f"{min(turns):,.0f} to {max(turns):,.0f}"


def written(known: dict[str, Any]) -> str:
    """The report of what was measured, part by part."""
    alone, within = ({name: [turn[name] for turn in turns] for name in turns[0]} for turns in known["epochs"].values())
    middle = {name: statistics.median(values) for name, values in within.items()}
    runs = [with_it - without for without, with_it in zip(alone["run"], within["run"], strict=True)]
    return "\n".join(
        [
            "# What Dagster adds",
            "",
            f"{known['machine']}. Made by `make bench-dagster`; what is measured, and what it says, stands in `benchmarks/README.md`. Load average at the",
            f"start: {', '.join(f'{part} {load:.1f}' for part, load in known['load'].items())}; above 1 something else ran, and milliseconds are too many.",
            "",
            f"Two stages, without Spark, {len(alone['epoch'])} turns; medians:",
            "",
            "| | |",
            "|---|---:|",
            f"| ms per epoch, alone (turns: {_spread(alone['epoch'])}) | {statistics.median(alone['epoch']):.0f} |",
            f"| ms per epoch, in a Dagster run that shows each (turns: {_spread(within['epoch'])}) | {middle['epoch']:.0f} |",
            f"| **ms in which the run waits until an epoch is shown** (target below 50; turns: {_spread(within['shown'])}) | **{middle['shown']:.0f}** |",
            f"| ms that Dagster adds to a run, for its start, and its end with picture and materializations (turns: {_spread(runs)}) "
            f"| {statistics.median(runs):,.0f} |",
            *[
                f"| ms per tick, {name} (target below 1,000; slowest {max(took):.0f}) | {statistics.median(took):.0f} |"
                for name, took in known["ticks"].items()
            ],
            "",
            f"A day of 10-second epochs: {_DAY:,}, all reported, in 24 runs of an hour:",
            "",
            "| | |",
            "|---|---:|",
            *[f"| {name} | {value:,.1f} |" for name, value in known["day"].items()],
            "",
        ]
    )


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--part", choices=("epochs", "ticks", "day"), help="measure this again and keep the rest")
    asked = parser.parse_args()
    target = Path(__file__).parent / "results" / "dagster.json"
    known: dict[str, Any] = json.loads(target.read_text()) if asked.part else {"load": {}}
    known["machine"] = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, Dagster {dg.__version__} on SQLite"
    )
    parts: dict[str, Callable[[Path], Any]] = {
        "epochs": lambda root: epochs(root, asked.epochs, asked.turns),
        "ticks": lambda root: ticks(root, 20),
        "day": lambda root: day(root, _one_epoch(root)),
    }
    for part, measure in parts.items():
        if asked.part in (None, part):
            with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
                known["load"][part] = os.getloadavg()[0]
                known[part] = measure(Path(scratch))
    target.write_text(json.dumps(known, indent=1) + "\n")
    target.with_suffix(".md").write_text(written(known))
    print(written(known))


def _one_epoch(root: Path) -> EpochReport:
    ownership.SparkExecutor = lambda *_, **__: InMemoryExecutor()  # type: ignore[assignment, misc]
    land(root / "alone", 1)
    *_, last = runtime.run(PIPELINE, settings(root / "alone"), RunOptions(until_caught_up=True))
    return last


if __name__ == "__main__":
    main()
