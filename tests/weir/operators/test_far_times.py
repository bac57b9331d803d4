"""Event times that no Python datetime has: before the year 1, or after 9999, as from nanoseconds that were written as
microseconds."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.arrow import frames
from state_ops.arrow.unfit_values import FIRST_MICRO, LAST_MICRO
from state_ops.errors import InputError, StageError
from state_ops.moments import from_micros
from tests.recovery.harness import Site
from tests.weir.aside import NOON, SCHEMA, accounts, pipeline
from weir import (
    Epoch,
    KeyedState,
    ListOf,
    MapOf,
    Stage,
    State,
    agg,
    aggregate,
    deduplicate,
    expect,
    files,
    stage,
    testing,
    window,
)
from weir.connectors.parquet.footers import Times, times
from weir.definition import FileSource
from weir.execution.in_process import InMemoryExecutor
from weir.gates import evaluation, quarantine
from weir.run.run import RunOptions, run
from weir.settings.configuration import EpochSettings
from weir.sources.files import FilesReader
from weir.sources.slices import LeftOut

FIRST, LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
YEAR_12000 = 316_516_550_400_000_000
MOMENT = pa.timestamp("us", tz="UTC")
EVENTS = files("x/*.parquet", event_time="at")
INPUT = pa.schema([("k", pa.string()), ("at", MOMENT)])


class Seen(State):
    rows: int = 0


given: list[datetime | None] = []


@stage("noted", source=EVENTS, key="k", state=Seen)
def noted(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> pl.DataFrame:
    if len(rows):
        given.append(epoch.watermark)
    return state.fold(rows, rows=agg.count())


STAGES = {
    "window": window("t", EVENTS, key="k", on="at", every="1h", n=agg.count()),
    "session": window("t", EVENTS, key="k", on="at", gap="1h", n=agg.count()),
    "deduplicate": deduplicate("t", EVENTS, key="k", on="at", ttl="7d"),
    "forever": deduplicate("t", EVENTS, key="k"),
    "aggregate": aggregate("t", EVENTS, key="k", n=agg.count()),
    "function": noted,
}


def rows(*micros: int) -> pa.Table:
    return pa.table({"k": ["a"] * len(micros), "at": pa.array(micros, pa.int64()).cast(MOMENT)})


@pytest.mark.parametrize("which", STAGES.values(), ids=STAGES.keys())
@pytest.mark.parametrize("micros", [YEAR_12000, -YEAR_12000, (1 << 63) - 1, -(1 << 63)])
def test_an_event_time_outside_of_the_years_1_to_9999_is_refused_and_stops_no_later_epoch(which: Stage, micros: int):
    run = testing.run(which, schema=INPUT)
    with pytest.raises(InputError, match=r"its column 'at' is .* outside of the years 1 to 9999"):
        run.epoch(rows(0, micros))
    assert run.watermark is None
    run.epoch(rows(0))
    run.epoch(drain=True)


@pytest.mark.parametrize("which", STAGES.values(), ids=STAGES.keys())
def test_the_last_event_time_that_there_is_stops_no_later_epoch(which: Stage):
    run = testing.run(which, schema=INPUT)
    run.epoch(rows(0, LAST_MICRO))
    assert run.watermark == LAST
    run.epoch(rows(10))
    run.epoch(rows(FIRST_MICRO, LAST_MICRO))
    run.epoch(drain=True)


def test_a_window_that_ends_after_the_year_9999_has_the_last_moment_as_its_end():
    run = testing.run(STAGES["window"], schema=INPUT)
    run.epoch(rows(LAST_MICRO))
    assert run.epoch(drain=True)["window_end"].to_list() == [LAST]


def test_an_event_time_of_the_year_1_less_the_lateness_stops_no_later_epoch():
    run = testing.run(window("t", EVENTS, key="k", on="at", every="1h", lateness="1h", n=agg.count()), schema=INPUT)
    assert run.epoch(rows(FIRST_MICRO)).is_empty()
    assert run.watermark == FIRST
    assert run.epoch(rows(0))["n"].to_list() == [1]


def test_a_function_gets_the_nearest_watermark_that_there_is():
    given.clear()
    run = testing.run(noted, schema=INPUT)
    for micros in (FIRST_MICRO, 0, LAST_MICRO, 0):
        run.epoch(rows(micros))
    assert given == [None, FIRST, from_micros(0), LAST]


@pytest.mark.parametrize("micros", [(1 << 63) - 1, -(1 << 63)])
def test_a_watermark_at_the_end_of_time_stops_no_window(micros):
    run = testing.run(
        window("t", EVENTS, key="k", on="at", every="1h", lateness="1h", where="k <> 'far'", n=agg.count()),
        schema=INPUT,
    )
    far = pa.table({"k": ["a", "far"], "at": pa.array([0, micros], pa.int64()).cast(MOMENT)})
    assert len(run.epoch(far)) + len(run.epoch(drain=True)) == 1


class Kept(State):
    day: date | None = None
    days: list[datetime] = []  # noqa: RUF012  a state class copies its defaults
    each: MapOf[date, datetime]
    past: ListOf[date]


WRITES = {
    "value": (lambda state, rows: state.put(rows.select("k", day="far")), "day"),
    "a list in it": (lambda state, rows: state.put(rows.select("k", days=pl.concat_list("moment"))), "days"),
    "folded": (lambda state, rows: state.fold(rows, day=agg.max("far")), "day"),
    "a list": (lambda state, rows: state.past.append(rows, past="far"), "past"),
    "a map": (lambda state, rows: state.each.put(rows, each_key="near", each="moment"), "each"),
    "a map's key": (lambda state, rows: state.each.put(rows, each_key="far", each="at"), "each_key"),
}  # fmt: skip


@pytest.mark.parametrize("how", WRITES)
def test_a_function_puts_no_date_into_state_that_nobody_could_read_again(how: str):
    write, name = WRITES[how]

    @stage("kept", source=EVENTS, key="k", state=Kept)
    def kept(rows: pl.DataFrame, state: KeyedState, epoch: Epoch) -> None:
        days = pl.when(pl.col("at").dt.year() > 2000).then(1 << 30).otherwise(0).cast(pl.Int32).cast(pl.Date)
        moments = pl.when(pl.col("at").dt.year() > 2000).then(YEAR_12000).otherwise(0).cast(pl.Datetime("us", "UTC"))
        near = pl.lit(date(2024, 1, 1))
        write(state, rows.with_columns(far=days, moment=moments, near=near))

    run = testing.run(kept, schema=INPUT)
    run.epoch(rows(0))
    with pytest.raises(StageError, match=rf"'{name}\S*' is .*, outside of the years 1 to 9999 \(keys: ") as refused:
        run.epoch(rows(10**15))
    assert "stage kept" in str(refused.value)
    run.epoch(rows(1))


# -- for people


@pytest.mark.parametrize(
    ("type", "values", "shown"),
    [
        (MOMENT, [0, None, YEAR_12000], [from_micros(0), None, "12000-01-05 00:00:00.000000Z"]),
        (MOMENT, [10**18, -(10**18)], ["33658-09-27 01:46:40.000000Z", "-29719-04-05 22:13:20.000000Z"]),
        (pa.timestamp("s"), [2**40], ["36812-02-20 00:36:16"]),
        (pa.date32(), [2**30], ["2941775-04-07"]),
        (pa.list_(MOMENT), [[YEAR_12000], None, [0]], [["12000-01-05 00:00:00.000000Z"], None, [from_micros(0)]]),
        (pa.struct([("at", MOMENT)]), [{"at": YEAR_12000}], [{"at": "12000-01-05 00:00:00.000000Z"}]),
        (pa.map_(pa.string(), MOMENT), [[("a", YEAR_12000)]], [[("a", "12000-01-05 00:00:00.000000Z")]]),
    ],
    ids=str,
)
def test_people_see_such_a_time_as_text(type, values, shown):
    column = pa.array(values, type)
    assert frames.python_values(column) == shown
    assert frames.python_rows(pa.table({"n": range(len(shown)), "at": column})) == [
        {"n": number, "at": value} for number, value in enumerate(shown)
    ]


def test_a_gate_says_which_time_it_has_set_aside():
    gate = expect(
        "ExpectColumnValuesToBeBetween", column="at", max_value="2100-01-01T00:00:00+00:00", on_failure="quarantine"
    )
    (verdict,) = evaluation.check(replace(accounts, gates=(gate,)), rows(0, YEAR_12000))
    assert verdict.unexpected_rows == (1,)
    assert quarantine._reasons(gate, rows(0, YEAR_12000), np.array([1])) == ['at = "12000-01-05 00:00:00.000000Z"']
    (keyed,) = evaluation.with_keys([verdict], ["at"], lambda: rows(0, YEAR_12000))
    assert keyed.keys == ({"at": "12000-01-05 00:00:00.000000Z"},)


# -- files


@pytest.mark.parametrize(
    ("kind", "stored", "micros"),
    [
        (pa.timestamp("us", tz="UTC"), [YEAR_12000, 5, -YEAR_12000], [-YEAR_12000, YEAR_12000]),
        (pa.timestamp("us"), [YEAR_12000, 5], [5, YEAR_12000]),
        (pa.timestamp("s"), [-7, YEAR_12000 // 10**6], [-7_000_000, YEAR_12000]),
        (pa.timestamp("ms"), [-7, YEAR_12000 // 1000], [-7000, YEAR_12000]),
        (pa.timestamp("ns", tz="Europe/Berlin"), [-7000, 1_999_999], [-7, 1999]),
        (pa.date32(), [-1, 4_000_000], [-86_400_000_000, 345_600_000_000_000_000]),
        (pa.date64(), [-86_400_000, 0], [-86_400_000_000, 0]),
    ],
    ids=str,
)
def test_a_footer_tells_times_as_they_are_stored(tmp_path, kind, stored, micros):
    numbers = pa.array(stored, pa.int32() if kind == pa.date32() else pa.int64())
    pq.write_table(pa.table({"at": numbers.cast(kind)}), tmp_path / "0.parquet", row_group_size=1)
    assert times(pq.read_metadata(tmp_path / "0.parquet"), "at") == Times(*micros, nulls=False)


def test_an_event_time_that_is_far_is_a_bad_row_of_its_file_and_moves_no_watermark(tmp_path):
    pq.write_table(rows(0, YEAR_12000, 5, 2 * YEAR_12000), tmp_path / "0.parquet")
    for on_bad in ("fail", "quarantine"):
        source = FileSource("{landing}/*.parquet", event_time="at", on_bad=on_bad)
        reader = FilesReader(source, f"{tmp_path}/*.parquet")
        if on_bad == "fail":
            with pytest.raises(InputError, match=r"'at' of the input file 0\.parquet has a value in row 1 that cannot"):
                reader.plan(None, EpochSettings(), None)
    planned = reader.plan(None, EpochSettings(), None)
    assert (planned.newest, planned.rows_quarantined, planned.rows_offered) == (5, 2, 2)
    assert [(bad.file, bad.row) for bad in planned.bad_rows] == [("0.parquet", 1), ("0.parquet", 3)]
    assert reader.without(planned, [LeftOut("s", "g", "0.parquet", 2, "")]).newest == 0
    again = reader.plan_again(json.loads(json.dumps(planned.to_dict())), None)
    assert [(bad.file, bad.row) for bad in again.bad_rows] == [("0.parquet", 1), ("0.parquet", 3)]
    assert again.newest == 5


def test_a_pipeline_declines_an_epoch_with_such_a_time_and_goes_on_without_its_file(tmp_path: Path, weir):
    site = Site(tmp_path / "site", {"WEIR_EPOCH__MAX_FILES": "1"}, pipeline, "tests.weir.aside")
    site.landing.mkdir(parents=True)
    for number, micros in enumerate([0, YEAR_12000]):
        at = pa.array([int(NOON.timestamp()) * 10**6, micros], pa.int64()).cast(MOMENT)
        table = pa.table([["a", "b"], [number, number + 2], at, [5, 5]], schema=SCHEMA)
        pq.write_table(table, site.landing / f"{number}.parquet")
    with pytest.raises(InputError, match=r"'at' of the input file 1\.parquet has a value in row 1 .* 12000-01-05"):
        list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    watermarks = json.loads(weir(site, "status", "aside", "--json").out)["watermarks"]
    assert watermarks["accounts"] == NOON.isoformat()
    (site.landing / "1.parquet").unlink()
    assert not list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
