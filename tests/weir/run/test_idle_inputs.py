"""Inputs that have fallen silent hold no rows of a stage with several inputs, and each begins one epoch for that."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recovery.harness import Site
from weir import Pipeline, agg, as_of, delta, files, join, side, testing, union, window
from weir.epoch import scheduler
from weir.execution.in_process import InMemoryExecutor
from weir.ownership.backlog import timers_due
from weir.run.run import RunOptions, run

START = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = pa.schema([("k", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])
SINK = delta.append("out")
NOW = datetime(2026, 6, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def source(name: str, idle_after: str | timedelta | None = "5m"):
    return files(f"{{landing}}/{name}/*.parquet", name=name, event_time="at", idle_after=idle_after)


def held(a="1d", b="5m", **more):
    return join("held", source("a", a), source("b", b), on="k", within=("0s", "10s"), how="left", **more)


def rows(*moments: float, key: int = 1) -> list[dict]:
    return [{"k": key, "at": at(seconds)} for seconds in moments]


def seconds_of(frame: pl.DataFrame, column: str = "at") -> list[float]:
    if frame.is_empty():
        return []
    return sorted(((frame[column] - START).dt.total_milliseconds() / 1000).to_list())


def windows(read, **shape):
    return window("counted", read, key="k", on="at", n=agg.count(), sink=SINK, **(shape or {"every": "10s"}))


def of(name: str):
    """The stages of a pipeline, and the column with a time of its rows."""
    a, b, c = source("a", "1d"), source("b"), source("c")
    match name:
        case "join":
            return (held(sink=SINK),), "at"
        case "joins behind each other":
            first = join("first", a, c, on="k", within=("0s", "1s"), how="left")
            return (
                first,
                join(
                    "held", side(first, time="at"), b, on="k", within=("0s", "10s"), how="left", suffix="_b", sink=SINK
                ),
            ), "at"
        case "as of":
            return (as_of("held", a, b, on="k", sink=SINK),), "at"
        case "windows behind a union":
            both = union("all", a, b)
            return (both, windows(both)), "window_start"
        case "windows behind a union of three":
            three = union("all", a, b, c)
            return (three, windows(three)), "window_start"
        case "windows behind a join":
            joined = held()
            return (joined, windows(joined)), "window_start"
        case "sessions behind a union":
            both = union("all", a, b)
            return (both, windows(both, gap="10s")), "window_start"
    raise AssertionError(name)


NAMES = [
    "join", "joins behind each other", "as of", "windows behind a union", "windows behind a union of three",
    "windows behind a join", "sessions behind a union",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_due_come_once_the_slower_inputs_are_idle(name):
    stages, column = of(name)
    given = {"a": rows(8), "b": rows(5, key=2), "c": rows(5, key=3)}
    names = [one.name for one in Pipeline("idle", stages).sources]
    played = testing.run_pipeline(Pipeline("idle", stages))
    played.epoch({name: given[name] for name in names}, now=NOW)
    played.epoch({"a": rows(200)}, now=NOW + timedelta(minutes=4))
    assert not seconds_of(played.tables["out"].filter(k=1), column)
    played.epoch(now=NOW + timedelta(minutes=5))
    assert len(seconds_of(played.tables["out"].filter(k=1), column)) == 1


def test_when_all_inputs_are_idle_event_time_goes_on_to_the_newest_of_them():
    played = testing.run_pipeline(Pipeline("idle", (held(sink=SINK),)))
    played.epoch({"a": rows(0, 80), "b": rows(100, key=2)}, now=NOW)
    played.epoch(now=NOW + timedelta(minutes=5))
    assert seconds_of(played.tables["out"]) == [0], "as far as the input that counts"
    played.epoch(now=NOW + timedelta(days=1))
    assert seconds_of(played.tables["out"]) == [0, 80]


def land(site: Site, name: str, number: int, moments: list[dict]) -> None:
    folder = site.landing / name
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(moments, SCHEMA), folder / f".{number}")
    (folder / f".{number}").rename(folder / f"{number}.parquet")


def of_site(tmp_path, pipeline: Pipeline) -> Site:
    return Site(tmp_path, {"WEIR_RUN__POLL_SECONDS": "0.02"}, pipeline, "tests.weir.run.test_idle_inputs")


def went(site: Site, linger: float = 0.0) -> list:
    options = RunOptions(interval=0.05, until_caught_up=True, linger_seconds=linger)  # as a run by Dagster
    return list(run(site.pipeline, site.settings, options, InMemoryExecutor()))


def out(site: Site) -> list[float]:
    return seconds_of(pl.read_delta(str(site.storage / "tables" / "out")))


def test_a_run_begins_one_epoch_for_an_input_that_becomes_idle_and_no_more(tmp_path):
    site = of_site(tmp_path, Pipeline("idle", (held(b=timedelta(seconds=0.3), sink=SINK),)))
    land(site, "a", 1, rows(0, 100))
    land(site, "b", 1, rows(5, key=2))
    _, idle = went(site, linger=1.0)
    assert idle.checkpoint.reason == "windows, timers or an idle input of held are due by processing time"
    assert out(site) == [0] and not went(site)


def test_a_sensor_sees_from_the_checkpoint_when_an_input_becomes_idle(tmp_path):
    site = of_site(tmp_path, Pipeline("idle", (held(sink=SINK),)))
    land(site, "a", 1, rows(0, 100))
    land(site, "b", 1, rows(5, key=2))
    (report,) = went(site)
    head, now = report.checkpoint, report.checkpoint.epoch_now
    assert timers_due(site.pipeline, head, now + timedelta(minutes=4)) == ()
    assert timers_due(site.pipeline, head, now + timedelta(minutes=5)) == ("held",)
    without = Pipeline("idle", (union("all", *site.pipeline.sources),))
    assert timers_due(without, head, now + timedelta(minutes=5)) == (), "no run could do anything for it"


def test_a_run_that_begins_after_an_input_has_become_idle_begins_the_epoch_that_sensors_ask_for(tmp_path, monkeypatch):
    site = of_site(tmp_path, Pipeline("idle", (held(sink=SINK),)))
    land(site, "a", 1, rows(0, 100))
    land(site, "b", 1, rows(5, key=2))
    went(site)
    later = datetime.now(UTC) + timedelta(minutes=6)
    monkeypatch.setattr(scheduler, "datetime", SimpleNamespace(now=lambda _: later))
    (idle,) = went(site)
    assert out(site) == [0] and not went(site)
    assert not timers_due(site.pipeline, idle.checkpoint, later + timedelta(hours=1)), "no sensor asks for another run"


def test_no_epoch_is_begun_for_event_time_that_nobody_waits_for(tmp_path):
    both = union("all", source("a", timedelta(seconds=0.1)), source("b", timedelta(seconds=0.1)), sink=SINK)
    site = of_site(tmp_path, Pipeline("idle", (both,)))
    land(site, "a", 1, rows(0, 100))
    land(site, "b", 1, rows(5, key=2))
    assert len(went(site, linger=0.5)) == 1


def test_an_input_of_which_more_waits_is_not_idle(tmp_path):
    inputs = (source("a", timedelta(days=1)), source("b", timedelta(0)))
    joined = join("held", *inputs, on="k", within=("0s", "10s"), how="left", sink=SINK)
    site = of_site(tmp_path, Pipeline("idle", (joined,)))
    site = replace(site, options=site.options | {"WEIR_EPOCH__MAX_FILES": "1"})
    land(site, "a", 1, rows(0, 100))
    for number in range(3):
        land(site, "b", number, rows(number, key=2))
    watermarks = [seconds_of_micros(report.checkpoint.watermarks["held"]) for report in went(site)]
    assert watermarks == [0, 1, 100]


def seconds_of_micros(moment: int) -> float:
    return (datetime.fromtimestamp(moment / 1e6, UTC) - START).total_seconds()
