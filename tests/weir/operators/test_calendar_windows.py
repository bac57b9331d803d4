"""Windows of the calendar and of time zones, against DuckDB's date_trunc and against what a zone's clock shows of each
row."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.arrow.unfit_values import LAST_MICRO
from state_ops.errors import PipelineError, WeirError
from tests.recovery.harness import Site
from weir import Pipeline, Stage, agg, delta, desc, files, testing, top_n, window
from weir.execution.in_process import InMemoryExecutor
from weir.inspection import state_reader
from weir.operations.plan import plan
from weir.operators.compatibility import meaning
from weir.operators.windows import CalendarWindow
from weir.operators.windows.calendars import Calendar
from weir.run.run import RunOptions, run

EVENTS = files("x/*.parquet", event_time="at")
INPUT = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
BERLIN = ZoneInfo("Europe/Berlin")


def counted(**arguments: object) -> Stage:
    return window("counted", EVENTS, key="k", **{"on": "at", "n": agg.count(), **arguments})  # type: ignore[arg-type]


def rows(*moments: datetime, key: str = "a") -> list[dict]:
    return [{"k": key, "at": moment} for moment in moments]


def windows(out: pl.DataFrame, zone: ZoneInfo | None = None) -> list[tuple[str, str, int]]:
    """Start and end of each window, as the zone's clock shows them, and how many rows it has."""
    shown = [
        [moment.astimezone(zone or UTC).strftime("%Y-%m-%d %H:%M") for moment in out[name]]
        for name in ("window_start", "window_end")
    ]
    return sorted(zip(*shown, out["n"], strict=True))


def moments(first: datetime, last: datetime, count: int) -> list[datetime]:
    seconds = np.random.default_rng(count).integers(0, int((last - first).total_seconds()), count).tolist()
    return [first + timedelta(seconds=second) for second in seconds]


