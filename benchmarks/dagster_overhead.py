"""What Dagster adds: to an epoch, at a tick, and to its database over a day of 10-second epochs.

    make bench-dagster                     about five minutes on a quiet machine; writes benchmarks/results/dagster.*
    python -m benchmarks.dagster_overhead --part epochs

- epoch: the same epochs of a small pipeline, without Spark, once through the public generator alone and once within a
  Dagster run, on an instance with SQLite files, every epoch observed. The two take turns. Per epoch is from the end of
  the first one to that of the last; per run is all the rest. The time in which the run waits until an epoch is shown is
  taken directly: what else runs on the machine changes it less than a difference.
- tick: the checkpoint sensor and the watchdog as the daemon evaluates them, on storage with a backlog and a living
  coordinator.
- day: 24 Dagster runs on a fresh instance report 360 epochs each, as a run reports them; then its size, and how long
  the pages' questions take.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from assets import coordination, history
from assets.factory import weir_definitions
from assets.names import CHECKPOINT, key
from benchmarks import harness
from benchmarks.harness import Row, seconds
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
    return harness.local_settings(
        root,
        "measured",
        root / "landing",
        local={"work_dir": str(root / "work")},
        epoch={"max_files": 1},
        run={"linger_seconds": 0},
        dagster={"observe_seconds": 0},
        pipelines={
            "measured": {
                "object": "benchmarks.dagster_overhead:PIPELINE",
                "params": {"landing": str(root / "landing")},
            }
        },
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


def measure_epochs(root: Path, count: int, turns: int) -> dict[str, list[dict[str, float]]]:
    """By way, of each turn: ms per epoch, from the first one's end to the last one's; ms in which the run waits for one
    to be shown, in the median; and ms of the run, all else it took."""
    figures: dict[str, list[dict[str, float]]] = {"alone": [], "in Dagster": []}
    with instance(root) as dagster:
        for turn in range(turns + 1):
            for way in figures:
                where = root / way.replace(" ", "-")
                land(where, count)
                chosen = settings(where)
                job = weir_definitions([PIPELINE], chosen).resolve_job_def("measured_job")
                run = {
                    "alone": lambda: list(runtime.run(PIPELINE, chosen, RunOptions(until_caught_up=True))),  # noqa: B023
                    "in Dagster": lambda: job.execute_in_process(instance=dagster),  # noqa: B023
                }[way]
                with _shown() as shown:
                    whole = seconds(run) * 1000
                assert len(shown) == count, f"{len(shown)} epochs instead of {count}"
                per_epoch = (shown[-1][1] - shown[0][1]) * 1000 / (count - 1)
                waits = statistics.median(after - before for before, after in shown) * 1000
                if turn:  # the first one warms up
                    figures[way].append({"epoch": per_epoch, "shown": waits, "run": whole - per_epoch * count})
    return figures


@contextmanager
def _shown() -> Iterator[list[tuple[float, float]]]:
    """When the generator's consumer got each epoch and when it was done with it, which is shown by then; on
    time.perf_counter()."""
    times: list[tuple[float, float]] = []
    run = runtime.run

    def timed(*given: Any, **named: Any) -> Iterator[EpochReport]:
        with closing(run(*given, **named)) as reports:  # type: ignore[type-var]
            for report in reports:
                begun = time.perf_counter()
                yield report
                times.append((begun, time.perf_counter()))

    with patch.object(runtime, "run", timed):
        yield times


def ticks(root: Path, count: int) -> dict[str, list[float]]:
    """Milliseconds per tick of the sensors, with ten files waiting."""
    _one_epoch(root)
    land(root / "alone", 10)
    defs = weir_definitions([PIPELINE], settings(root / "alone"))
    ms: dict[str, list[float]] = {"checkpoint_sensor": [], "lease_watchdog": []}
    with instance(root) as dagster:
        for name, times in ms.items():
            (sensor,) = [sensor for sensor in defs.sensors or () if sensor.name == f"measured_{name}"]
            cursor = None
            for _ in range(count):
                context = dg.build_sensor_context(instance=dagster, cursor=cursor, definitions=defs)
                with harness.Stopwatch() as clock:
                    cursor = sensor.evaluate_tick(context).cursor
                times.append(clock.ms)
    return ms


def day(root: Path, report: EpochReport) -> dict[str, float]:
    """A day of 10-second epochs in runs of an hour: what reporting takes, how large it is, how fast pages have it.

    Every epoch is reported, by the same code as in production and as an event of a Dagster run; only what an epoch says
    is always the same but for its id, and time is the one of the day. Files are SQLite's.
    """
    chosen = settings(root / "alone").model_copy(update={"dagster": Settings().dagster})
    (root / "day").mkdir()
    took: list[float] = []
    clock = _Clock()
    with instance(root / "day") as dagster, patch.object(coordination, "time", clock):
        with harness.Stopwatch() as whole:
            runs = [_hour(chosen, report, hour, clock, took).execute_in_process(instance=dagster) for hour in range(24)]
        assert all(run.success for run in runs) and len(took) == _DAY, "every epoch is reported"
        checkpoint = key(PIPELINE, CHECKPOINT)
        questions: dict[str, Callable[[], object]] = {
            "ms for the last 60 observations, of which a picture is made": lambda: history.points(dagster, checkpoint),
            "ms for the 100 newest events of the checkpoint": lambda: dagster.fetch_observations(checkpoint, limit=100),
            "ms for the newest materialization": lambda: dagster.fetch_materializations(checkpoint, limit=1),
            "ms for the log of a run of an hour": lambda: dagster.all_logs(runs[-1].run_id),
        }
        figures = {
            "ms an epoch, runs and all": whole.ms / _DAY,
            "ms to report an epoch, median": statistics.median(took),
            "ms to report the slowest epoch, with a picture": max(took),
            "events": float(sum(len(dagster.all_logs(run.run_id)) for run in runs)),
            **{name: statistics.median(seconds(ask) * 1000 for _ in range(5)) for name, ask in questions.items()},
        }
    sizes = {path: path.stat().st_size / (1 << 20) for path in (root / "day").rglob("*") if path.is_file()}
    index = sum(size for path, size in sizes.items() if path.name == "index.db")
    return {**figures, "MiB of Dagster's files": sum(sizes.values()), "MiB, of which the index over all runs": index}


def _hour(chosen: Settings, report: EpochReport, hour: int, clock: _Clock, took: list[float]) -> dg.JobDefinition:
    """A run that reports an hour's epochs, and the materializations at its end, as `coordinate` does."""

    @dg.op(out={})
    def epochs_of_an_hour(context):  # type: ignore[no-untyped-def]
        watcher = coordination.Watcher(context, PIPELINE, chosen)
        for number in range(hour * 360, (hour + 1) * 360):
            clock.now += 10.0
            row = dataclasses.replace(report.checkpoint, id=CheckpointId(report.checkpoint.id + number))
            took.append(seconds(partial(watcher.see, dataclasses.replace(report, checkpoint=row))) * 1000)
        watcher.end()
        for materialized in watcher.materializations():
            context.log_event(materialized)

    @dg.job(name="measured_job", executor_def=dg.in_process_executor)
    def measured_job():  # type: ignore[no-untyped-def]
        epochs_of_an_hour()

    return measured_job


