"""Epochs in flight that are delivered before their commits, in a random order of steps, with faults, kills, and what
people change between runs: slices, parallelism, how often rows are delivered, a rewind, a lost lease.

Every row has to be in every sink, no other may be, and state is a replay of the files. `WEIR_SCHEDULES=500` plays more,
`FROM=500` the next ones.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.checkpoints.registry import Registry
from state_ops.coordination.lease import LEASE
from state_ops.errors import DamageError, RunEndedError, TransientError, WeirError
from state_ops.fsck.findings import Severity
from state_ops.records.checkpoint import Checkpoint
from tests.recovery import ledger
from tests.recovery.doors_child import call
from tests.recovery.harness import Site
from tests.recovery.ledger import LedgerSink
from tests.recovery.small import Apart
from tests.recovery.test_schedules import Clock, Killed, Shuffled
from tests.tools.sampling import sampled
from weir import Epoch, Pipeline, State, ValueState, agg, delta, files, foreach, stage
from weir.definition.sink import Sink
from weir.epoch import failover, scheduler, stage_job, transitions
from weir.epoch import steps as steps_of_an_epoch
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.ownership import backlog
from weir.restore import rewind
from weir.run import fsck, maintenance, run
from weir.run.run import RunOptions

_MANY = int(os.environ.get("WEIR_SCHEDULES", "12"))
_FROM = int(os.environ.get("FROM") or 0)
_FILES, _KEYS, _RUNS = 6, 5, 30
KINDS = ("append", "partitioned", "upsert", "ledger", "returning", "foreach")
MORE, EXACT = "at_least_once", "exactly_once"


class Tally(State):
    """Of one key."""

    rows: int = 0
    total: int = 0


def pipeline_of(root: Path, kinds: tuple[str, str]) -> Pipeline:
    """Two stages, each of which hands on every row to a sink of its own."""

    def sink(name: str, kind: str) -> Sink:
        path = str(root / f"{name}.db")
        match kind:
            case "append":
                return delta.append(name)
            case "partitioned":
                return delta.append(name, partition_by="id")
            case "upsert":
                return delta.upsert(name, key=["id", "amount"])
            case "foreach":
                return foreach(partial(call, path), name=name)
            case _:
                return LedgerSink(name=name, path=path, takes_back=kind == "returning")

    @stage(
        "first", source=files("{landing}/*.parquet", name="landing"), key="id", state=Tally, sink=sink("one", kinds[0])
    )
    def first(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
        return rows.select("id", "amount")

    @stage("second", source=first, key="id", state=Tally, sink=sink("two", kinds[1]))
    def second(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
        return rows.select("id", "amount")

    return Pipeline("deliveries", (first, second), max_parallelism=4, delivery=MORE)


def _land(site: Site, chance: random.Random) -> Counter[tuple[str, int]]:
    """Each file has its own amount, once a key; returns all rows."""
    site.landing.mkdir(parents=True)
    rows: list[tuple[str, int]] = []
    for number in range(1, _FILES + 1):
        ids = sorted(chance.sample([f"k{key}" for key in range(_KEYS)], chance.randint(1, _KEYS)))
        pq.write_table(pa.table({"id": ids, "amount": [number] * len(ids)}), site.landing / f"{number:03}.parquet")
        rows += [(id, number) for id in ids]
    return Counter(rows)


def given(site: Site, sink: Sink) -> Counter[tuple[str, int]]:
    path = site.storage / "tables" / sink.name
    if isinstance(sink, LedgerSink):
        return Counter(ledger.rows_of(sink.path))
    if sink.kind == "foreach":
        return Counter(ledger.rows_of(str(site.storage.parents[2] / f"{sink.name}.db")))
    if not path.exists():
        return Counter()
    table = site.table(sink.name)
    return Counter(zip(table["id"].astype(str), table["amount"].astype(int), strict=True))


@dataclass
class Play:
    """One schedule of a pipeline."""

    root: Path
    chance: random.Random
    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        self.kinds = (self.chance.choice(KINDS), self.chance.choice(KINDS))
        self.unaligned = self.chance.random() < 0.3
        self.pipeline = pipeline_of(self.root, self.kinds)
        self.site = self.changed()
        self.rows, self.clock = _land(self.site, self.chance), Clock()
        self.faults, self.kills = self.chance.choice([0.03, 0.1]), self.chance.choice([0.0, 0.02, 0.04])
        self.events: list[str] = []

    def changed(self, delivery: str = MORE) -> Site:
        """What may differ from run to run."""
        options = {
            "WEIR_EPOCH__MAX_FILES": str(self.chance.choice([1, 1, 2, 3])),
            "WEIR_RUN__POLL_SECONDS": "1",
            "WEIR_SPARK__PARALLELISM": str(self.chance.choice([1, 2])),
            "WEIR_STATE__BACKEND": "memory",
            "WEIR_CHECKPOINTS__MAX_CONCURRENT": str(self.chance.choice([1, 2, 3, 4])),
            "WEIR_CHECKPOINTS__NUM_RETAINED": "4",
            "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "1000",
        } | ({"WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": "0"} if self.unaligned else {})
        pipeline = replace(self.pipeline, delivery=delivery)
        return Site(self.root / "site", options, pipeline, "tests.recovery.test_delivery_schedules")

    def patch(self) -> None:
        chance, commit, record = self.chance, Registry.commit, Registry.record_publications

        def unsure(act, *arguments, **options):
            if chance.random() < self.faults:
                if chance.random() < 0.5:
                    act(*arguments, **options)
                raise OSError("the answer was lost")
            return act(*arguments, **options)

        self.monkeypatch.setattr(Registry, "commit", lambda *given, **named: unsure(commit, *given, **named))
        self.monkeypatch.setattr(
            Registry, "record_publications", lambda *given, **named: unsure(record, *given, **named)
        )
        for module in (run, scheduler, transitions, failover, stage_job, steps_of_an_epoch):
            self.monkeypatch.setattr(module, "time", self.clock)
        close = scheduler.EpochScheduler.close

        def closed(air: scheduler.EpochScheduler) -> None:
            if not self.runner.killed:
                close(air)

        self.monkeypatch.setattr(scheduler.EpochScheduler, "close", closed)

    def run(self) -> bool:
        """Whether it came to its end."""
        self.runner = Shuffled(self.chance, self.faults, self.kills, self.clock)
        executor = Apart(1) if self.chance.random() < 0.2 else InMemoryExecutor()
        asked = RunOptions(until_caught_up=True)
        try:
            for report in run.run(self.site.pipeline, self.site.settings, asked, executor, self.runner):
                self.assert_delivered(report.checkpoint)
            return True
        except (Killed, TransientError, RunEndedError) as error:
            self.events.append(repr(error)[:150])
            return False
        except DamageError as error:
            assert self.site.pipeline.delivery == EXACT and "at least once until it has got rows" in str(error), (
                self.events
            )
            self.events.append("ahead")
            return False

    def assert_delivered(self, checkpoint: Checkpoint) -> None:
        """Nothing that a checkpoint has applied is missing in a sink, and nothing is there that never was."""
        read = Counter({row: 1 for row in self.rows if row[1] <= checkpoint.offsets["landing"]["files"]})
        left = Counter(
            (row["id"], row["amount"])
            for epoch in checkpoint.operators["second"].waiting
            for layer in epoch["layers"]
            for path in layer
            for row in pq.read_table(self.site.storage / path).to_pylist()
        )
        for sink, wanted in zip(self.site.pipeline.sinks, (read, read - left), strict=True):
            rows = given(self.site, sink)
            assert wanted.keys() <= rows.keys() <= self.rows.keys(), (sink.name, self.kinds, wanted - rows, self.events)

    def between(self) -> None:
        """What happens before the next run."""
        storage = self.site.storage
        if self.chance.random() < 0.2:
            (storage / LEASE).unlink(missing_ok=True)
            self.events.append("lease lost")
        can = "foreach" not in self.kinds
        self.site = self.changed(self.chance.choice([MORE, MORE, EXACT]) if can else MORE)
        self.events.append(self.site.pipeline.delivery)
        ids = [row.id for row in run.open_storage(self.site.pipeline, self.site.settings)[1].checkpoints()]
        if len(ids) > 1 and self.chance.random() < 0.15:
            to = self.chance.choice(ids[:-1])
            try:
                obstacles = rewind.plan(self.site.pipeline, self.site.settings, to).obstacles
                if any("do not come again" in obstacle for obstacle in obstacles):
                    return  # it goes forward to rows that an earlier rewind has taken back
                maintenance.rewind(self.site.pipeline, self.site.settings, to, accepted=obstacles)
                self.events.append(f"rewound to {to}")
            except DamageError as error:
                assert self.site.pipeline.delivery == EXACT, (error, self.events)
            except WeirError as error:  # it failed as it was made to, or recovery has pruned that checkpoint first
                assert isinstance(error, TransientError | RunEndedError) or "any more" in str(error), self.events
                self.events.append(repr(error)[:150])

    def assert_whole(self) -> None:
        head = run.open_storage(self.site.pipeline, self.site.settings)[1].head()
        assert head is not None and head.offsets["landing"]["files"] == _FILES and not backlog.unapplied(head)
        self.assert_delivered(head)
        wanted: dict[str, tuple[int, int]] = {}
        for id, amount in self.rows:
            rows, total = wanted.get(id, (0, 0))
            wanted[id] = rows + 1, total + amount
        for uid in ("first", "second"):
            tables = state_reader.scan(self.site.pipeline, self.site.settings, uid)
            rows = [row for table in tables for row in table.to_pylist()]
            assert {row["id"]: (row["rows"], row["total"]) for row in rows} == wanted
        findings = fsck.examine(self.site.pipeline, self.site.settings).findings
        assert not [str(finding) for finding in findings if finding.severity is Severity.DAMAGE], self.events


def play(number: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    played = Play(root, random.Random(f"deliveries {number}"), monkeypatch)
    played.patch()
    for _ in range(_RUNS):
        if played.run() and played.chance.random() < 0.7:
            break
        played.between()
    played.faults = played.kills = 0.0
    played.site = played.changed()
    assert played.run(), played.events
    played.assert_whole()
    return played


@pytest.mark.parametrize("number", sampled(range(_FROM, _FROM + _MANY), lambda number: number == 1))
def test_every_row_is_in_every_sink_whatever_fails_and_whoever_changes_what(number, tmp_path, monkeypatch):
    play(number, tmp_path, monkeypatch)
