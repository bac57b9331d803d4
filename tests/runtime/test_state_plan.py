"""`weir plan` against what a run does: it is refused exactly where a run is, and for the same reasons."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.api import (
    Epoch,
    KeyedState,
    ListOf,
    MapOf,
    Pipeline,
    State,
    agg,
    aggregate,
    delta,
    files,
    renamed_from,
    stage,
    window,
)
from pipelines.runtime import state_plan
from pipelines.runtime.definition import FileSource, Stage
from pipelines.runtime.in_memory import InMemoryExecutor
from pipelines.runtime.run import RunOptions, run
from pipelines.runtime.state_fit import Verdict
from pipelines.runtime.state_plan import StatePlan
from pipelines.runtime.tenure import open_storage
from pipelines.runtime.upkeep import savepoint
from state_ops.errors import PipelineError, WeirError
from tests.recovery import test_unaligned as unaligned
from tests.recovery.conftest import weir as weir
from tests.recovery.harness import Site

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
KEYS = [f"k{number}" for number in range(20)]


class Account(State):
    rows: Annotated[int, pa.int32()] = 0
    note: str = "new"
    recent: ListOf[float]
    spent: MapOf[str, float]


class Grown(State):
    """Wider, with a field more and one that is called otherwise."""

    rows: int = 0
    remark: Annotated[str, renamed_from("note")] = "new"
    vip: bool = False
    recent: ListOf[float]
    spent: MapOf[str, float]
    seen: ListOf[str]


class Poorer(State):
    rows: Annotated[int, pa.int32()] = 0
    recent: ListOf[float]
    spent: MapOf[str, float]


class Narrow(State):
    rows: Annotated[int, pa.int16()] = 0
    note: str = "new"
    recent: ListOf[float]
    spent: MapOf[str, float]


class WithoutList(State):
    rows: Annotated[int, pa.int32()] = 0
    note: str = "new"
    spent: MapOf[str, float]


class Remapped(State):
    rows: Annotated[int, pa.int32()] = 0
    note: str = "new"
    recent: ListOf[float]
    spent: MapOf[int, float]


class Elements(State):
    rows: Annotated[int, pa.int32()] = 0
    note: str = "new"
    recent: ListOf[str]
    spent: MapOf[str, float]


def landing(name: str = "landing") -> FileSource:
    return files("{landing}/*.parquet", event_time="at", name=name)


def accounts(state: type[State] = Account, uid: str = "accounts", source: FileSource | None = None, **changed) -> Stage:
    booked = changed.pop("booked", ["id", "amount"])
    made = {"key": "id", "where": "amount > 0", "sink": delta.append("booked"), **changed}

    @stage(uid, source=source or landing(), state=state, **made)
    def keep(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        """Count the rows of each key."""
        state.fold(rows, rows=agg.count())
        return rows.select(booked)

    return keep


def hourly(every: str = "1h", table: str = "hours", **changed) -> Stage:
    aggregates = {"total": agg.sum("amount"), **changed}
    return window("hourly", landing(), key="id", every=every, on="at", sink=delta.append(table), **aggregates)


def sums(source: FileSource | Stage | None = None, **aggregates) -> Stage:
    return aggregate("sums", source or landing(), key="id", sink=delta.append("sums"), **aggregates)


pipeline = Pipeline("planned", (accounts(), hourly(), sums(total=agg.sum("amount"))), max_parallelism=8)


def deliver(site: Site, number: int) -> None:
    site.landing.mkdir(parents=True, exist_ok=True)
    at = pa.array([NOON + timedelta(hours=number)] * len(KEYS), pa.timestamp("us", tz="UTC"))
    rows = pa.table({"id": KEYS, "at": at, "amount": [number] * len(KEYS), "other": pa.array([1] * len(KEYS))})
    pq.write_table(rows, site.landing / f"{number:03}.parquet")


def go(site: Site) -> None:
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def plan_of(site: Site, at: int | str | None = None) -> StatePlan:
    return state_plan.plan(site.pipeline, site.settings, at, InMemoryExecutor())


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Site:
    options = {"WEIR_SPARK__PARALLELISM": "2"}
    site = Site(tmp_path_factory.mktemp("planned") / "base", options, pipeline, __name__)
    deliver(site, 1)
    go(site)
    savepoint(site.pipeline, site.settings, "first", "for the tests", 0)
    return site


@dataclass(frozen=True)
class Change:
    """stages: of the changed pipeline. expected: verdict and a part of what is said, for each that matters."""

    expected: tuple[tuple[str, str], ...]
    stages: tuple[Stage, ...]
    options: dict[str, str] = field(default_factory=dict)
    pipeline: dict[str, object] = field(default_factory=dict)


def others(*stages: Stage) -> tuple[Stage, ...]:
    return (*stages, hourly(), sums(total=agg.sum("amount")))


ALL = BOOKED, _, SUMS = others(accounts())
C, M, F, R = (verdict.value for verdict in Verdict)
CHANGES = {
    "nothing": Change(((C, "its state is used as it is"),), ALL),
    "fields": Change(
        (
            (M, "field note is called remark now"),
            (M, "field rows changed its type from int32 to int64"),
            (M, "field vip (bool, default False) was added"),
            (C, "the list seen was added"),
        ),
        others(accounts(Grown)),
    ),
    "a field less": Change(((M, "field note (string) was removed"),), others(accounts(Poorer))),
    "a narrower field": Change(((R, "field rows changed its type from int32 to int16"),), others(accounts(Narrow))),
    "a list less": Change(((R, "the list recent is gone"),), others(accounts(WithoutList))),
    "another map": Change(((R, "spent was a map by string, is a map by int64"),), others(accounts(Remapped))),
    "other elements": Change(((R, "recent: field recent changed its type"),), others(accounts(Elements))),
    "another key": Change(
        ((R, "the key was [['id', 'string']], is [['other', 'int64']]"),), others(accounts(key="other"))
    ),
    "a ttl": Change(((M, "the time to live was none, is 86400 s after a write"),), others(accounts(ttl="1d"))),
    "another window": Change(
        ((R, "its windows were"),), (accounts(), hourly(every="2h"), sums(total=agg.sum("amount")))
    ),
    "another aggregate": Change(((R, "its aggregates were"),), (accounts(), hourly(), sums(total=agg.max("amount")))),
    "a stage more": Change(
        ((C, "it is new: it starts with empty state"), (C, "nothing is in it yet: it gets more's rows")),
        others(accounts(), accounts(uid="more", sink=delta.append("more"))),
    ),
    "a stage less": Change(((F, "has a stage 'accounts'"), (C, "nothing writes to it any more")), others()),
    "a stage retired": Change(((C, "it is retired"),), others(), pipeline={"retired": ("accounts",)}),
    "a stage renamed": Change(((F, "looks renamed to ledger"),), others(accounts(uid="ledger"))),
    "a source renamed": Change(
        ((F, "has a source 'landing'"), (C, "it is new: it is read from its first file")),
        (accounts(source=landing("arrivals")),),
        pipeline={"retired": ("hourly", "sums")},
    ),
    "a column more in a table": Change(((R, "other is new"),), others(accounts(booked=["id", "amount", "other"]))),
    "another table": Change(
        ((C, "nothing is in it yet: it gets accounts's rows"), (C, "nothing writes to it any more")),
        others(accounts(sink=delta.append("ledger"))),
    ),
    "more subtasks": Change(((C, "rescales from 2 to 7 subtasks"),), ALL, {"WEIR_SPARK__PARALLELISM": "7"}),
    "too many subtasks": Change(((R, "The parallelism is 9"),), ALL, {"WEIR_SPARK__PARALLELISM": "9"}),
    "more key groups": Change(((R, "max_parallelism was 8, is 16"),), ALL, pipeline={"max_parallelism": 16}),
    "another backend": Change(
        ((R, "it was written by the backend 'rocksdb'"),), ALL, {"WEIR_STATE__BACKEND": "memory"}
    ),
    "another input": Change(((R, "has no column 'at'"),), (BOOKED, replace(hourly(), input=BOOKED), SUMS)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_planned_is_what_a_run_does(base, tmp_path, name):
    change = CHANGES[name]
    changed = replace(pipeline, stages=change.stages, **change.pipeline)
    site = base.copied_to(tmp_path / "site")
    site = replace(site, pipeline=changed, options={**site.options, **change.options})
    deliver(site, 2)
    objects = site.objects()

    decided = plan_of(site)

    assert site.objects() == objects, "a plan changes nothing"
    said = [(one.verdict.value, one.what) for one in decided.findings]
    for verdict, part in change.expected:
        assert any(verdict == known and part in what for known, what in said), (verdict, part, said)
    if not decided.stops:
        assert {verdict for verdict, _ in said} <= {verdict for verdict, _ in change.expected} | {C}
    assert all(one.next for one in decided.findings if one.verdict.stops)
    assert decided.stops == any(verdict in (F, R) for verdict, _ in change.expected)
    if not decided.stops:
        go(site)
        assert open_storage(changed, site.settings)[1].head().id == 2
        return
    with pytest.raises(WeirError) as refused:
        go(site)
    first = next(one for one in decided.findings if one.verdict.stops)
    if first.aspect != "renamed":  # a run does not know what the new stage's state is like
        assert first.what in str(refused.value)


def test_what_migrates_is_tried_on_rows_of_the_smallest_snapshot(base):
    site = replace(base, pipeline=replace(pipeline, stages=others(accounts(Grown))))
    (sample,) = plan_of(site).samples
    assert (sample.stage, sample.problem) == ("accounts", None) and 0 < sample.rows < len(KEYS)
    assert plan_of(base).samples == ()


def test_rows_that_cannot_be_read_are_found_before_a_run(base, tmp_path):
    site = base.copied_to(tmp_path / "site")
    for file in (site.storage / "state" / "accounts").rglob("*.sst"):
        file.write_bytes(file.read_bytes()[:-1])
    assert not plan_of(site).stops, "what is used as it is, is looked at when it is restored"
    decided = plan_of(replace(site, pipeline=replace(pipeline, stages=others(accounts(Grown)))))
    (sample,) = decided.samples
    assert decided.stops and sample.problem is not None
    assert [one.aspect for one in decided.findings if one.verdict.stops] == ["sample"]


def test_rows_that_wait_for_a_stage_are_not_lost_by_a_change(tmp_path):
    site = unaligned.left_waiting(tmp_path / "site")
    assert not plan_of(site).stops

    @stage("passed", source=unaligned.SOURCE, key="k", state=unaligned.Seen)
    def wider(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        """A column more than what waits has."""
        state.fold(rows, rows=agg.count())
        return rows.with_columns(more=pl.lit(1))

    timed = unaligned.timed
    for part, change in (
        ("rows of passed wait for the stage timed", {"stages": (unaligned.passed,), "retired": ("timed",)}),
        ("rows of passed wait", {"stages": (unaligned.passed, replace(timed, input=unaligned.SOURCE))}),
        ("rows wait for it with other columns", {"stages": (wider, replace(timed, input=wider))}),
    ):
        changed = replace(site, pipeline=replace(unaligned.short, **change))
        assert [part for one in plan_of(changed).findings if one.verdict.stops and part in one.what], part
        with pytest.raises(PipelineError, match=r"rows of .* wait for"):
            list(unaligned.epochs(changed))


def test_only_a_stage_with_a_transform_starts_spark_to_know_its_columns(base, spark, tmp_path):
    site = base.copied_to(tmp_path / "site")
    halved = accounts(
        transform=lambda rows: rows.selectExpr("id", "at", "cast(amount as bigint) as amount", "1 as more")
    )
    decided = state_plan.plan(replace(pipeline, stages=others(halved)), site.settings)
    assert decided.spark == ("accounts",) and not decided.stops
    typed = accounts(transform=lambda rows: rows.selectExpr("cast(id as binary) as id", "at", "amount"))
    decided = state_plan.plan(replace(pipeline, stages=others(typed)), site.settings)
    assert "the key was [['id', 'string']], is [['id', 'binary']]" in [one.what for one in decided.findings]
    assert state_plan.plan(pipeline, site.settings).spark == (), "a where leaves columns as they are"


def test_a_pipeline_without_a_checkpoint_has_nothing_to_fit(tmp_path):
    site = Site(tmp_path, {}, pipeline, __name__)
    assert (plan_of(site).checkpoint, plan_of(site).stops) == (None, False)
    deliver(site, 1)
    assert not plan_of(site).stops
    assert not site.storage.exists()


def test_the_command_compares_with_a_savepoint_too_and_its_exit_code_tells(base, weir, tmp_path, monkeypatch):
    site = base.copied_to(tmp_path / "site")
    deliver(site, 2)
    go(site)
    assert [plan_of(site, at).checkpoint.id for at in (None, 1, "first")] == [2, 1, 1]

    done = weir(site, "plan", "planned", "--savepoint", "first", "--json")
    assert (done.code, json.loads(done.out)["checkpoint"], json.loads(done.out)["spark"]) == (0, 1, [])
    monkeypatch.setattr(f"{__name__}.pipeline", replace(pipeline, stages=others(accounts(Narrow))))
    shown = weir(site, "plan", "planned")
    assert shown.code == 1 and "refused" in shown.out and "field rows changed its type" in shown.out
    assert "give the stage a new uid" in shown.out
    told = json.loads(weir(site, "plan", "planned", "--checkpoint", "1", "--json").out)
    assert not told["runs"] and "refused" in {one["verdict"] for one in told["findings"]}
    both = weir(site, "plan", "planned", "--checkpoint", "1", "--savepoint", "first")
    assert both.code == 2 and "Give one of them" in both.said
    assert weir(site, "plan", "planned", "--checkpoint", "9").code == 1