@dataclasses.dataclass
class _Clock:
    """The time of the simulated day, in seconds."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


def page(figures: Row) -> str:
    """The report of what was measured, part by part."""
    alone, within = (
        {name: [turn[name] for turn in turns] for name in turns[0]} for turns in figures["epochs"].values()
    )
    runs = [shown - plain for plain, shown in zip(alone["run"], within["run"], strict=True)]
    return harness.render("dagster", **figures, alone=alone, within=within, runs=runs, epochs_of_a_day=_DAY)


def main(
    epochs: int = 30,
    turns: int = 5,
    part: Annotated[
        Literal["epochs", "ticks", "day"] | None, typer.Option(help="measure this again and keep the rest")
    ] = None,
    results: Path = harness.RESULTS / "dagster",
) -> None:
    """What Dagster adds: to an epoch, at a tick, and to its database over a day of 10-second epochs."""
    figures: Row = json.loads(results.with_suffix(".json").read_text()) if part else {"load": {}}
    figures["machine"] = f"{harness.machine()}, Dagster {dg.__version__} on SQLite"
    parts: dict[str, Callable[[Path], Any]] = {
        "epochs": lambda root: measure_epochs(root, epochs, turns),
        "ticks": lambda root: ticks(root, 20),
        "day": lambda root: day(root, _one_epoch(root)),
    }
    with patch.object(ownership, "SparkExecutor", lambda *_, **__: InMemoryExecutor()):
        for name in [part] if part else parts:
            figures["load"][name] = os.getloadavg()[0]
            figures[name] = harness.in_scratch(parts[name])
    harness.publish(results, figures, page(figures))


def _one_epoch(root: Path) -> EpochReport:
    land(root / "alone", 1)
    *_, last = runtime.run(PIPELINE, settings(root / "alone"), RunOptions(until_caught_up=True))
    return last


if __name__ == "__main__":
    typer.run(main)