@pytest.mark.parametrize(
    ("every", "trunc", "length"),
    [
        ({"every": "1mo"}, "date_trunc('month', t)", "1 month"),
        ({"every": "3mo"}, "date_trunc('quarter', t)", "3 months"),
        ({"every": "1y"}, "date_trunc('year', t)", "1 year"),
        ({"every": "1y", "offset": "3mo"}, "date_trunc('year', t - INTERVAL 3 MONTH) + INTERVAL 3 MONTH", "1 year"),
        ({"every": "1y", "offset": "-9mo"}, "date_trunc('year', t - INTERVAL 3 MONTH) + INTERVAL 3 MONTH", "1 year"),
        ({"every": "10y"}, "date_trunc('decade', t)", "10 years"),
        ({"every": "1w"}, "date_trunc('week', t)", "7 days"),
        ({"every": "1w", "week_begins": "sunday"}, "date_trunc('week', t + INTERVAL 1 DAY) - INTERVAL 1 DAY", "7 days"),
        ({"every": "1d", "zone": "Etc/UTC"}, "date_trunc('day', t)", "1 day"),
    ],
)
@pytest.mark.parametrize("years", [(11, 13), (1890, 1972), (1968, 2032), (9900, 9990)])
def test_windows_are_what_date_trunc_says(every, trunc, length, years):
    taken = moments(*(datetime(year, 2, 10, tzinfo=UTC) for year in years), 400)
    taken += [datetime(2024, 2, 29, 23, 59, 59, 999999, UTC), datetime(2024, 3, 1, tzinfo=UTC)]
    out = testing.run(counted(**every), batch_rows=70).epoch(rows(*taken), drain=True)
    duck = duckdb.connect()
    duck.register("events", pa.table({"t": [moment.replace(tzinfo=None) for moment in taken]}))
    told = duck.sql(
        f"SELECT CAST({trunc} AS TIMESTAMP) AS s, CAST({trunc} AS TIMESTAMP) + INTERVAL {length} AS e, count(*) "
        "FROM events GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    start, end = (out[name].dt.replace_time_zone(None) for name in ("window_start", "window_end"))
    assert sorted(zip(start, end, out["n"], strict=True)) == told


ZONES = {
    "Berlin": ("Europe/Berlin", datetime(2024, 3, 30), datetime(2024, 10, 26)),
    "half an hour": ("Australia/Lord_Howe", datetime(2024, 4, 5), datetime(2024, 10, 4)),
    "no midnight": ("America/Sao_Paulo", datetime(2018, 11, 2), datetime(2018, 2, 16)),
    "midnight twice": ("America/Havana", datetime(2024, 3, 9), datetime(2024, 11, 2)),
    "no 30 December": ("Pacific/Apia", datetime(2011, 12, 28), datetime(2012, 3, 31)),
    "before 1970, by seconds": ("Europe/Amsterdam", datetime(1937, 6, 29), datetime(1916, 4, 29)),
    "as UTC": ("Africa/Abidjan", datetime(2024, 3, 30), datetime(2024, 10, 26)),
}


@pytest.mark.parametrize("every", ["30m", "1h", "6h", "1d", "7d", "1mo"])
@pytest.mark.parametrize(("name", "first", "second"), ZONES.values(), ids=ZONES)
def test_windows_begin_where_the_clock_shows_another_part_of_time(every, name, first, second):
    """Each minute of some days. A part of time that is as short as what a clock repeats comes twice."""
    zone = ZoneInfo(name)
    step = {"30m": 30 * MINUTE, "1h": HOUR, "6h": 6 * HOUR, "1d": DAY, "7d": 7 * DAY}.get(every)
    taken = [begin.replace(tzinfo=UTC) + n * MINUTE for begin in sorted((first, second)) for n in range(4 * 1440)]
    expected: dict[tuple, int] = {}
    for moment in taken:
        clock = moment.astimezone(zone)
        plain = clock.replace(tzinfo=None)
        part = (plain - datetime(1970, 1, 1)) // step if step else (plain.year, plain.month)
        back = plain.replace(tzinfo=zone, fold=0).utcoffset() - plain.replace(tzinfo=zone, fold=1).utcoffset()
        again = clock.fold if step is not None and step <= back else 0
        expected[part, again] = expected.get((part, again), 0) + 1
    out = testing.run(counted(every=every, zone=name)).epoch(rows(*taken), drain=True).sort("window_start")
    assert out["n"].to_list() == list(expected.values())
    starts, ends = out["window_start"].to_list(), out["window_end"].to_list()
    assert all(end <= start for start, end in zip(starts[1:], ends[:-1], strict=True))


def test_days_on_which_clocks_change_have_23_and_25_hours():
    noons = [datetime(2024, *day, 11, tzinfo=UTC) for day in ((3, 30), (3, 31), (10, 26), (10, 27))]
    out = testing.run(counted(every="1d", zone="Europe/Berlin")).epoch(rows(*noons), drain=True)
    assert [(end - start) // HOUR for start, end in zip(out["window_start"], out["window_end"], strict=True)] == [
        24, 23, 24, 25
    ]  # fmt: skip
    assert windows(out, BERLIN)[1] == ("2024-03-31 00:00", "2024-04-01 00:00", 1)


def test_an_hour_that_comes_twice_is_two_windows():
    twice = [datetime(2024, 10, 27, hour, 30, tzinfo=UTC) for hour in (0, 1)]
    out = testing.run(counted(every="1h", zone="Europe/Berlin")).epoch(rows(*twice), drain=True)
    assert [moment.hour for moment in out["window_start"]] == [0, 1]
    assert [start for start, _, _ in windows(out, BERLIN)] == ["2024-10-27 02:00"] * 2


def test_the_day_of_a_zone_may_begin_at_another_hour():
    out = testing.run(counted(every="1d", zone="Europe/Berlin", offset="6h")).epoch(
        rows(datetime(2024, 3, 31, 3, 59, tzinfo=UTC), datetime(2024, 3, 31, 4, tzinfo=UTC)), drain=True
    )
    assert windows(out, BERLIN) == [
        ("2024-03-30 06:00", "2024-03-31 06:00", 1), ("2024-03-31 06:00", "2024-04-01 06:00", 1)
    ]  # fmt: skip


def test_a_window_whose_start_the_clock_leaps_over_begins_there():
    leap = datetime(2024, 3, 31, 1, tzinfo=UTC)  # from 2:00 to 3:00 in Berlin
    out = testing.run(counted(every="1d", zone="Europe/Berlin", offset="150m")).epoch(
        rows(leap - MINUTE, leap, leap + 20 * MINUTE), drain=True
    )
    assert windows(out, BERLIN) == [
        ("2024-03-30 02:30", "2024-03-31 03:00", 1), ("2024-03-31 03:00", "2024-04-01 02:30", 2)
    ]  # fmt: skip


def test_a_month_closes_when_the_watermark_reaches_its_end_and_late_rows_are_told():
    run = testing.run(counted(every="1mo", zone="Europe/Berlin", lateness="2h", late=delta.append("late")))
    end = datetime(2024, 3, 31, 22, tzinfo=UTC)  # midnight in Berlin
    assert run.epoch(rows(end - DAY, end, end + 2 * HOUR - timedelta(microseconds=1))).is_empty()
    assert windows(run.epoch(rows(end - HOUR, end + 2 * HOUR)), BERLIN) == [("2024-03-01 00:00", "2024-04-01 00:00", 2)]
    assert run.epoch(rows(end - timedelta(microseconds=1), end)).is_empty()
    assert run.late["at"].to_list() == [end - timedelta(microseconds=1)]
    assert windows(run.epoch(drain=True), BERLIN) == [("2024-04-01 00:00", "2024-05-01 00:00", 4)]


@pytest.mark.parametrize("every", [{"every": "1mo"}, {"every": "1d", "zone": "Europe/Berlin"}, {"every": "1w"}])
def test_slicing_does_not_matter(every):
    taken = moments(datetime(2024, 3, 1, tzinfo=UTC), datetime(2024, 11, 1, tzinfo=UTC), 150)
    some = [row for at, moment in enumerate(taken) for row in rows(moment, key=f"k{at % 3}")]
    testing.assert_slicing_does_not_matter(counted(**every), some, trials=4)


def test_windows_by_processing_time_have_calendars_too():
    run = testing.run(counted(on=None, every="1mo"), schema=INPUT)
    now = datetime(2024, 2, 29, 23, tzinfo=UTC)
    assert run.epoch(rows(now), now=now).is_empty()
    assert windows(run.epoch([], now=now + HOUR)) == [("2024-02-01 00:00", "2024-03-01 00:00", 1)]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
@pytest.mark.parametrize("every", ["1mo", "1y", "1w", "1d", "1h"])
def test_a_window_that_no_timestamp_bounds_ends_at_the_first_or_last_moment(every, zone):
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    run = testing.run(counted(every=every, zone=zone), schema=INPUT)
    out = run.epoch([*rows(first), *rows(datetime(2024, 1, 1, tzinfo=UTC)), *rows(last)])
    out = pl.concat([out, run.epoch(drain=True)])
    assert out["n"].to_list() == [1, 1, 1]
    assert out["window_start"][0] == first and out["window_end"][2] == last
    assert out["window_start"][2] < last and out["window_end"][0] > first


@pytest.mark.parametrize("every", ["1mo", "1y", "1w", "1d", "1h"])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_at_the_ends_of_time_a_day_begins_where_the_clock_says(every, zone):
    """Where it is another year already or still, too: the windows of moments are those of the clock moved by 400
    years, after which the calendar repeats, but for the zone's own past."""
    if zone != "UTC" and every == "1w":
        pytest.skip("400 years are whole weeks, and it is the same as for days")
    calendar = counted(every=every, zone=zone).operator
    if not isinstance(calendar, CalendarWindow):
        pytest.skip("windows of one length")
    cycle = 146_097 * 86_400_000_000
    times = LAST_MICRO - np.arange(0, 40 * 86_400_000_000, 7_777_777_777)
    bounds, before = calendar.calendar.bounds(times), calendar.calendar.bounds(times - cycle)
    for now, then in zip(bounds, before, strict=True):
        assert (now == then + cycle).all()


def test_the_first_five_of_each_month():
    views = window("views", EVENTS, key="k", on="at", every="1mo", zone="Europe/Berlin", n=agg.count())
    best = top_n(
        "best", views, key="window_start", by=[desc("n"), "k"], n=5, until="window_end", sink=delta.append("b")
    )
    taken = moments(datetime(2024, 1, 3, tzinfo=UTC), datetime(2024, 6, 1, tzinfo=UTC), 600)
    some = [row for at, moment in enumerate(sorted(taken)) for row in rows(moment, key=f"k{at * at % 17}")]
    run = testing.run_pipeline(Pipeline("p", (views, best)), [some[:250], some[250:400], some[400:]], drain=True)
    counts: dict[tuple[int, str], int] = {}
    for row in some:
        month = row["at"].astimezone(BERLIN).month
        counts[month, row["k"]] = counts.get((month, row["k"]), 0) + 1
    expected = {month: sorted((-n, key) for (of, key), n in counts.items() if of == month)[:5] for month in range(1, 7)}
    out = run.tables["b"]
    told = {month: [] for month in expected}
    for row in out.sort("window_start", "rank_number").to_dicts():
        told[row["window_start"].astimezone(BERLIN).month].append((-row["n"], row["k"]))
    assert told == expected


def days_of(zone: str) -> Pipeline:
    landing = files("{landing}/*.parquet", event_time="at")
    days = window("days", landing, key="k", on="at", every="1d", zone=zone, n=agg.count(), sink=delta.append("days"))
    return Pipeline("p", (days,), max_parallelism=4)


@pytest.fixture
def site(tmp_path) -> Site:
    site = Site(tmp_path, {"WEIR_SPARK__PARALLELISM": "2"}, days_of("Europe/Berlin"), __name__)
    site.landing.mkdir(parents=True, exist_ok=True)
    deliver(site, datetime(2024, 3, 31, 5, tzinfo=UTC))
    return site


def deliver(site: Site, moment: datetime) -> None:
    path = site.landing / f"{moment:%m%d%H}.parquet"
    pq.write_table(pa.Table.from_pylist([*rows(moment), *rows(moment, key="b")], INPUT), path)
    list(run(site.pipeline, site.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))


def test_windows_go_on_where_the_checkpoint_left_them_and_are_seen_as_it_says(site):
    now_hours = days_of("UTC")
    opened = pl.concat([pl.from_arrow(part) for part in state_reader.scan(now_hours, site.settings, "days")])
    assert windows(opened, BERLIN) == [("2024-03-31 00:00", "2024-04-01 00:00", 1)] * 2
    deliver(site, datetime(2024, 3, 31, 21, 59, tzinfo=UTC))
    deliver(site, datetime(2024, 3, 31, 22, tzinfo=UTC))
    assert windows(pl.from_pandas(site.table("days"))) == [("2024-03-30 23:00", "2024-03-31 22:00", 2)] * 2


@pytest.mark.parametrize("other", ["UTC", "Europe/Paris"])
def test_another_zone_is_refused(site, other):
    changed = days_of(other)
    told = [finding.what for finding in plan(changed, site.settings, None, InMemoryExecutor()).findings]
    (what,) = (what for what in told if "windows" in what)
    assert "its windows were 1 d in Europe/Berlin by at with n = count(), are 1 d" in what
    with pytest.raises(WeirError, match="its windows were 1 d in Europe/Berlin"):
        deliver(replace(site, pipeline=changed), datetime(2024, 4, 1, tzinfo=UTC))


@pytest.mark.parametrize("offset", ["0s", "0d", "-0h", timedelta(0)])
@pytest.mark.parametrize("every", ["1mo", "1w"])
def test_an_offset_of_nothing_is_none_however_it_is_written(every, offset):
    assert meaning(counted(every=every, offset=offset)) == meaning(counted(every=every))


def test_state_of_windows_of_one_length_means_what_it_did():
    common = {"on": "at", "aggregates": [["n", "count", None]]}
    assert meaning(counted(every="1d")) == {**common, "size": 86_400_000_000}
    assert meaning(counted(every="1d", zone="UTC", offset="1h")) == {
        **common, "size": 86_400_000_000, "every": 86_400_000_000, "offset": 3_600_000_000
    }  # fmt: skip
    kinds = [{"every": "1mo"}, {"every": "1w"}, {"every": "1w", "week_begins": "sunday"}, {"every": "1y"}]
    kinds += [{"every": "1y", "offset": "3mo"}, {"every": "1d", "zone": "Europe/Berlin"}]
    assert len({str(meaning(counted(**kind))) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": "1mo", "size": "60d"}, "size='60d' makes them"),
        ({"every": "1d", "zone": "Europe/Berlin", "size": "2d"}, "size='2d' makes them"),
        ({"gap": "1h", "zone": "Europe/Berlin"}, "has a gap"),
        ({"gap": "1h", "week_begins": "sunday"}, "has a gap"),
        ({"every": "1d", "week_begins": "sunday"}, "is none of weeks"),
        ({"every": "7d", "week_begins": "sunday"}, "is none of weeks"),
        ({"every": "1w", "week_begins": "Sonntag"}, "is no day of the week"),
        ({"every": "1w", "offset": "1d"}, "which week_begins= does"),
        ({"every": "0w"}, "no time at all"),
        ({"every": "9999w"}, "too long"),
        ({"every": "0mo"}, "is no time"),
        ({"every": "1201mo"}, "more than 100 years"),
        ({"every": "1mo", "offset": "1d"}, "is not in months"),
        ({"every": "3mo", "offset": "-3mo"}, "at least the time between windows"),
        ({"every": "1d", "zone": "Europe/Berlin", "offset": "24h"}, "at least the time between windows"),
        ({"every": "1d", "zone": "Europe/Berln"}, "Europe/Berlin"),
        ({"every": "1d", "zone": "../etc/passwd"}, "is no time zone"),
        ({"every": "1d", "zone": "Europe"}, "is no time zone"),
        ({"every": "1d", "zone": ""}, "is no time zone"),
        ({"every": "1d", "zone": BERLIN}, "is no time zone"),
        ({"every": "7h", "zone": "Europe/Berlin"}, "neither a part of a day"),
        ({"every": "36h", "zone": "Europe/Berlin"}, "neither a part of a day"),
        ({"every": "1s", "zone": "Europe/Berlin"}, "neither a part of a day"),
    ],
)
def test_calendars_that_mean_nothing_are_refused_at_their_definition(arguments, message):
    with pytest.raises(PipelineError, match=message):
        counted(**arguments)


@pytest.mark.parametrize("calendar", [Calendar(1, 0, 0, "Europe/Berlin"), Calendar(0, 86_400_000_000, 0, "Asia/Tokyo")])
def test_every_moment_is_in_one_window(calendar):
    day = 86_400_000_000
    times = np.arange(-400 * day, 400 * day, day // 7)
    starts, ends = calendar.bounds(times)
    assert (starts <= times).all() and (times < ends).all()
    unique = np.unique(np.stack([starts, ends]), axis=1)
    assert (unique[1, :-1] == unique[0, 1:]).all()
