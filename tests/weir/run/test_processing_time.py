"""Windows by processing time: what is in them, when they close, and who begins the epoch that closes them."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from state_ops.errors import PipelineError
from tests.recovery.harness import Site
from tests.recovery.small import until
from tests.tools.sampling import sampled
from tests.tools.stages import with_input
from weir import Pipeline, State, agg, deduplicate, delta, files, join, side, stage, testing, window
from weir.definition import is_clocked, is_timed
from weir.execution.in_process import InMemoryExecutor
from weir.operations import branch_diff, forks, promotion
from weir.operations.plan import plan
from weir.run.run import RunOptions, run
from weir.run.sensor import observe

START = datetime(2026, 1, 1, tzinfo=UTC)
CLICKS = files("{landing}/*.parquet", name="clicks")
MOMENTS = pa.schema([("user", pa.string()), ("amount", pa.int64())])
TIMED = MOMENTS.append(pa.field("at", pa.timestamp("us", tz="UTC")))


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def at_micros(moment: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=moment)


def by_clock(uid: str = "clicked", source=CLICKS, **options):
    shape = {"every": "10s"} if "gap" not in options and "every" not in options else {}
    aggregates = {"rows": agg.count(), "total": agg.sum("amount"), "users": agg.count_distinct("amount")}
    if "gap" in options:
        del aggregates["users"]
    return window(uid, source, key="user", on=None, sink=delta.append(uid), **{**shape, **options, **aggregates})


def spans(options: dict, moments: list[float]) -> list[tuple[float, float]]:
    """The windows of one key whose rows came at these moments, in seconds: an independent replay."""
    if "gap" in options:
        gap, sessions = float(options["gap"][:-1]), []
        for moment in sorted(set(moments)):
            if sessions and moment < sessions[-1][1]:
                sessions[-1] = (sessions[-1][0], moment + gap)
            else:
                sessions.append((moment, moment + gap))
        return sessions
    every = float(options.get("every", "10s")[:-1])
    size, offset = float(options.get("size", f"{every}s")[:-1]), float(options.get("offset", "0s")[:-1])
    starts = {
        offset + every * number
        for moment in moments
        for number in range(int((moment - offset - size) // every), int((moment - offset) // every) + 1)
        if offset + every * number <= moment < offset + every * number + size
    }
    return sorted((start, start + size) for start in starts)


@pytest.mark.parametrize(
    ("parallelism", "options"),
    sampled(
        itertools.product([1, 3], [{}, {"every": "3s", "size": "10s"}, {"every": "7s", "offset": "2s"}, {"gap": "6s"}]),
        lambda case: case in ((1, {"every": "3s", "size": "10s"}), (1, {"gap": "6s"}), (3, {})),
    ),
)
def test_each_window_has_the_rows_of_its_epochs_and_closes_at_the_first_barrier_that_has_reached_its_end(
    options, parallelism
):
    chance, stage_ = random.Random(7), by_clock(source=replace(CLICKS, event_time="at"), **options)
    started = testing.run(stage_, parallelism=parallelism, schema=TIMED)
    seconds, given, handed_out = 0.0, [], []
    for _ in range(40):
        seconds += chance.choice([0, 0.5, 1, 2, 5, 11])
        rows = [
            {"user": f"u{chance.randrange(3)}", "amount": chance.randrange(4), "at": at(chance.randrange(-900, 900))}
            for _ in range(chance.randrange(4))
        ]
        out = started.epoch(rows, now=at(seconds))
        given += [(row["user"], seconds, row["amount"]) for row in rows]
        handed_out += [(seconds, row) for row in out.to_dicts()]
        assert started.acks == () or sum(ack.rows_late for ack in started.acks) == 0
        by_user = [[moment for name, moment, _ in given if name == user] for user in {name for name, _, _ in given}]
        ends = [at(end) for moments in by_user for _, end in spans(options, moments) if end > seconds]
        due = [at_micros(ack.due) for ack in started.acks if ack.due is not None]
        assert started.acks == () or min(due, default=None) == min(ends, default=None), "what wakes the sensor"
    closed = started.epoch(drain=True, now=at(seconds))
    handed_out += [(None, row) for row in closed.to_dicts()]
    epochs = sorted({moment for _, moment, _ in given} | {moment for moment, _ in handed_out if moment is not None})
    expected = []
    for user in sorted({user for user, _, _ in given}):
        mine = [(moment, amount) for name, moment, amount in given if name == user]
        for start, end in spans(options, [moment for moment, _ in mine]):
            last = end - float(options["gap"][:-1]) if "gap" in options else end
            within = [amount for moment, amount in mine if start <= moment < end and (moment <= last)]
            expected.append((user, at(start), at(end), len(within), sum(within)))
    actual = [(row["user"], row["window_start"], row["window_end"], row["rows"], row["total"]) for _, row in handed_out]
    assert sorted(actual) == sorted(expected)
    for moment, row in handed_out:
        end = (row["window_end"] - START).total_seconds()
        assert moment is None or moment >= end
        assert moment is not None or end > seconds, "it had been due before the drain"
        earlier = [epoch for epoch in epochs if moment is not None and end <= epoch < moment]
        assert not earlier, f"it ended at {end}, was handed out at {moment}, and there was a barrier at {earlier}"


def test_after_a_drain_each_window_still_comes_once_and_no_row_is_late_or_lost():
    started = testing.run(by_clock())
    started.epoch([{"user": "a", "amount": 1}], now=at(3))
    first = started.epoch(now=at(4), drain=True)
    started.epoch([{"user": "a", "amount": 2}], now=at(5))
    second = started.epoch(now=at(20))
    assert first["window_start"].to_list() == [at(0)] and second["window_start"].to_list() == [at(10)]
    assert first["total"].to_list() == [1] and second["total"].to_list() == [2]


@pytest.mark.long
def test_what_reads_such_windows_goes_by_their_end_and_has_no_late_rows():
    clicked = by_clock()
    minutes = window(
        "minutes",
        clicked,
        key="user",
        on="window_end",
        every="1m",
        rows=agg.sum("rows"),
        sink=delta.append("minutes"),
        late=delta.append("minutes_late"),
    )
    assert is_timed(minutes) and is_clocked(minutes) and not is_timed(CLICKS)
    pipeline = Pipeline("clicks", (clicked, minutes))
    started, chance, seconds = testing.run_pipeline(pipeline, schema=MOMENTS), random.Random(3), 0
    number = 0
    for _ in range(30):
        seconds += chance.choice([1, 4, 9, 25])
        rows = [{"user": "a", "amount": 1}] * chance.randrange(3)
        number += len(rows)
        started.epoch(rows, now=at(seconds))
    started.epoch(drain=True, now=at(seconds))
    minutely = started.tables["minutes"]
    assert minutely["rows"].sum() == number and minutely["window_start"].is_unique().all()
    assert not len(started.tables["minutes_late"])
    by_end = started.tables["clicked"].group_by(pl.col("window_end").dt.truncate("1m")).agg(pl.col("rows").sum())
    assert sorted(by_end.rows()) == sorted(minutely.select("window_start", "rows").rows())


def test_what_makes_no_sense_by_processing_time_is_refused():
    for options in ({"lateness": "1s"}, {"late": delta.append("late")}):
        with pytest.raises(PipelineError, match="no row is late"):
            by_clock(**options)
    with pytest.raises(PipelineError, match="needs an order"):
        window("w", CLICKS, key="user", on=None, every="1s", first=agg.first("amount"))
    payments = files("{landing}/p/*.parquet", name="payments", event_time="at")
    with pytest.raises(PipelineError, match="processing time, which no source says"):
        join("j", by_clock(), payments, on="user", within=("0s", "1s"))
    join("j", side(by_clock(), time="window_end"), payments, on="user", within=("0s", "1s"))
    rows = [{"user": "a", "amount": 1}]
    with pytest.raises(PipelineError, match="clicked nothing can be compared"):
        testing.assert_slicing_does_not_matter(by_clock(), rows)
    beside = window("beside", CLICKS, key="user", on=None, every="1s", sink=delta.append("beside"), n=agg.count())
    with pytest.raises(PipelineError, match="both nothing can be compared"):
        testing.assert_slicing_does_not_matter(Pipeline("both", (by_clock(), beside)), rows)


class Seen(State):
    """When a key was seen is up to its timer."""

    rows: int = 0


def remind(timers: pl.DataFrame, state, epoch) -> pl.DataFrame:
    """A row for each timer that has fired."""
    return timers.select("user", pl.lit(epoch.now).dt.replace_time_zone(None).dt.epoch("us").alias("at"))


@stage(
    "reminders",
    source=CLICKS,
    key="user",
    state=Seen,
    on_timer=remind,
    sink=delta.append("reminders"),
)
def reminders(rows: pl.DataFrame, state, epoch) -> pl.DataFrame:
    """Each row sets a timer."""
    state.timers.set(rows.select("user"), after="1500ms")
    return rows.select("user", pl.lit(0, pl.Int64).alias("at")).head(0)


SECONDS = Pipeline("seconds", (by_clock(every="1s"), reminders), max_parallelism=4)


def site(root, pipeline: Pipeline = SECONDS, **options: str) -> Site:
    site = Site(root, {"WEIR_RUN__POLL_SECONDS": "0.02", **options}, pipeline, "tests.weir.run.test_processing_time")
    site.landing.mkdir(parents=True, exist_ok=True)
    return site


def land(here: Site, name: str, users: list[str]) -> None:
    pq.write_table(
        pa.table({"user": users, "amount": [1] * len(users), "at": [START] * len(users)}, TIMED),
        here.landing / f".{name}",
    )
    (here.landing / f".{name}").rename(here.landing / f"{name}.parquet")


def test_a_run_without_input_begins_an_epoch_when_a_window_or_timer_is_due_and_no_other(tmp_path):
    here = site(tmp_path)
    land(here, "1", ["a", "b", "a"])
    reports = list(run(SECONDS, here.settings, RunOptions(interval=0.05, max_seconds=4.0), InMemoryExecutor()))
    why = [report.checkpoint.reason for report in reports]
    assert here.table("clicked")["rows"].to_list() and sorted(here.table("clicked")["rows"]) == [1, 2]
    assert sorted(here.table("reminders")["user"]) == ["a", "b"]
    assert len(reports) in (2, 3) and all("are due by processing time" in text for text in why[1:]), why
    window_closed, _, fired = (row.epoch_now for row in [reports[1].checkpoint, *[reports[-1].checkpoint] * 2])
    end = here.table("clicked")["window_end"][0]
    assert timedelta(0) <= window_closed - end < timedelta(seconds=1)
    since = fired - reports[0].checkpoint.epoch_now
    assert timedelta(seconds=1.5) <= since < timedelta(seconds=2.5)
    assert not any(stats.due for stats in reports[-1].checkpoint.operators.values())


class Slow(InMemoryExecutor):
    """Stages take a while."""

    def run(self, *args, **options):
        time.sleep(0.3)
        return super().run(*args, **options)


@pytest.mark.long
def test_an_epoch_in_flight_that_has_reached_what_is_due_is_the_only_one(tmp_path):
    alone = Pipeline("alone", (by_clock(every="1s"),), max_parallelism=4)
    here = site(tmp_path, alone, WEIR_CHECKPOINTS__MAX_CONCURRENT="3")
    land(here, "1", ["a"])
    options = RunOptions(interval=0.02, max_seconds=2.2)
    first, second = run(alone, here.settings, options, Slow())
    assert first.checkpoint.rows_read == 1 and second.checkpoint.operators["clicked"].rows_out == 1


@pytest.mark.long
def test_who_looks_at_a_pipeline_without_a_run_sees_that_windows_are_due_and_the_next_run_closes_them(tmp_path):
    visits = Pipeline("visits", (by_clock(gap="3s"),), max_parallelism=4)
    here, once = site(tmp_path, visits), RunOptions(until_caught_up=True)
    land(here, "1", ["a"])
    (first,) = run(visits, here.settings, once, InMemoryExecutor())
    assert not observe(visits, here.settings).timers_due
    assert first.checkpoint.operators["clicked"].due and not first.checkpoint.watermarks
    until(lambda: observe(visits, here.settings).timers_due == ("clicked",))
    (second,) = run(visits, here.settings, once, InMemoryExecutor())
    assert second.checkpoint.rows_read == 0 and len(here.table("clicked")) == 1
    assert not list(run(visits, here.settings, once, InMemoryExecutor())), "nothing is due any more"
    assert not observe(visits, here.settings).timers_due


def test_windows_by_processing_time_do_not_become_such_by_event_time_and_belong_to_no_day(tmp_path):
    here = site(tmp_path)
    land(here, "1", ["a"])
    list(run(SECONDS, here.settings, RunOptions(until_caught_up=True), InMemoryExecutor()))
    timed = replace(CLICKS, event_time="at")
    other = window(
        "clicked", timed, key="user", on="at", every="1s", sink=delta.append("clicked"),
        rows=agg.count(), total=agg.sum("amount"), users=agg.count_distinct("amount"),
    )  # fmt: skip
    changed = Pipeline("seconds", (other, with_input(reminders, timed)), max_parallelism=4)
    findings = [finding for finding in plan(changed, here.settings).findings if finding.verdict.stops]
    assert any("1 s by processing time" in finding.what for finding in findings), findings
    columns = pa.schema([("user", pa.string()), ("window_start", pa.timestamp("us", tz="UTC"))])
    assert SECONDS.event_time_of("clicked", columns) is None and changed.event_time_of("clicked", columns)


@pytest.mark.long
def test_windows_by_processing_time_lose_nothing_where_rows_wait_and_on_branches(tmp_path):
    unique = deduplicate("unique", CLICKS, key="id")
    counted, visits = (
        window(uid, unique, key="user", on=None, rows=agg.count(), sink=delta.append(uid), **shape)
        for uid, shape in (("counted", {"every": "1s"}), ("visits", {"gap": "1s"}))
    )
    pipeline = Pipeline("clicks", (unique, counted, visits), max_parallelism=4)
    options = {
        "CHECKPOINTS__ALIGNMENT_TIMEOUT_SECONDS": "0",
        "CHECKPOINTS__NUM_RETAINED": "200",
        "EPOCH__MAX_FILES": "1",
    }
    here = site(tmp_path, pipeline, **{f"WEIR_{name}": value for name, value in options.items()})
    few, once = InMemoryExecutor(batch_rows=20), RunOptions(until_caught_up=True, drain=True)

    def given(number: int) -> None:
        rows = pa.table({"id": range(number * 100, number * 100 + 100), "user": [f"u{n % 9}" for n in range(100)]})
        pq.write_table(rows, here.landing / f".{number}")
        (here.landing / f".{number}").rename(here.landing / f"{number}.parquet")

    def counts() -> list[int]:
        return [here.table(uid)["rows"].sum() for uid in ("counted", "visits")]

    for number in range(3):
        given(number)
    history = list(run(pipeline, here.settings, once, few))
    assert any(report.checkpoint.operators["counted"].waiting for report in history), "nothing has waited"
    assert counts() == [300, 300] and not any(
        stats.rows_late for report in history for stats in report.checkpoint.operators.values()
    )
    assert not here.table("counted").duplicated(["user", "window_start"]).any(), "each window comes once"
    forks.fork(pipeline, here.settings, "again", int(history[2].checkpoint.id), "to see")
    list(run(forks.branched(pipeline, here.settings, "again"), here.settings, once, few))
    difference = branch_diff.diff(pipeline, here.settings, "again").to_dict()
    assert difference["tables"]["counted"]["left_out"] == ["window_start", "window_end"]
    promotion.promote(pipeline, here.settings, "again", executor=few)
    assert counts() == [300, 300]
    given(3)
    list(run(pipeline, here.settings, once, few))
    assert counts() == [400, 400]
