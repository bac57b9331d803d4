"""A pipeline that is run without Spark, epoch by epoch, in milliseconds: counts and sums per key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from state_ops.checkpoints.registry import Registry
from state_ops.coordination import requests
from state_ops.records.acks import Ack
from tests.recovery.harness import Site
from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, stage
from weir.epoch.model import EpochReport
from weir.execution.executor import Deadline, Executor, InputRows
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.run.run import RunOptions, open_storage, run
from weir.task.run_task import KeyedTask


class Apart(InMemoryExecutor):
    """Its subtasks see no disk of the coordinator's, as on other hosts: they upload by themselves, channels too."""

    def run(self, task: KeyedTask, rows: InputRows | None, columns: pa.Schema, deadline: Deadline) -> list[Ack]:
        return super().run(replace(task, here=None), rows, columns, deadline)


class Account(State):
    """Of one key."""

    rows: int = 0
    total: int = 0


SOURCE = files("{landing}/*.parquet", name="landing")


@stage("accounts", source=SOURCE, key="id", state=Account, order_by=["at"], sink=delta.append("booked"))
def accounts(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Every row is booked, and its key's sum goes up."""
    state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.select("id", "at", "amount")


pipeline = Pipeline("small", (accounts,), max_parallelism=8)
successor = replace(pipeline, name="successor")


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait for what another thread brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@dataclass
class Bank:
    """A site of the small pipeline whose every file is one epoch."""

    site: Site

    @classmethod
    def at(cls, root: Path, **options: str) -> Bank:
        return cls(
            Site(
                root,
                {"WEIR_EPOCH__MAX_FILES": "1", "WEIR_CHECKPOINTS__NUM_RETAINED": "1", **options},
                pipeline,
                "tests.recovery.small",
            )
        )

    def land(self, *numbers: int) -> None:
        """Files 1, 2, ...: each books its number for ten keys, of which two are its own."""
        self.site.landing.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            ids = [f"k{key}" for key in range(8)] + [f"only-{number}-{key}" for key in range(2)]
            rows = pa.table({"id": ids, "at": list(range(10)), "amount": [number] * 10})
            staging = self.site.landing / f".{number:05}"
            pq.write_table(rows, staging)
            staging.rename(self.site.landing / f"{number:05}.parquet")

    def epochs(self, *numbers: int, executor: Executor | None = None, **options) -> list[EpochReport]:
        """Land these files and run until they are read."""
        self.land(*numbers)
        asked = RunOptions(until_caught_up=True, **options)
        return list(run(self.site.pipeline, self.site.settings, asked, executor or InMemoryExecutor()))

    @property
    def registry(self) -> Registry:
        return open_storage(self.site.pipeline, self.site.settings)[1]

    def ids(self) -> list[int]:
        return [row.id for row in self.registry.checkpoints()]

    def state(self) -> dict[str, tuple[int, int]]:
        rows = [
            row
            for table in state_reader.scan(self.site.pipeline, self.site.settings, "accounts")
            for row in table.to_pylist()
        ]
        return {row["id"]: (row["rows"], row["total"]) for row in rows}

    def assert_exact(self, *numbers: int) -> None:
        """State and table are those of these files, whatever happened on the way."""
        table = self.site.table("booked")
        booked = sorted(zip(table["id"], table["amount"], strict=True))
        expected: dict[str, tuple[int, int]] = {}
        rows = []
        for number in numbers:
            for key in [f"k{key}" for key in range(8)] + [f"only-{number}-{key}" for key in range(2)]:
                before = expected.get(key, (0, 0))
                expected[key] = (before[0] + 1, before[1] + number)
                rows.append((key, number))
        assert self.state() == expected
        assert booked == sorted(rows)

    @contextmanager
    def coordinator(self, **options) -> Iterator[list[EpochReport]]:
        """A coordinator that lives in a thread of this process until a request stops it; yields its reports so far."""
        reports: list[EpochReport] = []
        failed: list[BaseException] = []

        def coordinate() -> None:
            try:
                asked = RunOptions(interval=3600.0, **options)
                reports.extend(run(self.site.pipeline, self.site.settings, asked, InMemoryExecutor()))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=coordinate, daemon=True)
        thread.start()
        try:
            yield reports
        except BaseException:  # nobody else would stop it, and later tests would meet it
            requests.send(open_storage(self.site.pipeline, self.site.settings)[0], requests.Request("stop"))
            thread.join(60)
            raise
        thread.join(60)
        assert not thread.is_alive(), "nobody stopped it"
        if failed:
            raise failed[0]
