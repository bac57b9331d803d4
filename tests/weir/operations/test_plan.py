"""`weir plan` against what a run does: it is refused exactly where a run is, and for the same reasons."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import PipelineError, WeirError
from tests.recovery import test_unaligned as unaligned
from tests.recovery.conftest import weir as weir
from tests.recovery.harness import Site
from tests.tools.sampling import sampled
from tests.tools.stages import with_input
from weir import (
    Epoch,
    KeyedState,
    ListOf,
    MapOf,
    Pipeline,
    State,
    agg,
    aggregate,
    deduplicate,
    delta,
    files,
    join,
    renamed_from,
    select,
    side,
    stage,
    top_n,
    window,
)
from weir.code_changes import structure
from weir.definition import FileSource, Stage, Verdict
from weir.epoch import steps
from weir.execution.in_process import InMemoryExecutor
from weir.operations import plan
from weir.operations.plan import StatePlan
from weir.ownership.pipeline_storage import open_storage
from weir.run.maintenance import savepoint
from weir.run.run import RunOptions, run

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


class Emailed(State):
    """Without a field, and with one that may be the same under another name."""

    rows: Annotated[int, pa.int32()] = 0
    email: str = ""
    recent: ListOf[float]
    spent: MapOf[str, float]


class Demanding(State):
    """With a field more that has no default."""

    rows: Annotated[int, pa.int32()] = 0
    note: str = "new"
    level: int
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


class Street(State):
    name: str = ""
    number: int = 0


class Resident(State):
    """A struct, a list and a map of structs."""

    lives: Street
    lived: ListOf[Street]
    rents: MapOf[str, Street]


class Road(State):
    name: str = ""


class Village(State):
    lives: Road
    lived: ListOf[Road]
    rents: MapOf[str, Road]


class Place(State):
    name: str = ""
    number: int = 0
    floor: int


class Flat(State):
    lives: Place
    lived: ListOf[Place]
    rents: MapOf[str, Street]


class Rung(State):
    rings: int = 0


def landing(name: str = "landing") -> FileSource:
    return files("{landing}/*.parquet", event_time="at", name=name)


def accounts(state: type[State] = Account, uid: str = "accounts", source: FileSource | None = None, **changed) -> Stage:
    booked = changed.pop("booked", ["id", "amount"])
    arguments = {"key": "id", "where": "amount > 0", "sink": delta.append("booked"), **changed}

    @stage(uid, source=source or landing(), state=state, **arguments)
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


def _arm(rows: pl.DataFrame, state: KeyedState, after: str) -> None:
    state.timers.set(rows, after=after)


def _ring(fired: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    return fired.select("id")


def reminders(after: str = "1d", first: int = 1, on_timer=_ring) -> Stage:
    """Sets timers in a helper, for the rows of one file alone: an empty frame tells nothing of it."""

    @stage("reminders", source=landing(), key="id", state=Rung, on_timer=on_timer)
    def remind(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        mine = rows.filter(pl.col("amount") == first)
        if len(mine):
            _arm(mine, state, after)
        return rows.select("id")

    return remind


def quiet() -> Stage:
    """`reminders` without timers."""

    @stage("reminders", source=landing(), key="id", state=Rung)
    def keep(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rings=agg.count())
        return rows.select("id")

    return keep


def residents(state: type[State] = Resident) -> Stage:
    @stage("residents", source=landing(), key="id", state=state)
    def move(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        return rows.select("id")

    return move


def visits(ttl: str | None = "3650d") -> Stage:
    @stage("visits", source=landing(), key="id", state=Account, ttl=ttl)
    def visit(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rows=agg.count())
        state.recent.append(rows.select("id", recent=pl.col("amount").cast(pl.Float64)))
        return rows.select("id")

    return visit


def below(source: Stage) -> Stage:
    return aggregate("below", source, key="id", sink=delta.append("below"), rows=agg.count())


def timed(lateness: str = "2h", every: str = "7d") -> Stage:
    aggregates = {"total": agg.sum("amount")}
    return window(
        "timed", landing(), key="id", every=every, on="at", lateness=lateness, sink=delta.append("t"), **aggregates
    )


def firsts(ttl: str = "7d") -> Stage:
    return deduplicate("firsts", landing(), key="id", ttl=ttl, sink=delta.append("firsts"))


def site_of(**changed: Stage) -> tuple[Stage, ...]:
    """All stages of `kept`, some of them changed."""
    parts = {
        "reminders": reminders(),
        "residents": residents(),
        "visits": visits(),
        "timed": timed(),
        "firsts": firsts(),
    }
    return tuple((parts | changed).values())


kept = Pipeline("kept", site_of(), max_parallelism=8)


def deliver(site: Site, number: int) -> None:
    site.landing.mkdir(parents=True, exist_ok=True)
    at = pa.array([NOON + timedelta(hours=number)] * len(KEYS), pa.timestamp("us", tz="UTC"))
    rows = pa.table({"id": KEYS, "at": at, "amount": [number] * len(KEYS), "other": pa.array([1] * len(KEYS))})
    pq.write_table(rows, site.landing / f"{number:03}.parquet")


def go(site: Site) -> None:
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def plan_of(site: Site, at: int | str | None = None) -> StatePlan:
    return plan.plan(site.pipeline, site.settings, at, InMemoryExecutor())


@pytest.fixture(scope="module")
def kept_base(tmp_path_factory) -> Site:
    site = Site(tmp_path_factory.mktemp("kept") / "base", {"WEIR_SPARK__PARALLELISM": "2"}, kept, __name__)
    deliver(site, 1)
    go(site)
    return site


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
C, M, L, F, R, U = (verdict.value for verdict in Verdict)
CHANGES = {
    "nothing": Change(((C, "its state is used as it is"),), ALL),
    "a field renamed": Change(
        ((F, "field note (string) was removed, and looks renamed to email"), (M, "field email")),
        others(accounts(Emailed)),
    ),
    "a field retired": Change(
        ((M, "field note (string) was removed, and is retired"),),
        others(accounts(Poorer)),
        pipeline={"retired": ("accounts.note",)},
    ),
    "a field without default": Change(
        ((R, "field level (int64) was added without a default"),), others(accounts(Demanding))
    ),
    "fields": Change(
        (
            (M, "field note is called remark now"),
            (M, "field rows changed its type from int32 to int64"),
            (M, "field vip (bool, default False) was added"),
            (C, "the list seen was added"),
        ),
        others(accounts(Grown)),
    ),
    "a field less": Change(((F, "field note (string) was removed; its values would go"),), others(accounts(Poorer))),
    "a narrower field": Change(((R, "field rows changed its type from int32 to int16"),), others(accounts(Narrow))),
    "a list less": Change(((R, "the list recent is gone"),), others(accounts(WithoutList))),
    "another map": Change(((R, "spent was a map by string, is a map by int64"),), others(accounts(Remapped))),
    "other elements": Change(((R, "recent: field recent changed its type"),), others(accounts(Elements))),
    "another key": Change(((R, "the key was id (string), is other (int64)"),), others(accounts(key="other"))),
    "a ttl": Change(((M, "the time to live was none, is 1 d after a write"),), others(accounts(ttl="1d"))),
    "another window": Change(
        ((R, "its windows were 1 h by at with total = sum(amount), are 2 h by at with"),),
        (accounts(), hourly(every="2h"), sums(total=agg.sum("amount"))),
    ),
    "another aggregate": Change(
        ((R, "its aggregates were total = sum(amount), are total = max(amount)"),),
        (accounts(), hourly(), sums(total=agg.max("amount"))),
    ),
    "a condition of an aggregate": Change(
        ((R, "total = sum(amount), are total = sum(amount) where amount > 1"),),
        (accounts(), hourly(), sums(total=agg.sum("amount", where="amount > 1"))),
    ),
    "a stage more": Change(
        ((C, "it is new: it starts with empty state"), (C, "nothing is in it yet: it gets more's rows")),
        others(accounts(), accounts(uid="more", sink=delta.append("more"))),
    ),
    "a stage less": Change(((F, "has a stage 'accounts'"), (C, "nothing writes to it any more")), others()),
    "a stage retired": Change(((C, "it is retired"),), others(), pipeline={"retired": ("accounts",)}),
    "a stage renamed": Change(((F, "looks renamed to ledger"),), others(accounts(uid="ledger"))),
    "a source renamed": Change(
        ((F, "has a source 'landing'"), (F, "all of its input would be read into the state that accounts already has")),
        (accounts(source=landing("arrivals")),),
        pipeline={"retired": ("hourly", "sums")},
    ),
    "a source renamed, the old one retired": Change(
        (
            (
                F,
                (
                    "The source 'arrivals' is new, and all of its input would be read into the state that accounts"
                    " already has"
                ),
            ),
        ),
        (accounts(source=landing("arrivals")),),
        pipeline={"retired": ("landing", "hourly", "sums")},
    ),
    "a source added": Change(
        ((C, "it is new: it is read from its first file"),),
        (accounts(source=landing("arrivals")),),
        pipeline={"retired": ("landing", "hourly", "sums"), "added": ("arrivals",)},
    ),
    "a source for a new stage": Change(
        ((C, "it is new: it is read from its first file"),),
        others(accounts(), accounts(uid="more", source=landing("arrivals"), sink=delta.append("more"))),
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
    "another where": Change(
        (
            (
                C,
                "its where was 'amount > 0', is 'amount > 5' from the next epoch on; what was made of earlier rows stays",
            ),
        ),
        others(accounts(where="amount > 5")),
    ),
    "a where of no column": Change(
        ((R, "The where of accounts names 'amuont', which is no column"),), others(accounts(where="amuont > 1"))
    ),
    "another input": Change(((R, "has no column 'at'"),), (BOOKED, with_input(hourly(), BOOKED), SUMS)),
}


@pytest.mark.parametrize("name", sampled(CHANGES, 12))
def test_what_is_planned_is_what_a_run_does(base, tmp_path, name):
    _assert_planned_is_done(base, CHANGES[name], tmp_path)


CHANGES_OF_KEPT = {
    "on_timer gone, timers set": Change(((R, "on_timer is gone, and timers are set"),), site_of(reminders=quiet())),
    "on_timer gone, timers used": Change(
        ((R, "on_timer is gone, and timers are set"),), site_of(reminders=reminders(on_timer=None))
    ),
    "a shorter ttl": Change(((L, "was 3,650 d after a write, is 1 ms after a write"),), site_of(visits=visits("1ms"))),
    "a longer ttl": Change(((C, "the time to live was 3,650 d"),), site_of(visits=visits("7300d"))),
    "no ttl": Change(((C, "the time to live was 3,650 d after a write, is none"),), site_of(visits=visits(None))),
    "less lateness": Change(
        ((C, "the lateness was 2 h, is 10 min; with the next rows the watermark comes 1 h 50 min nearer"),),
        site_of(timed=timed("10m")),
    ),
    "more lateness": Change(((C, "open windows stay open that much longer"),), site_of(timed=timed("3h"))),
    "other windows": Change(((R, "its windows were 7 d by at with total"),), site_of(timed=timed(every="1d"))),
    "another memory": Change(((C, "keys were forgotten after 7 d, are after 1 d"),), site_of(firsts=firsts("1d"))),
    "parts of fields less": Change(
        (
            (F, "field lives.number (int64) was removed; its values would go"),
            (F, "lived: field number (int64) was removed"),
            (F, "rents: field number (int64) was removed"),
            (M, "field lives changed its type"),
        ),
        site_of(residents=residents(Village)),
    ),
    "parts of fields retired": Change(
        (
            (M, "field lives.number (int64) was removed, and is retired"),
            (M, "lived: field number (int64) was removed, and is"),
            (M, "rents: field number (int64) was removed, and is"),
        ),
        site_of(residents=residents(Village)),
        pipeline={"retired": ("residents.lives.number", "residents.lived.number", "residents.rents.number")},
    ),
    "parts of fields without default": Change(
        (
            (R, "field lives.floor (int64) was added without a default"),
            (R, "lived: field floor (int64) was added without"),
        ),
        site_of(residents=residents(Flat)),
    ),
    "a cache beside a ttl": Change(
        ((R, "A state cache is configured for the stage visits"),),
        site_of(),
        {"WEIR_STATE__CACHES": '{"visits": {"l1": 5}}'},
    ),
}


@pytest.mark.parametrize("name", sampled(CHANGES_OF_KEPT, 6))
def test_what_is_planned_of_times_and_parts_is_what_a_run_does(kept_base, tmp_path, name):
    _assert_planned_is_done(kept_base, CHANGES_OF_KEPT[name], tmp_path)


def _assert_planned_is_done(base: Site, change: Change, tmp_path: Path) -> None:
    changed = replace(base.pipeline, stages=change.stages, **change.pipeline)
    site = base.copied_to(tmp_path / "site")
    site = replace(site, pipeline=changed, options={**site.options, **change.options})
    deliver(site, 2)
    objects = site.objects()

    decided = plan_of(site)

    assert site.objects() == objects, "a plan changes nothing"
    findings = [(finding.verdict.value, finding.what) for finding in decided.findings]
    for verdict, part in change.expected:
        assert any(verdict == kind and part in what for kind, what in findings), (verdict, part, findings)
    if not decided.stops:
        assert {verdict for verdict, _ in findings} <= {verdict for verdict, _ in change.expected} | {C}
    assert all(finding.next for finding in decided.findings if finding.verdict.stops)
    assert decided.stops == any(verdict in (F, R) for verdict, _ in change.expected)
    if not decided.stops:
        go(site)
        assert open_storage(changed, site.settings)[1].head().id == 2
        return
    with pytest.raises(WeirError) as refused:
        go(site)
    first = next(finding for finding in decided.findings if finding.verdict.stops)
    assert first.what in str(refused.value) and (first.next or "") in str(refused.value)


def made(*columns: str, where: str | None = None, ttl: str | None = None, counts: bool = False) -> tuple[Stage, ...]:
    """A stage with columns of its own, and two that read it."""
    doubled = select("doubled", landing(), *(columns or ("id", "at", "amount * 2 AS amount")))
    about = aggregate("about", landing() if counts else doubled, key="id", values=agg.approx_distinct("amount"))
    paired = join("paired", side(doubled, where=where), landing(), on="id", ttl=ttl)
    return doubled, about, paired


STAY = "from the next epoch on; what was made of earlier rows stays as it is"
CHANGES_OF_MADE = {
    "an expression": Change(
        ((C, f"its select had 'amount * 2 AS amount', has 'amount * 3 AS amount' {STAY}"),),
        made("id", "at", "amount * 3 AS amount"),
    ),
    "a column more": Change(
        ((C, f"its select has 'amount AS whole' besides {STAY}"), (M, "left: field row")),
        made("id", "at", "amount * 2 AS amount", "amount AS whole"),
    ),
    "a where of one side": Change(
        ((C, f"of the stage doubled its where was none, is 'amount > 3' {STAY}"),), made(where="amount > 3")
    ),
    "another input": Change(
        ((C, "it read the stage doubled, and reads the source landing from the next epoch on"),), made(counts=True)
    ),
    "a ttl of a join": Change(
        ((C, "rows were kept for ever, are for 1 d: those that are there keep the time that they had"),), made(ttl="1d")
    ),
    "values of a sketch": Change(
        ((R, "the values that values counts were int64, are string"),),
        made("id", "at", "CAST(amount AS STRING) AS amount")[:2],
        pipeline={"retired": ("paired",)},
    ),
}


@pytest.fixture(scope="module")
def made_base(tmp_path_factory) -> Site:
    site = Site(tmp_path_factory.mktemp("made") / "base", {}, Pipeline("made", made(), max_parallelism=8), __name__)
    deliver(site, 1)
    go(site)
    return site


@pytest.mark.parametrize("name", list(CHANGES_OF_MADE))
def test_what_is_planned_of_columns_and_inputs_is_what_a_run_does(made_base, tmp_path, name):
    _assert_planned_is_done(made_base, CHANGES_OF_MADE[name], tmp_path)


def changing(*more: Stage, uid: str = "counted") -> tuple[Stage, ...]:
    """Stages that hand out changes, and others."""
    counted = aggregate(uid, landing(), key="id", n=agg.count(), changes=True)
    first = top_n("first", landing(), key="id", by="amount", n=1)
    return counted, first, *more


def alike(source: Stage, uid: str = "alike") -> Stage:
    return aggregate(uid, source, key="n", keys=agg.count())


COUNTED, FIRST = changing()
PASSED = select("passed", COUNTED, "*")
FROM_THE_MIDDLE = "from the middle, and take back rows that never came to it"
CHANGES_OF_CHANGING = {
    "a reader more": Change(
        ((R, f"the changes of the stage counted {FROM_THE_MIDDLE}"),),
        changing(PASSED, alike(PASSED), alike(COUNTED, "again")),
    ),
    "a reader more behind a stage without state": Change(
        (
            (R, f"the changes of the stage counted {FROM_THE_MIDDLE}"),
            (C, "it is new: it reads its input from where the pipeline stands"),
        ),
        changing(PASSED, alike(PASSED), MORE := select("more", COUNTED, "*"), alike(MORE, "again")),
    ),
    "a reader of ranks": Change(
        ((R, f"the changes of the stage first {FROM_THE_MIDDLE}"),),
        changing(PASSED, alike(PASSED), aggregate("ranks", FIRST, key="rank_number", n=agg.count())),
    ),
    "a reader with its own changes": Change(
        ((C, "it is new"),),
        changing(PASSED, alike(PASSED), ANEW := changing(uid="anew")[0], alike(ANEW, "again")),
    ),
    "a reader of what is no change": Change(
        ((C, "it is new"),),
        changing(
            PASSED,
            alike(PASSED),
            aggregate("again", COUNTED, select="n", where="_change_type = 'insert'", key="n", keys=agg.count()),
        ),
    ),
    "past the stage in between": Change(
        ((C, "it read the stage passed, and reads the stage counted"),), changing(alike(COUNTED))
    ),
}


@pytest.fixture(scope="module")
def changing_base(tmp_path_factory) -> Site:
    stages = changing(PASSED, alike(PASSED))
    root = tmp_path_factory.mktemp("changing") / "base"
    site = Site(root, {}, Pipeline("changing", stages, max_parallelism=8), __name__)
    deliver(site, 1)
    go(site)
    return site


@pytest.mark.parametrize("name", list(CHANGES_OF_CHANGING))
def test_changes_are_not_read_from_the_middle(changing_base, tmp_path, name):
    _assert_planned_is_done(changing_base, CHANGES_OF_CHANGING[name], tmp_path)


def test_nothing_is_said_of_what_an_earlier_release_did_not_record(made_base, tmp_path, monkeypatch):
    site = replace(
        made_base.copied_to(tmp_path / "site"), pipeline=replace(made_base.pipeline, stages=made(ttl="1d", counts=True))
    )
    recorded = structure.stats_of
    for module in (structure, plan):
        monkeypatch.setattr(module, "stats_of", lambda *of: recorded(*of).updated(inputs=None, sql=None, sketched={}))
    assert {finding.what for finding in plan_of(site).findings} == {"its state is used as it is"}


def test_on_timer_may_go_once_no_timer_is_set_and_none_is_used(kept_base, tmp_path):
    site = kept_base.copied_to(tmp_path / "site")
    soon = replace(site, pipeline=replace(kept, stages=site_of(reminders=reminders("1ms", first=2))))
    deliver(soon, 2)
    go(soon)
    asked = replace(soon, pipeline=replace(soon.pipeline, stages=site_of(reminders=quiet())))
    assert [finding.aspect for finding in plan_of(asked).findings if finding.verdict.stops] == ["timers"], (
        "the first day's are set"
    )

    fresh = Site(tmp_path / "fresh", site.options, replace(kept, stages=(reminders(first=7),)), __name__)
    deliver(fresh, 1)
    go(fresh)
    without = replace(fresh, pipeline=replace(fresh.pipeline, stages=(reminders(first=7, on_timer=None),)))
    (refused,) = [finding for finding in plan_of(without).findings if finding.verdict.stops]
    assert "while the function uses timers" in refused.what, "in a helper, for rows that have not come"
    deliver(without, 2)
    with pytest.raises(PipelineError, match="while the function uses timers"):
        go(without)
    none = replace(fresh, pipeline=replace(fresh.pipeline, stages=(quiet(),)))
    assert not plan_of(none).stops
    go(none)


def test_timers_that_an_earlier_release_did_not_record_stop_a_run_all_the_same(tmp_path, monkeypatch):
    stats = steps.figures_of
    monkeypatch.setattr(steps, "figures_of", lambda *of: stats(*of).updated(timers=None, on_timer=None))
    site = Site(tmp_path, {}, replace(kept, stages=(reminders(),)), __name__)
    deliver(site, 1)
    go(site)
    monkeypatch.undo()
    asked = replace(site, pipeline=replace(kept, stages=(quiet(),)))
    assert [finding.aspect for finding in plan_of(asked).findings if finding.verdict.stops] == ["timers"]
    deliver(asked, 2)
    with pytest.raises(PipelineError, match=r"(?i:on_timer is gone, and timers are set)"):
        go(asked)


@pytest.mark.parametrize("key", KEYS[:3])
def test_timers_that_an_earlier_release_did_not_record_are_found_in_whatever_subtask_they_are(
    tmp_path, monkeypatch, key
):
    @stage("reminders", source=landing(), key="id", state=Rung, on_timer=_ring)
    def remind(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
        state.fold(rows, rings=agg.count())
        mine = rows.filter(pl.col("id") == key)
        if len(mine):
            _arm(mine, state, "1d")
        return rows.select("id")

    stats = steps.figures_of
    monkeypatch.setattr(steps, "figures_of", lambda *of: stats(*of).updated(timers=None, on_timer=None))
    site = Site(tmp_path, {"WEIR_SPARK__PARALLELISM": "4"}, replace(kept, stages=(remind,)), __name__)
    deliver(site, 1)
    go(site)
    asked = replace(site, pipeline=replace(kept, stages=(quiet(),)))
    assert [finding.aspect for finding in plan_of(asked).findings if finding.verdict.stops] == ["timers"]


def test_a_shorter_time_to_live_is_told_with_what_it_deletes_and_that_it_is_for_good(
    kept_base, tmp_path, weir, monkeypatch
):
    site = kept_base.copied_to(tmp_path / "site")
    changed = replace(kept, stages=site_of(visits=visits("1ms")))
    (loss,) = [
        finding for finding in plan_of(replace(site, pipeline=changed)).findings if finding.verdict is Verdict.LOSES
    ]
    assert "40 of 40 rows and elements by now, in 2 of 2 subtasks" in loss.what, "a row and an element of each key"
    assert "deleted for good" in loss.what and "a longer one does not bring it back" in loss.what
    assert loss.next is not None and "savepoint" in loss.next
    monkeypatch.setattr(f"{__name__}.pipeline", changed)
    shown = weir(replace(site, pipeline=changed), "plan", "kept")
    assert shown.code == 0 and "loses state" in shown.out and "40 of 40" in shown.out


def test_a_time_to_live_that_comes_back_is_told_with_what_it_deletes(kept_base, tmp_path):
    site = kept_base.copied_to(tmp_path / "site")
    without = replace(site, pipeline=replace(kept, stages=site_of(visits=visits(None))))
    deliver(without, 2)
    go(without)
    for ttl, counted in (("1ms", "60 of 60"), ("3650d", "0 of 60")):
        again = replace(site, pipeline=replace(kept, stages=site_of(visits=visits(ttl))))
        (loss,) = [finding for finding in plan_of(again).findings if finding.verdict is Verdict.LOSES]
        assert "the time to live was none" in loss.what and "deleted for good" in loss.what
        assert f"{counted} rows and elements by now, in 2 of 2 subtasks" in loss.what, (
            "a row and two elements of each key"
        )
        assert loss.next is not None and "savepoint" in loss.next


def test_a_stage_below_a_refused_one_is_not_compared_and_not_said_to_wait_for_input(kept_base, tmp_path):
    site = kept_base.copied_to(tmp_path / "site")
    broken = with_input(reminders(), key=("nowhere",))
    findings = plan_of(
        replace(site, pipeline=replace(kept, stages=(*site_of(reminders=broken), below(broken))))
    ).findings
    (under,) = [finding for finding in findings if finding.name == "below" and finding.aspect == "input"]
    assert (under.verdict, under.what) == (
        Verdict.UNKNOWN,
        "what it reads is not known before reminders fits; it is compared then",
    )
    above = reminders()
    fresh = Site(tmp_path / "fresh", {}, replace(kept, stages=(above, below(above))), __name__)
    assert {finding.what for finding in plan_of(fresh).findings if finding.kind == "stage"} == {
        "nothing has arrived for it yet, so its columns are not known"
    }


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
    assert [finding.aspect for finding in decided.findings if finding.verdict.stops] == ["sample"]


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
        ("rows of passed wait", {"stages": (unaligned.passed, with_input(timed, unaligned.SOURCE))}),
        ("rows wait for it with other columns", {"stages": (wider, with_input(timed, wider))}),
    ):
        changed = replace(site, pipeline=replace(unaligned.short, **change))
        assert [part for finding in plan_of(changed).findings if finding.verdict.stops and part in finding.what], part
        with pytest.raises(PipelineError, match=r"rows of .* wait for"):
            list(unaligned.epochs(changed))


def test_a_plan_says_which_wheres_only_spark_can_evaluate(base, tmp_path):
    site = base.copied_to(tmp_path / "site")

    def where_of(settings=site.settings, **changed) -> str | None:
        decided = plan.plan(replace(pipeline, stages=others(accounts(**changed))), settings)
        assert list(decided.to_dict()["where"]) == ["accounts"]
        return decided.where["accounts"]

    assert where_of() is None
    assert where_of(where="round(amount) > 0") == "round(amount) is not understood"
    sql = {"spark": site.settings.spark.model_copy(update={"conf": {"spark.sql.ansi.enabled": "false"}})}
    assert where_of(site.settings.model_copy(update=sql)) == "spark.conf has spark.sql.ansi.enabled"


def test_only_a_stage_with_a_transform_starts_spark_to_know_its_columns(base, spark, tmp_path):
    site = base.copied_to(tmp_path / "site")
    halved = accounts(
        transform=lambda rows: rows.selectExpr("id", "at", "cast(amount as bigint) as amount", "1 as more")
    )
    decided = plan.plan(replace(pipeline, stages=others(halved)), site.settings)
    assert decided.spark == ("accounts",) and not decided.stops
    typed = accounts(transform=lambda rows: rows.selectExpr("cast(id as binary) as id", "at", "amount"))
    decided = plan.plan(replace(pipeline, stages=others(typed)), site.settings)
    assert "the key was id (string), is id (binary)" in [finding.what for finding in decided.findings]
    assert plan.plan(pipeline, site.settings).spark == (), "a where leaves columns as they are"


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
    facts = json.loads(weir(site, "plan", "planned", "--checkpoint", "1", "--json").out)
    assert not facts["runs"] and "refused" in {finding["verdict"] for finding in facts["findings"]}
    both = weir(site, "plan", "planned", "--checkpoint", "1", "--savepoint", "first")
    assert both.code == 2 and "Give one of them" in both.err
    assert weir(site, "plan", "planned", "--checkpoint", "9").code == 1
