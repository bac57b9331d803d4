"""Rows that a gate sets aside: what is left is what a replay without them gives, they are kept once, and all are
counted."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.coordination import gate_hold
from state_ops.errors import GateError, InputError, PipelineError, TransientError, WeirError
from state_ops.moments import to_micros
from tests.recovery.cutting import changes_fail_from
from tests.recovery.harness import Site, child
from tests.recovery.small import Apart
from tests.recovery.test_schedules import Clock, Killed, Shuffled
from tests.tools.sampling import sampled
from tests.tools.stages import altered
from tests.weir.aside import FAR, NOON, SCHEMA, SOURCE, TOLD, Account, accounts, between, hours, others, pipeline
from weir import (
    Epoch,
    Pipeline,
    Stage,
    ValueState,
    deduplicate,
    delta,
    expect,
    files,
    on_table,
    stage,
    testing,
    union,
)
from weir.cli.status import status_of
from weir.cli.watching.figures import of_sinks
from weir.definition import ROW, Gate
from weir.epoch import failover, scheduler, stage_job, transitions
from weir.epoch import steps as steps_of_an_epoch
from weir.epoch.model import EpochReport
from weir.execution.in_process import InMemoryExecutor
from weir.gates import quarantine
from weir.inspection import state_reader
from weir.run import run as runs
from weir.run.run import RunOptions, open_storage, run
from weir.settings.configuration import EpochSettings
from weir.sources.files import FilesReader
from weir.sources.slices import LeftOut

ODD = ["100%", "a%20b+c", "[x]#?", "ü'&=~"]  # in names of files


def site_at(root: Path, of: Pipeline = pipeline, **options: str) -> Site:
    chosen = {"WEIR_EPOCH__MAX_FILES": "2", "WEIR_SPARK__PARALLELISM": "2", **options}
    site = Site(root / "site", chosen, of, "tests.weir.aside")
    site.landing.mkdir(parents=True)
    return site


def landed(site: Site, count: int = 6, seed: int = 1, bad: float = 0.1, first: int = 0) -> list[pd.DataFrame]:
    """Files of rows of which some are bad: those have an event time that would close every window, too."""
    chance, parts = random.Random(seed), []
    for number in range(first, first + count):
        rows = []
        for n in range(chance.randint(8, 40)):
            at = NOON + timedelta(minutes=number * 20 + chance.randint(0, 15))
            wrong = chance.random() < bad
            amount = chance.choice([-1, 100, 1000]) if wrong else chance.choice([7, *range(60)])
            rows.append(
                {"id": f"k{chance.randint(0, 9)}", "n": number * 1000 + n, "at": FAR if wrong else at, "amount": amount}
            )
        name = f"{number:03} {ODD[number % len(ODD)]}.parquet"
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), site.landing / name, row_group_size=7)
        part = pd.DataFrame(rows)
        part["file"], part["row"] = name, range(len(rows))
        parts.append(part)
    return parts


def ran(site: Site, executor=None, **options) -> list[EpochReport]:
    asked = RunOptions(until_caught_up=True, **options)
    return list(run(site.pipeline, site.settings, asked, executor or InMemoryExecutor(batch_rows=5)))


def assert_replay(site: Site, parts: Sequence[pd.DataFrame], per_epoch: int = 2) -> None:
    """Tables and state against pandas, which knows nothing of gates: bad rows are those with an amount out of 0 to
    99."""
    rows = pd.concat(parts, ignore_index=True)
    good = rows[rows["amount"].between(0, 99)]
    bad = rows[~rows["amount"].between(0, 99)].sort_values(["file", "row"])
    assert len(bad), "there is something to set aside"
    booked = good[good["amount"] != 7].sort_values("n")
    table = site.table("booked").sort_values("n")
    assert list(table.columns) == ["id", "n", "at", "amount", "total"]
    assert table[["id", "n", "amount"]].values.tolist() == booked[["id", "n", "amount"]].values.tolist()
    aside = site.table("accounts_quarantine").sort_values(["_weir_file", "_weir_row"])
    assert list(aside.columns) == [*SCHEMA.names, *TOLD]
    assert aside[["id", "n", "amount", "_weir_file", "_weir_row"]].values.tolist() == (
        bad[["id", "n", "amount", "file", "row"]].values.tolist()
    )
    assert set(aside["_weir_stage"]) == {"accounts"} and set(aside["_weir_gate"]) == {
        site.pipeline.stages[0].gates[0].title
    }
    assert aside["_weir_reason"].tolist() == [f"amount = {amount}" for amount in bad["amount"]]
    state = pa.concat_tables(state_reader.scan(site.pipeline, site.settings, "accounts")).to_pandas(use_threads=False)
    wanted = booked.groupby("id").agg(rows=("n", "count"), total=("amount", "sum")).reset_index()
    assert state.sort_values("id").values.tolist() == wanted.sort_values("id").values.tolist()
    if len(site.pipeline.stages) > 1:
        newest = site.table("others").sort_values("epoch").groupby("id").last()[["rows", "total"]].reset_index()
        wanted = good.groupby("id").agg(rows=("n", "count"), total=("amount", "sum")).reset_index()
        assert newest.values.tolist() == wanted.values.tolist(), "nobody else sees those rows either"
        assert site.table("hours_late").empty, "the event times of rows that were set aside have closed nothing"
    checked = [
        row for row in open_storage(site.pipeline, site.settings)[1].checkpoints() if row.slice["landing"]["files"]
    ]
    for row in checked:
        names = {file["name"] for file in row.slice["landing"]["files"]}
        stats, own_rows = row.operators["accounts"], bad[bad["file"].isin(names)]
        assert row.slice["landing"].get("excluded", {}) == {
            name: group["row"].tolist() for name, group in own_rows.groupby("file")
        }
        assert stats.rows_quarantined == len(own_rows)
        read = row.slice["landing"]["rows"]
        assert stats.rows_in + stats.rows_quarantined + stats.rows_dropped == read
        assert all(verdict["passed"] for verdict in stats.gates)
        assert set(aside[aside["_weir_file"].isin(names)]["_weir_epoch"]) <= {row.id}
    site.assert_no_orphans()


RETAINED = {"WEIR_CHECKPOINTS__NUM_RETAINED": "50"}


@pytest.mark.parametrize("executor", sampled([InMemoryExecutor, Apart]))
@pytest.mark.parametrize("concurrent", sampled([3, 1]))
def test_what_is_left_is_a_replay_without_the_rows_that_were_set_aside(tmp_path, weir, executor, concurrent):
    site = site_at(tmp_path, WEIR_CHECKPOINTS__MAX_CONCURRENT=str(concurrent), **RETAINED)
    parts = landed(site, 4)
    reports = ran(site, executor(batch_rows=5))
    assert len(reports) == 2
    parts += landed(site, 2, seed=3, first=4)
    ran(site, executor(batch_rows=5))
    assert_replay(site, parts)
    assert gate_hold.read(open_storage(site.pipeline, site.settings)[0], None) is None
    assert weir(site, "fsck", "aside").code == 0
    aside = len(site.table("accounts_quarantine"))
    assert f"quarantined  {aside} rows, set aside since the pipeline began" in weir(site, "status", "aside").out
    ran(site, drain=True)
    windows = site.table("hours").groupby("id")["total"].sum()
    good = pd.concat(parts)
    good = good[good["amount"].between(0, 99) & (good["amount"] != 7)]
    assert windows.to_dict() == good.groupby("id")["amount"].sum().to_dict()


def test_setting_rows_aside_is_no_failure(tmp_path, monkeypatch):
    def impatient(seconds: float) -> None:
        raise AssertionError("the replay waits as if something had failed")

    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=time.monotonic, sleep=impatient))
    site = site_at(tmp_path, WEIR_CHECKPOINTS__TOLERABLE_FAILURES="0", **RETAINED)
    parts = landed(site, 2)
    (report,) = ran(site)
    assert report.checkpoint.id == 2, "the first epoch was declined"
    assert_replay(site, parts)


def test_a_slice_without_bad_rows_leaves_no_trace(tmp_path):
    site = site_at(tmp_path, **RETAINED)
    landed(site, 2, bad=0)
    (report,) = ran(site)
    assert report.checkpoint.id == 1 and "excluded" not in report.checkpoint.slice["landing"]
    assert report.checkpoint.operators["accounts"].rows_quarantined == 0
    assert not (site.storage / "tables" / "accounts_quarantine").exists()


def test_files_that_arrive_meanwhile_are_not_in_the_replay(tmp_path, monkeypatch):
    site = site_at(tmp_path, WEIR_EPOCH__MAX_FILES="10", **RETAINED)
    parts = landed(site, 2)
    without = FilesReader.without

    def arriving(self, planned, more):
        if len(parts) == 2:
            parts.extend(landed(site, 1, seed=5, first=2))
        return without(self, planned, more)

    monkeypatch.setattr(FilesReader, "without", arriving)
    first, second = ran(site)
    assert [len(report.checkpoint.slice["landing"]["files"]) for report in (first, second)] == [2, 1]
    assert_replay(site, parts)


# -- bounds


def alone(*asked: Gate, of: Stage = accounts) -> Pipeline:
    return Pipeline("aside", (replace(of, gates=asked),), max_parallelism=8)


def test_more_rows_than_the_share_are_not_set_aside(tmp_path):
    site = site_at(tmp_path, alone(between(0, 99, quarantine_at_most=0.05)), WEIR_EPOCH__MAX_FILES="9")
    landed(site, 3, bad=0.3)
    with pytest.raises(GateError, match=r"at most 0.05 of them may be \(quarantine_at_most=") as raised:
        ran(site)
    assert raised.value.verdicts[0]["on_failure"] == "quarantine"
    storage, registry = open_storage(site.pipeline, site.settings)
    note = gate_hold.read(storage, None)
    assert note is not None and note.stage == "accounts" and registry.head() is None
    assert not (site.storage / "tables").exists()


def test_more_rows_than_a_checkpoint_can_list_are_not_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "MOST_ROWS", 3)
    site = site_at(tmp_path, alone(between(0, 99, quarantine_at_most=1.0)))
    landed(site, 2, bad=0.5)
    with pytest.raises(GateError, match="more than 3 rows"):
        ran(site)


@stage("accounts", source=SOURCE, key="id", state=Account, order_by=["n"], sink=delta.append("booked"))
def ranked(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
    """The first row of the batch gets a bad mark, whatever is left out before it."""
    return rows.select("id", "n", ROW, amount=pl.when(pl.int_range(pl.len()) == 0).then(-1).otherwise(pl.col("amount")))


def test_a_gate_that_fails_on_every_replay_holds_in_the_end(tmp_path):
    site = site_at(tmp_path, alone(between(0, 99, quarantine_at_most=1.0), of=ranked), WEIR_SPARK__PARALLELISM="1")
    landed(site, 1, bad=0)
    with pytest.raises(GateError, match=f"after rows were set aside {quarantine.ROUNDS} times"):
        ran(site, InMemoryExecutor())
    assert open_storage(site.pipeline, site.settings)[1].head() is None


def test_other_rows_may_fail_once_the_first_are_gone(tmp_path):
    """The first row of a key is handed out; without it the next one is, which fails as well."""
    first = deduplicate("accounts", SOURCE, key="id", order_by=["n"], sink=delta.append("booked"))
    site = site_at(tmp_path, alone(between(0, 99, quarantine_at_most=0.9), of=first))
    rows = [
        {"id": "a", "n": 0, "at": NOON, "amount": -1},
        {"id": "a", "n": 1, "at": NOON, "amount": -2},
        {"id": "a", "n": 2, "at": NOON, "amount": 3},
        {"id": "a", "n": 3, "at": NOON, "amount": -4},
        {"id": "b", "n": 4, "at": NOON, "amount": 5},
    ]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), site.landing / "0.parquet")
    (report,) = ran(site, InMemoryExecutor())
    assert report.checkpoint.slice["landing"]["excluded"] == {"0.parquet": [0, 1]}
    assert sorted(site.table("booked")["n"]) == [2, 4]
    assert site.table("accounts_quarantine")["_weir_row"].tolist() == [0, 1]
    assert list(site.table("booked").columns) == SCHEMA.names


def test_a_gate_that_holds_is_asked_once_the_bad_rows_are_gone(tmp_path):
    asked = between(0, 99, quarantine_at_most=0.5), between(0, 99, on_failure="hold")
    site = site_at(tmp_path, alone(*asked), **RETAINED)
    parts = landed(site, 2)
    ran(site)
    assert_replay(site, parts)


def test_rows_of_which_nobody_says_where_they_come_from_hold(tmp_path):
    @stage("accounts", source=SOURCE, key="id", state=Account, sink=delta.append("booked"))
    def forgetful(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows.with_columns(pl.lit(None, pl.Int64).alias(ROW))

    site = site_at(tmp_path, alone(between(0, 99, quarantine_at_most=1.0), of=forgetful))
    landed(site, 1, bad=0.5)
    with pytest.raises(GateError, match="no row of the source is known"):
        ran(site)


# -- definitions


def test_only_a_stage_that_hands_on_its_rows_may_quarantine():
    asked = between(0, 99)
    for wrong, message in (
        (lambda: replace(hours, gates=(asked,)), "reads another stage"),
        (lambda: replace(others, gates=(asked,)), "aggregates"),
        (lambda: altered(accounts, on_timer=lambda *_: None), "timers"),
        (lambda: replace(pipeline, on_restore=(on_table("booked", asked),)), "cannot set rows aside"),
        (lambda: replace(asked, of="state"), "not state"),
        (lambda: between(0, 1, quarantine_at_most=0), "no share"),
        (lambda: between(0, 1, on_failure="warn", quarantine_at_most=0.5), "no share"),
    ):
        with pytest.raises(PipelineError, match=message):
            wrong()


def test_a_function_that_drops_the_position_is_told_so_before_the_first_row(tmp_path):
    @stage("accounts", source=SOURCE, key="id", state=Account, sink=delta.append("booked"))
    def dropping(rows: pl.DataFrame, state: ValueState, epoch: Epoch) -> pl.DataFrame:
        return rows.select("id", "amount")

    site = site_at(tmp_path, alone(between(0, 99), of=dropping))
    landed(site, 1)
    with pytest.raises(PipelineError, match="does not hand on which they are") as raised:
        ran(site)
    assert "_weir_row" in raised.value.next


def test_an_expectation_that_does_not_look_at_each_row_cannot_quarantine(tmp_path):
    mean = expect("ExpectColumnMeanToBeBetween", column="amount", min_value=0, max_value=1, on_failure="quarantine")
    site = site_at(tmp_path, alone(mean))
    landed(site, 1)
    with pytest.raises(PipelineError, match="does not look at each row by itself"):
        ran(site)


def test_files_with_a_column_of_that_name_are_refused(tmp_path):
    site = site_at(tmp_path, alone(between(0, 99)))
    rows = pa.Table.from_pylist([{"id": "a", "n": 1, "at": NOON, "amount": 1}], SCHEMA)
    pq.write_table(rows.append_column(ROW, pa.array([1])), site.landing / "0.parquet")
    with pytest.raises(InputError, match="_weir_row"):
        ran(site)


def test_a_stage_that_quarantines_can_be_tested_without_files():
    out = testing.run(accounts, schema=SCHEMA).epoch([{"id": "a", "n": 1, "at": NOON, "amount": 500}])
    assert out.columns == ["id", "n", "at", "amount", "total"]


# -- cut off, killed, on Spark


def cut_off(site: Site, monkeypatch, stop_at: int) -> bool:
    """Run, with every change to storage from one on failing, as when the process were gone; whether it came to that."""
    with changes_fail_from(monkeypatch, stop_at):
        try:
            ran(site)
        except (WeirError, OSError):
            pass
        else:
            return False
    (site.storage / "coordinator" / "lease.json").unlink(missing_ok=True)  # nobody lives
    return True


@pytest.mark.parametrize("step", sampled([19, 13, 5]))
def test_a_run_that_is_cut_off_anywhere_decides_the_same_again(tmp_path, monkeypatch, step):
    first = site_at(tmp_path / "first", **RETAINED)
    parts = landed(first, 2, seed=7)
    ran(first)
    parts += landed(first, 2, seed=8, first=2)
    heads = set()
    for stop_at in range(0, 400, step):
        site = first.copied_to(tmp_path / f"{stop_at}")
        if not cut_off(site, monkeypatch, stop_at):
            break
        heads.add(site.head())
        ran(site)
        assert_replay(site, parts)
    else:
        raise AssertionError("it never came to its end")
    assert heads == {2, 4}, "before and after the commit"


@pytest.mark.long
@pytest.mark.parametrize("number", range(8))
def test_any_order_of_steps_and_failures_gives_the_same(number, tmp_path, monkeypatch):
    """As tests.recovery.test_schedules plays them: steps end in any order, fail, or the process is gone."""
    chance, clock = random.Random(number), Clock()
    site = site_at(
        tmp_path,
        WEIR_EPOCH__MAX_FILES="1",
        WEIR_RUN__POLL_SECONDS="1",
        WEIR_CHECKPOINTS__MAX_CONCURRENT=str(chance.choice([1, 2, 3, 4])),
        WEIR_CHECKPOINTS__TOLERABLE_FAILURES="1000",
        WEIR_STATE__BACKEND="memory",
        **RETAINED,
    )
    parts = landed(site, 5, seed=number + 20, bad=0.08)
    for module in (runs, scheduler, transitions, failover, stage_job, steps_of_an_epoch):
        monkeypatch.setattr(module, "time", clock)
    close = scheduler.EpochScheduler.close
    monkeypatch.setattr(scheduler.EpochScheduler, "close", lambda air: None if runner.killed else close(air))
    for attempt in range(30):
        faults, kills = (0.0, 0.0) if attempt == 29 else (0.05, 0.01)
        runner = Shuffled(chance, faults, kills, clock)
        try:
            for _ in run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor(5), runner):
                pass
            break
        except (Killed, TransientError):
            continue
    assert_replay(site, parts)


def test_the_newest_event_time_of_what_is_left_is_known(tmp_path):
    """Also of times in nanoseconds and without a time zone, which are taken as UTC."""
    times = pa.array([NOON.replace(tzinfo=None), FAR.replace(tzinfo=None)]).cast(pa.timestamp("ns"))
    pq.write_table(pa.table({"id": ["a", "b"], "at": times}), tmp_path / "0.parquet")
    reader = FilesReader(SOURCE, f"{tmp_path}/*.parquet")
    planned = reader.plan(None, EpochSettings(), None)
    assert planned.newest == to_micros(FAR)
    left = reader.without(planned, [LeftOut("s", "g", "0.parquet", 1, "")])
    assert left.newest == to_micros(NOON) and left.rows == 2
    assert reader.without(left, [LeftOut("s", "g", "0.parquet", 0, "")]).newest is None


@pytest.mark.long
def test_on_spark_the_same_rows_are_set_aside(tmp_path, spark, weir):
    site = site_at(tmp_path, **RETAINED)
    parts = landed(site, 4)
    assert weir(site, "plan", "aside").code == 0
    asked = RunOptions(until_caught_up=True)
    assert len(list(run(site.pipeline, site.settings, asked))) == 2
    assert_replay(site, parts)
    assert weir(site, "plan", "aside").code == 0


@pytest.mark.long
@pytest.mark.parametrize("point", ["before the row", "in an upload", "after the row"])
def test_a_coordinator_that_is_killed_in_the_replay_is_succeeded_by_one_that_decides_the_same(tmp_path, spark, point):
    site = site_at(tmp_path, **RETAINED)
    parts = landed(site, 2)
    with child(site, point, 2) as coordinator:  # epoch 1 is declined, 2 is its replay
        coordinator.wait_until_held()
        coordinator.kill()
    assert site.head() == (2 if point == "after the row" else None)
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True)))
    assert_replay(site, parts)


def test_a_table_of_rows_set_aside_is_made_by_the_first_of_them_and_shown_from_then_on(tmp_path, weir):
    site = site_at(tmp_path, **RETAINED)

    def listed() -> tuple[bool, bool, bool]:
        tables = [table["name"] for table in status_of(site.pipeline, site.settings)["tables"]]
        head = open_storage(site.pipeline, site.settings)[1].head()
        figures = of_sinks(SimpleNamespace(head=head, publications=(), unpublished=(), refused={}), site.pipeline)
        made = (site.storage / "tables" / "accounts_quarantine").exists()
        return "accounts_quarantine" in tables, "accounts_quarantine" in [sink.name for sink in figures], made

    assert listed() == (False,) * 3
    landed(site, 2, bad=0)
    ran(site)
    assert "booked" in [table["name"] for table in status_of(site.pipeline, site.settings)["tables"]]
    assert listed() == (False,) * 3, "no row was set aside yet"
    landed(site, 2, bad=0.5, first=2)
    ran(site)
    assert listed() == (True,) * 3
    landed(site, 2, bad=0, first=4)
    ran(site)
    assert listed() == (True,) * 3
    site.assert_no_orphans()


def as_they_are(rows: pl.DataFrame, epoch: Epoch) -> pl.DataFrame:
    return rows


@pytest.mark.parametrize("is_shared", [False, True], ids=["a source each", "one source"])
def test_each_stage_sets_rows_aside_though_more_do_than_one_of_them_may_be_replayed_for(tmp_path, is_shared):
    """All in one epoch, whose tables are those of the rows that are left."""
    stages = []
    for n in range(quarantine.ROUNDS + 2):
        source = SOURCE if is_shared else files(f"{{landing}}/{n}/*.parquet", name=f"from_{n}", event_time="at")
        bad = expect("ExpectColumnValuesToNotBeInSet", column="n", value_set=[n], on_failure="quarantine")
        stages.append(stage(f"stage_{n}", source=source, key=None, gate=bad)(as_they_are))
    both = union("both", *stages, sink=delta.append("both"))
    site = site_at(tmp_path, Pipeline("aside", (*stages, both), max_parallelism=8))
    given = [{"id": "k", "n": n, "at": NOON, "amount": 1} for n in range(20)]
    for folder in {"" if is_shared else str(n) for n in range(len(stages))}:
        (site.landing / folder).mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(given, SCHEMA), site.landing / folder / "a.parquet")
    assert len(list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))) == 1
    for n in range(len(stages)):
        assert site.table(f"stage_{n}_quarantine")[["n", "_weir_file", ROW]].values.tolist() == [[n, "a.parquet", n]]
    left = 20 - len(stages) if is_shared else 19
    assert len(site.table("both")) == left * len(stages)
