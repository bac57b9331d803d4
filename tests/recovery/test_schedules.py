"""Epochs in flight under a scheduler that puts their steps in a random order, fails them, lets time run out and ends
the run.

Every schedule is told by its number: steps, faults and ends come from one seeded generator, and nothing runs beside
anything else.
`make schedules` plays a thousand, `FROM=1000 make schedules` the next one. A number that has found something is kept in FOUND.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from threading import Thread

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from state_ops.checkpoints.registry import Registry
from state_ops.errors import RunEndedError, TransientError
from state_ops.records.checkpoint import Checkpoint
from state_ops.snapshots import async_writer
from tests.recovery.harness import Site
from tests.recovery.small import Apart
from tests.tools.sampling import sampled
from tests.tools.stages import altered, with_input
from weir import (
    Epoch,
    Pipeline,
    State,
    ValueState,
    agg,
    aggregate,
    delta,
    desc,
    expect,
    files,
    join,
    lookup,
    select,
    stage,
    top_n,
    union,
)  # fmt: skip
from weir.epoch import failover, scheduler, stage_job, transitions
from weir.epoch import steps as steps_of_an_epoch
from weir.epoch.step_runner import Ended
from weir.epoch.step_runner import run as run_step
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.ownership import backlog
from weir.ownership.publish import unpublished
from weir.run import run
from weir.run.run import RunOptions

FOUND = (17,)
_MANY = int(os.environ.get("WEIR_SCHEDULES", "12"))
_FROM = int(os.environ.get("FROM") or 0)
_FILES = 5
_KEYS = 6
_ASKED = RunOptions(until_caught_up=True)


class Tally(State):
    """Of one key."""

    rows: int = 0


class Account(State):
    """Of one key."""

    rows: int = 0
    total: int = 0


SOURCE = files("{landing}/*.parquet", name="landing")


@stage("tallied", source=SOURCE, key="id", state=Tally)
def tallied(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each row with the number of its key's rows so far; a key has one row a file."""
    return rows.join(state.fold(rows, rows=agg.count()), on="id")


