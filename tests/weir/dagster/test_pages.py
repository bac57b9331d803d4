"""A real webserver and a real daemon, with a person at the pages: a headless Chromium, driven by playwright.

Nobody calls Weir here: sensors start runs, the tests land files, kill a coordinator, click. What comes of it is
compared with pandas. Both are in one file, so that they run one after the other: each keeps a small machine busy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipelines import flights
from state_ops.coordination import lease
from state_ops.records.checkpoint import PROMOTION
from tests.replay import flights as replay
from tests.weir.dagster.dagster_site import Site, pictures, shows
from weir.inspection import state_reader
from weir.local import dagster_home
from weir.settings.configuration import PROJECT

BACKFILL = {"start": "2013-01-01", "keep": 8, "promote": "automatic"}
BACKFILLED = {"WEIR_PIPELINES__FLIGHTS__BACKFILL": json.dumps(BACKFILL), "WEIR_EPOCH__MAX_FILES": "1"}
BACKFILL_RUN = "__ASSET_JOB"  # as Dagster calls runs that the backfill page starts
WRONG = (4, 5, 6)


def first_epochs(site: Site, page, days: Path, shot) -> None:
    """Six days land, and what becomes of them is at the pages; nobody has turned a sensor on."""
    site.land(days, 6)
    names = ("landing", "aircraft_legs", "airport_hourly", "checkpoint", "restore_drill")
    shows(page, "/locations/weir/asset-groups/flights/lineage", *names)
    site.until(site.read_all, "the first checkpoints")

    # Epochs appear on the checkpoint's page as they complete.
    shows(page, "/assets/flights/checkpoint?view=events", "ms to commit", "Observed in run")
    shot("epochs")

    # The tick says what it did and why.
    shows(page, "/locations/weir/sensors/flights_checkpoint_sensor", "flights_restore_job", "requested")
    shot("sensor")


@pytest.mark.timeout(900)
def test_the_first_epochs_are_at_the_pages(site, page, days):
    first_epochs(site, page, days, pictures(page))
    site.until(lambda: lease.read(site.storage).stopped, "the end of the run")
    replayed(site)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_day_at_the_pages(site, page, days):
    shot = pictures(page)
    first_epochs(site, page, days, shot)

    # A coordinator is killed in the middle of its work. Nobody does anything.
    site.until(lambda: not lease.alive(lease.read(site.storage)), "the end of the first run")
    site.land(days, 24)
    before = site.registry.head().id
    site.until(lambda: site.registry.head().id > before and lease.alive(lease.read(site.storage)), "the second run")
    killed = lease.read(site.storage)
    os.kill(killed.pid, signal.SIGKILL)
    assert not site.read_all(), "it was to be killed in the middle"
    site.until(site.read_all, "what the restore resumed")
    site.until(lambda: lease.read(site.storage).stopped, "its end")
    by_job = {run["jobName"]: run for run in reversed(site.runs())}
    assert next(run for run in site.runs() if run["runId"] == killed.run_id)["status"] == "FAILURE"
    restored = by_job["flights_restore_job"]
    assert f"generation: {killed.generation}" in restored["runConfigYaml"]
    assert {tag["key"] for tag in restored["tags"]} >= {"weir/pipeline", "weir/reason"}
    assert [run["jobName"] for run in site.runs()].count("flights_restore_job") == 1
    site.until(lambda: site.runs()[0]["status"] == "SUCCESS", "the end of the restore")

    # Its checks are green.
    shows(page, "/assets/flights/restore_drill?view=checks&checkDetail=restorable", "a run went on from it")
    shows(page, "/assets/flights/checkpoint?view=checks", "last_run", "Passed")
    shot("checks")
    shows(page, "/assets/flights/checkpoint?view=events", "Materialized in run")
    shot("history")

    # A person launches a job.
    page.goto("/locations/weir/jobs/flights_retention_and_fsck/playground")
    page.get_by_role("button", name="Launch Run").click()
    site.until(
        lambda: any(
            run["jobName"] == "flights_retention_and_fsck" and run["status"] == "SUCCESS" for run in site.runs()
        ),
        "the job that was launched",
    )

    # A day with an impossible delay lands: the gate holds, the check is red, the sensor waits for a person.
    exact = site.registry.head().id
    bad = days / "flights-2013-12-31.parquet"
    table = pq.read_table(bad)
    column = table.column_names.index("dep_delay")
    delays = table.column("dep_delay").to_pylist()
    delays[next(i for i, value in enumerate(delays) if value is not None)] = 99_999.0
    pq.write_table(table.set_column(column, table.schema.field(column), [delays]), site.landing / ".bad")
    (site.landing / ".bad").rename(site.landing / "flights-2013-12-31.parquet")
    site.until(
        lambda: any(run["status"] == "FAILURE" and run["runId"] != killed.run_id for run in site.runs()), "the hold"
    )
    shows(page, "/assets/flights/tables/aircraft_legs?view=checks", "column_values_to_be_between_dep_delay", "Failed")
    shot("gate")
    assert site.registry.head().id == exact
    site.until(lambda: site.says("held: A quality gate"), "the tick that waits")

    # The person takes the file away, and the sensor goes on by itself.
    (site.landing / "flights-2013-12-31.parquet").unlink()
    site.land(days, 180)  # so many that it is not at its end before a slow browser has shown its page
    site.until(lambda: lease.alive(lease.read(site.storage)) and site.registry.head().id > exact, "its first epoch")

    # In the middle of it, the person cancels the run: lease and pool are free, and sensors begin nothing.
    page.goto(f"/runs/{lease.read(site.storage).run_id}")
    page.get_by_role("button", name="Terminate").first.click()
    page.wait_for_timeout(1000)
    shot("terminate")
    page.get_by_role("dialog").get_by_role("button", name="Terminate", exact=False).last.click()
    site.until(lambda: lease.read(site.storage).stopped, "the end of what was cancelled")
    assert not site.read_all(), "it was to be cancelled in the middle"
    site.until(lambda: site.says("cancelled by a person"), "the tick that leaves it alone")
    assert site.runs()[0]["status"] == "CANCELED"

    # `weir resume`, and it goes on by itself to the exact end.
    subprocess.run([dagster_home.program("weir"), "resume", "flights"], env=site.environment, cwd=PROJECT, check=True)
    site.until(site.read_all, "the rest")
    site.until(lambda: lease.read(site.storage).stopped, "the end of the rest")
    replayed(site)


def replayed(site: Site) -> None:
    """The rows that were handed out are those of an independent replay of the days that have landed."""
    wanted = replay.expected(len(list(site.landing.glob("*.parquet")))).legs
    actual = replay.read_delta(site.root / "storage" / "flights" / "tables" / "aircraft_legs")
    replay.assert_same(actual, wanted, replay.LEG_KEY, "aircraft_legs")


def spoil(site: Site, days: Path) -> None:
    """The source delivers three days with every delay an hour too long."""
    for number in WRONG:
        day = days / f"flights-2013-01-{number:02}.parquet"
        table = pq.read_table(day)
        for name in ("dep_delay", "arr_delay"):
            at = table.schema.get_field_index(name)
            later = pc.add(table.column(name), pa.scalar(60, table.schema.field(name).type))
            table = table.set_column(at, table.schema.field(name), later)
        arrive(site, table, day.name)


def correct(site: Site, days: Path) -> None:
    """It delivers them again, under their own names."""
    for number in WRONG:
        name = f"flights-2013-01-{number:02}.parquet"
        arrive(site, pq.read_table(days / name), name)


def arrive(site: Site, table: pa.Table, name: str) -> None:
    pq.write_table(table, site.landing / f".{name}")
    (site.landing / f".{name}").rename(site.landing / name)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", [BACKFILLED], ids=["backfilled"])
def test_days_are_backfilled_at_the_partitions_page(site, page, days):
    shot = pictures(page)

    site.land(days, 3)
    spoil(site, days)
    site.land(days, 2)
    site.until(site.read_all, "production's epochs")
    site.until(lambda: lease.read(site.storage).stopped, "the end of its run")
    assert site.registry.head().id == 8
    wrong = replay.read_delta(site.root / "storage" / "flights" / "tables" / "aircraft_legs")

    correct(site, days)
    page.goto("/assets/flights/backfill?view=partitions")
    days_of = page.get_by_placeholder("ex: 2013").first
    days_of.fill("[2013-01-04...2013-01-06]")
    days_of.press("Enter")
    page.get_by_role("button", name="Materialize", exact=False).first.click()
    launch = page.get_by_role("button", name="Launch backfill")
    confirm = page.get_by_role("button", name="Confirm")  # while the run's own materializations are not shown yet
    launch.or_(confirm).first.wait_for()
    if confirm.count():
        confirm.click()
    launch.wait_for()
    shot("backfill-dialog")
    launch.click()
    site.until(
        lambda: any(run["jobName"] == BACKFILL_RUN for run in site.runs()),
        "the backfill's run",
    )
    site.land(days, 2)  # production goes on meanwhile
    site.until(lambda: any(row.kind == PROMOTION for row in site.registry.checkpoints()), "the promotion")
    site.land(days, 1)
    site.until(site.read_all, "what production reads afterwards")
    site.until(lambda: lease.read(site.storage).stopped, "its end")

    shows(page, "/assets/flights/backfill?view=checks", "production_is_the_same", "Passed")
    shows(page, "/assets/flights/backfill?view=partitions&partition=2013-01-05", "2013-01-05", "Materialized")
    shot("backfill-partitions")
    shows(page, "/assets/flights/backfill?view=events", "rows changed")
    shot("backfill-report")
    (run,) = [run for run in site.runs() if run["jobName"] == BACKFILL_RUN]
    assert run["status"] == "SUCCESS", "one run for all three days"

    expected = replay.expected(11)
    legs = replay.read_delta(site.root / "storage" / "flights" / "tables" / "aircraft_legs")
    replay.assert_same(legs, expected.legs, replay.LEG_KEY, "aircraft_legs")
    state = pa.concat_tables(list(state_reader.scan(flights.pipeline, site.settings, "aircraft_rotation")))
    replay.assert_same(state.to_pandas(use_threads=False), expected.aircraft, replay.AIRCRAFT_KEY, "the state")
    assert wrong["dep_delay"].mean() > legs["dep_delay"].mean() + 10, "it had been wrong"
