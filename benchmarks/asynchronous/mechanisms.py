"""Three ways to upload what an epoch leaves while the next one is worked on, against each other.

    python -m benchmarks.asynchronous.mechanisms     a quarter of an hour; writes benchmarks/results/mechanisms.*
    python -m benchmarks.asynchronous.mechanisms --quick --results /tmp/mechanisms

    worker    a thread in the Python worker that has done the task, which Spark keeps for its next one
    driver    threads in the driver, which sees the worker's disk
    job       a second Spark job, in a scheduler pool of its own

An epoch is a Spark job that reads 500,000 rows, shuffles them, and adds them up by key in Python; then each of two
subtasks leaves three files of random bytes. The next epoch begins when this one's job and the upload before are over,
as with two epochs under way. Without any of Weir's engine, so that nothing but the mechanism differs; uploads go
through its storage, behind the link of `store.py`. What is measured: benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import psutil
import pyarrow as pa
import typer
from pyspark.sql import SparkSession

from benchmarks import harness
from benchmarks.asynchronous.store import SCRATCH, Limits, gateway, opened
from benchmarks.harness import Row
from benchmarks.state import workload
from benchmarks.state.workload import Slices, Workload
from configs.settings import Settings
from pipelines.runtime.execution.spark import spark_session as weir_spark
from state_ops.storage.storage import Storage
from state_ops.storage.transfers import together

MECHANISMS = ("worker", "driver", "job")
SUBTASKS, FILES, BYTES = 2, 3, 2_700_000
"""As much an epoch as the keyed aggregation of `throughput` leaves."""
SMALLER = 20
"""Files are so many times smaller, and more, where nothing follows: so that no single request takes longer than a
client waits."""
LOAD = Workload("mechanisms", 1_000_000, epochs=15, events=500_000)
QUICK = Workload("mechanisms-quick", 100_000, epochs=4, events=50_000)
LINKS = (Limits(), Limits(20, 50))
QUIET = Limits(0.18, 1)
"""Takes an epoch's files 90 s: longer than Spark keeps a Python worker that has nothing to do."""
_QUIET_SECONDS = 150.0
_WARM = 3


@dataclass(frozen=True, slots=True)
class Subtask:
    """Where a subtask leaves its files, and where they go."""

    number: int
    epoch: int
    home: str
    settings: str

    @property
    def directory(self) -> Path:
        return Path(self.home, f"{self.epoch}-{self.number}")

    @property
    def uploaded(self) -> Path:
        """There as soon as all its files are in storage."""
        return self.directory / "UPLOADED"

    def send(self) -> None:
        """Upload its files, by as many threads as Weir takes."""
        config = Settings.model_validate_json(self.settings)
        storage = Storage(config.storage.root, config.storage.s3)

        def send(file: Path, cancelled: threading.Event) -> None:
            storage.put_file(file, f"{self.epoch}/{self.number}/{file.name}", cancelled=cancelled)

        together(send, sorted(self.directory.glob("*.state")), at_once=storage.transfers)
        self.uploaded.touch()


def task(
    batches: Iterator[pa.RecordBatch], epoch: int, home: str, settings: str, smaller: int, sends: bool
) -> Iterator[pa.RecordBatch]:
    """A keyed task: its rows added up by key, files of state left, so many times smaller and more. sends: by a thread
    of this worker, once the task is over."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    subtask = Subtask(context.partitionId(), epoch, home, settings)
    rows = pa.Table.from_batches(list(batches))
    totals = rows.group_by("key").aggregate([("value", "sum"), ("value", "count"), ("value", "max")])
    subtask.directory.mkdir(parents=True)
    for number in range(FILES * smaller):
        (subtask.directory / f"{number}.state").write_bytes(os.urandom(BYTES // smaller))
    if sends:
        threading.Thread(target=subtask.send, daemon=True).start()
    yield pa.record_batch({"keys": pa.array([totals.num_rows], pa.int64())})


class Engine:
    """Epochs on one session, and their uploads by one mechanism."""

    def __init__(self, mechanism: str, home: Path, settings: Settings) -> None:
        self.mechanism, self.home, self.settings = mechanism, str(home / "local"), settings.model_dump_json()
        self.spark: SparkSession = weir_spark.session(settings, app="mechanisms")
        self.pool = ThreadPoolExecutor(1)

    def work(self, epoch: int, files: list[str], smaller: int) -> None:
        """The epoch's job."""
        sends = self.mechanism == "worker"
        pass_on = partial(task, epoch=epoch, home=self.home, settings=self.settings, smaller=smaller, sends=sends)
        keyed = self.spark.read.parquet(*files).repartition(SUBTASKS, "key")
        keyed.mapInArrow(pass_on, "keys long").collect()

    def upload(self, epoch: int) -> Future[float]:
        """Begin, or with workers await, the upload of what the epoch has left; the result is when all of it was in
        storage."""
        return self.pool.submit(
            self._upload, [Subtask(number, epoch, self.home, self.settings) for number in range(SUBTASKS)]
        )

    def _upload(self, subtasks: list[Subtask]) -> float:
        if self.mechanism == "driver":
            together(lambda subtask, _: subtask.send(), subtasks, at_once=SUBTASKS)
        elif self.mechanism == "job":
            context = self.spark.sparkContext
            context.setLocalProperty("spark.scheduler.pool", "uploads")
            context.parallelize(subtasks, SUBTASKS).foreach(Subtask.send)
        until = time.monotonic() + _QUIET_SECONDS
        while not all(subtask.uploaded.exists() for subtask in subtasks):
            if time.monotonic() > until:
                raise TimeoutError("an upload did not end")
            time.sleep(0.005)
        return time.time()