@stage("ledger", source=tallied, key="id", state=Account, sink=delta.append("ledger"))
def ledger(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """Each row with its key's sum so far."""
    sums = state.fold(rows, rows=agg.count(), total=agg.sum("amount"))
    return rows.select("id", "file").join(sums, on="id")


pipeline = Pipeline("schedules", (tallied, ledger), max_parallelism=4)
paired = join("paired", tallied, SOURCE, on="id", ttl=None, sink=delta.append("paired"))
joined = replace(pipeline, stages=(tallied, ledger, paired))
highest = top_n(
    "highest", SOURCE, key="id", by=[desc("amount"), "file"], n=2,
    sink=delta.upsert("highest", ["id", "rank_number"]),
)  # fmt: skip
ranked = replace(pipeline, stages=(tallied, ledger, highest))
totals = aggregate("totals", tallied, key="id", n=agg.count(), total=agg.sum("amount"), changes=True)
by_number = aggregate(
    "by_number", totals, key="n", ids=agg.count(), total=agg.sum("total"), changes=True,
    sink=delta.upsert("by_number", "n"),
)  # fmt: skip
revised = replace(pipeline, stages=(tallied, ledger, totals, by_number))
relayed = select("relayed", tallied, "id", "file", "amount", "`rows`")
again = select("again", SOURCE, "*")
twice = union("twice", SOURCE, again, sink=delta.append("twice"))
stateless = replace(pipeline, stages=(tallied, relayed, with_input(ledger, relayed), again, twice))


@stage("tallied", source=SOURCE, key="id", state=Tally, outputs={"spare": None, "odd": delta.append("odd")})
def parted(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> dict[str, pl.DataFrame]:
    """The same rows as an output that is read alone, and some of them as one with a table too."""
    counted = rows.join(state.fold(rows, rows=agg.count()), on="id")
    return {"spare": counted, "odd": rows.filter(pl.col("amount") % 2 == 1)}


odd_again = select("odd_again", parted.output("odd"), "*", sink=delta.append("odd_again"))
outputs = replace(pipeline, stages=(parted, with_input(ledger, parted.output("spare")), odd_again))
named = lookup("named", tallied, table="{landing}/../names", on="id", sink=delta.append("named"))
looked_up = replace(pipeline, stages=(tallied, ledger, named))
_GATES = (expect("ExpectColumnValuesToNotBeNull", column="id"),)
_gated = replace(tallied, gates=_GATES)
gated = replace(pipeline, stages=(_gated, altered(ledger, input=_gated, gates=_GATES)))


class Killed(BaseException):
    """The process is gone: nothing of it does anything any more."""


@dataclass
class Shuffled:
    """Slots whose steps end one at a time, in any order, or fail before they have begun or after they are done."""

    chance: random.Random
    faults: float
    kills: float
    clock: Clock
    _waiting: dict[str, Callable[[], object]] = field(default_factory=dict)
    killed: bool = False
    _idle: int = 0

    def start(self, slot: str, step: Callable[[], object]) -> None:
        assert slot not in self._waiting, "a slot takes one step at a time"
        self._waiting[slot] = step

    def next(self, seconds: float) -> Ended | None:
        if self.killed or self.chance.random() < self.kills:
            self.killed = True
            raise Killed
        self._idle = 0 if self._waiting else self._idle + 1
        assert self._idle < 10_000, "nothing runs, and nothing is begun"
        if not self._waiting or self.chance.random() < 0.3:
            self.clock.slept += seconds  # nothing ends now: the run may look for requests, or cut a barrier
            return None
        if self.chance.random() < self.faults / 4:
            self.clock.slept += (
                630.0  # so long that every epoch's time is up; twice, and a step that does not end ends the run
            )
        slot = self.chance.choice(sorted(self._waiting))
        step = self._waiting.pop(slot)
        if self.chance.random() < self.faults:
            if slot != "commits" and self.chance.random() < 0.5:
                run_step(slot, step)  # all of it is done, and yet it is reported as failed
            return Ended(slot, None, TransientError(f"a step in the slot {slot} failed"))
        return run_step(slot, step)


@dataclass
class Clock:
    """The time of a schedule passes when its steps say so, or somebody looks: it is the same in every play."""

    slept: float = field(default_factory=time.monotonic)

    def monotonic(self) -> float:
        self.slept += 0.001
        return self.slept

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


def _land(site: Site, chance: random.Random) -> pd.DataFrame:
    """All files' rows, and what they are to become."""
    site.landing.mkdir(parents=True)
    parts = []
    for number in range(_FILES):
        ids = sorted(chance.sample([f"k{key}" for key in range(_KEYS)], chance.randint(1, _KEYS)))
        part = pd.DataFrame({"id": ids, "file": number, "amount": [chance.randint(1, 99) for _ in ids]})
        pq.write_table(pa.Table.from_pandas(part, preserve_index=False), site.landing / f"{number:03}.parquet")
        parts.append(part)
    rows = pd.concat(parts, ignore_index=True)
    rows["rows"] = rows.groupby("id").cumcount() + 1
    rows["total"] = rows.groupby("id")["amount"].cumsum()
    return rows


def _assert_state_is_replay(site: Site, rows: pd.DataFrame, checkpoint: Checkpoint) -> None:
    """It is that of the files that it has read, without the rows that it says the ledger has not applied."""
    for declared in site.pipeline.stages:
        verdicts = checkpoint.operators[declared.uid].gates
        assert len(verdicts) == len(declared.gates) or not checkpoint.operators[declared.uid].rows_out, (
            "each gate was asked"
        )
    seen, applied = _applied(site, rows, checkpoint)
    for uid, columns, counted in (("tallied", ["rows"], seen), ("ledger", ["rows", "total"], applied)):
        wanted = counted.groupby("id")[["rows", "total"]].last()
        tables = list(state_reader.scan(site.pipeline, site.settings, uid, checkpoint.id))
        if not tables:
            assert wanted.empty, "nothing has reached the stage so far"
            continue
        actual = pa.concat_tables(tables).to_pandas(use_threads=False).set_index("id")[columns].sort_index()
        pd.testing.assert_frame_equal(actual, wanted[columns].sort_index(), check_dtype=False, check_names=False)


def _assert_table_is_replay(site: Site, rows: pd.DataFrame, published: Checkpoint) -> None:
    _, applied = _applied(site, rows, published)
    table = site.table("ledger").sort_values(["file", "id"], ignore_index=True)[["id", "file", "rows", "total"]]
    pd.testing.assert_frame_equal(table, applied.drop(columns="amount").reset_index(drop=True), check_dtype=False)
    if paired in site.pipeline.stages:
        seen = rows[rows["file"] < published.offsets["landing"]["files"]]
        pairs = seen.merge(seen[["id", "file", "amount"]], on="id", suffixes=("", "_right"))
        columns = ["id", "file", "file_right", "amount", "amount_right", "rows"]
        of_table, of_files = (
            frame[columns].sort_values(columns, ignore_index=True) for frame in (site.table("paired"), pairs)
        )
        pd.testing.assert_frame_equal(of_table, of_files, check_dtype=False)
    if highest in site.pipeline.stages:
        seen = rows[rows["file"] < published.offsets["landing"]["files"]]
        first = seen.sort_values(["amount", "file"], ascending=[False, True]).groupby("id").head(2)
        first = first.assign(rank_number=first.groupby("id").cumcount() + 1)
        columns = ["id", "rank_number", "amount", "file"]
        of_table, of_files = (
            frame[columns].sort_values(columns, ignore_index=True) for frame in (site.table("highest"), first)
        )
        pd.testing.assert_frame_equal(of_table, of_files, check_dtype=False)
    if by_number in site.pipeline.stages and not any(stats.rows_waiting for stats in published.operators.values()):
        seen = rows[rows["file"] < published.offsets["landing"]["files"]]
        totals_of_files = seen.groupby("id").agg(n=("amount", "size"), total=("amount", "sum"))
        of_files = totals_of_files.groupby("n", as_index=False).agg(ids=("total", "size"), total=("total", "sum"))
        of_table = site.table("by_number").sort_values("n", ignore_index=True)[["n", "ids", "total"]]
        pd.testing.assert_frame_equal(of_table, of_files, check_dtype=False)
    if twice in site.pipeline.stages:
        seen = rows[rows["file"] < published.offsets["landing"]["files"]]
        columns = ["id", "file", "amount"]
        of_table, of_files = (
            frame[columns].sort_values(columns, ignore_index=True)
            for frame in (site.table("twice"), pd.concat([seen, seen]))
        )
        pd.testing.assert_frame_equal(of_table, of_files, check_dtype=False)

    if named in site.pipeline.stages:
        seen = rows[rows["file"] < published.offsets["landing"]["files"]]
        left, table = _left(site, published, ("named",)), site.table("named")
        assert sorted(zip(table["id"], table["file"], strict=True)) == sorted(
            pair for pair in zip(seen["id"], seen["file"], strict=True) if pair not in left
        )
        assert (table.groupby("file")["version"].nunique() == 1).all(), "an epoch, which has a file, joins one version"
    if odd_again in site.pipeline.stages:
        seen = rows[rows["file"] < published.offsets["landing"]["files"]]
        odd = seen[seen["amount"] % 2 == 1]
        left = _left(site, published, ("odd_again",))
        again = odd.loc[[pair not in left for pair in zip(odd["id"], odd["file"], strict=True)]]
        assert len(again) == len(odd) - len(left), "what waits has been read"
        columns = ["id", "file", "amount"]
        for name, expected in (("odd", odd), ("odd_again", again)):
            of_table, of_files = (
                frame[columns].sort_values(columns, ignore_index=True) for frame in (site.table(name), expected)
            )
            pd.testing.assert_frame_equal(of_table, of_files, check_dtype=False, obj=name)


def _left(site: Site, checkpoint: Checkpoint, uids: tuple[str, ...]) -> set[tuple[str, int]]:
    """The rows that some stages have not applied."""
    waiting = [epoch for uid in uids if uid in checkpoint.operators for epoch in checkpoint.operators[uid].waiting]
    paths = [site.storage / path for epoch in waiting for layer in epoch["layers"] for path in layer]
    return {(row["id"], row["file"]) for path in paths for row in pq.read_table(path).to_pylist()}


def _applied(site: Site, rows: pd.DataFrame, checkpoint: Checkpoint) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What it has read, and what the ledger has applied of that."""
    seen = rows[rows["file"] < checkpoint.offsets["landing"]["files"]]
    left = _left(site, checkpoint, ("relayed", "ledger"))
    applied = seen[[pair not in left for pair in zip(seen["id"], seen["file"], strict=True)]]
    assert len(applied) == len(seen) - len(left), "what waits has been read"
    assert not (set(zip(applied["id"], applied["file"], strict=True)) & left)
    for key, numbers in applied.groupby("id")["file"]:
        assert set(numbers) == set(seen[seen["id"] == key]["file"].head(len(numbers))), (
            "a key's rows are applied in their order"
        )
    return seen, applied


def play(number: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One schedule, to its end: as many runs as it takes, of which only the last is left in peace."""
    chance = random.Random(number)
    options = {
        "WEIR_EPOCH__MAX_FILES": "1",
        "WEIR_RUN__POLL_SECONDS": "1",
        "WEIR_SPARK__PARALLELISM": str(chance.choice([1, 2])),
        "WEIR_STATE__BACKEND": chance.choice(["memory", "memory", "rocksdb"]),
        "WEIR_CHECKPOINTS__MODE": chance.choice(["incremental", "full"]),
        "WEIR_CHECKPOINTS__MAX_CONCURRENT": str(chance.choice([1, 2, 2, 3, 4])),
        "WEIR_CHECKPOINTS__NUM_RETAINED": str(chance.choice([1, 2, 3])),
        "WEIR_CHECKPOINTS__TOLERABLE_FAILURES": "1000",
    }
    if number % 3 == 1:  # every stage that reads another one stops after a row
        options |= {"WEIR_CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": "0"}
    # Beside what the seed decides otherwise, so that earlier seeds play what they played.
    writes = random.Random(f"writes {number}")
    if options["WEIR_STATE__BACKEND"] == "memory" and writes.random() < 0.5:
        options["WEIR_STATE__ASYNCHRONOUS_SNAPSHOTS"] = "true"
    played = {0: revised, 1: looked_up, 2: gated, 4: joined, 5: outputs, 6: stateless, 8: ranked}.get(
        number % 10, pipeline
    )
    site = Site(root / "site", options, played, "tests.recovery.test_schedules")
    rows, clock = _land(site, chance), Clock()
    faults, kills = chance.choice([0.0, 0.05, 0.1]), chance.choice([0.0, 0.01, 0.02])
    apart = chance.random() < 0.2  # now and then a stage runs where the coordinator's disk is not
    commit = Registry.commit

    def unsure(*arguments: object) -> None:
        """A commit whose outcome nobody is told."""
        if chance.random() < faults:
            if chance.random() < 0.5:
                commit(*arguments)
            raise OSError("the answer to the commit was lost")
        commit(*arguments)

    class Somewhere(InMemoryExecutor):
        def run(self, *work):
            return (Apart(1) if apart and chance.random() < 0.5 else super()).run(*work)

    begin = async_writer.begin

    def begun(directory: Path, write: Callable[[Path], object]) -> Thread:
        """A write that is lost now and then, as with its process."""

        def lost(target: Path) -> None:
            raise OSError("the process that wrote it is gone")

        return begin(directory, lost if writes.random() < faults else write)

    monkeypatch.setattr(async_writer, "begin", begun)
    for module in (run, scheduler, transitions, failover, stage_job, steps_of_an_epoch):
        monkeypatch.setattr(module, "time", clock)
    close = scheduler.EpochScheduler.close

    def closed(air: scheduler.EpochScheduler) -> None:
        if not runner.killed:  # who is dead cleans nothing up
            close(air)

    monkeypatch.setattr(scheduler.EpochScheduler, "close", closed)
    monkeypatch.setattr(Registry, "commit", unsure)
    counted = run._counted

    def passing(coordinator, event: str, error: Exception) -> None:
        assert isinstance(error, TransientError), f"nothing but what is injected fails here: {error}"
        counted(coordinator, event, error)

    monkeypatch.setattr(run, "_counted", passing)
    newest: list[int] = []

    def written() -> None:
        """Another version of the table that rows are looked up in."""
        if named in played.stages:
            names = pa.table({"id": [f"k{key}" for key in range(_KEYS)], "version": [next(versions)] * _KEYS})
            write_deltalake(str(site.root / "names"), names, mode="overwrite")

    versions = count()
    for attempt in range(40):
        written()
        if attempt == 39:
            faults, kills = 0.0, 0.0
        runner = Shuffled(chance, faults, kills, clock)
        try:
            for report in run.run(site.pipeline, site.settings, _ASKED, Somewhere(1), runner):
                registry = run.open_storage(site.pipeline, site.settings)[1]
                confirmed, completed = registry.checkpoints(), report.checkpoint
                assert sum(row.id > completed.id for row in confirmed) <= 2, "two are committed beside it, no more"
                lacking = unpublished(registry)
                assert len(lacking) <= 2, "one is committed beside the one that is published, no more"
                assert not newest or completed.id > newest[-1], "reports come in order"
                newest.append(completed.id)
                written()
                if completed.id in {row.id for row in confirmed}:  # else it is pruned already
                    _assert_state_is_replay(site, rows, completed)
                published = [row for row in confirmed if not lacking or row.id < lacking[0].id]
                _assert_table_is_replay(site, rows, published[-1] if published else completed)
            break
        except (Killed, TransientError, RunEndedError):
            continue
    head = run.open_storage(site.pipeline, site.settings)[1].head()
    assert head is not None and head.offsets["landing"]["files"] == _FILES and not backlog.unapplied(head)
    _assert_state_is_replay(site, rows, head)
    _assert_table_is_replay(site, rows, head)
    assert list(run.run(site.pipeline, site.settings, _ASKED, InMemoryExecutor())) == []
    site.assert_no_orphans()


@pytest.mark.parametrize(
    "number",
    sampled(sorted({*FOUND, *range(_FROM, _FROM + _MANY)}), lambda number: number in FOUND or number in (5, 6, 8)),
)
def test_every_checkpoint_of_a_schedule_is_a_replay_of_its_files(number, tmp_path, monkeypatch):
    play(number, tmp_path, monkeypatch)