def once(mechanism: str, link: Limits, load: Workload, scratch: Path, repetition: int) -> Row:
    """Epochs of one mechanism over one link, in a session of its own. Over the link `QUIET`: one epoch, and nothing
    after.

    Returns:
        epoch_ms, durable_ms: of the epochs after the first ones; durable is from the end of an epoch's job until all is
            in storage.
        cpu_ms: of an epoch, of driver, JVM and workers.
        lost: how many subtasks' upload never ended.
        quiet: whether no epoch followed.
    """
    quiet = link == QUIET
    inputs = sorted(
        str(file) for file in workload.sliced(scratch, load, Slices(load.epochs, load.events)).glob("*.parquet")
    )
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=scratch) as home, opened(link, scratch, Path(home, "s3")) as store:
        settings = Settings.model_validate(
            {
                "storage": store.settings(),
                "local": {"work_dir": f"{home}/work", "cache_dir": str(scratch / "cache")},
                "spark": {"conf": {"spark.scheduler.mode": "FAIR"}},
            }
        )
        engine = Engine(mechanism, Path(home), settings)
        began, worked, uploads, spent = [time.time()], [], [], []
        for epoch in range(1 if quiet else load.epochs):
            files = inputs[workload.FILES * epoch : workload.FILES * (epoch + 1)]
            engine.work(epoch, files, SMALLER if quiet else 1)
            worked.append(time.time())
            if uploads and not quiet:
                uploads[-1].result()
            uploads.append(engine.upload(epoch))
            began.append(time.time())
            spent.append(_cpu_seconds())
        lost = 0
        # Any other error is no lost upload: it ends the measurement.
        if quiet and isinstance(uploads[0].exception(), TimeoutError):
            lost = SUBTASKS - len(list(Path(engine.home).glob("*/UPLOADED")))
        ended = [] if lost else [upload.result() for upload in uploads]
        engine.spark.stop()
    epochs = [(after - before) * 1e3 for before, after in pairwise(began)][_WARM:]
    durable = [(end - work) * 1e3 for work, end in zip(worked, ended, strict=False)][0 if quiet else _WARM :]
    cpu = 0.0 if quiet else (spent[-1] - spent[_WARM - 1]) / (len(spent) - _WARM) * 1e3
    return {
        "mechanism": mechanism,
        "link": link.title,
        "repetition": repetition,
        "epoch_ms": epochs,
        "durable_ms": durable,
        "cpu_ms": cpu,
        "lost": lost,
        "quiet": quiet,
        "load": busy,
    }


def _cpu_seconds() -> float:
    """Of this process and all that it has started but the servers: the JVM and its Python workers."""
    driver = psutil.Process()
    seconds = sum(driver.cpu_times()[:2])
    for process in driver.children(recursive=True):
        try:
            if "java" in process.name() or any("pyspark" in part for part in process.cmdline()):
                seconds += sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return seconds


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a look: small epochs, nothing quiet")] = False,
    reps: Annotated[int, typer.Option(help="repetitions")] = 3,
    part: Annotated[
        Literal["beside", "quiet"] | None, typer.Option(help="only this one again; the report keeps the other")
    ] = None,
    scratch: Path = SCRATCH,
    results: Annotated[Path, typer.Option(help="report's path, without suffix")] = harness.RESULTS / "mechanisms",
) -> None:
    """Three ways to upload what an epoch leaves while the next one is worked on, against each other."""
    scratch = scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    gateway(scratch)
    kept = (
        json.loads(results.with_suffix(".json").read_text()) if part and results.with_suffix(".json").exists() else []
    )
    rows: list[Row] = [row for row in kept if row["quiet"] != (part == "quiet")]
    load = QUICK if quick else LOAD
    for mechanism, link, repetition in _order(reps, part, quick):
        row = harness.in_fresh_process(once, mechanism, link, load, scratch, repetition)
        rows.append(row)
        if row["quiet"]:
            print(f"{mechanism}, nothing follows: {row['lost']} of {SUBTASKS} uploads lost", flush=True)
        else:
            print(f"{mechanism}, {row['link']}: {statistics.median(row['epoch_ms']):,.0f} ms an epoch", flush=True)
    harness.publish(results, rows, page(rows, load, harness.machine()))


def _order(repetitions: int, part: str | None, quick: bool) -> Iterator[tuple[str, Limits, int]]:
    for repetition in range(repetitions if part != "quiet" else 0):
        for link in LINKS:
            for mechanism in MECHANISMS:
                yield mechanism, link, repetition
    if part == "quiet" or not (part or quick):
        for mechanism in MECHANISMS:
            yield mechanism, QUIET, 0


def page(rows: list[Row], load: Workload, machine: str) -> str:
    """The Markdown of what was measured."""
    return harness.render(
        "mechanisms",
        machine=machine,
        events=load.events,
        files=SUBTASKS * FILES,
        megabytes=BYTES / 1e6,
        groups={
            (link.title, mechanism): [row for row in rows if (row["mechanism"], row["link"]) == (mechanism, link.title)]
            for link in LINKS
            for mechanism in MECHANISMS
        },
        quiet=[row for row in rows if row["quiet"]],
        quiet_seconds=SUBTASKS * FILES * BYTES / QUIET.megabytes / 1e6,
        subtasks=SUBTASKS,
        limit=_QUIET_SECONDS,
    )


if __name__ == "__main__":
    typer.run(main)
